"""`[[nodes]]` in cluster.toml: machines with GPUs, and how their Docker daemons are reached."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, field_validator, model_validator

from gpuhub.common.node_access import guest_group, owner_group, scavenging_group
from gpuhub.common.units import Size
from gpuhub.config.base import GroupName, Label, ListOf, NodeName, Number, SettingsTable, SlurmName, Text, UserName
from gpuhub.config.machines.power import NodePowerSettings

#: Path of a device for RDMA. The others of that folder manage the fabric and are root's.
FabricDevice = Annotated[str, StringConstraints(pattern=r"^/dev/infiniband/(uverbs[0-9]{1,3}|rdma_cm)$")]

#: Name of a network interface as the kernel permits it, without what has a meaning in rules and in Docker's options.
InterfaceName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,14}$")]


class DockerTlsFiles(SettingsTable):
    """PEM files for mutual TLS with a node's Docker daemon."""

    #: Certificate of the authority that signed the daemon's certificate.
    ca: Path
    #: The client certificate that gpuhub presents.
    cert: Path
    #: Private key of `cert`.
    key: Path

    @field_validator("ca", "cert", "key", mode="before")
    @classmethod
    def _path(cls, value: object) -> object:
        return Path(value) if isinstance(value, str) else value


class ExpectedGpus(SettingsTable):
    """GPUs of one model that a node should have, for checks before the node is probed."""

    #: Model as NVML names it, with or without "NVIDIA GeForce".
    model: Text
    #: Memory of each GPU, bytes, such as "32G".
    memory: Size
    #: Number of such GPUs.
    count: Annotated[int, Field(ge=1, le=64)] = 1


class NodeSettings(SettingsTable):
    """A machine with GPUs, and with a Docker daemon unless Slurm runs everything there."""

    #: Name of the node in gpuhub; each node needs its own.
    name: NodeName
    #: IP address at which the other nodes and the head node reach it.
    address: str
    #: IP address of its network card for the traffic between ranks, where that is another one; None: `address`.
    data_address: str | None = None
    #: Its network interface for the traffic between ranks, such as `enp1s0f0`: their containers get an address of their
    #: own there, past the overlay. None: they use the overlay alone.
    data_interface: InterfaceName | None = None
    #: Devices for RDMA (InfiniBand) that containers with GPUs get, such as `/dev/infiniband/uverbs0`. What passes
    #: through them passes no firewall.
    fabric: ListOf[FabricDevice] = ()
    #: URL of the Docker daemon: `unix:///path`, `ssh://user@host[:port]`, or `tcp://host:2376` with `tls`. Empty where
    #: Slurm runs everything without Docker.
    docker: str = ""
    #: Certificates for a `tcp://` URL; required there, and refused with any other URL.
    tls: DockerTlsFiles | None = None
    #: The GPUs that the node should have; without it, gpuhub takes whatever NVML reports.
    gpus: ListOf[ExpectedGpus] | None = None
    #: Name of the node in Slurm; None: the same as `name`.
    slurm: SlurmName | None = None
    #: Switch that the node is connected to; jobs on several nodes prefer one switch, then one rack. None: unknown.
    switch: Label | None = None
    #: Rack that the node stands in. None: unknown.
    rack: Label | None = None
    #: CPU cores that all containers on the node may have together; None: all but one, which the machine keeps.
    cpus: Annotated[Number, Field(gt=0, le=4096)] | None = None
    #: Memory that all containers on the node may have together, bytes; None: all but 2 GiB or 5 %, which the machine
    #: keeps.
    memory: Size | None = None
    #: Most power that the machine draws without its GPUs, and with the losses of its power supply, watts.
    base_watts: Annotated[Number, Field(ge=0, le=10_000)] = 150.0
    #: Groups whose members alone get notebooks and jobs placed there; empty for all users. Refused with Slurm, where
    #: the partition decides (AllowGroups).
    groups: ListOf[GroupName] = ()
    #: User whose machine it is; shown to all. None: nobody's own.
    owner: UserName | None = None
    #: Whether the machine is the owner's first: others (members of `groups`, if set) get only scavenging jobs placed
    #: there, which are preempted when the owner starts something. Needs `owner` and scheduling.preemption; refused with
    #: Slurm.
    owner_first: bool = False
    #: Whether somebody works at its screen: the programs of the desktop (Xorg, a browser) on a GPU do not count as use
    #: from outside, and computing programs and games do.
    desktop: bool = False
    #: The most GPU memory of one program of the desktop; one with more counts as a game.
    desktop_memory: Size = 1024**3
    #: Whether it is a guest: a machine that somebody lends over the internet, added by `gpuhub node invite`. Its
    #: administrator is not trusted: it has no home, no dataset and no network of users, and gets only jobs with
    #: `--guests`.
    guest: bool = False
    #: How it is woken when the queue needs it, and when it is put to sleep; None: it stays on.
    power: NodePowerSettings | None = None

    @property
    def access_groups(self) -> frozenset[str]:
        """The groups by which the node admits requests, with those of an owner that comes first; empty for all."""
        if self.guest:
            return frozenset(guest_group(group) for group in self.groups or ("",))
        if not self.owner_first or self.owner is None:
            return frozenset(self.groups)
        return frozenset({owner_group(self.owner), *map(scavenging_group, self.groups or ("",))})

    @property
    def rank_address(self) -> str:
        """The address to which other nodes send what ranks exchange."""
        return self.data_address or self.address

    @property
    def slurm_name(self) -> str:
        """The node's name in Slurm."""
        return self.slurm or self.name

    @field_validator("address", "data_address")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        try:
            address = ipaddress.ip_address(value)
        except ValueError:
            raise ValueError(f'{value!r} is not an IP address: write one such as "192.168.1.21"') from None
        if address.is_unspecified or address.is_multicast:
            raise ValueError(f"{value!r} is not the address of a single machine")
        return value

    @field_validator("docker")
    @classmethod
    def _docker(cls, value: str) -> str:
        url = urlsplit(value)
        if url.scheme == "unix" and not url.netloc and url.path.startswith("/"):
            return value
        if url.scheme in {"ssh", "tcp"} and url.hostname and url.path in {"", "/"}:
            return value
        raise ValueError(
            f'{value!r} is not a Docker URL: write "unix:///run/docker.sock", "ssh://user@host" '
            'or "tcp://host:2376" with tls'
        )

    @model_validator(mode="after")
    def _no_plain_tcp(self) -> Self:
        if self.docker.startswith("tcp://") and self.tls is None:
            raise ValueError(
                f"docker = {self.docker!r} has no tls (node {self.name}): a Docker daemon on plain TCP gives root to "
                'anyone who reaches it. Use "ssh://user@host", or give tls = {ca = …, cert = …, key = …}'
            )
        if self.tls is not None and not self.docker.startswith("tcp://"):
            raise ValueError(f"tls is only valid with a tcp:// URL, not with docker = {self.docker!r}")
        return self

    @model_validator(mode="after")
    def _guest_over_ssh(self) -> Self:
        if self.guest and not self.docker.startswith("ssh://"):
            raise ValueError(f"guest = true needs an ssh:// URL, not docker = {self.docker!r} (node {self.name})")
        if self.guest and (self.data_address or self.data_interface or self.fabric):
            raise ValueError(
                f"data_address, data_interface and fabric are not for guests, which other nodes do not reach "
                f"(node {self.name})"
            )
        if self.guest and self.owner_first:
            raise ValueError(f"owner_first is not for guests: their owners use gpuhub-node (node {self.name})")
        return self
