"""The cluster.toml of a practice closet: with it, gpuhub treats the closet like any other machines."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
import re
import sys
from collections import Counter
from pathlib import Path

from gpuhub.common.gpu import GpuSpec
from gpuhub.common.paths import DEFAULT_INSTANCE, Paths
from gpuhub.config import settings
from gpuhub_closet.paths import node_paths
from gpuhub_closet.slurm import slurm_setup
from gpuhub_closet.topology import ClosetNode, ClosetPlan, SimulatedGpu

NOTICE = "Practice closet: the GPUs are simulated, and training runs on the CPU"
USERS = ("ada", "ben")
#: Environment variable for tests: how many users there are besides the two, named user01, user02 …
MORE_USERS = "GPUHUB_CLOSET_USERS"
#: Environment variable for tests: with the value `rest`, gpuhub reaches the closet's Slurm through slurmrestd.
SLURM_API = "GPUHUB_CLOSET_SLURM_API"
#: Environment variable: the time without work, such as `2m`, after which all nodes except the first go to sleep, which
#: stops their daemons. Without it, they stay on.
IDLE = "GPUHUB_CLOSET_IDLE"
#: CPU cores and memory of each simulated node, whatever this machine has: three of them have room for fifty notebooks.
_NODE_CPUS, _NODE_MEMORY = 40, "128G"
#: Ports of hub and proxy API of the two usual instances; others, which may run next to them, get a pair from 18100 on.
_PORTS = {DEFAULT_INSTANCE: (8000, 8001), "ghtest": (18000, 18001)}


def write_cluster_file(plan: ClosetPlan, paths: Paths, backend: str = "builtin") -> Path:
    """Write the closet's cluster.toml to `paths.closet_cluster_file`, and make the folders that it names."""
    for folder in (_homes(paths), _datasets(paths), paths.closet_cluster_file.parent):
        folder.mkdir(parents=True, exist_ok=True)
    text = format_cluster(plan, paths, cpus=os.cpu_count() or 1, backend=backend)
    new_file = paths.closet_cluster_file.with_suffix(".new")
    new_file.write_text(text, encoding="utf-8")
    settings.load(new_file)
    return new_file.replace(paths.closet_cluster_file)


