"""The choice of the cluster that `gpuhub up` runs on: the given settings, this machine's GPUs, or provided nodes.

A package such as the practice closet provides nodes where there is neither a cluster.toml nor a GPU on this machine, or
where it is asked for. It is found by its entry point, so that gpuhub needs none to be installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from gpuhub.common import gpu
from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings
from gpuhub.ops.console import StepReport
from gpuhub.ops.deploy.programs import Program, Supervisor

#: Entry points of providers: each is a class without arguments. The first by name is used.
ENTRY_POINTS = "gpuhub.cluster_providers"
_TOOLKIT_HINT = (
    "This machine has an NVIDIA GPU, but Docker cannot pass it to containers: install NVIDIA's container toolkit "
    "(package nvidia-container-toolkit, from NVIDIA's package repository), then `sudo make up` again"
)


class ClusterOrigin(StrEnum):
    """The source of the nodes."""

    SETTINGS = "settings"
    THIS_MACHINE = "this-machine"
    #: A package such as the practice closet; see `ClusterProvider`.
    PROVIDER = "provider"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterChoice:
    """The cluster to run on, and the file that describes it."""

    origin: ClusterOrigin
    cluster_file: Path


def choose_cluster(
    paths: Paths,
    settings_file: Path,
    *,
    variant: str | None = None,
    real_gpu: str | None = None,
    is_provider_running: bool = False,
) -> ClusterChoice:
    """Return `settings_file` if it exists; else this machine if it has a GPU; else the provider's nodes.

    Args:
        variant: `make up CLOSET=…`: the provider's nodes also where this machine has a GPU; None where it is not set.
        real_gpu: `make up REAL_GPU=…`: the provider's node that gets this machine's GPUs; None where it is not set.
        is_provider_running: The provider's nodes run already, and stay until `make down`.

    Raises:
        SettingsError: The provider's nodes are asked for, and there is a file of settings.
        SetupError: This machine has a GPU that Docker cannot pass on.
    """
    requested = {"CLOSET": variant, "REAL_GPU": real_gpu}
    words = " ".join(f"{name}={value}" for name, value in requested.items() if value is not None)
    if settings_file.exists():
        if words:
            raise SettingsError(
                f"{words} is for the practice closet, and {settings_file} describes other nodes: move it away"
            )
        return ClusterChoice(origin=ClusterOrigin.SETTINGS, cluster_file=settings_file.resolve())
    if words or is_provider_running:
        return ClusterChoice(origin=ClusterOrigin.PROVIDER, cluster_file=paths.closet_cluster_file)
    cards = find_local_gpus()
    if not cards:
        return ClusterChoice(origin=ClusterOrigin.PROVIDER, cluster_file=paths.closet_cluster_file)
    check_toolkit()
    file = paths.state / "this-machine.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(build_single_node(cards), encoding="utf-8")
    return ClusterChoice(origin=ClusterOrigin.THIS_MACHINE, cluster_file=file)


def choose_engine(requested: str | None, running: str | None) -> str:
    """Return the backend of the provider's nodes: the requested one, else the one that runs, else gpuhub's own.

    Args:
        requested: `make up ENGINE=…`; None where it is not set.
        running: The backend that runs now; None when none does.

    Raises:
        SetupError: Another backend runs than the requested one.
    """
    if None not in (requested, running) and requested != running:
        raise SetupError(
            f"the practice closet runs with ENGINE={running}, and its leases cannot move to another one: "
            f"`sudo make down` first, then `sudo make up ENGINE={requested}`"
        )
    return requested or running or "builtin"


def check_requested_engine(choice: ClusterChoice, configured: str, requested: str | None) -> None:
    """Check that the requested backend is the one that the file of settings is for.

    Raises:
        SettingsError: Another one was requested.
    """
    if requested in (None, configured):
        return
    if choice.origin is ClusterOrigin.THIS_MACHINE:
        raise SettingsError(
            f"ENGINE={requested} is for the practice closet, and this machine has a GPU: write a cluster.toml "
            f'with engine = "{requested}" (cluster.example.toml shows how), or practise with CLOSET=practice'
        )
    raise SettingsError(
        f'{choice.cluster_file} is for engine = "{configured}": to use ENGINE={requested}, change it there'
    )


def check_toolkit() -> None:
    """Check that NVIDIA's container toolkit is installed.

    Raises:
        SetupError: It is not.
    """
    if shutil.which("nvidia-container-runtime-hook") is None and shutil.which("nvidia-ctk") is None:
        raise SetupError(_TOOLKIT_HINT)


def find_local_gpus() -> list[gpu.GpuSpec]:
    """Return the GPUs of this machine as its driver reports them; none without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return parse_gpus(done.stdout) if done.returncode == 0 else []


