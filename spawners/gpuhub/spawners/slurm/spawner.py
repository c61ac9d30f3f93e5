"""GpuSlurmSpawner: runs each notebook as a Slurm job of its user, on nodes without Docker.

The job's name links it to the broker's lease: the broker finds the job that is submitted here, follows it, and grants
the lease when the job runs. A start waits for Slurm through the broker alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from jupyterhub import orm

from gpuhub.broker_api.schemas import LeaseState, LeaseView
from gpuhub.common.errors import GpuhubError
from gpuhub.config import head_address
from gpuhub.config.containers.container_size import build_profile_size
from gpuhub.config.settings import ProfileSettings
from gpuhub.config.users.identity import UserIdentity
from gpuhub.docker.containers.security import refuse_gpu_variables
from gpuhub.slurm_client.interface import SlurmUnreachable
from gpuhub.slurm_client.job_control import find_lease_job
from gpuhub.slurm_client.messages import explain_end
from gpuhub.slurm_client.models import SlurmSubmission
from gpuhub.slurm_jobs.scripts import NotebookScriptSpec, build_log_name, build_notebook_script
from gpuhub.spawners import notebook_lease
from gpuhub.spawners.docker import startup
from gpuhub.spawners.readiness import wait_until_ready
from gpuhub.spawners.slurm.job_spawner import JobRecord, JobSpawner, build_notebook_submission, is_live
from gpuhub.tls import notebook_certificate
from gpuhub.web.text import describe_placing

#: Time from the job's start until the notebook answers, seconds; its programs may come from a slow file server.
START_DEADLINE_S = 300.0
#: Time between two checks of a job whose notebook has not reported its port, seconds.
_CHECK_PERIOD_S = 2.0


class GpuSlurmSpawner(JobSpawner):
    """Submits each notebook as a job of its user."""

    async def _start(self) -> str:
        profile = startup.choose_profile(
            self.cluster, self.user_options, owner=self.user.name, groups=self._find_groups()
        )
        startup.check_server_name(self.name)
        self._progress_log.add("Requesting resources", percent=5)
        identity = await self._identify()
        lease, was_there = await self._claim(profile)
        is_resumed = was_there and await self._resume_job(lease, identity)
        if not is_resumed:
            if lease.state is not LeaseState.REQUESTED or lease.slurm_job is not None:
                # Its job has ended, or that job's token is lost.
                await self.release_lease(wait=True)
                lease, _ = await self._claim(profile)
            self._progress_log.add("Submitting to Slurm", percent=10)
            await self._submit(lease, profile, identity)
        lease = await self._wait_for_grant(lease)
        self.node = lease.nodes[0]
        self.notebook_address = self._choose_address(self.cluster.node(self.node))
        self.save_state()
        self._progress_log.add(describe_placing(lease), percent=40)
        if lease.state is LeaseState.GRANTED:
            await self.broker.activate(lease.id, self._container)
        self._progress_log.add("Slurm has started the notebook's job; JupyterLab starts", percent=60)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                await self._wait_until_ready()
        except TimeoutError as error:
            late = f"The notebook has not answered within {START_DEADLINE_S:.0f} s of its job's start"
            raise GpuhubError(f"{late}; {self._log_hint}") from error
        self._progress_log.add("JupyterLab is ready", percent=95)
        return self._origin(head_address.url_scheme(tls=self.internal_ssl))

    async def _resume_job(self, lease: LeaseView, identity: UserIdentity) -> bool:
        """Continue with the lease's job if it lives, and return whether it does.

        An earlier start of this server, which the hub did not finish, submitted it.
        """
        record = self.records.find(lease.id)
        number = lease.slurm_job or (record.job if record is not None else None)
        try:
            if number is not None:
                job = await self.slurm.find_job(number, name=self._job_name(lease.id))
            else:
                job = find_lease_job((await self.slurm.read_snapshot()).jobs, self._job_name(lease.id), identity.uid)
            if job is None or not is_live(job):
                return False
            if record is None:
                await self.slurm.cancel(job.id, name=job.name, at_once=True)
                return False
        except SlurmUnreachable:
            # The job may still live, so this start fails but its lease remains.
            self.lease_id = ""
            raise
        self._reuse_token(record.token)
        self._set_job(job.id, record.port)
        self.log.info("Continuing with Slurm's job %s of %s", job.id, self._log_name)
        return True

    async def _submit(self, lease: LeaseView, profile: ProfileSettings, identity: UserIdentity) -> None:
        # Before the submission, so that a hub that dies in between can continue with the job, which it finds by name.
        self.records.save(lease.id, JobRecord(token=self.api_token))
        view, snapshot, site = await asyncio.gather(
            self.broker.cluster(), self.slurm.read_snapshot(), self.slurm.read_site()
        )
        submission = build_notebook_submission(
            lease,
            profile,
            identity,
            cluster=self.cluster,
            view=view,
            snapshot=snapshot,
            site=site,
            name=self._job_name(lease.id),
        )
        script = await self._build_script(submission, lease, profile)
        # Shielded, so that the job's number is known and it can be cancelled when this start is stopped.
        self._submit_task = asyncio.create_task(self.slurm.submit(dataclasses.replace(submission, script=script)))
        number = await asyncio.shield(self._submit_task)
        self._submit_task = None
        self._set_job(number, None)
        self.log.info("Slurm's job %s is %s's notebook", number, self._log_name)

    async def _build_script(self, submission: SlurmSubmission, lease: LeaseView, profile: ProfileSettings) -> str:
        environment = self.get_env()
        refuse_gpu_variables(environment)
        nodes = [node for node in self.cluster.nodes if node.slurm_name not in submission.exclude]
        certificate = None
        if self.internal_ssl:
            folder = Path(self.internal_certs_location)
            certificate = await asyncio.to_thread(
                notebook_certificate.issue_certificate,
                folder,
                self.user.name,
                *(self._choose_address(node) for node in nodes),
            )
        return build_notebook_script(
            NotebookScriptSpec(
                cluster=self.cluster,
                user=self.user.name,
                server=self.name,
                has_gpus=profile.gpu_count > 0,
                environment={
                    "OMP_NUM_THREADS": str(max(1, build_profile_size(profile, follows_gpus=False).cpu_milli // 1000)),
                    **environment,
                    "GPUHUB_BROKER_URL": head_address.build_broker_url(self.cluster, self.head_address),
                    "GPUHUB_HEAD_ADDRESS": self.head_address,
                    "GPUHUB_LEASE": lease.id,
                    "GPUHUB_KEEP_WORKERS_S": str(self.cluster.jobs.keep_workers),
                },
                arguments=self.get_args(),
                listen={node.slurm_name: self._choose_address(node) for node in self.cluster.nodes},
                report_url=f"{environment['JUPYTERHUB_API_URL']}/gpuhub-port",
                prefix=self.server.base_url,
                certificates=certificate,
            )
        )

    def _set_job(self, number: int, port: int | None) -> None:
        self.job_id = str(number)
        self.records.save(self.lease_id, JobRecord(token=self.api_token, job=number, port=port))
        if port is not None:
            self.notebook_port = port
            self._port_reported.set()
        self.save_state()

    def _reuse_token(self, token: str) -> None:
        """Make the hub accept the token in the job's script in place of this start's token."""
        fresh = orm.APIToken.find(self.db, self.api_token)
        if orm.APIToken.find(self.db, token) is None and fresh is not None:
            self.user.new_api_token(token, generated=False, note=fresh.note, scopes=list(fresh.scopes))
        self.api_token = token

    async def _wait_for_grant(self, lease: LeaseView) -> LeaseView:
        """Wait for the grant and return the lease. Until the broker follows its job, check here whether the job ends.

        Raises:
            GpuhubError: The job or the lease has ended.
        """
        is_followed = False

        def report(seen: LeaseView | None) -> None:
            nonlocal is_followed
            is_followed = is_followed or (seen is not None and seen.slurm_job is not None)
            self._report_waiting(seen)

        granted = asyncio.ensure_future(notebook_lease.wait_for_grant(self.broker, lease, report))
        try:
            while not is_followed and not (await asyncio.wait({granted}, timeout=_CHECK_PERIOD_S))[0]:
                await self._check_running()
            return await granted
        finally:
            granted.cancel()

    async def _wait_until_ready(self) -> None:
        """Wait for the port, then for an answer.

        Raises:
            GpuhubError: The job has ended.
        """
        while not self._port_reported.is_set():
            try:
                await asyncio.wait_for(self._port_reported.wait(), _CHECK_PERIOD_S)
            except TimeoutError:
                await self._check_running()
        # JupyterHub stores this after the start; a hub that dies before needs it to reach the notebook.
        self.server.proto = head_address.url_scheme(tls=self.internal_ssl)
        self.save_state()
        tls = (
            notebook_certificate.load_client_context(Path(self.internal_certs_location)) if self.internal_ssl else None
        )
        await wait_until_ready(
            f"{self._origin(self.server.proto)}{self.server.base_url}api", self._check_running, tls=tls
        )

    async def _check_running(self) -> None:
        try:
            job = await self._query_job()
        except SlurmUnreachable:
            return
        if not is_live(job):
            raise GpuhubError(f"The notebook ended while it started ({explain_end(job)}); {self._log_hint}")

    @property
    def _log_hint(self) -> str:
        return f"its output is in ~/.gpuhub/{build_log_name(self.name)}."
