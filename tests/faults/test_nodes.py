"""Nodes that die and return, whole or with less in them."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gpuhub.closet import cards, daemons, shell
from gpuhub.closet.places import node_places
from gpuhub.closet.plan import gpu_uuid
from gpuhub.head.programs import BROKER
from tests.faults.bed import Bed
from tests.support.product import wait_for

Figure = Callable[[str, float], None]


@contextmanager
def off(bed: Bed, node: str) -> Iterator[None]:
    """The machine is without power; started again at the end."""
    bed.signal_daemon(node, signal.SIGKILL)
    bed.supervisor.stop(node)
    shell.wait_until(lambda: not daemons.is_answering(bed.plan.node(node), bed.paths), timeout_s=30)
    try:
        yield
    finally:
        bed.supervisor.ensure_started(node)
        daemons.wait_ready(bed.plan, bed.paths)


@pytest.mark.case("N1")
def test_a_node_dies_and_returns(bed: Bed, figure: Figure) -> None:
    """While it is away its lease stays; when it is back the container has ended, and the GPU is given."""
    bed.start("ada", "nb", "on2")
    other = bed.start("ben", "nb", "on3")
    with off(bed, "rig2"):
        began = time.monotonic()
        wait_for(lambda: bed.node("rig2").get("state") == "unreachable", "rig2 is unreachable", 60)
        figure("detected_s", time.monotonic() - began)
        time.sleep(10)
        assert bed.lease_of("ada", "nb")["state"] == "active"
    returned = time.monotonic()
    wait_for(lambda: not bed.lease_of("ada", "nb"), "the lease ends", 60)
    figure("freed_s", time.monotonic() - returned)
    wait_for(lambda: bed.gpu("rig2").get("state") == "free", "the GPU is free", 60)
    figure("free_s", time.monotonic() - returned)
    assert bed.container("ben", "nb") == other
    wait_for(lambda: not bed.clients["ada"].is_ready("nb"), "the hub notices", 60)
    bed.start("ada", "again", "on2")


@pytest.mark.case("N2")
def test_a_node_returns_with_fewer_gpus(bed: Bed) -> None:
    """Of two GPUs: the missing one is failed and named, the other one is given."""
    folder = node_places(bed.paths, "rig2").cards
    second = folder / "1"
    with off(bed, "rig2"):
        shutil.copytree(folder / "0", second)
        card = cards.format_card(bed.plan.node("rig2").cards[0], index=1, uuid=gpu_uuid(bed.plan.instance, "rig2", 1))
        (second / "card").write_text(card)
    try:
        wait_for(lambda: [gpu["state"] for gpu in bed.node("rig2")["gpus"]] == ["free", "free"], "both are free", 60)
        with off(bed, "rig2"):
            shutil.rmtree(second)
        wait_for(lambda: [gpu["state"] for gpu in bed.node("rig2")["gpus"]] == ["free", "failed"], bed.describe, 60)
        assert "no longer reports" in bed.node("rig2")["gpus"][1]["message"]
        assert "GPU 1: " in bed.node("rig2")["message"]
        assert bed.start("ada", "nb", "on2").node == "rig2"
        bed.ask_start("ben", "nb", "on2")
        wait_for(lambda: bed.lease_of("ben", "nb").get("state") == "requested", "ben waits")
    finally:
        shutil.rmtree(second, ignore_errors=True)
        bed.clear_servers()
        # A card that was taken out for good is forgotten with the next start of the broker.
        bed.kill_and_wait(BROKER)
    wait_for(lambda: [gpu["state"] for gpu in bed.node("rig2")["gpus"]] == ["free"], bed.describe, 60)
