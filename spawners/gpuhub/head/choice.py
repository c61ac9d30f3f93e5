"""Which cluster `gpuhub up` runs on: the settings given, this machine's own GPUs, or the practice closet."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from gpuhub import gpus
from gpuhub.errors import SettingsError, SetupError
from gpuhub.paths import Paths

Engine = Literal["builtin", "slurm"]

_TOOLKIT_HINT = (
    "This machine has an NVIDIA GPU, but Docker cannot pass it to containers: install NVIDIA's container toolkit "
    "(package nvidia-container-toolkit, from NVIDIA's package repository), then `sudo make up` again"
)


class Kind(StrEnum):
    """Where the nodes come from."""

    SETTINGS = "settings"
    THIS_MACHINE = "this-machine"
    PRACTICE = "practice"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The cluster to run on, and the file that describes it."""

    kind: Kind
    cluster_file: Path


def choose(paths: Paths, settings_file: Path) -> Choice:
    """`settings_file` where it exists; else this machine where it has a GPU; else the practice closet.

    Raises:
        SetupError: this machine has a GPU that Docker cannot pass on.
    """
    if settings_file.exists():
        return Choice(kind=Kind.SETTINGS, cluster_file=settings_file.resolve())
    cards = local_cards()
    if not cards:
        return Choice(kind=Kind.PRACTICE, cluster_file=paths.closet_cluster_file)
    if shutil.which("nvidia-container-runtime-hook") is None and shutil.which("nvidia-ctk") is None:
        raise SetupError(_TOOLKIT_HINT)
    file = paths.state / "this-machine.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(build_single_node(cards), encoding="utf-8")
    return Choice(kind=Kind.THIS_MACHINE, cluster_file=file)


def choose_engine(asked: Engine | None, running: Engine | None) -> Engine:
    """The practice closet's engine: the one asked for, else the one it runs with, else gpuhub's own.

    Args:
        asked: `make up ENGINE=…`; None where nothing was said.
        running: what the closet runs with now; None when it does not run.

    Raises:
        SetupError: it runs with another; says what to do.
    """
    if None not in (asked, running) and asked != running:
        raise SetupError(
            f"the practice closet runs with ENGINE={running}, and what that has given out cannot move to another: "
            f"`sudo make down` first, then `sudo make up ENGINE={asked}`"
        )
    return asked or running or "builtin"


def refuse_other_engine(choice: Choice, configured: Engine, asked: Engine | None) -> None:
    """A file of settings says itself which engine it is for.

    Raises:
        SettingsError: another one was asked for; says what to do.
    """
    if asked in (None, configured):
        return
    if choice.kind is Kind.THIS_MACHINE:
        raise SettingsError(
            f"ENGINE={asked} is for the practice closet, and this machine has a GPU of its own: write a cluster.toml "
            f'with engine = "{asked}"; cluster.example.toml shows how'
        )
    raise SettingsError(f'{choice.cluster_file} is for engine = "{configured}": to use ENGINE={asked}, say so there')


def local_cards() -> list[gpus.Card]:
    """The GPUs of this machine, as its driver reports them; none without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return parse_cards(done.stdout) if done.returncode == 0 else []


def parse_cards(text: str) -> list[gpus.Card]:
    """Lines such as `NVIDIA GeForce RTX 5090, 32607` (name, MiB) as cards."""
    cards = []
    for line in text.splitlines():
        name, _, memory = line.rpartition(",")
        if name and memory.strip().isdigit():
            cards.append(gpus.Card(model=gpus.short_model(name), memory_mib=int(memory)))
    return cards


def build_single_node(cards: list[gpus.Card]) -> str:
    """A cluster.toml for one machine with these GPUs: a profile a model, and one without a GPU."""
    lines = [
        "# Made by `gpuhub up`. To change it, copy it to cluster.toml beside the Makefile.",
        "[[nodes]]",
        'name = "this-machine"',
        'address = "127.0.0.1"',
        'docker = "unix:///run/docker.sock"',
    ]
    models = dict.fromkeys(card.model for card in cards)
    for number, model in enumerate(models, start=1):
        memory = max(card.memory_mib for card in cards if card.model == model)
        lines += [
            "[[profiles]]",
            f'name = "gpu{number}"',
            f"title = {json.dumps(model)}",
            f'description = "{round(memory / 1024)} GB"',
            f"gpu_model = {json.dumps(model)}",
        ]
    lines += ["[[profiles]]", 'name = "cpu"', 'title = "No GPU"', "gpu_count = 0", 'memory = "4G"']
    lines += ["[users]", 'login = "password"', 'allowed = ["ada", "ben"]', "uid_first = 20000"]
    lines += ["[storage]", 'home = "/var/lib/gpuhub/homes/{username}"']
    return "\n".join(lines) + "\n"
