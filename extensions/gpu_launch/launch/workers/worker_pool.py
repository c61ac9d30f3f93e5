"""The worker pools of a notebook: a job of the broker, a controller, and an engine and a fork server per node; how long
idle ones are kept.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import threading
import time
from dataclasses import dataclass

from gpu_launch import environment
from gpu_launch.broker.client import BrokerClient
from gpu_launch.broker.holdings import LAUNCH
from gpu_launch.broker.models import EXITED, RUNNING, WAITING, Cluster
from gpu_launch.common import run_folder
from gpu_launch.common.launch_spec import Membership
from gpu_launch.common.network import find_own_interface
from gpu_launch.environment import Environment
from gpu_launch.errors import GpuLaunchError, UsageError
from gpu_launch.launch.plan import LaunchPlan
from gpu_launch.launch.request import LaunchRequest, ValidatedRequest, validate
from gpu_launch.launch.workers.agent_client import AgentClient
from gpu_launch.launch.workers.worker_group import BrokerWorkerGroup, WorkerGroup
from gpu_launch.options.launch_options import LaunchOptions
from gpu_launch.output import text
from gpu_launch.units import format_span

log = logging.getLogger(__name__)

_CLEAN_S = 0.5  # seconds between checks of the idle pools
_POLL_S = 5.0  # seconds between polls whether others wait
_EXIT_S = 3.0  # seconds for freeing when the kernel ends; after that the broker misses the renewals
_NETWORK_S = 2.0  # seconds for this container's network to be there


@dataclass(frozen=True, kw_only=True)
class WorkerPoolView:
    """A worker pool as a person sees it."""

    run_id: str
    #: Its nodes and their GPUs, the notebook's own among them: `rig1 RTX 5090, rig2 RTX 5070`.
    nodes: str
    #: Ids of the broker's jobs; none where the notebook's own container is the only one.
    jobs: tuple[str, ...]
    is_busy: bool
    #: Seconds until it is freed; None while it is busy.
    remaining_s: float | None


class WorkerPool:
    """Workers that stay from launch to launch; one launch at a time acquires them."""

    def __init__(
        self,
        group: WorkerGroup,
        *,
        address: str,
        notebook_text: str = "",
        cluster: Cluster | None = None,
        replaced: tuple[WorkerPool, ...] = (),
    ) -> None:
        self.group, self.plan, self.run = group, group.plan, group.run
        self.agents = AgentClient(group, address)
        self.notebook_text = notebook_text
        #: The cluster at the time of the request.
        self.cluster = cluster
        #: When it was released last, by the monotonic clock; None while a launch uses it.
        self.idle_since: float | None = None
        self.keep_s = 0.0
        self.has_started = self.is_freed = False
        #: The user knows that it stays.
        self.was_announced = False
        self._replaced = replaced
        self.created_at = time.monotonic()
        self._freeing = threading.Lock()

    @property
    def is_acquired(self) -> bool:
        """Return whether a launch uses it."""
        return self.idle_since is None and not self.is_freed

    def start(self) -> None:
        """Free the pools that this one replaces, and ask for the containers; return when the broker has the request."""
        self.has_started = True
        for other in self._replaced:
            other.free()
        self._replaced = ()
        python = environment.find_own_interpreter(environment.read().home)
        self.group.start(settings=run_folder.build_settings(python=python))

    def membership(self, plan: LaunchPlan) -> Membership | None:
        """Return who takes part in a start of `plan` now; None while that is not decided."""
        membership = self.group.membership()
        return None if membership is None else membership.limited_to(plan.nnodes)

    def matches(self, plan: LaunchPlan) -> bool:
        """Return whether a launch of this plan may use it."""
        mine = self.plan
        if mine.demand.time_limit_s is not None and 2 * (time.monotonic() - self.created_at) > mine.demand.time_limit_s:
            # Less than half of its time is left: too little for a launch that asks for all of it now.
            return False
        is_same = (
            mine.nproc_per_node,
            mine.includes_notebook,
            mine.notebook_gpus,
            mine.exclude_nodes,
            mine.demand,
        ) == (
            plan.nproc_per_node,
            plan.includes_notebook,
            plan.notebook_gpus,
            plan.exclude_nodes,
            plan.demand,
        )
        if mine.is_elastic or plan.is_elastic:
            return (
                is_same and self.is_complete() and (mine.nnodes, mine.least_nnodes) == (plan.nnodes, plan.least_nnodes)
            )
        return is_same and mine.nnodes >= plan.nnodes

    def is_complete(self) -> bool:
        """Return whether it has the largest requested number of nodes."""
        membership = self.group.membership()
        return membership is not None and membership.nnodes >= self.plan.nnodes

    def is_alive(self) -> bool:
        """Return whether ranks could start at once on all of its nodes."""
        if self.is_freed or not self.agents.is_running() or not self.group.is_started():
            return False
        try:
            self.group.check()
        except GpuLaunchError as error:
            log.info("the workers that stayed cannot be used again: %s", error)
            return False
        job, membership = self.group.job, self.group.membership()
        is_running = self.group.is_notebook_only or job is None or job.state == RUNNING
        has_lost = any(worker.state == EXITED for worker in self.group.workers())
        return (
            is_running
            and not has_lost
            and membership is not None
            and all(map(self.agents.is_connected, membership.participants))
        )

    def describe(self) -> str:
        """Return its nodes and their GPUs, for a person."""
        return text.format_nodes(self.group.workers(), self.notebook_text)

    def free(self) -> None:
        """Free all workers; return when the broker has confirmed that the GPUs are free.

        Raises:
            BrokerError: when the broker cannot be reached; it frees the GPUs when the job is not renewed any more.
        """
        with self._freeing:
            if self.is_freed:
                return
            self.is_freed = True
            stopping = threading.Thread(target=self.agents.stop, name="gpu_launch stop", daemon=True)
            stopping.start()
            try:
                self.group.stop()
                for other in self._replaced:
                    other.free()
            finally:
                stopping.join()
                self.run.heartbeat.unlink(missing_ok=True)
                shutil.rmtree(self.run.profile, ignore_errors=True)


class WorkerPools:
    """The worker pools of this process, and the thread that frees idle ones."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pools: list[WorkerPool] = []
        self._cleaner: threading.Thread | None = None
        self._broker: BrokerClient | None = None
        self._polled_at = 0.0
        self._notes: list[str] = []
        self._process = 0

    def validate(self, request: LaunchRequest, broker: BrokerClient | None) -> ValidatedRequest:
        """Return the checked request; the broker is not asked where an idle pool matches it."""
        for pool in self._idle():
            try:
                validated = validate(request, None, cluster=pool.cluster)
            except UsageError:
                continue
            if pool.matches(validated.plan) and pool.is_alive():
                return validated
        return validate(request, broker)

    def acquire(self, validated: ValidatedRequest, broker: BrokerClient | None, *, name: str = LAUNCH) -> WorkerPool:
        """Return an idle pool that matches, or a new one, which frees the idle ones before it starts.

        `name` names a new one's job, see `broker.holdings`.
        """
        with self._lock:
            idle = self._idle()
            matching = self.find_idle(validated.plan)
            if matching is not None:
                matching.idle_since = None
                return matching
            for pool in idle:
                # The new pool frees it, not the cleaner.
                self._pools.remove(pool)
            pool = _make_pool(validated, broker, name=name, replaced=tuple(idle))
            self._pools.append(pool)
            env = validated.request.env
            self._broker = BrokerClient.for_notebook(env, retry_limit_s=0.0) if env.broker_url and env.token else None
            self._watch_exit()
            return pool

    def find_idle(self, plan: LaunchPlan) -> WorkerPool | None:
        """Return the idle pool that a launch of this plan gets; None where it needs a new one."""
        return next((pool for pool in self._idle() if pool.matches(plan) and pool.is_alive()), None)

    def release(self, pool: WorkerPool, *, keep_s: float) -> None:
        """Release a pool after a launch: it stays for `keep_s` seconds, or is freed now if that is 0 or a node is lost.

        Raises:
            BrokerError: as `WorkerPool.free` does.
        """
        if keep_s > 0 and pool.is_alive() and pool.is_complete():
            with self._lock:
                pool.keep_s, pool.idle_since = keep_s, time.monotonic()
                if pool not in self._pools:
                    self._pools.append(pool)
                self._polled_at = time.monotonic()
                self._start_cleaner()
            return
        self._free_all([pool])

    def free_idle(self, run_id: str | None = None) -> list[str]:
        """Free the idle pools, or the one of that run; return the nodes of each.

        Raises:
            UsageError: for a run whose pool is busy or unknown.
        """
        with self._lock:
            chosen = [pool for pool in self._pools if run_id in (None, pool.run.run_id)]
            if run_id is not None and not chosen:
                raise UsageError(f"This notebook has no workers called {run_id}; %gpu_status shows what it has.")
            if run_id is not None and chosen[0].idle_since is None:
                raise UsageError(f"The workers of {run_id} are in use; interrupt the launch first.")
            idle = [pool for pool in chosen if pool.idle_since is not None]
        freed = [pool.describe() for pool in idle]
        self._free_all(idle)
        return freed

    def list_views(self) -> list[WorkerPoolView]:
        """Return every pool, busy ones included."""
        with self._lock:
            return [_view(pool) for pool in self._pools]

    def has_waiting(self) -> bool:
        """Return whether a launch of this process waits for GPUs."""
        with self._lock:
            jobs = [pool.group.job for pool in self._pools if pool.is_acquired]
        return any(job is not None and job.state == WAITING for job in jobs)

    def pop_notes(self) -> list[str]:
        """Return what happened to idle pools since the last call."""
        with self._lock:
            notes, self._notes = self._notes, []
            return notes

    def _idle(self) -> list[WorkerPool]:
        with self._lock:
            return [pool for pool in self._pools if pool.idle_since is not None]

    def _free_all(self, pools: list[WorkerPool]) -> None:
        with self._lock:
            self._pools = [pool for pool in self._pools if pool not in pools]
        for pool in pools:
            pool.free()

    def _start_cleaner(self) -> None:
        if self._cleaner is None or not self._cleaner.is_alive():
            self._cleaner = threading.Thread(target=self._free_when_due, name="gpu_launch keeper", daemon=True)
            self._cleaner.start()

    def _free_when_due(self) -> None:
        """Free idle pools when it is time; return when there is none."""
        while True:
            time.sleep(_CLEAN_S)
            others_wait = self._others_wait()
            with self._lock:
                idle = self._idle()
                due = {pool: reason for pool in idle if (reason := _find_reason_to_free(pool, others_wait=others_wait))}
                for pool, reason in due.items():
                    if not pool.group.is_notebook_only:
                        self._notes.append(
                            f"freed in the meantime: {text.format_nodes(pool.group.workers(), '')}, {reason}"
                        )
                    self._pools.remove(pool)
                if not idle:
                    self._cleaner = None
                    return
            for pool in due:
                try:
                    pool.free()
                except GpuLaunchError as error:
                    self._notes.append(str(error))

    def _others_wait(self) -> bool:
        broker = self._broker
        has_workers = any(not pool.group.is_notebook_only for pool in self._idle())
        if broker is None or not has_workers or time.monotonic() - self._polled_at < _POLL_S:
            return False
        self._polled_at = time.monotonic()
        try:
            return broker.get_cluster().waiting > 0
        except GpuLaunchError:
            # A restart of the broker is not a reason to free workers.
            return False

    def _watch_exit(self) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            atexit.register(self._exit)

    def _exit(self) -> None:
        if self._process != os.getpid():
            # This is a fork of the kernel, which owns none of the pools.
            return
        with self._lock:
            pools, self._pools = self._pools, []
        threads = [threading.Thread(target=pool.free, daemon=True) for pool in pools]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _EXIT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def choose_keep_s(options: LaunchOptions, env: Environment) -> float:
    """Return for how many seconds idle workers are kept: what the user chose, or else the broker's default."""
    return env.keep_workers_s if options.keep_s is None else float(options.keep_s)


