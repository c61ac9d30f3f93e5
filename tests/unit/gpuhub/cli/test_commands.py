"""The administrator's commands against a broker on simulated nodes."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuhub.broker.api.auth import HEAD_NODE
from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.cli import main
from gpuhub.cli.console import AdminConsole
from gpuhub.cli.leases import find_lease
from gpuhub.cli.options import BrokerAction, BrokerRunner, find_in_clone, parse_time
from gpuhub.common.errors import Conflict, InvalidRequest, NotFound, SetupError
from gpuhub.common.log_text import escape_lines
from gpuhub.common.paths import Paths
from gpuhub.config.containers.services import ServiceSettings
from gpuhub.config.settings import ProfileSettings
from gpuhub.domain.models import Identity
from gpuhub.ops.broker_connection import connect_to_broker
from tests.support.broker.calls import ask, run_notebook
from tests.support.broker.factories import held
from tests.support.broker.in_process import Running, Setting, asgi_broker, until
from tests.support.docker.simulated_nodes import build_cluster

ROOT = Identity(name="root", is_user=True, is_admin=True)


class Terminal(io.StringIO):
    """Answers of the administrator."""

    def isatty(self) -> bool:
        return True


class CapturingRunner(BrokerRunner):
    """Keeps a command's action, so that it runs in the test's event loop."""

    def __init__(self) -> None:
        self.action: BrokerAction | None = None

    def run(self, name: str, paths: Paths, action: BrokerAction) -> None:
        self.action = action


class HeadNodeCli:
    """The command line of root on the head node."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.client = AsyncBrokerClient(running.url, "own-token", transport=running.transport, retry_limit_s=0)

    async def run(self, line: str, answer: str | None = None) -> str:
        runner = CapturingRunner()
        main.cli.main(line.split(), obj=runner, standalone_mode=False)
        assert runner.action is not None
        output = io.StringIO()
        answers = io.StringIO() if answer is None else Terminal(answer)
        await runner.action(self.client, AdminConsole(output, answers))
        return output.getvalue()


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[HeadNodeCli]:
    """Ada has rig1's card for eight hours, and ben waits for it."""
    profile = ProfileSettings(name="rtx5090", title="RTX 5090", gpu_model="RTX 5090", time_limit="8h")
    service = ServiceSettings(name="notes", image="gpuhub/base:latest", port=8000, node="rig2")
    cluster = build_cluster(profiles=[profile]).model_copy(update={"services": (service,)})
    async with asgi_broker(Setting(tmp_path, cluster=cluster)) as running:
        await run_notebook(running, await ask(running, "ada"))
        await ask(running, "ben")
        head = HeadNodeCli(running)
        yield head
        await head.client.close()


async def test_report(head: HeadNodeCli) -> None:
    """A table with a total, CSV and JSON of the same rows; nothing before the first use."""
    core = head.running.core
    core.costs.observe_node(core.capacity.inventory.nodes["rig1"])
    await core.costs.flush()
    title, header, ada, total = (await head.run("report --by user --last 7d")).splitlines()
    assert title.endswith("(UTC)")
    assert header.split() == ["USER", "GPU-HOURS", "USE", "PEAK", "MEMORY", "ENERGY"]
    assert (ada.split()[0], total.split()[0]) == ("ada", "total")
    names, values = (await head.run("report --by profile --csv")).splitlines()
    assert names.startswith("profile,gpu_hours,busy_percent,peak_memory_mib,energy_kwh,")
    assert values.startswith("rtx5090,")
    [row] = json.loads(await head.run("report --by week --json"))["rows"]
    assert row["currency"] == ""
    assert (await head.run("report --until 2026-01-31 --since 2026-01-01")) == (
        "2026-01-01 to 2026-01-31 (UTC): no GPU was used\n"
    )
    assert "no GPU was used" in await head.run("report --owner ben")
    with pytest.raises(InvalidRequest, match="use one of them"):
        await head.run("report --last 7d --since 2026-01-01")


async def lease_of(head: HeadNodeCli, owner: str) -> str:
    return next(lease.id for lease in await head.client.leases() if lease.owner == owner)


async def test_list_commands(head: HeadNodeCli) -> None:
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


