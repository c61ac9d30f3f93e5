"""Instructions for agents: every command in them is one that the command line accepts."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from gpu_launch.cli import main
from gpu_launch.cli.main import cli
from tests.support.command_lines import parse

_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: Commands that pass another program's output on, or print text for a shell.
_WITHOUT_JSON = {"completion", "debug", "instance ssh", "shell", "skill", "ssh-proxy"}


@pytest.fixture
def text(capsys: pytest.CaptureFixture[str]) -> str:
    """What `gpu-launch skill` prints."""
    assert main.run_command(["skill"]) == 0
    return capsys.readouterr().out


def test_commands_are_accepted(text: str) -> None:
    lines = [line for block in _BLOCK.findall(text) for line in block.splitlines()]
    assert len(lines) > 15
    for line in lines:
        parse(cli, shlex.split(line)[1:])


def test_front_matter_names_the_skill(text: str) -> None:
    """A name and a description of at most 1,024 characters, as agents demand."""
    front = re.match(r"---\nname: gpu-launch\ndescription: (.+)\n---\n", text)
    assert front is not None
    assert len(front[1]) <= 1024


def test_every_command_has_json() -> None:
    assert {name for name, command in list_commands(cli) if not has_json(command)} == _WITHOUT_JSON


def list_commands(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, click.Command]]:
    """Return all commands with their full names."""
    found: list[tuple[str, click.Command]] = []
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found += list_commands(command, (*path, name))
        else:
            found.append((" ".join((*path, name)), command))
    return found


def has_json(command: click.Command) -> bool:
    """Return whether a command has `--json`."""
    return any("--json" in option.opts for option in command.params)
