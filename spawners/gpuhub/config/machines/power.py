"""`[power]` in cluster.toml, and `power` of a node: how nodes are woken, and when they are put to sleep."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, StringConstraints

from gpuhub.common.units import Span, Span0, format_span
from gpuhub.config.base import SettingsTable

if TYPE_CHECKING:
    from gpuhub.config.machines.nodes import NodeSettings
    from gpuhub.config.machines.storage import StorageSettings

#: Sockets of the head node's own Docker daemon.
LOCAL_SOCKETS = frozenset({"unix:///run/docker.sock", "unix:///var/run/docker.sock"})
#: Shortest idle time, within which a node that has just woken gets its first request, and longest wait for a node;
#: seconds.
_LEAST_IDLE_S, _LONGEST_WAKE_S = 60, 3600


def _build_method_check(*names: str) -> Callable[[object], object]:
    """Return the check of a key that is one of these names, or a command."""

    def check(value: object) -> object:
        if isinstance(value, str) and value in names:
            return value
        words = tuple(value) if isinstance(value, list | tuple) else ()
        if not words or not all(isinstance(word, str) and word and "\0" not in word for word in words):
            known = ", ".join(f'"{name}"' for name in names)
            raise ValueError(
                f'{value!r} is neither one of {known} nor a command such as ["/usr/local/bin/switch", "on"]'
            )
        if not Path(words[0]).is_absolute():
            raise ValueError(
                f'{words[0]!r} is not the full path of a program: write one such as "/usr/local/bin/switch"'
            )
        return words

    return check


#: One of the names, or a program with its arguments, which is run on the head node as root, without a shell.
OnMethod = Annotated[str | tuple[str, ...], BeforeValidator(_build_method_check("wake-on-lan", "ipmi"))]
OffMethod = Annotated[str | tuple[str, ...], BeforeValidator(_build_method_check("suspend", "poweroff", "ipmi"))]


def _check_mac(value: str) -> str:
    first = int(value[:2], 16)
    if first & 1 or set(value) <= set("0:-"):
        raise ValueError(f"{value!r} is not the address of a single network card: `ip link` shows it there")
    return value.lower().replace("-", ":")


def _check_broadcast(value: str) -> str:
    try:
        address = ipaddress.IPv4Address(value)
    except ValueError:
        raise ValueError(f'{value!r} is not an IPv4 address: write one such as "192.168.1.255"') from None
    if address.is_unspecified or address.is_multicast or address.is_loopback:
        raise ValueError(f'{value!r} is not a broadcast address: write one such as "192.168.1.255"')
    return value


MacAddress = Annotated[
    str,
    StringConstraints(pattern=r"^[0-9A-Fa-f]{2}([:-][0-9A-Fa-f]{2}){5}$"),
    AfterValidator(_check_mac),
]
_IpmiHost = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:-]{0,252}$")]
_IpmiUser = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.@+][A-Za-z0-9_.@+-]{0,63}$")]


def _check_password_file(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError(f'{str(path)!r} is not a full path: write one such as "/etc/gpuhub/ipmi-password"')
    return path


_PasswordFile = Annotated[
    Path,
    BeforeValidator(lambda value: Path(value) if isinstance(value, str) else value),
    AfterValidator(_check_password_file),
]


class PowerSettings(SettingsTable):
    """How nodes are switched on and off, for all nodes that have a table `power`; that one may change each key."""

    #: How a node is woken: `wake-on-lan` sends a magic packet to `mac`, `ipmi` uses ipmitool, and a list of words is a
    #: command, run on the head node as root without a shell.
    on: OnMethod = "wake-on-lan"
    #: How a node is put to sleep: `suspend` and `poweroff` by systemd there, `ipmi` by an ACPI shutdown, or a command.
    off: OffMethod = "suspend"
    #: Time without work after which a node is put to sleep, seconds; one minute at least. "0s": only by
    #: `gpuhub node power off`.
    idle: Span0 = 0
    #: Time after which a node that was woken must answer, seconds.
    wake_timeout: Span = 300
    #: Time after which the queue may wake a node again that did not answer, seconds.
    retry_after: Span = 3600
    #: Where magic packets are sent. Default: to all machines on the head node's network towards the node; a node behind
    #: a router needs the broadcast address of its network.
    broadcast: Annotated[str, AfterValidator(_check_broadcast)] = "255.255.255.255"
    #: User at the machine's management controller; for `ipmi`.
    ipmi_user: _IpmiUser | None = None
    #: File with that user's password, which root alone can read; for `ipmi`.
    ipmi_password_file: _PasswordFile | None = None


class NodePowerSettings(SettingsTable):
    """A node's power; None for the value of `[power]`."""

    #: Address of the network card that listens for magic packets; for `wake-on-lan`.
    mac: MacAddress | None = None
    #: Address of the machine's management controller; for `ipmi`.
    ipmi_address: _IpmiHost | None = None
    #: As in `[power]`.
    on: OnMethod | None = None
    #: As in `[power]`.
    off: OffMethod | None = None
    #: As in `[power]`.
    idle: Span0 | None = None
    #: As in `[power]`.
    wake_timeout: Span | None = None
    #: As in `[power]`.
    retry_after: Span | None = None
    #: As in `[power]`.
    broadcast: Annotated[str, AfterValidator(_check_broadcast)] | None = None
    #: As in `[power]`.
    ipmi_user: _IpmiUser | None = None
    #: As in `[power]`.
    ipmi_password_file: _PasswordFile | None = None

    def merge(self, base: PowerSettings) -> PowerSettings:
        """Return the node's settings, with those of `[power]` where it has none."""
        own: dict[str, Any] = {
            name: getattr(self, name) for name in self.model_fields_set & PowerSettings.model_fields.keys()
        }
        return base.model_copy(update={name: value for name, value in own.items() if value is not None})


