"""What callers can do with services: list and reach those that they may use; administrators restart them and read their
output.
"""

from __future__ import annotations

from gpuhub.broker.admission import access
from gpuhub.broker.operations.admin import require_admin
from gpuhub.broker.ports.connections import ServerAddress
from gpuhub.broker.services.supervisor import ServiceSupervisor
from gpuhub.broker.state.broker_state import BrokerState
from gpuhub.broker_api.schemas.services import ServiceState, ServiceView
from gpuhub.common.errors import NotFound, Unavailable
from gpuhub.config.containers.services import ServiceSettings
from gpuhub.docker.services.service_container import build_relay_command
from gpuhub.domain.models import Identity


class ServiceOperations:
    """The operations on the services of the settings."""

    def __init__(self, core: BrokerState, supervisor: ServiceSupervisor) -> None:
        self._core = core
        self._supervisor = supervisor

    def list_services(self, caller: Identity) -> list[ServiceView]:
        """Return the services that the caller may use; all for administrators and the hub's spawner."""
        return [
            self._view(service, caller)
            for service in self._core.cluster.services
            if caller.sees_all or access.may_use_service(self._core, caller, service)
        ]

    def check_access(self, caller: Identity, name: str) -> None:
        """Check that the caller may use a service, whether or not it runs.

        Raises:
            NotFound: There is none of this name that the caller may use.
        """
        access.find_service(self._core, caller, name)

    def find_server(self, caller: Identity, name: str) -> ServerAddress:
        """Return where connections to a service begin.

        Raises:
            NotFound: There is none of this name that the caller may use.
            Unavailable: It does not run now.
        """
        service = access.find_service(self._core, caller, name)
        status = self._supervisor.status(name)
        if status.state is not ServiceState.RUNNING or not status.relay_id:
            raise Unavailable(f"the service {name} does not run now (it is {status.state}); it is started by itself")
        return ServerAddress(
            node=self._supervisor.node(name),
            container_id=status.relay_id,
            port=service.port,
            command=build_relay_command(service.port),
        )

    async def restart(self, caller: Identity, name: str) -> ServiceView:
        """Replace a service's containers; its data stays.

        Raises:
            NotAllowed: The caller is not an administrator.
            NotFound: There is no such service.
            GpuhubError: Its node does not answer.
        """
        require_admin(caller, "restart services")
        service = self._require(name)
        await self._supervisor.restart(name)
        return self._view(service, caller)

    async def read_log(self, caller: Identity, name: str, lines: int) -> bytes:
        """Return the last lines of a service's output.

        Raises:
            NotAllowed: The caller is not an administrator.
            NotFound: There is no such service, or it has no container.
            GpuhubError: Its node does not answer.
        """
        require_admin(caller, "read the output of services")
        self._require(name)
        return await self._supervisor.read_log(name, lines)

    def _require(self, name: str) -> ServiceSettings:
        service = self._core.cluster.service(name)
        if service is None:
            known = ", ".join(one.name for one in self._core.cluster.services) or "none"
            raise NotFound(f"there is no service {name!r}; there are: {known}")
        return service

    def _view(self, service: ServiceSettings, caller: Identity) -> ServiceView:
        status = self._supervisor.status(service.name)
        return ServiceView(
            name=service.name,
            path=f"/services/{service.name}/",
            node=self._supervisor.node(service.name),
            state=status.state,
            message=status.message if caller.sees_all else "",
            restarts=status.restarts,
        )
