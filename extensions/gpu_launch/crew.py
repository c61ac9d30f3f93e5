"""The standing workers of a notebook: one job of the broker's, one controller, an engine and a fork server a node."""

from __future__ import annotations

import atexit
import os
import shutil
import threading
import time
from dataclasses import dataclass

from gpu_launch import render, runs
from gpu_launch.broker import Broker
from gpu_launch.containers import Containers
from gpu_launch.errors import GpuLaunchError, UsageError
from gpu_launch.fleet import Fleet
from gpu_launch.gang import Gang
from gpu_launch.network import own
from gpu_launch.plan import Plan
from gpu_launch.quantities import format_span
from gpu_launch.request import Checked, Request, check
from gpu_launch.roster import Roster
from gpu_launch.wire import EXITED, RUNNING, Cluster

_LOOK_S = 0.5  # seconds between looks at idle crews
_ASK_S = 5.0  # seconds between questions whether anybody waits
_EXIT_S = 3.0  # seconds of the kernel's end that freeing may take; the broker notices for itself otherwise
_NETWORK_S = 2.0  # seconds for this container's network to be there


@dataclass(frozen=True, kw_only=True)
class CrewView:
    """A standing crew, for a person."""

    run_id: str
    #: Its nodes and their GPUs, the notebook's own among them: `rig1 RTX 5090, rig2 RTX 5070`.
    nodes: str
    #: Ids of the broker's jobs; none where the notebook's own container is all.
    jobs: tuple[str, ...]
    is_busy: bool
    #: Seconds until it is given back; None while it is busy.
    left_s: float | None


class Crew:
    """Taken by one launch at a time."""

    def __init__(
        self,
        containers: Containers,
        *,
        address: str,
        own_text: str = "",
        cluster: Cluster | None = None,
        in_the_way: tuple[Crew, ...] = (),
    ) -> None:
        self.gang, self.plan, self.run = containers, containers.plan, containers.run
        self.fleet = Fleet(containers, address)
        self.own_text = own_text
        #: The cluster as it was when this was asked for.
        self.cluster = cluster
        #: When it was given back last, by the monotonic clock; None while a launch has it.
        self.idle_since: float | None = None
        self.keep_s = 0.0
        self.is_begun = self.is_freed = False
        #: The person has been told that it stays.
        self.is_told = False
        self._in_the_way = in_the_way
        self.made_at = time.monotonic()
        self._freeing = threading.Lock()

    @property
    def is_taken(self) -> bool:
        """Whether a launch has it."""
        return self.idle_since is None and not self.is_freed

    def begin(self) -> None:
        """Ask for the containers, after freeing what is in the way; returns when the broker has taken the request."""
        self.is_begun = True
        for other in self._in_the_way:
            other.free()
        self._in_the_way = ()
        self.gang.begin(settings=runs.launch_settings())

    def roster(self, plan: Plan) -> Roster | None:
        """Who of it takes part in a start of `plan` made now; None while that is not decided."""
        found = self.gang.roster()
        return None if found is None else found.first(plan.nnodes)

    def fits(self, plan: Plan) -> bool:
        """Whether a launch of this plan may have it."""
        mine = self.plan
        if mine.demand.time_limit_s is not None and 2 * (time.monotonic() - self.made_at) > mine.demand.time_limit_s:
            # Its end comes too soon for whoever asks for so much time now.
            return False
        is_same = (mine.nproc_per_node, mine.own, mine.own_cards, mine.exclude_nodes, mine.demand) == (
            plan.nproc_per_node,
            plan.own,
            plan.own_cards,
            plan.exclude_nodes,
            plan.demand,
        )
        if mine.is_elastic or plan.is_elastic:
            return is_same and self.is_whole() and (mine.nnodes, mine.least_nnodes) == (plan.nnodes, plan.least_nnodes)
        return is_same and mine.nnodes >= plan.nnodes

    def is_whole(self) -> bool:
        """Whether it has all nodes that were asked for at most."""
        roster = self.gang.roster()
        return roster is not None and roster.nnodes >= self.plan.nnodes

    def is_alive(self) -> bool:
        """Whether ranks could be started at once on all that was asked for."""
        if self.is_freed or not self.fleet.is_up() or not self.gang.is_started():
            return False
        try:
            self.gang.check()
        except GpuLaunchError:
            return False
        job, roster = self.gang.job, self.gang.roster()
        is_running = self.gang.is_alone or job is None or job.state == RUNNING
        has_lost = any(worker.state == EXITED for worker in self.gang.workers())
        return is_running and not has_lost and roster is not None and all(map(self.fleet.has, roster.members))

    def describe(self) -> str:
        """Its nodes and their GPUs, for a person."""
        return render.nodes_text(self.gang.workers(), self.own_text)

    def free(self) -> None:
        """Give everything back; returns when the broker has said that the GPUs are free. Raises BrokerError."""
        with self._freeing:
            if self.is_freed:
                return
            self.is_freed = True
            down = threading.Thread(target=self.fleet.down, name="gpu_launch down", daemon=True)
            down.start()
            try:
                self.gang.stop()
                for other in self._in_the_way:
                    other.free()
            finally:
                down.join()
                self.run.lived.unlink(missing_ok=True)
                shutil.rmtree(self.run.profile, ignore_errors=True)


