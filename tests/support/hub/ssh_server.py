"""sshd behind a WebSocket, as in a notebook's container: an ordinary user without capabilities, and no listening sshd."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tornado.web import Application

from gpu_launch.sshd.websocket import SshWebSocketHandler
from tests.support.hub.fake_hub import TOKEN

ROOT = Path(__file__).parents[3]
#: An account that this machine does not have.
USER, UID = "ada", 28417


class Handler(SshWebSocketHandler):
    """Accepts the token of the fake hub's user; in a container JupyterHub's identity provider decides."""

    async def get(self) -> None:
        if self.request.headers.get("Authorization") != f"token {TOKEN}":
            self._refuse(403, "this token may not access the server")
            return
        await self.serve()


@dataclass(frozen=True, kw_only=True)
class SshServer:
    """The running server."""

    url: str
    home: Path
    pid: int


@contextlib.contextmanager
def served_ssh() -> Iterator[SshServer]:
    """Serve SSH as a user with a new home, in a mount namespace whose passwd names the user."""
    # Not one of pytest's folders, which are root's alone.
    with tempfile.TemporaryDirectory(prefix="gpuhub-ssh-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "home").mkdir()
        os.chown(folder / "home", UID, UID)
        yield from _serve(folder, folder / "home")


def _serve(folder: Path, home: Path) -> Iterator[SshServer]:
    passwd = folder / "passwd"
    passwd.write_text(
        Path("/etc/passwd").read_text(encoding="utf-8") + f"{USER}:x:{UID}:{UID}:{USER}:{home}:/bin/bash\n"
    )
    confined = [
        "setpriv",
        f"--reuid={UID}",
        f"--regid={UID}",
        "--clear-groups",
        "--no-new-privs",
        "--bounding-set=-all",
    ]
    program = [sys.executable, "-m", "tests.support.hub.ssh_server"]
    steps = [
        f"mount --bind {shlex.quote(str(passwd))} /etc/passwd",
        # Terminals belong to the group tty, as Docker and systemd mount them.
        "mount -t devpts -o newinstance,gid=5,mode=0620,ptmxmode=0666 devpts /dev/pts",
        "mount --bind /dev/pts/ptmx /dev/ptmx",
        f"exec {shlex.join([*confined, *program])}",
    ]
    command = " && ".join(steps)
    environ = os.environ | {"HOME": str(home), "GPUHUB_NODE": "rig1", "ODD": 'a "b" \\c $HOME # d', "LINES_2": "a\nb"}
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", command], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            yield SshServer(url=f"http://127.0.0.1:{port}/user/{USER}/", home=home, pid=process.pid)
        finally:
            process.terminate()


async def main() -> None:
    """Serve on a free port of the loopback, and print it."""
    application = Application([(f"/user/{USER}/gpu-launch/ssh", Handler)])
    server = application.listen(0, "127.0.0.1")
    (listening,) = server._sockets.values()
    print(listening.getsockname()[1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
