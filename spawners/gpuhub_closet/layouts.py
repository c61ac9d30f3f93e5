"""The practice closets to choose from with `make up CLOSET=…`: which nodes they have, with which GPUs and links.

With `REAL_GPU=…`, one node has this machine's own GPUs in place of its simulated ones (`real_gpus`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.paths import Paths
from gpuhub_closet import real_gpus, shell
from gpuhub_closet.paths import layout_file
from gpuhub_closet.real_gpus import RealGpus
from gpuhub_closet.topology import SIMULATED, ClosetNode, ClosetPlan, NodeLink, SimulatedGpu, build_nodes, build_subnet

#: The layout where none was chosen.
PRACTICE = "practice"

_RTX_5090 = SimulatedGpu(model="RTX 5090", memory_mib=32607)
_RTX_5070 = SimulatedGpu(model="RTX 5070", memory_mib=12227)
_RTX_5060 = SimulatedGpu(model="RTX 5060", memory_mib=8151)
_A100 = SimulatedGpu(model="A100-SXM4-80GB", memory_mib=81920, capability=(8, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The nodes of a closet, whose images are kept by the nodes' names: all layouts share those of rig1 to rig3."""

    gpus: Mapping[str, tuple[SimulatedGpu, ...]]
    link: NodeLink


LAYOUTS: Mapping[str, Layout] = {
    PRACTICE: Layout(
        gpus={"rig1": (_RTX_5090,), "rig2": (_RTX_5070,), "rig3": (_RTX_5060,)}, link=NodeLink(rate_mbit=2500)
    ),
    "house": Layout(
        gpus={
            "rig1": (_RTX_5090,),
            "rig2": (_RTX_5090,),
            "rig3": (_RTX_5070,),
            "rig4": (_RTX_5070,),
            "rig5": (_RTX_5060,),
        },
        link=NodeLink(rate_mbit=2500),
    ),
    "lab": Layout(gpus=dict.fromkeys(("rig1", "rig2", "rig3"), (_A100,) * 4), link=NodeLink(rate_mbit=10_000)),
}


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """What `make up` chooses."""

    layout: str
    #: The node with this machine's own GPUs; None where all GPUs are simulated.
    real_gpu: str | None = None

    def __str__(self) -> str:
        return f"CLOSET={self.layout}" + (f" REAL_GPU={self.real_gpu}" if self.real_gpu else "")


def check_choice(choice: LayoutChoice) -> None:
    """Check that there is such a layout, and that it has the node.

    Raises:
        SettingsError: It has not.
    """
    layout = LAYOUTS.get(choice.layout)
    if layout is None:
        raise SettingsError(f"CLOSET={choice.layout}: there is no such practice closet; there are {', '.join(LAYOUTS)}")
    if choice.real_gpu is not None and choice.real_gpu not in layout.gpus:
        raise SettingsError(
            f"REAL_GPU={choice.real_gpu}: the practice closet {choice.layout} has no such node; there are "
            f"{', '.join(layout.gpus)}"
        )


def build_plan(instance: str, layout: str = PRACTICE, real: RealGpus | None = None) -> ClosetPlan:
    """Return the plan of a layout, in which one node may have real GPUs.

    Raises:
        SettingsError: There is no such layout, or it has no such node.
    """
    check_choice(LayoutChoice(layout, None if real is None else real.node))
    chosen, subnet = LAYOUTS[layout], build_subnet(instance)
    nodes = build_nodes(subnet, chosen.gpus)
    if real is not None:
        nodes = tuple(_with_real_gpus(node, real) for node in nodes)
    return ClosetPlan(instance=instance, subnet=subnet, nodes=nodes, link=chosen.link)


def _with_real_gpus(node: ClosetNode, real: RealGpus) -> ClosetNode:
    if node.name == real.node:
        return replace(node, gpus=(), real_gpus=real.gpus)
    models = {gpu.model for gpu in real.gpus}
    return replace(
        node,
        gpus=tuple(replace(gpu, model=gpu.model + SIMULATED) if gpu.model in models else gpu for gpu in node.gpus),
    )


def find_plan(paths: Paths) -> ClosetPlan:
    """Return the plan of an instance's closet, as it was chosen last."""
    return build_plan(paths.instance, find_layout(paths) or PRACTICE, real_gpus.read_real_gpus(paths))


def build_largest_plan(instance: str) -> ClosetPlan:
    """Return a plan with the nodes of all layouts, to look for what is left of any of them."""
    subnet = build_subnet(instance)
    names = sorted({name for layout in LAYOUTS.values() for name in layout.gpus})
    return ClosetPlan(instance=instance, subnet=subnet, nodes=build_nodes(subnet, dict.fromkeys(names, ())))


def find_layout(paths: Paths) -> str | None:
    """Return the layout that was chosen last; None if there was none, or an older version knew it."""
    try:
        name = layout_file(paths).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    return name if name in LAYOUTS else None


def choose_layout(paths: Paths, requested: str | None, *, is_running: bool, real_gpu: str | None = None) -> ClosetPlan:
    """Return the plan of the requested layout, or else of the last one, and keep the choice.

    Args:
        real_gpu: The node that gets this machine's own GPUs; None: as chosen last, or none with another `requested`.

    Raises:
        SettingsError: There is no such layout, or it has no such node.
        SetupError: The closet runs with another choice, or this machine has no GPUs to give.
    """
    kept = real_gpus.read_real_gpus(paths)
    last = LayoutChoice(find_layout(paths) or PRACTICE, None if kept is None else kept.node)
    chosen = LayoutChoice(requested or last.layout, real_gpu) if requested or real_gpu else last
    check_choice(chosen)
    if is_running and chosen != last:
        raise SetupError(f"the practice closet runs with {last}: `sudo make down` first, then `sudo make up {chosen}`")
    if not is_running:
        kept = None if chosen.real_gpu is None else real_gpus.find_real_gpus(chosen.real_gpu)
    if requested or kept is not None:
        paths.closet.mkdir(parents=True, exist_ok=True)
        shell.replace_file(layout_file(paths), f"{chosen.layout}\n".encode())
        real_gpus.keep_real_gpus(paths, kept)
    return build_plan(paths.instance, chosen.layout, kept)
