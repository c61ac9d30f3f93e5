"""The jobs of `gpuhub validate` as gpu-launch, which runs them in the notebook image, reads them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from gpu_launch.common import job_manifest, run_folder
from gpu_launch.detached import job_files
from gpu_launch.launch.request import check_command
from gpu_launch.options.command import parse_words
from gpu_launch.prediction import figures
from gpuhub.broker_api.schemas.bench import BenchView
from gpuhub.ops.validation import jobs
from gpuhub.ops.validation.jobs import ValidationJob
from tests.support.broker.bench import build_bench


@pytest.mark.parametrize(
    ("program", "arguments"),
    [("single_gpu", ("3.0", ".gpu_launch/jobs/run-1/turns", "0", "2")), ("network", ("1.0",)), ("ddp", ())],
)
def test_files_are_those_of_gpu_launch(program: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Names and settings are the same, the manifest is read, and its script exists in its folder."""
    job = ValidationJob(program=program, arguments=arguments, limit_s=60)
    files = jobs.build_files(job)
    manifest = job_manifest.parse_manifest(files[run_folder.MANIFEST].decode())
    assert job_files.build_files(manifest).keys() <= files.keys()
    assert json.loads(files[run_folder.SETTINGS]) == run_folder.build_settings(is_detached=True)
    run = run_folder.open_run(tmp_path, job.run_id)
    assert tmp_path / manifest.folder == run.root
    run.root.mkdir(parents=True)
    for name, data in files.items():
        (run.root / name).write_bytes(data)
    options = parse_words(list(manifest.words), cell=False)
    assert (options.nproc_per_node, options.arguments) == (1, arguments)
    assert check_command(options, cwd=run.root, home=tmp_path, shared=False) == f"{program}.py"


def test_job_of_the_bench_runs_the_module_of_gpu_launch() -> None:
    """Its folder has no program, and the module exists and takes the file of the result."""
    job = ValidationJob(
        program="gpu_launch.prediction.bench_main", is_module=True, arguments=(jobs.RESULT,), limit_s=60
    )
    files = jobs.build_files(job)
    assert files.keys() == {run_folder.MANIFEST, run_folder.SETTINGS}
    options = parse_words(list(job_manifest.parse_manifest(files[run_folder.MANIFEST].decode()).words), cell=False)
    assert (options.module, options.script, options.arguments) == (True, job.program, ("result.json",))
    assert importlib.util.find_spec(job.program) is not None


def test_both_packages_read_the_same_bench(tmp_path: Path) -> None:
    """What gpu-launch measures is kept by the broker, and what the broker has is read by gpu-launch."""
    given = build_bench()
    bench = figures.parse_bench(given)
    figures.write_json(tmp_path / "result.json", bench)
    kept = BenchView.model_validate_json((tmp_path / "result.json").read_bytes())
    assert kept.model_dump(mode="json") == given
    assert figures.parse_bench(kept.model_dump(mode="json")) == bench


def test_run_ids_are_like_those_of_gpu_launch() -> None:
    """Old run folders are removed by the order of their names."""
    ours, theirs = jobs.new_run_id(), run_folder.new_run_id()
    assert len(ours) == len(theirs)
    assert ours[:12] == theirs[:12]
