"""The HTTP server of rank 0: OpenAI's routes over the engine, for localhost, where the hub's ports of jobs connect."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.iostream import StreamClosedError
from tornado.web import Application, RequestHandler

from gpu_launch.serving import api_requests
from gpu_launch.serving.api_requests import GenerationRequest, RequestError, ServedModel
from gpu_launch.serving.engine import Engine, EngineFailed, Finish, QueueFull, Sequence
from gpu_launch.serving.text_stream import TextStream

#: tornado closes the connection of a larger body, before any handler could answer.
_MAX_READ = 8 * api_requests.MAX_BODY
_IDLE_CONNECTION_S = 3600.0
_MAX_CONNECTION_BODY_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What the handlers share."""

    engine: Engine
    model: ServedModel
    #: Return the text of some tokens.
    decode: Callable[[list[int]], str]
    #: Tokens that end an answer.
    ends: frozenset[int]
    created: int


def start_server(endpoint: Endpoint, port: int, *, address: str = "127.0.0.1") -> HTTPServer:
    """Listen, in the running event loop.

    Raises:
        OSError: the port is taken.
    """
    shared = {"endpoint": endpoint}
    application = Application(
        [
            (r"/v1/models", _Models, shared),
            (r"/v1/models/(.+)", _Model, shared),
            (r"/v1/chat/completions", _Chat, shared),
            (r"/v1/completions", _Completion, shared),
            (r"/health", _Health, shared),
        ],
        default_handler_class=_Missing,
        default_handler_args=shared,
        log_function=lambda _handler: None,
    )
    server = HTTPServer(
        application,
        max_body_size=_MAX_READ,
        body_timeout=_MAX_CONNECTION_BODY_S,
        idle_connection_timeout=_IDLE_CONNECTION_S,
    )
    server.listen(port, address=address)
    return server


