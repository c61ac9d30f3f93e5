"""The Jinja environment and the files of the hub's pages: templates, macros, styles and scripts."""

from __future__ import annotations

import functools
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from gpuhub.common.units import format_span
from gpuhub.web.static_files import STATIC
from gpuhub.web.text import (
    capitalise,
    describe_gib,
    describe_gpus,
    describe_kinds,
    describe_node,
    describe_outside,
    describe_partition,
    describe_time,
    describe_user_limits,
    is_held_by_external_job,
)

#: Also passed to JupyterHub, for pages that extend its own.
TEMPLATES = Path(__file__).with_name("templates")


def load_macros(template: str) -> Any:
    """Return the macros of a template."""
    return build_environment().get_template(template).module


def read_asset(name: str) -> Markup:
    """Return a style sheet or script for inclusion in a page."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))  # noqa: S704 - our own file


def read_style(name: str) -> Markup:
    """Return a style sheet together with the one that all pages share."""
    return Markup((STATIC / "gpus.css").read_text(encoding="utf-8")) + read_asset(name)  # noqa: S704 - our own file


def build_strict_environment(folder: Path) -> jinja2.Environment:
    """Return an environment of a folder's templates, which escapes everything and refuses undefined names."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@functools.cache
def build_environment() -> jinja2.Environment:
    """Return the environment of the pages, with their filters."""
    environment = build_strict_environment(TEMPLATES)
    environment.filters["when"] = _render_time
    environment.filters["gib"] = describe_gib
    environment.filters["span"] = format_span
    environment.filters["gpus"] = describe_gpus
    environment.filters["outside"] = describe_outside
    environment.filters["facts"] = describe_node
    environment.filters["sentence"] = capitalise
    environment.filters["limits"] = describe_partition
    environment.filters["user_limits"] = describe_user_limits
    environment.filters["kinds"] = describe_kinds
    environment.tests["held_by_external_job"] = is_held_by_external_job
    return environment


def _render_time(value: datetime) -> Markup:
    """Return a `<time>` element; the pages' scripts convert it to the user's time zone."""
    return Markup('<time datetime="{}">{}</time>').format(value.isoformat(), describe_time(value))
