"""The cluster as JSON for whoever looks: built once for all who would see the same, and again when something changed.

Building it costs more than all else that the broker does for a look, and at a large cluster everybody looks all the
time. Then what was built is told again for a few times as long as building it took; at a small one every change is seen
at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from gpuhub.broker import administration
from gpuhub.broker.auth import Identity
from gpuhub.broker.core import Core
from gpuhub.broker.overview import STARTS_TOLD
from gpuhub.engines.base import Rights

#: Built again after so long in any case: time goes by, and readings get old. Seconds.
OLDEST_S = 1.0
#: A change is not waited with where building takes less, seconds.
QUICK_S = 0.01
#: Else what was built is told for so many times as long.
FACTOR = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    text: bytes
    #: What it was built from: these are replaced when they change, never edited.
    of: tuple[object, ...]
    #: Monotonic.
    at: float
    #: Of the processor's time: a small cluster on a busy machine is a small cluster.
    took_s: float


class Glances:
    """The last one that was built for all."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._built: _Built | None = None

    def look(self, who: Identity) -> bytes:
        """The cluster as `who` sees it."""
        if not self._is_plain(who):
            return self._build(who)
        core, now = self._core, self._core.clock.monotonic()
        of = (core.ledger.snapshot, core.inventory, core.cordons, core.supply.reservations)
        built = self._built
        if built is None or not self._is_good(built, of, now):
            began = time.thread_time()
            text = self._build(None)
            built = _Built(text=text, of=of, at=now, took_s=time.thread_time() - began)
            self._built = built
        return built.text

    def _is_plain(self, who: Identity) -> bool:
        """Whether somebody sees what everybody does: no limits, reservations or places in line of their own."""
        core = self._core
        if core.reservations or (who.is_user and _is_limited(core.rights(who.name))):
            return False
        index = core.ledger.index
        return len(index.find("waiting")) <= STARTS_TOLD or not index.find("waiting of", who.name)

    def _is_good(self, built: _Built, of: tuple[object, ...], now: float) -> bool:
        age_s = now - built.at
        if all(one is other for one, other in zip(built.of, of, strict=True)):
            return age_s <= OLDEST_S
        # Who cordons a node or reserves GPUs sees that at once.
        is_decided = any(one is not other for one, other in zip(built.of[2:], of[2:], strict=True))
        return not is_decided and built.took_s > QUICK_S and age_s <= FACTOR * built.took_s

    def _build(self, who: Identity | None) -> bytes:
        # Thousands of GPUs: written by pydantic itself, they cost a tenth.
        return administration.view_cluster(self._core, who).model_dump_json().encode()


def _is_limited(rights: Rights) -> bool:
    """Whether limits may tell whether somebody's request would start at once."""
    limits = (rights.each, *rights.together.values())
    return any(one.max_gpus is not None or one.gpu_hours_per_week is not None for one in limits)
