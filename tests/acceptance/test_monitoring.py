"""`make up MONITORING=1`: Prometheus beside the hub, and every query of the dashboards while the closet is in use."""

from __future__ import annotations

import math
import pwd
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from gpuhub.common import secrets
from tests.acceptance.notebook_container import Notebook
from tests.support.closet import practice_closet
from tests.support.hub.browser import Product, User, run_make
from tests.support.monitoring import dashboards
from tests.support.monitoring.processes import Prometheus
from tests.support.product import wait_for

LOOP = """
import time, torch.distributed as dist
dist.init_process_group("gloo")
print("looping", flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def prometheus(product: Product) -> Iterator[Prometheus]:
    """The product with Prometheus, which `make up MONITORING=0` stops again."""
    output = run_make("up", MONITORING="1")
    url = f"http://127.0.0.1:{product.cluster.monitoring.port}"
    assert f"Prometheus on {url}" in output
    yield Prometheus(url)
    run_make("up", MONITORING="0")
    assert "prometheus" not in product.supervisor.states()


@pytest.fixture(scope="module")
def ada(prometheus: Prometheus, product: Product, make_user: Callable[[str], User]) -> Iterator[Notebook]:
    """ada's notebook, whose launch runs on all three nodes."""
    started = Notebook(product, make_user("ada"), "rtx5070")
    started.write("loop.py", LOOP)
    with started.hold_launch("run('loop.py', nnodes=3)", "looping"):
        yield started
    started.stop()


@pytest.fixture(scope="module")
def busy_gpu(ada: Notebook, product: Product) -> Iterator[None]:
    """The RTX 5090 is at work, and idle again afterwards: without a lease its memory would be in use outside gpuhub."""
    idle = practice_closet.read_load(product.paths, "rig1", 0)
    practice_closet.set_load(product.paths, "rig1", 0, utilisation_percent=73, memory_used_mib=20000)
    yield
    practice_closet.set_gpu_load(product.paths, "rig1", 0, idle)


@pytest.fixture(scope="module")
def ben(ada: Notebook, make_user: Callable[[str], User]) -> Iterator[User]:
    """A user who waits for ada's GPU."""
    user = make_user("ben")
    user.open_form()
    user.choose("rtx5070")
    wait_for(lambda: user.cluster()["waiting"] == 1, "ben waits")
    yield user
    user.fetch(f"/hub/api/users/{user.name}/server", "DELETE")


def test_hub_and_broker_are_scraped(prometheus: Prometheus) -> None:
    healthy = {"gpuhub-broker": "up", "gpuhub-hub": "up"}
    wait_for(lambda: prometheus.targets() == healthy, lambda: f"both are up: {prometheus.targets()}")


def test_token_and_data_belong_to_prometheus(prometheus: Prometheus, product: Product) -> None:
    """The token reads the metrics of hub and broker, and nothing else; no process has it in its arguments."""
    owner, folder = pwd.getpwnam("prometheus"), product.paths.prometheus
    for file, mode in ((folder, 0o700), (folder / "token", 0o400), (folder / "prometheus.yml", 0o400)):
        assert (file.stat().st_uid, stat.S_IMODE(file.stat().st_mode)) == (owner.pw_uid, mode)
    token = secrets.read_secret(product.paths, secrets.METRICS_TOKEN)
    headers, broker = {"Authorization": f"token {token}"}, f"{product.address}/services/broker/api/v1"
    paths = {f"{product.address}/hub/metrics": 200, f"{broker}/metrics": 200, f"{broker}/cluster": 403}
    paths |= {f"{product.address}/hub/api/users": 403}
    with httpx.Client(headers=headers, trust_env=False) as client:
        assert {path: client.get(path).status_code for path in paths} == paths
    with httpx.Client(trust_env=False) as client:
        assert client.get(f"{broker}/metrics").status_code == 401
        assert client.get(f"{product.address}/hub/metrics").status_code == 403
    process = Path(f"/proc/{product.supervisor.pid('prometheus')}")
    assert token not in (process / "cmdline").read_text()
    assert f"Uid:\t{owner.pw_uid}\t{owner.pw_uid}" in (process / "status").read_text()


@pytest.mark.backend("builtin")
@pytest.mark.usefixtures("busy_gpu", "ben")
@pytest.mark.parametrize("name", dashboards.NAMES)
def test_every_panel_has_data(prometheus: Prometheus, name: str) -> None:
    """A notebook, a launch over all nodes, a user who waits, and a GPU at work."""
    [job] = wait_for(lambda: prometheus.query("gpuhub_job_start_timestamp_seconds"), "the launch is scraped", 90)
    [gpu] = prometheus.query('gpuhub_lease_gpus{Hostname="rig1", owner="ada"}')
    variables = {"UUID": gpu["metric"]["UUID"], "job": job["metric"]["job_id"]}

    def find_empty() -> list[tuple[str, str]]:
        queries = dashboards.list_queries(name, **variables)
        return [(title, query) for title, query in queries if not has_numbers(prometheus, query)]

    wait_for(lambda: not find_empty(), lambda: f"every panel has data: {find_empty()}", 90, every_s=3)


def has_numbers(prometheus: Prometheus, query: str) -> bool:
    values = [float(series["value"][1]) for series in prometheus.query(query)]
    return bool(values) and not any(math.isnan(value) for value in values)


@pytest.mark.backend("builtin")
def test_labels_join_readings_with_owner_and_job(prometheus: Prometheus, ada: Notebook, ben: User) -> None:
    """What the dashboards show of users is right."""
    held = {
        series["metric"]["owner"]: series["value"][1]
        for series in prometheus.query("sum by (owner) (gpuhub_lease_gpus)")
    }
    assert held == {"ada": "3"}
    waiting = prometheus.query("gpuhub_queue_requests")
    assert [(series["metric"]["owner"], series["value"][1]) for series in waiting] == [("ben", "1")]
    assert len(prometheus.query('gpuhub_gpu_state{state="held"} == 1')) == 3
