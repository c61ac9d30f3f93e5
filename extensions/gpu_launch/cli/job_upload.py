"""The upload of a job: its working directory and its manifests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu_launch.broker.models import GpuRequest
from gpu_launch.cli import job_array, upload
from gpu_launch.cli.context import Context
from gpu_launch.cli.upload import UploadSet
from gpu_launch.common import job_manifest
from gpu_launch.detached import job_files
from gpu_launch.errors import BrokerError


@dataclass(frozen=True, kw_only=True)
class JobSubmission:
    """A job that is checked and not yet asked for."""

    manifest: job_manifest.JobManifest
    nnodes: int
    least_nnodes: int | None
    nproc_per_node: int
    demand: GpuRequest
    profile: str | None = None
    #: None where nothing of this machine is sent.
    load: UploadSet | None = None
    #: Of the tasks of an array; None for a single job.
    indexes: tuple[int, ...] | None = None


def send(context: Context, job: JobSubmission, run_id: str) -> None:
    """Send the working directory and the manifests to the home on the cluster.

    Raises:
        BrokerError: when they cannot be sent.
    """
    load, folder = job.load, job.manifest.folder
    try:
        if load is not None:
            context.console.print_note(f"gpu-launch: {load_text(load)} to ~/{folder}")
            send_load(context, load, folder)
        elif folder:
            context.transfer.put(folder, lambda tar: None)
        _send_manifests(context, job, run_id)
    except BrokerError as error:
        raise BrokerError(f"The files could not be sent: {error}", status=error.status) from None


def _send_manifests(context: Context, job: JobSubmission, run_id: str) -> None:
    """Send each job's files to its run folder, all in one request."""
    jobs_path = ".gpu_launch/jobs"
    if job.indexes is None:
        files = job_files.build_files(job.manifest)
        context.transfer.put(f"{jobs_path}/{run_id}", lambda tar: upload.write_texts(tar, files))
        return
    manifests = job_array.split_manifest(job.manifest, run_id, job.indexes)
    files = {
        f"{task_run}/{name}": data
        for task_run, manifest in manifests.items()
        for name, data in job_files.build_files(manifest).items()
    }
    context.transfer.put(jobs_path, lambda tar: upload.write_texts(tar, files))


def send_load(context: Context, load: upload.UploadSet, path: str) -> None:
    """Send the files of a folder, with a line of progress on a terminal."""
    sent = 0

    def count(size: int) -> None:
        nonlocal sent
        sent += size
        part = f"{100 * sent // load.size} %" if load.size else "100 %"
        context.console.draw_progress(f"gpu-launch: {part} of {upload.format_size(load.size)} sent")

    def write(tar: Any) -> None:
        nonlocal sent
        sent = 0
        upload.write_tar(tar, load, on_bytes=count)

    context.transfer.put(path, write)
    context.console.clear_progress()


def load_text(load: upload.UploadSet) -> str:
    """Return `sending 12 files, 3.4 MiB`."""
    files = "1 file" if load.files == 1 else f"{load.files} files"
    without = f", without {', '.join(load.excluded)}" if load.excluded else ""
    return f"sending {files}, {upload.format_size(load.size)}{without}"