def find_power_mistakes(
    base: PowerSettings,
    nodes: Iterable[NodeSettings],
    storage: StorageSettings,
    *,
    swarm_manager: str | None,
    is_builtin: bool,
) -> Iterable[str]:
    """Return one line for each node whose power cannot be switched, or must not be.

    Args:
        base: `[power]`.
        nodes: All nodes.
        storage: `[storage]`: a node that serves homes or datasets has to stay on.
        swarm_manager: The first node that manages the Swarm; None without a Swarm.
        is_builtin: Whether gpuhub decides when nodes sleep, and not Slurm.
    """
    servers = _list_file_servers(storage)
    for node in nodes:
        if node.power is None:
            continue
        where = f"nodes: {node.name!r}: power"
        yield from _find_method_mistakes(where, node.power, node.power.merge(base))
        off = node.power.merge(base).off
        if not is_builtin and off == "suspend":
            yield (
                f'{where}.off: Slurm takes a node for resumed only after it has booted: write off = "poweroff", and '
                "let the firmware wake it from there"
            )
        if not node.docker and off in {"suspend", "poweroff"}:
            yield f'{where}.off: {off!r} needs Docker on the node: write "ipmi" or a command'
        if node.guest:
            yield f"{where}: a guest's owner alone switches the machine: remove it"
        if node.docker in LOCAL_SOCKETS:
            yield f"{where}: docker = {node.docker!r} is the head node itself, which has to stay on: remove it"
        for server in sorted({node.name, node.address, node.rank_address} & servers):
            yield f"{where}: {server!r} serves files to all nodes (see [storage]) and has to stay on: remove it"
        if node.name == swarm_manager:
            yield (
                f"{where}: one node at least has to stay on, to manage the Docker Swarm of users' networks: remove it "
                "here or from another node"
            )
        if node.desktop and node.power.merge(base).idle:
            yield (
                f"{where}.idle: a user works at the machine's screen (desktop = true), which gpuhub does not see: "
                'write idle = "0s", and let the desktop suspend itself'
            )


def _find_method_mistakes(where: str, own: NodePowerSettings, power: PowerSettings) -> Iterable[str]:
    if power.on == "wake-on-lan" and own.mac is None:
        yield f'{where}.mac: is missing; `ip link` shows it on the machine, such as "3c:ec:ef:12:34:56"'
    if "ipmi" in (power.on, power.off):
        for key, value in (
            ("ipmi_address", own.ipmi_address),
            ("ipmi_user", power.ipmi_user),
            ("ipmi_password_file", power.ipmi_password_file),
        ):
            if value is None:
                yield f'{where}.{key}: is missing, and "ipmi" needs it'
    if 0 < power.idle < _LEAST_IDLE_S:
        yield f'{where}.idle: {format_span(power.idle)} is too short: write at least "1m", or "0s" for never'
    if power.wake_timeout > _LONGEST_WAKE_S:
        yield f'{where}.wake_timeout: {format_span(power.wake_timeout)} is too long: write at most "1h"'


def _list_file_servers(storage: StorageSettings) -> frozenset[str]:
    """Return the hosts that the storage names, without the brackets of IPv6 addresses."""
    locations = (storage.home, *storage.list_read_only())
    urls = map(urlsplit, locations)
    return frozenset(url.hostname for url in urls if url.scheme == "nfs" and url.hostname)
