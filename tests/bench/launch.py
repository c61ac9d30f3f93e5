"""`%gpu_launch` against bare torchrun in three running containers of the same kind, on the practice closet."""

from __future__ import annotations

import json
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import docker
import httpx

from tests.bench.launch_workload import scripts
from tests.bench.launch_workload.cells import MARK as CELLS_MARK
from tests.bench.launch_workload.kernel import MARK
from tests.bench.product import Product, paired_ratio, print_progress, running

PAIRS = 5
STEP_PAIRS = 5
LINES = 400_000
_KERNEL = Path(__file__).parent / "launch_workload" / "kernel.py"
_CELLS = Path(__file__).parent / "launch_workload" / "cells.py"
CELL_USES = 11
#: The width of a layer and the number of steps: some seconds on two cores.
_STEPS = ("128", "300")


@dataclass
class Kernel:
    """The notebook's kernel, see `launch_workload.kernel`."""

    process: subprocess.Popen[str]

    def run(self, script: str, *arguments: str, **how: Any) -> dict[str, Any]:
        """Launch a script on three nodes and return the kernel's answer; fail with the launch unless it is interrupted."""
        order = {"script": script, "arguments": arguments, "nnodes": 3, **how}
        write(self.process.stdin, json.dumps(order))
        for line in self.process.stdout or ():
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                assert not answer["error"] or answer["interrupt_s"] is not None, answer["error"] + answer["text"]
                return answer
        raise AssertionError("the kernel ended")


def write(stream: IO[str] | None, line: str) -> None:
    """Write one line and flush."""
    assert stream is not None
    stream.write(line + "\n")
    stream.flush()


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield the figures of the group `launch`."""
    with running() as product, ExitStack() as stack:
        clients = {
            node.name: stack.enter_context(closing(docker.DockerClient(base_url=node.docker, timeout=120)))
            for node in product.cluster.nodes
        }
        home = product.paths.state / "homes" / "ada"
        notebook = _start_notebook(product, clients)
        programs = {"bench_kernel.py": _KERNEL.read_text(encoding="utf-8"), "bench_cells.py": _CELLS.read_text("utf-8")}
        for name, text in {**scripts.ALL, **programs}.items():
            (home / name).write_text(text, encoding="utf-8")
        yield from _cells(notebook)
        workers = _start_manual_containers(stack, product, clients, notebook)
        kernel = stack.enter_context(_kernel(product, notebook))
        yield from _hello(kernel, workers)
        yield from _steps(kernel, workers)
        yield from _interrupt(kernel)
        yield from _lines(kernel, workers, home / "bench_flood.txt")


def _cells(notebook: Any) -> Iterator[tuple[str, float, str]]:
    """Measure `%%gpu` cells on another node's GPU, whole cells as a person waits for them."""
    code, output = notebook.exec_run(
        ["python3", "bench_cells.py", "RTX 5070", str(CELL_USES)],
        workdir="/home/ada",
        user=notebook.attrs["Config"]["User"],
    )
    text = output.decode(errors="replace")
    assert code == 0, text
    (line,) = [line for line in text.splitlines() if line.startswith(CELLS_MARK)]
    first, *later = json.loads(line.removeprefix(CELLS_MARK))
    print_progress(f"%%gpu: first {first:.2f} s, then {', '.join(f'{seconds:.3f}' for seconds in later)} s")
    yield "cell.first_use_s", first, "s"
    yield "cell.second_use_s", statistics.median(later), "s"


