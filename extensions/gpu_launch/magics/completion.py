"""Tab completion of the magics' lines: flags, their values, files and runs.

It is one of IPython's own matchers, which work with jedi and without: JupyterLab asks those.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_launch.options import definition, gpu_cell, rank_session
from gpu_launch.options.option import LaunchOption

_LINE = re.compile(r"\s*%%?(gpu(?:_\w+)?)\s(.*)", re.DOTALL)
_LAUNCH_LABELS = tuple(option.label for option in definition.OPTIONS)
_BENCH_LABELS = tuple(option.label for option in definition.BENCH_OPTIONS)
_OPTION_BY_FLAG = {flag: option for option in definition.OPTIONS for flag in option.opts}
_LOG_FLAGS = ("--rank", "-f", "-n")
#: No more completions than this are shown.
_MOST = 200
#: Time that the answer of a slow call is kept, seconds.
_REMEMBERED_S = 30.0
#: Maximum time that completion waits for the first answer, seconds.
_WAIT_S = 1.0


@dataclass(frozen=True, kw_only=True)
class CompletionSources:
    """Where names come from; each is called only when its names are needed."""

    models: Callable[[], Sequence[str]]
    #: The notebook's variables.
    names: Callable[[], Iterable[str]]
    #: Ids of runs with logs, and of jobs that can be cancelled or released.
    runs: Callable[[], Iterable[str]]
    jobs: Callable[[], Iterable[str]]
    folder: Callable[[], Path]


@dataclass(frozen=True, kw_only=True)
class Completions:
    """The texts that the end of a line could become."""

    #: The end of the text that is replaced.
    fragment: str
    texts: tuple[str, ...]


def complete(text: str, sources: CompletionSources) -> Completions | None:
    """Return the completions for a line up to the cursor; None where it is not a line of these magics."""
    match = _LINE.fullmatch(text)
    if match is None:
        return None
    words, fragment = split(match[2])
    match match[1]:
        case "gpu_launch":
            return _complete_launch(
                words, fragment, sources, _LAUNCH_LABELS, has_script=not text.lstrip().startswith("%%")
            )
        case "gpu_ranks" | "gpu" | "gpu_bench":
            labels = {"gpu_ranks": rank_session.LABELS, "gpu": gpu_cell.LABELS, "gpu_bench": _BENCH_LABELS}[match[1]]
            return _complete_launch(words, fragment, sources, labels, has_script=False)
        case "gpu_logs":
            is_flag = fragment.startswith("-")
            return _filter(
                fragment, _LOG_FLAGS if is_flag else () if _expects(words, _LOG_FLAGS[::2]) else sources.runs()
            )
        case "gpu_cancel" | "gpu_release" | "gpu_stacks" as magic:
            more = {"gpu_cancel": ["all"], "gpu_stacks": ["--full"]}.get(magic, [])
            return _filter(fragment, [*more, *sources.jobs()])
    return None


def split(text: str) -> tuple[list[str], str]:
    """Return the complete words, and the one that the cursor is in, as it was typed: a quoted one with its quote."""
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


def _complete_launch(
    words: list[str], fragment: str, sources: CompletionSources, labels: Sequence[str], *, has_script: bool
) -> Completions:
    pending = ""
    for word in words:
        if pending:
            pending = ""
        elif not word.startswith("-") or word == "--":
            # The script is named already: what follows is its own.
            return _complete_path(fragment, sources.folder())
        else:
            flag = word.partition("=")[0]
            pending = "" if "=" in word or not _takes_value(flag) else flag
    if pending:
        return _complete_value(pending, fragment, sources)
    flag, equals, value = fragment.partition("=")
    if fragment.startswith("-") and equals:
        return _complete_value(flag, value, sources)
    if fragment.startswith("-") or not has_script:
        return _filter(fragment, [f"--{label}" for label in labels])
    return _complete_path(fragment, sources.folder(), endings=(".py",))


def _find_option(flag: str) -> LaunchOption | None:
    return _OPTION_BY_FLAG.get(flag.replace("_", "-"))


def _takes_value(flag: str) -> bool:
    option = _find_option(flag)
    return flag not in ("--restart", "--stop") if option is None else not option.is_flag


def _expects(words: list[str], valued: Sequence[str]) -> bool:
    return bool(words) and words[-1] in valued


def _complete_value(flag: str, value: str, sources: CompletionSources) -> Completions:
    option = _find_option(flag)
    match "" if option is None else option.label:
        case "model":
            return _complete_model(value, sources.models())
        case "send" | "return":
            last = value.rpartition(",")[2]
            return _filter(last, [text for text in sources.names() if not text.startswith("_")])
        case "log-dir":
            return _complete_path(value, sources.folder(), endings=())
    return _filter(value, () if option is None else option.completions)


def _complete_model(value: str, models: Sequence[str]) -> Completions:
    """Complete the last of several models, in one pair of quotes where a name has a space."""
    quote, bare = (value[0], value[1:]) if value[:1] in ("'", '"') else ("", value)
    before, comma, last = bare.rpartition(",")
    wanted = last.strip().casefold()
    texts = []
    for model in models:
        if model.casefold().startswith(wanted):
            whole = f"{before}{comma}{model}"
            mark = quote or ('"' if " " in whole else "")
            texts.append(f"{mark}{whole}{mark}")
    return Completions(fragment=value, texts=tuple(texts))


def _complete_path(fragment: str, cwd: Path, endings: tuple[str, ...] | None = None) -> Completions:
    """Return folders, and files with one of `endings` (None for all) below the typed path."""
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
    return Completions(fragment=fragment, texts=tuple(texts[:_MOST]))


def _filter(fragment: str, texts: Iterable[str]) -> Completions:
    return Completions(fragment=fragment, texts=tuple(text for text in texts if text.startswith(fragment))[:_MOST])


class CachedCall:
    """The answer of a slow call, kept for some seconds; empty until the first answer has come."""

    def __init__(self, call: Callable[[], Sequence[str]], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._call, self._clock = call, clock
        self._answer: Sequence[str] = ()
        self._until = 0.0
        self._renewal: threading.Thread | None = None

    def get(self) -> Sequence[str]:
        """Return the last answer, and renew it in the background when it is too old."""
        if self._clock() >= self._until and (self._renewal is None or not self._renewal.is_alive()):
            self._renewal = threading.Thread(target=self._renew, name="gpu_launch completion", daemon=True)
            self._renewal.start()
        if self._renewal is not None and not self._answer:
            self._renewal.join(_WAIT_S)
        return self._answer

    def _renew(self) -> None:
        try:
            answer = self._call()
        except Exception:  # noqa: BLE001 - the user pressed a key: without an answer nothing is completed
            answer = ()
        # Before the answer, which `get` does not wait for when it is there.
        self._until = self._clock() + _REMEMBERED_S
        self._answer = answer


def install(shell: Any, sources: CompletionSources) -> None:
    """Add the completions to `shell`, once."""
    from IPython.core.completer import SimpleCompletion, context_matcher

    @context_matcher(identifier="gpu_launch")  # type: ignore[untyped-decorator]
    def match(context: Any) -> dict[str, Any]:
        completions = complete(context.text_until_cursor, sources)
        if completions is None:
            return {"completions": []}
        kind = "path" if any("/" in text for text in completions.texts) else "magic"
        return {
            "completions": [SimpleCompletion(text=text, type=kind) for text in completions.texts],
            "matched_fragment": completions.fragment,
            "suppress": True,
            "ordered": True,
        }

    matchers = shell.Completer.custom_matchers
    matchers[:] = [other for other in matchers if getattr(other, "matcher_identifier", "") != "gpu_launch"]
    matchers.append(match)
