"""The job of a notebook: the base of the Slurm spawner that follows and ends it, its submission, and its record.

When the hub is restarted in the middle of a start, JupyterHub forgets that start and makes a new token for the next
one. The queued job has the first token in its script, and can keep its place only if the hub accepts that token again.
The broker stores leases but no tokens, so the hub stores them: one file per lease, readable by root (or the hub's user)
alone.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchspawner.api import BatchSpawnerAPIHandler
from batchspawner.batchspawner import JobStatus, SlurmSpawner
from jupyterhub.apihandlers import default_handlers
from jupyterhub.traitlets import Callable as CallableTrait
from traitlets import Integer, Unicode, default

from gpuhub.broker_api.schemas import ClusterView, LeaseState, LeaseView
from gpuhub.common import names
from gpuhub.common.errors import Conflict, GpuhubError, InvalidRequest
from gpuhub.common.files import replace_file
from gpuhub.common.paths import Paths
from gpuhub.config import head_address
from gpuhub.config.containers.container_size import build_profile_size
from gpuhub.config.containers.profiles import gpu_requirement
from gpuhub.config.settings import ClusterSettings, NodeSettings, ProfileSettings
from gpuhub.config.users.identity import UserIdentity
from gpuhub.scheduler.interface import GpuSlot, NodeCapacity, SchedulingRequest
from gpuhub.slurm_client.gpu_selection import build_submission, select_gpus
from gpuhub.slurm_client.interface import SlurmClient
from gpuhub.slurm_client.job_control import build_submitter
from gpuhub.slurm_client.models import LIVE_STATES, SlurmJob, SlurmJobState, SlurmSite, SlurmSnapshot, SlurmSubmission
from gpuhub.spawners import readiness
from gpuhub.spawners.base import LeasedSpawner
from gpuhub.web.text import build_card

__all__ = ["JobStatus", "SlurmSpawner"]
default_handlers[:] = [handler for handler in default_handlers if BatchSpawnerAPIHandler not in handler]
#: Time that the hub waits for a restored notebook while Slurm does not report the end of its job, seconds.
RESTORED_TIMEOUT_S = 7 * 86400
#: Where notebooks on the head node listen, which only the hub and the proxy on the same machine need to reach.
_HEAD_NODE_NOTEBOOKS = "127.0.0.2"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What the hub must know of a lease's job after a restart."""

    token: str
    #: Number of the job; None until it is submitted.
    job: int | None = None
    #: The notebook's port; None until it is reported.
    port: int | None = None


