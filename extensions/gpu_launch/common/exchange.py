"""Values that the notebook and the ranks exchange, and their pickles.

The launch's folder `exchange` has `send.pkl` (values by name), `call.pkl` (function, arguments, keyword arguments),
`returns.json` (names of values to return), `sources.json` (the notebook's cells, for tracebacks), and `result-RANK.pkl`
from every rank. The notebook's side of it is here, the ranks' side in `worker.rank_main`.

Functions and classes of `__main__` (a notebook's cells, a script) are sent as code, those of modules by name. Tensors
arrive on the CPU, because the receiver has other GPUs.
"""

from __future__ import annotations

import inspect
import io
import json
import linecache
import pickle
import shutil
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_launch.errors import LaunchFailed, UsageError
from gpu_launch.units import format_memory

SEND, CALL, RETURNS, SOURCES = "send.pkl", "call.pkl", "returns.json", "sources.json"
#: Largest file of an exchange.
MAX_BYTES = 2 * 1024**3
#: Seconds until a result that another node wrote must be visible here.
_VISIBLE_TIMEOUT_S = 5.0
_POLL_S = 0.1
#: Levels searched for the part of a value that cannot be pickled.
_MAX_DEPTH = 4
_TOO_LARGE = (
    f"that is more than {format_memory(MAX_BYTES // 1024**2)} in all. Save it to a file in your home, such as "
    "with torch.save or numpy.save, and let the ranks load it."
)


@dataclass(frozen=True, kw_only=True)
class CellSource:
    """A `%%gpu_launch` cell as shown in the notebook."""

    #: `Cell In[7]`.
    label: str
    #: The whole cell, including the line of the magic.
    source: str
    #: Number of lines before the body.
    skipped: int


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """A function of the notebook that every rank calls."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the function's name for a person."""
        return str(getattr(self.function, "__name__", None) or type(self.function).__name__)


@dataclass(frozen=True, kw_only=True)
class ExchangeFiles:
    """The pickled files. Values that cannot be sent were refused before GPUs are requested."""

    files: Mapping[str, bytes]

    def write(self, folder: Path) -> None:
        """Create the folder, readable by its owner alone, and write the files."""
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)


def build_exchange(
    *,
    send: Mapping[str, Any] | None = None,
    call: FunctionCall | None = None,
    returns: Sequence[str] = (),
    cell: CellSource | None = None,
    labels: Callable[[str], str | None] = lambda filename: None,
) -> ExchangeFiles | None:
    """Return the files to exchange, None if there are none.

    `labels` returns the label of a notebook's cell by the file name of its code.

    Raises:
        UsageError: A value cannot be sent.
    """
    files: dict[str, bytes] = {}
    sources = {} if cell is None else {cell.label: cell.source}

    def rename(filename: str) -> str | None:
        label = labels(filename)
        if label is not None:
            sources.setdefault(label, "".join(linecache.getlines(filename)))
        return label

    if send:
        files[SEND] = _pickle_variables(send, rename)
    if call is not None:
        call_parts = (call.function, call.arguments, dict(call.keywords))
        files[CALL] = _pickle_call(call, call_parts, rename)
    if returns:
        files[RETURNS] = json.dumps(list(returns)).encode()
    if sources:
        cell_info = None if cell is None else {"label": cell.label, "skipped": cell.skipped}
        files[SOURCES] = json.dumps({"cell": cell_info, "sources": sources}).encode()
    return ExchangeFiles(files=files) if files else None


def _pickle_variables(send: Mapping[str, Any], rename: Callable[[str], str | None]) -> bytes:
    # One pickle for all values, so that objects shared by two variables stay shared in the ranks.
    names = ",".join(send)
    try:
        return dump_value(dict(send), names, rename=rename)
    except TooLarge:
        raise UsageError(f"--send {names}: {_TOO_LARGE}") from None
    except CannotPickle:
        for name, value in send.items():
            _check_sendable(f"--send {name}", value, name, rename)
        raise


def _pickle_call(call: FunctionCall, what: Any, rename: Callable[[str], str | None]) -> bytes:
    try:
        return dump_value(what, call.name, rename=rename)
    except TooLarge:
        raise UsageError(f"{call.name} and its arguments: {_TOO_LARGE}") from None
    except CannotPickle:
        _check_sendable("gpu_launch.run", call.function, call.name, rename)
        for index, value in enumerate(call.arguments):
            _check_sendable("gpu_launch.run", value, f"argument {index} of {call.name}", rename)
        for name, value in call.keywords.items():
            _check_sendable("gpu_launch.run", value, f"{name}= of {call.name}", rename)
        raise


def _check_sendable(flag: str, value: Any, name: str, rename: Callable[[str], str | None]) -> None:
    """Refuse a value that cannot be sent."""
    try:
        dump_value(value, name, rename=rename)
    except CannotPickle as error:
        raise UsageError(f"{flag}: {error}. Make it in the script itself, or send what it is made from.") from None
    except TooLarge:
        raise UsageError(f"{flag}: {_TOO_LARGE}") from None


