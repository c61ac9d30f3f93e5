"""The spawn form: profiles with free GPUs and the holders of the others.

It fills templates/gpuhub_form.html and gpuhub_parts.html; gpuhub_form.js refreshes the page.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from gpuhub.backends.plugin import find_plugin
from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.broker_api.schemas import ClusterView, HolderView, PartitionView, ProfileView
from gpuhub.common.errors import GpuhubError
from gpuhub.common.gpu import describe_gpus
from gpuhub.common.units import format_size, format_span
from gpuhub.config.containers.profiles import gpu_requirement
from gpuhub.config.settings import ClusterSettings, ProfileSettings
from gpuhub.domain import owner_limits
from gpuhub.storage.home_usage import HomeUsage, read_home_usage
from gpuhub.web.template_loader import build_environment, load_macros, read_asset, read_style
from gpuhub.web.text import build_card, count_totals, describe_gib, describe_partition

#: Time limit for the figures, seconds; after it the form is shown without them.
_FIGURES_TIMEOUT_S = 3.0


class FormSpawner(Protocol):
    """The part of a spawner that its form uses; JupyterHub's own attributes are untyped."""

    cluster: ClusterSettings
    user: Any
    orm_spawner: Any
    hub: Any
    log: Any

    @property
    def broker(self) -> AsyncBrokerClient: ...


async def build_spawn_form(spawner: FormSpawner) -> str:
    """Build the spawn page's form."""
    cluster, user = spawner.cluster, spawner.user
    groups = find_user_groups(cluster, user)
    view, home = await asyncio.gather(
        _read_figures(spawner, groups & cluster.access_groups), read_home_usage(cluster.storage, user.name)
    )
    last = spawner.orm_spawner.user_options
    options = last if isinstance(last, dict) else {}
    return render_form(
        cluster,
        view,
        last_profile=options.get("profile"),
        last_image=options.get("image"),
        is_kept=options.get("keep") in (True, "yes"),
        is_suspendable=options.get("suspend") not in (False, "no"),
        groups=groups,
        hub_url=spawner.hub.base_url,
        home=home,
    )


def find_user_groups(cluster: ClusterSettings, user: Any) -> frozenset[str]:
    """Return the groups of the hub's `user`, and those of the settings that name the user."""
    return owner_limits.list_groups(cluster, user.name, (group.name for group in user.orm_user.groups))


async def _read_figures(spawner: FormSpawner, groups: Collection[str]) -> ClusterView | None:
    try:
        async with asyncio.timeout(_FIGURES_TIMEOUT_S):
            return await spawner.broker.cluster(groups)
    except (GpuhubError, TimeoutError) as error:
        spawner.log.warning("The spawn form has no figures: %r", error)
        return None


#: Beginning of the names of fields in which a user chooses one of a profile's images.
IMAGE_FIELD = "image-"
UNKNOWN = "unknown"
FREE = "free"
QUEUE = "queue"
UNAVAILABLE = "away"
_NO_USAGE = HomeUsage()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCard:
    """One profile on the form."""

    name: str
    title: str
    description: str
    #: GPU, CPU, memory and time limit in one line.
    facts: str
    #: With Slurm: partition with its limits, account, QOS and reservation.
    terms: str
    #: UNKNOWN, FREE, QUEUE or UNAVAILABLE.
    status: str
    status_text: str
    free_text: str
    holders: tuple[HolderView, ...]
    is_chosen: bool
    #: Images to choose from, with the selected one first; empty where there is no choice.
    images: tuple[str, ...] = ()


