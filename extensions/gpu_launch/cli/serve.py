"""The command `serve`: a language model as an OpenAI-compatible endpoint at an address of the hub."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from gpu_launch.broker.cards import list_accepted_cards
from gpu_launch.cli.connection.http import read_first_file
from gpu_launch.cli.context import Context, json_option, pass_context
from gpu_launch.cli.submission import job_submission
from gpu_launch.cli.submission.run import check_users, launch_options
from gpu_launch.cli.submission.upload import DEFAULT_MAX_BYTES
from gpu_launch.errors import BrokerError, UsageError
from gpu_launch.launch import plan
from gpu_launch.options import command
from gpu_launch.options.definition import SERVE_OPTIONS
from gpu_launch.options.option import Surface
from gpu_launch.prediction.memory_estimate import CardMemory
from gpu_launch.serving import model_files, request, settings
from gpu_launch.serving.model_files import ModelDescription
from gpu_launch.serving.settings import ServerSettings, ServingEngine
from gpu_launch.units import parse_span

_OPTIONS = tuple(option for option in SERVE_OPTIONS if Surface.COMMAND in option.surfaces)
_HOME = "home:"


@click.command()
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="GPUs in all, on as few nodes as are free.")
@launch_options(_OPTIONS)
@click.option("--name", metavar="NAME", help="How requests call the model (its folder's name).")
@click.option(
    "--context", type=click.IntRange(16, settings.MAX_CONTEXT), metavar="TOKENS",
    help=f"Tokens of the longest prompt and answer together (the model's own, at most {settings.DEFAULT_CONTEXT}).",
)  # fmt: skip
@click.option(
    "--slots", type=click.IntRange(1, settings.MAX_SLOTS), default=settings.DEFAULT_SLOTS, metavar="N",
    help=f"Requests that are computed at the same time ({settings.DEFAULT_SLOTS}).",
)  # fmt: skip
@click.option(
    "--idle", default="30m", metavar="SPAN",
    help="Release the GPUs after this long without a request; 0s for never (30m).",
)  # fmt: skip
@click.option("--end", "ends", is_flag=True, help="End the job then, instead of starting again at the next request.")
@click.option(
    "--engine", type=click.Choice([str(engine) for engine in ServingEngine]), default=str(ServingEngine.AUTO),
    help="What computes: vLLM where the image has it, else transformers (auto).",
)  # fmt: skip
@click.option(
    "--port", type=click.IntRange(1024, 65535), default=settings.DEFAULT_PORT, metavar="PORT",
    help=f"The port within the job ({settings.DEFAULT_PORT}).",
)  # fmt: skip
@click.option(
    "--allow-user", "allow_users", multiple=True, metavar="NAME", help="This user may use it as well; repeatable."
)
@click.option("--profile", metavar="NAME", help="The profile whose image the job runs in.")
@click.option("--image", metavar="NAME", help="One of the images that the profile, or any of yours, offers.")
@click.option("-d", "--detach", is_flag=True, help="Do not wait: print the run's id.")
@click.option("--dry-run", is_flag=True, help="Show what would be asked for, and do nothing.")
@json_option
@click.argument("model", metavar="MODEL")
@pass_context
def serve(context: Context, /, model: str, **given: Any) -> None:
    """Serve a language model over the GPUs of several nodes, with OpenAI's API, at an address of the hub.

    MODEL is a folder on the cluster (a path, or home:PATH), or the name of a shared model such as Qwen/Qwen3-8B. Its
    layers are divided between the cards in proportion to their memory. Without requests the job releases its
    GPUs and sleeps; the next request lets it wait for them again.
    """
    values = {str(option.name): given[str(option.name)] for option in _OPTIONS}
    values = {name: value for name, value in values.items() if value not in (None, False)}
    if values.get("nnodes", (None, 1))[0] is not None:
        raise UsageError("--nnodes MIN:MAX: one number of nodes is needed, between which the model is divided.")
    asked = ServerSettings(
        model=model,
        name=given["name"] or settings.name_model(model.replace(_HOME, "./", 1) if model.startswith(_HOME) else model),
        port=given["port"],
        context=given["context"],
        slots=given["slots"],
        idle_s=parse_span("--idle", given["idle"], least=0, most=settings.MAX_IDLE_S),
        engine=ServingEngine(given["engine"]),
    )
    request.check_settings(asked)
    users = check_users(given["allow_users"])
    asked, description = _read_model(context, asked)
    checked = request.check_model(asked, description, *_list_cards(context, values, given["gpus"]))
    if checked.least_memory_mib is not None and "least_memory_mib" not in values:
        values["least_memory_mib"] = checked.least_memory_mib
    for note in checked.notes:
        context.console.print_note(f"gpu-launch: {note}")
    job = job_submission.from_script(
        context,
        job_submission.RunArguments(
            script=settings.MODULE,
            arguments=settings.write_arguments(checked.settings),
            # A server without requests writes nothing for hours.
            values=values | {"module": True, "stacks_after_s": 0},
            gpus=given["gpus"],
            name=f"serve {asked.name}"[:80],
            profile=given["profile"],
            image=given["image"],
            port=asked.port,
            port_users=users,
            sleeps=asked.idle_s > 0 and not given["ends"],
            no_workdir=True,
            most_bytes=DEFAULT_MAX_BYTES,
            here=Path.cwd(),
        ),
    )
    job_submission.run(context, job, detach=given["detach"], dry_run=given["dry_run"])


def _read_model(context: Context, asked: ServerSettings) -> tuple[ServerSettings, ModelDescription | None]:
    """Return the settings as the job needs them, and the model as far as this machine can see it."""
    if not context.hub.url:
        # A notebook's own terminal: home and shared models are here.
        home = Path.home()
        local = asked.model if not asked.model.startswith(_HOME) else str(home / asked.model.removeprefix(_HOME))
        settings_here = replace(asked, model=local)
        return request.read_local_model(settings_here, cwd=Path.cwd(), environ=os.environ, home=home)
    return _read_remote_model(context, asked)


def _read_remote_model(context: Context, asked: ServerSettings) -> tuple[ServerSettings, ModelDescription | None]:
    path = asked.model.removeprefix(_HOME)
    own = f"/home/{context.user}/"
    is_home = asked.model.startswith((_HOME, own))
    path = path.removeprefix(own).rstrip("/")
    if path.startswith(("/", "~")) or path in ("", "."):
        if is_home or not path.startswith("/"):
            raise UsageError(
                f"{asked.model}: a folder in your home on the cluster is needed, such as home:models/Qwen3-8B."
            )
        # Shared folders are not seen from here.
        return asked, None
    config = _fetch(context, f"{path}/{model_files.CONFIG}", model_files.MAX_CONFIG)
    if config is None:
        if is_home:
            raise UsageError(
                f"{asked.model}: this folder of your home there has no {model_files.CONFIG}, so it has no model."
            )
        return asked, None
    if asked.engine is ServingEngine.VLLM:
        return asked, None
    asked = replace(asked, model=path if "/" in path else f"./{path}")
    description = model_files.parse_config(config, name=asked.name)
    index = _fetch(context, f"{path}/{model_files.INDEX}", model_files.MAX_INDEX)
    return asked, description if index is None else model_files.estimate_sizes(description, index)


def _fetch(context: Context, path: str, most: int) -> str | None:
    """Return a text of the home; None if there is none."""
    try:
        with context.transfer.get(path) as answer:
            data = read_first_file(answer, most=most)
        return data.decode()
    except BrokerError as error:
        if error.status == 404:
            return None
        raise
    except UnicodeError:
        raise UsageError(f"{path} in your home is not a text.") from None


def _list_cards(context: Context, values: dict[str, Any], gpus: int | None) -> tuple[list[CardMemory], int]:
    """Return the cards that the request allows, and how many of them it takes."""
    cluster = context.broker.get_cluster()
    options = command.build(values, script=settings.MODULE)
    cards = list_accepted_cards(cluster, plan.name_models(options.demand, cluster))
    return cards, gpus or options.nnodes * options.nproc_per_node


COMMANDS: tuple[click.Command, ...] = (serve,)
