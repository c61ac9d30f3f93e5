"""A spawn that fails on purpose, with a text for the person who waits for it."""

from __future__ import annotations

import html

from jupyterhub.spawner import SpawnException

from gpuhub.errors import (
    Conflict,
    GpuhubError,
    ImageMissing,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Unavailable,
)

_STATUS: tuple[tuple[type[GpuhubError], int], ...] = (
    (InvalidRequest, 400),
    (NotAllowed, 403),
    (NotFound, 404),
    (Conflict, 409),
    (Unavailable, 503),
    (ImageMissing, 503),
)


class SpawnFailed(SpawnException):  # type: ignore[misc] # JupyterHub is untyped
    """The notebook cannot be started; `text` is shown on every page and in the REST answer."""

    def __init__(self, text: str, *, reason: str, status_code: int = 400) -> None:
        super().__init__(text, reason=reason, message_html=to_html(text), status_code=status_code)
        # JupyterHub's pages and progress events read these two, and not what SpawnException has.
        self.jupyterhub_message = text
        self.jupyterhub_html_message = to_html(text)

    @classmethod
    def from_error(cls, error: GpuhubError) -> SpawnFailed:
        """The same text, with the HTTP status that fits."""
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
        return cls(str(error), reason=error.code, status_code=status)


def to_html(text: str) -> str:
    """Escaped, one line under the other."""
    return "<br>".join(html.escape(line) for line in text.splitlines())
