"""The broker's problem documents as errors for users."""

from __future__ import annotations

import json
import urllib.parse

from gpu_launch.errors import BrokerError

#: Codes of problems whose text says all that the hub's page about them does.
_PLAIN_CODES = frozenset(
    {
        "conflict",
        "error",
        "invalid-request",
        "malformed-request",
        "method-not-allowed",
        "no-route",
        "not-allowed",
        "not-found",
        "not-known",
        "too-many-requests",
        "too-slow",
    }
)


def build_error(status: int, body: bytes, hub_url: str, retry_after: str | None = None) -> BrokerError:
    """Return the error of a problem document.

    Args:
        hub_url: An address of the hub for browsers; empty if it is not known.
        retry_after: The header of this name.
    """
    return BrokerError(
        parse_problem(status, body),
        status=status,
        retry_after_s=_parse_retry_after(body, retry_after),
        help_url=_find_help(body, hub_url),
    )


def _find_help(body: bytes, hub_url: str) -> str:
    try:
        problem = json.loads(body)
        code, page = problem["code"], str(problem["type"])
    except (ValueError, KeyError, TypeError):
        return ""
    has_page = hub_url and page.startswith("/hub/") and code not in _PLAIN_CODES
    return urllib.parse.urljoin(hub_url, page) if has_page else ""


def parse_problem(status: int, body: bytes) -> str:
    """Return the text for the user in a problem document, or a line about the status for any other body."""
    try:
        detail = json.loads(body)["detail"]
    except (ValueError, KeyError, TypeError):
        return f"The broker answered with HTTP status {status}."
    return str(detail)


def _parse_retry_after(body: bytes, header: str | None) -> float | None:
    """Return when a request that came too soon is accepted, seconds; None if it was refused for another reason."""
    try:
        is_too_soon = json.loads(body)["code"] == "too-many-requests"
    except (ValueError, KeyError, TypeError):
        is_too_soon = False
    return float(header) if is_too_soon and header is not None and header.isdecimal() else None
