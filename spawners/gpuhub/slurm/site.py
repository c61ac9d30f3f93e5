"""What is asked of Slurm against what a site has: partitions, accounts, types of GPUs, limits. Pure.

Each mistake is one line: the key or request, its value, Slurm's word for it, and what there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuhub.quantities import format_size, format_span
from gpuhub.settings import Cluster, Profile, Slurm
from gpuhub.slurm.values import Node, Partition, Site

#: Of what there is, so many are named.
_NAMED = 12
#: Slurm's own words.
_WORDS = {
    "partition": "Invalid partition name specified",
    "account": "Invalid account or account/partition combination specified",
    "qos": "Invalid qos specification",
    "reservation": "Requested reservation is invalid",
    "node": "Invalid node name specified",
}
_NO_NODE = "Requested node configuration is not available"
_NO_DEFAULT = "No partition specified or system default partition"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """As which job a lease runs; None for Slurm's own default."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What one job asks for."""

    nodes: int = 1
    gpus_per_node: int = 0
    #: So many GPUs in all, on any nodes; stands instead of the two above.
    spread: int | None = None
    #: Any of these models; empty for any.
    models: tuple[str, ...] = ()
    #: On each node.
    cpus: float = 1
    memory_mib: int = 0
    time_limit_s: int | None = None
    terms: Terms = Terms()


def find_terms(table: Slurm, profile: Profile | None = None) -> Terms:
    """What a profile says, else what `[slurm]` says."""
    told = {
        key: (None if profile is None else getattr(profile, key)) or getattr(table, key)
        for key in ("partition", "account", "qos", "reservation")
    }
    return Terms(**told)


def find_partition(site: Site, name: str | None) -> Partition | None:
    """The partition of that name; for None the one that Slurm takes by itself. None where there is none."""
    return next((one for one in site.partitions if (one.is_default if name is None else one.name == name)), None)


def wish_of(table: Slurm, profile: Profile) -> Wish:
    """What a notebook with this profile asks for."""
    return Wish(
        gpus_per_node=profile.gpu_count,
        models=profile.models,
        cpus=profile.cpus,
        memory_mib=profile.memory // 1024**2,
        time_limit_s=profile.time_limit,
        terms=find_terms(table, profile),
    )


def check_site(cluster: Cluster, site: Site) -> list[str]:
    """What of the settings Slurm does not know, or would never grant; empty when all is well."""
    table, jobs = cluster.slurm, cluster.jobs
    # A worker of a launch, of whatever GPU it has.
    worker = Wish(
        cpus=jobs.cpus, memory_mib=jobs.memory // 1024**2, time_limit_s=jobs.time_limit, terms=find_terms(table)
    )
    found = [*_check_nodes(cluster, site), *_check_names("slurm.", find_terms(table), site)]
    for profile in cluster.profiles:
        where = f"profiles: {profile.name!r}: "
        found += _check_names(where, find_terms(Slurm(), profile), site)
        found += _check_shape(where, cluster, site, wish_of(table, profile))
    if table.runtime == "docker":
        found += _check_shape("jobs: ", cluster, site, worker)
    return list(dict.fromkeys(found))


def check_wish(cluster: Cluster, site: Site, wish: Wish) -> list[str]:
    """The same for one request."""
    return [*_check_names("", wish.terms, site), *_check_shape("", cluster, site, wish)]


def _check_nodes(cluster: Cluster, site: Site) -> Iterator[str]:
    known = [node.name for node in site.nodes]
    for node in cluster.nodes:
        if node.slurm_name not in known:
            advice = "" if node.slurm else '; say what Slurm calls it with slurm = "…"'
            yield f"nodes: {_unknown('node', node.slurm_name, known)}{advice}"


def _check_names(where: str, terms: Terms, site: Site) -> Iterator[str]:
    there: dict[str, Sequence[str]] = {
        "partition": [one.name for one in site.partitions],
        "reservation": site.reservations,
    }
    if site.has_accounting:
        there |= {"account": site.accounts, "qos": site.qos}
    for key, names in there.items():
        value: str | None = getattr(terms, key)
        if value is not None and value not in names:
            yield f"{where}{_unknown(key, value, names)}"


def _unknown(key: str, value: str, names: Sequence[str]) -> str:
    return f'{key} = "{value}": Slurm says "{_WORDS[key]}"; there are: {_list(names)}'


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED]) or "none"
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown


