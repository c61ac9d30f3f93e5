"""`python3 -m tests.bench.real_gpus SITE NODES-FILE PAIRS [PART ...]`: prints `NAME VALUE UNIT` lines.

SITE is a folder with gpu_launch's dependencies; NODES-FILE has a line `NAME ADDRESS DOCKER-URL` for each node.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.launch_workload import scripts
from tests.bench.launch_workload.kernel import MARK
from tests.bench.real_gpus.isolation import isolation
from tests.bench.real_gpus.nodes import ROOT, TOKEN, GrantingBroker, Node, parse_nodes

HEAD = "10.78.0.1"
HOME = Path("/home/ada")


class Bench:
    """One kernel on the head node, and a container for torchrun on every node."""

    def __init__(self, nodes: list[Node], *, home: Path, site: str, pairs: int) -> None:
        self.nodes, self.home, self.site, self.pairs = nodes, home, site, pairs
        for node in nodes:
            node.bare_image()
        self.broker = GrantingBroker(nodes, home=home, site=site, address=HEAD)
        by_hand = {f"{name}_SOCKET_IFNAME": "eth0" for name in ("NCCL", "GLOO")}
        self.by_hand = [node.start(["sleep", "infinity"], by_hand, home=home, site=site) for node in nodes]
        environ = os.environ | {
            "HOME": str(home),
            "GPUHUB_BROKER_URL": self.broker.url,
            "JUPYTERHUB_API_TOKEN": TOKEN,
            "GPUHUB_NETWORK_SUBNET": "10.78.0.0/24",
            "GPUHUB_NODE": "head",
            "GPUHUB_KEEP_WORKERS_S": "600",
            "PYTHONPATH": f"{ROOT}/extensions:{site}",
            "IPP_ENABLE_CURVE": "1",
        }
        command = [sys.executable, str(ROOT / "tests/bench/launch_workload/kernel.py")]
        self.kernel = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=home, env=environ
        )

    def close(self) -> None:
        """End all processes and containers."""
        if self.kernel.stdin is not None:
            self.kernel.stdin.close()
        try:
            self.kernel.wait(30)
        except subprocess.TimeoutExpired:
            self.kernel.kill()
        for container in self.by_hand:
            container.remove(force=True)
        self.broker.close()

    def ours(self, script: str, *arguments: str, may_fail: bool = False, **how: Any) -> dict[str, Any]:
        """Launch once from the kernel and return its answer."""
        order = {"script": script, "arguments": arguments, "nnodes": len(self.nodes), **how}
        assert self.kernel.stdin is not None
        assert self.kernel.stdout is not None
        self.kernel.stdin.write(json.dumps(order) + "\n")
        self.kernel.stdin.flush()
        for line in self.kernel.stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                assert may_fail or not answer["error"], answer["error"] + answer["text"]
                return answer
        raise AssertionError("the kernel ended")

    def torchrun(self, script: str, *arguments: str) -> dict[str, Any]:
        """Run the script with torchrun in a running container on every node."""
        texts = [""] * len(self.nodes)
        began = time.monotonic()

        def run(rank: int) -> None:
            command = [
                "python3", "-m", "torch.distributed.run", "--nnodes", str(len(self.nodes)), "--node-rank", str(rank),
                "--nproc-per-node", "1", "--master-addr", self.nodes[0].address, "--master-port", "29511",
                "--local-addr", self.nodes[rank].address, script, *arguments,
            ]  # fmt: skip
            code, output = self.by_hand[rank].exec_run(command)
            texts[rank] = output.decode(errors="replace")
            assert code == 0, texts[rank]

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.nodes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(texts), "torchrun by hand failed"
        return {"seconds": time.monotonic() - began, "text": "".join(texts)}


def print_figure(name: str, value: float, unit: str) -> None:
    """Print a figure."""
    print(f"{name} {value:.4g} {unit}", flush=True)


def print_note(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median of the pairs' ratios."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def measure_runs(bench: Bench, tag: str) -> None:
    """Measure whole runs of one all-reduce."""
    by_method: dict[str, list[float]] = {"first": [], "again": [], "cold": [], "torchrun": []}
    for number in range(bench.pairs + 1):
        result = {
            "first": bench.ours("bench_hello.py", fresh=True)["seconds"],
            "again": bench.ours("bench_hello.py")["seconds"],
            "cold": bench.ours("bench_hello.py", cold=True)["seconds"],
            "torchrun": bench.torchrun("bench_hello.py")["seconds"],
        }
        print_note(f"{tag}: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in result.items()))
        if number:
            for name, seconds in result.items():
                by_method[name].append(seconds)
    for name, seconds in by_method.items():
        print_figure(f"{tag}.{name}", statistics.median(seconds), "s")
        if name != "torchrun":
            print_figure(f"{tag}.{name}_over_cold_torchrun", ratio(seconds, by_method["torchrun"]), "ratio")


def measure_steps(bench: Bench, tag: str, *arguments: str) -> None:
    """Measure the median step of the same training."""
    ours, theirs = [], []
    for number in range(bench.pairs + 1):
        turns = [lambda: ours.append(_median(bench.ours("bench_steps.py", *arguments)["text"]))]
        turns.append(lambda: theirs.append(_median(bench.torchrun("bench_steps.py", *arguments)["text"])))
        for turn in turns if number % 2 else reversed(turns):
            turn()
        print_note(f"{tag}: step {ours[-1]:.3f} ms, torchrun {theirs[-1]:.3f} ms")
    print_figure(f"{tag}.step_time_over_torchrun", ratio(ours[1:], theirs[1:]), "ratio")


def _median(text: str) -> float:
    words = text.split()
    return float(words[words.index("median_ms") + 1])


def measure_interrupts(bench: Bench, tag: str) -> None:
    """Measure the longest time from SIGINT until all ranks have ended."""
    scripts = ("bench_steps.py", "4096", "1000000"), ("bench_forever.py",)
    answers = [bench.ours(*script, interrupt_after_s=1.0, may_fail=True) for script in scripts for _ in range(3)]
    assert all(answer["interrupt_s"] is not None for answer in answers), (
        f"a launch ended before its interrupt: {answers}"
    )
    print_figure(f"{tag}.interrupt_s", max(answer["interrupt_s"] for answer in answers), "s")


def measure_losses(bench: Bench, tag: str) -> None:
    """Kill a rank, and cut a node off, during collectives; measure the time to the error, and print it."""
    victim = bench.nodes[-1]
    for lost in ("rank", "node"):
        done: list[float] = []

        def inject_fault(kind: str = lost, done: list[float] = done) -> None:
            time.sleep(12)
            done.append(time.monotonic())
            if kind == "node":
                subprocess.run(["ip", "link", "set", f"veth{bench.nodes.index(victim) + 1}", "down"], check=True)
                return
            for pid in _ranks(victim):
                os.kill(pid, signal.SIGKILL)
                print_note(f"killed {pid}")

        threading.Thread(target=inject_fault).start()
        answer = bench.ours("bench_steps.py", "4096", "600", may_fail=True)
        print_figure(f"{tag}.{lost}_lost_named_after", time.monotonic() - done[0], "s")
        print_note(f"{tag}: {lost} lost: {answer['error'][:600]}")
        assert victim.name in answer["error"], answer["error"]
        if lost == "node":
            subprocess.run(["ip", "link", "set", f"veth{bench.nodes.index(victim) + 1}", "up"], check=True)
        print_note(f"{tag}: after it, {bench.ours('bench_hello.py')['seconds']:.2f} s for a launch")


def _ranks(node: Node) -> list[int]:
    """Return the host's ids of a node's ranks."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        # Only ranks have their run in the environment; the process that they are forked from has another variable.
        marks = [
            variable for variable in environ if variable.startswith(b"GPU_LAUNCH_RANKS=") and b"/server" not in variable
        ]
        if any(marks) and f"GPUHUB_NODE={node.name}".encode() in environ:
            pids.append(int(entry.name))
    return pids


