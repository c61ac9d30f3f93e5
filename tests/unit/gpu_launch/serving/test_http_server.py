"""The server over an engine whose model counts: streams, disconnects, limits and failures."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import asynccontextmanager

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPRequest

from gpu_launch.common.network import find_free_port
from gpu_launch.serving import http_server
from gpu_launch.serving.api_requests import ServedModel
from gpu_launch.serving.engine import Engine
from gpu_launch.serving.http_server import Endpoint

DEADLINE_S = 20


class Counter:
    """A model whose next token is the next digit; each step waits for `go`, and fails on demand."""

    def __init__(self) -> None:
        self.go, self.failure = threading.Event(), None
        self.go.set()

    def run(self, step):
        assert self.go.wait(DEADLINE_S)
        if self.failure is not None:
            raise self.failure
        return [(row.tokens[-1] + 1) % 10 for row in step.rows]

    def send_heartbeat(self):
        """Do nothing: there are no other ranks."""

    stop = send_heartbeat


class Client:
    """Requests to the server."""

    def __init__(self, port: int, engine: Engine, runner: Counter) -> None:
        self.port, self.engine, self.runner = port, engine, runner
        self.http = AsyncHTTPClient(force_instance=True)

    async def ask(self, path, body=None, **more):
        data = json.dumps(body) if isinstance(body, dict) else body
        request = HTTPRequest(
            f"http://127.0.0.1:{self.port}{path}", method="GET" if body is None else "POST", body=data,
            request_timeout=DEADLINE_S, **more,
        )  # fmt: skip
        return await self.http.fetch(request, raise_error=False)

    async def wait_for(self, number: int) -> None:
        """Wait until so many requests are open."""
        async with asyncio.timeout(DEADLINE_S):
            while self.engine.open != number:  # noqa: ASYNC110 - changed by another thread
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(**changes):
    """Run a server and its engine."""
    runner = Counter()
    values = {"slots": 1, "context": 50, "chunk": 8, "most_waiting": 1, "idle_s": None, "beat_s": 60.0}
    engine = Engine(runner, **values | changes)
    model = ServedModel(
        name="digits", context=50, vocabulary=10, encode=lambda text: [int(digit) for digit in text],
        encode_chat=lambda messages: [int(digit) for message in messages for digit in message["content"]],
    )  # fmt: skip
    endpoint = Endpoint(
        engine=engine, model=model, decode=lambda tokens: "".join(map(str, tokens)), ends=frozenset({9}), created=1
    )
    port = find_free_port()
    server = http_server.start_server(endpoint, port)
    failures = []

    def work():
        try:
            engine.run()
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    client = Client(port, engine, runner)
    try:
        yield client
    finally:
        runner.go.set()
        engine.stop()
        await asyncio.to_thread(thread.join)
        client.http.close()
        server.stop()
        await server.close_all_connections()
        assert failures == ([runner.failure] if runner.failure else [])


async def test_whole_and_streamed_answers_are_the_same():
    """For texts and for conversations, up to the end token."""
    async with serving() as client:
        whole = json.loads((await client.ask("/v1/completions", {"prompt": "123", "max_tokens": 20})).body)
        assert whole["choices"] == [{"index": 0, "text": "45678", "logprobs": None, "finish_reason": "stop"}]
        assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        messages = [{"role": "user", "content": "2"}]
        answer = await client.ask("/v1/chat/completions", {"messages": messages, "stream": True, "stop": "67"})
        events = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]
        assert events.pop() == "[DONE]"
        choices = [json.loads(event)["choices"][0] for event in events]
        assert "".join(choice["delta"]["content"] for choice in choices) == "345"
        assert choices[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in choices[-2:]] == [None, "stop"]
        await client.wait_for(0)


async def test_queue_is_bounded():
    """The third request is told to try again."""
    async with serving() as client:
        client.runner.go.clear()
        body = {"prompt": "1", "max_tokens": 3}
        first = [asyncio.ensure_future(client.ask("/v1/completions", body)) for _ in range(2)]
        await client.wait_for(2)
        refused = await client.ask("/v1/completions", body)
        error = json.loads(refused.body)["error"]
        assert (refused.code, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
        assert refused.headers["Retry-After"] == "1"
        client.runner.go.set()
        assert [answer.code for answer in await asyncio.gather(*first)] == [200, 200]


@pytest.mark.parametrize("streams", [True, False])
async def test_client_that_leaves_is_not_computed_for(streams):
    async with serving() as client:
        client.runner.go.clear()
        _reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        body = json.dumps({"prompt": "0", "max_tokens": 40, "stream": streams}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        async with asyncio.timeout(DEADLINE_S):
            # One that is cancelled before never gets a slot.
            while client.engine._slots == [None]:  # noqa: ASYNC110 - changed by another thread
                await asyncio.sleep(0.01)
        writer.close()
        await writer.wait_closed()
        async with asyncio.timeout(DEADLINE_S):
            while not any(slot and slot.is_cancelled for slot in client.engine._slots):  # noqa: ASYNC110 - the same
                await asyncio.sleep(0.01)
        client.runner.go.set()
        await client.wait_for(0)


@pytest.mark.parametrize("streams", [True, False])
async def test_completion_continues_the_text_of_its_prompt(monkeypatch, streams):
    """An answer in a conversation begins a text of its own."""
    continued, build = [], http_server.TextStream
    monkeypatch.setattr(http_server, "TextStream", lambda *given: [continued.append(given[2]), build(*given)][1])
    async with serving() as client:
        await client.ask("/v1/completions", {"prompt": "67", "stream": streams})
        await client.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "7"}], "stream": streams})
    assert continued == [(6, 7), ()]


async def test_client_that_leaves_while_its_prompt_is_encoded_is_not_computed_for(monkeypatch):
    """Nothing is submitted for it; a client that stays gets its answer."""
    left, done, encoding = asyncio.Event(), asyncio.Event(), threading.Event()
    parse, leave = http_server._Completion.parse, http_server._Completion.on_connection_close

    def parse_later(handler, data):
        assert encoding.wait(DEADLINE_S)
        return parse(handler, data)

    def note_leaving(handler):
        leave(handler)
        left.set()

    monkeypatch.setattr(http_server._Completion, "parse", parse_later)
    monkeypatch.setattr(http_server._Completion, "on_connection_close", note_leaving)
    monkeypatch.setattr(http_server._Completion, "on_finish", lambda _handler: done.set())
    async with serving() as client, asyncio.timeout(DEADLINE_S):
        submitted, submit = [], client.engine.submit
        client.engine.submit = lambda sequence: [submitted.append(sequence.prompt), submit(sequence)]
        _reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        body = json.dumps({"prompt": "0", "max_tokens": 40}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        await left.wait()
        encoding.set()
        await done.wait()
        assert (await client.ask("/v1/completions", {"prompt": "7"})).code == 200
        assert submitted == [(7,)]


async def test_failure_reaches_whole_and_streamed_answers():
    """A stream that has begun ends with the error, because its status has been sent."""
    async with serving(slots=2) as client:
        client.runner.go.clear()
        body = {"prompt": "0", "max_tokens": 5}
        asked = [asyncio.ensure_future(client.ask("/v1/completions", body | {"stream": way})) for way in (False, True)]
        await client.wait_for(2)
        client.runner.failure = RuntimeError("out of memory")
        client.runner.go.set()
        for answer in await asyncio.gather(*asked):
            assert (answer.code, json.loads(answer.body)["error"]["type"]) == (503, "server_error")
            assert "RuntimeError: out of memory" in json.loads(answer.body)["error"]["message"]
        later = await client.ask("/v1/completions", body)
        assert (later.code, (await client.ask("/health")).code) == (503, 503)


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/nothing", None, 404),
        ("/v1/models/other", None, 404),
        ("/v1/completions", "{", 400),
        ("/v1/completions", json.dumps({"prompt": "1" * (1 << 20)}), 413),
        ("/v1/models", "{}", 405),
        ("/v1/completions", None, 405),
    ],
)
async def test_errors_have_openais_form(path, body, code):
    async with serving() as client:
        answer = await client.ask(path, body)
        assert answer.code == code
        assert set(json.loads(answer.body)["error"]) == {"message", "type", "param", "code"}


async def test_models_are_listed():
    async with serving() as client:
        listed = json.loads((await client.ask("/v1/models")).body)
        (model,) = listed["data"]
        assert (model["id"], model["object"], listed["object"]) == ("digits", "model", "list")
        assert json.loads((await client.ask("/v1/models/digits")).body) == model
