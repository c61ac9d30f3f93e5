"""The spawn form: profiles with what is free right now, and who holds what; rendered here, refreshed by form.js."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuhub import gpus
from gpuhub.broker.schemas import ClusterView, Holder, PartitionView, ProfileView
from gpuhub.containers import rendering
from gpuhub.containers.telling import card_of, count_totals, describe_gib, describe_partition
from gpuhub.containers.troubles import SpawnFailed
from gpuhub.quantities import format_size, format_span
from gpuhub.settings import Cluster, Profile, gpu_requirement
from gpuhub.slurm.site import find_terms
from gpuhub.storage.quotas import HomeUse

UNKNOWN = "unknown"
FREE = "free"
QUEUE = "queue"
AWAY = "away"
_NOTHING = HomeUse()


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One profile on the form."""

    name: str
    title: str
    description: str
    #: GPU, CPU, memory and time limit in one line.
    facts: str
    #: With Slurm: partition with its limits, account, QOS, reservation.
    terms: str
    #: One of the words above.
    status: str
    status_text: str
    free_text: str
    holders: tuple[Holder, ...]
    is_chosen: bool


def build_cards(cluster: Cluster, view: ClusterView | None, last_profile: object) -> list[Card]:
    """A card for each profile; the chosen one is the user's last if it starts at once, else the first that does."""
    views = {} if view is None else {profile.name: profile for profile in view.profiles}
    chosen = choose_preselected(cluster, views, last_profile)
    return [
        _card(cluster, view, profile, views.get(profile.name), is_chosen=profile.name == chosen)
        for profile in cluster.profiles
    ]


def choose_preselected(cluster: Cluster, views: Mapping[str, ProfileView], last_profile: object) -> str:
    """The name of the profile that is selected when the form opens."""
    known = [profile.name for profile in cluster.profiles]
    ready = [name for name in known if name in views and views[name].starts_now]
    if last_profile in ready or (last_profile in known and not ready):
        return str(last_profile)
    return (ready or known)[0]


def memories_of(profile: Profile, view: ClusterView | None) -> list[int]:
    """The memory of the GPUs that a profile takes a part of, MiB, each size once; empty for whole GPUs."""
    if view is None or profile.gpu_share == 1:
        return []
    requirement = gpu_requirement(profile)
    return sorted({gpu.memory_mib for node in view.nodes for gpu in node.gpus if requirement.accepts(card_of(gpu))})


def _card(
    cluster: Cluster, whole: ClusterView | None, profile: Profile, view: ProfileView | None, *, is_chosen: bool
) -> Card:
    status, status_text, free_text = _status(view)
    partitions = () if whole is None else whole.partitions
    partition = next((one for one in partitions if profile.name in one.profiles), None)
    if partition is not None and status == QUEUE:
        status_text = "waits in Slurm's queue" if partition.is_up else "waits: its partition is down"
    return Card(
        name=profile.name,
        title=profile.title,
        description=profile.description,
        facts=describe_facts(profile, memories_of(profile, whole), partition),
        terms=describe_terms(cluster, profile, partition),
        status=status,
        status_text=status_text,
        free_text=free_text,
        holders=view.holders if view is not None else (),
        is_chosen=is_chosen,
    )


def describe_terms(cluster: Cluster, profile: Profile, partition: PartitionView | None) -> str:
    """As which Slurm job it runs, such as `partition gpu (up to 8 h) · account physics`; empty without Slurm."""
    if cluster.engine == "builtin":
        return ""
    terms = find_terms(cluster.slurm, profile)
    name = terms.partition if partition is None else partition.name
    limits = "" if partition is None else f" ({describe_partition(partition)})"
    told = (("account", terms.account), ("QOS", terms.qos), ("reservation", terms.reservation))
    return " · ".join(
        [*([f"partition {name}{limits}"] if name else []), *(f"{what} {value}" for what, value in told if value)]
    )


def _status(view: ProfileView | None) -> tuple[str, str, str]:
    if view is None:
        return UNKNOWN, "", ""
    free_text = f"{view.free} of {view.total} {'parts ' if view.share > 1 else ''}free" if view.gpu_count else ""
    if view.starts_now:
        return FREE, "starts at once", free_text
    if view.gpu_count and not view.total:
        return AWAY, "no node with such a GPU answers at present", ""
    return QUEUE, f"will queue at position {view.ahead + 1}", free_text


def describe_facts(profile: Profile, memories: Sequence[int] = (), partition: PartitionView | None = None) -> str:
    """Such as `1 × RTX 5090 · 4 CPUs · 16 GiB memory · up to 8 h`; for a part of a GPU, what its cap is worth.

    `memories` are those of the GPUs that it may be a part of, MiB, in order. A profile without a limit has its
    partition's.
    """
    cpus = f"{profile.cpus:g} CPU{'' if profile.cpus == 1 else 's'}"
    parts = [_describe_gpus(profile, memories), cpus, f"{format_size(profile.memory)} memory"]
    if profile.exclusive:
        parts.insert(1, "the node to itself")
    limit = profile.time_limit
    if limit is None and partition is not None:
        limit = partition.longest_s if partition.usual_s is None else partition.usual_s
    if limit is not None:
        parts.append(f"up to {format_span(limit)}")
    return " · ".join(parts)


def _describe_gpus(profile: Profile, memories: Sequence[int]) -> str:
    if not profile.gpu_count:
        return "no GPU"
    what = gpus.describe(profile.gpu_count, gpu_requirement(profile))
    share = profile.gpu_share
    if share == 1:
        return what
    caps = list(dict.fromkeys(describe_gib(mib // share) for mib in (*memories[:1], *memories[-1:])))
    cap = f"{' to '.join(caps)} GiB" if caps else "a memory"
    return f"1/{share} of {what.removeprefix('1 × ')}, {cap} cap: a promise, not a wall"


def build_form(
    cluster: Cluster,
    view: ClusterView | None,
    *,
    last_profile: object,
    hub_url: str = "/hub/",
    home: HomeUse = _NOTHING,
) -> str:
    """The whole form as HTML, complete without JavaScript."""
    return (
        rendering.environment()
        .get_template("gpuhub_form.html")
        .render(
            cards=build_cards(cluster, view, last_profile),
            view=view,
            totals=count_totals(view),
            notice=cluster.notice,
            home=home,
            hub_url=hub_url,
            style=rendering.read_style("gpuhub_form.css"),
            script=rendering.read_part("gpuhub_form.js"),
        )
    )


def build_parts(cluster: Cluster, view: ClusterView | None) -> dict[str, str]:
    """The parts of the form that change, by their `data-gpuhub-part`: what form.js puts in place."""
    macros = rendering.macros("gpuhub_parts.html")
    parts = {f"card-{card.name}": str(macros.status(card)) for card in build_cards(cluster, view, None)}
    parts["problem"] = str(macros.problem(view))
    parts["nodes"] = str(macros.nodes(view, count_totals(view)))
    parts["queue"] = str(macros.queue(view))
    return parts


def parse_form(fields: dict[str, list[str]]) -> dict[str, str]:
    """What the form sent, as user options: `{"profile": name}`.

    Raises:
        SpawnFailed: a field that the form does not have, or one twice.
    """
    for key, values in fields.items():
        if key != "profile":
            raise SpawnFailed(f"The form has no field {key[:40]!r}, only profile.", reason="invalid-request")
        if len(values) != 1:
            raise SpawnFailed("Exactly one profile can be chosen.", reason="invalid-request")
    return {"profile": fields["profile"][0]} if fields else {}
