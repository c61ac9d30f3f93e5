"""Couriers and terminals on the closet's real daemons: Docker's own streams between broker and gpu-launch's courier."""

from __future__ import annotations

import asyncio
import io
import os
import tarfile
from collections.abc import AsyncIterator
from contextlib import aclosing, closing, suppress
from pathlib import Path

import pytest

import gpu_launch.courier
from gpuhub import names
from gpuhub.broker.refusals import TooLarge
from gpuhub.broker.talks import Talk
from gpuhub.containers import arguments
from gpuhub.containers.courier import CourierSpec, start_courier
from gpuhub.containers.execs import start_exec
from gpuhub.errors import Conflict, InvalidRequest, NotFound
from gpuhub.storage.preparing import prepare_user
from tests.integration.conftest import INSTANCE
from tests.integration.test_spawner import OWNER, Head, head, until

__all__ = ["head"]

#: Where the courier's own files lie in the home: the tiny image has none of gpu_launch.
CODE = ".courier"
COMMAND = ("python3", f"/home/{OWNER}/{CODE}/run.py")
#: What `gpu_launch` imports beside the courier is not needed for it.
RUN = """
import pathlib, sys, types
package = types.ModuleType("gpu_launch")
package.__path__ = [str(pathlib.Path(__file__).parent)]
sys.modules["gpu_launch"] = package
from gpu_launch.courier.command import main
sys.exit(main())
"""


@pytest.fixture
async def container(head: Head, tiny_image: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """Ada's courier on rig2, running this tree's own code."""
    monkeypatch.setattr(arguments, "COURIER_COMMAND", COMMAND)
    await prepare_user(head.cluster.users, head.cluster.storage, head.closet.paths.state, OWNER)
    code = home(head) / CODE
    (code / "courier").mkdir(parents=True, exist_ok=True)
    (code / "run.py").write_text(RUN, encoding="utf-8")
    for file in Path(gpu_launch.courier.__file__).parent.glob("*.py"):
        (code / "courier" / file.name).write_bytes(file.read_bytes())
    spec = CourierSpec(owner=OWNER, node="rig2", image=tiny_image)
    made = await start_courier(head.daemons, head.cluster, head.closet.paths, spec)
    yield made
    with suppress(NotFound):
        await head.daemons.call("rig2", "remove_container", made, force=True)


def home(head: Head) -> Path:
    return Path(head.cluster.storage.home.replace("{username}", OWNER))


async def talk(head: Head, container: str, *words: str) -> Talk:
    return Talk(await start_exec(head.daemons, "rig2", container, (*COMMAND, *words)))


def programs(head: Head, container: str) -> list[str]:
    """What runs in the container beside what it was started with."""
    with closing(head.closet.client("rig2")) as client:
        found = client.containers.get(container).top(ps_args="-efww")["Processes"]
    return [" ".join(row) for row in found if "serve" not in " ".join(row)]


async def test_a_courier_has_the_home_and_nothing_else(head: Head, container: str) -> None:
    """As its user, without network, rights, or a place to write elsewhere; starting it again replaces it."""
    found = head.inspect("rig2", names.courier_container(INSTANCE, OWNER))
    assert (found["Id"], found["State"]["Running"]) == (container, True)
    with closing(head.closet.client("rig2")) as client:
        inside = client.containers.get(container)
        status = inside.exec_run(["cat", "/proc/self/status"]).output.decode()
        links = inside.exec_run(["ls", "/sys/class/net"]).output.decode().split()
        written = inside.exec_run(["sh", "-c", "echo x > /x; echo x > /tmp/x"]).output.decode()
    assert "CapEff:\t0000000000000000" in status
    assert f"Uid:\t{home(head).stat().st_uid}\t" in status
    assert links == ["lo"]
    assert written.count("Read-only file system") == 2
    spec = CourierSpec(owner=OWNER, node="rig2", image=found["Config"]["Image"])
    again = await start_courier(head.daemons, head.cluster, head.closet.paths, spec)
    assert again != container
    assert head.containers(names.KIND_COURIER) == [names.courier_container(INSTANCE, OWNER)]
    await head.daemons.call("rig2", "remove_container", again, force=True)


async def test_files_go_in_and_come_out_whole(head: Head, container: str) -> None:
    """Many times what any buffer holds, both ways; they belong to the user."""
    content = os.urandom(40 * 1024**2)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        entry = tarfile.TarInfo("large")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    async with await talk(head, container, "put", f"--limit={2**30}", "--", "sent") as putting:
        await putting.send(packed.getvalue())
        await putting.finish()
        assert await putting.result() == {"files": 1, "bytes": len(content)}
    file = home(head) / "sent" / "large"
    assert (file.read_bytes() == content, file.stat().st_uid) == (True, home(head).stat().st_uid)
    async with await talk(head, container, "get", f"--limit={2**30}", "--", "sent/large") as getting:
        got = b"".join([part async for part in getting.output(limit_s=60)])
    with tarfile.open(fileobj=io.BytesIO(got)) as tar:
        assert tar.extractfile("large").read() == content  # type: ignore[union-attr]


async def test_what_is_refused_is_told(head: Head, container: str) -> None:
    """Before anything comes, or on the way."""
    with pytest.raises(NotFound, match="there is no 'nothing' in the home"):
        async with await talk(head, container, "get", "--limit=9", "--", "nothing"):
            pass
    with pytest.raises(TooLarge):
        async with await talk(head, container, "get", "--limit=9", "--", CODE):
            pass
    async with await talk(head, container, "put", "--limit=9", "--", "sent") as putting:
        with suppress(Conflict):
            await putting.send(b"no tar" * 1000)
            await putting.finish()
        with pytest.raises(InvalidRequest, match="this is no whole tar"):
            await putting.result()


async def test_a_client_that_goes_away_ends_the_program(head: Head, container: str) -> None:
    """Docker leaves programs running whose client is gone: theirs is to notice that their input ended."""
    following = await talk(head, container, "logs", "--follow", "--", "run-000001")
    await following.__aenter__()
    getting = await talk(head, container, "put", f"--limit={2**30}", "--", "sent")
    await getting.__aenter__()
    assert len(programs(head, container)) == 2
    await following.__aexit__(None, None, None)
    await getting.__aexit__(None, None, None)
    await until(lambda: programs(head, container) == [])


async def test_a_terminal_ends_with_its_client(head: Head, container: str) -> None:
    """A shell in a terminal; what ignores SIGHUP is killed with it."""
    async with await talk(head, container, "shell", "--columns=97", "--rows=31", "--run=") as terminal:
        await terminal.send(b"echo sum-$((40+2)); trap '' HUP; (trap '' HUP; sleep 1000) &\n")
        shown = await read_until(terminal, b"sum-42")
        assert b"sum-42" in shown
        await until(lambda: any("sleep 1000" in one for one in programs(head, container)))
    await until(lambda: programs(head, container) == [])
    async with await talk(head, container, "shell", "--run=exit 7") as terminal:
        assert await terminal.result() == {"exit": 7}


async def read_until(terminal: Talk, text: bytes) -> bytes:
    shown = b""
    async with asyncio.timeout(20), aclosing(terminal.output()) as output:
        async for part in output:
            shown += part
            if text in shown:
                break
    return shown
