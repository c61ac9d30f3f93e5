"""Applies a mode of `--comm` to an unmodified script: torch's communication hooks for its DistributedDataParallel.

`install` is called in each rank before the script. The hook is registered when the script constructs
DistributedDataParallel (DDP). What a mode cannot work with is refused as soon as the script uses it.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from gpu_launch.common.import_hook import call_after_import
from gpu_launch.errors import UsageError
from gpu_launch.training import diloco
from gpu_launch.training.comm_modes import (
    LOCAL_PERIOD,
    MATHEMATICS,
    POWERSGD_LEAST_RATE,
    POWERSGD_RANK,
    VARIABLE,
    WARM_UP_STEPS,
    CommMode,
)

_SHARDED = "each rank updates a part of the parameters from its own gradients, which differ between two averages"
_SCALED = (
    "it passes over a step on each rank by itself, so that the ranks would average at different steps. bfloat16 "
    "autocast needs no scaler"
)
_KEPT = (
    "it passes over a step whose gradients are not finite, but what was left out of them is added to all later ones. "
    "bfloat16 autocast needs no scaler"
)
_REPEATED = "it calls backward several times in a step, and the results must be comparable"
_REFUSED_LOCALLY = {
    "optim.LBFGS": _REPEATED,
    "amp.GradScaler": _SCALED,
    "distributed.optim.ZeroRedundancyOptimizer": _SHARDED,
}
#: Classes that a mode cannot work with, below torch, and why.
_REFUSED = {
    CommMode.BF16: {},
    CommMode.POWERSGD: {"optim.LBFGS": _REPEATED, "amp.GradScaler": _KEPT},
    CommMode.LOCAL: _REFUSED_LOCALLY,
    CommMode.DILOCO: _REFUSED_LOCALLY,
}


def install() -> None:
    """Apply the mode that is named in this process's environment, when torch has been imported."""
    name = os.environ.get(VARIABLE, "")
    if name and name != CommMode.EXACT:
        call_after_import("torch", lambda torch: DdpCommunication(CommMode(name)).install(torch))