# -- shapes -----------------------------------------------------------------------------------------------------------


def _check_shape(where: str, cluster: Cluster, site: Site, wish: Wish) -> Iterator[str]:
    partition = find_partition(site, wish.terms.partition)
    if partition is None:
        if wish.terms.partition is None:
            names = [one.name for one in site.partitions]
            yield f'slurm.partition is not set: Slurm says "{_NO_DEFAULT}"; there are: {_list(names)}'
        return
    yield from _check_limits(where, partition, wish)
    ours = {node.slurm_name for node in cluster.nodes}
    nodes = [node for node in site.nodes if node.name in partition.nodes and node.name in ours]
    if not nodes:
        yield f'{where}partition "{partition.name}" has none of the nodes here; its nodes are: {_list(partition.nodes)}'
        return
    kinds = tuple(cluster.slurm.gpu_type(model) for model in wish.models)
    wants_gpus = bool(wish.spread or wish.gpus_per_node)
    known = dict.fromkeys(kind for node in nodes for kind in node.gpus)
    if wants_gpus and kinds and not known.keys() & set(kinds):
        yield (
            f'{where}{" or ".join(wish.models)} is GPU type "{" or ".join(kinds)}" to Slurm, which says "{_NO_NODE}"; '
            f'partition "{partition.name}" has: {_describe(nodes)}; slurm.gpu_types gives a model another type'
        )
        return
    yield from _check_counts(where, partition, nodes, kinds, wish)


def _check_limits(where: str, partition: Partition, wish: Wish) -> Iterator[str]:
    longest, most = partition.longest_s, partition.most_nodes
    if longest is not None and wish.time_limit_s is not None and wish.time_limit_s > longest:
        yield (
            f'{where}time_limit of {format_span(wish.time_limit_s)}: partition "{partition.name}" allows '
            f"{format_span(longest)} at most (Slurm's PartitionTimeLimit)"
        )
    if most is not None and wish.spread is None and wish.nodes > most:
        yield (
            f'{where}{wish.nodes} nodes: partition "{partition.name}" allows {most} at most '
            "(Slurm's PartitionNodeLimit)"
        )


def _check_counts(
    where: str, partition: Partition, nodes: Sequence[Node], kinds: Sequence[str], wish: Wish
) -> Iterator[str]:
    gpu = " or ".join(kinds) or "any type"
    able = [node for node in nodes if _most_gpus(node, kinds) >= (1 if wish.spread else wish.gpus_per_node)]
    if wish.spread is not None:
        there = sum(_most_gpus(node, kinds) for node in able)
        if there < wish.spread:
            asked = f"{wish.spread} GPUs of {gpu}"
            yield f'{where}{asked}: partition "{partition.name}" has {there} ({_NO_NODE}): {_describe(nodes)}'
            return
    elif len(able) < wish.nodes:
        each = f" with {wish.gpus_per_node} × {gpu}" if wish.gpus_per_node else ""
        asked = f"{wish.nodes} node{'s' if wish.nodes > 1 else ''}{each}"
        yield f'{where}{asked}: partition "{partition.name}" has {len(able)} such ({_NO_NODE}): {_describe(nodes)}'
        return
    # A node of 0 has not said.
    roomy = [node for node in able if not (0 < node.cpus < wish.cpus) and not (1 < node.memory_mib < wish.memory_mib)]
    if len(roomy) < (1 if wish.spread else wish.nodes):
        asked = f"{wish.cpus:g} CPUs and {format_size(wish.memory_mib * 1024**2)} of memory"
        has = _list([f"{one.name} with {one.cpus} and {format_size(one.memory_mib * 1024**2)}" for one in able])
        yield f"{where}{asked} on a node ({_NO_NODE}); there are: {has}"


def _most_gpus(node: Node, kinds: Sequence[str]) -> int:
    """What one job of one type could have there; of any type all of them."""
    return max((node.gpus.get(kind, 0) for kind in kinds), default=0) if kinds else sum(node.gpus.values())


def _describe(nodes: Iterable[Node]) -> str:
    return _list([f"{node.name} with {_cards(node.gpus)}" for node in nodes])


def _cards(gpus: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {kind or 'GPU without a type'}" for kind, count in gpus.items() if count) or "no GPU"
