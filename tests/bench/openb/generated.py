"""A small trace of OpenB's shape from a seeded generator, so that the benchmarks run anywhere.

Columns, models, sizes and proportions are like OpenB's: mostly nodes with 8 GPUs and little CPU, some with 2 GPUs and
much; half of the tasks for one whole GPU, a third for a part, few for several, some for none, some for certain models;
run times with a long tail; and an increasing arrival rate.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

#: Count, model, GPUs, CPU in thousandths of a core, memory in MiB.
_NODES = (
    (28, "G2", 8, 96000, 393216),
    (18, "T4", 2, 104000, 524288),
    (6, "P100", 2, 16000, 122880),
    (3, "G3", 8, 128000, 786432),
    (3, "V100M16", 4, 32000, 131072),
    (2, "V100M32", 8, 96000, 786432),
)
#: Weight, GPUs, thousandths of each.
_SHAPES = (
    (48.0, 1, 1000),
    (13.0, 1, 810),
    (11.0, 1, 470),
    (4.0, 1, 320),
    (3.0, 1, 650),
    (3.0, 1, 230),
    (2.0, 1, 160),
    (2.0, 1, 550),
    (0.4, 2, 1000),
    (0.3, 4, 1000),
    (0.3, 8, 1000),
    (13.0, 0, 0),
)
#: Weight, CPU in thousandths of a core, memory in MiB: for each GPU, or for a task without one.
_NEEDS = (
    (12.0, 3152, 5600),
    (18.0, 11300, 49152),
    (12.0, 11908, 47104),
    (10.0, 8000, 30517),
    (6.0, 4000, 22888),
    (5.0, 18708, 64512),
    (3.0, 14200, 58368),
)
#: Weight, allowed models.
_SPECS = ((94.0, ""), (3.0, "T4|P100"), (2.0, "V100M32"), (1.0, "G2|G3"))
_PODS = 1500
#: Seconds from the first task to the last.
_SPAN = 7 * 86400
_SEED = 2023


def node_rows() -> Iterator[dict[str, str]]:
    """Yield the 60 nodes."""
    number = 0
    for count, model, gpus, cpu_milli, memory_mib in _NODES:
        for _ in range(count):
            yield {
                "sn": f"node-{number:04}",
                "cpu_milli": str(cpu_milli),
                "memory_mib": str(memory_mib),
                "gpu": str(gpus),
                "model": model,
            }
            number += 1


def pod_rows(seed: int = _SEED) -> Iterator[dict[str, str]]:
    """Yield the 1,500 tasks."""
    draw = random.Random(seed)
    for number in range(_PODS):
        _, gpus, milli = draw.choices(_SHAPES, [shape[0] for shape in _SHAPES])[0]
        _, cpu_milli, memory_mib = draw.choices(_NEEDS, [need[0] for need in _NEEDS])[0]
        spec = draw.choices([spec[1] for spec in _SPECS], [spec[0] for spec in _SPECS])[0]
        created_at = round(_SPAN * draw.random() ** 0.7)
        scheduled_at = created_at + round(draw.expovariate(1 / 60))
        yield {
            "name": f"pod-{number:04}",
            "cpu_milli": str(cpu_milli * max(1, min(gpus, 6))),
            "memory_mib": str(memory_mib * max(1, min(gpus, 6))),
            "num_gpu": str(gpus),
            "gpu_milli": str(milli),
            "gpu_spec": spec if gpus == 1 else "",
            "qos": "LS",
            "pod_phase": "Running",
            "creation_time": str(created_at),
            "deletion_time": str(scheduled_at + round(draw.lognormvariate(8.5, 1.8))),
            "scheduled_time": str(scheduled_at),
        }
