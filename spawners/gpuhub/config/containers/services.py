"""`[[services]]` in cluster.toml: containers that run all the time on a node, behind the hub's login."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from gpuhub.common.units import Size
from gpuhub.config.base import GroupName, ListOf, NodeName, Number, Port, SettingsTable, Text, UserName
from gpuhub.config.machines.nodes import NodeSettings
from gpuhub.config.machines.storage import StorageSettings

#: Most services of a cluster.
MAX_SERVICES = 32
#: Folders of a node below which services may have their data.
DATA_ROOTS = ("/srv", "/mnt", "/media", "/data", "/var/lib/gpuhub-services")
#: Names of routes and services of the hub itself; further ones begin with `gpuhub`.
_TAKEN = frozenset({"broker", "hub", "user"})
_IMAGE = "gpuhub/services:latest"
#: Runs olah behind a path, with the further options in OLAH_OPTIONS, and without log files, which nothing would remove.
_OLAH = """
import logging, os, sys
import olah.utils.logging
from olah import server
olah.utils.logging.handler = logging.NullHandler()
server.app.root_path = sys.argv.pop(1)
sys.argv += os.environ["OLAH_OPTIONS"].split()
server.cli()
"""
#: Keys of known programs, which a table's own keys replace; `{name}` is the service's name.
_PRESETS: dict[str, dict[str, Any]] = {
    "mlflow": {
        "image": _IMAGE,
        "command": (
            "mlflow", "server", "--host", "127.0.0.1", "--port", "5000", "--workers", "1",
            "--backend-store-uri", "sqlite:////data/mlflow.db",
            "--artifacts-destination", "/data/artifacts", "--serve-artifacts",
        ),
        "port": 5000,
        "memory": "2G",
        # It would report its use to MLflow's makers.
        "environment": ("DO_NOT_TRACK=true", "MLFLOW_DISABLE_TELEMETRY=true"),
        "variables": ("MLFLOW_TRACKING_URI={url}",),
    },
    "python-packages": {
        "image": _IMAGE,
        # Its pages have links from the root of the address.
        "command": (
            "waitress-serve", "--listen=127.0.0.1:5000", "--url-prefix=/services/{name}", "--threads=16",
            "proxpi.server:app",
        ),
        "port": 5000,
        "environment": ("PROXPI_CACHE_DIR=/data", "PROXPI_CACHE_SIZE=50000000000"),
        "internet": True,
        "variables": ("PIP_INDEX_URL={url}/index/", "UV_DEFAULT_INDEX={url}/index/"),
    },
    "hugging-face": {
        "image": _IMAGE,
        "command": (
            "python3", "-c", _OLAH, "/services/{name}", "--host=127.0.0.1", "--port=5000", "--repos-path=/data/repos",
        ),
        "port": 5000,
        "memory": "2G",
        "environment": ("OLAH_OPTIONS=--cache-size-limit=200GB",),
        "internet": True,
        "variables": ("HF_ENDPOINT={url}",),
    },
}  # fmt: skip
_PATH = r"^(/[A-Za-z0-9_][A-Za-z0-9._-]*){1,12}$"
#: The address in notebooks and jobs of a program that passes requests on to services.
GATEWAY_ADDRESS = "127.0.0.1:18034"
#: Variables of users' containers that a service may not set: those of gpuhub, Jupyter and the GPUs, and those that
#: every program reads.
_RESERVED = frozenset({"HOME", "USER", "SHELL", "PATH", "IFS", "LANG", "TERM", "TMPDIR", "BASH_ENV", "ENV"})
_RESERVED_PREFIXES = ("GPUHUB_", "GPU_LAUNCH_", "JUPYTER", "JPY_", "IPP_", "NVIDIA_", "CUDA_", "LD_", "PYTHON")


def _check_data(folder: str) -> str:
    if not any(folder.startswith(f"{root}/") for root in DATA_ROOTS):
        raise ValueError(f"{folder!r} is not a folder for data: choose one below {', '.join(DATA_ROOTS)}")
    return folder


def _check_user(user: str) -> str:
    if "0" in {str(int(part)) for part in user.split(":")}:
        raise ValueError(f'{user!r}: a service does not run as root; write user = "UID:GID" with other numbers')
    return user


def _check_variable(variable: str) -> str:
    name = variable.partition("=")[0]
    if name.startswith(("NVIDIA_", "CUDA_")):
        raise ValueError(f"{name}: a service has no GPU")
    return variable


def _check_user_variable(variable: str) -> str:
    name = variable.partition("=")[0]
    if name in _RESERVED or name.startswith(_RESERVED_PREFIXES):
        raise ValueError(f"{name}: a service cannot set this variable of users' containers")
    return variable


class ServiceSettings(SettingsTable):
    """A program that gpuhub keeps running for users, such as MLflow."""

    #: A known program, for which the keys without a value here have fitting ones: "mlflow" for experiments,
    #: "python-packages" for a cache of PyPI, or "hugging-face" for one of its hub. Only `name` and `data` are needed
    #: then. None: any other program.
    preset: Literal["mlflow", "python-packages", "hugging-face"] | None = None
    #: Name in the address `https://HUB/services/NAME/`; each service needs its own.
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")]
    #: Image of its container. The node pulls it where it is missing.
    image: Text
    #: Program and arguments; empty: the image's own.
    command: ListOf[Annotated[str, StringConstraints(max_length=4096)]] = ()
    #: TCP port on which it listens within its container.
    port: Port
    #: Node on which it runs; None: the first one that is no guest.
    node: NodeName | None = None
    #: Folder of the node with the service's data, which always stays. None: it keeps nothing when it starts again.
    data: Annotated[str, StringConstraints(pattern=_PATH), AfterValidator(_check_data)] | None = None
    #: Where the container has that folder.
    mount: Annotated[str, StringConstraints(pattern=_PATH)] = "/data"
    #: UID and GID of the service and of its data.
    user: Annotated[str, StringConstraints(pattern=r"^\d{1,9}:\d{1,9}$"), AfterValidator(_check_user)] = "65533:65533"
    #: Users who may use it; without `users` and `groups`, all.
    users: ListOf[UserName] = ()
    #: Groups whose members may use it.
    groups: ListOf[GroupName] = ()
    #: Environment variables, such as "LOG_LEVEL=info". Who may use Docker on the node can read them.
    environment: ListOf[
        Annotated[
            str,
            StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*=[^\x00]*$", max_length=4096),
            AfterValidator(_check_variable),
        ]
    ] = ()
    #: Environment variables of the notebooks and jobs of those who may use it, such as "MLFLOW_TRACKING_URI={url}":
    #: `{url}` is the address at which their programs reach the service without a token.
    variables: ListOf[
        Annotated[
            str,
            StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*=[^\x00\n]*$", max_length=4096),
            AfterValidator(_check_user_variable),
        ]
    ] = ()
    #: Whether it reaches what `[network]` allows users' containers; otherwise it has no network.
    internet: bool = False
    #: CPU cores that it may use.
    cpus: Annotated[Number, Field(gt=0, le=4096)] = 1.0
    #: Memory that it may use, bytes; of temporary files in memory as well.
    memory: Size = 1024**3

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, table: Any) -> Any:
        preset = _PRESETS.get(str(table.get("preset"))) if isinstance(table, dict) else None
        if preset is None:
            return table
        command = tuple(word.replace("{name}", str(table.get("name"))) for word in preset["command"])
        return {**preset, "command": command, **table}

    @property
    def owner(self) -> tuple[int, int]:
        """UID and GID of the service and of its data."""
        uid, gid = self.user.split(":")
        return int(uid), int(gid)

    def build_variables(self) -> dict[str, str]:
        """Return the variables of users' containers."""
        url = f"http://{GATEWAY_ADDRESS}/services/{self.name}"
        pairs = (variable.partition("=") for variable in self.variables)
        return {name: value.replace("{url}", url) for name, _, value in pairs}

    def admits(self, user: str, groups: Collection[str]) -> bool:
        """Return whether a user with these groups may use it."""
        is_open = not self.users and not self.groups
        return is_open or user in self.users or any(group in groups for group in self.groups)