class Crews:
    """All crews of this process, and the thread that gives idle ones back."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._crews: list[Crew] = []
        self._keeper: threading.Thread | None = None
        self._broker: Broker | None = None
        self._asked_at = 0.0
        self._notes: list[str] = []
        self._process = 0

    def check(self, request: Request, broker: Broker | None) -> Checked:
        """`request.check`, without a question to the broker where a crew that fits stands already."""
        for crew in self._idle():
            try:
                found = check(request, None, cluster=crew.cluster)
            except UsageError:
                continue
            if crew.fits(found.plan) and crew.is_alive():
                return found
        return check(request, broker)

    def take(self, checked: Checked, broker: Broker | None) -> Crew:
        """A standing crew that fits; else a new one, which frees the idle ones, as they may be in its way, first."""
        with self._lock:
            idle = self._idle()
            fitting = self.fitting(checked.plan)
            if fitting is not None:
                fitting.idle_since = None
                return fitting
            for crew in idle:
                # No longer the keeper's: the new one frees it.
                self._crews.remove(crew)
            crew = _make(checked, broker, in_the_way=tuple(idle))
            self._crews.append(crew)
            env = checked.request.env
            self._broker = Broker.inside(env, patience_s=0.0) if env.broker_url and env.token else None
            self._watch_exit()
            return crew

    def fitting(self, plan: Plan) -> Crew | None:
        """The idle crew that a launch of this plan gets; None where a new one is made."""
        return next((crew for crew in self._idle() if crew.fits(plan) and crew.is_alive()), None)

    def give_back(self, crew: Crew, *, keep_s: float) -> None:
        """After a launch: it stays for `keep_s` seconds, or is freed now when that is 0 or it is not whole any more.

        Raises BrokerError when the broker cannot be told.
        """
        if keep_s > 0 and crew.is_alive() and crew.is_whole():
            with self._lock:
                crew.keep_s, crew.idle_since = keep_s, time.monotonic()
                if crew not in self._crews:
                    self._crews.append(crew)
                self._asked_at = time.monotonic()
                self._start_keeper()
            return
        self._end([crew])

    def release(self, run_id: str | None = None) -> list[str]:
        """Free idle crews, or the one of that run; the nodes of each. UsageError for a busy or unknown one."""
        with self._lock:
            found = [crew for crew in self._crews if run_id in (None, crew.run.run_id)]
            if run_id is not None and not found:
                raise UsageError(f"This notebook has no workers called {run_id}; %gpu_status shows what it has.")
            if run_id is not None and found[0].idle_since is None:
                raise UsageError(f"The workers of {run_id} are at work; interrupt the launch first.")
            idle = [crew for crew in found if crew.idle_since is not None]
        freed = [crew.describe() for crew in idle]
        self._end(idle)
        return freed

    def standing(self) -> list[CrewView]:
        """Every crew, those that are busy among them."""
        with self._lock:
            return [_view(crew) for crew in self._crews]

    def notes(self) -> list[str]:
        """What happened to idle crews since this was asked last."""
        with self._lock:
            notes, self._notes = self._notes, []
            return notes

    def _idle(self) -> list[Crew]:
        with self._lock:
            return [crew for crew in self._crews if crew.idle_since is not None]

    def _end(self, crews: list[Crew]) -> None:
        with self._lock:
            self._crews = [crew for crew in self._crews if crew not in crews]
        for crew in crews:
            crew.free()

    def _start_keeper(self) -> None:
        if self._keeper is None or not self._keeper.is_alive():
            self._keeper = threading.Thread(target=self._keep, name="gpu_launch keeper", daemon=True)
            self._keeper.start()

    def _keep(self) -> None:
        """Give idle crews back when it is time; ends when there is none."""
        while True:
            time.sleep(_LOOK_S)
            anybody_waits = self._anybody_waits()
            with self._lock:
                idle = self._idle()
                over = {crew: reason for crew in idle if (reason := _reason(crew, anybody_waits=anybody_waits))}
                for crew, reason in over.items():
                    if not crew.gang.is_alone:
                        self._notes.append(
                            f"{render.nodes_text(crew.gang.workers(), '')} went back meanwhile: {reason}"
                        )
                    self._crews.remove(crew)
                if not idle:
                    self._keeper = None
                    return
            for crew in over:
                try:
                    crew.free()
                except GpuLaunchError as error:
                    self._notes.append(str(error))

    def _anybody_waits(self) -> bool:
        broker = self._broker
        has_workers = any(not crew.gang.is_alone for crew in self._idle())
        if broker is None or not has_workers or time.monotonic() - self._asked_at < _ASK_S:
            return False
        self._asked_at = time.monotonic()
        try:
            return broker.cluster().waiting > 0
        except GpuLaunchError:
            # A broker that restarts is no reason to give anything back.
            return False

    def _watch_exit(self) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            atexit.register(self._exit)

    def _exit(self) -> None:
        if self._process != os.getpid():
            # A fork of the kernel: nothing of it is this process's.
            return
        with self._lock:
            crews, self._crews = self._crews, []
        threads = [threading.Thread(target=crew.free, daemon=True) for crew in crews]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _EXIT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _make(checked: Checked, broker: Broker | None, *, in_the_way: tuple[Crew, ...]) -> Crew:
    env = checked.request.env
    address = own(env.subnet, wait_s=_NETWORK_S).address
    run = runs.create(env.home)
    run.lived.touch()
    gang = Gang(checked.plan, run, env=env, broker=broker)
    return Crew(gang, address=address, own_text=checked.own_text, cluster=checked.cluster, in_the_way=in_the_way)


def _reason(crew: Crew, *, anybody_waits: bool) -> str:
    """Why an idle crew is to be given back; empty while it stays."""
    if not crew.is_alive():
        return "a worker ended, or others needed its GPU"
    if crew.idle_since is not None and time.monotonic() - crew.idle_since >= crew.keep_s:
        return f"idle for {format_span(round(crew.keep_s))}"
    return "others wait for GPUs" if anybody_waits and not crew.gang.is_alone else ""


def _view(crew: Crew) -> CrewView:
    since = crew.idle_since
    return CrewView(
        run_id=crew.run.run_id,
        nodes=crew.describe(),
        jobs=crew.gang.jobs if isinstance(crew.gang, Gang) else (),
        is_busy=since is None,
        left_s=None if since is None else max(0.0, since + crew.keep_s - time.monotonic()),
    )


#: This process's.
crews = Crews()
