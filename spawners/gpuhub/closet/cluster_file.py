"""An ordinary cluster.toml for a practice closet: with it, the product treats the closet like any machines."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Literal

from gpuhub import settings
from gpuhub.closet import slurm
from gpuhub.closet.places import node_places
from gpuhub.closet.plan import Card, ClosetNode, Plan
from gpuhub.paths import DEFAULT_INSTANCE, Paths

Engine = Literal["builtin", "slurm"]

NOTICE = "Practice closet: the GPUs are simulated, and training runs on the CPU."
USERS = ("ada", "ben")
#: For tests: with `rest` in this variable of the environment gpuhub asks the closet's Slurm by slurmrestd.
SLURM_API = "GPUHUB_CLOSET_SLURM_API"
#: Ports on loopback of the two usual instances; others, which may run beside them, get a pair from 18100 on.
_PORTS = {DEFAULT_INSTANCE: (8000, 8001), "ghtest": (18000, 18001)}


def write_cluster_file(plan: Plan, paths: Paths, engine: Engine = "builtin") -> Path:
    """Write the closet's cluster.toml and make the folders it names.

    Returns:
        Where it was written: `paths.closet_cluster_file`.
    """
    for folder in (_homes(paths), _datasets(paths), paths.closet_cluster_file.parent):
        folder.mkdir(parents=True, exist_ok=True)
    text = format_cluster(plan, paths, cpus=os.cpu_count() or 1, engine=engine)
    fresh = paths.closet_cluster_file.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    settings.load(fresh)
    return fresh.replace(paths.closet_cluster_file)


def format_cluster(plan: Plan, paths: Paths, *, cpus: int, engine: Engine = "builtin") -> str:
    """The file's text, for a machine with so many CPUs: Docker refuses a container more than there are."""
    port, proxy_port = _PORTS.get(plan.instance) or _own_ports(plan.instance)
    cards = {given.model: given for node in plan.nodes for card in node.cards for given in card.given}
    whole = [card for node in plan.nodes for card in node.cards if not card.mig]
    has_slurm = engine == "slurm"
    tables = [
        "# Written by the practice closet at every start: copy it before you change it.",
        *(['engine = "slurm"'] if has_slurm else []),
        f"notice = {_text(NOTICE)}",
        *(_node(node, paths) for node in plan.nodes),
        *(_profile(card, cpus) for card in cards.values()),
        # Slurm gives whole GPUs only.
        *(_part_profile(card, cpus) for card in whole[: 0 if has_slurm else 1]),
        _cpu_profile(cpus),
        _table("users", login="password", allowed=list(USERS), uid_first=20000),
        _slurm(plan, paths) if has_slurm else _scheduling(),
        _table("storage", home=f"{_homes(paths)}/{{username}}", datasets=str(_datasets(paths))),
        # The nodes share this machine, and a launch runs on all of them at once.
        _table("jobs", cpus=max(1, cpus // 3), memory="4G", shm="1G"),
        _table("hub", address=str(plan.head), port=port, proxy_api_port=proxy_port),
    ]
    return "\n\n".join(tables) + "\n"


def _scheduling() -> str:
    # Here everybody may practise giving GPUs back: %gpu_launch --scavenge.
    return _table("scheduling", preemption=True, preempt_grace="30s")


def _slurm(plan: Plan, paths: Paths) -> str:
    conf = str(slurm.build_files(plan, paths).conf)
    if os.environ.get(SLURM_API) != "rest":
        return _table("slurm", conf=conf)
    url, key = f"unix://{slurm.rest_socket(paths)}", str(slurm.jwt_key_file(paths))
    return _table("slurm", conf=conf, api="rest", rest_url=url, rest_key=key)


def _homes(paths: Paths) -> Path:
    return paths.state / "homes"


def _datasets(paths: Paths) -> Path:
    return paths.state / "datasets"


def _node(node: ClosetNode, paths: Paths) -> str:
    counts = Counter(given for card in node.cards for given in card.given)
    gpus = ", ".join(
        f'{{ model = {_text(card.model)}, memory = "{card.memory_mib}M", count = {count} }}'
        for card, count in counts.items()
    )
    head = _table("[nodes]", name=node.name, address=str(node.address), docker=node_places(paths, node).docker_url)
    return f"{head}\ngpus = [{gpus}]"


def _profile(card: Card, cpus: int) -> str:
    return _table(
        "[profiles]",
        name=re.sub(r"[^a-z0-9]", "", card.model.lower()),
        title=card.model,
        description=f"{round(card.memory_mib / 1024)} GB (simulated)",
        gpu_model=card.model,
        cpus=min(2, cpus),
        memory="4G",
        shm="1G",
    )


def _part_profile(card: Card, cpus: int) -> str:
    return _table(
        "[profiles]",
        name="part",
        title=f"A quarter of an {card.model}",
        description="For trying things out, beside three others on the same card",
        gpu_model=card.model,
        gpu_share=4,
        cpus=min(2, cpus),
        memory="4G",
        shm="1G",
    )


def _cpu_profile(cpus: int) -> str:
    return _table(
        "[profiles]",
        name="cpu",
        title="No GPU",
        description="Writing, plotting, and launching on GPUs with %gpu_launch",
        gpu_count=0,
        cpus=min(2, cpus),
        memory="4G",
        shm="1G",
    )


def _table(header: str, /, **values: str | int | list[str]) -> str:
    return "\n".join((f"[{header}]", *(f"{key} = {_text(value)}" for key, value in values.items())))


def _own_ports(instance: str) -> tuple[int, int]:
    first = 18100 + 2 * (int.from_bytes(hashlib.sha256(instance.encode()).digest()[:2]) % 400)
    return first, first + 1


def _text(value: str | int | list[str]) -> str:
    # JSON's strings, numbers and lists of strings are TOML's as well.
    return json.dumps(value, ensure_ascii=False)