class JobRecordStore:
    """A folder of records, which is created when it is needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, lease_id: str) -> JobRecord | None:
        """Return the record of the lease's job, or None."""
        try:
            text = self._file(lease_id).read_text(encoding="utf-8")
            return JobRecord(**json.loads(text))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):
            # An incomplete file after a crash of the machine: the start does not continue with its job.
            return None

    def save(self, lease_id: str, record: JobRecord) -> None:
        """Store the record durably."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self._file(lease_id), json.dumps(asdict(record)))

    def delete(self, lease_id: str) -> None:
        self._file(lease_id).unlink(missing_ok=True)

    def _file(self, lease_id: str) -> Path:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", lease_id):
            raise InvalidRequest(f"{lease_id[:80]!r} is not the id of a lease")
        return self._folder / f"{lease_id}.json"


class JobSpawner(LeasedSpawner, SlurmSpawner):  # type: ignore[misc] # both are untyped
    """Follows the job of a notebook and ends it. Commands that batchspawner would run in a shell are never run."""

    api_token: str

    make_slurm = CallableTrait(help="Returns the process's one Slurm client.").tag(config=True)
    notebook_port = Integer(0, help="The notebook's port on its node; 0 until it is reported.")
    notebook_address = Unicode(help="The address of that port; empty for the node's own, as in states of version 0.2.")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._submit_task: asyncio.Task[int] | None = None
        self._port_reported = asyncio.Event()
        super().__init__(*args, **kwargs)

    @default("env_keep")  # type: ignore[untyped-decorator] # traitlets is untyped
    def _default_env_keep(self) -> list[str]:
        # The hub's PATH and similar variables have no meaning on a node.
        return []

    @property
    def slurm(self) -> SlurmClient:
        client: SlurmClient = self.make_slurm()
        return client

    @property
    def records(self) -> JobRecordStore:
        """Return the store of records that outlive a restart of the hub."""
        return JobRecordStore(Paths(self.instance).state / "slurm-notebooks")

    async def run_command(self, *_: Any, **__: Any) -> str:
        """Refuse to run a command, because batchspawner's go through a shell."""
        raise NotImplementedError("gpuhub uses Slurm through gpuhub.slurm_client alone, never through a shell")

    def user_env(self, env: dict[str, str]) -> dict[str, str]:
        """Return `env` unchanged: the script sets the user's variables, and the head node need not know the user."""
        return env

    async def create_certs(self) -> dict[str, str]:
        """Return nothing: the content of the notebook's certificate is known only when its job is submitted."""
        return {}

    async def move_certs(self, paths: dict[str, str]) -> dict[str, str]:
        """Return the paths unchanged: certificates are in the job's script."""
        return paths

    def get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = super().get_state()
        if not self.notebook_port:
            return state
        return state | {"notebook_port": self.notebook_port, "notebook_address": self.notebook_address}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.notebook_port = state.get("notebook_port", 0)
        self.notebook_address = state.get("notebook_address", "")

    def clear_state(self) -> None:
        super().clear_state()
        self.notebook_port = 0
        self._port_reported.clear()

    async def poll(self) -> int | None:
        if not self.job_id or (self._is_restored and not self.notebook_port):
            # Restored in the middle of a start: the start is over, but its job and lease remain. The broker makes the
            # hub start the server again, and that start finds the lease.
            self._keeps_lease = self._is_restored
            return 0
        if self._is_restored and not self._is_watched and self.server is not None:
            self._is_watched = True
            readiness.limit_wait_up(self.server, self._has_ended)
        # The server may be stopped while Slurm is asked.
        lease_id, container = self.lease_id, self._container
        code = await self._query_exit_code()
        if code is None and self._is_restored:
            self._is_restored = False
            self.http_timeout = RESTORED_TIMEOUT_S
            # Not awaited: the broker asks the hub to identify its caller, and the hub answers only after this returns.
            self._recovery_task = asyncio.create_task(self._recover_lease(lease_id, container))
        return code

    async def get_url(self) -> str:
        if not self.notebook_port or not self.node:
            return str(self.server.url)
        return f"{self._origin(self.server.proto)}{self.server.base_url}"

    def set_port(self, port: int) -> None:
        """Set the port that the notebook's job reports (see `port`).

        Raises:
            Conflict: No job of this server runs, or it has another port.
        """
        if not self.job_id or not self.lease_id:
            raise Conflict("this server has no job now")
        if self.notebook_port not in {0, port}:
            raise Conflict("this server has another port already")
        if not self.notebook_port:
            self.notebook_port = port
            self.records.save(self.lease_id, JobRecord(token=self.api_token, job=int(self.job_id), port=port))
            self.save_state()
        self._port_reported.set()

    async def _remove(self, *, grace_s: int) -> None:
        """Cancel the job, pending or running; if Slurm does not answer, the broker cancels it later."""
        if self._submit_task is not None:
            try:
                self.job_id = str(await self._submit_task)
            except GpuhubError as error:
                self.log.info("No job for %s: %s", self._log_name, error)
            self._submit_task = None
        if self.job_id:
            try:
                await self.slurm.cancel(int(self.job_id), name=self._job_name(self.lease_id), at_once=grace_s == 0)
            except GpuhubError as error:
                self.log.warning("Slurm's job %s of %s remains for now: %s", self.job_id, self._log_name, error)
        if self.lease_id:
            self.records.delete(self.lease_id)
        self.job_id = ""
        self.notebook_port = 0

    async def _query_exit_code(self) -> int | None:
        """Return None while the job lives or its state is unknown; ask the broker first, which follows all jobs."""
        try:
            lease = await self.broker.get_lease(self.lease_id)
            if lease.state in {LeaseState.GRANTED, LeaseState.ACTIVE}:
                return None
        except GpuhubError as error:
            self.log.info("The broker does not report the state of %s: %s", self._log_name, error)
        try:
            return compute_exit_code(await self._query_job())
        except GpuhubError as error:
            self.log.warning("The state of %s is unknown: %s", self._log_name, error)
            return None

    async def _query_job(self) -> SlurmJob | None:
        """Return this server's job from Slurm, or None if Slurm does not know it."""
        return await self.slurm.find_job(int(self.job_id), name=self._job_name(self.lease_id))

    async def _has_ended(self) -> bool:
        return await self._query_exit_code() is not None

    @property
    def _container(self) -> str:
        """Return the substitute for a container's id, made from the job's number."""
        return names.slurm_container_id(int(self.job_id))

    def _job_name(self, lease_id: str) -> str:
        return names.slurm_job_name(self.instance, lease_id)

    def _choose_address(self, node: NodeSettings) -> str:
        """Return the address on which a notebook on this node listens.

        The proxy accepts a notebook's certificate for any target, also for the hub. No notebook gets a certificate for
        the hub's addresses, so that none can take the hub's place while it is restarted.
        """
        is_head = node.address in {self.head_address, "127.0.0.1", "::1"}
        return _HEAD_NODE_NOTEBOOKS if is_head else node.address

    def _origin(self, scheme: str) -> str:
        address = self.notebook_address or self.cluster.node(self.node).address
        return f"{scheme}://{head_address.format_host(address)}:{self.notebook_port}"


