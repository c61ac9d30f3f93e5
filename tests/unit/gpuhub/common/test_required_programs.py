"""The list of programs against the code that starts them."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuhub.common import required_programs
from gpuhub.common.required_programs import find_missing_packages, read_programs

ROOT = Path(__file__).parents[4]
#: Functions whose first argument is a command, or the name of a program.
_STARTERS = ("which", "run_command", "is_successful", "create_subprocess_exec")
#: First words of tuples with options that are no commands.
_OTHER_WORDS = {
    "install",  # of pip
    "FORWARD",  # of iptables
    "rm", "ps", "network", "volume", "images",  # of docker
    "job-folder", "logs", "notebook", "pack-job", "put-results",  # of gpu-launch-courier
    "mlflow", "waitress-serve",  # of the image gpuhub/services
    "who", "put", "get", "state", "gpu", "openid", "root", "nvidiactl", "USE",  # data
}  # fmt: skip


def find_first_word(node: ast.AST) -> str | None:
    if not isinstance(node, ast.List | ast.Tuple):
        return None
    words = [each.value if isinstance(each, ast.Constant) else None for each in node.elts]
    return words[0] if words and isinstance(words[0], str) else None


def has_options(node: ast.List | ast.Tuple) -> bool:
    """Return whether a list continues like a command: with an option, or with further words from elsewhere."""
    return any(
        isinstance(each, ast.Starred)
        or (isinstance(each, ast.Constant) and isinstance(each.value, str) and each.value.startswith("-"))
        for each in node.elts[1:]
    )


def find_started_programs(tree: ast.AST) -> Iterator[str]:
    """Yield the first words of lists that look like commands, and what is passed to functions that start something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.List | ast.Tuple) and has_options(node):
            word = find_first_word(node)
            if word is not None and re.fullmatch(r"[A-Za-z][\w.-]*", word):
                yield word
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func)
            if called.startswith("subprocess.") or called.rpartition(".")[2] in _STARTERS:
                argument = node.args[0]
                word = find_first_word(argument)
                if word is not None:
                    yield word
                elif isinstance(argument, ast.Constant):
                    yield str(argument.value)


def list_started_programs() -> set[str]:
    files = [file for package in ("gpuhub", "gpuhub_closet") for file in (ROOT / "spawners" / package).rglob("*.py")]
    return {word for file in files for word in find_started_programs(ast.parse(file.read_text(encoding="utf-8")))}


def test_every_started_program_is_in_the_list() -> None:
    """A program that nothing installs is found here and not on a user's new machine."""
    started = list_started_programs() - _OTHER_WORDS
    assert {"ping", "ip", "ssh-keyscan", "dockerd", "sbatch", "dnsmasq"} <= started
    # Its package differs: docker.io up to Debian 12, docker-cli from 13 on; spawners/setup.sh knows both.
    in_packages_of_two_names = {"docker"}
    assert started - {program.name for program in read_programs()} - in_packages_of_two_names == set()


def test_the_scan_finds_commands_in_every_form() -> None:
    """As a list with options, an argument, and a name."""
    text = """
command = ["one", "-n", target]
subprocess.run(["two", name])
shutil.which("three")
shell.run_command(("four", "five"))
("six", *arguments)
print(["seven", "eight"])
"""
    assert set(find_started_programs(ast.parse(text))) == {"one", "two", "three", "four", "six"}


@pytest.mark.process
def test_setup_reads_the_same_list() -> None:
    """Its pattern finds every program of a place, with its package."""
    text = (ROOT / "spawners" / "setup.sh").read_text(encoding="utf-8")
    function = text[text.index("programs_of() {") : text.index("mapfile")]
    for where in sorted({program.where for program in read_programs()}):
        line = f"here={ROOT}\n{function}\nprograms_of {where}"
        printed = subprocess.run(["bash", "-euc", line], check=True, capture_output=True, text=True).stdout.split()
        assert printed == [f"{each.name}:{each.package}" for each in read_programs() if each.where == where]
    assert "programs_of head closet" in text


def test_missing_programs_are_named_by_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each package once, and those of other places not at all."""
    monkeypatch.setattr(
        required_programs.shutil, "which", lambda name: None if name in {"ping", "ssh", "ssh-keygen", "tc"} else name
    )
    assert find_missing_packages({"head"}) == ["iputils-ping", "openssh-client"]
    assert find_missing_packages({"head", "closet"}) == ["iproute2", "iputils-ping", "openssh-client"]
