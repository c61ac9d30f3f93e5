"""Which profile a new instance gets, and errors with what would work, before anything is requested."""

from __future__ import annotations

import pytest

from gpu_launch.broker.models import Cluster, Gpu, Node, Profile
from gpu_launch.cli.instances.selection import check_name, choose_profile
from gpu_launch.errors import UsageError

PROFILES = (
    Profile(name="cpu", gpu_count=0, image="gpuhub/notebook:latest"),
    Profile(name="part", models=("RTX 5070",), share=2, image="gpuhub/notebook:latest"),
    Profile(name="one", models=("RTX 5070",), image="gpuhub/notebook:latest"),
    Profile(name="two", models=("RTX 5070",), gpu_count=2, image="lab/transformers:1"),
    Profile(name="big", models=("RTX 5090",), image="lab/transformers:1", images=("lab/transformers:1", "lab/jax:2")),
    Profile(name="any", image="lab.example:5000/other"),
)


def build_cluster(*profiles: Profile) -> Cluster:
    gpus = tuple(Gpu(uuid=f"GPU-{model}", node="rig1", model=model) for model in ("RTX 5070", "RTX 5090", "RTX 5060"))
    return Cluster(nodes=(Node(name="rig1", gpus=gpus),), profiles=profiles or PROFILES)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"profile": "part"}, "part"),
        ({"model": "rtx5070"}, "one"),
        ({"model": "RTX 5090"}, "big"),
        ({"image": "lab/transformers"}, "big"),
        ({"image": "lab/jax"}, "big"),
        ({"image": "lab/transformers:1", "model": "RTX 5090"}, "big"),
        ({"image": "lab.example:5000/other"}, "any"),
        ({"image": "gpuhub/notebook:latest"}, "cpu"),
    ],
)
def test_profile_is_the_smallest_that_fits(wanted: dict[str, str], expected: str) -> None:
    """A whole GPU comes before a share, one GPU before two."""
    assert choose_profile(build_cluster(), **wanted).name == expected


def test_only_profile_needs_no_option() -> None:
    """A cluster with one profile asks nothing."""
    assert choose_profile(build_cluster(PROFILES[0])).name == "cpu"


@pytest.mark.parametrize(
    ("wanted", "first"),
    [
        ({}, "Which profile? Name it, or a GPU model with --model."),
        ({"profile": "huge"}, "There is no profile huge for you."),
        ({"profile": "cpu", "model": "RTX 5070"}, "No profile has --profile cpu and --model RTX 5070."),
        ({"model": "RTX 5060"}, "No profile has --model RTX 5060."),
        ({"image": "lab/nothing"}, "No profile has --image lab/nothing."),
        ({"image": "lab/transformers:2"}, "No profile has --image lab/transformers:2."),
    ],
)
def test_error_says_what_would_work(wanted: dict[str, str], first: str) -> None:
    """Two lines: what is wrong, and the command with the profiles, and for a wrong image the images, that there are."""
    with pytest.raises(UsageError) as error:
        choose_profile(build_cluster(), **wanted)
    wrong, remedy = str(error.value).split("\n")
    assert wrong == first
    assert remedy == (
        "gpu-launch instance start --profile NAME; there are: cpu (no GPU), part (1/2 of RTX 5070), one (RTX 5070), "
        "two (2 × RTX 5070), big (RTX 5090), any (any GPU)"
    ) + (
        "; images: gpuhub/notebook:latest, lab.example:5000/other, lab/jax:2, lab/transformers:1"
        if "image" in wanted
        else ""
    )


@pytest.mark.parametrize("name", ["", "a", "big", "a-b-2", "x" * 32])
def test_names_that_the_hub_accepts(name: str) -> None:
    """The empty name is the default instance."""
    check_name(name)


@pytest.mark.parametrize(
    ("name", "valid"), [("My Model", "my-model"), ("-x", "x"), ("x" * 33, "x" * 32), ("..", "big"), ("a/b", "a-b")]
)
def test_other_names_are_refused_with_one_that_works(name: str, valid: str) -> None:
    """The remedy is the nearest valid name."""
    with pytest.raises(UsageError, match=f"instance start --name {valid}$"):
        check_name(name)