def format_cluster(plan: ClosetPlan, paths: Paths, *, cpus: int, backend: str = "builtin") -> str:
    """Return the file's text. Docker refuses a container more than the machine's `cpus`."""
    port, proxy_port = _PORTS.get(plan.instance) or _derive_ports(plan.instance)
    cards = {card.model: card for node in plan.nodes for card in node.grantable_gpus}
    counts = [Counter(card.model for card in node.grantable_gpus) for node in plan.nodes]
    # The most that a node has of each: all of them are a profile. A program uses one MIG device only.
    most = {model: 1 if " MIG " in model else count for model, count in functools.reduce(operator.or_, counts).items()}
    whole_gpus = [card for node in plan.nodes for card in node.whole_gpus]
    has_slurm = backend == "slurm"
    tables = [
        "# Written by the practice closet at every start: copy it before you change it.",
        *(['engine = "slurm"'] if has_slurm else []),
        f"notice = {_format_value(_build_notice(plan))}",
        *(_format_node(node, paths, sleeps=number > 0 and not has_slurm) for number, node in enumerate(plan.nodes)),
        *(_format_profile(cards[model], count, cpus) for model in most for count in sorted({1, most[model]})),
        # Slurm allocates whole GPUs only.
        *(_share_profile(card, cpus) for card in whole_gpus[: 0 if has_slurm else 1]),
        _cpu_profile(cpus),
        _format_table("users", login="password", allowed=_list_users(), uid_first=20000),
        _format_slurm(plan, paths) if has_slurm else _scheduling(),
        # All nodes share this machine's disk, of which little may be free.
        _format_table(
            "storage", home=f"{_homes(paths)}/{{username}}", datasets=str(_datasets(paths)), stage_spare="1G"
        ),
        # The nodes share this machine, and a launch runs on all of them at once.
        _format_table("jobs", cpus=max(1, cpus // len(plan.nodes)), memory="4G", shm="1G"),
        _format_table("hub", address=str(plan.head), port=port, proxy_api_port=proxy_port),
        *([] if plan.instance == DEFAULT_INSTANCE else [_format_table("monitoring", port=port + 1000)]),
    ]
    return "\n\n".join(tables) + "\n"


def _build_notice(plan: ClosetPlan) -> str:
    real = [node.name for node in plan.nodes if node.real_gpus]
    return NOTICE + (f"; only {real[0]} has this machine's own GPUs." if real else ".")


def _scheduling() -> str:
    # Users can try preemption here: %gpu_launch --scavenge.
    return _format_table("scheduling", preemption=True, preempt_grace="30s")


def _format_slurm(plan: ClosetPlan, paths: Paths) -> str:
    conf = str(slurm_setup.build_slurm_config(plan, paths).conf)
    if os.environ.get(SLURM_API) != "rest":
        return _format_table("slurm", conf=conf)
    url, key = f"unix://{slurm_setup.rest_socket(paths)}", str(slurm_setup.jwt_key_file(paths))
    return _format_table("slurm", conf=conf, api="rest", rest_url=url, rest_key=key)


def _list_users() -> list[str]:
    more = int(os.environ.get(MORE_USERS) or 0)
    return [*USERS, *(f"user{number:02}" for number in range(1, more + 1))]


def _homes(paths: Paths) -> Path:
    return paths.state / "homes"


def _datasets(paths: Paths) -> Path:
    return paths.state / "datasets"


def _format_node(node: ClosetNode, paths: Paths, *, sleeps: bool) -> str:
    counts = Counter(node.grantable_gpus)
    gpus = ", ".join(
        f'{{ model = {_format_value(card.model)}, memory = "{card.memory_mib}M", count = {count} }}'
        for card, count in counts.items()
    )
    head = _format_table(
        "[nodes]",
        name=node.name,
        address=str(node.address),
        docker=node_paths(paths, node).docker_url,
        # All nodes share this machine; each is simulated with as much as such a machine would have.
        cpus=_NODE_CPUS,
        memory=_NODE_MEMORY,
        # A user may work at this machine's screen.
        **({"desktop": True} if node.real_gpus else {}),
    )
    idle = os.environ.get(IDLE)
    power = f"\n{_format_power(node, paths, idle)}" if sleeps and idle else ""
    return f"{head}\ngpus = [{gpus}]{power}"


def _format_power(node: ClosetNode, paths: Paths, idle: str) -> str:
    program = str(Path(sys.executable).with_name("gpuhub-closet"))
    on, off = (
        _format_value([program, "power", "--instance", paths.instance, action, node.name]) for action in ("on", "off")
    )
    return f"power = {{ on = {on}, off = {off}, idle = {_format_value(idle)} }}"


def _format_profile(card: SimulatedGpu | GpuSpec, count: int, cpus: int) -> str:
    is_simulated = isinstance(card, SimulatedGpu)
    name = re.sub(r"[^a-z0-9]", "", (card.model.partition("-")[0] if is_simulated else card.model).lower())[:28]
    return _format_table(
        "[profiles]",
        name=f"{name}x{count}" if count > 1 else name,
        title=f"{count} × {card.model}" if count > 1 else card.model,
        description=f"{round(card.memory_mib / 1024)} GB{' each' if count > 1 else ''}"
        f" ({'simulated' if is_simulated else 'real'})",
        gpu_model=card.model,
        gpu_count=count,
        cpus=min(2, cpus),
        memory="4G",
        shm="1G",
    )


def _share_profile(card: SimulatedGpu | GpuSpec, cpus: int) -> str:
    return _format_table(
        "[profiles]",
        name="part",
        title=f"A quarter of an {card.model}",
        description="For trying things out, with three others on the same card",
        gpu_model=card.model,
        gpu_share=4,
        cpus=min(2, cpus),
        memory="4G",
        shm="1G",
    )


def _cpu_profile(cpus: int) -> str:
    return _format_table(
        "[profiles]",
        name="cpu",
        title="No GPU",
        description="Writing, plotting, and launching on GPUs with %gpu_launch",
        gpu_count=0,
        cpus=min(2, cpus),
        memory="4G",
        shm="1G",
    )


def _format_table(header: str, /, **values: str | int | list[str]) -> str:
    return "\n".join((f"[{header}]", *(f"{key} = {_format_value(value)}" for key, value in values.items())))


def _derive_ports(instance: str) -> tuple[int, int]:
    first = 18100 + 2 * (int.from_bytes(hashlib.sha256(instance.encode()).digest()[:2]) % 400)
    return first, first + 1


def _format_value(value: str | int | list[str]) -> str:
    # Strings, numbers and lists of strings have the same form in JSON and TOML.
    return json.dumps(value, ensure_ascii=False)
