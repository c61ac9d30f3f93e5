"""Write docs/reference/ from the code: `python -m tests.support.references` (`make references`).

It stands here because it reads both distributions, which never import each other. `tests/contract/test_references.py`
fails when what is committed differs from what the code gives.
"""

from __future__ import annotations

import ast
import inspect
import json
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import gpu_launch
from gpu_launch.cli.main import cli as laptop_command
from gpu_launch.options.command import BENCH_COMMAND, LAUNCH_COMMAND
from gpu_launch.options.gpu_cell import CELL_COMMAND
from gpu_launch.options.rank_session import RANKS_COMMAND
from gpuhub.broker.db.store import Store
from gpuhub.cli.main import cli as hub_command
from gpuhub.common import units
from gpuhub.config.base import SettingsTable
from gpuhub.config.settings import ClusterSettings
from tests.support.broker.in_process import Setting, Workers

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
_NOTE = "<!-- Written by `make references` from the code; do not edit. -->"
_PARSED = {
    units.parse_size: 'size in quotes, such as `"16G"`',
    units.parse_span: 'span of time in quotes, such as `"8h"`',
    units.parse_span_or_zero: 'span of time in quotes, such as `"8h"`, or `"0s"`',
}
_PLAIN = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`", Path: "path"}


def build_all() -> dict[str, str]:
    """Return every file of docs/reference/ by its name."""
    return {
        "README.md": _build_index(),
        "cluster-toml.md": _build_settings(),
        "gpuhub.md": _build_command(hub_command, "gpuhub", "The administrator's command on the head node."),
        "gpu-launch.md": _build_command(
            laptop_command, "gpu-launch", "The command of a laptop or a notebook's terminal."
        ),
        "magics.md": _build_magics(),
        "gpu_launch-python.md": _build_functions(),
        "openapi.json": json.dumps(_build_openapi(), indent=2, sort_keys=True) + "\n",
    }


def write_all() -> None:
    """Write every file, and remove those that are no longer built."""
    FOLDER.mkdir(exist_ok=True)
    files = build_all()
    for path in FOLDER.iterdir():
        if path.name not in files:
            path.unlink()
    for name, text in files.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def _build_index() -> str:
    rows = {
        "cluster-toml.md": "every key of `cluster.toml`",
        "gpuhub.md": "the command `gpuhub`",
        "gpu-launch.md": "the command `gpu-launch`",
        "magics.md": "the magics of `%load_ext gpu_launch`",
        "gpu_launch-python.md": "the functions of the Python module `gpu_launch`",
        "openapi.json": "the broker's HTTP API, as OpenAPI 3.1",
    }
    lines = [f"- [{name}]({name}): {meaning}" for name, meaning in rows.items()]
    return _page("Reference", "Written from the code, and compared with it by a test.", *lines)


def _page(title: str, intro: str, *lines: str) -> str:
    return "\n".join([f"# {title}", "", _NOTE, "", intro, "", *lines]).rstrip() + "\n"


# cluster.toml


def _build_settings() -> str:
    lines: list[str] = []
    for heading, model in _tables(ClusterSettings, ""):
        lines += [f"## {heading}", "", *_paragraph(inspect.getdoc(model) or ""), "| key | value | default | meaning |"]
        lines.append("|---|---|---|---|")
        comments = _comments(model)
        for name, field in model.model_fields.items():
            inner, _ = _table_in(field.annotation)
            meaning = comments.get(name) or (inspect.getdoc(inner) if inner else None) or ""
            cells = (
                f"`{name}`",
                _describe_type(field),
                _describe_default(field),
                meaning.splitlines()[0] if meaning else "",
            )
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return _page("cluster.toml", "Tables and keys; `cluster.example.toml` shows them in use.", *lines)


def _tables(model: type[SettingsTable], path: str) -> Iterator[tuple[str, type[SettingsTable]]]:
    yield (f"`{path}`" if path else "Keys outside of any table"), model
    for name, field in model.model_fields.items():
        inner, is_list = _table_in(field.annotation)
        if inner is not None:
            below = f"{path.strip('[]')}.{name}" if path else name
            yield from _tables(inner, f"[[{below}]]" if is_list else f"[{below}]")


def _table_in(annotation: Any) -> tuple[type[SettingsTable] | None, bool]:
    if inspect.isclass(annotation) and issubclass(annotation, SettingsTable):
        return annotation, False
    for argument in get_args(annotation):
        inner, is_list = _table_in(argument)
        if inner is not None:
            return inner, is_list or get_origin(annotation) is tuple
    return None, False


def _comments(model: type[BaseModel]) -> dict[str, str]:
    """Return the `#:` comment above each field."""
    comments: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not (issubclass(base, SettingsTable) and base is not SettingsTable):
            continue
        source = textwrap.dedent(inspect.getsource(base))
        lines = source.splitlines()
        for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                above = []
                for line in reversed(lines[: node.lineno - 1]):
                    if not line.strip().startswith("#:"):
                        break
                    above.append(line.strip().removeprefix("#:").strip())
                # In the file, an optional key is left out.
                comments[node.target.id] = " ".join(reversed(above)).replace("None", "unset")
    return comments


