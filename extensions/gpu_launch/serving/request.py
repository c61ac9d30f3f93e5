"""A request to serve a model, checked before any GPU is asked for, by a notebook that sees it or by a laptop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpu_launch.errors import UsageError
from gpu_launch.prediction.memory_estimate import CardMemory, format_gib
from gpu_launch.serving import model_files, model_names, partition, settings
from gpu_launch.serving.model_files import ModelDescription
from gpu_launch.serving.partition import ServingNeed
from gpu_launch.serving.settings import ServerSettings, ServingEngine

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class CheckedModel:
    """A model that cards of the cluster can have."""

    settings: ServerSettings
    #: None for what only vLLM may serve, or where nothing is known before the job starts.
    description: ModelDescription | None
    #: What each card must have, in MiB; None if that is not known, or does not ensure that the model fits.
    least_memory_mib: int | None = None
    #: What people should know, a line each.
    notes: tuple[str, ...] = ()


def check_settings(asked: ServerSettings) -> None:
    """Refuse numbers outside of their limits.

    Raises:
        UsageError: naming the option, its value and its limits.
    """
    for flag, value, least, most in (
        ("--port", asked.port, 1024, 65535),
        ("--slots", asked.slots, 1, settings.MAX_SLOTS),
        ("--context", asked.context, 16, settings.MAX_CONTEXT),
        ("--idle", asked.idle_s, 0, settings.MAX_IDLE_S),
    ):
        if value is not None and not least <= value <= most:
            raise UsageError(f"{flag} {value}: a number from {least} to {most} is needed.")
    if not 1 <= len(asked.name) <= 100 or not asked.name.isprintable():
        raise UsageError(f"{asked.name!r}: a model's name has 1 to 100 printable characters.")


def read_local_model(
    asked: ServerSettings, *, cwd: Path, environ: Mapping[str, str], home: Path
) -> tuple[ServerSettings, ModelDescription | None]:
    """Return the settings with the model's folder, and its description, where this container sees it.

    Raises:
        UsageError: there is no such model, other nodes do not have it, or it cannot be served.
    """
    folder = model_names.find_folder(asked.model, cwd=cwd, environ=environ, home=home)
    model_names.check_shared(folder, environ=environ, home=home)
    asked = replace(asked, model=str(folder))
    if asked.engine is ServingEngine.VLLM:
        if not (folder / model_files.CONFIG).is_file():
            raise UsageError(f"{folder}: there is no {model_files.CONFIG}, so this is no model of transformers.")
        return asked, None
    return asked, model_files.read_folder(folder)


def check_model(
    asked: ServerSettings, description: ModelDescription | None, cards: Sequence[CardMemory], number: int
) -> CheckedModel:
    """Return the model, if `number` of these cards can have it.

    Raises:
        UsageError: it fits no such set of cards, or has fewer layers than there are cards.
    """
    if description is None:
        note = (
            "it is checked when the job starts"
            if asked.engine is not ServingEngine.VLLM
            else "vLLM checks whether it fits"
        )
        return CheckedModel(settings=asked, description=None, notes=(f"{asked.name}: {note}",))
    context = partition.check_context(description, asked.context, settings.DEFAULT_CONTEXT)
    need = ServingNeed(slots=asked.slots, context=context)
    least = partition.check_cards(description, cards, number, need)
    notes = []
    if description.layer_bytes:
        weights = format_gib(-(-description.total_bytes // _MIB))
        caches = format_gib(-(-description.count_cache(need.tokens) * description.layers // _MIB))
        each = f" with at least {format_gib(least)} each" if least is not None else ""
        notes.append(
            f"{asked.name}: {weights} of weights and {caches} of caches, divided between {number} "
            f"card{'s' if number > 1 else ''}{each}"
        )
    if least is None and description.layer_bytes and cards:
        notes.append(
            "it does not fit every choice of cards that the request allows: the job ends at once if it gets too small "
            "ones. --model or --memory choose them"
        )
    return CheckedModel(settings=asked, description=description, least_memory_mib=least, notes=tuple(notes))