class DdpCommunication:
    """The communication of all DDP models of this process in one mode."""

    def __init__(self, mode: CommMode) -> None:
        self._mode = mode
        #: Exact steps at the start, where the nodes train alone later.
        self._warm_up_steps = 0 if mode is CommMode.DILOCO else WARM_UP_STEPS
        self._models: WeakSet[Any] = WeakSet()
        #: The state of torch's hook for post-local SGD, by parameter, and the steps since it began, by optimizer.
        self._local_states: Any = {}
        self._local_steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        #: With `diloco`, the number of parameters that are synchronized, by optimizer.
        self._synchronized: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._replicas = diloco.DilocoReplicas()
        #: A step's gradients were not exchanged between nodes.
        self._is_local = False
        self._had_model = False

    def install(self, torch: Any) -> None:
        """Wrap the classes that a script constructs, and watch the steps of its optimizers."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils.weak import WeakTensorKeyDictionary

        self._local_states = WeakTensorKeyDictionary()
        ddp = torch.nn.parallel.DistributedDataParallel
        wrap_method(ddp, "__init__", self._construct)
        for name in ("register_comm_hook", "_register_builtin_comm_hook"):
            wrap_method(ddp, name, self._register)
        for path, reason in _REFUSED[self._mode].items():
            self._refuse(_find_class(path), reason)
        register_optimizer_step_pre_hook(self._before_step)
        if self._mode is CommMode.LOCAL:
            register_optimizer_step_post_hook(self._after_step)
        if self._mode is CommMode.DILOCO:
            if not diloco.is_installed():
                raise self._refusal(diloco.NOT_INSTALLED)
            register_optimizer_step_pre_hook(self._synchronize)
            atexit.register(self._replicas.close)
        atexit.register(self._warn_if_unused)

    def _construct(self, original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("mixed_precision") is not None:
            raise self._refusal("DistributedDataParallel(mixed_precision=...) has a communication hook of its own")
        original(model, *args, **kwargs)
        self._had_model = True
        ranks = model.process_group.size()
        if ranks == 1:
            return
        if any(getattr(module, "sparse", False) for module in model.modules()):
            raise self._refusal("a layer has sparse gradients (sparse=True), which torch's hooks do not take")
        if self._mode is CommMode.DILOCO and ranks != (world := int(os.environ["WORLD_SIZE"])):
            raise self._refusal(f"the model's process group has {ranks} of {world} ranks")
        self._attach(model)
        self._models.add(model)
        if model.process_group.rank() == 0:
            sys.stderr.write(f"gpu_launch: --comm {self._mode}: {MATHEMATICS[self._mode]}\n")

    def _register(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        if model in self._models:
            raise self._refusal("the script registers a communication hook of its own")
        return original(model, *args, **kwargs)

    def _attach(self, model: Any) -> None:
        """Register torch's hook of this mode."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook

        group = model.process_group
        if self._mode is CommMode.BF16:
            # DDP accepts torch's function itself with NCCL only, but gloo adds up bfloat16 as well.
            hook = lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket)  # noqa: E731, PLW0108
            model.register_comm_hook(group, hook)
        elif self._mode is CommMode.POWERSGD:
            model.register_comm_hook(build_powersgd_state(group, WARM_UP_STEPS), powerSGD_hook.powerSGD_hook)
        else:
            node = _find_node_group(group)
            state = post_localSGD_hook.PostLocalSGDState(
                group, node, start_localSGD_iter=self._warm_up_steps, post_local_gradient_allreduce=node is not None
            )
            # DDP refuses a hook with annotations other than its own.
            model.register_comm_hook(state, lambda state, bucket: self._exchange_locally(state, bucket))  # noqa: PLW0108
            for parameter in model.parameters():
                if parameter.requires_grad:
                    self._local_states[parameter] = state

    def _exchange_locally(self, state: Any, bucket: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook

        if state.iter == WARM_UP_STEPS:
            if not (self._local_steps or self._synchronized):
                raise self._refusal("no optimizer of torch.optim makes steps, after which parameters could be averaged")
            self._is_local = True
        return post_localSGD_hook.post_localSGD_hook(state, bucket)

    def _before_step(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        import torch.distributed as dist

        if not self._had_model and dist.is_initialized() and dist.get_world_size() > 1:
            raise self._refusal(
                "the script trains without DistributedDataParallel (such as with FSDP, DeepSpeed or all-reduces of its "
                "own), and the modes are those of its communication hooks"
            )

    def _synchronize(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Before an optimizer's first step, have torchft synchronize its parameters from then on."""
        parameters = [parameter for parameter, _ in self._list_local(optimizer)]
        count = self._synchronized.get(optimizer, 0)
        if not count and parameters:
            self._synchronized[optimizer] = len(parameters)
            self._replicas.attach(optimizer, parameters)
        elif count != len(parameters):
            raise self._refusal(
                f"the optimizer had {count} parameters of the model in its first step and has {len(parameters)} now"
            )

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """Average the parameters of this optimizer after every `LOCAL_PERIOD` steps of the nodes by themselves."""
        from torch.distributed.algorithms.model_averaging.utils import average_parameters

        groups: dict[int, list[Any]] = {}
        states: dict[int, Any] = {}
        for parameter, state in self._list_local(optimizer):
            groups.setdefault(id(state), []).append(parameter)
            states[id(state)] = state
        if not states:
            return
        steps = self._local_steps[optimizer] = self._local_steps.get(optimizer, 0) + self._is_local
        if self._is_local and steps % LOCAL_PERIOD == 0:
            for key, parameters in groups.items():
                average_parameters(iter(parameters), states[key].process_group)

    def _list_local(self, optimizer: Any) -> list[tuple[Any, Any]]:
        """Return an optimizer's parameters that belong to a model with the hook for post-local SGD, with its state."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        found = ((parameter, self._local_states.get(parameter)) for parameter in parameters)
        return [(parameter, state) for parameter, state in found if state is not None]

    def _refuse(self, refused: type, reason: str) -> None:
        def construct(original: Callable[..., None], made: Any, *args: Any, **kwargs: Any) -> None:
            if kwargs.get("enabled", True):
                raise self._refusal(f"{refused.__name__}: {reason}")
            original(made, *args, **kwargs)

        wrap_method(refused, "__init__", construct)

    def _refusal(self, reason: str) -> UsageError:
        return UsageError(f"--comm {self._mode} cannot be used: {reason}. Use another mode, or --comm exact.")

    def _warn_if_unused(self) -> None:
        is_first_rank = os.environ.get("RANK") == "0" and multiprocessing.parent_process() is None
        if not self._had_model and is_first_rank:
            sys.stderr.write(
                f"gpu_launch: --comm {self._mode} had no effect: the script constructed no DistributedDataParallel\n"
            )


def build_powersgd_state(group: Any, exact_steps: int) -> Any:
    """Return the state of torch's PowerSGD hook for one model."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    return PowerSGDState(
        group,
        matrix_approximation_rank=POWERSGD_RANK,
        start_powerSGD_iter=exact_steps,
        min_compression_rate=POWERSGD_LEAST_RATE,
        # A gradient of 0, such as that of an unused expert, would be divided by 0.
        orthogonalization_epsilon=1e-8,
    )


def _find_node_group(group: Any) -> Any:
    """Return the group of this node's ranks; None where each rank trains alone."""
    import torch.distributed as dist

    size = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if size == 1 or group.size() != dist.get_world_size():
        return None
    return dist.new_subgroups(group_size=size)[0]


def _find_class(path: str) -> type:
    module, _, name = path.rpartition(".")
    found: type = getattr(importlib.import_module(f"torch.{module}"), name)
    return found


def wrap_method(owner: type, name: str, call: Callable[..., Any]) -> None:
    """Replace a method by `call`, whose first argument is the original one."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(original, *args, **kwargs)

    setattr(owner, name, wrapper)
