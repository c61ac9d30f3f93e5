"""Templates of gpuhub's own pages, and how they show times and memory."""

from __future__ import annotations

import functools
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from gpuhub.containers.telling import (
    capitalise,
    describe_gib,
    describe_gpus,
    describe_kinds,
    describe_node,
    describe_outside,
    describe_partition,
    describe_time,
    is_held_beside,
)
from gpuhub.quantities import format_span

#: Also given to JupyterHub, for the pages of ours that extend its own.
TEMPLATES = Path(__file__).with_name("pages")


def macros(template: str) -> Any:
    """The macros of one of our templates."""
    return environment().get_template(template).module


def read_part(name: str) -> Markup:
    """A style or a script of ours, to stand in a page."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))  # noqa: S704 - our own file


def read_style(name: str) -> Markup:
    """A style of ours with what all of our pages share."""
    return read_part("gpuhub_gpu.css") + read_part(name)


@functools.cache
def environment() -> jinja2.Environment:
    """Escapes everything, and refuses names that do not exist."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["when"] = _show_time
    made.filters["gib"] = describe_gib
    made.filters["span"] = format_span
    made.filters["gpus"] = describe_gpus
    made.filters["outside"] = describe_outside
    made.filters["facts"] = describe_node
    made.filters["sentence"] = capitalise
    made.filters["limits"] = describe_partition
    made.filters["kinds"] = describe_kinds
    made.tests["held_beside"] = is_held_beside
    return made


def _show_time(value: datetime) -> Markup:
    """A `<time>` element; the pages' scripts turn it into the reader's own time zone."""
    return Markup('<time datetime="{}">{}</time>').format(value.isoformat(), describe_time(value))
