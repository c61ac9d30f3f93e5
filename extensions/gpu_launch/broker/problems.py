"""The broker's problem documents as errors for users."""

from __future__ import annotations

import json
import re
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
#: The options of `gpu-launch run` and the magics for the fields of job requests.
OPTIONS = {
    "after": "--after",
    "cpus": "--cpus",
    "cpus_or_more": "--cpus",
    "exclusive": "--exclusive",
    "gpus": "--gpus",
    "guests": "--guests",
    "image": "--image",
    "least_memory_mib": "--memory",
    "max_retries": "--retry",
    "max_running": "--array",
    "min_nnodes": "--nnodes",
    "models": "--model",
    "name": "--name",
    "nnodes": "--nnodes",
    "nproc_per_node": "--nproc-per-node",
    "port": "--port",
    "port_users": "--allow-user",
    "priority": "--priority",
    "profile": "--profile",
    "ram_mib": "--ram",
    "ram_mib_or_more": "--ram",
    "same_model": "--same-model",
    "scavenge": "--scavenge",
    "shm_mib": "--shm",
    "sleeps": "--sleep",
    "stage": "--stage",
    "time_limit_s": "--time-limit",
}
#: The fields at the start of a message, such as `after, max_retries: ` or `job.models.0: `.
_SUBJECT = re.compile(r"(?:job\.)?[a-z_]+(?:\.\d+)?(?:, [a-z_]+)*: ")
#: A field within a message: a word that is no English one.
_FIELD = re.compile(r"\b(?:nnodes|[a-z]+(?:_[a-z]+)+)\b")


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


def name_options(text: str) -> str:
    """Return why a job was refused, with the options that users type instead of the request's fields."""
    return "; ".join(_name_options(part) for part in text.split("; "))


def _name_options(message: str) -> str:
    subject = _SUBJECT.match(message)
    if subject is not None:
        fields = re.findall(r"[a-z_]+", subject[0].removeprefix("job."))
        named = dict.fromkeys(OPTIONS.get(field, field) for field in fields)
        message = f"{', '.join(named)}: {message[subject.end() :]}"
    return _FIELD.sub(lambda field: OPTIONS.get(field[0], field[0]), message)


def _parse_retry_after(body: bytes, header: str | None) -> float | None:
    """Return when a request that came too soon is accepted, seconds; None if it was refused for another reason."""
    try:
        is_too_soon = json.loads(body)["code"] == "too-many-requests"
    except (ValueError, KeyError, TypeError):
        is_too_soon = False
    return float(header) if is_too_soon and header is not None and header.isdecimal() else None
