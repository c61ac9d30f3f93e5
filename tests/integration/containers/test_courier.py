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
from gpuhub.broker.files.courier_client import CourierClient
from gpuhub.broker_api.errors import SizeLimitExceeded
from gpuhub.common import names
from gpuhub.common.errors import Conflict, InvalidRequest, NotFound
from gpuhub.docker.containers import container_spec
from gpuhub.docker.containers.user_containers import CourierSpec, start_courier
from gpuhub.docker.exec_session import start_exec
from gpuhub.storage.homes import prepare_user
from tests.support.closet.head_node import OWNER, HeadNode, until
from tests.support.closet.practice_closet import INSTANCE

#: The folder of the courier's code in the home: the tiny image lacks gpu_launch.
CODE = ".courier"
COMMAND = ("python3", f"/home/{OWNER}/{CODE}/run.py")
#: Modules that `gpu_launch` imports and the courier does not need.
RUN = """
import pathlib, sys, types
package = types.ModuleType("gpu_launch")
package.__path__ = [str(pathlib.Path(__file__).parent)]
sys.modules["gpu_launch"] = package
from gpu_launch.courier.main import main
sys.exit(main())
"""


@pytest.fixture
async def container(head: HeadNode, tiny_image: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """A courier of ada's on rig2 that runs this tree's code."""
    monkeypatch.setattr(container_spec, "COURIER_COMMAND", COMMAND)
    await prepare_user(head.cluster.users, head.cluster.storage, head.closet.paths.state, OWNER)
    code = home(head) / CODE
    (code / "courier").mkdir(parents=True, exist_ok=True)
    (code / "run.py").write_text(RUN, encoding="utf-8")
    (code / "common").mkdir(exist_ok=True)
    courier = Path(gpu_launch.courier.__file__).parent
    for file in (*courier.glob("*.py"), courier.parent / "common/__init__.py", courier.parent / "common/untar.py"):
        (code / file.parent.name / file.name).write_bytes(file.read_bytes())
    spec = CourierSpec(owner=OWNER, node="rig2", image=tiny_image)
    made = await start_courier(head.daemons, head.cluster, head.closet.paths, spec)
    yield made
    with suppress(NotFound):
        await head.daemons.call("rig2", "remove_container", made, force=True)


def home(head: HeadNode) -> Path:
    return Path(head.cluster.storage.home.replace("{username}", OWNER))


async def start_courier_client(head: HeadNode, container: str, *words: str) -> CourierClient:
    return CourierClient(await start_exec(head.daemons, "rig2", container, (*COMMAND, *words)))


def programs(head: HeadNode, container: str) -> list[str]:
    """Return the programs in the container except its main process."""
    with closing(head.closet.client("rig2")) as client:
        processes = client.containers.get(container).top(ps_args="-efww")["Processes"]
    return [" ".join(row) for row in processes if "serve" not in " ".join(row)]


async def test_courier_has_only_the_home(head: HeadNode, container: str) -> None:
    """The courier runs as its user without network or privileges, and a second start replaces it."""
    inspected = head.inspect("rig2", names.courier_container_name(INSTANCE, OWNER))
    assert (inspected["Id"], inspected["State"]["Running"]) == (container, True)
    with closing(head.closet.client("rig2")) as client:
        inside = client.containers.get(container)
        status = inside.exec_run(["cat", "/proc/self/status"]).output.decode()
        links = inside.exec_run(["ls", "/sys/class/net"]).output.decode().split()
        written = inside.exec_run(["sh", "-c", "echo x > /x; echo x > /tmp/x"]).output.decode()
    assert "CapEff:\t0000000000000000" in status
    assert f"Uid:\t{home(head).stat().st_uid}\t" in status
    assert links == ["lo"]
    assert written.count("Read-only file system") == 2
    spec = CourierSpec(owner=OWNER, node="rig2", image=inspected["Config"]["Image"])
    again = await start_courier(head.daemons, head.cluster, head.closet.paths, spec)
    assert again != container
    assert head.containers(names.KIND_COURIER) == [names.courier_container_name(INSTANCE, OWNER)]
    await head.daemons.call("rig2", "remove_container", again, force=True)


async def test_files_are_transferred_completely(head: HeadNode, container: str) -> None:
    """Files larger than any buffer arrive complete in both directions and belong to the user."""
    content = os.urandom(40 * 1024**2)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        entry = tarfile.TarInfo("large")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    async with await start_courier_client(head, container, "put", f"--limit={2**30}", "--", "sent") as putting:
        await putting.send(packed.getvalue())
        await putting.end_input()
        assert await putting.wait_result() == {"files": 1, "bytes": len(content)}
    file = home(head) / "sent" / "large"
    assert (file.read_bytes() == content, file.stat().st_uid) == (True, home(head).stat().st_uid)
    async with await start_courier_client(head, container, "get", f"--limit={2**30}", "--", "sent/large") as getting:
        got = b"".join([part async for part in getting.read_output(limit_s=60)])
    with tarfile.open(fileobj=io.BytesIO(got)) as tar:
        assert tar.extractfile("large").read() == content  # type: ignore[union-attr]


async def test_refused_transfer_names_the_reason(head: HeadNode, container: str) -> None:
    """A transfer is refused with the reason, before or during it."""
    with pytest.raises(NotFound, match="there is no 'nothing' in the home"):
        async with await start_courier_client(head, container, "get", "--limit=9", "--", "nothing"):
            pass
    with pytest.raises(SizeLimitExceeded):
        async with await start_courier_client(head, container, "get", "--limit=9", "--", CODE):
            pass
    async with await start_courier_client(head, container, "put", "--limit=9", "--", "sent") as putting:
        with suppress(Conflict):
            await putting.send(b"no tar" * 1000)
            await putting.end_input()
        with pytest.raises(InvalidRequest, match="the upload is not a complete tar archive"):
            await putting.wait_result()


async def test_program_ends_when_its_client_disconnects(head: HeadNode, container: str) -> None:
    """A program ends when its client disconnects: its input ends, while Docker leaves programs running."""
    following = await start_courier_client(head, container, "logs", "--follow", "--", "run-000001")
    await following.__aenter__()
    getting = await start_courier_client(head, container, "put", f"--limit={2**30}", "--", "sent")
    await getting.__aenter__()
    assert len(programs(head, container)) == 2
    await following.__aexit__(None, None, None)
    await getting.__aexit__(None, None, None)
    await until(lambda: programs(head, container) == [])


async def test_a_terminal_ends_with_its_client(head: HeadNode, container: str) -> None:
    """A terminal's shell ends with its client, and processes that ignore SIGHUP are killed."""
    async with await start_courier_client(head, container, "shell", "--columns=97", "--rows=31", "--run=") as terminal:
        await terminal.send(b"echo sum-$((40+2)); trap '' HUP; (trap '' HUP; sleep 1000) &\n")
        shown = await read_until(terminal, b"sum-42")
        assert b"sum-42" in shown
        await until(lambda: any("sleep 1000" in line for line in programs(head, container)))
    await until(lambda: programs(head, container) == [])
    async with await start_courier_client(head, container, "shell", "--run=exit 7") as terminal:
        assert await terminal.wait_result() == {"exit": 7}


async def read_until(terminal: CourierClient, text: bytes) -> bytes:
    shown = b""
    async with asyncio.timeout(60), aclosing(terminal.read_output()) as output:
        async for part in output:
            shown += part
            if text in shown:
                break
    return shown
