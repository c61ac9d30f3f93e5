"""The spawn form: profiles with what is free right now, and who holds what; rendered here, refreshed by form.js."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from gpuhub import gpus
from gpuhub.broker.schemas import ClusterView, Holder, ProfileView
from gpuhub.containers.troubles import SpawnFailed
from gpuhub.quantities import format_size, format_span
from gpuhub.settings import Cluster, Profile, gpu_requirement

#: Also given to JupyterHub, for the pages of ours that extend its own.
TEMPLATES = Path(__file__).with_name("pages")
UNKNOWN = "unknown"
FREE = "free"
QUEUE = "queue"
AWAY = "away"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One profile on the form."""

    name: str
    title: str
    description: str
    #: GPU, CPU, memory and time limit in one line.
    facts: str
    #: One of the words above.
    status: str
    status_text: str
    free_text: str
    holders: tuple[Holder, ...]
    is_chosen: bool


def build_cards(cluster: Cluster, view: ClusterView | None, last_profile: object) -> list[Card]:
    """A card for each profile; the chosen one is the user's last if it starts at once, else the first that does."""
    views = {} if view is None else {profile.name: profile for profile in view.profiles}
    chosen = choose_preselected(cluster, views, last_profile)
    return [_card(profile, views.get(profile.name), is_chosen=profile.name == chosen) for profile in cluster.profiles]


def choose_preselected(cluster: Cluster, views: Mapping[str, ProfileView], last_profile: object) -> str:
    """The name of the profile that is selected when the form opens."""
    known = [profile.name for profile in cluster.profiles]
    ready = [name for name in known if name in views and views[name].starts_now]
    if last_profile in ready or (last_profile in known and not ready):
        return str(last_profile)
    return (ready or known)[0]


def _card(profile: Profile, view: ProfileView | None, *, is_chosen: bool) -> Card:
    status, status_text, free_text = _status(view)
    return Card(
        name=profile.name,
        title=profile.title,
        description=profile.description,
        facts=describe_facts(profile),
        status=status,
        status_text=status_text,
        free_text=free_text,
        holders=view.holders if view is not None else (),
        is_chosen=is_chosen,
    )


def _status(view: ProfileView | None) -> tuple[str, str, str]:
    if view is None:
        return UNKNOWN, "", ""
    free_text = f"{view.free} of {view.total} free" if view.gpu_count else ""
    if view.starts_now:
        return FREE, "starts at once", free_text
    if view.gpu_count and not view.total:
        return AWAY, "no node with such a GPU answers at present", ""
    return QUEUE, f"will queue at position {view.ahead + 1}", free_text


def describe_facts(profile: Profile) -> str:
    """Such as `1 × RTX 5090 · 4 CPUs · 16 GiB memory · up to 8 h`."""
    what = gpus.describe(profile.gpu_count, gpu_requirement(profile)) if profile.gpu_count else "no GPU"
    cpus = f"{profile.cpus:g} CPU{'' if profile.cpus == 1 else 's'}"
    parts = [what, cpus, f"{format_size(profile.memory)} memory"]
    if profile.time_limit is not None:
        parts.append(f"up to {format_span(profile.time_limit)}")
    return " · ".join(parts)


def build_form(cluster: Cluster, view: ClusterView | None, *, last_profile: object, hub_url: str = "/hub/") -> str:
    """The whole form as HTML, complete without JavaScript."""
    environment = _environment()
    return environment.get_template("gpuhub_form.html").render(
        cards=build_cards(cluster, view, last_profile),
        view=view,
        notice=cluster.notice,
        hub_url=hub_url,
        style=Markup((TEMPLATES / "gpuhub_form.css").read_text(encoding="utf-8")),  # noqa: S704 - our own file
        script=Markup((TEMPLATES / "gpuhub_form.js").read_text(encoding="utf-8")),  # noqa: S704 - our own file
    )


def build_parts(cluster: Cluster, view: ClusterView | None) -> dict[str, str]:
    """The parts of the form that change, by their `data-gpuhub-part`: what form.js puts in place."""
    macros: Any = _environment().get_template("gpuhub_parts.html").module
    parts = {f"card-{card.name}": str(macros.status(card)) for card in build_cards(cluster, view, None)}
    for name in ("nodes", "queue", "problem"):
        parts[name] = str(getattr(macros, name)(view))
    return parts


def parse_form(fields: dict[str, list[str]]) -> dict[str, str]:
    """What the form sent, as user options: `{"profile": name}`.

    Raises:
        SpawnFailed: a field that the form does not have, or one twice.
    """
    for key, values in fields.items():
        if key != "profile":
            raise SpawnFailed(f"The form has no field {key[:40]!r}, only profile.", reason="invalid-request")
        if len(values) != 1:
            raise SpawnFailed("Exactly one profile can be chosen.", reason="invalid-request")
    return {"profile": fields["profile"][0]} if fields else {}


def _show_time(value: datetime) -> Markup:
    """A `<time>` element; form.js turns it into the reader's own time zone."""
    local = value.astimezone()
    is_today = local.date() == datetime.now(local.tzinfo).date()
    text = local.strftime("%H:%M" if is_today else "%d %b %H:%M")
    return Markup('<time datetime="{}">{}</time>').format(value.isoformat(), text)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["when"] = _show_time
    environment.filters["gib"] = lambda mib: f"{mib / 1024:.3g}"
    return environment
