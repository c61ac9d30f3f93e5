"""Checks settings and requests against a Slurm site's partitions, accounts, GPU types and limits.

Each mistake is one line with the key or request, its value, Slurm's message and the valid values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuhub.common.units import format_size, format_span
from gpuhub.config.containers.container_size import build_profile_size, build_worker_size
from gpuhub.config.settings import ClusterSettings, ProfileSettings, SlurmSettings
from gpuhub.slurm_client.models import SlurmNode, SlurmPartition, SlurmSite

#: Maximum number of names that a list shows.
_MAX_NAMES = 12
#: Slurm's own messages.
_SLURM_MESSAGES = {
    "partition": "Invalid partition name specified",
    "account": "Invalid account or account/partition combination specified",
    "qos": "Invalid qos specification",
    "reservation": "Requested reservation is invalid",
    "node": "Invalid node name specified",
}
_NO_NODE = "Requested node configuration is not available"
_NO_DEFAULT = "No partition specified or system default partition"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmTerms:
    """Partition, account, QOS and reservation of a lease's job; None for Slurm's default."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """Resources and terms of one job."""

    nodes: int = 1
    gpus_per_node: int = 0
    #: Number of GPUs in all on any nodes, in place of `nodes` and `gpus_per_node`.
    spread: int | None = None
    #: Suitable models; empty for any.
    models: tuple[str, ...] = ()
    #: CPUs and memory on each node.
    cpus: float = 1
    memory_mib: int = 0
    time_limit_s: int | None = None
    terms: SlurmTerms = SlurmTerms()


def find_terms(table: SlurmSettings, profile: ProfileSettings | None = None) -> SlurmTerms:
    """Return the terms of a profile, with those of `[slurm]` as defaults."""
    values = {
        key: (None if profile is None else getattr(profile, key)) or getattr(table, key)
        for key in ("partition", "account", "qos", "reservation")
    }
    return SlurmTerms(**values)


def find_partition(site: SlurmSite, name: str | None) -> SlurmPartition | None:
    """Return the partition of that name, or the default one for None; None if it does not exist."""
    if name is None:
        return next((partition for partition in site.partitions if partition.is_default), None)
    return next((partition for partition in site.partitions if partition.name == name), None)


def build_job_shape(table: SlurmSettings, profile: ProfileSettings) -> JobShape:
    """Build the resources and terms of a notebook with this profile."""
    size = build_profile_size(profile, follows_gpus=False)
    return JobShape(
        gpus_per_node=profile.gpu_count,
        models=profile.models,
        cpus=size.cpu_milli / 1000,
        memory_mib=size.memory_mib,
        time_limit_s=profile.time_limit,
        terms=find_terms(table, profile),
    )


def check_site(cluster: ClusterSettings, site: SlurmSite) -> list[str]:
    """Return the settings that Slurm does not know or would never grant, one line for each."""
    table, jobs = cluster.slurm, cluster.jobs
    size = build_worker_size(jobs, follows_gpus=False)
    # A worker of a launch, with any GPU.
    worker = JobShape(
        cpus=size.cpu_milli / 1000, memory_mib=size.memory_mib, time_limit_s=jobs.time_limit, terms=find_terms(table)
    )
    mistakes = [*_check_nodes(cluster, site), *_check_names("slurm.", find_terms(table), site)]
    for profile in cluster.profiles:
        where = f"profiles: {profile.name!r}: "
        mistakes += _check_names(where, find_terms(SlurmSettings(), profile), site)
        mistakes += _check_shape(where, cluster, site, build_job_shape(table, profile))
    if table.runtime == "docker":
        mistakes += _check_shape("jobs: ", cluster, site, worker)
    return list(dict.fromkeys(mistakes))


def check_job_shape(cluster: ClusterSettings, site: SlurmSite, shape: JobShape) -> list[str]:
    """Return what Slurm does not know or would never grant of one request, one line for each."""
    return [*_check_names("", shape.terms, site), *_check_shape("", cluster, site, shape)]


def _check_nodes(cluster: ClusterSettings, site: SlurmSite) -> Iterator[str]:
    names = [node.name for node in site.nodes]
    for node in cluster.nodes:
        if node.slurm_name not in names:
            advice = "" if node.slurm else '; set its name in Slurm with slurm = "…"'
            yield f"nodes: {_describe_unknown('node', node.slurm_name, names)}{advice}"


def _check_names(where: str, terms: SlurmTerms, site: SlurmSite) -> Iterator[str]:
    valid: dict[str, Sequence[str]] = {
        "partition": [partition.name for partition in site.partitions],
        "reservation": site.reservations,
    }
    if site.has_accounting:
        valid |= {"account": site.accounts, "qos": site.qos}
    for key, names in valid.items():
        value: str | None = getattr(terms, key)
        if value is not None and value not in names:
            yield f"{where}{_describe_unknown(key, value, names)}"


def _describe_unknown(key: str, value: str, names: Sequence[str]) -> str:
    return f'{key} = "{value}": Slurm says "{_SLURM_MESSAGES[key]}"; there are: {_join_names(names)}'


def _join_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES]) or "none"
    return f"{shown} and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else shown


# -- shapes -----------------------------------------------------------------------------------------------------------


def _check_shape(where: str, cluster: ClusterSettings, site: SlurmSite, shape: JobShape) -> Iterator[str]:
    partition = find_partition(site, shape.terms.partition)
    if partition is None:
        if shape.terms.partition is None and all(each.is_default is not None for each in site.partitions):
            names = [each.name for each in site.partitions]
            yield f'slurm.partition is not set: Slurm says "{_NO_DEFAULT}"; there are: {_join_names(names)}'
        return
    yield from _check_limits(where, partition, shape)
    own_nodes = {node.slurm_name for node in cluster.nodes}
    nodes = [node for node in site.nodes if node.name in partition.nodes and node.name in own_nodes]
    if not nodes:
        node_names = _join_names(partition.nodes)
        yield f'{where}partition "{partition.name}" has none of the nodes here; its nodes are: {node_names}'
        return
    kinds = tuple(cluster.slurm.gpu_type(model) for model in shape.models)
    wants_gpus = bool(shape.spread or shape.gpus_per_node)
    known_types = dict.fromkeys(kind for node in nodes for kind in node.gpus)
    if wants_gpus and kinds and not known_types.keys() & set(kinds):
        yield (
            f'{where}{" or ".join(shape.models)} is GPU type "{" or ".join(kinds)}" to Slurm, which says "{_NO_NODE}"; '
            f'partition "{partition.name}" has: {_describe_nodes(nodes)}; slurm.gpu_types gives a model another type'
        )
        return
    yield from _check_counts(where, partition, nodes, kinds, shape)


def _check_limits(where: str, partition: SlurmPartition, shape: JobShape) -> Iterator[str]:
    longest, most = partition.max_time_s, partition.max_nodes
    if longest is not None and shape.time_limit_s is not None and shape.time_limit_s > longest:
        yield (
            f'{where}time_limit of {format_span(shape.time_limit_s)}: partition "{partition.name}" allows '
            f"{format_span(longest)} at most (Slurm's PartitionTimeLimit)"
        )
    if most is not None and shape.spread is None and shape.nodes > most:
        yield (
            f'{where}{shape.nodes} nodes: partition "{partition.name}" allows {most} at most '
            "(Slurm's PartitionNodeLimit)"
        )


def _check_counts(
    where: str, partition: SlurmPartition, nodes: Sequence[SlurmNode], kinds: Sequence[str], shape: JobShape
) -> Iterator[str]:
    gpu = " or ".join(kinds) or "any type"
    able = [node for node in nodes if _count_gpus(node, kinds) >= (1 if shape.spread else shape.gpus_per_node)]
    if shape.spread is not None:
        count = sum(_count_gpus(node, kinds) for node in able)
        if count < shape.spread:
            request = f"{shape.spread} GPUs of {gpu}"
            yield f'{where}{request}: partition "{partition.name}" has {count} ({_NO_NODE}): {_describe_nodes(nodes)}'
            return
    elif len(able) < shape.nodes:
        each = f" with {shape.gpus_per_node} × {gpu}" if shape.gpus_per_node else ""
        request = f"{shape.nodes} node{'s' if shape.nodes > 1 else ''}{each}"
        has = f"{len(able)} such ({_NO_NODE}): {_describe_nodes(nodes)}"
        yield f'{where}{request}: partition "{partition.name}" has {has}'
        return
    # A node with 0 CPUs or memory has not reported them.
    roomy = [node for node in able if not (0 < node.cpus < shape.cpus) and not (1 < node.memory_mib < shape.memory_mib)]
    if len(roomy) < (1 if shape.spread else shape.nodes):
        request = f"{shape.cpus:g} CPUs and {format_size(shape.memory_mib * 1024**2)} of memory"
        has = _join_names(
            [f"{node.name} with {node.cpus} and {format_size(node.memory_mib * 1024**2)}" for node in able]
        )
        yield f"{where}{request} on a node ({_NO_NODE}); there are: {has}"


def _count_gpus(node: SlurmNode, kinds: Sequence[str]) -> int:
    """Return the most GPUs that one job can have on the node: of one type, or of all types if any type suits."""
    return max((node.gpus.get(kind, 0) for kind in kinds), default=0) if kinds else sum(node.gpus.values())


def _describe_nodes(nodes: Iterable[SlurmNode]) -> str:
    return _join_names([f"{node.name} with {_describe_gpus(node.gpus)}" for node in nodes])


def _describe_gpus(gpus: Mapping[str, int]) -> str:
    return ", ".join(f"{count} × {kind or 'GPU without a type'}" for kind, count in gpus.items() if count) or "no GPU"
