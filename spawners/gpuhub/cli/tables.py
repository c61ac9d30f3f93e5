"""The broker's answers as text for a terminal."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from gpuhub.broker_api.schemas import (
    EventView,
    GpuState,
    GpuView,
    LeaseState,
    LeaseView,
    NodeView,
    PendingReasonView,
    Purpose,
    QueueEntry,
    ReservationView,
    UsageSource,
    UsageView,
)
from gpuhub.broker_api.schemas.bench import BenchView
from gpuhub.broker_api.schemas.limits import UserLimitsView
from gpuhub.broker_api.schemas.services import ServiceView
from gpuhub.common.units import format_bits, format_flops, format_span

if TYPE_CHECKING:
    # It imports Docker's client, which most commands do without.
    from gpuhub.ops.images.inventory import NodeImage

#: Shown characters of an id, which are enough because ids are random; commands accept any unique beginning.
SHORT_ID = 8
_GAP = "  "
_MIN_COLUMN = 8  # characters that a shortened column keeps
_KIND_WIDTH = 17  # characters of most kinds of events


def shorten_id(identifier: str) -> str:
    """Return the beginning of an id."""
    return identifier[:SHORT_ID]


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """Return columns of text; if they exceed `width`, the widest are cut with `…`. None for any width."""
    table = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    if width is not None:
        widths = _fit_widths(widths, width - len(_GAP) * (len(widths) - 1))
    return "\n".join(
        _GAP.join(_cut(cell, size).ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def _fit_widths(widths: list[int], room: int) -> list[int]:
    fitted = list(widths)
    while sum(fitted) > room and max(fitted) > _MIN_COLUMN:
        fitted[fitted.index(max(fitted))] -= 1
    return fitted


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1] + "…"


def format_clock(when: datetime, now: datetime) -> str:
    """Return a time such as `14:20`, or `3 Dec 08:00` on another day, in the time zone of `now`."""
    local = when.astimezone(now.tzinfo)
    clock = local.strftime("%H:%M")
    if local.date() == now.date():
        return clock
    return f"{local.day} {local.strftime('%b' if local.year == now.year else '%b %Y')} {clock}"


def format_when(when: datetime | None, now: datetime, none: str) -> str:
    """Return a time such as `14:20 (in 35 min)`, or the text `none` where it is None."""
    if when is None:
        return none
    seconds = (when - now).total_seconds()
    return format_clock(when, now) + (f" (in {format_span(seconds)})" if 0 < seconds < 86400 else "")


def format_nodes(nodes: Sequence[NodeView], width: int | None) -> str:
    """Return a line for each node, and below it the problems there; then a line for each enforced circuit."""
    header = ("NODE", "STATE", "FREE", "GPUS", "LEASES", "DRIVER")
    first, *lines = format_table(header, [_node_row(node) for node in nodes], width).splitlines()
    texts = [first]
    for node, line in zip(nodes, lines, strict=True):
        texts.append(line)
        texts += [_indent(problem, width) for problem in _list_problems(node)]
    texts += dict.fromkeys(node.circuit.describe() for node in nodes if node.circuit is not None)
    return "\n".join(texts)


def _indent(text: str, width: int | None) -> str:
    margin = " " * 4
    return textwrap.fill(text, width or 10_000, initial_indent=margin, subsequent_indent=margin)


def _node_row(node: NodeView) -> tuple[str, ...]:
    free = sum(gpu.state is GpuState.FREE for gpu in node.gpus)
    return (
        node.name,
        node.state.value,
        f"{free}/{len(node.gpus)}",
        describe_models(gpu.model for gpu in node.gpus) or "none",
        str(node.leases),
        node.driver or "–",
    )


def _list_problems(node: NodeView) -> list[str]:
    node_problems = [] if node.message is None else [node.message]
    problem_states = (GpuState.QUARANTINED, GpuState.OUTSIDE, GpuState.FAILED)
    if node.message is not None:
        return node_problems
    return [describe_gpu_problem(gpu) for gpu in node.gpus if gpu.state in problem_states]


def describe_gpu_problem(gpu: GpuView) -> str:
    """Return a text such as `GPU 0: in use outside gpuhub: pid 4242, 5.1 GiB`."""
    return f"GPU {gpu.index}: {gpu.message or gpu.state.value}"


def describe_models(models: Iterable[str]) -> str:
    """Return a text such as `2 × RTX 5090, RTX 5070`."""
    return ", ".join(model if count == 1 else f"{count} × {model}" for model, count in Counter(models).items())


def format_images(images: Sequence[NodeImage], now: datetime, width: int | None) -> str:
    """Return a line for each image, with the nodes that have it, the newest first."""
    by_id: dict[str, list[NodeImage]] = {}
    for image in sorted(images, key=lambda image: image.made_at, reverse=True):
        by_id.setdefault(image.id, []).append(image)
    header = ("IMAGE", "SIZE", "AGE", "NODES", "CONTAINERS")
    return format_table(header, [_image_row(copies, now) for copies in by_id.values()], width)


def _image_row(copies: Sequence[NodeImage], now: datetime) -> tuple[str, ...]:
    names = dict.fromkeys(name for copy in copies for name in copy.names)
    first = copies[0]
    return (
        ", ".join(names),
        f"{first.size / 1e9:.1f} GB",
        format_span((now - first.made_at).total_seconds()),
        ", ".join(sorted(copy.node for copy in copies)),
        str(sum(copy.containers for copy in copies)),
    )


def format_leases(leases: Sequence[LeaseView], queue: Sequence[QueueEntry], now: datetime, width: int | None) -> str:
    """Return a line for each lease that has GPUs, and below them one for each waiting request."""
    granted = [lease for lease in leases if lease.state is not LeaseState.REQUESTED]
    parts = []
    if granted:
        header = ("LEASE", "OWNER", "WHAT", "STATE", "GPUS", "ON", "UNTIL")
        parts.append(format_table(header, [_lease_row(lease, now) for lease in granted], width))
    if queue:
        parts.append(format_queue(queue, now, width))
    return "\n\n".join(parts) or "No leases."


def _lease_row(lease: LeaseView, now: datetime) -> tuple[str, ...]:
    return (
        shorten_id(lease.id),
        lease.owner,
        lease.purpose.value,
        _describe_state(lease),
        _describe_gpus(lease),
        ",".join(lease.nodes),
        _format_end(lease, now),
    )


def format_node_leases(leases: Sequence[LeaseView], node: str, now: datetime, width: int | None) -> str:
    """Return a line for each lease with containers on the node."""
    rows = [
        (
            shorten_id(lease.id),
            lease.owner,
            describe_purpose(lease),
            describe_models(gpu.model for gpu in lease.gpus if gpu.node == node) or "no GPU",
            _describe_state(lease),
            _format_end(lease, now),
        )
        for lease in leases
        if node in lease.nodes
    ]
    return format_table(("LEASE", "OWNER", "WHAT", "GPUS THERE", "STATE", "UNTIL"), rows, width)


def _describe_state(lease: LeaseView) -> str:
    return lease.state.value if lease.suspension is None else lease.suspension.state.value


def describe_purpose(lease: LeaseView) -> str:
    """Return a text such as `notebook`, `notebook work` or `job j0a1b2c3`."""
    if lease.purpose is Purpose.JOB:
        return f"job {shorten_id(lease.subject)}"
    return f"notebook {lease.subject}".rstrip()


def _describe_gpus(lease: LeaseView) -> str:
    share = max((gpu.share for gpu in lease.gpus), default=1)
    return (f"1/{share} of " if share > 1 else "") + (describe_models(gpu.model for gpu in lease.gpus) or "no GPU")


def _format_end(lease: LeaseView, now: datetime) -> str:
    return "no limit" if lease.expires_at is None else format_clock(lease.expires_at, now)


def format_queue(queue: Sequence[QueueEntry], now: datetime, width: int | None) -> str:
    """Return a line for each waiting request."""
    rows = [
        (
            str(entry.position),
            shorten_id(entry.lease),
            entry.owner,
            entry.wants,
            format_clock(entry.since, now),
            "not known" if entry.expected_start is None else format_clock(entry.expected_start, now),
        )
        for entry in queue
    ]
    return format_table(("#", "LEASE", "OWNER", "WANTS", "SINCE", "STARTS"), rows, width)


def format_why(why: PendingReasonView, now: datetime) -> str:
    """Return the full reason why a request waits."""
    starts = format_when(why.expected_start, now, none="not known")
    lines = [f"Position {why.position} of the queue; expected start: {starts}.", f"Waits for: {why.waits_for}"]
    if why.obstacles:
        rows = [
            (obstacle.demand, format_when(obstacle.would_start_at, now, none="not known")) for obstacle in why.obstacles
        ]
        lines += ["", format_table(("ITS OWN DEMAND", "WITHOUT IT, IT WOULD START"), rows, None)]
    return "\n".join(lines)


def format_reservations(reservations: Sequence[ReservationView], now: datetime, width: int | None) -> str:
    """Return a line for each reservation."""
    rows = [
        (
            shorten_id(reservation.id),
            reservation.name,
            ",".join([*reservation.nodes, *reservation.gpus]),
            ",".join([*reservation.users, *(f"@{group}" for group in reservation.groups)]),
            format_clock(reservation.starts_at, now),
            format_clock(reservation.ends_at, now),
            reservation.created_by,
        )
        for reservation in reservations
    ]
    if not rows:
        return "No reservations."
    return format_table(("ID", "NAME", "WHAT", "FOR", "FROM", "UNTIL", "BY"), rows, width)


def format_limits(limits: Sequence[UserLimitsView], now: datetime, width: int | None) -> str:
    """Return a line for each user with limits of their own; `–` where cluster.toml decides."""
    rows = [
        (
            user.owner,
            *(
                _format_own_limit(value)
                for value in (user.max_gpus, user.gpu_hours_per_week, user.max_waiting, user.max_jobs)
            ),
            "–" if user.longest_lease_s is None else format_span(user.longest_lease_s),
            user.by,
            format_clock(user.at, now),
            user.reason,
        )
        for user in limits
    ]
    if not rows:
        return "No user has limits of their own: those of cluster.toml count."
    header = ("USER", "GPUS", "GPU-HOURS 7 D", "WAITING", "JOBS", "LONGEST LEASE", "BY", "SINCE", "WHY")
    return format_table(header, rows, width)


def _format_own_limit(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def format_bench(bench: BenchView, width: int | None) -> str:
    """Return a line for each card, and one for each pair of nodes that was measured."""
    cards = [
        (card.node, card.device, format_flops(card.flops), f"{card.read_bytes_s / 1e6:.0f} MB/s")
        for card in bench.cards
    ]
    pairs = [(bench.cards[link.ranks[0]].node, bench.cards[link.ranks[1]].node, link.network) for link in bench.links]
    if bench.gang is not None and len(bench.cards) > 2:
        pairs.append(("all", "together", bench.gang))
    links = [
        (first, second, f"{network.latency_s * 1e6:.0f} µs", *map(format_bits, (network.bytes_s, network.bf16_bytes_s)))
        for first, second, network in pairs
    ]
    parts = [format_table(("NODE", "GPU", "FLOAT32", "READS A HOME"), cards, width)]
    if links:
        parts.append(format_table(("NODE", "AND", "LATENCY", "ALL-REDUCE", "IN BFLOAT16"), links, width))
    return "\n\n".join([*parts, f"Measured {bench.measured_at} UTC with {bench.backend}."])


def format_services(services: Sequence[ServiceView], width: int | None) -> str:
    """Return a line for each service."""
    rows = [
        (service.name, service.node, service.state, str(service.restarts), service.path, service.message)
        for service in services
    ]
    if not rows:
        return "No services: [[services]] in cluster.toml adds some."
    return format_table(("NAME", "NODE", "STATE", "RESTARTS", "ADDRESS", "WHY"), rows, width)


def format_usage(usage: Sequence[UsageView], width: int | None) -> str:
    """Return a line for each owner, with limits after a slash.

    The columns of fair share are shown where gpuhub decides, Slurm's accounts where Slurm counted.
    """
    counters = {user.counted_by for user in usage} or {UsageSource.BUILTIN}
    columns: list[tuple[str, Callable[[UsageView], str]]] = [
        ("OWNER", lambda user: user.owner),
        ("GPUS", lambda user: _format_limit(user.gpus, user.max_gpus)),
        ("WAITING", lambda user: _format_limit(user.waiting, user.max_waiting)),
        ("GPU-HOURS 7 D", lambda user: _format_limit(round(user.gpu_hours_week, 1), user.max_gpu_hours_week)),
    ]
    if UsageSource.SLURM in counters:
        columns += [("BY ACCOUNT", _describe_accounts)]
    if UsageSource.BUILTIN in counters:
        columns += [
            ("DECAYED", lambda user: f"{user.decayed_gpu_hours:.1f}"),
            ("PENALTY", lambda user: format_span(user.penalty_s)),
        ]
    header = tuple(name for name, _ in columns)
    return format_table(header, [tuple(value(user) for _, value in columns) for user in usage], width)


def _describe_accounts(usage: UsageView) -> str:
    return ", ".join(f"{account.account} {account.gpu_hours_week:.1f}" for account in usage.accounts) or "–"


def _format_limit(value: float, limit: float | None) -> str:
    return f"{value:g}" if limit is None else f"{value:g} / {limit:g}"


def format_event(event: EventView, now: datetime, width: int | None) -> str:
    """Return one event; its text is wrapped in its own column."""
    local = event.at.astimezone(now.tzinfo)
    day = "" if local.date() == now.date() else f"{local.day} {local.strftime('%b')} "
    head = f"{day}{local.strftime('%H:%M:%S')}  {event.kind:<{_KIND_WIDTH}}  "
    if width is None or width < 2 * len(head):
        return head + event.text
    lines = textwrap.wrap(event.text, width - len(head), break_on_hyphens=False) or [""]
    return "\n".join([head + lines[0], *(" " * len(head) + line for line in lines[1:])])
