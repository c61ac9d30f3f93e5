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

from tests.bench.launching import scripts
from tests.bench.launching.kernel import MARK
from tests.bench.real_gpus.isolation import isolation
from tests.bench.real_gpus.nodes import ROOT, TOKEN, GrantingBroker, Node, parse_nodes

HEAD = "10.78.0.1"
HOME = Path("/home/ada")


class Bench:
    """One kernel on the head, and a container for torchrun by hand on every node."""

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
        command = [sys.executable, str(ROOT / "tests/bench/launching/kernel.py")]
        self.kernel = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=home, env=environ
        )

    def close(self) -> None:
        """Everything ends."""
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
        """One launch from the kernel."""
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
        """The same with torchrun in a running container on every node."""
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


def tell(name: str, value: float, unit: str) -> None:
    """A figure."""
    print(f"{name} {value:.4g} {unit}", flush=True)


def note(text: str) -> None:
    """Beside the figures."""
    print(text, file=sys.stderr, flush=True)


def ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the pairs' ratios."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def hello(bench: Bench, tag: str) -> None:
    """Whole runs of one all-reduce."""
    found: dict[str, list[float]] = {"first": [], "again": [], "cold": [], "torchrun": []}
    for number in range(bench.pairs + 1):
        one = {
            "first": bench.ours("bench_hello.py", fresh=True)["seconds"],
            "again": bench.ours("bench_hello.py")["seconds"],
            "cold": bench.ours("bench_hello.py", cold=True)["seconds"],
            "torchrun": bench.torchrun("bench_hello.py")["seconds"],
        }
        note(f"{tag}: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in one.items()))
        if number:
            for name, seconds in one.items():
                found[name].append(seconds)
    for name, seconds in found.items():
        tell(f"{tag}.{name}", statistics.median(seconds), "s")
        if name != "torchrun":
            tell(f"{tag}.{name}_over_cold_torchrun", ratio(seconds, found["torchrun"]), "ratio")


def steps(bench: Bench, tag: str, *arguments: str) -> None:
    """The median step of the same training."""
    ours, theirs = [], []
    for number in range(bench.pairs + 1):
        turns = [lambda: ours.append(_median(bench.ours("bench_steps.py", *arguments)["text"]))]
        turns.append(lambda: theirs.append(_median(bench.torchrun("bench_steps.py", *arguments)["text"])))
        for turn in turns if number % 2 else reversed(turns):
            turn()
        note(f"{tag}: step {ours[-1]:.3f} ms, torchrun {theirs[-1]:.3f} ms")
    tell(f"{tag}.step_time_over_torchrun", ratio(ours[1:], theirs[1:]), "ratio")


def _median(text: str) -> float:
    words = text.split()
    return float(words[words.index("median_ms") + 1])


def interrupts(bench: Bench, tag: str) -> None:
    """From SIGINT until everything has ended; the worst."""
    scripts = ("bench_steps.py", "4096", "1000000"), ("bench_forever.py",)
    found = [bench.ours(*script, interrupt_after_s=1.0, may_fail=True) for script in scripts for _ in range(3)]
    tell(f"{tag}.interrupt_s", max(one["interrupt_s"] for one in found if one["interrupt_s"]), "s")


def losses(bench: Bench, tag: str) -> None:
    """A rank that is killed, and a node that is cut off, amid collectives: how long until it is said, and what."""
    victim = bench.nodes[-1]
    for what in ("rank", "node"):
        done: list[float] = []

        def hurt(kind: str = what, done: list[float] = done) -> None:
            time.sleep(12)
            done.append(time.monotonic())
            if kind == "node":
                subprocess.run(["ip", "link", "set", f"veth{bench.nodes.index(victim) + 1}", "down"], check=True)
                return
            for pid in _ranks(victim):
                os.kill(pid, signal.SIGKILL)
                note(f"killed {pid}")

        threading.Thread(target=hurt).start()
        answer = bench.ours("bench_steps.py", "4096", "600", may_fail=True)
        tell(f"{tag}.{what}_lost_named_after", time.monotonic() - done[0], "s")
        note(f"{tag}: {what} lost: {answer['error'][:600]}")
        assert victim.name in answer["error"], answer["error"]
        if what == "node":
            subprocess.run(["ip", "link", "set", f"veth{bench.nodes.index(victim) + 1}", "up"], check=True)
        note(f"{tag}: after it, {bench.ours('bench_hello.py')['seconds']:.2f} s for a launch")


def _ranks(node: Node) -> list[int]:
    """The host's ids of a node's ranks."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        # Ranks are marked with their run alone; the process that they are forked from has a mark of its own.
        marks = [one for one in environ if one.startswith(b"GPU_LAUNCH_RANKS=") and b"/server" not in one]
        if any(marks) and f"GPUHUB_NODE={node.name}".encode() in environ:
            found.append(int(entry.name))
    return found


def steps_on_slow_links(bench: Bench, tag: str) -> None:
    """The same over links of 2.5 Gbit/s, where the kernel can shape them."""
    if shape(bench.nodes):
        steps(bench, f"{tag}_2g5", "2048", "40")


def walls(bench: Bench, tag: str) -> None:
    """Another's GPU cannot be had; fails where it can."""
    for line in isolation(bench.nodes, bench.home, bench.site):
        note(f"{tag}: {line}")
    tell(f"{tag}.isolated_nodes", len(bench.nodes), "nodes")


def shortages(bench: Bench, tag: str) -> None:
    """A rank that asks for more than its GPU has, and for more than its part of one: what is said, with sizes."""
    for cap_mib, gib, says in ((None, 1000, r"asked for 1000\.00 GiB, [\d.]+ GiB of \d+\.\d GiB free on "),
                               (4096, 8, r"asked for 8\.00 GiB, .* free on .*, of which it may use 4\.00 GiB")):  # fmt: skip
        bench.broker.cap_mib = cap_mib
        answer = bench.ours("bench_greedy.py", str(gib), fresh=True, may_fail=True)
        note(f"{tag}: {gib} GiB, cap {cap_mib} MiB: {answer['error'][:600]}\n{answer['text'][-1500:]}")
        assert re.search(says, answer["error"] + answer["text"]), answer
    tell(f"{tag}.shortages_told", 2, "launches")


PARTS: dict[str, Callable[[Bench, str], None]] = {
    "hello": hello,
    "interrupts": interrupts,
    "losses": losses,
    "steps": lambda bench, tag: steps(bench, tag, "4096", "80"),
    "slow": steps_on_slow_links,
    "walls": walls,
    "shortages": shortages,
}


def main() -> None:
    """The parts asked for, or all of them."""
    site, listed, pairs, *asked = sys.argv[1:]
    unknown = set(asked) - set(PARTS)
    if unknown:
        sys.exit(f"{', '.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    nodes = parse_nodes(Path(listed).read_text(encoding="utf-8").splitlines())
    # The same path here and in the containers.
    HOME.mkdir(parents=True, exist_ok=True)
    for name, text in scripts.ALL.items():
        (HOME / name).write_text(text, encoding="utf-8")
    bench = Bench(nodes, home=HOME, site=site, pairs=int(pairs))
    try:
        for part in asked or PARTS:
            PARTS[part](bench, "gpu")
    finally:
        bench.close()


def shape(nodes: list[Node]) -> bool:
    """Both directions of every node's link to 2.5 Gbit/s; whether the kernel can."""
    limit = ["root", "tbf", "rate", "2500mbit", "burst", "1mb", "latency", "50ms"]
    for index, _ in enumerate(nodes, 1):
        for command in (
            ["tc", "qdisc", "add", "dev", f"veth{index}", *limit],
            ["ip", "netns", "exec", f"node{index}", "tc", "qdisc", "add", "dev", "eth0", *limit],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                note(f"the link cannot be shaped: {' '.join(command)}: {done.stderr.strip()}")
                return False
    return True


if __name__ == "__main__":
    main()
