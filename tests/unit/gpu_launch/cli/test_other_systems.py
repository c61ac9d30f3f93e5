"""What of the command line differs on Windows, with that system's names patched in: it was never run there."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpu_launch
from gpu_launch.cli import shell
from gpu_launch.common import untar

#: Opens a file as text unless its mode has a `b`.
_READERS = {"read_text", "write_text", "open", "fdopen", "NamedTemporaryFile", "TextIOWrapper"}
#: Functions of these names that open no text.
_OTHERS = {"tarfile.open", "os.open", "self._opener.open"}


@pytest.fixture
def windows_shell(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """`shell` as on Windows, with a standard input of its own."""
    system = SimpleNamespace(name="nt", read=os.read)
    monkeypatch.setattr(shell, "os", system)
    return system


def test_keys_of_a_console_are_sent(windows_shell: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Letters as UTF-8, an arrow as a terminal sends it, and nothing for a key without a meaning."""
    keys = iter(["a", "ä", "\xe0", "H", "\x00", "\x86", "\r"])
    typed, is_over = list(keys), threading.Event()
    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(kbhit=lambda: True, getwch=lambda: typed.pop(0)))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    sent: list[bytes] = []

    def send(data: bytes) -> None:
        sent.append(data)
        if not typed:
            is_over.set()

    with shell._raw_mode():
        shell._read_keys(send, lambda: None, is_over)
    assert b"".join(sent) == "aä\x1b[A\r".encode()


def test_pipe_is_read_to_its_end(windows_shell: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe's content is sent as it is, and its end as a terminal sends it."""
    reading, writing = os.pipe()
    os.write(writing, b"print(1)\n")
    os.close(writing)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: False, fileno=lambda: reading))
    sent: list[bytes] = []
    is_over = threading.Event()

    def send(data: bytes) -> None:
        sent.append(data)
        if data == b"\x04":
            is_over.set()

    shell._read_keys(send, lambda: None, is_over)
    os.close(reading)
    assert sent == [b"print(1)\n", b"\x04"]


@pytest.mark.parametrize("name", ["C:x", "a\\b", "a/..\\b", "x:stream"])
def test_names_with_a_meaning_on_windows_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drives, backslashes and streams are plain characters elsewhere."""
    assert untar.parse_name(name)
    monkeypatch.setattr(untar, "os", SimpleNamespace(name="nt"))
    with pytest.raises(untar.UnsafeMember, match="not a valid file name here"):
        untar.parse_name(name)


@pytest.mark.process
def test_text_files_are_utf_8_on_every_system() -> None:
    """No module of the command line opens a text file in the system's encoding, which is not UTF-8 on Windows."""
    code = "import sys, pkgutil, importlib, gpu_launch.cli\n" + (
        "for module in pkgutil.iter_modules(gpu_launch.cli.__path__):\n"
        "    importlib.import_module(f'gpu_launch.cli.{module.name}')\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('gpu_launch')), sep='\\n')"
    )
    root = str(Path(gpu_launch.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": root}, capture_output=True, text=True, check=True
    )
    files = [Path(line) for line in done.stdout.splitlines()]
    assert len(files) > 20
    assert [found for file in files for found in find_opens_without_encoding(file)] == []


def find_opens_without_encoding(file: Path) -> Iterator[str]:
    """Return the calls that open text in the system's encoding."""
    for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call):
            continue
        if ast.unparse(call.func) in _OTHERS:
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        modes = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
        is_binary = any(isinstance(mode, ast.Constant) and "b" in str(mode.value) for mode in modes[:2])
        if name in _READERS and not is_binary and "encoding" not in {word.arg for word in call.keywords}:
            yield f"{file.name}:{call.lineno}: {ast.unparse(call)}"


def test_search_finds_opens_without_encoding(tmp_path: Path) -> None:
    """The search can fail."""
    file = tmp_path / "x.py"
    file.write_text("p.read_text()\np.open('rb')\nopen('x', 'w')\nopen('x', encoding='utf-8')\n", encoding="utf-8")
    assert [text.partition(": ")[2] for text in find_opens_without_encoding(file)] == [
        "p.read_text()",
        "open('x', 'w')",
    ]
