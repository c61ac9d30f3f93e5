"""A limit of the answers of a Docker daemon that is not trusted, as a guest's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import requests

#: Maximum length of an answer to a call without a stream, bytes; a node with hundreds of containers sends less than 1
#: MiB.
MAX_ANSWER = 8 * 1024**2


class _LimitedBody:
    """The body of an answer, which fails after `limit` bytes."""

    def __init__(self, raw: Any, limit: int) -> None:
        self._raw, self._limit = raw, limit

    def stream(self, amount: int, *, decode_content: bool = True) -> Iterator[bytes]:
        left = self._limit
        for part in self._raw.stream(min(amount, 65536), decode_content=decode_content):
            left -= len(part)
            if left < 0:
                raise requests.exceptions.ConnectionError(f"it sent an answer of more than {self._limit} bytes")
            yield part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def limit_answers(client: Any, limit: int = MAX_ANSWER) -> None:
    """Let calls of a docker-py client fail whose answer is longer; callers bound the streams that they read."""
    adapter = client.get_adapter(client.base_url)
    send = adapter.send

    def send_limited(request: Any, stream: bool = False, **options: Any) -> Any:
        response = send(request, stream=stream, **options)
        if not stream:
            response.raw = _LimitedBody(response.raw, limit)
        return response

    adapter.send = send_limited