def build_notebook_submission(
    lease: LeaseView,
    profile: ProfileSettings,
    identity: UserIdentity,
    *,
    cluster: ClusterSettings,
    view: ClusterView,
    snapshot: SlurmSnapshot,
    site: SlurmSite,
    name: str,
) -> SlurmSubmission:
    """Build the job that runs a notebook, without its script, which depends on the excluded nodes.

    Raises:
        Conflict: None of Slurm's nodes that gpuhub knows could ever run it.
    """
    size = build_profile_size(profile, follows_gpus=False)
    request = SchedulingRequest(
        id=lease.id,
        owner=lease.owner,
        gpus_per_node=profile.gpu_count,
        requirement=gpu_requirement(profile),
        exclusive=profile.exclusive,
        priority=lease.priority,
        time_limit_s=profile.time_limit,
        cpu_milli=size.cpu_milli,
        memory_mib=size.memory_mib,
    )
    choice = select_gpus(request, _build_capacities(cluster, view), snapshot.nodes, cluster.slurm)
    if choice is None:
        raise Conflict("None of Slurm's nodes that gpuhub knows has such a GPU: choose another profile.")
    submitter = build_submitter(identity)
    return build_submission(
        request, choice, name=name, submitter=submitter, table=cluster.slurm, profile=profile, site=site
    )


def _build_capacities(cluster: ClusterSettings, view: ClusterView) -> dict[str, NodeCapacity]:
    """Return gpuhub's nodes by Slurm's names."""
    slurm_names = {node.name: node.slurm_name for node in cluster.nodes}
    return {
        slurm_names[node.name]: NodeCapacity(
            name=node.name,
            driver=node.driver,
            slots=tuple(
                GpuSlot(uuid=gpu.uuid, node=node.name, index=gpu.index, card=build_card(gpu)) for gpu in node.gpus
            ),
        )
        for node in view.nodes
        if node.name in slurm_names
    }


def is_live(job: SlurmJob | None) -> bool:
    """Return whether the job has its GPUs or may still get them; None is a job that slurmctld no longer knows."""
    return job is not None and job.state in LIVE_STATES and not job.is_completing


def compute_exit_code(job: SlurmJob | None) -> int | None:
    """Return the job's result for `Spawner.poll`: None while it is alive, 0 after success, else 1."""
    if is_live(job):
        return None
    return 0 if job is None or job.state is SlurmJobState.COMPLETED else 1
