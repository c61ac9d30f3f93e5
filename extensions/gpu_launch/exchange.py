"""What goes from the notebook into the ranks, and what comes back: the notebook's side; `ranks.script` is the other.

In the launch's `exchange` folder: `send.pkl` (values by name), `call.pkl` (function, arguments, keyword arguments),
`returns.json` (names that come back), `sources.json` (the notebook's cells, for tracebacks), and from every rank
`result-RANK.pkl`.
"""

from __future__ import annotations

import json
import linecache
import pickle
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_launch import pickles
from gpu_launch.errors import LaunchFailed, UsageError
from gpu_launch.quantities import format_memory

SEND, CALL, RETURNS, SOURCES = "send.pkl", "call.pkl", "returns.json", "sources.json"
#: How long a result that another node wrote may take to be seen here, seconds.
_SEEN_S = 5.0
_LOOK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class CellText:
    """A `%%gpu_launch` cell as the notebook shows it."""

    #: `Cell In[7]`.
    label: str
    #: The whole cell, the magic's own line among it.
    source: str
    #: Lines before the body.
    skipped: int


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function of the notebook that every rank calls."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As a person calls it."""
        return str(getattr(self.function, "__name__", None) or type(self.function).__name__)


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Everything pickled already, so that what cannot be sent is refused before anything is asked for."""

    files: Mapping[str, bytes]

    def write(self, folder: Path) -> None:
        """Make the folder, for its owner alone, and fill it."""
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)


def build(
    *,
    send: Mapping[str, Any] | None = None,
    call: Call | None = None,
    returns: Sequence[str] = (),
    cell: CellText | None = None,
    labels: Callable[[str], str | None] = lambda filename: None,
) -> Exchange | None:
    """What is to be exchanged; None for nothing. `labels` names the notebook's cell by its code's file name.

    Raises UsageError for values that cannot be sent.
    """
    files: dict[str, bytes] = {}
    sources = {} if cell is None else {cell.label: cell.source}

    def rename(filename: str) -> str | None:
        label = labels(filename)
        if label is not None:
            sources.setdefault(label, "".join(linecache.getlines(filename)))
        return label

    if send:
        files[SEND] = _sent(send, rename)
    if call is not None:
        what = (call.function, call.arguments, dict(call.keywords))
        files[CALL] = _called(call, what, rename)
    if returns:
        files[RETURNS] = json.dumps(list(returns)).encode()
    if sources:
        told = None if cell is None else {"label": cell.label, "skipped": cell.skipped}
        files[SOURCES] = json.dumps({"cell": told, "sources": sources}).encode()
    return Exchange(files=files) if files else None


def _sent(send: Mapping[str, Any], rename: Callable[[str], str | None]) -> bytes:
    # One pickle for all, so that what two variables share is shared in the ranks too.
    names = ",".join(send)
    try:
        return pickles.dump(dict(send), names, rename=rename)
    except pickles.TooLarge:
        raise UsageError(f"--send {names}: {_TOO_LARGE}") from None
    except pickles.CannotPickle:
        for name, value in send.items():
            _try(f"--send {name}", value, name, rename)
        raise


def _called(call: Call, what: Any, rename: Callable[[str], str | None]) -> bytes:
    try:
        return pickles.dump(what, call.name, rename=rename)
    except pickles.TooLarge:
        raise UsageError(f"{call.name} and its arguments: {_TOO_LARGE}") from None
    except pickles.CannotPickle:
        _try("gpu_launch.run", call.function, call.name, rename)
        for index, value in enumerate(call.arguments):
            _try("gpu_launch.run", value, f"argument {index} of {call.name}", rename)
        for name, value in call.keywords.items():
            _try("gpu_launch.run", value, f"{name}= of {call.name}", rename)
        raise


def _try(flag: str, value: Any, name: str, rename: Callable[[str], str | None]) -> None:
    """Refuse the value if it cannot be sent."""
    try:
        pickles.dump(value, name, rename=rename)
    except pickles.CannotPickle as error:
        raise UsageError(f"{flag}: {error}. Make it in the script itself, or send what it is made from.") from None
    except pickles.TooLarge:
        raise UsageError(f"{flag}: {_TOO_LARGE}") from None


_TOO_LARGE = (
    f"that is more than {format_memory(pickles.MOST_BYTES // 1024**2)} in all. Save it to a file in your home, such as "
    "with torch.save or numpy.save, and let the ranks load it."
)


def collect(folder: Path, ranks: int) -> tuple[list[Any], dict[str, list[Any]]]:
    """What ranks 0 to `ranks` - 1 brought back: the function's results by rank, and the variables by name, then rank.

    Raises LaunchFailed where something did not come, or cannot be read here; what did come stays in the folder then.
    Otherwise the folder is gone: what may be large is kept once.
    """
    names = json.loads((folder / RETURNS).read_text()) if (folder / RETURNS).exists() else []
    has_results = (folder / CALL).exists()
    if not names and not has_results:
        clear(folder)
        return [], {}
    problems: list[str] = []
    found = [_read(folder, rank, problems) for rank in range(ranks)]
    results = [pickles.load_told(one.get("result"), f"rank {rank}: result", problems) for rank, one in enumerate(found)]
    returned = {
        name: [
            pickles.load_told(one.get("returned", {}).get(name), f"rank {rank}: {name}", problems)
            for rank, one in enumerate(found)
        ]
        for name in names
    }
    if problems:
        lines = "\n".join(dict.fromkeys(problems))
        raise LaunchFailed(f"All ranks ended well, but not everything came back:\n{lines}\nThe rest is in {folder}")
    clear(folder)
    return (results if has_results else []), returned


def clear(folder: Path) -> None:
    """Remove it: nobody needs it any more."""
    shutil.rmtree(folder, ignore_errors=True)


def _read(folder: Path, rank: int, problems: list[str]) -> dict[str, Any]:
    """One rank's file, with its own problems told."""
    data = _bytes_of(folder / f"result-{rank}.pkl")
    if data is None:
        problems.append(f"rank {rank}: nothing came; did the script end with os._exit?")
        return {}
    # Bytes and text only, see `ranks.script`: what may fail is inside.
    told: dict[str, Any] = pickle.loads(data)  # noqa: S301 - the user's own ranks wrote it, in the user's own folder
    problems += [f"rank {rank}: {text}" for text in told["problems"]]
    return told


def _bytes_of(path: Path) -> bytes | None:
    deadline = time.monotonic() + _SEEN_S
    while True:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                return None
        # Listing a folder on NFS has its cache of names renewed.
        _ = list(path.parent.iterdir())
        time.sleep(_LOOK_S)


def missing(names: Iterable[str], namespace: Mapping[str, Any]) -> list[str]:
    """Those of `names` that the notebook does not have."""
    return [name for name in names if name not in namespace]