def parse_gpus(text: str) -> list[gpu.GpuSpec]:
    """Parse lines such as `NVIDIA GeForce RTX 5090, 32607` (name, MiB)."""
    cards = []
    for line in text.splitlines():
        name, _, memory = line.rpartition(",")
        if name and memory.strip().isdigit():
            cards.append(gpu.GpuSpec(model=gpu.shorten_model(name), memory_mib=int(memory)))
    return cards


def build_single_node(cards: list[gpu.GpuSpec]) -> str:
    """Return a cluster.toml for one machine with these GPUs.

    It has a profile for one GPU of each model, one for all of a model where there are several, and one without a GPU.
    """
    lines = [
        "# Made by `gpuhub up`. To change it, copy it to cluster.toml next to the Makefile.",
        "[[nodes]]",
        'name = "this-machine"',
        'address = "127.0.0.1"',
        'docker = "unix:///run/docker.sock"',
        # Usually a user works at its screen, and the programs of the desktop use the GPU as well.
        "desktop = true",
    ]
    models = Counter(card.model for card in cards)
    for number, (model, most) in enumerate(models.items(), start=1):
        memory = max(card.memory_mib for card in cards if card.model == model)
        for count in sorted({1, most}):
            lines += [
                "[[profiles]]",
                f'name = "gpu{number}{f"x{count}" if count > 1 else ""}"',
                f"title = {json.dumps(f'{count} × {model}' if count > 1 else model, ensure_ascii=False)}",
                f'description = "{round(memory / 1024)} GB{" each" if count > 1 else ""}"',
                f"gpu_model = {json.dumps(model)}",
                f"gpu_count = {count}",
            ]
    lines += ["[[profiles]]", 'name = "cpu"', 'title = "No GPU"', "gpu_count = 0", 'memory = "4G"']
    lines += ["[users]", 'login = "password"', 'allowed = ["ada", "ben"]', "uid_first = 20000"]
    lines += ["[storage]", 'home = "/var/lib/gpuhub/homes/{username}"']
    return "\n".join(lines) + "\n"


class ClusterProvider(Protocol):
    """Nodes that are made on this machine, with the programs that they need."""

    @property
    def title(self) -> str:
        """A description of the nodes for the first line of `gpuhub up`."""

    def find_running_backend(self, supervised: Collection[str]) -> str | None:
        """Return the backend that the provider's programs among the supervised ones run; None if none of them is."""

    def write_cluster_file(
        self, paths: Paths, backend: str, variant: str | None, *, real_gpu: str | None = None, is_running: bool
    ) -> Path:
        """Write the settings of the nodes for this backend, and return the file.

        Args:
            variant: Which of the provider's clusters; None for the last one, or the usual one at first.
            real_gpu: The node that gets this machine's own GPUs; None: as chosen last, or none with another `variant`.
            is_running: Whether the nodes run, so that they cannot become others.

        Raises:
            GpuhubError: There is no such cluster or node, another one runs, or this machine has no GPUs to give.
        """

    def start(
        self,
        paths: Paths,
        supervisor: Supervisor,
        cluster: ClusterSettings,
        services: Sequence[Program],
        report: StepReport,
    ) -> None:
        """Start the nodes' programs and return when they answer.

        The supervisor also gets the programs in `services`, and does not start them.
        """

    def ensure_down(self, paths: Paths, *, purge: bool) -> None:
        """Remove the nodes from this machine; `purge` removes the data as well that makes the next start quick."""

    def find_leftovers(self, paths: Paths) -> list[str]:
        """Return a line for each thing of the nodes that is still on this machine."""


def find_provider() -> ClusterProvider | None:
    """Return the installed provider; None where there is none."""
    providers = sorted(entry_points(group=ENTRY_POINTS), key=lambda entry_point: entry_point.name)
    if not providers:
        return None
    provider: ClusterProvider = providers[0].load()()
    return provider
