"""Receivers of notifications: a webhook and ntfy server, and a mail server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from aiosmtpd.controller import Controller


@dataclass
class Webhook:
    """An HTTP server on loopback that keeps the JSON of each request."""

    port: int = 0
    received: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    #: The user as whom the other end of each connection runs.
    senders: list[int] = field(default_factory=list)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    #: Answers wait for it.
    answers: threading.Event = field(default_factory=threading.Event)

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.port}"


@contextmanager
def webhook(*, holds: bool = False) -> Iterator[Webhook]:
    """Serve a webhook; with `holds`, it answers only when `answers` is set."""
    hook = Webhook()
    if not holds:
        hook.answers.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            hook.paths.append(self.path)
            hook.senders.append(_find_user(self.client_address[1], hook.port))
            hook.received.append(json.loads(body or b"{}"))
            hook.answers.wait()
            self.send_response(hook.status)
            for name, value in hook.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hook.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="webhook")
    thread.start()
    try:
        yield hook
    finally:
        hook.answers.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _find_user(local: int, remote: int) -> int:
    """Return the user whose socket on loopback has these ports; -1 if it is gone."""
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        fields = line.split()
        if (fields[1], fields[2]) == (f"0100007F:{local:04X}", f"0100007F:{remote:04X}"):
            return int(fields[7])
    return -1


@dataclass
class _Mailbox:
    mails: list[EmailMessage] = field(default_factory=list)

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:  # noqa: N802 - aiosmtpd's name
        """Keep a mail; aiosmtpd calls it."""
        self.mails.append(cast("EmailMessage", message_from_bytes(envelope.content, policy=policy.default)))
        return "250 Message accepted for delivery"


@contextmanager
def mail_server() -> Iterator[tuple[list[EmailMessage], int]]:
    """Serve SMTP on loopback; yield the mails that come, and the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    box = _Mailbox()
    controller = Controller(box, hostname="127.0.0.1", port=port)
    controller.start()
    try:
        yield box.mails, port
    finally:
        controller.stop()
