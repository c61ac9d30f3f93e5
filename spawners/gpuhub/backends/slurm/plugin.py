"""The entry point of the Slurm backend, and what the hub's side must know of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from gpuhub.backends.interface import SchedulingBackend
from gpuhub.backends.plugin import BackendPlugin
from gpuhub.backends.slurm.backend import SlurmBackend, build_capabilities
from gpuhub.backends.slurm.lease_jobs import find_submitter
from gpuhub.broker_api.schemas import Capabilities, PartitionView
from gpuhub.common import names
from gpuhub.common.errors import SettingsError
from gpuhub.common.paths import Paths
from gpuhub.config.settings import ClusterSettings, ProfileSettings
from gpuhub.config.slurm import find_missing_docker, find_slurm_mistakes
from gpuhub.config.users.identity import find_user_name
from gpuhub.slurm_client.factory import make_client
from gpuhub.slurm_client.models import LIVE_STATES
from gpuhub.slurm_client.site import check_site, find_terms


class SlurmPlugin(BackendPlugin):
    """The plugin of Slurm; with `slurm.runtime = "docker"` notebooks are containers, otherwise they are jobs."""

    name = "slurm"
    title = "Slurm"

    def capabilities(self, cluster: ClusterSettings) -> Capabilities:
        return build_capabilities(cluster)

    def build(self, cluster: ClusterSettings, paths: Paths) -> SchedulingBackend:
        return SlurmBackend(
            cluster,
            make_client(cluster.slurm, partial(find_user_name, paths.state)),
            instance=paths.instance,
            find_submitter=partial(find_submitter, cluster, paths),
        )

    def check_settings(self, cluster: ClusterSettings) -> Iterator[str]:
        yield from find_slurm_mistakes(cluster)
        if cluster.suspends_idle_notebooks:
            yield 'idle.suspend_after: Slurm holds the GPUs of its jobs until they end; set "0s", or leave it out'
        if self.capabilities(cluster).containers:
            yield from find_missing_docker(cluster)
        elif cluster.storage.stage or any(profile.stage for profile in cluster.profiles):
            yield 'stage: copies of datasets need containers: set slurm.runtime = "docker", or leave it out'

    def spawner_class(self, cluster: ClusterSettings) -> str:
        return "gpuhub-docker" if cluster.slurm.runtime == "docker" else "gpuhub-slurm"

    def notebook_command(self, cluster: ClusterSettings) -> list[str]:
        command = cluster.slurm.command if cluster.slurm.runtime == "plain" else None
        return super().notebook_command(cluster) if command is None else [str(command)]

    def describe_terms(
        self, cluster: ClusterSettings, profile: ProfileSettings, partition: PartitionView | None, limits: str
    ) -> str:
        """Return such as `partition gpu (up to 8 h) · account physics`."""
        terms = find_terms(cluster.slurm, profile)
        name = terms.partition if partition is None else partition.name
        texts = [f"partition {name}{f' ({limits})' if limits else ''}"] if name else []
        others = (("account", terms.account), ("QOS", terms.qos), ("reservation", terms.reservation))
        return " · ".join([*texts, *(f"{term} {value}" for term, value in others if value)])

    async def check_site(self, cluster: ClusterSettings) -> None:
        api = make_client(cluster.slurm)
        try:
            mistakes = check_site(cluster, await api.read_site())
        finally:
            await api.close()
        if mistakes:
            raise SettingsError("\n".join(mistakes))

    async def cancel_jobs(self, cluster: ClusterSettings, instance: str) -> None:
        api = make_client(cluster.slurm)
        try:
            for job in (await api.read_snapshot()).jobs:
                if job.state in LIVE_STATES and names.find_slurm_lease(instance, job.name) is not None:
                    # Where there are containers, they are gone already; otherwise the job is the notebook itself and
                    # gets time to end.
                    await api.cancel(job.id, name=job.name, at_once=cluster.slurm.runtime == "docker")
        finally:
            await api.close()

    def describe_commands(self, cluster: ClusterSettings) -> Sequence[str]:
        if cluster.slurm.conf is None:
            return ()
        return (f"export SLURM_CONF={cluster.slurm.conf}, then squeue, sbatch …",)


PLUGIN = SlurmPlugin()
