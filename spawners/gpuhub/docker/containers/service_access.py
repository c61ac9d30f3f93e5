"""How programs in a user's containers reach services that stay: through a program in the container, on its loopback.

That program is `gpu_launch.common.service_gateway`. It sends requests to the broker, in a notebook with the notebook's
token, and in a worker with the key of its job and a certificate.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from gpuhub.config.containers.services import GATEWAY_ADDRESS, ServiceSettings
from gpuhub.config.settings import ClusterSettings
from gpuhub.tls import internal_certificates, notebook_certificate


def find_offered_services(cluster: ClusterSettings, user: str, groups: Collection[str]) -> tuple[ServiceSettings, ...]:
    """Return the services that set variables in the containers of a user with these groups."""
    return tuple(service for service in cluster.services if service.variables and service.admits(user, groups))


def build_service_environment(services: Sequence[ServiceSettings]) -> dict[str, str]:
    """Return the variables of a container whose user may use these services."""
    if not services:
        return {}
    environment = {
        "GPUHUB_SERVICES": ",".join(service.name for service in services),
        "GPUHUB_SERVICES_ADDRESS": GATEWAY_ADDRESS,
    }
    for service in services:
        environment |= service.build_variables()
    return environment


def build_worker_environment(key: str, *, has_certificate: bool) -> dict[str, str]:
    """Return the variables with which a worker reaches the broker: the key of its job, and its certificate's files."""
    if not has_certificate:
        return {"GPUHUB_JOB_KEY": key}
    return {
        "GPUHUB_JOB_KEY": key,
        "GPUHUB_BROKER_CA": internal_certificates.NOTEBOOK_BROKER_TRUST,
        "JUPYTERHUB_SSL_KEYFILE": internal_certificates.NOTEBOOK_KEY,
        "JUPYTERHUB_SSL_CERTFILE": internal_certificates.NOTEBOOK_CERTIFICATE,
    }


def issue_worker_certificate(
    cluster: ClusterSettings, folder: Path, user: str
) -> notebook_certificate.NotebookCertificate | None:
    """Issue a certificate for a worker as a client; None without TLS. Blocks for some milliseconds.

    Raises:
        SetupError: The authority in `folder` does not exist or cannot be read.
    """
    return notebook_certificate.issue_certificate(folder, user) if cluster.has_internal_tls else None
