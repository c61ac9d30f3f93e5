"""The process that sends one message: `python -m gpuhub.notifications.sender_main`.

It reads a `SendOrder` as JSON from standard input and writes a `SendResult` to standard output. Apprise's plugin for
the destination is loaded first; then the process gives up root, and what it may still do is limited by an audit hook:
connect to permitted addresses, as they were resolved, and write nothing. The URL is read only after that.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import ipaddress
import logging
import os
import re
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import apprise
from apprise import AppriseAsset, PersistentStoreMode

from gpuhub.common.errors import InvalidRequest
from gpuhub.config.notifications import AllowedAddress, parse_allowed
from gpuhub.notifications.addresses import Network, explain_forbidden, read_connected_networks
from gpuhub.notifications.sender import OutgoingMessage, SendOrder, SendResult
from gpuhub.notifications.services import SERVICES, Service, check_parameters, check_url, escape

#: User and group `nobody`.
_NOBODY = 65534
_MEMORY_BYTES, _CPU_S, _OPEN_FILES = 1024**3, 20, 64
_MAX_INPUT = 65536
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
#: Time limit of one connection or answer, seconds.
_SOCKET_S = 10.0
#: Authorities of the system, which an unprivileged user can read wherever gpuhub is installed.
_AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
#: Audit events of what sending needs nothing of.
_FORBIDDEN_EVENTS = frozenset(
    {
        "ctypes.dlopen", "os.chmod", "os.chown", "os.exec", "os.fork", "os.forkpty", "os.link", "os.mkdir",
        "os.posix_spawn", "os.remove", "os.rename", "os.rmdir", "os.spawn", "os.symlink", "os.system", "os.truncate",
        "pty.spawn", "socket.bind", "socket.sendmsg", "socket.sendto", "subprocess.Popen",
    }
)  # fmt: skip
_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class ForbiddenError(PermissionError):
    """The destination led to something that is not permitted."""


class Guard:
    """An audit hook that limits the process from then on, and remembers what it refused first."""

    def __init__(self) -> None:
        self.refusal: str | None = None
        #: None until `close`: connections are not possible at all before.
        self._allowed: tuple[AllowedAddress, ...] | None = ()
        self._checks_addresses = True
        self._connected: tuple[Network, ...] = ()
        self._is_probing = False
        sys.addaudithook(self._check)

    def permit(self, allowed: tuple[AllowedAddress, ...] | None) -> None:
        """Set the permitted private addresses; None permits all."""
        self._allowed, self._checks_addresses = allowed, allowed is not None
        self._connected = read_connected_networks()

    def _check(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_probing:
            return
        if event == "socket.connect":
            self._check_connection(*arguments)
        elif event in _FORBIDDEN_EVENTS:
            self._refuse(f"it would use {event}")
        elif event == "open":
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            if flags & _WRITING_FLAGS:
                self._refuse("it would write a file")

    def _check_connection(self, sock: socket.socket, address: Any) -> None:
        if sock.family not in {socket.AF_INET, socket.AF_INET6}:
            self._refuse("it would use a local socket")
        host, port = str(address[0]), int(address[1])
        try:
            # Names would be resolved a second time, with another result.
            plain = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            self._refuse(f"{host} is not an address")
        if not self._checks_addresses:
            return
        reason = explain_forbidden(plain, port, self._allowed or (), self._connected)
        if reason is None and plain.is_global and self._is_own(sock.family, plain):
            reason = f"{host} is an address of the head node itself"
        if reason is not None:
            self._refuse(reason)

    def _is_own(self, family: int, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        """Return whether this machine has the address: only then can a socket be bound to it."""
        self._is_probing = True
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((str(address), 0))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
        finally:
            self._is_probing = False
        return True

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason
        raise ForbiddenError(reason)


class _LogScan(logging.Handler):
    """Finds the status in Apprise's log, which has no other place for it; texts are dropped, they may have secrets."""

    def __init__(self) -> None:
        super().__init__()
        self.status: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        match = re.search(r"\berror=(\d{3})\b|\((\d{3}), b?['\"]", record.getMessage())
        if match is not None:
            self.status = match[1] or match[2]


