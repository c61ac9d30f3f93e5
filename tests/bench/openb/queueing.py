"""A trace's arrivals and run times on a cluster that is too small for them: the product, and first come, first served.

The latter runs twice: strictly in order, and with overtaking, where any job that fits starts and large jobs may starve;
that shows the utilisation that is possible without any guarantee.

The busiest week of the trace arrives on every k-th node of its cluster, by size, where k makes the requested GPU-time
about 1.2 times the available one, so that jobs must queue. The trace is changed for all schedulers alike:

* A part of a GPU is rounded up to one of equal parts (470 thousandths to a half, 810 to the whole), because the product
  shares GPUs in equal parts.
* Nothing runs longer than three days, and tasks too big for every remaining node are dropped.
* The trace has no users: a seeded draw gives each task to one of 40, the n-th of them 1/n as often as the first.
* The trace has no time limits: every job has the next larger of 10 minutes, 1 hour, 4 hours, 1 day and 3 days.

The bound. Until time s no schedule has delivered more than if every task had started on arrival, E(s) = sum of GPUs *
min(length, s - arrival); and from s to the end H no more than all GPUs deliver, C * (H - s). So no schedule, with or
without preemption, delivers more than the least over s of E(s) + C * (H - s) until H. E is concave between arrivals and
ends, and C * (H - s) linear: the least is at an arrival, at the beginning or at the end.

Fairness is Jain's index (sum x)^2 / (n * sum x^2), over users, of the GPU-time delivered until H over the user's due:
the max-min fair part of C * H, at most the requested one. 1 is perfectly fair.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuhub.scheduler.demand import WHOLE, NodeDemand
from gpuhub.scheduler.interface import Scheduler, SchedulingParameters
from gpuhub.scheduler.placement import FreeCapacity
from gpuhub.scheduler.scheduler import BuiltinScheduler
from tests.bench.openb import baselines, inflate, trace
from tests.bench.openb.schedulers import BuiltinQueue, FifoQueue, Job, QueueScheduler
from tests.bench.openb.trace import Task, Trace

LOAD = 1.2
WINDOW_S = 7 * 86400.0
LONGEST_S = 3 * 86400.0
LIMITS_S = (600.0, 3600.0, 4 * 3600.0, 86400.0, LONGEST_S)
USERS = 40
SEED = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """A small cluster, and the jobs that arrive within a window from 0 to `ends_at` seconds."""

    nodes: tuple[FreeCapacity, ...]
    jobs: tuple[Job, ...]
    ends_at: float

    @property
    def gpus(self) -> int:
        return sum(len(node.cards) for node in self.nodes)

    @property
    def load(self) -> float:
        """The requested GPU-time over the available one."""
        return sum(gpus_of(job) * job.runs_s for job in self.jobs) / (self.gpus * self.ends_at)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Each job's start, and GPU-time in GPU-seconds."""

    starts: Mapping[str, float]
    makespan_s: float
    #: GPU-time allocated, and available, while a job for GPUs waited.
    used_while_waiting: float
    there_while_waiting: float


def measure() -> Iterator[tuple[str, float, str]]:
    """Yield figures as name, value and unit."""
    loaded = trace.load()
    for name, value, unit in _measure(loaded):
        yield name + loaded.suffix, value, unit


def _measure(loaded: Trace) -> Iterator[tuple[str, float, str]]:
    setting = shrink(loaded)
    print(
        f"queueing: trace {loaded.name}: {len(setting.jobs)} tasks of {setting.ends_at / 86400:.3g} days on "
        f"{len(setting.nodes)} nodes with {setting.gpus} GPUs, offered GPU load {setting.load:.2f}, {USERS} made-up users",
        file=sys.stderr,
    )
    bound = most_delivered(setting)
    schedulers: dict[str, Callable[[], QueueScheduler]] = {
        "ours": lambda: BuiltinQueue(build_scheduler(), setting.nodes),
        "fifo": lambda: FifoQueue(setting.nodes),
        "overtaking": lambda: FifoQueue(setting.nodes, overtaking=True),
    }
    for name, make in schedulers.items():
        outcome = run(setting, make())
        waits = sorted(outcome.starts[job.id] - job.arrives_at for job in setting.jobs)
        asked = sum(gpus_of(job) * job.runs_s for job in setting.jobs)
        if name == "ours":
            yield "broker.utilisation_over_bound", sum(delivered(setting, outcome).values()) / bound, "ratio"
        yield f"broker.wait_mean_s_{name}", statistics.fmean(waits), "s"
        yield f"broker.wait_p95_s_{name}", waits[int(0.95 * (len(waits) - 1))], "s"
        yield f"broker.jain_{name}", jain_index(setting, outcome), "index"
        yield f"broker.use_while_waiting_{name}", outcome.used_while_waiting / outcome.there_while_waiting, "ratio"
        yield f"broker.use_until_done_{name}", asked / (setting.gpus * outcome.makespan_s), "ratio"


def build_scheduler() -> Scheduler:
    """Return the builtin scheduler with its default parameters."""
    return BuiltinScheduler(SchedulingParameters())


# -- the setting --------------------------------------------------------------------------------------------------


