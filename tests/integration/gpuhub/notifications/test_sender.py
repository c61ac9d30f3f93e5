"""The process that sends notifications: real receivers, what it must not reach, and what it may do."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuhub.notifications import sender, sender_main
from gpuhub.notifications.sender import OutgoingMessage, SendOrder, SendResult
from tests.support.broker.in_process import until
from tests.support.receivers import Webhook, mail_server, webhook

MESSAGE = OutgoingMessage(title="Your GPU is there – ok", body="It waited 12 min.\nIt starts now.")
NOBODY = 65534


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as served:
        yield served


async def send(url: str, *allowed: str) -> SendResult:
    return await sender.send(SendOrder(url=url, allowed=allowed, message=MESSAGE))


async def test_a_webhook_gets_title_and_text(hook: Webhook) -> None:
    """From a process of the user nobody, where the head node's programs run as root."""
    assert await send(f"json://{hook.address}/hook", hook.address) == SendResult(outcome="sent")
    assert hook.paths == ["/hook"]
    assert (hook.received[0]["title"], hook.received[0]["message"]) == (MESSAGE.title, MESSAGE.body)
    assert hook.senders == [NOBODY if os.geteuid() == 0 else os.geteuid()]


async def test_ntfy_gets_the_topic(hook: Webhook) -> None:
    """An ntfy server of the lab, which the administrator permits."""
    assert await send(f"ntfy://{hook.address}/gpus", "127.0.0.0/8") == SendResult(outcome="sent")
    assert hook.received == [{"topic": "gpus", "title": MESSAGE.title, "message": MESSAGE.body}]


async def test_mail_arrives() -> None:
    """At a real SMTP server, with what is not ASCII."""
    with mail_server() as (mails, port):
        url = f"mailto://127.0.0.1:{port}?from=hub@example.org&to=ada@example.org&mode=insecure"
        assert await send(url, f"127.0.0.1:{port}") == SendResult(outcome="sent")
    (mail,) = mails
    assert mail["Subject"] == MESSAGE.title
    assert mail["To"] == "ada@example.org"
    body = mail.get_body(("plain", "html"))
    assert body is not None
    assert "It waited 12 min." in body.get_content()


async def test_the_destinations_own_refusal_is_reported_as_a_number(hook: Webhook) -> None:
    """Its text could quote the token."""
    hook.status = 403
    result = await send(f"json://{hook.address}/s3cret", hook.address)
    assert result == SendResult(outcome="failed", reason="the destination answered with status 403")


