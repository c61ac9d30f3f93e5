"""The practice closets to choose from with `make up CLOSET=…`: which nodes they have, with which GPUs and links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.paths import Paths
from gpuhub_closet import shell
from gpuhub_closet.paths import layout_file
from gpuhub_closet.topology import ClosetPlan, NodeLink, SimulatedGpu, build_nodes, build_subnet

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


def build_plan(instance: str, layout: str = PRACTICE) -> ClosetPlan:
    """Return the plan of a layout.

    Raises:
        SettingsError: There is no such layout.
    """
    chosen = LAYOUTS.get(layout)
    if chosen is None:
        raise SettingsError(f"CLOSET={layout}: there is no such practice closet; there are {', '.join(LAYOUTS)}")
    subnet = build_subnet(instance)
    return ClosetPlan(instance=instance, subnet=subnet, nodes=build_nodes(subnet, chosen.gpus), link=chosen.link)


def find_plan(paths: Paths) -> ClosetPlan:
    """Return the plan of an instance's closet, as it was chosen last."""
    return build_plan(paths.instance, find_layout(paths) or PRACTICE)


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


def choose_layout(paths: Paths, requested: str | None, *, is_running: bool) -> ClosetPlan:
    """Return the plan of the requested layout, or else of the last one, and keep the choice.

    Raises:
        SettingsError: There is no such layout.
        SetupError: The closet runs with another one.
    """
    last = find_layout(paths)
    plan = build_plan(paths.instance, requested or last or PRACTICE)
    if is_running and requested not in (None, last or PRACTICE):
        raise SetupError(
            f"the practice closet runs with CLOSET={last or PRACTICE}: `sudo make down` first, then "
            f"`sudo make up CLOSET={requested}`"
        )
    if requested:
        paths.closet.mkdir(parents=True, exist_ok=True)
        shell.replace_file(layout_file(paths), f"{requested}\n".encode())
    return plan
