"""From the `%gpu_launch` cell to the first rank's first line, against torchrun by hand in three running containers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import docker
import httpx

from tests.bench.product import Product, paired_ratio, running, tell

PAIRS = 5
_HELLO = """
import torch, torch.distributed as dist
print("first line", flush=True)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(total.item(), flush=True)
dist.destroy_process_group()
"""
#: Runs inside the notebook's container, as a cell would: prints the seconds until a rank's line is shown.
_CELL = """
import io, json, os, sys, time
os.chdir(os.path.expanduser("~"))
import gpu_launch
begin = time.monotonic()
seen = []
class Clock(io.TextIOBase):
    def write(self, text):
        if "first line" in text:
            seen.append(time.monotonic() - begin)
        return len(text)
    def flush(self):
        return None
real, sys.stdout = sys.stdout, Clock()
gpu_launch.run("bench_hello.py", [], nnodes=3, nproc_per_node=1)
sys.stdout = real
print(json.dumps({"first": seen[0], "all": time.monotonic() - begin}))
"""


def measure() -> Iterator[tuple[str, float, str]]:
    """Figures of the group `launch`."""
    with running() as product, ExitStack() as stack:
        clients = {
            node.name: stack.enter_context(closing(docker.DockerClient(base_url=node.docker, timeout=120)))
            for node in product.cluster.nodes
        }
        home = product.paths.state / "homes" / "ada"
        notebook = _start_notebook(product, clients)
        (home / "bench_hello.py").write_text(_HELLO, encoding="utf-8")
        workers = _by_hand_containers(stack, product, clients, notebook)
        pairs = []
        for number in range(PAIRS + 1):
            ours = _ours(notebook)
            by_hand = _by_hand(workers)
            tell(f"to the first line: gpuhub {ours['first']:.2f} s, by hand {by_hand['first']:.2f} s")
            tell(f"whole run:         gpuhub {ours['all']:.2f} s, by hand {by_hand['all']:.2f} s")
            if number:
                pairs.append((ours, by_hand))
    for figure, key in (("launch.first_line", "first"), ("launch.whole_run", "all")):
        mine, theirs = [one[key] for one, _ in pairs], [other[key] for _, other in pairs]
        yield figure, sorted(mine)[PAIRS // 2], "s"
        yield f"{figure}_torchrun", sorted(theirs)[PAIRS // 2], "s"
        yield f"{figure}_over_torchrun", paired_ratio(mine, theirs), "ratio"


def _start_notebook(product: Product, clients: dict[str, docker.DockerClient]) -> Any:
    """ada's notebook on the RTX 5090, started through the hub."""
    with httpx.Client(base_url=product.address, follow_redirects=True, trust_env=False, timeout=60) as web:
        page = web.get("/hub/login")
        form = {"username": "ada", "password": product.password, "_xsrf": _xsrf(web)}
        web.post("/hub/login", data=form).raise_for_status()
        headers = {"X-XSRFToken": _xsrf(web), "Content-Type": "application/json"}
        page = web.post("/hub/api/users/ada/server", content=json.dumps({"profile": "rtx5090"}), headers=headers)
        page.raise_for_status()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if web.get("/hub/api/users/ada").json()["servers"].get("", {}).get("ready"):
                label = {"label": "gpuhub.kind=notebook"}
                return clients[product.cluster.nodes[0].name].containers.list(filters=label)[0]
            time.sleep(0.2)
    raise TimeoutError("the notebook does not start")


def _xsrf(web: httpx.Client) -> str:
    """The hub's token: the browser has one for each path."""
    return next(cookie.value or "" for cookie in web.cookies.jar if cookie.name == "_xsrf" and cookie.path == "/hub/")


def _by_hand_containers(
    stack: ExitStack, product: Product, clients: dict[str, docker.DockerClient], notebook: Any
) -> list[tuple[Any, str]]:
    """A running container a node, on ada's own network, with the address there: what somebody would start by hand."""
    network = next(name for name in notebook.attrs["NetworkSettings"]["Networks"] if "-net-" in name)
    found = []
    for node in product.cluster.nodes:
        home = f"{product.paths.state}/homes/ada"
        container = clients[node.name].containers.run(
            "gpuhub/notebook:latest",
            ["sleep", "infinity"],
            user=notebook.attrs["Config"]["User"],
            volumes={home: {"bind": "/home/ada", "mode": "rw"}},
            working_dir="/home/ada",
            environment={"HOME": "/home/ada", "GLOO_SOCKET_IFNAME": "eth0"},
            network=network,
            nano_cpus=notebook.attrs["HostConfig"]["NanoCpus"],
            shm_size="1g",
            init=True,
            detach=True,
        )
        stack.callback(container.remove, force=True)
        container.reload()
        found.append((container, container.attrs["NetworkSettings"]["Networks"][network]["IPAddress"]))
    return found


def _ours(notebook: Any) -> dict[str, float]:
    code, output = notebook.exec_run(["python3", "-c", _CELL], user=notebook.attrs["Config"]["User"])
    text = output.decode(errors="replace")
    assert code == 0, text
    found: dict[str, float] = json.loads(text.splitlines()[-1])
    return found


def _by_hand(workers: list[tuple[Any, str]]) -> dict[str, float]:
    first: list[float] = []
    begin = time.monotonic()

    def run(rank: int) -> None:
        command = [
            "torchrun", "--nnodes", "3", "--node-rank", str(rank), "--nproc-per-node", "1",
            "--master-addr", workers[0][1], "--master-port", "29511", "--local-addr", workers[rank][1], "bench_hello.py",
        ]  # fmt: skip
        _, stream = workers[rank][0].exec_run(command, stream=True)
        for chunk in stream:
            if b"first line" in chunk:
                first.append(time.monotonic() - begin)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(first) == 3, "torchrun by hand failed"
    return {"first": min(first), "all": time.monotonic() - begin}