def _make_pool(
    validated: ValidatedRequest, broker: BrokerClient | None, *, name: str, replaced: tuple[WorkerPool, ...]
) -> WorkerPool:
    env = validated.request.env
    address = find_own_interface(env.subnet, wait_s=_NETWORK_S).address
    run = run_folder.create_run(env.home)
    run.heartbeat.touch()
    group = BrokerWorkerGroup(validated.plan, run, env=env, broker=broker, name=name)
    return WorkerPool(
        group, address=address, notebook_text=validated.notebook_text, cluster=validated.cluster, replaced=replaced
    )


def _find_reason_to_free(pool: WorkerPool, *, others_wait: bool) -> str:
    """Return why an idle pool must be freed; empty while it stays."""
    if not pool.is_alive():
        return "a worker ended, or others needed its GPU"
    if pool.idle_since is not None and time.monotonic() - pool.idle_since >= pool.keep_s:
        return f"idle for {format_span(round(pool.keep_s))}"
    return "others wait for GPUs" if others_wait and not pool.group.is_notebook_only else ""


def _view(pool: WorkerPool) -> WorkerPoolView:
    since = pool.idle_since
    return WorkerPoolView(
        run_id=pool.run.run_id,
        nodes=pool.describe(),
        jobs=pool.group.job_ids if isinstance(pool.group, BrokerWorkerGroup) else (),
        is_busy=since is None,
        remaining_s=None if since is None else max(0.0, since + pool.keep_s - time.monotonic()),
    )


#: The worker pools of this process.
worker_pools = WorkerPools()
