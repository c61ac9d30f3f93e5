"""A spawner of one Slurm job: what it remembers, whether the job lives, where its notebook answers, and its end."""

from __future__ import annotations

import asyncio
from typing import Any

from jupyterhub.traitlets import Callable as CallableTrait
from traitlets import Integer, default

from gpuhub import names, urls
from gpuhub.batch import asking
from gpuhub.batch.records import Record, Records
from gpuhub.batch.upstream import SlurmSpawner
from gpuhub.broker.schemas import LeaseState
from gpuhub.containers import restored
from gpuhub.containers.leasedspawner import LeasedSpawner
from gpuhub.errors import Conflict, GpuhubError
from gpuhub.paths import Paths
from gpuhub.slurm.api import SlurmApi
from gpuhub.slurm.values import Job

#: A restored notebook is waited for as long as Slurm does not say that its job has ended.
RESTORED_LIMIT_S = 7 * 86400


class JobSpawner(LeasedSpawner, SlurmSpawner):  # type: ignore[misc] # both are untyped
    """Follows the job of a notebook, and ends it. Nothing that batchspawner would give to a shell is ever run."""

    api_token: str

    make_slurm = CallableTrait(help="Returns the process's one way to ask Slurm.").tag(config=True)
    notebook_port = Integer(0, help="Where the notebook listens on its node; 0 until it is reported.")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._submitting: asyncio.Task[int] | None = None
        self._reported = asyncio.Event()
        super().__init__(*args, **kwargs)

    @default("env_keep")  # type: ignore[untyped-decorator] # traitlets is untyped
    def _default_env_keep(self) -> list[str]:
        # The hub's PATH and the like mean nothing on a node.
        return []

    @property
    def slurm(self) -> SlurmApi:
        """Slurm."""
        found: SlurmApi = self.make_slurm()
        return found

    @property
    def records(self) -> Records:
        """What outlives a start that this hub does not finish."""
        return Records(Paths(self.instance).state / "slurm-notebooks")

    async def run_command(self, *_: Any, **__: Any) -> str:
        """What batchspawner runs goes through a shell: nothing does."""
        raise NotImplementedError("gpuhub asks Slurm by gpuhub.slurm alone, never through a shell")

    def user_env(self, env: dict[str, str]) -> dict[str, str]:
        """The script sets it: the head node need not know the user."""
        return env

    async def create_certs(self) -> dict[str, str]:
        """None yet: what is in the notebook's certificate is known when its job is submitted."""
        return {}

    async def move_certs(self, paths: dict[str, str]) -> dict[str, str]:
        """They go with the job's script, to a folder on the node that only its user can enter."""
        return paths

    def get_state(self) -> dict[str, Any]:
        """What survives a restart of the hub."""
        state: dict[str, Any] = super().get_state()
        return state | {"notebook_port": self.notebook_port} if self.notebook_port else state

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up what an earlier hub process knew."""
        super().load_state(state)
        self.notebook_port = state.get("notebook_port", 0)

    def clear_state(self) -> None:
        """Forget the job too."""
        super().clear_state()
        self.notebook_port = 0
        self._reported.clear()

    async def poll(self) -> int | None:
        """None while the notebook's job lives or nobody can tell; else its exit code, 0 when it is gone."""
        if not self.job_id or (self._is_restored and not self.notebook_port):
            # Restored in the middle of a start: that is over, but its job and place are kept. The broker has the hub
            # start it anew, and that start finds the lease again.
            self._keeps_lease = self._is_restored
            return 0
        if self._is_restored and not self._is_watched and self.server is not None:
            self._is_watched = True
            restored.wait_only_while(self.server, self._is_over)
        code = await self._exit_code()
        if code is None and self._is_restored:
            self._is_restored = False
            self.http_timeout = RESTORED_LIMIT_S
            # Not waited for: the broker asks the hub who calls it, and the hub answers once this has returned.
            self._healing = asyncio.create_task(self._heal())
        return code

    async def get_url(self) -> str:
        """Where the notebook answers, by what this hub has been told."""
        if not self.notebook_port or not self.node:
            return str(self.server.url)
        return f"{self._origin(self.server.proto)}{self.server.base_url}"

    def take_port(self, port: int) -> None:
        """The notebook's own word for where it listens; see `ports`.

        Raises:
            Conflict: no job of this server runs, or it has another port.
        """
        if not self.job_id or not self.lease_id:
            raise Conflict("this server has no job at present")
        if self.notebook_port not in {0, port}:
            raise Conflict("this server has another port already")
        if not self.notebook_port:
            self.notebook_port = port
            self.records.put(self.lease_id, Record(token=self.api_token, job=int(self.job_id), port=port))
            self.save_state()
        self._reported.set()

    async def _remove(self, *, grace_s: int) -> None:
        """Cancel the job, waiting or running; where Slurm does not answer, the broker does it later."""
        if self._submitting is not None:
            try:
                self.job_id = str(await self._submitting)
            except GpuhubError as error:
                self.log.info("No job for %s: %s", self._log_name, error)
            self._submitting = None
        if self.job_id:
            try:
                await self.slurm.cancel(int(self.job_id), name=self._job_name(self.lease_id), at_once=grace_s == 0)
            except GpuhubError as error:
                self.log.warning("Slurm's job %s of %s stays for now: %s", self.job_id, self._log_name, error)
        if self.lease_id:
            self.records.drop(self.lease_id)
        self.job_id = ""
        self.notebook_port = 0

    async def _exit_code(self) -> int | None:
        """None while the job lives or nobody can tell. The broker, who follows all jobs, is asked first."""
        try:
            lease = await self.broker.get_lease(self.lease_id)
            if lease.state in {LeaseState.GRANTED, LeaseState.ACTIVE}:
                return None
        except GpuhubError as error:
            self.log.info("The broker does not tell of %s: %s", self._log_name, error)
        try:
            return asking.exit_code(await self._ask_job())
        except GpuhubError as error:
            self.log.warning("Whether %s runs is not known: %s", self._log_name, error)
            return None

    async def _ask_job(self) -> Job | None:
        """Slurm's own job of this server at this moment; None where it knows none."""
        return await self.slurm.job(int(self.job_id), name=self._job_name(self.lease_id))

    async def _is_over(self) -> bool:
        """Whether the job is known to have ended."""
        return await self._exit_code() is not None

    async def _heal(self) -> None:
        """A hub that died between the grant and saying so left its lease granted."""
        try:
            await restored.activate_granted(self.broker, self.lease_id, self._container)
        except GpuhubError as error:
            self.log.warning("Lease %s of %s: %s", self.lease_id, self._log_name, error)

    @property
    def _container(self) -> str:
        """What stands for a container's id: the job's number."""
        return names.slurm_stand_in(int(self.job_id))

    def _job_name(self, lease_id: str) -> str:
        return names.slurm_job(self.instance, lease_id)

    def _origin(self, scheme: str) -> str:
        address = self.cluster.node(self.node).address
        return f"{scheme}://{urls.in_url(address)}:{self.notebook_port}"