def build_cards(
    cluster: ClusterSettings,
    view: ClusterView | None,
    last_profile: object,
    groups: Collection[str] = (),
    *,
    last_image: object = None,
) -> list[ProfileCard]:
    """Build a card for each profile that a user in these groups may use; while no GPU is free, one without comes first.

    The user's last one is selected if it starts at once, else the first that does; and its last image, where it has it.
    """
    profiles = [profile for profile in cluster.profiles if profile.admits(groups)]
    views = {} if view is None else {profile.name: profile for profile in view.profiles}
    if not _has_free_gpu(profiles, views):
        # In a notebook without GPU, cells take one when they need it: the notebook starts without waiting.
        profiles.sort(key=lambda profile: profile.gpu_count > 0)
    chosen = choose_preselected([profile.name for profile in profiles], views, last_profile)
    return [
        replace(
            _build_card(cluster, view, profile, views.get(profile.name), is_chosen=profile.name == chosen),
            images=list_images(profile, last_image if profile.name == last_profile else None),
        )
        for profile in profiles
    ]


def _has_free_gpu(profiles: Sequence[ProfileSettings], views: Mapping[str, ProfileView]) -> bool:
    """Return whether some profile gives a GPU at once, or it is not known."""
    shown = [views[profile.name] for profile in profiles if profile.gpu_count and profile.name in views]
    return not shown or any(view.starts_now for view in shown)


def choose_preselected(names: Sequence[str], views: Mapping[str, ProfileView], last_profile: object) -> str | None:
    """Return which of the profiles is selected when the form opens; None if there are none."""
    ready = [name for name in names if name in views and views[name].starts_now]
    if last_profile in ready or (last_profile in names and not ready):
        return str(last_profile)
    return next(iter(ready or names), None)


def list_images(profile: ProfileSettings, last_image: object) -> tuple[str, ...]:
    """Return the images to choose from, with the user's last one first; empty where there is no choice."""
    offered = profile.offered_images
    return tuple(sorted(offered, key=lambda image: image != last_image)) if len(offered) > 1 else ()


def list_gpu_memories(profile: ProfileSettings, view: ClusterView | None) -> list[int]:
    """Return the distinct memory sizes, MiB, of the GPUs that a profile can share; empty for whole GPUs."""
    if view is None or profile.gpu_share == 1:
        return []
    requirement = gpu_requirement(profile)
    return sorted({gpu.memory_mib for node in view.nodes for gpu in node.gpus if requirement.accepts(build_card(gpu))})


def _build_card(
    cluster: ClusterSettings,
    cluster_view: ClusterView | None,
    profile: ProfileSettings,
    view: ProfileView | None,
    *,
    is_chosen: bool,
) -> ProfileCard:
    status, status_text, free_text = _describe_status(view)
    partitions = () if cluster_view is None else cluster_view.partitions
    partition = next((partition for partition in partitions if profile.name in partition.profiles), None)
    if partition is not None and status == QUEUE:
        scheduler = "" if cluster_view is None else cluster_view.capabilities.scheduler
        status_text = f"waits in {scheduler}'s queue" if partition.is_up else "waits: its partition is down"
    return ProfileCard(
        name=profile.name,
        title=profile.title,
        description=profile.description,
        facts=describe_facts(profile, list_gpu_memories(profile, cluster_view), partition, view),
        terms=describe_terms(cluster, profile, partition),
        status=status,
        status_text=status_text,
        free_text=free_text,
        holders=view.holders if view is not None else (),
        is_chosen=is_chosen,
    )


def describe_terms(cluster: ClusterSettings, profile: ProfileSettings, partition: PartitionView | None) -> str:
    """Return the terms of the backend's job, such as `partition gpu (up to 8 h) · account physics`; may be empty."""
    limits = "" if partition is None else describe_partition(partition)
    return find_plugin(cluster).describe_terms(cluster, profile, partition, limits)


def _describe_status(view: ProfileView | None) -> tuple[str, str, str]:
    if view is None:
        return UNKNOWN, "", ""
    free_text = f"{view.free} of {view.total} {'parts ' if view.share > 1 else ''}free" if view.gpu_count else ""
    if view.starts_now:
        return FREE, "starts at once", free_text
    if view.gpu_count and not view.total:
        return UNAVAILABLE, "no node with such a GPU answers", ""
    return QUEUE, f"will queue at position {view.ahead + 1}", free_text


