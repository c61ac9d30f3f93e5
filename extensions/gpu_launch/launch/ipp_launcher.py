"""ipyparallel's engine launcher `gpuhub`: `ipp.Cluster(engines="gpuhub", n=3)` gives three nodes an engine each."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ipyparallel import Client
from ipyparallel.cluster.launcher import BaseLauncher, NotRunning
from traitlets import Integer, Unicode

from gpu_launch import environment
from gpu_launch.broker import models as wire
from gpu_launch.broker.client import BrokerClient
from gpu_launch.broker.gpu_request import GpuRequest
from gpu_launch.broker.holdings import CLUSTER, format_holdings
from gpu_launch.common import run_folder
from gpu_launch.errors import GpuLaunchError, LaunchFailed
from gpu_launch.launch import plan as plan_module
from gpu_launch.launch.plan import LaunchPlan, find_model, fit, make_plan
from gpu_launch.launch.workers.worker_group import BrokerWorkerGroup, WorkerGroup
from gpu_launch.output import engine_tabs

_POLL_S = 0.02  # seconds between polls for the controller's connection file
_SIGNAL_S = 10.0  # seconds for the controller to answer, and for all engines to confirm a signal
_CONTROLLER_S = 60.0  # seconds a controller may take to write it


class GpuhubEngineSetLauncher(BaseLauncher):
    """Engines in the notebook's own container, where it has GPUs, and in worker containers of the broker."""

    name = Unicode("gpuhub")
    n = Integer(1).tag(to_dict=True)
    engine_set_id = Unicode()
    nproc_per_node = Integer(1, config=True, help="GPUs of each engine's node.").tag(to_dict=True)
    model = Unicode("", config=True, help="Only GPUs of this model, such as 'RTX 5090'.").tag(to_dict=True)
    run_id = Unicode().tag(to_dict=True)
    job_id = Unicode().tag(to_dict=True)

    def __init__(self, *, group: WorkerGroup | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        #: Given by a launch; created by `start` otherwise.
        self.group = group
        engine_tabs.install()
        self._is_launch = group is not None
        self._stopping = threading.Event()
        #: What the start has waited for, for a person, oldest first.
        self.progress: list[str] = []

    def find_args(self) -> list[str]:
        """Return the worker's command, for ipyparallel's log."""
        return ["gpu-launch-worker"]

    async def start(self, n: int) -> None:
        """Ask for the engines; return when every container is running, unless a launch started the cluster.

        Cancelled, it frees what it has requested.
        """
        self.n = n
        try:
            await self._start(n)
        except BaseException:
            if not self._is_launch:
                await self.stop()
            raise

    async def _start(self, n: int) -> None:
        loop = asyncio.get_running_loop()
        group = self.group
        if group is None:
            group = await loop.run_in_executor(None, self._begin, n)
        self.run_id = group.run.run_id
        self.notify_start({"run": self.run_id, "n": n})
        await loop.run_in_executor(None, self._publish, group)
        if not self._is_launch:
            await loop.run_in_executor(None, self._wait, group)
            threading.Thread(target=self._watch, args=(group, loop), name="gpuhub engines", daemon=True).start()
        self.job_id = group.job.id if group.job else ""

    async def stop(self) -> None:
        """Free every container; return when the broker has confirmed that the GPUs are free."""
        self._stopping.set()
        if self.group is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.group.stop)
        self.notify_stop({"exit_code": 0, "identifier": self.identifier})

    async def join(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - ipyparallel's interface
        """Wait until the engines have been stopped."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.state == "running":
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"The engines of {self.run_id} still run after {timeout} s.")
            await asyncio.sleep(0.1)

    async def signal(self, sig: int) -> None:
        """Send a signal to every engine of this set; SIGTERM and SIGKILL end the set and free its GPUs.

        Raises:
            LaunchFailed: when no engine of the set is connected, or one does not confirm the signal.
        """
        if self.group is None:
            return
        loop = asyncio.get_running_loop()
        if sig in (signal.SIGTERM, signal.SIGKILL):
            self._stopping.set()
            await loop.run_in_executor(None, self.group.stop)
        else:
            await loop.run_in_executor(None, self._signal_engines, sig)

    def get_output(self, remove: bool = False) -> str:
        """Return the ends of the workers' logs."""
        if not self.run_id:
            return ""
        run = run_folder.open_run(environment.read().home, self.run_id)
        return "".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}" for path in sorted(run.logs.glob("*.log"))
        )

    @classmethod
    def from_dict(
        cls, d: dict[str, Any], *, config: Any = None, parent: Any = None, **kwargs: Any
    ) -> GpuhubEngineSetLauncher:
        """Take over the job of a cluster saved by an earlier kernel.

        Raises:
            NotRunning: where it has ended.
        """
        self: GpuhubEngineSetLauncher = super().from_dict(d, config=config, parent=parent, **kwargs)
        env = environment.read()
        broker = _broker(env)
        if broker is None or not self.job_id:
            raise NotRunning("the engines ended with the kernel that started them")
        try:
            job = broker.get_job(self.job_id)
        except GpuLaunchError as error:
            raise NotRunning(str(error)) from None
        if job.state in (wire.ENDED, wire.STOPPING):
            raise NotRunning(job.reason or "the job has ended")
        plan = LaunchPlan(
            nnodes=len(job.workers),
            least_nnodes=len(job.workers),
            nproc_per_node=self.nproc_per_node,
            includes_notebook=False,
            notebook_gpus=(),
            exclude_nodes=(),
            demand=GpuRequest(),
        )
        group = BrokerWorkerGroup(plan, run_folder.open_run(env.home, self.run_id), env=env, broker=broker)
        group.attach(self.job_id)
        self.group = group
        # `n` stays what was asked for, with an engine in the notebook that may be gone: a restart starts this number.
        self.notify_start({"run": self.run_id, "n": len(job.workers)})
        return self

    def _begin(self, n: int) -> BrokerWorkerGroup:
        env = environment.read()
        if self._shares_notebook():
            # Engines that are added get GPUs of their own.
            env = replace(env, gpu_uuids=())
        broker = _broker(env)
        cluster = broker.get_cluster() if broker else None
        models = (find_model(cluster, self.model),) if self.model and cluster else ()
        plan = make_plan(
            env,
            nnodes=n,
            nproc_per_node=self.nproc_per_node,
            demand=GpuRequest(models=models),
            cards=cluster.find_gpus(env.gpu_uuids) if cluster else (),
        )
        if cluster is not None:
            plan = fit(plan, cluster)
        # Before it requests anything, so that `stop` can end it.
        self.group = group = BrokerWorkerGroup(
            plan, run_folder.create_run(env.home), env=env, broker=broker, name=CLUSTER
        )
        self._check(group)
        # Half a minute, with the cluster's 500 ms between pings.
        settings = {"is_launch": False, "profile_dir": self.profile_dir, "heartbeat_misses": 30}
        group.start(settings=settings | run_folder.build_interpreter(environment.find_own_interpreter(env.home)))
        return group

    def _signal_engines(self, number: int) -> None:
        """Let ipyparallel's nanny of each engine send the signal: it answers while its engine computes."""
        client = Client(self.connection_files["client"], timeout=_SIGNAL_S)
        try:
            # Engines carry the id of their run, because the controller does not know of sets.
            targets = [engine for engine, name in client._engines.items() if name.startswith(f"{self.run_id}.")]
            if not targets:
                raise LaunchFailed(f"Signal {number}: no engine of {self.run_id} is connected (any more).")
            answers = client.send_signal(number, targets=targets, block=False).result(timeout=_SIGNAL_S)
            for content in (answer["content"] for answer in answers):
                if content["status"] != "ok":
                    raise LaunchFailed(f"Signal {number}: {content.get('ename')}: {content.get('evalue')}")
        except TimeoutError:
            raise LaunchFailed(
                f"Signal {number}: not all of the {len(targets)} engines of {self.run_id} confirmed it within "
                f"{_SIGNAL_S:.0f} s."
            ) from None
        finally:
            client.close()

    def _shares_notebook(self) -> bool:
        """Return whether another set of this cluster uses the notebook's own GPUs."""
        sets = getattr(self.parent, "engines", {}).values()
        return any(
            other is not self
            and isinstance(other, GpuhubEngineSetLauncher)
            and other.running
            and other.group is not None
            and other.group.plan.includes_notebook
            for other in sets
        )

    def _publish(self, group: WorkerGroup) -> None:
        """Publish the connection of the controller, from the cluster or from its file."""
        given = self.environment.get("IPP_CONNECTION_INFO")
        deadline = time.monotonic() + _CONTROLLER_S
        connection = json.loads(given) if given else None
        while connection is None:
            self._check(group)
            connection = _load_connection(Path(self.connection_files["engine"]))
            if connection is None and time.monotonic() > deadline:
                raise LaunchFailed(f"ipyparallel's controller did not start within {_CONTROLLER_S:.0f} s.")
            time.sleep(_POLL_S)
        group.publish_connection(connection)

    def _wait(self, group: WorkerGroup) -> None:
        """Wait until every container is running, and log each change."""
        while not group.is_started():
            self._check(group)
            if group.job is not None:
                text = plan_module.format_job_state(group.job, group.plan, datetime.now(UTC))
                if not self.progress:
                    self._log_progress(*format_holdings(group.holdings, cancel="%gpu_cancel"), text)
                elif text != self.progress[-1]:
                    self._log_progress(text)
            time.sleep(_POLL_S)

    def _log_progress(self, *lines: str) -> None:
        for line in lines:
            self.progress.append(line)
            self.log.info(line)

    def _check(self, group: WorkerGroup) -> None:
        """Raise the failure of a worker, or LaunchFailed when the engines are stopped before they run."""
        group.check()
        if self._stopping.is_set():
            raise LaunchFailed("The engines were stopped before all of them ran.")

    def _watch(self, group: WorkerGroup, loop: asyncio.AbstractEventLoop) -> None:
        """Notify ipyparallel when the broker has ended the engines."""
        while self.state == "running":
            try:
                group.check()
            except GpuLaunchError as error:
                data = {"exit_code": 1, "identifier": self.identifier, "reason": str(error)}
                if loop.is_running():
                    loop.call_soon_threadsafe(self.notify_stop, data)
                else:
                    self.notify_stop(data)
                return
            time.sleep(1.0)


def _broker(env: environment.Environment) -> BrokerClient | None:
    return BrokerClient.for_notebook(env) if env.broker_url and env.token else None


def _load_connection(path: Any) -> dict[str, Any] | None:
    """Return a controller's connection file; None while it is absent or being written."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return data
