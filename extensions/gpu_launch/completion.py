"""Tab completion of the magics' lines: flags, what they take, files, runs.

Through IPython's own matchers, whether it uses jedi or not: JupyterLab asks those.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_launch import flags
from gpu_launch.standing import words as standing_words

_LINE = re.compile(r"\s*%%?(gpu_\w+)\s(.*)", re.DOTALL)
_STREAMS = ("0", "1", "2", "3")
_SPANS = ("10m", "30m", "1h", "4h", "1d")
#: What flags take, where it can be listed.
_FIXED = {
    "tee": _STREAMS,
    "redirects": _STREAMS,
    "keep": ("0s", *_SPANS),
    "time-limit": _SPANS,
    "memory": ("8G", "12G", "16G", "24G", "32G", "48G", "80G"),
    "numa-binding": ("node", "socket", "exclusive", "core-complex"),
    "nnodes": (),
}
_LAUNCH_FLAGS = (*flags.OURS, *flags.PASSED)
_RANKS_FLAGS = tuple(
    name for name in ("ranks", "restart", "stop", *_LAUNCH_FLAGS) if f"--{name}" in standing_words.USAGE
)
_SWITCHES = flags.SWITCHES | {"restart", "stop"}
_LOG_FLAGS = ("--rank", "-f", "-n")
_MOST = 200
#: How long the cluster's models are remembered, and how long a first answer is waited for, seconds.
_REMEMBERED_S, _WAIT_S = 30.0, 1.0


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where names come from; called only when they are needed."""

    models: Callable[[], Sequence[str]]
    #: The notebook's variables.
    names: Callable[[], Iterable[str]]
    #: Ids of runs with logs, and of jobs that can be cancelled or released.
    runs: Callable[[], Iterable[str]]
    jobs: Callable[[], Iterable[str]]
    folder: Callable[[], Path]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the text before the cursor could become."""

    #: The end of the text that is replaced.
    fragment: str
    texts: tuple[str, ...]


def find(text: str, sources: Sources) -> Found | None:
    """Completions for a line up to the cursor; None where it is no line of ours."""
    match = _LINE.fullmatch(text)
    if match is None:
        return None
    words, fragment = split(match[2])
    match match[1]:
        case "gpu_launch":
            return _launch(words, fragment, sources, _LAUNCH_FLAGS, has_script=not text.lstrip().startswith("%%"))
        case "gpu_ranks":
            return _launch(words, fragment, sources, _RANKS_FLAGS, has_script=False)
        case "gpu_logs":
            is_flag = fragment.startswith("-")
            return _of(fragment, _LOG_FLAGS if is_flag else () if _expects(words, _LOG_FLAGS[::2]) else sources.runs())
        case "gpu_cancel" | "gpu_release":
            every = ["all"] if match[1] == "gpu_cancel" else []
            return _of(fragment, [*every, *sources.jobs()])
    return None


def split(text: str) -> tuple[list[str], str]:
    """Whole words, and the one that the cursor is in, as it was typed: a quoted one with its quote."""
    words: list[str] = []
    start, quote = 0, ""
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character.isspace():
            words.append(text[start:index])
            start = index + 1
    return [word for word in words if word], text[start:]


def _launch(words: list[str], fragment: str, sources: Sources, names: Sequence[str], *, has_script: bool) -> Found:
    pending = ""
    for word in words:
        if pending:
            pending = ""
        elif not word.startswith("-") or word == "--":
            # The script is named already: what follows is its own.
            return _paths(fragment, sources.folder())
        else:
            name = _name(word.partition("=")[0])
            pending = "" if "=" in word or name in _SWITCHES else name
    if pending:
        return _values(pending, fragment, sources)
    flag, equals, value = fragment.partition("=")
    if fragment.startswith("-") and equals:
        return _values(_name(flag), value, sources)
    if fragment.startswith("-") or not has_script:
        return _of(fragment, [f"--{name}" for name in names])
    return _paths(fragment, sources.folder(), endings=(".py",))


def _name(flag: str) -> str:
    return flags.SHORT.get(flag) or flag.removeprefix("--").replace("_", "-")


def _expects(words: list[str], valued: Sequence[str]) -> bool:
    return bool(words) and words[-1] in valued


def _values(name: str, value: str, sources: Sources) -> Found:
    match name:
        case "model":
            return _models(value, sources.models())
        case "send" | "return":
            last = value.rpartition(",")[2]
            return _of(last, [text for text in sources.names() if not text.startswith("_")])
        case "log-dir":
            return _paths(value, sources.folder(), endings=())
    return _of(value, _FIXED.get(name, ()))


def _models(value: str, models: Sequence[str]) -> Found:
    """One of several in a list, in one pair of quotes where a name has a space."""
    quote, bare = (value[0], value[1:]) if value[:1] in ("'", '"') else ("", value)
    before, comma, last = bare.rpartition(",")
    wanted = last.strip().casefold()
    texts = []
    for model in models:
        if model.casefold().startswith(wanted):
            whole = f"{before}{comma}{model}"
            mark = quote or ('"' if " " in whole else "")
            texts.append(f"{mark}{whole}{mark}")
    return Found(fragment=value, texts=tuple(texts))


def _paths(fragment: str, cwd: Path, endings: tuple[str, ...] | None = None) -> Found:
    """Folders, and files with one of `endings` (None for all) below what was typed."""
    quote, bare = (fragment[0], fragment[1:]) if fragment[:1] in ("'", '"') else ("", fragment)
    before, slash, last = bare.rpartition("/")
    folder = cwd / Path(before + slash).expanduser() if slash else cwd
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        entries = []
    texts = []
    for entry in entries:
        is_folder = entry.is_dir()
        is_wanted = is_folder or endings is None or entry.suffix in endings
        if entry.name.startswith(last) and is_wanted and (last or not entry.name.startswith(".")):
            name = f"{before}{slash}{entry.name}{'/' if is_folder else ''}"
            mark = quote or ('"' if re.search(r"[\s'\\;&()$]", name) else "")
            texts.append(f"{mark}{name}{'' if is_folder else mark}")
    return Found(fragment=fragment, texts=tuple(texts[:_MOST]))


def _of(fragment: str, texts: Iterable[str]) -> Found:
    return Found(fragment=fragment, texts=tuple(text for text in texts if text.startswith(fragment))[:_MOST])


class Remembered:
    """The answer of a slow call, for some seconds. Nobody waits long: until there is an answer it is empty."""

    def __init__(self, ask: Callable[[], Sequence[str]], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._clock = ask, clock
        self._answer: Sequence[str] = ()
        self._until = 0.0
        self._asking: threading.Thread | None = None

    def get(self) -> Sequence[str]:
        """The answer as it is known."""
        if self._clock() >= self._until and (self._asking is None or not self._asking.is_alive()):
            self._asking = threading.Thread(target=self._renew, name="gpu_launch completion", daemon=True)
            self._asking.start()
        if self._asking is not None and not self._answer:
            self._asking.join(_WAIT_S)
        return self._answer

    def _renew(self) -> None:
        try:
            self._answer = self._ask()
        except Exception:  # noqa: BLE001 - a key was pressed: without an answer nothing is completed
            self._answer = ()
        self._until = self._clock() + _REMEMBERED_S


def install(shell: Any, sources: Sources) -> None:
    """Have `shell` complete lines of ours."""
    from IPython.core.completer import SimpleCompletion, context_matcher

    @context_matcher(identifier="gpu_launch")  # type: ignore[untyped-decorator]
    def match(context: Any) -> dict[str, Any]:
        found = find(context.text_until_cursor, sources)
        if found is None:
            return {"completions": []}
        kind = "path" if any("/" in text for text in found.texts) else "magic"
        return {
            "completions": [SimpleCompletion(text=text, type=kind) for text in found.texts],
            "matched_fragment": found.fragment,
            "suppress": True,
            "ordered": True,
        }

    matchers = shell.Completer.custom_matchers
    matchers[:] = [other for other in matchers if getattr(other, "matcher_identifier", "") != "gpu_launch"]
    matchers.append(match)
