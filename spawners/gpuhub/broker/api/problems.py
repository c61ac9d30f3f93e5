"""Problem documents (RFC 9457) for all errors; HTTP statuses of errors are assigned here alone.

The field `code` is stable, for programs; `detail` is a text for people. `CODES` lists all codes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gpuhub.broker_api import errors as refusals
from gpuhub.broker_api.schemas import Problem
from gpuhub.common import errors

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
#: The hub's page on errors; each code is an anchor of it.
HELP_PAGE = "/hub/gpuhub/troubleshooting"
_RETRY_AFTER_S = 5

#: Code of a request that violates the schema: a mistake of the program, while `invalid-request` is one of the user.
MALFORMED = "malformed-request"
TOO_LARGE = refusals.SizeLimitExceeded.code
INTERNAL = "internal"
NO_ROUTE = "no-route"
METHOD_NOT_ALLOWED = "method-not-allowed"
#: Codes of errors that Starlette and FastAPI raise.
_BY_STATUS = {404: NO_ROUTE, 405: METHOD_NOT_ALLOWED}

#: HTTP status of each class of errors; the first class that matches counts.
_STATUSES: tuple[tuple[type[errors.GpuhubError], int], ...] = (
    (refusals.NotKnown, 401),
    (refusals.TooManyJobs, 429),
    (refusals.TooManyWaiting, 429),
    (refusals.TooManyStreams, 429),
    (refusals.TooManyRequests, 429),
    (refusals.TooSlow, 408),
    (errors.NotAllowed, 403),
    (refusals.SizeLimitExceeded, 413),
    (refusals.NoSpace, 507),
    (errors.InvalidRequest, 422),
    (errors.NotFound, 404),
    (errors.Conflict, 409),
    (errors.Unavailable, 503),
    (errors.ImageMissing, 503),
)

#: Every code in a problem document, with its HTTP status.
CODES: Mapping[str, int] = {
    **{kind.code: status for kind, status in reversed(_STATUSES)},
    errors.NodeUnreachable.code: 503,
    errors.BrokerUnreachable.code: 503,
    errors.StorageUnavailable.code: 503,
    refusals.HubUnreachable.code: 503,
    MALFORMED: 422,
    NO_ROUTE: 404,
    METHOD_NOT_ALLOWED: 405,
    TOO_LARGE: 413,
    INTERNAL: 500,
    errors.GpuhubError.code: 500,
}


def http_status(error: errors.GpuhubError) -> int:
    """Return the HTTP status of an expected error."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def build_problem(status: int, detail: str, code: str) -> Problem:
    """Return the problem document."""
    return Problem(
        type=f"{HELP_PAGE}#{code}",
        title=HTTPStatus(status).phrase,
        status=status,
        # It may contain text from the request: half of a surrogate pair is valid JSON, but not valid UTF-8.
        detail=detail.encode("utf-8", "replace").decode("utf-8"),
        code=code,
    )


def build_response(status: int, detail: str, code: str, more: Mapping[str, str] | None = None) -> JSONResponse:
    """Return the problem document as a response, with the headers of its status."""
    headers = dict(more or {})
    if status in {429, 503}:
        headers.setdefault("Retry-After", str(_RETRY_AFTER_S))
    if status == 401:
        headers["WWW-Authenticate"] = "token"
    return JSONResponse(
        build_problem(status, detail, code).model_dump(), status, headers=headers, media_type=MEDIA_TYPE
    )


def _build_headers(error: errors.GpuhubError) -> dict[str, str]:
    if isinstance(error, refusals.TooManyRequests) and error.retry_after_s is not None:
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    return {}


def describe_validation(mistakes: Sequence[Any]) -> str:
    """Return one line with the mistake of each field, such as `nnodes: Input should be greater than or equal to 1`."""
    parts = []
    for mistake in mistakes[:5]:
        place, *field = mistake["loc"]
        where = ".".join(str(part) for part in (field if place in {"body", "query", "path"} else mistake["loc"]))
        parts.append(f"{where or 'the body'}: {mistake['msg']}")
    if len(mistakes) > 5:
        parts.append(f"and {len(mistakes) - 5} more")
    return "; ".join(parts)


def document_problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's description of a route's problem documents: those of `statuses`, and those of every route."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": schema}}}
        for status in sorted({401, 403, 429, 503, *statuses})
    }


def install(app: FastAPI) -> None:
    """Install handlers that answer every error of the app with a problem document."""

    @app.exception_handler(errors.GpuhubError)
    async def _expected(request: Request, error: errors.GpuhubError) -> JSONResponse:
        status = http_status(error)
        if status >= 500:
            log.warning("%s %s: %s", request.method, request.url.path, error)
        return build_response(status, str(error), error.code, _build_headers(error))

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return build_response(422, describe_validation(error.errors()), MALFORMED)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        status = error.status_code
        if status == 400:
            # FastAPI raises it for a body that is not text.
            return build_response(422, "the body: it is not JSON", MALFORMED)
        detail = f"{request.method} {request.url.path}: {HTTPStatus(status).phrase.lower()}"
        return build_response(status, detail, _BY_STATUS.get(status, INTERNAL), error.headers)

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return build_response(500, "the broker failed; its log has the reason", INTERNAL)
