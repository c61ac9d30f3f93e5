"""Checks of an owner's and a group's limits at a request: GPUs, waiting requests and jobs.

A limit of GPUs refuses only what it could never permit; `scheduler.quota` lets other requests wait.
`domain.owner_limits` reads the limits from the settings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from gpuhub.broker.admission.validate import Requester
from gpuhub.broker.state.transaction import RowIndex, Transaction
from gpuhub.broker_api.errors import TooManyJobs, TooManyWaiting
from gpuhub.common.errors import InvalidRequest
from gpuhub.domain import owner_limits, scheduler_input
from gpuhub.domain.models import JobRow, LeaseRow
from gpuhub.scheduler.interface import Quota, QuotaLimits, SchedulingRequest

#: Jobs of an array that count as one waiting request.
ARRAY_JOBS_PER_REQUEST = 100


def check_gpu_limit(lease: LeaseRow, quota: Quota, *, notebook: int = 0, joined: int = 0) -> None:
    """Check that the owner could ever hold this many GPUs, next to those of the notebook and of the run to join.

    These are held as long as the request can wait. A detached job outlives its notebook, which does not count.

    Raises:
        InvalidRequest: With the limit.
    """
    limit = owner_limits.find_max_gpus(quota)
    least = scheduler_input.build_request(lease).least_size
    if limit is not None and least and least + notebook + joined > limit:
        held = {"the notebook's": notebook, "the joined run's": joined}
        others = " and ".join(f"{holder} {count}" for holder, count in held.items() if count)
        addition = f" in addition to {others}" if others else ""
        raise InvalidRequest(f"{least} GPUs were requested{addition}; one user may hold at most {limit}")


def check_group_limit(requests: Sequence[SchedulingRequest], quota: Quota) -> None:
    """Check that the owner could ever hold the GPUs of all jobs of a job group at the same time.

    Raises:
        InvalidRequest: With the limit.
    """
    limit, least = owner_limits.find_max_gpus(quota), sum(request.least_size for request in requests)
    if limit is not None and least > limit:
        raise InvalidRequest(f"the job group needs {least} GPUs at the same time; one user may hold at most {limit}")


def check_count_limits(transaction: Transaction, requester: Requester, *, jobs: int = 0) -> None:
    """Check that the owner may have one more request, for a notebook or with `jobs` jobs.

    Raises:
        TooManyWaiting, TooManyJobs: With the limit.
    """
    _check_count_limit(
        transaction, who=requester.owner, limits=requester.quota.per_user, tag="of", name=requester.owner, jobs=jobs
    )
    for group, limits in sorted(requester.quota.per_group.items()):
        _check_count_limit(transaction, who=f"the group {group}", limits=limits, tag="in", name=group, jobs=jobs)


def _check_count_limit(
    transaction: Transaction, *, who: str, limits: QuotaLimits, tag: str, name: str, jobs: int
) -> None:
    if limits.max_waiting is not None:
        waits = count_requests(transaction.index, transaction.jobs, f"waiting {tag}", name)
        added = count_array(jobs)
        if waits + added > limits.max_waiting:
            array = f", and an array of {jobs} jobs counts as {added}" if added > 1 else ""
            raise TooManyWaiting(
                f"{who} has {waits} waiting requests{array}; the limit is {limits.max_waiting}. "
                f"{'Request fewer jobs, cancel a request' if array else 'Cancel one'}, or wait until one is granted."
            )
    if limits.max_jobs is not None and jobs:
        has = len(transaction.index.find(f"jobs {tag}", name))
        if has + jobs > limits.max_jobs:
            raise TooManyJobs(
                f"{who} has {has} jobs and requests {jobs} more; the limit is {limits.max_jobs}. "
                "Stop one, or wait until one ends."
            )


def count_requests(index: RowIndex, jobs: Mapping[str, JobRow], tag: str, name: str) -> int:
    """Return the number of waiting requests for limits; `tag` is `waiting of` an owner or `waiting in` a group."""
    found: Counter[tuple[str, str]] = Counter()
    for lease_id in index.find(tag, name):
        job = jobs.get(index.find_one("job of lease", lease_id) or "")
        found[(job.owner, job.array) if job is not None and job.array is not None else ("", lease_id)] += 1
    return sum(map(count_array, found.values()))


def count_array(jobs: int) -> int:
    """Return the number of requests as which an array with this many waiting jobs counts; any other counts as one."""
    return max(1, -(-jobs // ARRAY_JOBS_PER_REQUEST))
