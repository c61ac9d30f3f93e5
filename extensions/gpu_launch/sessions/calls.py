"""Calls of functions as bytes: what an executor sends to a worker, what the worker sends back, and the result of both.

Values are pickled by cloudpickle, so that functions of a notebook and lambdas can be called.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpu_launch.common import exchange
from gpu_launch.errors import UsageError
from gpu_launch.units import format_memory


class RemoteTraceback(Exception):
    """The cause of a call's exception: the traceback in the worker."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text

    def __str__(self) -> str:
        return f'\n"""\n{self._text}"""'


def dump_call(function: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bytes:
    """Return a call as bytes.

    Raises:
        CannotPickle: A part of it cannot be pickled.
        UsageError: It is too large.
    """
    return _dump((function, tuple(arguments), dict(keywords)), "the call")


def _dump(value: Any, what: str) -> bytes:
    try:
        return exchange.dump_value(value, what)
    except exchange.TooLarge:
        most = format_memory(exchange.MAX_BYTES // 1024**2)
        raise UsageError(f"{what} has more than {most}; save its data to a file, and pass the path.") from None


def run_call(payload: bytes) -> bytes:
    """Run a call in the worker and return its result, or its exception with the traceback, as bytes."""
    try:
        # A worker has GPUs, so tensors are not moved to the CPU.
        function, arguments, keywords = pickle.loads(payload)  # noqa: S301 - from the user's own notebook
        return _dump((True, function(*arguments, **keywords), ""), "the result")
    except BaseException as error:  # noqa: BLE001 - the worker's outermost edge: the caller gets it
        # Without the frame of this function.
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        return _dump_error(error, "".join(traceback.format_exception(type(error), error, trace)))


def _dump_error(error: BaseException, text: str) -> bytes:
    try:
        data = exchange.dump_value((False, error.with_traceback(None), text), "the exception")
        exchange.load_value(data)
    except Exception:  # noqa: BLE001 - an exception whose constructor needs other arguments, or that cannot be pickled
        return exchange.dump_value((False, RuntimeError(_describe(error)), text), "the exception")
    return data


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - its own text fails: the worker's answer must not
        return f"{type(error).__name__}, whose text cannot be read"


def load_result(data: bytes) -> Any:
    """Return the result in an answer of `run_call`, with its tensors on the CPU.

    Raises:
        BaseException: The exception of the call, with the worker's traceback as its cause.
    """
    has_succeeded, value, text = exchange.load_value(data)
    if not has_succeeded:
        raise value from RemoteTraceback(text)
    return value
