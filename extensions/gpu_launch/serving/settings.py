"""What is served and how: the arguments of the server's module, which a submission writes and the ranks read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

#: The module that every rank runs.
MODULE = "gpu_launch.serving.server_main"
DEFAULT_PORT, DEFAULT_SLOTS, DEFAULT_IDLE_S = 8000, 8, 1800
#: Tokens of the longest sequence where the model's own is longer.
DEFAULT_CONTEXT = 8192
MAX_SLOTS, MAX_CONTEXT, MAX_IDLE_S = 256, 1 << 20, 30 * 86400
#: Requests that may wait besides those that run.
MAX_WAITING = 64


class ServingEngine(StrEnum):
    """What computes."""

    #: vLLM where the image has it, else transformers.
    AUTO = "auto"
    VLLM = "vllm"
    TRANSFORMERS = "transformers"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a server."""

    #: Path, or name in the cluster's models or in the user's cache.
    model: str
    #: Name of the model in requests.
    name: str
    port: int = DEFAULT_PORT
    #: None for the model's own, at most `DEFAULT_CONTEXT`.
    context: int | None = None
    slots: int = DEFAULT_SLOTS
    #: Seconds without a request after which the job ends; 0 for never.
    idle_s: int = DEFAULT_IDLE_S
    engine: ServingEngine = ServingEngine.AUTO


def name_model(model: str) -> str:
    """Return how requests call a model: the last part of a path, or the name."""
    is_path = model.startswith(("/", "~", ".")) or model.count("/") > 1
    return (model.rstrip("/").rpartition("/")[2] or model) if is_path else model


def write_arguments(settings: ServerSettings) -> tuple[str, ...]:
    """Return the arguments of the module."""
    words = ["--port", str(settings.port), "--slots", str(settings.slots), "--idle", str(settings.idle_s)]
    words += ["--engine", str(settings.engine), "--name", settings.name]
    if settings.context is not None:
        words += ["--context", str(settings.context)]
    return (*words, "--", settings.model)


def read_arguments(words: Sequence[str]) -> ServerSettings:
    """Return what `write_arguments` wrote."""
    parser = argparse.ArgumentParser(prog=MODULE)
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    parser.add_argument("--slots", type=int, default=DEFAULT_SLOTS)
    parser.add_argument("--idle", type=int, default=DEFAULT_IDLE_S, dest="idle_s")
    parser.add_argument("--context", type=int)
    parser.add_argument("--engine", type=ServingEngine, default=ServingEngine.AUTO)
    parser.add_argument("--name", default="")
    parser.add_argument("model")
    given = parser.parse_args(list(words))
    given.name = given.name or name_model(given.model)
    return ServerSettings(**vars(given))
