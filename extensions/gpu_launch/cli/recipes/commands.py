"""The commands `recipe list` and `recipe show`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from gpu_launch.cli import tables
from gpu_launch.cli.context import Context, json_option, pass_context, terminal_columns
from gpu_launch.cli.recipes import catalogue
from gpu_launch.cli.recipes.catalogue import PREFIX
from gpu_launch.cli.recipes.parameters import Parameter
from gpu_launch.cli.recipes.recipe_file import Recipe
from gpu_launch.errors import UsageError

_COLUMNS = (
    tables.Column(title="PARAMETER"),
    tables.Column(title="DEFAULT"),
    tables.Column(title="VALUE"),
    tables.Column(title="MEANING", min_width=20),
)


@click.group()
def recipe() -> None:
    """List and explain recipes: ready-made jobs, which `gpu-launch run recipe:NAME` runs."""


@recipe.command("list")
@json_option
@pass_context
def list_command(context: Context) -> None:
    """List all recipes, what they do, and their parameters with defaults."""
    found, views = [], []
    for entry in catalogue.list_entries(context):
        try:
            parsed = entry.parse()
        except UsageError as error:
            found.append(f"{entry.name}  ({entry.origin})\n  cannot be used: {error}")
            views.append({"name": entry.name, "origin": entry.origin, "error": str(error)})
            continue
        words = " ".join(map(_format_default, parsed.parameters))
        found.append(f"{parsed.name}  ({parsed.origin})\n  {parsed.description}\n  {words}".rstrip())
        views.append(_build_view(parsed))
    context.console.print_result(views, "\n".join([*found, "", "gpu-launch recipe show NAME explains the parameters."]))


@recipe.command("show")
@click.argument("name", metavar="NAME|FILE.YAML")
@json_option
@pass_context
def show(context: Context, name: str) -> None:
    """Explain a recipe and its parameters; a FILE.YAML on this machine is checked as well."""
    found = catalogue.find_recipe(context, name.removeprefix(PREFIX))
    lines = [f"{found.name}: {found.description}", f"from {found.origin}", ""]
    if found.parameters:
        rows = [
            (each.name, "(needed)" if each.default is None else each.default, each.describe(), each.help)
            for each in found.parameters
        ]
        lines += [tables.format_table(_COLUMNS, rows, width=terminal_columns()), ""]
    needed = "".join(f" --set {each.name}={each.type.upper()}" for each in found.parameters if each.default is None)
    lines.append(f"gpu-launch run{needed} {PREFIX}{name if name.endswith(('.yaml', '.yml')) else found.name}")
    context.console.print_result(_build_view(found), "\n".join(lines))


def _format_default(parameter: Parameter) -> str:
    return f"{parameter.name}={'…' if parameter.default is None else parameter.default}"


def _build_view(found: Recipe) -> dict[str, Any]:
    return {
        "name": found.name,
        "origin": found.origin,
        "description": found.description,
        "single_gpu": found.single_gpu,
        "predicts": bool(found.module),
        "parameters": [asdict(parameter) for parameter in found.parameters],
    }


COMMANDS: tuple[click.Command, ...] = (recipe,)
