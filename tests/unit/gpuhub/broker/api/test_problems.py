"""The broker's own two clients: the hub's spawner asking the broker, and the broker asking the hub."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import httpx
import pytest

from gpuhub.broker.api.problems import CODES, build_problem, http_status
from gpuhub.broker.controllers.hub_client import HubClient
from gpuhub.broker_api.client import AsyncBrokerClient
from gpuhub.broker_api.connection import parse_problem
from gpuhub.broker_api.errors import HubUnreachable, NotKnown, TooManyJobs, TooManyRequests, TooManyWaiting
from gpuhub.broker_api.schemas import LeaseRequest, LeaseState
from gpuhub.common.errors import (
    BrokerUnreachable,
    Conflict,
    GpuhubError,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Unavailable,
)
from tests.support.broker.in_process import Setting, asgi_broker


async def test_spawner_client_handles_a_whole_lease(setting: Setting) -> None:
    """Asked for in an owner's name, found again, activated, released, with the cluster in view."""
    async with asgi_broker(setting) as running:
        client = AsyncBrokerClient(running.url, "spawner", transport=running.transport)
        lease = await client.request_lease(LeaseRequest(profile="rtx5090", key="k", owner="ada"))
        assert (lease.owner, lease.state) == ("ada", LeaseState.GRANTED)
        assert [found.id for found in await client.leases()] == [lease.id]
        assert (await client.cluster()).nodes[0].gpus[0].holder is not None
        with pytest.raises(NotFound, match="no lease 'none'"):
            await client.get_lease("none")
        with pytest.raises(InvalidRequest, match="there is no profile 'x'"):
            await client.request_lease(LeaseRequest(profile="x", key="other", owner="ada"))
        assert (await client.activate(lease.id, "c" * 64)).state is LeaseState.ACTIVE
        lease = await client.release(lease.id)
        while lease.state is not LeaseState.RELEASED:
            lease = await client.get_lease(lease.id, wait_s=5, version=lease.version)
        with pytest.raises(Conflict, match="has ended"):
            await client.activate(lease.id, "c" * 64)
        await client.close()


async def test_client_retries_then_reports_an_unreachable_broker() -> None:
    """A broker that is restarting is tried again; one that stays silent is an error of its own."""
    answers: list[Callable[[], httpx.Response]] = [
        lambda: httpx.Response(502, text="bad gateway"),
        lambda: httpx.Response(503, json=build_problem(503, "later", "hub-unreachable").model_dump()),
        lambda: httpx.Response(200, json=[]),
    ]
    client = AsyncBrokerClient(
        "http://broker", "t", retry_limit_s=5, transport=httpx.MockTransport(lambda _: answers.pop(0)())
    )
    assert await client.leases() == []

    def silent(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    client = AsyncBrokerClient("http://broker", "t", retry_limit_s=0.1, transport=httpx.MockTransport(silent))
    with pytest.raises(BrokerUnreachable, match="does not answer"):
        await client.leases()


@pytest.mark.parametrize(
    "kind",
    [
        InvalidRequest,
        NotAllowed,
        NotFound,
        Conflict,
        Unavailable,
        NotKnown,
        TooManyWaiting,
        TooManyJobs,
        HubUnreachable,
    ],
)
def test_errors_survive_the_problem_document(kind: type[GpuhubError]) -> None:
    """Through the problem document and back, class and text stay."""
    status = http_status(kind("what, which and how"))
    assert CODES[kind.code] == status
    back = parse_problem(status, build_problem(status, "what, which and how", kind.code).model_dump_json().encode())
    assert type(back) is kind
    assert str(back) == "what, which and how"


@pytest.mark.parametrize(("header", "expected"), [("7", 7.0), (None, None), ("Fri, 31 Dec 1999 23:59:59 GMT", None)])
def test_the_time_to_try_again_survives_the_problem_document(header: str | None, expected: float | None) -> None:
    """In seconds, as the broker sends it."""
    body = build_problem(429, "too soon", TooManyRequests.code).model_dump_json().encode()
    error = parse_problem(429, body, header)
    assert isinstance(error, TooManyRequests)
    assert error.retry_after_s == expected


async def test_the_client_comes_again_when_it_may() -> None:
    """Who asked too often waits as long as the broker says, if that is within the client's retry limit."""
    answers = [
        httpx.Response(
            429,
            content=build_problem(429, "too soon", TooManyRequests.code).model_dump_json(),
            headers={"Retry-After": after},
        )
        for after in ("1", "60")
    ]
    sent = iter([answers[0], httpx.Response(200, json=[]), answers[1]])
    client = AsyncBrokerClient(
        "http://broker", "t", transport=httpx.MockTransport(lambda _: next(sent)), retry_limit_s=30
    )
    began = time.monotonic()
    assert await client.nodes() == []
    assert time.monotonic() - began >= 1
    with pytest.raises(TooManyRequests, match="too soon"):
        await client.nodes()
    assert next(sent, None) is None
    await client.close()


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [(500, b"<html>", BrokerUnreachable), (404, b"", NotFound), (418, b"[]", GpuhubError), (429, b"1", TooManyWaiting)],
)
def test_other_error_responses_are_classified_by_status(status: int, body: bytes, kind: type[GpuhubError]) -> None:
    """A proxy in between answers in its own way."""
    assert type(parse_problem(status, body)) is kind