def _hello(kernel: Kernel, workers: list[tuple[Any, str]]) -> Iterator[tuple[str, float, str]]:
    """Measure whole runs of one all-reduce: the first launch and the next, and torchrun after or before them."""
    rounds = []
    for number in range(PAIRS + 1):
        turns: dict[str, Callable[[], dict[str, Any]]] = {
            "first": partial(kernel.run, "bench_hello.py", fresh=True),
            "again": partial(kernel.run, "bench_hello.py"),
            "cold": partial(_run_torchrun, workers, "bench_hello.py"),
        }
        # Torchrun's turn is last and first by turns; the second launch always follows the first.
        order = ("first", "again", "cold") if number % 2 else ("cold", "first", "again")
        round_results = {name: turns[name]() for name in order}
        print_progress(", ".join(f"{name} {result['seconds']:.2f} s" for name, result in round_results.items()))
        if number:
            rounds.append(round_results)
    seconds = {name: [result[name]["seconds"] for result in rounds] for name in ("first", "again", "cold")}
    yield "launch.cold_torchrun", statistics.median(seconds["cold"]), "s"
    yield "launch.first", statistics.median(seconds["first"]), "s"
    yield "launch.relaunch", statistics.median(seconds["again"]), "s"
    yield "launch.first_over_cold_torchrun", paired_ratio(seconds["first"], seconds["cold"]), "ratio"
    yield "launch.relaunch_over_cold_torchrun", paired_ratio(seconds["again"], seconds["cold"]), "ratio"


def _steps(kernel: Kernel, workers: list[tuple[Any, str]]) -> Iterator[tuple[str, float, str]]:
    """Measure the median step of the same training with both in turns, with every other pair in the other order."""
    ours, theirs = [], []
    for number in range(STEP_PAIRS + 1):
        turns = [lambda: ours.append(_median_ms(kernel.run("bench_steps.py", *_STEPS)["text"]))]
        turns.append(lambda: theirs.append(_median_ms(_run_torchrun(workers, "bench_steps.py", *_STEPS)["text"])))
        for turn in turns if number % 2 else reversed(turns):
            turn()
        print_progress(f"step: gpuhub {ours[-1]:.2f} ms, torchrun {theirs[-1]:.2f} ms")
    yield "launch.step_time_over_torchrun", paired_ratio(ours[1:], theirs[1:]), "ratio"


def _interrupt(kernel: Kernel) -> Iterator[tuple[str, float, str]]:
    """Measure the longest time from SIGINT in the kernel until the launch has returned and all ranks have ended."""
    for name, script in (("interrupt_s", "bench_forever.py"), ("interrupt_ignored_s", "bench_ignoring.py")):
        durations = [kernel.run(script, interrupt_after_s=1.0)["interrupt_s"] for _ in range(PAIRS)]
        print_progress(f"{script} interrupted: {', '.join(f'{seconds:.2f}' for seconds in durations)} s")
        yield f"launch.{name}", max(durations), "s"


def _lines(kernel: Kernel, workers: list[tuple[Any, str]], seconds: Path) -> Iterator[tuple[str, float, str]]:
    """Measure how fast ranks write lines while the notebook follows them, and with torchrun writing them to files."""
    rates, ratios, shares = [], [], []
    for _ in range(3):
        ours = kernel.run("bench_flood.py", str(LINES))
        took = float(seconds.read_text(encoding="utf-8"))
        _run_torchrun(workers, "bench_flood.py", str(LINES), redirect=True)
        rates.append(LINES / took)
        ratios.append(took / float(seconds.read_text(encoding="utf-8")))
        shares.append(ours["cpu_s"] / ours["seconds"])
        print_progress(f"lines: {rates[-1]:.0f} a second and rank, kernel uses {shares[-1]:.2f} of a core")
    yield "launch.lines_per_s", statistics.median(rates), "lines/s"
    yield "launch.lines_time_over_torchrun", statistics.median(ratios), "ratio"
    yield "launch.lines_kernel_cores", statistics.median(shares), "cores"


def _median_ms(text: str) -> float:
    return _value(text, "median_ms")


def _value(text: str, name: str) -> float:
    """Return the number after a name in a rank's output."""
    words = text.split()
    return float(words[words.index(name) + 1])


