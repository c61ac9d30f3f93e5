"""Resources of task files: alternatives and container images."""

from __future__ import annotations

import pytest

from gpu_launch.broker.gpu_request import Amount
from gpu_launch.cli.taskfile import parser
from gpu_launch.cli.taskfile.accelerators import Accelerators
from gpu_launch.errors import UsageError


def _parse(resources: str) -> parser.TaskFile:
    (task,) = parser.parse_task_files("run: x\nresources:\n" + resources)
    return task


A10G_OR_L4 = """\
  cpus: 4+
  ordered:
    - infra: aws
      accelerators: A10g
    - infra: gcp
      accelerators: [L4, A10g]
"""

DIFFERENT_NUMBERS = """\
  accelerators: H100:2
  any_of:
    - use_spot: true
    - accelerators: A100:8
    - {accelerators: null, cpus: 8}
    - {accelerators: A100:8, infra: gcp}
"""


def test_alternatives_of_one_number_are_models_in_order_of_preference() -> None:
    """One request expresses them, and the scheduler chooses; each alternative's keys are noted with their lines."""
    task = _parse(A10G_OR_L4)
    assert (task.accelerators, task.alternatives) == (Accelerators(models=("A10g", "L4"), count=1), ())
    assert [note.partition(" is ")[0] for note in task.notes] == [
        "line 5: `resources.infra: aws`",
        "line 7: `resources.infra: gcp`",
    ]


def test_alternatives_of_different_numbers_are_for_the_cluster_to_choose() -> None:
    """Those without a key of their own have the one outside."""
    task = _parse(DIFFERENT_NUMBERS)
    assert task.accelerators is None
    assert (
        task.notes[-1] == "line 4: resources.any_of: cpus and memory differ, and those of the first alternative count"
    )
    assert task.alternatives == (
        Accelerators(models=("H100",), count=2),
        Accelerators(models=("A100",), count=8),
    )


def test_models_with_different_numbers_are_alternatives() -> None:
    """Neighbours with the same number are one; a choice around them is in the file's order."""
    one, four = Accelerators(models=("K80", "T4"), count=1), Accelerators(models=("T4",), count=4)
    assert _parse("  accelerators: {'K80:1', 'T4:1', 'T4:4'}\n").alternatives == (one, four)
    assert _parse("  accelerators: [K80, T4]\n").accelerators == one
    mixed = "  accelerators: [K80, T4, 'T4:4']\n  any_of: [{accelerators: 'H100:2'}, {use_spot: true}]\n"
    assert _parse(mixed).alternatives == (Accelerators(models=("H100",), count=2), one, four)


def test_alternatives_that_differ_only_in_the_cloud_are_one() -> None:
    """As in files that try spot machines first."""
    task = _parse("  accelerators: T4\n  any_of:\n    - use_spot: true\n    - use_spot: false\n")
    assert (task.accelerators, task.alternatives) == (Accelerators(models=("T4",)), ())
    assert _parse("  any_of: [{infra: aws}, {infra: gcp}]\n").accelerators is None
    assert _parse("  any_of: [{accelerators: T4}, {infra: gcp}]\n").alternatives == (
        Accelerators(models=("T4",)),
        None,
    )


@pytest.mark.parametrize(
    ("text", "image"),
    [
        ("docker:nvcr.io/nvidia/pytorch:24.07-py3", "docker:nvcr.io/nvidia/pytorch:24.07-py3"),
        ("ghcr.io/lab/nccl-tests:12.8", "ghcr.io/lab/nccl-tests:12.8"),
        ("{us-east-1: 'docker:ubuntu'}", "docker:ubuntu"),
        ("ami-062ddd90fb6f8267a", ""),
        ("skypilot:gpu-ubuntu-2004", ""),
        ("projects/lab/global/images/ubuntu", ""),
        ("{us-east-1: 'skypilot:gpu-ubuntu-1804'}", ""),
    ],
)
def test_container_images_differ_from_images_of_clouds(text: str, image: str) -> None:
    """A profile would have to have them; an image of a cloud's machine has no effect."""
    task = _parse(f"  image_id: {text}\n")
    assert task.image == image
    assert len(task.notes) == (0 if image else 1)
    assert _parse(f"  ordered:\n    - image_id: {text}\n").image == image


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("  any_of: []\n", "line 3: resources.any_of is a list of mappings"),
        ("  any_of: [A100]\n", "line 3: resources.any_of is a list of mappings"),
        ("  ordered: {a: 1}\n", "line 3: resources.ordered is a list of mappings"),
        ("  any_of: [{zone: a}]\n  ordered: [{zone: a}]\n", "line 4: resources.ordered and resources.any_of exclude"),
        ("  any_of: [{ordered: [{zone: a}]}]\n", "line 3: resources.ordered cannot be within resources.any_of"),
        ("  any_of:\n  - acelerators: A100\n", "line 4: resources.acelerators is not known"),
        ("  ordered:\n  - accelerators: A100:x\n", "line 4: resources.accelerators asks for A100:x"),
    ],
)
def test_malformed_alternatives_are_refused(text: str, error: str) -> None:
    """With the line of the alternative."""
    with pytest.raises(UsageError) as caught:
        _parse(text)
    assert error in str(caught.value)


def test_gpus_is_another_name_of_accelerators() -> None:
    """SkyPilot takes both."""
    assert _parse("  gpus: H100:8\n").accelerators == Accelerators(models=("H100",), count=8)


@pytest.mark.parametrize("ports", ["8080", "'8080'", "[8080]"])
def test_one_port_is_the_jobs(ports: str) -> None:
    """In each of SkyPilot's forms."""
    assert _parse(f"  ports: {ports}\n").port == 8080


@pytest.mark.parametrize("ports", ["0", "70000", "http", "true", "[80, x]", "{a: 1}"])
def test_ports_that_are_none_are_refused(ports: str) -> None:
    """The text names the line and the value."""
    with pytest.raises(UsageError, match=r"line 3: resources\.ports .*a port"):
        _parse(f"  ports: {ports}\n")


@pytest.mark.parametrize(
    ("resources", "cpus", "ram"),
    [
        ("  cpus: 8\n  memory: 32\n", Amount(8), Amount(32 * 1024)),
        ("  cpus: 0.5+\n  memory: 1.5+\n", Amount(0.5, or_more=True), Amount(1536, or_more=True)),
        ("  memory: 512MB\n", None, Amount(512)),
        ("  cpus: 4x\n  memory: 2x+\n", None, None),
        ("  cpus: null\n  memory: null\n", None, None),
    ],
)
def test_cpus_and_memory_are_honoured(resources: str, cpus: Amount | None, ram: Amount | None) -> None:
    """In cores and GB, with `+` for at least that; a multiple of something else says nothing here."""
    task = _parse(resources)
    assert (task.cpus, task.ram) == (cpus, ram)


@pytest.mark.parametrize("resources", ["  cpus: 99999\n", "  cpus: 0\n", "  memory: 0.01\n", "  memory: 7kb\n"])
def test_impossible_sizes_are_refused(resources: str) -> None:
    """With line, value and a form that is right."""
    with pytest.raises(UsageError, match=r"line 3: resources\.\w+ is .*, which no node could have: a size such as 8\+"):
        _parse(resources)
