"""Whether a node's Docker daemon answers, without flapping. Pure; times are monotonic seconds."""

from __future__ import annotations

from gpuhub.nodes.records import NodeRecord

#: A node is unreachable after so many failed looks in a row.
FAILURES = 2
#: A node that was unreachable is up again after so many good looks in a row.
GOOD_LOOKS = 2
#: One that was unreachable so often within so many seconds needs more of them.
FLAPS = 3
FLAPS_WITHIN_S = 600.0
GOOD_LOOKS_OF_A_FLAPPING_NODE = 5


def answered(node: NodeRecord, now: float) -> NodeRecord:
    """The daemon answered: a node that was unreachable is up again after some such looks.

    One that never failed in this run of the broker is up at once.
    """
    if node.is_up:
        return node.evolve(failures=0, good_looks=0)
    good_looks = node.good_looks + 1
    needed = needed_looks(node, now)
    if good_looks < needed:
        return node.evolve(failures=0, good_looks=good_looks, trouble=_recovering(node, good_looks, needed, now))
    return node.evolve(is_up=True, failures=0, good_looks=0, down_since=None, trouble=None)


def failed(node: NodeRecord, trouble: str, now: float) -> NodeRecord:
    """The daemon did not answer: after some such looks the node counts as unreachable."""
    failures = node.failures + 1
    if failures < FAILURES and node.is_up:
        return node.evolve(failures=failures)
    flaps = tuple(at for at in node.flaps if now - at < FLAPS_WITHIN_S)
    # What happened there meanwhile is unknown: it must be looked at before it gets work again, and which daemon and
    # which start of the machine answer then is asked anew.
    return node.evolve(
        is_up=False,
        failures=failures,
        good_looks=0,
        down_since=now if node.down_since is None else node.down_since,
        flaps=(*flaps, now) if node.is_up else flaps,
        trouble=trouble,
        is_settled=False,
        daemon_id=None,
        boot_id=None,
    )


def needed_looks(node: NodeRecord, now: float) -> int:
    """How many good looks in a row bring the node back."""
    if node.down_since is None:
        return 1
    return GOOD_LOOKS_OF_A_FLAPPING_NODE if is_flapping(node, now) else GOOD_LOOKS


def is_flapping(node: NodeRecord, now: float) -> bool:
    """Whether it comes and goes."""
    return sum(now - at < FLAPS_WITHIN_S for at in node.flaps) >= FLAPS


def _recovering(node: NodeRecord, good_looks: int, needed: int, now: float) -> str:
    text = f"answers again; {needed - good_looks} more good looks are needed before it gets work"
    if not is_flapping(node, now):
        return text
    count = sum(now - at < FLAPS_WITHIN_S for at in node.flaps)
    return f"{text}, since it was unreachable {count} times within {FLAPS_WITHIN_S / 60:.0f} minutes"
