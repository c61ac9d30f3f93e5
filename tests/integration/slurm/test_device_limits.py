"""Slurm limits jobs to their GPUs, CPUs and memory with the cgroup.conf that `gpuhub slurm init` writes.

The GPUs are device files of the kernel that any user may open otherwise.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator

import pytest

from tests.support.product import wait_for
from tests.support.slurm.site import SlurmSite, slurm_site

pytestmark = [pytest.mark.slurm, pytest.mark.root]
#: /dev/zero, /dev/full and /dev/random: other files with their numbers.
DEVICES = (((1, 5), (1, 7), (1, 8)),)
#: Writes into a file of the home what happens when each GPU's file is opened, and which CPUs there are.
LOOK = """
import errno, json, os, sys
opened = []
for path in sys.argv[2:]:
    try:
        os.close(os.open(path, os.O_RDONLY))
        opened.append(0)
    except OSError as error:
        opened.append(error.errno)
found = {"opened": opened, "gpus": os.environ.get("SLURM_STEP_GPUS") or os.environ.get("SLURM_JOB_GPUS", ""), "cpus": len(os.sched_getaffinity(0))}
with open(sys.argv[1] + ".new", "w") as file:
    json.dump(found, file)
os.rename(sys.argv[1] + ".new", sys.argv[1])
"""


@pytest.fixture(scope="module")
def site() -> Iterator[SlurmSite]:
    with slurm_site(port=27700, nodes=(("rtx5090",) * 3,), devices=DEVICES, cpus=2, memory_mib=4000) as running:
        yield running


def look(site: SlurmSite, name: str) -> str:
    """Return a job's command that looks at the GPUs and writes to this file of ada's home."""
    (site.users["ada"].home / "look.py").write_text(LOOK)
    devices = " ".join(str(device) for device in site.files.devices)
    return f"/usr/bin/python3 look.py {name} {devices}"


def read(site: SlurmSite, name: str) -> dict[str, object]:
    """Return what a job has found."""
    file = site.users["ada"].home / name
    wait_for(file.exists, f"{name} is there", 30)
    return dict(json.loads(file.read_text()))


def test_each_job_opens_its_own_gpus_only(site: SlurmSite) -> None:
    """Two jobs at the same time, of which one has two GPUs, and then one that has none."""
    home, end = ("-D", str(site.users["ada"].home), "--mem=50"), "; exec sleep 60"
    jobs = [
        site.submit("ada", *home, f"--gres=gpu:{count}", script=look(site, f"job{count}") + end) for count in (2, 1)
    ]
    found = [read(site, f"job{count}") for count in (2, 1)]
    no = errno.EPERM
    assert [one["opened"] for one in found] == [[0, 0, no], [no, no, 0]]
    assert [one["gpus"] for one in found] == ["0,1", "2"]
    assert [one["cpus"] for one in found] == [1, 1]
    # A further step, such as a terminal's, is in the same limits.
    step = ("srun", f"--jobid={jobs[1]}", "--overlap", "--ntasks=1", "--mem=0", "--quiet", "sh", "-c")
    site.ask(*step, look(site, "step"), user="ada")
    assert read(site, "step")["opened"] == [no, no, 0]
    assert read(site, "step")["gpus"] == "2"
    for job in jobs:
        site.ask("scancel", str(job))
        site.wait_for_state(job, "CANCELLED")
    job = site.submit("ada", *home, script=look(site, "job0"))
    site.wait_for_state(job, "COMPLETED")
    assert read(site, "job0")["opened"] == [no, no, no]


def test_job_that_takes_too_much_memory_ends(site: SlurmSite) -> None:
    fill = "exec /usr/bin/python3 -c 'print(len(bytearray(300 << 20)))'"
    job = site.submit("ada", "--mem=100", script=fill)
    site.wait_for_state(job, "OUT_OF_MEMORY")
    job = site.submit("ada", "--mem=400", script=fill)
    site.wait_for_state(job, "COMPLETED")
