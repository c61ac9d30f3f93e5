"""`gpu-launch shell` in a real terminal, against a WebSocket."""

from __future__ import annotations

import os
import pty
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_launch.cli import main
from tests.support.hub.fake_hub import TOKEN, FakeHub, served

pytestmark = pytest.mark.process


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with one running job."""
    with served(FakeHub(home=tmp_path)) as found:
        found.add("run-20260101-000000-abc123", name="train")
        found.run()
        monkeypatch.setenv("GPUHUB_URL", found.url)
        monkeypatch.setenv("GPUHUB_TOKEN", TOKEN)
        yield found


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, words: list[str], columns: int, rows: int) -> None:
        import fcntl
        import termios

        self._set = lambda size: fcntl.ioctl(
            self.master, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0)
        )
        self.master, slave = pty.openpty()
        self._set((columns, rows))
        environ = {**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[2])}
        environ.pop("COLUMNS", None)
        environ.pop("LINES", None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpu_launch.cli.main", *words], stdin=slave, stdout=slave, stderr=slave, env=environ
        )
        self.slave = slave
        self.seen = b""

    def until(self, text: bytes) -> None:
        deadline = time.monotonic() + 20
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.master], [], [], 0.1)[0]:
                self.seen += os.read(self.master, 65536)

    def type(self, data: bytes) -> None:
        os.write(self.master, data)

    def resize(self, columns: int, rows: int) -> None:
        self._set((columns, rows))

    def close(self) -> None:
        os.close(self.master)
        os.close(self.slave)


def test_keys_are_sent_raw_and_exit_status_is_returned(hub: FakeHub) -> None:
    """Raw, Ctrl-C too; the window's size first and whenever it changes; the terminal is put back."""
    import termios

    terminal = Terminal(["shell", "train"], 100, 30)
    try:
        before = termios.tcgetattr(terminal.slave)
        while not hub.shells:
            assert terminal.process.poll() is None
            time.sleep(0.01)
        terminal.type(b"hi ")
        terminal.until(b"HI ")
        assert termios.tcgetattr(terminal.slave) != before
        terminal.type(b"\x03")
        terminal.until(b"\x03")
        terminal.resize(120, 40)
        deadline = time.monotonic() + 10
        while {"resize": [120, 40]} not in hub.shells:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        terminal.type(b"exit7")
        assert terminal.process.wait(20) == 7
        assert termios.tcgetattr(terminal.slave) == before
    finally:
        terminal.close()
    assert (hub.shells[0]["cols"], hub.shells[0]["rows"], hub.shells[0]["worker"]) == ("100", "30", "0")


def _run_piped(words: list[str], given: bytes) -> subprocess.CompletedProcess[bytes]:
    environ = {**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[2])}
    command = [sys.executable, "-m", "gpu_launch.cli.main", *words]
    return subprocess.run(command, input=given, capture_output=True, env=environ, timeout=60, check=False)


def test_command_with_piped_stdin(hub: FakeHub) -> None:
    """Words are quoted for the shell there; the end of stdin is said as a terminal says it."""
    done = _run_piped(["shell", "train", "--worker", "0", "--", "echo", "a b", "$x"], b"")
    assert (done.returncode, done.stdout) == (3, b"ran echo 'a b' '$x'\r\n")
    done = _run_piped(["shell", "abc"], b"hello")
    assert (done.returncode, done.stdout) == (4, b"HELLO")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["shell", "train", "--worker", "5"], "--worker 5: run-20260101-000000-abc123 has the workers 0 (rig1)."),
        (["shell", "nothing"], "There is no job nothing."),
    ],
)
def test_missing_terminal_is_reported_in_one_line(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    """In one line."""
    assert main.run_command(words) == 2
    assert text in capsys.readouterr().err
    hub.end(0)
    assert main.run_command(["shell", "train"]) == 2
    assert "is not running: its state is ended." in capsys.readouterr().err