def shrink(of: Trace, load: float = LOAD) -> Setting:
    """Return the trace's busiest week on the number of its nodes that makes the offered load about `load`."""
    tasks = [replace(task, demand=in_parts(task.demand), runs_s=min(task.runs_s, LONGEST_S)) for task in of.tasks]
    week = _find_busiest_week(tasks)
    wanted = sum(inflate.size(task.demand) * task.runs_s for task in week) / WHOLE / WINDOW_S / load
    by_size = sorted(of.nodes, key=lambda node: (-len(node.cards), node.cards[0].model))
    samples = [tuple(by_size[step // 2 :: step]) for step in range(1, len(by_size) + 1)]
    return _setting(min(samples, key=lambda nodes: abs(sum(len(node.cards) for node in nodes) - wanted)), week)


def in_parts(demand: NodeDemand) -> NodeDemand:
    """Return the demand with a part of a GPU rounded up to one of equal parts."""
    return demand if demand.gpus == 0 else replace(demand, milli=WHOLE // (WHOLE // demand.milli))


def gpus_of(job: Job) -> float:
    """Return the number of GPUs of the job."""
    return inflate.size(job.demand) / WHOLE


def _find_busiest_week(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks of the window, beginning with a task, in which most GPU-time is requested."""
    best: tuple[float, int, int] = (-1.0, 0, 0)
    work, first = 0.0, 0
    for last, task in enumerate(tasks):
        work += inflate.size(task.demand) * task.runs_s
        while task.created_at - tasks[first].created_at > WINDOW_S:
            work -= inflate.size(tasks[first].demand) * tasks[first].runs_s
            first += 1
        best = max(best, (work, -first, last))
    return list(tasks[-best[1] : best[2] + 1])


def _setting(nodes: tuple[FreeCapacity, ...], week: Sequence[Task]) -> Setting:
    users = random.Random(SEED)
    weights = [1 / (n + 1) for n in range(USERS)]
    origin = week[0].created_at
    jobs = []
    for number, task in enumerate(week):
        owner = users.choices(range(USERS), weights)[0]
        if task.runs_s <= 0 or not any(baselines.room(node, task.demand) is not None for node in nodes):
            continue
        jobs.append(
            Job(
                id=f"job{number:05}",
                owner=f"user{owner:02}",
                demand=task.demand,
                arrives_at=task.created_at - origin,
                runs_s=task.runs_s,
                limit_s=next(limit for limit in LIMITS_S if task.runs_s <= limit),
            )
        )
    return Setting(nodes=nodes, jobs=tuple(jobs), ends_at=WINDOW_S)


# -- in virtual time ----------------------------------------------------------------------------------------------


def run(setting: Setting, scheduler: QueueScheduler) -> Outcome:
    """Run all jobs through a scheduler until the last has ended."""
    jobs = {job.id: job for job in setting.jobs}
    events = [(job.arrives_at, 1, job.id) for job in setting.jobs]
    heapq.heapify(events)
    starts: dict[str, float] = {}
    busy = used = there = now = 0.0
    waiting = 0
    while events:
        until = events[0][0]
        if waiting:
            used += busy * (until - now)
            there += setting.gpus * (until - now)
        now = until
        while events and events[0][0] == now:
            _, kind, id = heapq.heappop(events)
            if kind == 0:
                scheduler.end(jobs[id], now)
                busy -= gpus_of(jobs[id])
            elif kind == 1:
                scheduler.arrive(jobs[id])
                waiting += jobs[id].demand.gpus > 0
        for id in scheduler.start(now):
            starts[id] = now
            busy += gpus_of(jobs[id])
            waiting -= jobs[id].demand.gpus > 0
            heapq.heappush(events, (now + jobs[id].runs_s, 0, id))
        again = scheduler.next_wakeup()
        if again is not None and again > now and len(starts) < len(jobs):
            heapq.heappush(events, (again, 2, ""))
    if len(starts) < len(jobs):
        raise RuntimeError(f"{len(jobs) - len(starts)} of {len(jobs)} jobs never started")
    return Outcome(starts=starts, makespan_s=now, used_while_waiting=used, there_while_waiting=there)


# -- figures ------------------------------------------------------------------------------------------------------


def most_delivered(setting: Setting) -> float:
    """Return the GPU-seconds that no schedule exceeds until the window's end; see the module's docstring."""
    moments = sorted({0.0, setting.ends_at, *(job.arrives_at for job in setting.jobs)})
    return min(
        sum(gpus_of(job) * min(job.runs_s, max(0.0, moment - job.arrives_at)) for job in setting.jobs)
        + setting.gpus * (setting.ends_at - moment)
        for moment in moments
    )


def delivered(setting: Setting, outcome: Outcome) -> dict[str, float]:
    """Return the GPU-seconds that each user got until the window's end."""
    got: defaultdict[str, float] = defaultdict(float)
    for job in setting.jobs:
        got[job.owner] += gpus_of(job) * min(job.runs_s, max(0.0, setting.ends_at - outcome.starts[job.id]))
    return dict(got)


def jain_index(setting: Setting, outcome: Outcome) -> float:
    """Return Jain's index of the users' GPU-time over their due."""
    asked: defaultdict[str, float] = defaultdict(float)
    for job in setting.jobs:
        asked[job.owner] += gpus_of(job) * min(job.runs_s, setting.ends_at - job.arrives_at)
    due = max_min_fair_shares(asked, setting.gpus * setting.ends_at)
    got = delivered(setting, outcome)
    parts = [got[user] / due[user] for user in due if due[user] > 0]
    return sum(parts) ** 2 / (len(parts) * sum(part * part for part in parts))


def max_min_fair_shares(asked: Mapping[str, float], there: float) -> dict[str, float]:
    """Return the max-min fair parts: no user gets more than requested, and the others share the rest."""
    due: dict[str, float] = {}
    for left, user in zip(itertools.count(len(asked), -1), sorted(asked, key=lambda user: asked[user]), strict=False):
        due[user] = min(asked[user], there / left)
        there -= due[user]
    return due