def _describe_type(field: FieldInfo) -> str:
    for item in field.metadata:
        if getattr(item, "func", None) in _PARSED:
            return _PARSED[item.func]
    text = _describe_annotation(field.annotation)
    bounds = [
        f"{sign} {getattr(item, name):g}"
        for item in field.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if getattr(item, name, None) is not None
    ]
    return f"{text}, {' and '.join(bounds)}" if bounds else text


def _describe_annotation(annotation: Any) -> str:
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe_type(FieldInfo.from_annotation(annotation))
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in arguments)
    if origin in {Union, UnionType}:
        return " or ".join(_describe_annotation(part) for part in arguments if part is not NoneType)
    if origin is tuple:
        return f"list of {_describe_annotation(arguments[0])}" if not _table_in(annotation)[0] else "tables, see below"
    if origin is dict:
        return f"table of {_describe_annotation(arguments[0])} to {_describe_annotation(arguments[1])}"
    if _table_in(annotation)[0]:
        return "table, see below"
    raise TypeError(f"tests/support/references.py has no words for the type {annotation!r}")


def _describe_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    parsers = {getattr(item, "func", None) for item in field.metadata}
    if value is None or (isinstance(value, SettingsTable)):
        return ""
    if units.parse_size in parsers or units.parse_size in _inner_parsers(field):
        return units.format_size(value)
    if parsers & {units.parse_span, units.parse_span_or_zero}:
        return units.format_span(value)
    if isinstance(value, tuple | list):
        return f"`{json.dumps([str(item) for item in value])}`" if value else "`[]`"
    return f"`{json.dumps(str(value) if isinstance(value, Path) else value)}`"


def _inner_parsers(field: FieldInfo) -> set[Callable[..., Any] | None]:
    return {
        getattr(item, "func", None)
        for part in get_args(field.annotation)
        if get_origin(part) is Annotated
        for item in get_args(part)[1:]
    }


# Commands and magics


def _build_command(command: click.Command, name: str, intro: str) -> str:
    return _page(f"`{name}`", intro, *_command_lines(command, click.Context(command, info_name=name), 2))


def _command_lines(command: click.Command, context: click.Context, level: int) -> list[str]:
    lines = [f"{'#' * level} `{context.command_path}`", "", *_paragraph(command.help or command.short_help or "")]
    lines += ["```", *command.get_usage(context).removeprefix("Usage: ").splitlines(), "```", ""]
    rows = [(param, param.get_help_record(context)) for param in command.get_params(context)]
    described = [record for param, record in rows if record and "--help" not in param.opts]
    if described:
        lines += ["| option | meaning |", "|---|---|"]
        lines += [f"| `{_cell(flags)}` | {_cell(meaning)} |" for flags, meaning in described]
        lines.append("")
    if isinstance(command, click.Group):
        for name in sorted(command.list_commands(context)):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                lines += _command_lines(inner, click.Context(inner, info_name=name, parent=context), level + 1)
    return lines


def _build_magics() -> str:
    lines: list[str] = []
    for command in (LAUNCH_COMMAND, RANKS_COMMAND, CELL_COMMAND, BENCH_COMMAND):
        lines += _command_lines(command, click.Context(command, info_name=command.name), 2)
    return _page("Magics", "`%load_ext gpu_launch` registers them; gpuhub's images do it by themselves.", *lines)


def _build_functions() -> str:
    lines: list[str] = []
    for name in gpu_launch.__all__:
        value = getattr(gpu_launch, name)
        heading = name
        if inspect.isclass(value):
            heading = f"class {name}({', '.join(base.__name__ for base in value.__bases__)})"
        lines += [f"## `{heading}`", ""]
        if not inspect.isclass(value):
            signature = str(inspect.signature(value))
            lines += ["```python", f"gpu_launch.{name}{signature}", "```", ""]
        lines += _paragraph(inspect.getdoc(value) or "")
    return _page("The Python module gpu_launch", "What `import gpu_launch` offers in a notebook and in ranks.", *lines)


def _paragraph(text: str) -> list[str]:
    return [*text.replace("\b\n", "").splitlines(), ""] if text else []


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# HTTP


def _build_openapi() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(Path(folder))
        store = Store.open_file(setting.folder / "broker.sqlite")
        try:
            return setting.build(store, Workers(setting.nodes)).openapi()
        finally:
            store.close()


if __name__ == "__main__":
    write_all()
