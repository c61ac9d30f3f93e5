"""What the spawn page's form shows: the broker's figures and the user's home, neither of them waited for long."""

from __future__ import annotations

import asyncio

from gpuhub.broker.schemas import ClusterView
from gpuhub.containers.form import build_form
from gpuhub.containers.leasedspawner import LeasedSpawner
from gpuhub.errors import GpuhubError
from gpuhub.storage.looking import look_at_home

#: The form comes without figures after so long, seconds.
_FIGURES_S = 3.0


async def build_spawn_form(spawner: LeasedSpawner) -> str:
    """The spawn page's form."""
    storage, name = spawner.cluster.storage, spawner.user.name
    view, home = await asyncio.gather(_read_figures(spawner), look_at_home(storage, name))
    last = spawner.orm_spawner.user_options
    last_profile = last.get("profile") if isinstance(last, dict) else None
    return build_form(spawner.cluster, view, last_profile=last_profile, hub_url=spawner.hub.base_url, home=home)


async def _read_figures(spawner: LeasedSpawner) -> ClusterView | None:
    try:
        async with asyncio.timeout(_FIGURES_S):
            return await spawner.broker.cluster()
    except (GpuhubError, TimeoutError) as error:
        spawner.log.warning("The spawn form has no figures: %r", error)
        return None