def _load_plugin(service: Service) -> type[Any]:
    module, name = service.plugin
    plugin: type[Any] = getattr(importlib.import_module(f"apprise.plugins.{module}"), name)
    # What is imported at the first connection only; later it may not be readable any more.
    for needed in ("encodings.idna", "stringprep", "smtplib", "email.mime.text", "email.mime.multipart", "http.client"):
        importlib.import_module(needed)
    return plugin


def _give_up_rights(parent: int) -> None:
    libc = ctypes.CDLL(None)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # Set after the change of the user, which resets it: a message is not sent after the death of who would note that.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def _build(plugin: type[Any], service: Service, url: str) -> Any:
    """Return the plugin's object for the URL.

    Raises:
        InvalidRequest: The plugin does not accept it.
    """
    asset = AppriseAsset(
        app_id="gpuhub",
        app_desc="gpuhub",
        app_url="",
        image_url_mask="",
        image_url_logo="",
        storage_mode=PersistentStoreMode.MEMORY,
        http_redirects=False,
        pgp_autogen=False,
        pem_autogen=False,
        allow_templates=False,
    )
    refusal = InvalidRequest(
        f"this is not how a destination for {service.title} is written; compare it with the examples"
    )
    values = plugin.parse_url(escape(url))
    if not values:
        raise refusal
    # As Apprise has read them, which may differ from our own reading.
    check_parameters(service, values.get("qsd") or {})
    try:
        return plugin(**{**values, **service.fixed, "asset": asset, "cto": _SOCKET_S, "rto": _SOCKET_S})
    except TypeError:
        raise refusal from None


def run(order: SendOrder, plugin: type[Any], service: Service, guard: Guard) -> SendResult:
    """Carry out an order."""
    allowed = None if order.allowed is None else tuple(map(parse_allowed, order.allowed))
    scan = _LogScan()
    logger = logging.getLogger("apprise")
    logger.addHandler(scan)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        check_url(order.url, allowed)
        target = _build(plugin, service, order.url)
    except InvalidRequest as error:
        return SendResult(outcome="invalid", reason=str(error))
    if order.message is None:
        return SendResult(outcome="sent")
    guard.permit(allowed)
    is_sent = target.notify(
        title=order.message.title,
        body=cut_body(order.message, target.body_maxlen),
        notify_type=apprise.NotifyType.INFO,
        # Otherwise it is taken for HTML or Markdown where the destination has these.
        body_format=apprise.NotifyFormat.TEXT,
    )
    return SendResult(outcome="sent") if is_sent else _explain_failure(guard, scan)


def cut_body(message: OutgoingMessage, most: int) -> str:
    """Return the text as far as a destination takes `most` characters with the title: it refuses a longer one."""
    room = most - len(message.title) - len("\r\n")
    return message.body if len(message.body) <= room else f"{message.body[: room - 1]}…"


def _explain_failure(guard: Guard, scan: _LogScan) -> SendResult:
    if guard.refusal is not None:
        return SendResult(outcome="refused", reason=guard.refusal)
    if scan.status is not None:
        return SendResult(outcome="failed", reason=f"the destination answered with status {scan.status}")
    return SendResult(outcome="failed", reason="the destination does not answer, or not as expected")


def main() -> None:
    """Read the order from standard input and send."""
    schema, parent = sys.argv[1], int(sys.argv[2])
    service = SERVICES[schema]
    plugin = _load_plugin(service)
    if _AUTHORITIES.exists():
        os.environ["REQUESTS_CA_BUNDLE"] = str(_AUTHORITIES)
    socket.setdefaulttimeout(_SOCKET_S)
    _give_up_rights(parent)
    guard = Guard()
    order = SendOrder.model_validate_json(sys.stdin.buffer.read(_MAX_INPUT))
    sys.stdout.write(run(order, plugin, service, guard).model_dump_json())


if __name__ == "__main__":
    main()
