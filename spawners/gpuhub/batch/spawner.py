"""GpuSlurmSpawner: the notebook is a Slurm job of its user, on nodes where gpuhub has no Docker to ask.

The broker's lease and the job stand for each other by the job's name: the broker finds the job that is submitted here,
follows it, and grants the lease when it runs. A start waits for Slurm through the broker alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from jupyterhub import orm

from gpuhub import urls
from gpuhub.batch import asking
from gpuhub.batch.jobspawner import JobSpawner
from gpuhub.batch.records import Record
from gpuhub.batch.script import Notebook, build_script, log_name
from gpuhub.broker.schemas import Lease, LeaseState
from gpuhub.containers import launching, leasing
from gpuhub.containers.confinement import refuse_gpu_variables
from gpuhub.containers.readiness import wait_answer
from gpuhub.containers.telling import describe_placing
from gpuhub.errors import GpuhubError
from gpuhub.identity import Identity
from gpuhub.settings import Profile
from gpuhub.slurm.api import SlurmUnreachable
from gpuhub.slurm.owners import find_own
from gpuhub.slurm.reasons import explain_end
from gpuhub.slurm.values import Submission
from gpuhub.trust import notebooks

#: From the job's start to a notebook that answers: its programs may come from a slow file server.
START_DEADLINE_S = 300.0
#: Between two looks at a job whose notebook has not reported yet, seconds.
_LOOK_EVERY_S = 2.0


class GpuSlurmSpawner(JobSpawner):
    """Submits each notebook as a job of its user."""

    async def _start(self) -> str:
        profile = launching.choose_profile(self.cluster, self.user_options)
        launching.check_server_name(self.name)
        self._events.tell("Asking for a place", percent=5)
        identity = await self._identify()
        lease, was_there = await self._claim(profile)
        goes_on = was_there and await self._find_job(lease, identity)
        if not goes_on:
            if lease.state is not LeaseState.REQUESTED or lease.slurm_job is not None:
                # Its job has ended, or nobody knows that job's token any more.
                await self.give_back(wait=True)
                lease, _ = await self._claim(profile)
            self._events.tell("Submitting to Slurm", percent=10)
            await self._submit(lease, profile, identity)
        lease = await self._wait_granted(lease)
        self.node = lease.nodes[0]
        self.save_state()
        self._events.tell(describe_placing(lease), percent=40)
        if lease.state is LeaseState.GRANTED:
            await self.broker.activate(lease.id, self._container)
        self._events.tell("Slurm has started the notebook's job; JupyterLab starts", percent=60)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await self._wait_reached()
        except TimeoutError as error:
            late = f"The notebook has not answered within {START_DEADLINE_S:.0f} s of its job's start"
            raise GpuhubError(f"{late}; {self._where_it_says}") from error
        self._events.tell("JupyterLab is ready", percent=95)
        return self._origin(urls.scheme(tls=self.internal_ssl))

    async def _find_job(self, lease: Lease, identity: Identity) -> bool:
        """Whether the lease's job lives and can be gone on with, as this start does from then on: an earlier start of
        this server, which a hub did not finish, submitted it.
        """
        record = self.records.find(lease.id)
        number = lease.slurm_job or (record.job if record is not None else None)
        try:
            if number is not None:
                job = await self.slurm.job(number, name=self._job_name(lease.id))
            else:
                job = find_own((await self.slurm.look()).jobs, self._job_name(lease.id), identity.uid)
            if job is None or not asking.is_live(job):
                return False
            if record is None:
                await self.slurm.cancel(job.id, name=job.name, at_once=True)
                return False
        except SlurmUnreachable:
            # The job may well live: this start fails, its lease stays.
            self.lease_id = ""
            raise
        self._reuse_token(record.token)
        self._take_job(job.id, record.port)
        self.log.info("Going on with Slurm's job %s of %s", job.id, self._log_name)
        return True

    async def _submit(self, lease: Lease, profile: Profile, identity: Identity) -> None:
        # Before the job is there: a hub that dies in between finds it by its name.
        self.records.put(lease.id, Record(token=self.api_token))
        view, look, site = await asyncio.gather(self.broker.cluster(), self.slurm.look(), self.slurm.site())
        submission = asking.build_notebook_submission(
            lease,
            profile,
            identity,
            cluster=self.cluster,
            view=view,
            look=look,
            site=site,
            name=self._job_name(lease.id),
        )
        script = await self._build_script(submission, lease, profile)
        # Shielded: when this start is stopped meanwhile, the job is known and can be cancelled.
        self._submitting = asyncio.create_task(self.slurm.submit(dataclasses.replace(submission, script=script)))
        number = await asyncio.shield(self._submitting)
        self._submitting = None
        self._take_job(number, None)
        self.log.info("Slurm's job %s is %s's notebook", number, self._log_name)

    async def _build_script(self, submission: Submission, lease: Lease, profile: Profile) -> str:
        environment = self.get_env()
        refuse_gpu_variables(environment)
        nodes = [node for node in self.cluster.nodes if node.slurm_name not in submission.exclude]
        issued = None
        if self.internal_ssl:
            folder = Path(self.internal_certs_location)
            issued = await asyncio.to_thread(notebooks.issue, folder, self.user.name, *(node.address for node in nodes))
        return build_script(
            Notebook(
                cluster=self.cluster,
                user=self.user.name,
                server=self.name,
                has_gpus=profile.gpu_count > 0,
                environment={
                    "OMP_NUM_THREADS": str(max(1, int(profile.cpus))),
                    **environment,
                    "GPUHUB_BROKER_URL": urls.broker_url(self.cluster, self.head_address),
                    "GPUHUB_HEAD_ADDRESS": self.head_address,
                    "GPUHUB_LEASE": lease.id,
                    "GPUHUB_KEEP_WORKERS_S": str(self.cluster.jobs.keep_workers),
                },
                arguments=self.get_args(),
                report_url=f"{environment['JUPYTERHUB_API_URL']}/gpuhub-port",
                prefix=self.server.base_url,
                certificates=issued,
            )
        )

    def _take_job(self, number: int, port: int | None) -> None:
        self.job_id = str(number)
        self.records.put(self.lease_id, Record(token=self.api_token, job=number, port=port))
        if port is not None:
            self.notebook_port = port
            self._reported.set()
        self.save_state()

    def _reuse_token(self, token: str) -> None:
        """Let the token that is in the job's script open the hub again, in place of the one of this start."""
        fresh = orm.APIToken.find(self.db, self.api_token)
        if orm.APIToken.find(self.db, token) is None and fresh is not None:
            self.user.new_api_token(token, generated=False, note=fresh.note, scopes=list(fresh.scopes))
        self.api_token = token

    async def _wait_granted(self, lease: Lease) -> Lease:
        """The granted lease. The broker follows its job, once it has seen it; one that ends before is noticed here.

        Raises:
            GpuhubError: the job, or the lease, has ended instead.
        """
        is_followed = False

        def tell(seen: Lease | None) -> None:
            nonlocal is_followed
            is_followed = is_followed or (seen is not None and seen.slurm_job is not None)
            self._tell_waiting(seen)

        granted = asyncio.ensure_future(leasing.wait_granted(self.broker, lease, tell))
        try:
            while not is_followed and not (await asyncio.wait({granted}, timeout=_LOOK_EVERY_S))[0]:
                await self._refuse_ended()
            return await granted
        finally:
            granted.cancel()

    async def _wait_reached(self) -> None:
        """Wait for the port, then for an answer.

        Raises:
            GpuhubError: the job has ended.
        """
        while not self._reported.is_set():
            try:
                await asyncio.wait_for(self._reported.wait(), _LOOK_EVERY_S)
            except TimeoutError:
                await self._refuse_ended()
        # JupyterHub notes this when the start has ended; a hub that dies before must know how to ask.
        self.server.proto = urls.scheme(tls=self.internal_ssl)
        self.save_state()
        tls = notebooks.client_context(Path(self.internal_certs_location)) if self.internal_ssl else None
        await wait_answer(f"{self._origin(self.server.proto)}{self.server.base_url}api", self._refuse_ended, tls=tls)

    async def _refuse_ended(self) -> None:
        try:
            job = await self._ask_job()
        except SlurmUnreachable:
            return
        if not asking.is_live(job):
            raise GpuhubError(f"The notebook ended while it started ({explain_end(job)}); {self._where_it_says}")

    @property
    def _where_it_says(self) -> str:
        return f"~/.gpuhub/{log_name(self.name)} has what it said."
