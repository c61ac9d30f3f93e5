"""From a recipe and the values of its parameters to a job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from gpu_launch.cli.context import Context
from gpu_launch.cli.recipes import catalogue, cluster_files, parameters
from gpu_launch.cli.recipes.parameters import ParameterType
from gpu_launch.cli.recipes.recipe_file import Recipe
from gpu_launch.cli.submission import task_submission
from gpu_launch.cli.submission.job_submission import RunArguments
from gpu_launch.cli.submission.upload import JobSubmission
from gpu_launch.cli.taskfile.parser import TaskFile
from gpu_launch.errors import UsageError
from gpu_launch.options.definition import BY_LABEL
from gpu_launch.recipes.run_record import NAME, PARAMETERS


def build_job(context: Context, asked: RunArguments, given: Sequence[str]) -> JobSubmission:
    """Return the job of a recipe; `asked.script` is `recipe:NAME`, and `given` has the words of `--set`.

    Raises:
        UsageError: There is no such recipe, a value is wrong or missing, or an option is not for recipes.
        BrokerError: The hub cannot be asked.
    """
    if asked.arguments:
        raise UsageError(
            f"A recipe takes no arguments, and {asked.arguments[0]} was given: options and --set NAME=VALUE come "
            "before recipe:NAME."
        )
    if asked.workdir or asked.no_workdir:
        flag = "--workdir" if asked.workdir else "--no-workdir"
        raise UsageError(f"{flag} is not for recipes: nothing is sent, and the job has a folder of its own.")
    recipe = catalogue.find_recipe(context, asked.script.removeprefix(catalogue.PREFIX))
    own = [label.removeprefix("--") for label in BY_LABEL]
    values = parameters.parse_values(recipe.parameters, given, recipe=recipe.name, own=own)
    _check_gpus(recipe, asked)
    values = {
        parameter.name: cluster_files.check_value(context, parameter, values[parameter.name])
        for parameter in recipe.parameters
    }
    variables = parameters.build_variables(recipe.parameters, values)
    variables |= {NAME: recipe.name, PARAMETERS: json.dumps(values, ensure_ascii=False)}
    taken = sorted(variables.keys() & (asked.envs.keys() | asked.secrets.keys()))
    if taken:
        raise UsageError(f"--env {taken[0]}: the recipe sets this variable; --set gives its parameters.")
    asked = replace(asked, name=asked.name or recipe.name, envs=asked.envs | variables)
    if not recipe.module:
        return task_submission.build_task(context, asked, _add_preparation(recipe))
    by_variable = {f"${parameter.variable}": values[parameter.name] for parameter in recipe.parameters}
    arguments = tuple(by_variable.get(argument, argument) for argument in recipe.arguments)
    return task_submission.build_module(context, asked, recipe.task, recipe.module, arguments)


def _check_gpus(recipe: Recipe, asked: RunArguments) -> None:
    nodes, gpus = asked.values.get("nnodes", (None, 1))[1], asked.values.get("nproc_per_node", 1)
    if recipe.single_gpu and ((asked.gpus or 1) > 1 or nodes * gpus > 1):
        raise UsageError(
            f"{catalogue.PREFIX}{recipe.name} uses one GPU. Several work on it as tasks of an array: --array 0-3 in "
            "place of the number of GPUs."
        )


def _add_preparation(recipe: Recipe) -> TaskFile:
    """Return the task, whose commands have absolute paths, and write the values to parameters.json.

    It comes on their first lines, so that bash's messages have the file's line numbers. No value is part of it.
    """
    task = recipe.task
    paths = [
        parameter.variable
        for parameter in recipe.parameters
        if parameter.type in (ParameterType.PATH, ParameterType.MODEL)
    ]
    expand = "".join(f'export {name}="${{{name}/#\\~\\//$HOME/}}"; ' for name in paths)
    record = f'[ "$SKYPILOT_NODE_RANK" != 0 ] || printf "%s\\n" "${PARAMETERS}" > parameters.json; '
    return replace(task, setup=expand + task.setup if task.setup else "", run=expand + record + task.run)
