"""Every error as a problem document (RFC 9457): the only place that knows HTTP statuses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gpuhub import errors
from gpuhub.broker import refusals
from gpuhub.broker.schemas import Problem

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
_RETRY_AFTER_S = 5

#: The most specific class that fits counts.
_STATUSES: tuple[tuple[type[errors.GpuhubError], int], ...] = (
    (refusals.NotKnown, 401),
    (refusals.TooManyWaiting, 429),
    (errors.NotAllowed, 403),
    (errors.InvalidRequest, 422),
    (errors.NotFound, 404),
    (errors.Conflict, 409),
    (errors.Unavailable, 503),
    (errors.ImageMissing, 503),
)


def status_of(error: errors.GpuhubError) -> int:
    """The HTTP status of an expected error."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def build_problem(status: int, detail: str, code: str) -> Problem:
    """The document."""
    return Problem(
        type=f"urn:gpuhub:problem:{code}",
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        code=code,
    )


def build_response(status: int, detail: str, code: str) -> JSONResponse:
    """The document as an answer, with the headers that belong to its status."""
    headers = {}
    if status in {429, 503}:
        headers["Retry-After"] = str(_RETRY_AFTER_S)
    if status == 401:
        headers["WWW-Authenticate"] = "token"
    return JSONResponse(
        build_problem(status, detail, code).model_dump(), status, headers=headers, media_type=MEDIA_TYPE
    )


def describe_validation(mistakes: Sequence[Any]) -> str:
    """One line: each wrong field with what is wrong, such as `nnodes: Input should be greater than or equal to 1`."""
    parts = []
    for mistake in mistakes[:5]:
        where = ".".join(str(part) for part in mistake["loc"] if part not in {"body", "query", "path"})
        parts.append(f"{where or 'the body'}: {mistake['msg']}")
    if len(mistakes) > 5:
        parts.append(f"and {len(mistakes) - 5} more")
    return "; ".join(parts)


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For OpenAPI: which problem documents a route may answer with, besides those that every route has."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": schema}}}
        for status in sorted({401, 403, 503, *statuses})
    }


def install(app: FastAPI) -> None:
    """Answer every error of the app with a problem document."""

    @app.exception_handler(errors.GpuhubError)
    async def _expected(request: Request, error: errors.GpuhubError) -> JSONResponse:
        status = status_of(error)
        if status >= 500:
            log.warning("%s %s: %s", request.method, request.url.path, error)
        return build_response(status, str(error), error.code)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return build_response(422, describe_validation(error.errors()), errors.InvalidRequest.code)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        detail = f"{request.method} {request.url.path}: {HTTPStatus(error.status_code).phrase.lower()}"
        return build_response(error.status_code, detail, f"http-{error.status_code}")

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return build_response(500, "the broker failed; its log says why", "internal")