def hub(answer: Callable[[httpx.Request], httpx.Response]) -> HubClient:
    return HubClient("http://hub/hub/api", "secret", transport=httpx.MockTransport(answer))


async def test_servers_are_started_and_stopped_by_name() -> None:
    """The default server and a named one have different paths; the profile goes in the body, the token in a header."""
    seen: list[tuple[str, str, bytes, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.method, request.url.path, request.content, request.headers["Authorization"]))
        return httpx.Response(202)

    api = hub(answer)
    await api.start_server("ada", "", {"profile": "rtx5090"})
    await api.start_server("ada", "work", {"profile": "cpu"})
    await api.stop_server("ada", "")
    await api.close()
    assert seen == [
        ("POST", "/hub/api/users/ada/server", b'{"profile":"rtx5090"}', "token secret"),
        ("POST", "/hub/api/users/ada/servers/work", b'{"profile":"cpu"}', "token secret"),
        ("DELETE", "/hub/api/users/ada/server", b"", "token secret"),
    ]


@pytest.mark.parametrize(
    ("status", "kind"), [(404, NotFound), (403, NotAllowed), (500, HubUnreachable), (503, HubUnreachable)]
)
async def test_hub_errors_are_translated(status: int, kind: type[GpuhubError]) -> None:
    """Each is another thing to do: end the request, call the administrator, or come back."""
    api = hub(lambda _: httpx.Response(status))
    with pytest.raises(kind):
        await api.start_server("ada", "", {"profile": "cpu"})
    await api.close()


async def test_repeated_server_start_and_stop_succeed() -> None:
    """The hub says 400 to a start that is pending or done, and 404 to the stop of what does not run."""
    api = hub(lambda request: httpx.Response(400 if request.method == "POST" else 404))
    await asyncio.gather(api.start_server("ada", "", {"profile": "cpu"}), api.stop_server("ada", ""))
    await api.close()


async def test_identity_is_requested_with_the_token_of_the_caller() -> None:
    """A model, no model, or no answer."""
    models = {"good": httpx.Response(200, json={"name": "ada"}), "bad": httpx.Response(403)}
    api = hub(lambda request: models.get(request.headers["Authorization"].split()[1], httpx.Response(502)))
    assert await api.fetch_token_model("good") == {"name": "ada"}
    assert await api.fetch_token_model("bad") is None
    with pytest.raises(HubUnreachable):
        await api.fetch_token_model("other")
    await api.close()
