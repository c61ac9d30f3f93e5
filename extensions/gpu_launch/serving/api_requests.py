"""The bodies of requests as OpenAI's API has them: what is used, what is refused, and the limits. No torch."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpu_launch.serving.steps import Sampling

#: A larger body of a request is refused, bytes.
MAX_BODY = 1 << 20
_MAX_MESSAGES, _MAX_STOPS, _MAX_STOP = 1000, 4, 256
#: Tokens of an answer to `/v1/completions` without `max_tokens`, as at OpenAI.
_DEFAULT_COMPLETION = 16
_MAX_TEMPERATURE = 2.0
_SEEDS = 1 << 62
_ROLES = ("system", "developer", "user", "assistant")
#: Fields of a request that have no effect on the answer.
_PASSED_OVER = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
)
_COMMON = frozenset({"model", "stream", "stream_options", "max_tokens", "temperature", "top_p", "stop", "seed"})
#: Values with which a field that is not supported changes nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}


class RequestError(Exception):
    """A request that is refused, as OpenAI's API says it."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def build_body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What a request must be compared with."""

    name: str
    context: int
    vocabulary: int
    #: Return the tokens of a text, and those of a conversation; the latter is None without a chat template.
    encode: Callable[[str], list[int]]
    encode_chat: Callable[[list[dict[str, str]]], list[int]] | None


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A request that can be computed."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stops: tuple[str, ...]
    streams: bool
    #: A stream ends with the numbers of tokens.
    has_usage: bool


def parse_chat(data: bytes, model: ServedModel) -> GenerationRequest:
    """Return the request of `/v1/chat/completions`.

    Raises:
        RequestError: it cannot be computed.
    """
    body = _parse_body(data, model, {"messages", "max_completion_tokens"})
    if model.encode_chat is None:
        raise RequestError(
            f"{model.name} has no chat template, so it was not trained for conversations: use /v1/completions.",
            param="messages",
        )
    messages = _parse_messages(body.get("messages"))
    try:
        prompt = model.encode_chat(messages)
    except Exception as error:  # noqa: BLE001 - the model's own template raises what it likes
        raise RequestError(f"The model's chat template refuses these messages: {error}", param="messages") from None
    field = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
    return _build(body, prompt, model, field=field, default=None)


def parse_completion(data: bytes, model: ServedModel) -> GenerationRequest:
    """Return the request of `/v1/completions`.

    Raises:
        RequestError: it cannot be computed.
    """
    body = _parse_body(data, model, {"prompt"})
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        tokens = model.encode(prompt)
    elif isinstance(prompt, list) and prompt and all(_is_number(token, 0, model.vocabulary - 1) for token in prompt):
        tokens = prompt
    else:
        raise RequestError(
            f"prompt: one text, or the numbers of its tokens from 0 to {model.vocabulary - 1}, is needed.",
            param="prompt",
        )
    return _build(body, tokens, model, field="max_tokens", default=_DEFAULT_COMPLETION)


def _parse_body(data: bytes, model: ServedModel, own: set[str]) -> dict[str, Any]:
    try:
        body = json.loads(data)
        # Tokenizers take no halves of characters, which JSON permits and programs make that cut a text.
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RequestError(
            "The body has half of a surrogate pair, such as \\ud83d alone, which is no character."
        ) from None
    except (ValueError, RecursionError):
        raise RequestError("The body is not JSON.") from None
    if not isinstance(body, dict):
        raise RequestError("The body is not a JSON object.")
    for name, value in body.items():
        if value is None or name in _COMMON or name in own or name in _PASSED_OVER:
            continue
        if name not in _NEUTRAL:
            raise RequestError(f"Unrecognized request argument supplied: {name[:100]}", param=name[:100])
        if not any(value == neutral for neutral in _NEUTRAL[name]):
            raise RequestError(f"{name} is not supported here: leave it out.", param=name, code="unsupported_parameter")
    if body.get("model") not in (None, model.name):
        raise RequestError(
            f"The model {str(body['model'])[:200]!r} does not exist: this server has {model.name}.",
            status=404,
            param="model",
            code="model_not_found",
        )
    return body


def _parse_messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise RequestError('messages: a list such as [{"role": "user", "content": "Hi"}] is needed.', param="messages")
    if len(value) > _MAX_MESSAGES:
        raise RequestError(f"messages: {len(value)} are more than {_MAX_MESSAGES}.", param="messages")
    messages = []
    for number, message in enumerate(value):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in _ROLES:
            raise RequestError(
                f"messages[{number}].role: one of {', '.join(_ROLES)} is needed.", param=f"messages[{number}].role"
            )
        messages.append({"role": role, "content": _parse_content(message.get("content"), number)})
    return messages


def _parse_content(content: Any, number: int) -> str:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(
            f"messages[{number}].content: a text is needed; images and audio are not supported.",
            param=f"messages[{number}].content",
        )
    return "".join(map(str, texts))


def _build(
    body: Mapping[str, Any], prompt: list[int], model: ServedModel, *, field: str, default: int | None
) -> GenerationRequest:
    if not prompt:
        raise RequestError("The prompt has no tokens.", param="prompt")
    room = model.context - len(prompt)
    if room < 1:
        raise RequestError(
            f"This model's maximum context length is {model.context} tokens, and the prompt has {len(prompt)}. "
            "Please reduce its length.",
            code="context_length_exceeded",
        )
    most = body.get(field)
    if most is None:
        most = room if default is None else min(default, room)
    if not _is_number(most, 1, room):
        raise RequestError(
            f"{field}: a number from 1 to {room} is needed: this model's maximum context length is {model.context} "
            f"tokens, and the prompt has {len(prompt)}.",
            param=field,
            code="context_length_exceeded" if _is_number(most, 1, 1 << 62) else None,
        )
    seed = body.get("seed")
    if seed is not None and not _is_number(seed, -(1 << 63), (1 << 63) - 1):
        raise RequestError("seed: a whole number is needed.", param="seed")
    options = body.get("stream_options")
    if options is not None and (not isinstance(options, dict) or not body.get("stream")):
        raise RequestError('stream_options: an object, with "stream": true, is needed.', param="stream_options")
    if not isinstance(body.get("stream", False), bool | None):
        raise RequestError("stream: true or false is needed.", param="stream")
    return GenerationRequest(
        prompt=tuple(prompt),
        max_tokens=most,
        sampling=Sampling(
            temperature=_fraction(body, "temperature", 0.0, _MAX_TEMPERATURE),
            top_p=_fraction(body, "top_p", 1e-6, 1.0),
            seed=secrets.randbelow(_SEEDS) if seed is None else seed % _SEEDS,
        ),
        stops=_parse_stops(body.get("stop")),
        streams=bool(body.get("stream")),
        has_usage=bool(options and options.get("include_usage")),
    )


def _fraction(body: Mapping[str, Any], name: str, least: float, most: float) -> float:
    value = body.get(name)
    if value is None:
        return 1.0
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not least <= value <= most
    ):
        raise RequestError(f"{name}: a number from {least:g} to {most:g} is needed.", param=name)
    return float(value)


def _parse_stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return ()
    valid = isinstance(stops, list) and len(stops) <= _MAX_STOPS
    if not valid or not all(isinstance(stop, str) and 0 < len(stop) <= _MAX_STOP for stop in stops):
        raise RequestError(
            f"stop: a text, or up to {_MAX_STOPS} of them, of 1 to {_MAX_STOP} characters is needed.", param="stop"
        )
    return tuple(stops)


def _is_number(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
