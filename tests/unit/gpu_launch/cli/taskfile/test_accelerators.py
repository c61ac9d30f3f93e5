"""GPUs of task files: formats, and the cluster's own names."""

from __future__ import annotations

import pytest

from gpu_launch.broker.models import Cluster, Gpu, Node
from gpu_launch.cli.taskfile import accelerators
from gpu_launch.cli.taskfile.accelerators import Accelerators
from gpu_launch.errors import UsageError


def _cluster(**models: int) -> Cluster:
    cards = (
        Gpu(uuid=name, node="n", model=name.replace("_", " ").replace("  ", "-"), memory_mib=gib * 1024 - 600)
        for name, gib in models.items()
    )
    return Cluster(nodes=(Node(name="n", gpus=tuple(cards)),))


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("RTX5090", ("RTX 5090",)),
        ("RTX-5090", ("RTX 5090",)),
        ("rtx5070", ("RTX 5070",)),
        ("RTX5070Ti", ("RTX 5070 Ti",)),
        ("A100", ("A100-SXM4-40GB", "A100-SXM4-80GB")),
        ("A100-80GB", ("A100-SXM4-80GB",)),
        ("H100", ("H100 80GB HBM3",)),
        ("L4", ("L4",)),
        ("H200", ("H200",)),
        ("H200-80GB", ("H200",)),
    ],
)
def test_gpu_names_are_mapped_to_the_clusters_models(name: str, found: tuple[str, ...]) -> None:
    """However a task file writes them; never another card that begins alike."""
    cluster = _cluster(
        RTX_5090=32, RTX_5070=12, RTX_5070_Ti=16, A100__SXM4__40GB=40, A100__SXM4__80GB=80, H100_80GB_HBM3=80, L4=24,
        L40S=48, H200=141,
    )  # fmt: skip
    assert accelerators.find_models(Accelerators(models=(name,)), cluster) == found


def test_unknown_gpu_model_is_refused() -> None:
    """Said with what there is; one of several is enough."""
    cluster = _cluster(RTX_5090=32)
    assert accelerators.find_models(Accelerators(models=("V100", "RTX5090")), cluster) == ("RTX 5090",)
    with pytest.raises(UsageError, match="asks for V100 or RTX5080, and the cluster has RTX 5090"):
        accelerators.find_models(Accelerators(models=("V100", "RTX5080")), cluster)