class _Handler(RequestHandler):
    """Errors in OpenAI's form."""

    def initialize(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    def set_default_headers(self) -> None:
        self.set_header("Server", "gpu-launch")

    def write_error(self, status_code: int, **given: Any) -> None:
        error = given.get("exc_info", (None, None, None))[1]
        if not isinstance(error, RequestError):
            text = "The server failed; the job's output says more." if status_code >= 500 else self._reason
            error = RequestError(text, status=status_code)
        self.finish(error.build_body())

    def _handle_request_exception(self, error: BaseException) -> None:
        if isinstance(error, RequestError) and not self._finished:
            self.set_status(error.status)
            self.finish(error.build_body())
            return
        super()._handle_request_exception(error)

    def describe_model(self) -> dict[str, Any]:
        """Return the model as the list of models has it."""
        model = self.endpoint.model
        return {
            "id": model.name,
            "object": "model",
            "created": self.endpoint.created,
            "owned_by": "gpu-launch",
            "max_model_len": model.context,
        }


class _Missing(_Handler):
    def prepare(self) -> None:
        raise RequestError(
            f"There is no {self.request.path[:200]} here: /v1/models, /v1/chat/completions, /v1/completions.",
            status=404,
        )


class _Health(_Handler):
    def get(self) -> None:
        error = self.endpoint.engine.error
        self.set_status(200 if error is None else 503)
        self.finish({"open_requests": self.endpoint.engine.open, "error": None if error is None else str(error)})


class _Models(_Handler):
    def get(self) -> None:
        self.finish({"object": "list", "data": [self.describe_model()]})


class _Model(_Handler):
    def get(self, name: str) -> None:
        if name != self.endpoint.model.name:
            raise RequestError(
                f"The model {name[:200]!r} does not exist.", status=404, param="model", code="model_not_found"
            )
        self.finish(self.describe_model())


class _Generation(_Handler):
    """A request for tokens, streamed or whole."""

    prefix, whole, part = "", "", ""
    #: The answer continues the text of the prompt.
    is_continuation = False
    _sequence: Sequence | None = None
    _has_left = False

    def parse(self, data: bytes) -> GenerationRequest:
        """Return the request."""
        raise NotImplementedError

    def build_choice(self, text: str, finish: str | None, *, is_first: bool, is_stream: bool) -> dict[str, Any]:
        """Return the only choice of an answer or of a part of it."""
        raise NotImplementedError

    async def post(self) -> None:
        if len(self.request.body) > api_requests.MAX_BODY:
            raise RequestError(
                f"The body has {len(self.request.body)} bytes, and {api_requests.MAX_BODY} are the most.", status=413
            )
        # Encoding a long prompt takes longer than other requests should wait.
        asked = await asyncio.to_thread(self.parse, self.request.body)
        if self._has_left:
            return
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[int | Finish | EngineFailed]()
        self._sequence = sequence = Sequence(
            prompt=asked.prompt,
            max_tokens=asked.max_tokens,
            sampling=asked.sampling,
            ends=self.endpoint.ends,
            emit=lambda item: _pass_on(loop, arrived, item),
        )
        try:
            self.endpoint.engine.submit(sequence)
        except QueueFull:
            self.set_header("Retry-After", "1")
            raise RequestError("Too many requests wait already; try again.", status=429, code="queue_full") from None
        except EngineFailed as error:
            raise RequestError(f"The model is not served any more: {error}.", status=503) from None
        self._identity = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self.endpoint.model.name,
        }
        try:
            await (self._stream if asked.streams else self._answer)(asked, sequence, arrived)
        except StreamClosedError:
            return
        finally:
            self.endpoint.engine.cancel(sequence)

    def on_connection_close(self) -> None:
        self._has_left = True
        if self._sequence is not None:
            self.endpoint.engine.cancel(self._sequence)

    async def _answer(
        self, asked: GenerationRequest, sequence: Sequence, arrived: asyncio.Queue[int | Finish | EngineFailed]
    ) -> None:
        stream = self._begin_text(asked)
        text, count, finish = "", 0, ""
        while not finish:
            more, finish, is_token = self._read(await arrived.get(), stream, sequence)
            text, count = text + more, count + is_token
        choice = self.build_choice(text, finish, is_first=True, is_stream=False)
        usage = _count(asked, count)
        self.finish(self._identity | {"object": self.whole, "choices": [choice], "usage": usage})

    async def _stream(
        self, asked: GenerationRequest, sequence: Sequence, arrived: asyncio.Queue[int | Finish | EngineFailed]
    ) -> None:
        stream = self._begin_text(asked)
        self.set_header("Content-Type", "text/event-stream")
        self.set_header("Cache-Control", "no-store")
        count, finish, is_first = 0, "", True
        while not finish:
            try:
                text, finish, is_token = self._read(await arrived.get(), stream, sequence)
            except RequestError as error:
                if is_first:
                    raise
                # The status has been sent.
                await self._send(error.build_body())
                return
            count += is_token
            if text or is_first or finish:
                choice = self.build_choice(text, finish or None, is_first=is_first, is_stream=True)
                await self._send(self._identity | {"object": self.part, "choices": [choice]})
                is_first = False
        if asked.has_usage:
            await self._send(self._identity | {"object": self.part, "choices": [], "usage": _count(asked, count)})
        self.write("data: [DONE]\n\n")
        await self.flush()

    def _begin_text(self, asked: GenerationRequest) -> TextStream:
        return TextStream(self.endpoint.decode, asked.stops, asked.prompt if self.is_continuation else ())

    def _read(self, item: int | Finish | EngineFailed, stream: TextStream, sequence: Sequence) -> tuple[str, str, int]:
        """Return the text that a token brings, why the answer ends there if it does, and 1 for a token."""
        if isinstance(item, EngineFailed):
            raise RequestError(f"The model is not served any more: {item}.", status=503)
        if isinstance(item, Finish):
            text = stream.finish()
            return text, str(Finish.STOP if stream.is_stopped else item), 0
        text = stream.feed(item)
        if stream.is_stopped:
            self.endpoint.engine.cancel(sequence)
        return text, str(Finish.STOP) if stream.is_stopped else "", 1

    async def _send(self, value: Mapping[str, Any]) -> None:
        self.write(f"data: {json.dumps(value, ensure_ascii=False)}\n\n")
        await self.flush()


class _Chat(_Generation):
    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def parse(self, data: bytes) -> GenerationRequest:
        return api_requests.parse_chat(data, self.endpoint.model)

    def build_choice(self, text: str, finish: str | None, *, is_first: bool, is_stream: bool) -> dict[str, Any]:
        message: dict[str, Any] = ({"role": "assistant"} if is_first else {}) | {"content": text}
        return {"index": 0, "delta" if is_stream else "message": message, "logprobs": None, "finish_reason": finish}


class _Completion(_Generation):
    prefix, whole, part = "cmpl", "text_completion", "text_completion"
    is_continuation = True

    def parse(self, data: bytes) -> GenerationRequest:
        return api_requests.parse_completion(data, self.endpoint.model)

    def build_choice(self, text: str, finish: str | None, *, is_first: bool, is_stream: bool) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


def _pass_on(loop: asyncio.AbstractEventLoop, arrived: asyncio.Queue[Any], item: Any) -> None:
    """Give an item of the engine's thread to the server's, unless that has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(arrived.put_nowait, item)


def _count(asked: GenerationRequest, tokens: int) -> dict[str, int]:
    prompt = len(asked.prompt)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