def steps_on_slow_links(bench: Bench, tag: str) -> None:
    """Measure steps over links of 2.5 Gbit/s if the kernel can shape the links."""
    if shape_links(bench.nodes):
        measure_steps(bench, f"{tag}_2g5", "2048", "40")


def check_isolation(bench: Bench, tag: str) -> None:
    """Check that a container cannot reach another's GPU."""
    for line in isolation(bench.nodes, bench.home, bench.site):
        print_note(f"{tag}: {line}")
    print_figure(f"{tag}.isolated_nodes", len(bench.nodes), "nodes")


def show_memory_errors(bench: Bench, tag: str) -> None:
    """Print the errors, with sizes, of a rank that allocates more than its GPU and of one that exceeds its part."""
    for cap_mib, gib, expected in ((None, 1000, r"asked for 1000\.00 GiB, [\d.]+ GiB of \d+\.\d GiB free on "),
                               (4096, 8, r"asked for 8\.00 GiB, .* free on .*, of which it may use 4\.00 GiB")):  # fmt: skip
        bench.broker.cap_mib = cap_mib
        answer = bench.ours("bench_greedy.py", str(gib), fresh=True, may_fail=True)
        print_note(f"{tag}: {gib} GiB, cap {cap_mib} MiB: {answer['error'][:600]}\n{answer['text'][-1500:]}")
        assert re.search(expected, answer["error"] + answer["text"]), answer
    print_figure(f"{tag}.memory_errors_shown", 2, "launches")


PARTS: dict[str, Callable[[Bench, str], None]] = {
    "hello": measure_runs,
    "interrupts": measure_interrupts,
    "losses": measure_losses,
    "steps": lambda bench, tag: measure_steps(bench, tag, "4096", "80"),
    "slow": steps_on_slow_links,
    "isolation": check_isolation,
    "memory": show_memory_errors,
}


def main() -> None:
    """Measure the given parts, or all of them."""
    site, listed, pairs, *asked = sys.argv[1:]
    unknown = set(asked) - set(PARTS)
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    nodes = parse_nodes(Path(listed).read_text(encoding="utf-8").splitlines())
    # The path is the same here and in the containers.
    HOME.mkdir(parents=True, exist_ok=True)
    for name, text in scripts.ALL.items():
        (HOME / name).write_text(text, encoding="utf-8")
    bench = Bench(nodes, home=HOME, site=site, pairs=int(pairs))
    try:
        for part in asked or PARTS:
            PARTS[part](bench, "gpu")
    finally:
        bench.close()


def shape_links(nodes: list[Node]) -> bool:
    """Shape both directions of every node's link to 2.5 Gbit/s; return whether the kernel can."""
    limit = ["root", "tbf", "rate", "2500mbit", "burst", "1mb", "latency", "50ms"]
    for index, _ in enumerate(nodes, 1):
        for command in (
            ["tc", "qdisc", "add", "dev", f"veth{index}", *limit],
            ["ip", "netns", "exec", f"node{index}", "tc", "qdisc", "add", "dev", "eth0", *limit],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print_note(f"the link cannot be shaped: {' '.join(command)}: {done.stderr.strip()}")
                return False
    return True


if __name__ == "__main__":
    main()
