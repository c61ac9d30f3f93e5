"""Pickles values that are sent between the notebook and the ranks.

Functions and classes of `__main__` (a notebook's cells, a script) are sent as code, those of modules by name. Tensors
arrive on the CPU, because the receiver has other GPUs.
"""

from __future__ import annotations

import inspect
import io
import pickle
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

#: Largest file of an exchange.
MAX_BYTES = 2 * 1024**3
#: Levels searched for the part of a value that cannot be pickled.
_MAX_DEPTH = 4


class CannotPickle(Exception):
    """A value cannot be sent; the text names the part and the reason."""


class TooLarge(Exception):
    """The values are larger than MAX_BYTES."""


def dump(value: Any, name: str, *, rename: Callable[[str], str | None] | None = None) -> bytes:
    """Pickle `value`.

    Args:
        value: Any value.
        name: The value's name in error texts.
        rename: Returns another file name for code, such as a cell's label; None keeps the file name.

    Raises:
        CannotPickle: A part of the value cannot be pickled.
        TooLarge: The pickle is larger than MAX_BYTES.
    """
    buffer = _LimitedBuffer()
    try:
        _pickler(buffer, rename).dump(value)
    except TooLarge:
        raise
    except Exception as error:
        path, reason = _find_culprit(value, name, error, _MAX_DEPTH)
        raise CannotPickle(f"{path} cannot be pickled: {_first_line(reason)}") from error
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """Unpickle a value; any exception of the value's code passes through."""
    return _Unpickler(io.BytesIO(data)).load()


class _LimitedBuffer(io.BytesIO):
    """A buffer of at most MAX_BYTES."""

    def write(self, data: Any, /) -> int:
        if self.tell() + memoryview(data).nbytes > MAX_BYTES:
            raise TooLarge
        return super().write(data)


def load_result(data: bytes | None, what: str, problems: list[str]) -> Any:
    """Unpickle a rank's value; return None if there is none or it cannot be read here, which is added to `problems`."""
    if not data:
        return None
    try:
        return load(data)
    except Exception as error:  # noqa: BLE001 - unpickling runs anybody's code
        problems.append(
            f"{what} cannot be read here ({type(error).__name__}: {error}); "
            "return plain values, arrays or a state_dict instead"
        )
        return None


def _pickler(buffer: io.BytesIO, rename: Callable[[str], str | None] | None) -> Any:
    # Imported here because a rank that returns no values does not need it.
    import cloudpickle  # type: ignore[import-untyped]

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if rename is not None and isinstance(obj, types.CodeType):
                name = rename(obj.co_filename)
                if name is not None:
                    return self.dispatch_table[types.CodeType](obj.replace(co_filename=name))
            return super().reducer_override(obj)

    return Pickler(buffer)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_on_cpu
        return super().find_class(module, name)


def _load_on_cpu(data: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _find_culprit(value: Any, name: str, error: BaseException, depth: int) -> tuple[str, BaseException]:
    """Return the innermost part of `value` that cannot be pickled, and the reason."""
    if depth:
        for part, child in _iter_parts(value, name):
            try:
                _pickler(_LimitedBuffer(), None).dump(child)
            except TooLarge:
                continue
            except Exception as child_error:  # noqa: BLE001 - pickling runs anybody's code
                return _find_culprit(child, part, child_error, depth - 1)
    return name, error


def _iter_parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.FunctionType):
        closure = inspect.getclosurevars(value)
        for part, child in {**closure.nonlocals, **closure.globals}.items():
            yield f"{part}, which {name} uses,", child
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield f"{name}[{key!r}]", child
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield f"{name}[{index}]", child
    elif not isinstance(value, (type, types.ModuleType)):
        for attribute, child in getattr(value, "__dict__", {}).items():
            yield f"{name}.{attribute}", child


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
