"""What a user holds already while a request of the same user waits."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gpu_launch.broker import holdings, models
from gpu_launch.broker.client import BrokerClient
from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.errors import BrokerError

LARGE = {"uuid": "GPU-1", "node": "rig1", "model": "RTX 5090", "memory_mib": 32_607}
ANY = GpuRequest()
SMALL = {"uuid": "GPU-2", "node": "rig2", "model": "RTX 5070", "memory_mib": 12_227}


def job(run: str, *gpus: dict[str, Any], state: str = "running", owner: str = "ada", name: str = "") -> models.Job:
    """Return a job with one worker."""
    worker = {"index": 0, "node": "rig1", "gpus": gpus, "state": "running"}
    return models.parse_job(
        {"id": f"j-{run}", "run_id": run, "state": state, "version": 1, "workers": [worker], "owner": owner, "name": name}
    )  # fmt: skip


def lease(
    server: str, *gpus: dict[str, Any], purpose: str = "notebook", owner: str = "ada", state: str = "active"
) -> models.Lease:
    """Return a lease."""
    return models.parse_lease({"owner": owner, "purpose": purpose, "subject": server, "state": state, "gpus": gpus})


WAITING = job("run-new", state="waiting")


def find(
    jobs: list[models.Job], leases: list[models.Lease], demand: GpuRequest = ANY, server: str | None = ""
) -> list[str]:
    """Return the names of what is found."""
    found = holdings.find_holdings([*jobs, WAITING], leases, [WAITING], demand, server=server)
    return [holding.run_id or f"notebook {holding.name}" for holding in found]


def test_own_jobs_and_other_notebooks_are_found() -> None:
    """Not the notebook that asks, other users' (administrators see them), what waits or ends, and what has no GPU."""
    jobs = [job("run-a", LARGE), job("run-b", state="running"), job("run-c", LARGE, state="stopping"),
            job("run-d", LARGE, owner="ben"), job("run-e", SMALL, state="starting"),
            job("run-f", LARGE, state="waiting")]  # fmt: skip
    leases = [lease("", LARGE), lease("second", SMALL), lease("cpu"), lease("x", SMALL, owner="ben"),
              lease("j-run-a", LARGE, purpose="job"), lease("y", SMALL, state="releasing")]  # fmt: skip
    assert find(jobs, leases) == ["notebook second", "run-a", "run-e"]
    assert find(jobs, leases, server=None) == ["notebook ", "notebook second", "run-a", "run-e"]


def test_only_gpus_of_the_requested_kind_count() -> None:
    """Freeing others would not help."""
    jobs, leases = [job("run-a", LARGE), job("run-b", SMALL)], [lease("second", SMALL)]
    assert find(jobs, leases, GpuRequest(models=("RTX 5090",))) == ["run-a"]
    assert find(jobs, leases, GpuRequest(least_memory_mib=24 * 1024)) == ["run-a"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ipp.Cluster", "ipp.Cluster run-a (rig1 2 × RTX 5090): cluster.stop_cluster_sync() in its notebook, or "),
        ("%gpu_ranks", "%gpu_ranks run-a (rig1 2 × RTX 5090): %gpu_ranks --stop in its notebook, or "),
        ("%gpu_launch", "%gpu_launch run-a (rig1 2 × RTX 5090): "),
        ("train.py", "train.py run-a (rig1 2 × RTX 5090): "),
        ("", "launch run-a (rig1 2 × RTX 5090): "),
    ],
)
def test_each_kind_has_the_command_that_frees_it(name: str, text: str) -> None:
    """An older notebook gives its jobs no name."""
    found = holdings.find_holdings([job("run-a", LARGE, LARGE, name=name)], [], [WAITING], GpuRequest(), server="")
    assert holdings.format_holdings(found, cancel="%gpu_cancel") == [
        "you hold GPUs yourself that this request could use:",
        f"  {text}%gpu_cancel run-a",
    ]
    assert holdings.format_holdings((), cancel="%gpu_cancel") == []


def test_a_broker_without_an_answer_does_not_end_the_launch() -> None:
    """The text is a help alone."""

    class SilentBroker:
        def list_jobs(self) -> list[models.Job]:
            raise BrokerError("it does not answer")

    assert holdings.list_holdings(cast("BrokerClient", SilentBroker()), [WAITING], GpuRequest(), server="") == ()
