"""Open leases and jobs by what they are looked up by, kept in step with every change of a draft."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set

from gpuhub.broker.rows import JobRow, LeaseRow
from gpuhub.broker.schemas import JobState, LeaseState, Purpose

#: What things are found by, such as `("owner", "ada")`.
Tag = tuple[str | int, ...]

_NOTHING: frozenset[str] = frozenset()


class Index:
    """Ids by tag."""

    def __init__(self) -> None:
        self._ids: dict[Tag, set[str]] = {}

    def find(self, *tag: str | int) -> Set[str]:
        """Ids with the tag, to be read at once: `("owner", name)` and the others named in this module."""
        return self._ids.get(tag, _NOTHING)

    def one(self, *tag: str | int) -> str | None:
        """The id with a tag that one thing has at the most."""
        return next(iter(self.find(*tag)), None)

    def replace_lease(self, before: LeaseRow | None, after: LeaseRow | None) -> None:
        """A lease changed, came (`before` None), or is as if it had never been (`after` None)."""
        row = after or before
        if row is not None:
            self._move(row.id, _lease_tags(before), _lease_tags(after))

    def replace_job(self, before: JobRow | None, after: JobRow | None) -> None:
        """The same for a job."""
        row = after or before
        if row is not None:
            self._move(row.id, _job_tags(before), _job_tags(after))

    def free_part(self, uuid: str) -> int:
        """The least part of a GPU that no lease holds."""
        part = 0
        while self.find("part", uuid, part):
            part += 1
        return part

    def _move(self, row_id: str, before: Iterable[Tag], after: Iterable[Tag]) -> None:
        old, new = set(before), set(after)
        for tag in old - new:
            ids = self._ids[tag]
            ids.discard(row_id)
            if not ids:
                del self._ids[tag]
        for tag in new - old:
            self._ids.setdefault(tag, set()).add(row_id)


def _lease_tags(lease: LeaseRow | None) -> Iterator[Tag]:
    if lease is None or not lease.is_open:
        return
    yield ("owner", lease.owner)
    yield ("key", lease.owner, lease.key)
    for node in lease.nodes:
        yield ("node", node)
    for gpu in lease.held:
        yield ("part", gpu.uuid, gpu.part)
    if lease.purpose is Purpose.NOTEBOOK:
        yield ("server", lease.owner, lease.subject)
    else:
        yield ("jobs of", lease.owner)
        for group in lease.groups:
            yield ("jobs in", group)
    if lease.state is LeaseState.REQUESTED:
        yield ("waiting",)
        yield ("waiting of", lease.owner)
        for group in lease.groups:
            yield ("waiting in", group)


def _job_tags(job: JobRow | None) -> Iterator[Tag]:
    if job is None or not job.is_open:
        return
    yield ("run", job.owner, job.run_id)
    yield ("job of lease", job.lease_id)
    yield ("jobs of owner", job.owner)
    if job.joins is not None:
        yield ("joining", job.owner, job.joins)
    if job.notebook_lease is not None:
        yield ("jobs of notebook", job.notebook_lease)
    if job.state is JobState.PREEMPTING:
        yield ("preempting",)