async def test_services_are_listed_and_restarted(head: HeadNodeCli) -> None:
    """With where they run; an unknown one is refused with those that there are, and output is escaped."""
    await until(lambda: head.running.app.state.services.list_services(ROOT)[0].state == "running", "it runs")
    header, line = (await head.run("service list")).splitlines()
    assert header.split() == ["NAME", "NODE", "STATE", "RESTARTS", "ADDRESS", "WHY"]
    assert line.split() == ["notes", "rig2", "running", "0", "/services/notes/"]
    assert await head.run("service restart notes") == "The service notes starts again on node rig2.\n"
    with pytest.raises(NotFound, match="there is no service 'wiki'; there are: notes"):
        await head.run("service restart wiki")
    await until(lambda: head.running.app.state.services.list_services(ROOT)[0].state == "running", "it runs again")
    assert "driver" in await head.run("service logs notes -n 5")
    assert escape_lines(b"a\x1b[2Jb\n\tc\n") == "a\\x1b[2Jb\n        c"


async def test_drain_lists_leases_and_asks_for_confirmation(head: HeadNodeCli) -> None:
    """Without a yes nothing changes, nor without a terminal to ask at."""
    with pytest.raises(InvalidRequest, match="nothing was changed"):
        await head.run("node drain rig1", "n\n")
    with pytest.raises(InvalidRequest, match="--yes skips the question"):
        await head.run("node drain rig1")
    assert "rig1  up" in await head.run("node list")
    output = await head.run("node drain rig1 --grace 10m --reason fans", "y\n")
    assert "Running on rig1:" in output
    assert "All of this ends in 10 min." in output
    assert f"rig1 is draining by {HEAD_NODE}: fans" in output
    assert "rig1 is up" in await head.run("node undrain rig1")


async def test_cordon_and_empty_node_need_no_confirmation(head: HeadNodeCli) -> None:
    """No lease ends by them."""
    assert "rig1 is cordoned" in await head.run("node cordon rig1")
    assert "Nothing runs on rig2." in await head.run("node drain rig2")
    with pytest.raises(NotFound, match="there are: rig1, rig2, rig3"):
        await head.run("node drain rig9")


async def test_explain_and_extend_commands(head: HeadNodeCli) -> None:
    """By the beginning of an id; the broker's refusal is passed on."""
    waiting, running = await lease_of(head, "ben"), await lease_of(head, "ada")
    assert "Position 1 of the queue" in await head.run(f"lease why {waiting[:8]}")
    with pytest.raises(Conflict, match="ben"):
        await head.run(f"lease extend {running} 8h")
    await head.run(f"lease end {waiting} --yes")
    assert "continues until" in await head.run(f"lease extend {running} 8h")


async def test_release_is_confirmed_and_force_has_a_warning(head: HeadNodeCli) -> None:
    """A running lease cannot be forced before it was ended, and the question follows the warning."""
    running = await lease_of(head, "ada")
    with pytest.raises(InvalidRequest, match="only a lease that was ended can be forced"):
        await head.run(f"lease force {running} --yes")
    head.running.setting.nodes["rig1"].is_reachable = False
    assert "is releasing" in await head.run(f"lease end {running}", "y\n")
    output = await head.run(f"lease force {running}", "yes\n")
    assert "there is no proof" in output
    assert "two users then share" in output
    assert "is released" in output


async def test_reservations_are_created_and_cancelled(head: HeadNodeCli) -> None:
    """With the command that cancels them."""
    made = await head.run("reservation add course --nodes rig2 --users ben --groups ml --from 2126-01-01 --for 8h")
    assert "from 1 Jan 2126 00:00 to 1 Jan 2126 08:00" in made
    assert "ben,@ml" in await head.run("reservation list")
    with pytest.raises(NotFound):
        await head.run("reservation cancel x")
    assert "course is cancelled" in await head.run("reservation cancel " + made.split()[-1])