def describe_facts(
    profile: ProfileSettings,
    memories: Sequence[int] = (),
    partition: PartitionView | None = None,
    view: ProfileView | None = None,
) -> str:
    """Return facts such as `1 × RTX 5090 · 4 CPUs · 16 GiB memory · up to 8 h`, with the memory cap of a GPU share.

    A profile without a time limit has its partition's.

    Args:
        memories: Memory sizes of the GPUs that the profile can share, MiB, in order.
        view: What the broker says about the profile, with the CPU and memory that go with its GPUs.
    """
    parts = [_describe_gpus(profile, memories), *_describe_size(profile, view)]
    if profile.exclusive:
        parts.insert(1, "the node to itself")
    limit = profile.time_limit
    if limit is None and partition is not None:
        limit = partition.longest_s if partition.usual_s is None else partition.usual_s
    if limit is not None:
        parts.append(f"up to {format_span(limit)}")
    return " · ".join(parts)


def _describe_size(profile: ProfileSettings, view: ProfileView | None) -> Iterator[str]:
    """Yield what it has of CPU and memory: a number, or what the nodes with the least and the most of it give."""
    cpus = None if view is None else view.cpus
    memory = None if view is None else view.memory_mib
    if profile.cpus is not None:
        cpus = profile.cpus, profile.cpus
    if cpus is not None:
        least, most = (round(value, 1) for value in cpus)
        yield f"{_format_range(f'{least:g}', f'{most:g}')} CPU{'' if most == 1 else 's'}"
    if profile.memory is not None:
        yield f"{format_size(profile.memory)} memory"
    elif memory is not None:
        yield f"{_format_range(*(format_size(_round_size(mib) * 1024**2) for mib in memory))} memory"


def _format_range(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def _round_size(mib: int) -> int:
    """Return a size in whole GiB, where it has some: nobody chooses by less."""
    return mib // 1024 * 1024 if mib >= 1024 else mib


def _describe_gpus(profile: ProfileSettings, memories: Sequence[int]) -> str:
    if not profile.gpu_count:
        return "no GPU; a cell takes one with %%gpu"
    what = describe_gpus(profile.gpu_count, gpu_requirement(profile))
    share = profile.gpu_share
    if share == 1:
        return what
    caps = list(dict.fromkeys(describe_gib(mib // share) for mib in (*memories[:1], *memories[-1:])))
    cap = f"{' to '.join(caps)} GiB" if caps else "a memory"
    return f"1/{share} of {what.removeprefix('1 × ')}, {cap} cap: a promise, not a wall"


def render_form(
    cluster: ClusterSettings,
    view: ClusterView | None,
    *,
    last_profile: object,
    last_image: object = None,
    is_kept: bool = False,
    is_suspendable: bool = True,
    groups: Collection[str] = (),
    hub_url: str = "/hub/",
    home: HomeUsage = _NO_USAGE,
) -> str:
    """Render the whole form as HTML, complete without JavaScript. `groups` are the user's."""
    return (
        build_environment()
        .get_template("gpuhub_form.html")
        .render(
            cards=build_cards(cluster, view, last_profile, groups, last_image=last_image),
            image_field=IMAGE_FIELD,
            can_keep=view is None or view.capabilities.persistent_notebooks,
            is_kept=is_kept,
            can_suspend=cluster.suspends_idle_notebooks,
            is_suspendable=is_suspendable,
            view=view,
            totals=count_totals(view),
            notice=cluster.notice,
            home=home,
            hub_url=hub_url,
            style=read_style("gpuhub_form.css"),
            script=read_asset("gpuhub_local_times.js") + read_asset("gpuhub_form.js"),
        )
    )


def render_parts(cluster: ClusterSettings, view: ClusterView | None, groups: Collection[str] = ()) -> dict[str, str]:
    """Render the parts of the form that change, by their `data-gpuhub-part`. `groups` are the user's."""
    macros = load_macros("gpuhub_parts.html")
    parts = {f"card-{card.name}": str(macros.status(card)) for card in build_cards(cluster, view, None, groups)}
    parts["problem"] = str(macros.problem(view))
    parts["nodes"] = str(macros.nodes(view, count_totals(view)))
    parts["queue"] = str(macros.queue(view))
    return parts