@contextmanager
def _kernel(product: Product, notebook: Any) -> Iterator[Kernel]:
    """Start a kernel in the notebook's container."""
    node = next(node for node in product.cluster.nodes if node.name == notebook.attrs["Config"]["Hostname"])
    command = [
        "docker",
        "-H",
        node.docker,
        "exec",
        "-i",
        "-w",
        "/home/ada",
        notebook.name,
        "python3",
        "bench_kernel.py",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Kernel(process)
        assert process.stdin is not None
        process.stdin.close()


def _start_notebook(product: Product, clients: dict[str, docker.DockerClient]) -> Any:
    """Start ada's notebook on the RTX 5090 through the hub and return its container."""
    with httpx.Client(base_url=product.address, follow_redirects=True, trust_env=False, timeout=60) as web:
        web.get("/hub/login")
        form = {"username": "ada", "password": product.password, "_xsrf": _xsrf(web)}
        web.post("/hub/login", data=form).raise_for_status()
        headers = {"X-XSRFToken": _xsrf(web), "Content-Type": "application/json"}
        page = web.post("/hub/api/users/ada/server", content=json.dumps({"profile": "rtx5090"}), headers=headers)
        page.raise_for_status()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if web.get("/hub/api/users/ada").json()["servers"].get("", {}).get("ready"):
                label = {"label": "gpuhub.kind=notebook"}
                return clients[product.cluster.nodes[0].name].containers.list(filters=label, ignore_removed=True)[0]
            time.sleep(0.2)
    raise TimeoutError("the notebook does not start")


def _xsrf(web: httpx.Client) -> str:
    """Return the hub's XSRF token: the browser has one for each path."""
    return next(cookie.value or "" for cookie in web.cookies.jar if cookie.name == "_xsrf" and cookie.path == "/hub/")


def _start_manual_containers(
    stack: ExitStack, product: Product, clients: dict[str, docker.DockerClient], notebook: Any
) -> list[tuple[Any, str]]:
    """Start a container on each node in ada's network, as a user without gpuhub would, and return each with its
    address.
    """
    network = next(name for name in notebook.attrs["NetworkSettings"]["Networks"] if "-net-" in name)
    started = []
    for node in product.cluster.nodes:
        home = f"{product.paths.state}/homes/ada"
        container = clients[node.name].containers.run(
            "gpuhub/notebook:latest",
            ["sleep", "infinity"],
            user=notebook.attrs["Config"]["User"],
            volumes={home: {"bind": "/home/ada", "mode": "rw"}},
            working_dir="/home/ada",
            environment={"HOME": "/home/ada", "GLOO_SOCKET_IFNAME": "eth0", **_threads(notebook)},
            network=network,
            cpu_period=notebook.attrs["HostConfig"]["CpuPeriod"],
            cpu_quota=notebook.attrs["HostConfig"]["CpuQuota"],
            shm_size="1g",
            init=True,
            detach=True,
        )
        stack.callback(container.remove, force=True)
        container.reload()
        started.append((container, container.attrs["NetworkSettings"]["Networks"][network]["IPAddress"]))
    return started


def _threads(notebook: Any) -> dict[str, str]:
    """Return the thread settings of gpuhub's containers."""
    pairs = dict(entry.split("=", 1) for entry in notebook.attrs["Config"]["Env"])
    return {name: pairs[name] for name in ("OMP_NUM_THREADS",) if name in pairs}


def _run_torchrun(
    workers: list[tuple[Any, str]], script: str, *arguments: str, redirect: bool = False
) -> dict[str, Any]:
    """Run the script with torchrun, one command in each container; with `redirect` the ranks write to files."""
    texts = [""] * 3
    begin = time.monotonic()

    def run(rank: int) -> None:
        command = [
            "torchrun", "--nnodes", "3", "--node-rank", str(rank), "--nproc-per-node", "1",
            "--master-addr", workers[0][1], "--master-port", "29511", "--local-addr", workers[rank][1],
            *(["--redirects", "1"] if redirect else []), script, *arguments,
        ]  # fmt: skip
        code, output = workers[rank][0].exec_run(command)
        texts[rank] = output.decode(errors="replace")
        assert code == 0, texts[rank]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(texts) or redirect, "torchrun by hand failed"
    return {"seconds": time.monotonic() - begin, "text": "".join(texts)}
