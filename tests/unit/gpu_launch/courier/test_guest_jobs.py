"""What is packed for a job on a guest."""

from __future__ import annotations

import io
import tarfile

from gpu_launch.common.job_manifest import JobManifest
from gpu_launch.courier import guest_jobs
from gpu_launch.detached import job_files

RUN = "run-20261129-120000-abcdef"


def test_every_name_of_a_file_is_sent_with_its_content(tmp_path):
    """The job finds a file that has several names under each."""
    run_folder, folder = tmp_path / ".gpu_launch/jobs" / RUN, tmp_path / "gpu-launch/train-1"
    for made in (run_folder, folder):
        made.mkdir(parents=True)
    manifest = JobManifest(name="train.py", words=("train.py",), folder="gpu-launch/train-1")
    for name, data in job_files.build_files(manifest).items():
        (run_folder / name).write_bytes(data)
    (folder / "a.bin").write_bytes(b"data")
    (folder / "b.bin").hardlink_to(folder / "a.bin")
    sink = io.BytesIO()
    guest_jobs.pack_job(tmp_path, RUN, 1 << 20, sink)
    sink.seek(0)
    with tarfile.open(fileobj=sink) as tar:
        contents = {member.name: tar.extractfile(member).read() for member in tar if member.isreg()}
    assert contents["gpu-launch/train-1/a.bin"] == contents["gpu-launch/train-1/b.bin"] == b"data"
