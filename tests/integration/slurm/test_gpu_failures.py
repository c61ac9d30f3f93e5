"""A real Slurm gives no jobs to nodes with failed GPUs until the GPUs are proven to work.

On nodes with Docker the broker drains them, by the readings of its GPU agents; on nodes without, the HealthCheckProgram
does. Readings, nvidia-smi and the kernel's messages are simulated.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from gpuhub.nodes.status import XidErrors
from gpuhub.slurm_client.cli import SlurmCliClient
from tests.support.product import wait_for
from tests.support.slurm.scripted_backend import BrokerEnvironment, slurm_cluster
from tests.support.slurm.site import SlurmSite, slurm_site

pytestmark = [pytest.mark.slurm, pytest.mark.root]

#: Jobs that need no GPU, since jobs with one would wait for the one that runs.
SMALL = ("--mem=50", "--cpus-per-task=1")
#: What slurmd runs: both nodes are on this machine, and each has its own memory of the kernel's messages.
WRAPPER = """#!/bin/sh
export SLURM_CONF={folder}/slurm.conf GPUHUB_HEALTH_STATE={folder}/health/$SLURMD_NODENAME
[ ! -d $GPUHUB_HEALTH_STATE.on ] || exec {folder}/health.sh "$@"
"""
#: Programs of the nodes: each prints a file of its node, whose absence is a failure.
PROGRAMS = {"nvidia-smi": "smi", "journalctl": "kernel"}
HEALTHY = "0, 00000000:01:00.0, [N/A], [N/A], [N/A]\n1, 00000000:02:00.0, 0, No, No\n"
MESSAGE = "[ 812.5] host kernel: NVRM: Xid (PCI:0000:0{bus}:00): {code}, pid=4711, name=python, more words\n"


@pytest.fixture(scope="module")
def site() -> Iterator[SlurmSite]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp", prefix="gpuhub-health-")))
        check = folder / "check.sh"
        # With 1 s, slurmctld would have no time to ask nodes whether they respond after a drain.
        further = (f"HealthCheckProgram={check}", "HealthCheckInterval=3")
        shutil.copy(str(resources.files("gpuhub.slurm_client") / "health.sh"), folder)
        check.write_text("#!/bin/sh\n")
        check.chmod(0o755)
        site = stack.enter_context(slurm_site(port=27850, nodes=(("rtx5090",) * 2,) * 2, further=further))
        (folder / "slurm.conf").symlink_to(site.files.conf)
        programs = folder / "programs"
        programs.mkdir()
        for name, file in PROGRAMS.items():
            (programs / name).write_text(f"#!/bin/sh\nexec cat {folder}/health/$SLURMD_NODENAME.on/{file} 2>&1\n")
            (programs / name).chmod(0o755)
        (folder / "health").mkdir()
        enter = site.daemons.build_enter_command(folder)
        subprocess.run([*enter, "mount", "--bind", programs, "/usr/local/sbin"], check=True)
        check.write_text(WRAPPER.format(folder=folder))
        yield site


class Node:
    """A node whose health check is on."""

    def __init__(self, site: SlurmSite, name: str) -> None:
        self._site, self.name = site, name
        check = site.ask("scontrol", "show", "config").split("HealthCheckProgram      = ")[1].split()[0]
        self._check, self._state = Path(check), Path(check).with_name("health") / name

    def set(self, *, smi: str = HEALTHY, kernel: str = "") -> None:
        """Set what nvidia-smi and the kernel of the node say."""
        folder = self._state.with_name(f"{self.name}.on")
        folder.mkdir(exist_ok=True)
        for file, text in (("smi", smi), ("kernel", kernel)):
            (folder / f"{file}.new").write_text(text)
            (folder / f"{file}.new").rename(folder / file)

    def remove_nvidia_smi(self) -> None:
        """Let nvidia-smi fail."""
        (self._state.with_name(f"{self.name}.on") / "smi").unlink()

    def reboot(self) -> None:
        """Forget what a reboot forgets."""
        shutil.rmtree(self._state)
        self.set()

    def accept(self) -> None:
        """Do what an administrator does who has reset the GPU."""
        enter = self._site.daemons.build_enter_command(self._check.parent)
        command = [*enter, "env", f"SLURMD_NODENAME={self.name}", self._check, "accept"]
        subprocess.run(command, check=True)

    def switch_off(self) -> None:
        """Check the node no more."""
        shutil.rmtree(self._state.with_name(f"{self.name}.on"))
        shutil.rmtree(self._state, ignore_errors=True)


@pytest.fixture
def nodes(site: SlurmSite) -> Iterator[tuple[Node, Node]]:
    both = (Node(site, "sx1"), Node(site, "sx2"))
    for node in both:
        node.set()
    yield both
    for node in both:
        node.switch_off()
    clear(site)


@pytest.fixture
def environment(site: SlurmSite, tmp_path: Path) -> Iterator[BrokerEnvironment]:
    """A broker whose nodes are those of the site."""
    cards = {f"rig{number}": [("NVIDIA GeForce RTX 5090", 32607)] * 2 for number in (1, 2)}
    cluster = slurm_cluster(cards)
    named = tuple(node.model_copy(update={"slurm": f"sx{node.name[-1]}"}) for node in cluster.nodes)
    api: Any = SlurmCliClient(conf=site.files.conf)
    yield BrokerEnvironment(tmp_path, cluster=cluster.model_copy(update={"nodes": named}), cards=cards, slurm=api)
    clear(site)


def clear(site: SlurmSite) -> None:
    for job in site.ask("squeue", "-h", "-o", "%i").split():
        site.ask("scancel", job)
    for node in ("sx1", "sx2"):
        site.run("scontrol", "update", f"NodeName={node}", "State=UNDRAIN")
    site.wait_for_nodes()


def reason(site: SlurmSite, node: str) -> str:
    """Return why a node is drained, as an administrator sees it; empty where it is not."""
    lines = site.ask("sinfo", "-h", "-N", "-t", "drain", "-n", node, "-o", "%E").splitlines()
    return lines[0] if lines else ""


def wait_reason(site: SlurmSite, node: str, *parts: str) -> None:
    """Wait until the reason has these parts; without any, until the node is not drained."""
    wait_for(
        lambda: all(part in reason(site, node) for part in parts) if parts else not reason(site, node),
        f"{node} is drained because of {parts}: {reason(site, node)}",
        30,
    )


async def test_broker_drains_a_node_by_its_agents_reading(site: SlurmSite, environment: BrokerEnvironment) -> None:
    """The reason names GPU and error, what runs continues, nothing else starts there, and a reboot is the proof."""
    running = site.submit("ada", *SMALL, "-w", "sx2", "--gres=gpu:1")
    site.wait_for_state(running, "RUNNING")
    async with environment.broker() as harness:
        xids = {"GPU-rig2-1": (XidErrors(code=79, count=1, last_at=environment.clock.now()),)}
        await harness.core.observe(environment.record("rig2", xids=xids))
        await harness.controller.step()
        wait_reason(site, "sx2", "gpuhub: GPU 1: Xid 79, it has fallen off the bus")
        assert not reason(site, "sx1")
        waiting = site.submit("ben", *SMALL, "-w", "sx2")
        await harness.core.observe(environment.record("rig2"))
        await harness.controller.step()
        assert site.state(running) == "RUNNING"
        assert site.state(waiting) == "PENDING"
        await harness.core.observe(environment.record("rig2", boot_id="boot-new"))
        await harness.controller.step()
        site.wait_for_state(waiting, "RUNNING")
        assert site.state(running) == "RUNNING"


async def test_broker_does_not_end_an_administrators_drain(site: SlurmSite, environment: BrokerEnvironment) -> None:
    site.ask("scontrol", "update", "NodeName=sx1", "State=DRAIN", "Reason=fans")
    async with environment.broker() as harness:
        for boot in ("boot-rig1", "boot-new"):
            failed = {"GPU-rig1-0": (XidErrors(code=48, count=1, last_at=environment.clock.now()),)}
            xids = failed if boot == "boot-rig1" else {}
            await harness.core.observe(environment.record("rig1", boot_id=boot, xids=xids))
            await harness.controller.step()
            assert reason(site, "sx1") == "fans"


def test_health_check_drains_a_node_until_a_reboot_or_an_administrators_word(
    site: SlurmSite, nodes: tuple[Node, Node]
) -> None:
    """The message is remembered when the kernel has forgotten it."""
    node = nodes[0]
    running = site.submit("ada", *SMALL, "-w", "sx1", "--gres=gpu:1")
    site.wait_for_state(running, "RUNNING")
    node.set(kernel=MESSAGE.format(bus=2, code=79) + MESSAGE.format(bus=1, code=31))
    wait_reason(site, "sx1", "gpuhub: GPU 1: Xid 79: reset the GPU or restart the node")
    assert "GPU 0" not in reason(site, "sx1")
    waiting = site.submit("ben", *SMALL, "-w", "sx1")
    node.set(kernel=MESSAGE.format(bus=9, code=48))
    wait_reason(site, "sx1", "GPU 1: Xid 79", "GPU at 0000:09:00: Xid 48")
    assert (site.state(running), site.state(waiting)) == ("RUNNING", "PENDING")
    node.reboot()
    site.wait_for_state(waiting, "RUNNING")
    node.set(kernel=MESSAGE.format(bus=1, code=119))
    wait_reason(site, "sx1", "GPU 0: Xid 119")
    node.accept()
    wait_reason(site, "sx1")
    node.set(kernel=MESSAGE.format(bus=1, code=119) + MESSAGE.format(bus=2, code=119))
    wait_reason(site, "sx1", "GPU 1: Xid 119")
    assert "GPU 0" not in reason(site, "sx1")
    assert site.state(running) == "RUNNING"


def test_health_check_reads_memory_errors_and_a_driver_that_fails(site: SlurmSite, nodes: tuple[Node, Node]) -> None:
    """They end with a reading without them."""
    node = nodes[1]
    lines = {
        "0, 00000000:01:00.0, 2, No, No\n": "GPU 0: 2 uncorrectable memory errors",
        "0, 00000000:01:00.0, 0, Yes, No\n": "GPU 0: failing memory rows wait to be replaced",
        "3, 00000000:C1:00.0, 0, No, Yes\n": "GPU 3: a failing memory row could not be replaced",
    }
    for line, text in lines.items():
        node.set(smi=line)
        wait_reason(site, "sx2", f"gpuhub: {text}")
    node.set()
    wait_reason(site, "sx2")
    node.remove_nvidia_smi()
    wait_reason(site, "sx2", "gpuhub: GPUs: nvidia-smi fails: cat:")
    node.set()
    wait_reason(site, "sx2")


def test_health_check_does_not_change_an_administrators_drain(site: SlurmSite, nodes: tuple[Node, Node]) -> None:
    """Also where its reason mentions gpuhub, and where the GPU fails and works again in the meantime."""
    site.ask("scontrol", "update", "NodeName=sx1", "State=DRAIN", "Reason=for gpuhub: GPU 0 gets a new fan")
    for smi in ("0, 00000000:01:00.0, 2, No, No\n", HEALTHY):
        for node in nodes:
            node.set(smi=smi)
        wait_reason(site, "sx2", *(["2 uncorrectable"] if smi != HEALTHY else []))
        assert reason(site, "sx1") == "for gpuhub: GPU 0 gets a new fan"