def find_service_mistakes(
    services: Sequence[ServiceSettings], nodes: Sequence[NodeSettings], storage: StorageSettings
) -> Iterable[str]:
    """Return one line for each key that does not go with the nodes, the storage or another service."""
    if len(services) > MAX_SERVICES:
        yield f"services: there are {len(services)}; at most {MAX_SERVICES} are possible"
    for service in services:
        where = f"services: {service.name!r}"
        if service.name in _TAKEN or service.name.startswith("gpuhub"):
            yield f"{where}: name: the hub itself uses this name: choose another one"
        node = find_service_node(service, nodes)
        known = ", ".join(one.name for one in nodes if not one.guest)
        if node is None:
            yield f"{where}: node: there is no node {service.node!r}; there are {known}"
        elif node.guest:
            yield f"{where}: node: {node.name} is a guest, which gets jobs alone; choose one of {known}"
        elif not node.docker:
            yield f"{where}: node: {node.name} has no docker address, and services are containers"
        if service.preset is not None and service.data is None:
            yield f"{where}: data: {service.preset} needs a folder, such as /srv/{service.name}"
        if service.data is not None:
            for key, folder in _list_user_folders(storage):
                if _overlap(service.data, folder):
                    yield f"{where}: data: {service.data} and storage.{key} ({folder}) overlap: choose another folder"
    yield from _find_shared_data(services, nodes)
    yield from _find_shared_variables(services)


def find_service_node(service: ServiceSettings, nodes: Sequence[NodeSettings]) -> NodeSettings | None:
    """Return the node on which a service runs; None if the settings have no such node."""
    if service.node is None:
        return next((node for node in nodes if not node.guest), None)
    return next((node for node in nodes if node.name == service.node), None)


def _find_shared_data(services: Sequence[ServiceSettings], nodes: Sequence[NodeSettings]) -> Iterable[str]:
    placed = [(one, one.data, find_service_node(one, nodes)) for one in services]
    for index, (service, data, node) in enumerate(placed):
        for other, other_data, other_node in placed[:index]:
            if data and other_data and node == other_node and _overlap(data, other_data):
                yield f"services: {service.name!r}: data: {data} overlaps with the data of {other.name!r}"


def _find_shared_variables(services: Sequence[ServiceSettings]) -> Iterable[str]:
    setters: dict[str, str] = {}
    for service in services:
        for variable in service.build_variables():
            other = setters.setdefault(variable, service.name)
            if other != service.name:
                yield f"services: {service.name!r}: variables: {other!r} sets {variable} as well: leave one of them out"


def _list_user_folders(storage: StorageSettings) -> Iterable[tuple[str, str]]:
    """Yield the keys of folders that users' containers have, with the part of the path that all have in common."""
    for key in ("home", "datasets", "models"):
        folder = getattr(storage, key)
        if folder and not folder.startswith("nfs://"):
            yield key, folder.partition("{")[0].rstrip("/") or "/"


def _overlap(one: str, other: str) -> bool:
    first, second = PurePosixPath(one), PurePosixPath(other)
    return first.is_relative_to(second) or second.is_relative_to(first)
