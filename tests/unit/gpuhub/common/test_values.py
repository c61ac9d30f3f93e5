"""Small pure pieces: quantities, names, GPU models, the choice of a cluster, supervisord's configuration."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuhub.common import gpu, names, units
from gpuhub.common.errors import SettingsError, SetupError
from gpuhub.common.paths import Paths
from gpuhub.config import settings
from gpuhub.ops.deploy import cluster_choice, programs


@pytest.mark.parametrize(
    ("text", "size"), [("512M", 512 * 1024**2), ("16G", 16 * 1024**3), ("1.5T", 1536 * 1024**3), ("8 GiB", 8 * 1024**3)]
)
def test_sizes_are_parsed(text, size):
    """Sizes have factors of 1024."""
    assert units.parse_size(text) == size


@pytest.mark.parametrize("value", ["16", 16, "", "G", "-1G", "1e9", "16GG", None, "16 G; rm"])
def test_invalid_sizes_are_refused(value):
    """A size without a unit, or anything else, is refused with an example."""
    with pytest.raises(ValueError, match="16G"):
        units.parse_size(value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("8h", 28800), ("2d", 172800), ("1w", 604800)]
)
def test_time_spans_are_parsed(text, seconds):
    """Spans of time are seconds."""
    assert units.parse_span(text) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(3, "3 s"), (95, "1 min 35 s"), (1800, "30 min"), (5400, "1 h 30 min"), (200000, "2 d 7 h")]
)
def test_time_spans_are_formatted(seconds, text):
    """Spans are said the way people say them."""
    assert units.format_span(seconds) == text


HOSTILE = [
    "..",
    "../../etc",
    "a/b",
    "$(id)",
    "a;b",
    "-rf",
    "a\nb",
    "ü",
    "",
    "A" * 5000,
    "GPU",
    "gpu",
    "a--b",
    "x-12345678",
]


@given(st.text(max_size=60))
def test_slugs_are_safe(text):
    """Whatever the text, its slug can stand in a container's name."""
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", names.make_slug(text))
    assert "--" not in names.make_slug(text)


@given(st.text(max_size=60), st.text(max_size=60))
def test_slugs_do_not_collide(first, second):
    """Two texts have one slug only when they are the same."""
    assert (names.make_slug(first) == names.make_slug(second)) == (first == second)


PARTS = st.one_of(st.text(max_size=40), st.from_regex(r"[a-b]{1,2}(-{1,3}[a-b]{1,2}){0,3}", fullmatch=True))


@given(PARTS, PARTS, PARTS, PARTS)
@example("ada--gpu", "", "ada", "gpu")
def test_notebook_container_names_are_unique(owner, server, other, named):
    """Owner and server stand in one name, and whatever they are, they are told apart; Docker takes every such name."""
    first, second = (
        names.notebook_container_name("gpuhub", owner, server),
        names.notebook_container_name("gpuhub", other, named),
    )
    assert (first == second) == ((owner, server) == (other, named))
    assert re.fullmatch(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,100}", first)


@given(PARTS, PARTS)
def test_owner_networks_couriers_and_volumes_are_unique(owner, other):
    """Networks, couriers and volumes are each owner's own."""
    for name in (names.user_network_name, names.courier_container_name, names.scratch_volume_name):
        assert (name("gpuhub", owner) == name("gpuhub", other)) == (owner == other)


def test_slugs_of_hostile_names_are_safe():
    """Names made to escape a path or to meet another's name are told apart."""
    slugs = [names.make_slug(text) for text in HOSTILE]
    assert len(set(slugs)) == len(HOSTILE)
    assert all(re.fullmatch(r"[a-z0-9-]+", slug) for slug in slugs)


@pytest.mark.parametrize("name", ["..", "~root", "$(id)", "a;b", "-rf", "Ada", "a" * 33, "0day", "a b", "a\n"])
def test_hostile_user_names_are_refused(name):
    """User names that mean something in a path or a shell do not match the pattern."""
    assert not re.fullmatch(names.USERNAME_PATTERN, name)