async def test_limits_of_a_user_are_set_listed_and_cleared(head: HeadNodeCli) -> None:
    """With the reason; no limit at all is refused, with the command that clears."""
    assert await head.run("limit list") == "No user has limits of their own: those of cluster.toml count.\n"
    made = await head.run("limit set ben --gpus 2 --gpu-hours 7.5 --longest-lease 12h --reason course")
    assert "`gpuhub limit clear ben`" in made
    line = (await head.run("limit list")).splitlines()[-1].split()
    assert (line[:6], line[-1]) == (["ben", "2", "7.5", "–", "–", "12"], "course")
    assert "limits of cluster.toml again" in await head.run("limit clear ben")
    with pytest.raises(NotFound, match="ben has no limits"):
        await head.run("limit clear ben")


@pytest.mark.parametrize(("beginning", "kind"), [("", NotFound), ("x", NotFound), ("l01", InvalidRequest)])
def test_unknown_and_ambiguous_id_prefixes_are_refused(beginning: str, kind: type[Exception]) -> None:
    """Neither none nor several are accepted."""
    leases = [held(id="l0123"), held(id="l0145")]
    with pytest.raises(kind):
        find_lease(leases, beginning)
    assert find_lease([*leases, held(id="l01")], "l01").id == "l01"


def test_reservation_times_are_parsed() -> None:
    """Of today or of another day, by this machine's clock."""
    now = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
    assert parse_time("14:30", now) == datetime(2026, 11, 21, 14, 30).astimezone()
    assert parse_time("2026-12-01 08:00", now) == datetime(2026, 12, 1, 8).astimezone()
    with pytest.raises(InvalidRequest, match="2026-11-22 12:00"):
        parse_time("tomorrow", now)


@pytest.mark.parametrize(
    "line",
    [
        "node",
        "node drain",
        "node drain rig1 --grace 5",
        "lease extend l",
        "limit set ben",
        "limit set ben --gpus 0",
        "limit set ben --longest-lease 30s",
        "reservation add x",
        "reservation add x --until 14:00 --for 8h",
        "lease list l",
        "no-such-command",
    ],
)
def test_usage_errors_show_the_usage(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before the broker is asked; their status is 2."""
    with pytest.raises(SystemExit) as ended:
        main.main(line.split())
    assert ended.value.code == 2
    assert "Usage: gpuhub" in capsys.readouterr().err


def test_practice_closet_commands_are_found_by_entry_point(capsys: pytest.CaptureFixture[str]) -> None:
    """`gpuhub` lists and runs them, and imports nothing of the closet itself."""
    with pytest.raises(SystemExit) as ended:
        main.main(["closet-node", "rig9"])
    assert ended.value.code == 1
    assert "gpuhub: 'rig9' is not a node of the practice closet" in capsys.readouterr().err
    main.main(["--help"])
    assert "closet-slurm" in capsys.readouterr().out


def test_error_without_a_running_instance_has_a_remedy() -> None:
    """The error names the remedy instead of a refused connection."""
    with pytest.raises(SetupError, match="sudo make up"):
        connect_to_broker(Paths("ghnone"))


@pytest.mark.parametrize("has_interface", [False, True])
def test_check_says_what_a_data_network_gives_up(
    has_interface: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only where the nodes have one; nothing is started."""
    interface = 'data_interface = "eth1"\n' * has_interface
    table = '[[nodes]]\nname = "rig{0}"\naddress = "192.168.1.2{0}"\ndocker = "unix:///run/rig{0}.sock"\n'
    file = tmp_path / "cluster.toml"
    file.write_text(
        "".join(table.format(number) + interface for number in (1, 2))
        + '[[profiles]]\nname = "any"\ntitle = "Any"\n[users]\nlogin = "password"\nallowed = ["ada"]\n'
    )
    main.cli.main(["check", "--cluster-file", str(file)], standalone_mode=False)
    shown = capsys.readouterr().out
    assert "is valid: 2 nodes" in shown
    assert ("can read and forge what ranks send" in shown) is has_interface


def test_settings_are_those_of_the_clone_in_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`sudo gpuhub …` works anywhere; in the folder of a clone, that one counts."""
    program = Path("/opt/gpuhub/.venv/bin/python")
    monkeypatch.chdir(tmp_path)
    assert find_in_clone("cluster.toml", program) == Path("/opt/gpuhub/cluster.toml")
    (tmp_path / "jupyterhub_config.py").touch()
    assert find_in_clone("cluster.toml", program) == Path("cluster.toml")