@pytest.mark.parametrize("host", ["2130706433", "127.1", "0177.0.0.1", "localtest.example"])
async def test_names_are_checked_where_they_lead(
    hook: Webhook, host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Forms of an address that only the resolver understands, and a name that leads to loopback."""
    # In the sender's process, as a name server of the attacker would answer.
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\n"
        "resolve = socket.getaddrinfo\n"
        "def answer(host, *rest, **more):\n"
        "    return resolve('127.0.0.1' if host == 'localtest.example' else host, *rest, **more)\n"
        "socket.getaddrinfo = answer\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    result = await send(f"json://{host}:{hook.port}/")
    assert result.outcome in {"refused", "invalid"}, result
    assert hook.received == []
    if host == "localtest.example":
        assert result == SendResult(outcome="refused", reason="127.0.0.1 is not an address of the internet")


async def test_redirects_are_not_followed(hook: Webhook) -> None:
    """A permitted server could point at any other."""
    with webhook() as inner:
        hook.status, hook.headers = 307, {"Location": f"http://{inner.address}/inside"}
        result = await send(f"json://{hook.address}/", hook.address)
        assert inner.received == []
    assert result.outcome in {"failed", "refused"}


async def test_the_head_nodes_own_address_is_forbidden() -> None:
    """Also one of the internet: the hub and the broker listen there."""
    guard_in_child = (
        "import socket, sys\n"
        "from gpuhub.notifications import sender_main\n"
        "guard = sender_main.Guard()\n"
        "guard._is_own = lambda family, address: True\n"
        "guard.permit(())\n"
        "try:\n    socket.create_connection(('1.1.1.1', 443), timeout=1)\n"
        "except sender_main.ForbiddenError as error:\n    print(error)\n"
    )
    assert await run_python(guard_in_child) == "1.1.1.1 is an address of the head node itself\n"


async def test_own_addresses_are_recognised() -> None:
    """By what a socket can be bound to."""
    source = (
        "import ipaddress, socket\n"
        "from gpuhub.notifications import sender_main\n"
        "guard = sender_main.Guard()\n"
        "print([guard._is_own(socket.AF_INET, ipaddress.ip_address(a)) for a in ('127.0.0.1', '1.1.1.1')])\n"
    )
    assert await run_python(source) == "[True, False]\n"


@pytest.mark.parametrize(
    "attempt",
    [
        "open('/tmp/gpuhub-written', 'w')",
        "os.system('true')",
        "subprocess.run(['true'])",
        "os.execv('/bin/true', ['true'])",
        "os.fork()",
        "socket.socket(socket.AF_UNIX).connect('/run/docker.sock')",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
        "socket.create_connection(('127.0.0.1', 22))",
        "os.remove('/etc/hostname')",
        "ctypes.CDLL('libc.so.6')",
    ],
)
async def test_the_process_can_do_nothing_else(attempt: str) -> None:
    """Whatever a plugin would do."""
    source = (
        "import ctypes, os, socket, subprocess\n"
        "from gpuhub.notifications import sender_main\n"
        "guard = sender_main.Guard()\n"
        "guard.permit(())\n"
        f"try:\n    {attempt}\n"
        "except sender_main.ForbiddenError:\n    print('forbidden')\n"
    )
    assert await run_python(source) == "forbidden\n"


async def run_python(source: str) -> str:
    """Run a program in a process of its own: an audit hook cannot be removed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", source, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return output.decode()


async def test_a_destination_that_does_not_answer_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is ended, and nothing of it remains."""
    monkeypatch.setattr(sender, "SEND_TIMEOUT_S", 4.0)
    with webhook(holds=True) as hook:
        result = await send(f"json://{hook.address}/", hook.address)
    assert result == SendResult(outcome="failed", reason="the destination did not answer within 4 s")


async def test_the_process_knows_no_more_than_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the environment of the broker nor the URL on its command line, which others can read."""
    monkeypatch.setenv("GPUHUB_TOKEN", "s3cret")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    with webhook(holds=True) as hook:
        task = asyncio.ensure_future(send(f"json://{hook.address}/s3cret", hook.address))
        await until(lambda: hook.received, "the message arrives")
        seen = read_senders()
        hook.answers.set()
        assert await task == SendResult(outcome="sent")
    assert seen
    assert [text for text in seen if "s3cret" in text or "127.0.0.1:1" in text] == []


def read_senders() -> list[str]:
    """Return command lines and environments of the processes that send."""
    texts = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_text()
            if "gpuhub.notifications.sender_main" in command:
                texts += [command, (folder / "environ").read_text()]
        except OSError:
            continue
    return texts


async def test_only_checks_connect_nowhere(hook: Webhook) -> None:
    """A new destination is checked without a message."""
    result = await sender.send(SendOrder(url=f"json://{hook.address}/", allowed=(hook.address,)))
    assert result == SendResult(outcome="sent")
    assert hook.received == []
    result = await sender.send(SendOrder(url="tgram://x", allowed=()))
    assert result.outcome == "invalid"
    assert "Telegram" in result.reason


def test_the_reading_of_apprise_counts() -> None:
    """Apprise also separates parameters by semicolons."""
    service = sender_main.SERVICES["json"]
    plugin = sender_main._load_plugin(service)
    with pytest.raises(sender_main.InvalidRequest, match="'verify' is not permitted"):
        sender_main._build(plugin, service, "jsons://example.org/?method=POST;verify=no")