def collect_results(folder: Path, ranks: int) -> tuple[list[Any], dict[str, list[Any]]]:
    """Return the function's results by rank, and the variables by name, then rank.

    The folder is removed unless something is missing, because its content may be large.

    Raises:
        LaunchFailed: A value did not come back, or cannot be read here; the other values stay in the folder.
    """
    names = json.loads((folder / RETURNS).read_text()) if (folder / RETURNS).exists() else []
    has_results = (folder / CALL).exists()
    if not names and not has_results:
        remove_folder(folder)
        return [], {}
    problems: list[str] = []
    files = [_read(folder, rank, problems) for rank in range(ranks)]
    results = [load_result(file.get("result"), f"rank {rank}: result", problems) for rank, file in enumerate(files)]
    returned = {
        name: [
            load_result(file.get("returned", {}).get(name), f"rank {rank}: {name}", problems)
            for rank, file in enumerate(files)
        ]
        for name in names
    }
    if problems:
        lines = "\n".join(dict.fromkeys(problems))
        raise LaunchFailed(f"All ranks ended well, but not all values were returned:\n{lines}\nThe rest is in {folder}")
    remove_folder(folder)
    return (results if has_results else []), returned


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _read(folder: Path, rank: int, problems: list[str]) -> dict[str, Any]:
    """Return one rank's file, and add its problems to the list."""
    data = _wait_for_bytes(folder / f"result-{rank}.pkl")
    if data is None:
        problems.append(f"rank {rank}: no result; did the script end with os._exit?")
        return {}
    # Contains only bytes and text, see `worker.rank_main`: the values inside are unpickled separately.
    result: dict[str, Any] = pickle.loads(data)  # noqa: S301 - the user's own ranks wrote it, in the user's own folder
    problems += [f"rank {rank}: {text}" for text in result["problems"]]
    return result


def _wait_for_bytes(path: Path) -> bytes | None:
    deadline = time.monotonic() + _VISIBLE_TIMEOUT_S
    while True:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                return None
        # Listing a folder makes an NFS client renew its cache of names.
        _ = list(path.parent.iterdir())
        time.sleep(_POLL_S)


def find_missing(names: Iterable[str], namespace: Mapping[str, Any]) -> list[str]:
    """Return those of `names` that the notebook does not have."""
    return [name for name in names if name not in namespace]


class CannotPickle(Exception):
    """A value cannot be sent; the text names the part and the reason."""


class TooLarge(Exception):
    """The values are larger than MAX_BYTES."""


def dump_value(value: Any, name: str, *, rename: Callable[[str], str | None] | None = None) -> bytes:
    """Pickle `value`.

    Args:
        value: Any value.
        name: The value's name in error texts.
        rename: Returns another file name for code, such as a cell's label; None keeps the file name.

    Raises:
        CannotPickle: A part of the value cannot be pickled.
        TooLarge: The pickle is larger than MAX_BYTES.
    """
    buffer = LimitedBuffer()
    dump_into(buffer, value, name, rename=rename)
    return buffer.getvalue()


def dump_into(
    buffer: io.RawIOBase | io.BufferedIOBase,
    value: Any,
    name: str,
    *,
    rename: Callable[[str], str | None] | None = None,
    reduce: Callable[[Any, Any], Any] | None = None,
) -> None:
    """Pickle `value` into `buffer`, whose `write` may raise TooLarge.

    Args:
        buffer: Takes the bytes.
        value: Any value.
        name: The value's name in error texts.
        rename: As for `dump_value`.
        reduce: Gets an object and cloudpickle's reduced value of it, and returns the one to use. It is not called for
            exact builtin types.

    Raises:
        CannotPickle: A part of the value cannot be pickled.
    """
    try:
        build_pickler(buffer, rename, reduce).dump(value)
    except TooLarge:
        raise
    except Exception as error:
        path, reason = _find_culprit(value, name, error, _MAX_DEPTH)
        raise CannotPickle(f"{path} cannot be pickled: {_first_line(reason)}") from error


def load_value(data: bytes) -> Any:
    """Unpickle a value; any exception of the value's code passes through."""
    return Unpickler(io.BytesIO(data)).load()


class LimitedBuffer(io.BytesIO):
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
        return load_value(data)
    except Exception as error:  # noqa: BLE001 - unpickling runs code of others
        problems.append(
            f"{what} cannot be read here ({type(error).__name__}: {error}); "
            "return plain values, arrays or a state_dict instead"
        )
        return None


def build_pickler(
    buffer: io.RawIOBase | io.BufferedIOBase,
    rename: Callable[[str], str | None] | None,
    reduce: Callable[[Any, Any], Any] | None = None,
) -> Any:
    """Return cloudpickle's pickler with these changes, see `dump_into`."""
    # Imported here because a rank that returns no values does not need it.
    import cloudpickle  # type: ignore[import-untyped]

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if rename is not None and isinstance(obj, types.CodeType):
                name = rename(obj.co_filename)
                if name is not None:
                    return self.dispatch_table[types.CodeType](obj.replace(co_filename=name))
            reduced = super().reducer_override(obj)
            return reduced if reduce is None else reduce(obj, reduced)

    return Pickler(buffer)


class Unpickler(pickle.Unpickler):
    """Reads what `dump_value` wrote; tensors arrive on the CPU."""

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
                build_pickler(LimitedBuffer(), None).dump(child)
            except TooLarge:
                continue
            except Exception as child_error:  # noqa: BLE001 - pickling runs code of others
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
