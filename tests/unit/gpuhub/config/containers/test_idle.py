"""`[idle]` of cluster.toml and of a profile."""

from __future__ import annotations

import pytest

from gpuhub.config.containers.idle import IdleSettings, ProfileIdleSettings, find_idle_mistakes
from gpuhub.config.settings import ProfileSettings
from tests.support.docker.simulated_nodes import build_cluster

GPU = ProfileSettings(name="gpu", title="GPU")
CPU = ProfileSettings(name="cpu", title="CPU", gpu_count=0)


def test_nothing_is_stopped_unless_it_is_set():
    """The defaults stop no notebook."""
    assert not IdleSettings().is_on
    assert not build_cluster(profiles=[GPU, CPU]).stops_idle_notebooks


def test_profile_replaces_single_values():
    """A profile's values replace those of [idle], also by "0s"; the others remain."""
    base = IdleSettings(stop_after="2h", low_use_after="6h", longest_keep="4h")
    merged = ProfileIdleSettings(stop_after="1h", low_use_after="0s").merge(base)
    assert (merged.stop_after, merged.low_use_after, merged.longest_keep) == (3600, 0, 4 * 3600)
    assert ProfileIdleSettings().merge(base) == base


def test_one_profile_with_gpus_is_enough():
    """Notebooks without a GPU have none to give back."""
    limits = ProfileIdleSettings(stop_after="1h")
    with_limits = GPU.model_copy(update={"idle": limits})
    assert build_cluster(profiles=[with_limits, CPU]).stops_idle_notebooks
    assert not build_cluster(profiles=[GPU, CPU.model_copy(update={"idle": limits})]).stops_idle_notebooks


def test_warning_must_be_shorter_than_what_it_announces():
    """The mistake names the table, the value and the limit; a table that is off has none."""
    base = IdleSettings(stop_after="5m")
    profile = ProfileIdleSettings(stop_after="0s", low_use_after="8m")
    assert find_idle_mistakes(base, [("gpu", profile)]) == [
        "idle.warn_before: 10 min must be shorter than stop_after, 5 min",
        "profile 'gpu': idle.warn_before: 10 min must be shorter than low_use_after, 8 min",
    ]
    assert find_idle_mistakes(IdleSettings(), [("gpu", ProfileIdleSettings())]) == []


@pytest.mark.parametrize(
    ("key", "value"), [("low_use", 0), ("low_use", 101), ("stop_after", 60), ("warn_before", "0s")]
)
def test_wrong_values_are_refused(key: str, value: object):
    """Percentages are 1 to 100, spans have units, and a warning takes some time."""
    with pytest.raises(ValueError, match=key):
        IdleSettings.model_validate({key: value})
