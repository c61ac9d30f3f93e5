"""How the ranks of a DistributedDataParallel training exchange gradients: the modes of `--comm`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

#: The variable in which ranks find their mode; not set where the script's own communication is left as it is.
VARIABLE = "GPU_LAUNCH_COMM"
#: Rank of the matrices that replace each gradient matrix with `powersgd`.
POWERSGD_RANK = 4
#: A gradient is replaced only where that makes it smaller by more than this factor (torch's default).
POWERSGD_LEAST_RATE = 2
#: Steps at the start with exact gradients, for `powersgd` and `local`.
WARM_UP_STEPS = 100
#: Steps of `local` between two averages of the parameters.
LOCAL_PERIOD = 8
#: Steps of `diloco` between two synchronizations. The paper (https://arxiv.org/abs/2311.08105) takes 500, for long
#: trainings.
DILOCO_PERIOD = 50
#: The outer optimizer of `diloco` is SGD with Nesterov momentum. The paper's momentum of 0.9 learned no better under
#: AdamW, and diverged under SGD with momentum.
DILOCO_OUTER_LR = 0.7
DILOCO_OUTER_MOMENTUM = 0.5


class CommMode(StrEnum):
    """A way to exchange gradients."""

    EXACT = "exact"
    BF16 = "bf16"
    POWERSGD = "powersgd"
    LOCAL = "local"
    DILOCO = "diloco"


#: Another word that `--comm` takes: the mode that a prediction finds best.
AUTO = "auto"
#: Steps between two exchanges of all parameters, for modes that exchange no gradients.
PERIODS: Mapping[CommMode, int] = {CommMode.LOCAL: LOCAL_PERIOD, CommMode.DILOCO: DILOCO_PERIOD}
#: What each mode changes about the mathematics, as one sentence for a person.
MATHEMATICS: Mapping[CommMode, str] = {
    CommMode.EXACT: "gradients are the mean over all ranks, as DDP computes it",
    CommMode.BF16: (
        "gradients are rounded to bfloat16 (8 significant bits) before they are added up; all ranks get the same mean"
    ),
    CommMode.POWERSGD: (
        f"after {WARM_UP_STEPS} exact steps, gradients of matrices are approximated by rank {POWERSGD_RANK}, and each "
        "rank adds what was left out to its next gradient; all ranks get the same mean"
    ),
    CommMode.LOCAL: (
        f"after {WARM_UP_STEPS} exact steps, each node trains alone, and parameters are averaged after every "
        f"{LOCAL_PERIOD} steps; the nodes' models differ in between"
    ),
    CommMode.DILOCO: (
        f"each node trains alone, and after every {DILOCO_PERIOD} steps the mean change of the parameters is the "
        f"gradient of an outer optimizer (SGD, learning rate {DILOCO_OUTER_LR}, Nesterov momentum "
        f"{DILOCO_OUTER_MOMENTUM}), from whose parameters all continue; the nodes' models differ in between"
    ),
}
