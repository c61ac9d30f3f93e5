"""What the broker told, as text for a terminal. Pure: width and time are passed in."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

from gpuhub.broker.schemas import (
    CountedBy,
    Event,
    GpuState,
    GpuView,
    Lease,
    LeaseState,
    NodeView,
    Purpose,
    QueueEntry,
    Reservation,
    UsageView,
    Why,
)
from gpuhub.quantities import format_span

#: Ids are random: so much of one tells it from all others, and any beginning that does is understood.
SHORT_ID = 8
_GAP = "  "
_LEAST = 8  # characters that a shortened column keeps
_KIND = 17  # characters of an event's kind, mostly


def short_id(identifier: str) -> str:
    """The beginning of an id."""
    return identifier[:SHORT_ID]


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """Columns of text. Where `width` is too small for them, the widest ones are cut, with `…`; None for any width."""
    table = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    if width is not None:
        widths = _fit(widths, width - len(_GAP) * (len(widths) - 1))
    return "\n".join(
        _GAP.join(_cut(cell, size).ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip()
        for row in table
    )


def _fit(widths: list[int], room: int) -> list[int]:
    fitted = list(widths)
    while sum(fitted) > room and max(fitted) > _LEAST:
        fitted[fitted.index(max(fitted))] -= 1
    return fitted


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1] + "…"


def format_clock(when: datetime, now: datetime) -> str:
    """Such as `14:20`, or `3 Dec 08:00` on another day, in the time zone of `now`."""
    local = when.astimezone(now.tzinfo)
    clock = local.strftime("%H:%M")
    if local.date() == now.date():
        return clock
    return f"{local.day} {local.strftime('%b' if local.year == now.year else '%b %Y')} {clock}"


def format_when(when: datetime | None, now: datetime, none: str) -> str:
    """Such as `14:20 (in 35 min)`; `none` where it is not known."""
    if when is None:
        return none
    seconds = (when - now).total_seconds()
    return format_clock(when, now) + (f" (in {format_span(seconds)})" if 0 < seconds < 86400 else "")


def format_nodes(nodes: Sequence[NodeView], width: int | None) -> str:
    """A line for each node, and below it what is wrong there."""
    header = ("NODE", "STATE", "FREE", "GPUS", "LEASES", "DRIVER")
    first, *lines = format_table(header, [_node_row(node) for node in nodes], width).splitlines()
    found = [first]
    for node, line in zip(nodes, lines, strict=True):
        found.append(line)
        found += [_indent(trouble, width) for trouble in _troubles(node)]
    return "\n".join(found)


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


def _troubles(node: NodeView) -> list[str]:
    own = [] if node.message is None else [node.message]
    said = (GpuState.QUARANTINED, GpuState.OUTSIDE, GpuState.FAILED)
    return own + [describe_gpu_trouble(gpu) for gpu in node.gpus if gpu.state in said and node.message is None]


def describe_gpu_trouble(gpu: GpuView) -> str:
    """Such as `GPU 0: in use outside gpuhub: pid 4242, 5.1 GiB`."""
    return f"GPU {gpu.index}: {gpu.message or gpu.state.value}"


def describe_models(models: Iterable[str]) -> str:
    """Such as `2 × RTX 5090, RTX 5070`."""
    return ", ".join(model if count == 1 else f"{count} × {model}" for model, count in Counter(models).items())


def format_leases(leases: Sequence[Lease], queue: Sequence[QueueEntry], now: datetime, width: int | None) -> str:
    """A line for each lease that has GPUs, and below them one for each request that waits."""
    held = [lease for lease in leases if lease.state is not LeaseState.REQUESTED]
    parts = []
    if held:
        header = ("LEASE", "OWNER", "WHAT", "STATE", "GPUS", "ON", "UNTIL")
        parts.append(format_table(header, [_lease_row(lease, now) for lease in held], width))
    if queue:
        parts.append(format_queue(queue, now, width))
    return "\n\n".join(parts) or "No leases."


def _lease_row(lease: Lease, now: datetime) -> tuple[str, ...]:
    return (
        short_id(lease.id),
        lease.owner,
        lease.purpose.value,
        lease.state.value,
        _describe_held(lease),
        ",".join(lease.nodes),
        _until(lease, now),
    )


def format_runs(leases: Sequence[Lease], node: str, now: datetime, width: int | None) -> str:
    """What runs on a node: a line for each lease with containers there."""
    rows = [
        (
            short_id(lease.id),
            lease.owner,
            describe_purpose(lease),
            describe_models(gpu.model for gpu in lease.gpus if gpu.node == node) or "no GPU",
            lease.state.value,
            _until(lease, now),
        )
        for lease in leases
        if node in lease.nodes
    ]
    return format_table(("LEASE", "OWNER", "WHAT", "GPUS THERE", "STATE", "UNTIL"), rows, width)


def describe_purpose(lease: Lease) -> str:
    """Such as `notebook`, `notebook work` or `job j0a1b2c3`."""
    if lease.purpose is Purpose.JOB:
        return f"job {short_id(lease.subject)}"
    return f"notebook {lease.subject}".rstrip()


def _describe_held(lease: Lease) -> str:
    share = max((gpu.share for gpu in lease.gpus), default=1)
    return (f"1/{share} of " if share > 1 else "") + (describe_models(gpu.model for gpu in lease.gpus) or "no GPU")


def _until(lease: Lease, now: datetime) -> str:
    return "no limit" if lease.expires_at is None else format_clock(lease.expires_at, now)


def format_queue(queue: Sequence[QueueEntry], now: datetime, width: int | None) -> str:
    """A line for each waiting request."""
    rows = [
        (
            str(entry.position),
            short_id(entry.lease),
            entry.owner,
            entry.wants,
            format_clock(entry.since, now),
            "not known" if entry.expected_start is None else format_clock(entry.expected_start, now),
        )
        for entry in queue
    ]
    return format_table(("#", "LEASE", "OWNER", "WANTS", "SINCE", "STARTS"), rows, width)


def format_why(why: Why, now: datetime) -> str:
    """Why a request waits, in full."""
    starts = format_when(why.expected_start, now, none="not known")
    lines = [f"Position {why.position} of the queue; expected start: {starts}.", f"Waits for: {why.waits_for}"]
    if why.obstacles:
        rows = [(one.demand, format_when(one.would_start_at, now, none="not known")) for one in why.obstacles]
        lines += ["", format_table(("ITS OWN DEMAND", "WITHOUT IT, IT WOULD START"), rows, None)]
    return "\n".join(lines)


def format_reservations(reservations: Sequence[Reservation], now: datetime, width: int | None) -> str:
    """A line for each reservation."""
    rows = [
        (
            short_id(one.id),
            one.name,
            ",".join([*one.nodes, *one.gpus]),
            ",".join([*one.users, *(f"@{group}" for group in one.groups)]),
            format_clock(one.starts_at, now),
            format_clock(one.ends_at, now),
            one.created_by,
        )
        for one in reservations
    ]
    if not rows:
        return "No reservations."
    return format_table(("ID", "NAME", "WHAT", "FOR", "FROM", "UNTIL", "BY"), rows, width)


def format_usage(usage: Sequence[UsageView], width: int | None) -> str:
    """A line for each owner; a limit stands behind a slash. What fair share goes by only where gpuhub sees to it, and
    Slurm's accounts where Slurm counted.
    """
    counters = {one.counted_by for one in usage} or {CountedBy.BUILTIN}
    columns: list[tuple[str, Callable[[UsageView], str]]] = [
        ("OWNER", lambda one: one.owner),
        ("GPUS", lambda one: _of(one.gpus, one.max_gpus)),
        ("WAITING", lambda one: _of(one.waiting, one.max_waiting)),
        ("GPU-HOURS 7 D", lambda one: _of(round(one.gpu_hours_week, 1), one.max_gpu_hours_week)),
    ]
    if CountedBy.SLURM in counters:
        columns += [("BY ACCOUNT", _describe_accounts)]
    if CountedBy.BUILTIN in counters:
        columns += [
            ("DECAYED", lambda one: f"{one.decayed_gpu_hours:.1f}"),
            ("PUT BACK BY", lambda one: format_span(one.penalty_s)),
        ]
    header = tuple(name for name, _ in columns)
    return format_table(header, [tuple(value(one) for _, value in columns) for one in usage], width)


def _describe_accounts(usage: UsageView) -> str:
    return ", ".join(f"{one.account} {one.gpu_hours_week:.1f}" for one in usage.accounts) or "–"


def _of(value: float, limit: float | None) -> str:
    return f"{value:g}" if limit is None else f"{value:g} / {limit:g}"


def format_event(event: Event, now: datetime, width: int | None) -> str:
    """One event; what does not fit on its line goes on below its text."""
    local = event.at.astimezone(now.tzinfo)
    day = "" if local.date() == now.date() else f"{local.day} {local.strftime('%b')} "
    head = f"{day}{local.strftime('%H:%M:%S')}  {event.kind:<{_KIND}}  "
    if width is None or width < 2 * len(head):
        return head + event.text
    lines = textwrap.wrap(event.text, width - len(head), break_on_hyphens=False) or [""]
    return "\n".join([head + lines[0], *(" " * len(head) + line for line in lines[1:])])