@pytest.mark.parametrize(
    ("nvml", "short"),
    [
        ("NVIDIA GeForce RTX 5070 Ti", "RTX 5070 Ti"),
        ("NVIDIA H200", "H200"),
        ("Tesla T4", "T4"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("  NVIDIA  GeForce  RTX  5090 ", "RTX 5090"),
    ],
)
def test_model_names_are_shortened(nvml, short):
    """Models are shown as people say them."""
    assert gpu.shorten_model(nvml) == short


def test_models_are_compared_as_whole_names():
    """A 5070 Ti is no 5070, and case does not matter."""
    wanted = gpu.GpuRequirement(models=("rtx 5070",))
    assert wanted.accepts(gpu.GpuSpec(model="RTX 5070", memory_mib=12227))
    assert not wanted.accepts(gpu.GpuSpec(model="RTX 5070 Ti", memory_mib=16303))


def test_advertised_memory_sizes_match():
    """A card sold as 32 GB has 32607 MiB, which is enough for 32G; a 24 GB card is not."""
    wanted = gpu.GpuRequirement(least_memory_mib=32 * 1024)
    assert wanted.accepts(gpu.GpuSpec(model="RTX 5090", memory_mib=32607))
    assert not wanted.accepts(gpu.GpuSpec(model="RTX 4090", memory_mib=24564))


def test_a_single_node_file_is_valid(tmp_path):
    """The cluster.toml made for a machine with GPUs of its own has a profile for each model, and one for all of a model."""
    cards = cluster_choice.parse_gpus(
        "NVIDIA GeForce RTX 5090, 32607\nNVIDIA GeForce RTX 5090, 32607\nNVIDIA A2, 15356\nbad\n"
    )
    file = tmp_path / "cluster.toml"
    file.write_text(cluster_choice.build_single_node(cards), encoding="utf-8")
    cluster = settings.load(file)
    assert [(profile.name, profile.title, profile.gpu_count) for profile in cluster.profiles] == [
        ("gpu1", "RTX 5090", 1),
        ("gpu1x2", "2 × RTX 5090", 2),
        ("gpu2", "A2", 1),
        ("cpu", "No GPU", 0),
    ]
    assert not cluster.has_overlay
    assert [node.desktop for node in cluster.nodes] == [True]


def test_existing_cluster_file_takes_precedence(tmp_path):
    """A cluster.toml that exists decides, whatever this machine has."""
    file = tmp_path / "cluster.toml"
    file.write_text("", encoding="utf-8")
    assert cluster_choice.choose_cluster(Paths(), file).origin is cluster_choice.ClusterOrigin.SETTINGS


def test_supervisor_configuration_is_quoted():
    """Commands and values with percent signs and blanks reach the process unchanged; line breaks are refused."""
    program = programs.Program(
        name="a", command=("/bin/echo", "50 %", ""), directory=Path("/srv"), environment={"KEY": "100%"}
    )
    text = programs.build_config(Paths("ghunit"), [program])
    assert 'command=/bin/echo "50 %%" ""' in text
    assert 'environment=KEY="100%%"' in text
    with pytest.raises(SetupError, match="cannot be given"):
        programs.build_config(Paths("ghunit"), [programs.Program(name="a", command=("a\nb",), directory=Path("/"))])


def test_no_secret_in_supervisor_configuration():
    """The programs read their secrets from files: neither a token nor a password is in commands or environments."""
    built = programs.build_programs(Paths("ghunit"), Path("/c.toml"), Path("/j.py"))
    assert [program.name for program in built] == ["proxy", "broker", "hub"]
    for program in built:
        assert not any("token" in word.lower() or "password" in word.lower() for word in program.command)
        assert set(program.environment) == {"GPUHUB_INSTANCE", "GPUHUB_CLUSTER_FILE"}


@pytest.mark.parametrize("instance", ["", "Gpuhub", "../x", "toolongname", "a-b", "1a"])
def test_instance_names_are_validated(instance):
    """An instance's name becomes paths and interface names, so it is short and plain."""
    with pytest.raises(SettingsError, match="instance"):
        Paths(instance)
