"""Traits that an administrator may set, and those that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from traitlets import Unicode
from traitlets.config import Configurable

from gpuhub.common.errors import InvalidRequest
from gpuhub.spawners import traits
from gpuhub.spawners.docker.spawner import GpuDockerSpawner
from gpuhub.spawners.slurm.spawner import GpuSlurmSpawner

DOCS = Path(__file__).parents[4] / "docs/jupyterhub.md"


def _list_own(spawner: type[Any]) -> set[str]:
    """Return the configurable traits that a spawner does not have from JupyterHub's own class."""
    return {name for name, trait in spawner.class_traits(config=True).items() if trait.this_class.__name__ != "Spawner"}


@pytest.mark.parametrize(
    ("spawner", "effective"), [(GpuDockerSpawner, traits.DOCKER_TRAITS), (GpuSlurmSpawner, traits.SLURM_TRAITS)]
)
def test_each_trait_has_effect_or_is_refused(spawner: type[Any], effective: frozenset[str]) -> None:
    """A new version of DockerSpawner or batchspawner may bring more of them."""
    known = {*effective, *traits.REFUSED}
    assert _list_own(spawner) - known == set()
    assert effective & traits.REFUSED.keys() == set()
    assert effective <= set(spawner.class_traits(config=True))


def test_only_existing_traits_are_refused() -> None:
    """An older name in the table would hide a mistake."""
    existing = {name for spawner in (GpuDockerSpawner, GpuSlurmSpawner) for name in spawner.class_traits(config=True)}
    assert traits.REFUSED.keys() - existing == set()
    assert set(traits.HOOK_TRAITS) <= traits.REFUSED.keys()


def test_the_page_names_each_trait() -> None:
    """An administrator looks there first."""
    text = DOCS.read_text(encoding="utf-8")
    names = {*traits.DOCKER_TRAITS, *traits.SLURM_TRAITS, *traits.REFUSED}
    assert sorted(name for name in names if f"`{name}`" not in text) == []


class _Spawner(Configurable):  # type: ignore[misc] # traitlets is untyped
    """A spawner with two of the traits."""

    mem_limit = Unicode("").tag(config=True)
    req_gres = Unicode("{gres}").tag(config=True)


def test_a_value_that_a_hook_sets_is_refused_at_the_start() -> None:
    """It would have no effect; the user is told, because only the start shows it."""
    spawner = _Spawner()
    traits.check_values(spawner)
    spawner.req_gres = "gpu:1"
    with pytest.raises(InvalidRequest, match=r"sets req_gres of this notebook, which has no effect: set `gpu_count`"):
        traits.check_values(spawner)


@pytest.mark.parametrize("spawner", [GpuDockerSpawner, GpuSlurmSpawner])
def test_a_spawner_without_settings_starts(spawner: type[Any]) -> None:
    """The defaults of the real classes are not taken for values that a hook has set."""
    traits.check_values(spawner())
