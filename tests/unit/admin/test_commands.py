"""The administrator's commands against a real broker on simulated nodes."""

from __future__ import annotations

import argparse
import io
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuhub import cli
from gpuhub.admin import commands
from gpuhub.admin.client import open_broker
from gpuhub.admin.commands import Console, find_lease
from gpuhub.admin.parser import parse_time
from gpuhub.broker.auth import HEAD_NODE
from gpuhub.broker.client import BrokerClient
from gpuhub.errors import Conflict, InvalidRequest, NotFound, SetupError
from gpuhub.paths import Paths
from gpuhub.settings import Profile
from tests.support.brokers import Running, Setting, asgi_broker
from tests.support.simulated import build_cluster
from tests.unit.admin.test_tables import held
from tests.unit.broker.test_api import ask, run_notebook


class Terminal(io.StringIO):
    """Somebody who answers."""

    def isatty(self) -> bool:
        return True


class Head:
    """The command line of root on the head node."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.client = BrokerClient(running.url, "own-token", transport=running.transport, patience_s=0)

    async def run(self, line: str, answer: str | None = None) -> str:
        options: argparse.Namespace = cli.build_parser().parse_args(line.split())
        output = io.StringIO()
        answers = io.StringIO() if answer is None else Terminal(answer)
        await commands.run(options, self.client, Console(output, answers))
        return output.getvalue()


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[Head]:
    """Ada has rig1's card for eight hours, and ben waits for it."""
    profile = Profile(name="rtx5090", title="RTX 5090", gpu_model="RTX 5090", time_limit="8h")
    async with asgi_broker(Setting(tmp_path, cluster=build_cluster(profiles=[profile]))) as running:
        await run_notebook(running, await ask(running, "ada"))
        await ask(running, "ben")
        head = Head(running)
        yield head
        await head.client.close()


async def lease_of(head: Head, owner: str) -> str:
    return next(lease.id for lease in await head.client.leases() if lease.owner == owner)


async def test_lists(head: Head) -> None:
    """Nodes, leases with the queue, usage, reservations, events."""
    assert "rig1  up     0/1   RTX 5090" in await head.run("node list")
    leases = await head.run("lease list")
    assert "ada" in leases
    assert "profile rtx5090" in leases
    assert "ada" not in await head.run("lease list --owner ben")
    assert [line.split()[0] for line in (await head.run("usage")).splitlines()] == ["OWNER", "ada", "ben"]
    assert len((await head.run("usage --owner ada")).splitlines()) == 2
    assert await head.run("reservation list") == "No reservations.\n"
    assert "lease.granted" in await head.run("events")
    assert len((await head.run("events -n 1")).splitlines()) == 1


async def test_a_drain_shows_what_runs_and_asks(head: Head) -> None:
    """Without a yes nothing changes; nobody there to ask is a no as well."""
    with pytest.raises(InvalidRequest, match="nothing was changed"):
        await head.run("node drain rig1", "n\n")
    with pytest.raises(InvalidRequest, match="with --yes"):
        await head.run("node drain rig1")
    assert "rig1  up" in await head.run("node list")
    told = await head.run("node drain rig1 --grace 10m --reason fans", "y\n")
    assert "What runs on rig1:" in told
    assert "All of this ends in 10 min." in told
    assert f"rig1 is draining by {HEAD_NODE}: fans" in told
    assert "rig1 is up" in await head.run("node undrain rig1")


async def test_a_cordon_and_an_empty_node_ask_nothing(head: Head) -> None:
    """Nothing of anybody's ends by them."""
    assert "rig1 is cordoned" in await head.run("node cordon rig1")
    assert "Nothing runs on rig2." in await head.run("node drain rig2")
    with pytest.raises(NotFound, match="there are: rig1, rig2, rig3"):
        await head.run("node drain rig9")


async def test_why_and_more_time(head: Head) -> None:
    """By the beginning of an id; the broker's refusal comes as it is."""
    waiting, running = await lease_of(head, "ben"), await lease_of(head, "ada")
    assert "Position 1 of the queue" in await head.run(f"lease why {waiting[:8]}")
    with pytest.raises(Conflict, match="ben"):
        await head.run(f"lease extend {running} 8h")
    await head.run(f"lease end {waiting} --yes")
    assert "goes on until" in await head.run(f"lease extend {running} 8h")


async def test_an_end_is_confirmed_and_a_force_is_warned_of(head: Head) -> None:
    """What runs is not forced: it is ended first; and what force means is said before it is asked."""
    running = await lease_of(head, "ada")
    with pytest.raises(InvalidRequest, match="only one that was ended can be forced"):
        await head.run(f"lease force {running} --yes")
    head.running.setting.nodes["rig1"].is_reachable = False
    assert "is releasing" in await head.run(f"lease end {running}", "y\n")
    told = await head.run(f"lease force {running}", "yes\n")
    assert "nobody can prove" in told
    assert "two users then share" in told
    assert "is released" in told


async def test_reservations_come_and_go(head: Head) -> None:
    """With the words to cancel them."""
    made = await head.run("reservation add course --nodes rig2 --users ben --groups ml --from 2126-01-01 --for 8h")
    assert "from 1 Jan 2126 00:00 to 1 Jan 2126 08:00" in made
    assert "ben,@ml" in await head.run("reservation list")
    with pytest.raises(NotFound):
        await head.run("reservation cancel x")
    assert "course is cancelled" in await head.run("reservation cancel " + made.split()[-1])


@pytest.mark.parametrize(("beginning", "kind"), [("", NotFound), ("x", NotFound), ("l01", InvalidRequest)])
def test_beginnings_of_ids_that_are_not_one_leases(beginning: str, kind: type[Exception]) -> None:
    """None and several are both told."""
    leases = [held(id="l0123"), held(id="l0145")]
    with pytest.raises(kind):
        find_lease(leases, beginning)
    assert find_lease([*leases, held(id="l01")], "l01").id == "l01"


def test_times_as_administrators_write_them() -> None:
    """Of today, or of a day, by this machine's clock."""
    now = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
    assert parse_time("14:30", now) == datetime(2026, 11, 21, 14, 30).astimezone()
    assert parse_time("2026-12-01 08:00", now) == datetime(2026, 12, 1, 8).astimezone()
    with pytest.raises(InvalidRequest, match="2026-11-22 12:00"):
        parse_time("tomorrow", now)


@pytest.mark.parametrize(
    "line", ["node", "node drain", "node drain rig1 --grace 5", "lease extend l", "reservation add x", "lease list l"]
)
def test_wrong_lines_are_told_with_the_usage(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is asked."""
    with pytest.raises(SystemExit):
        cli.build_parser().parse_args(line.split())
    assert "usage: gpuhub" in capsys.readouterr().err


def test_where_nothing_runs_it_is_said() -> None:
    """Instead of a connection refused."""
    with pytest.raises(SetupError, match="sudo make up"):
        open_broker(Paths("ghnone"))
