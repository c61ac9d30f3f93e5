"""Values as bytes, for their way between the notebook and the ranks.

Functions and classes of `__main__` (a notebook's cells, a script) travel whole; those of modules by name. Tensors
arrive on the CPU: the sender's GPU is not the receiver's.
"""

from __future__ import annotations

import inspect
import io
import pickle
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

#: Most that one file of an exchange may have.
MOST_BYTES = 2 * 1024**3
#: How deep the reason for a refusal is looked for.
_DEPTH = 4


class CannotPickle(Exception):
    """A value cannot be sent; the text says which part of it, and why."""


class TooLarge(Exception):
    """The values have more than MOST_BYTES."""


def dump(value: Any, name: str, *, rename: Callable[[str], str | None] | None = None) -> bytes:
    """`value` as bytes. `name` is what a person calls it.

    `rename` may give code another file name, such as a cell's; None leaves it. Raises CannotPickle and TooLarge.
    """
    buffer = _Limited()
    try:
        _pickler(buffer, rename).dump(value)
    except TooLarge:
        raise
    except Exception as error:
        path, reason = _culprit(value, name, error, _DEPTH)
        raise CannotPickle(f"{path} cannot be pickled: {_first_line(reason)}") from error
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """The value in `data`; raises whatever reading it raises."""
    return _Unpickler(io.BytesIO(data)).load()


class _Limited(io.BytesIO):
    """Memory that takes MOST_BYTES."""

    def write(self, data: Any, /) -> int:
        if self.tell() + memoryview(data).nbytes > MOST_BYTES:
            raise TooLarge
        return super().write(data)


def load_told(data: bytes | None, what: str, problems: list[str]) -> Any:
    """A rank's value; None where there is none, or where it cannot be read here, which is added to `problems`."""
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
    # Only here: a rank that brings nothing back does without it.
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


def _culprit(value: Any, name: str, error: BaseException, depth: int) -> tuple[str, BaseException]:
    """The innermost part of `value` that cannot be pickled, as a person would write it, and why."""
    if depth:
        for part, child in _parts(value, name):
            try:
                _pickler(_Limited(), None).dump(child)
            except TooLarge:
                continue
            except Exception as found:  # noqa: BLE001 - pickling runs anybody's code
                return _culprit(child, part, found, depth - 1)
    return name, error


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.FunctionType):
        used = inspect.getclosurevars(value)
        for part, child in {**used.nonlocals, **used.globals}.items():
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
