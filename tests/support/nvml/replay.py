"""A stand-in for the module pynvml that answers what a real driver answered (`recorder.py`).

Calls are checked against the real module: a function has to exist there and take these arguments, of types that NVML's
C functions accept; constants and errors are the real module's own.
"""

from __future__ import annotations

import ctypes
import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml

from tests.support.nvml.recorder import describe_call

RECORDINGS = Path(__file__).parent / "recordings"
IDLE, BUSY = "two_h200_idle", "two_h200_busy"


@dataclass(frozen=True)
class Handle:
    """Stands for NVML's pointer to a GPU."""

    name: str


def load(name: str) -> dict[str, Any]:
    """Return a recording, which `recorder.record` describes."""
    found: dict[str, Any] = json.loads((RECORDINGS / f"{name}.json").read_text(encoding="utf-8"))
    return found


class Replay(ModuleType):
    """Put it into `sys.modules["pynvml"]`."""

    def __init__(self, name: str) -> None:
        super().__init__("pynvml")
        #: Names of the functions that were called, in order.
        self.called: list[str] = []
        self._answers: dict[str, Any] = load(name)["calls"]

    def change(self, function: str, answer: Any) -> None:
        """Give all calls of a function another answer: a result, or the class of one of pynvml's errors."""
        is_error = isinstance(answer, type) and issubclass(answer, pynvml.NVMLError)
        changed = {"error": answer.__name__} if is_error else {"result": answer}
        known = [call for call in self._answers if call.startswith(f"{function}(")]
        assert known, f"the recording has no call of {function}"
        self._answers |= dict.fromkeys(known, changed)

    def __getattr__(self, name: str) -> Any:
        found = getattr(pynvml, name)
        if not (name.startswith("nvml") and inspect.isfunction(found)):
            return found

        def call(*arguments: Any, **keywords: Any) -> Any:
            inspect.signature(found).bind(*arguments, **keywords)
            for argument in arguments:
                if not isinstance(argument, Handle | int | str | bytes):
                    raise ctypes.ArgumentError(f"{name} does not take {argument!r}")
            self.called.append(name)
            words = [argument.name if isinstance(argument, Handle) else argument for argument in arguments]
            text = describe_call(name, words, keywords)
            assert text in self._answers, f"the recording has no {text}: record it on a machine with GPUs"
            return _decode(self._answers[text])

        return call


def _decode(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        error = getattr(pynvml, answer["error"], None) or getattr(ctypes, answer["error"])
        raise error()
    if "handle" in answer:
        return Handle(answer["handle"])
    return _decode_value(answer["result"])


def _decode_value(value: Any) -> Any:
    """Undo `recorder.encode`."""
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    match kind:
        case "struct":
            return SimpleNamespace(**{key: _decode_value(each) for key, each in content.items()})
        case "bytes":
            return content.encode()
        case "list":
            return [_decode_value(each) for each in content]
        case "tuple":
            return tuple(_decode_value(each) for each in content)
    raise ValueError(f"{kind} has no counterpart in `encode`")
