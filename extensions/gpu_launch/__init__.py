"""gpu_launch: torchrun over several nodes from a notebook cell.

`%load_ext gpu_launch` gives `%gpu_launch`, `%%gpu_launch` and the other magics; `gpu_launch.run` is the same as a
function, and runs functions too; `gpu_launch.Executor` runs calls on long-lived workers. `gpu_launch.report` and
`gpu_launch.balance` are for the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_launch.errors import BrokerError, GpuLaunchError, LaunchFailed, LaunchInterrupted, NetworkError, UsageError
from gpu_launch.options import command as _command
from gpu_launch.report import report

if TYPE_CHECKING:
    from gpu_launch.common.exchange import ExchangeFiles
    from gpu_launch.detached.endpoint import Endpoint
    from gpu_launch.launch.state import LaunchResult
    from gpu_launch.prediction.memory_estimate import MemoryEstimate
    from gpu_launch.sessions.call_executor import Executor
    from gpu_launch.training.balancer import BatchBalancer

__all__ = [
    "BrokerError",
    "Executor",
    "GpuLaunchError",
    "LaunchFailed",
    "LaunchInterrupted",
    "NetworkError",
    "UsageError",
    "balance",
    "estimate_memory",
    "load_ipython_extension",
    "report",
    "run",
    "serve",
]

_BEFORE = dict(os.environ)


def __getattr__(name: str) -> Any:
    """Import the executor when it is used: ranks and laptops need it rarely."""
    if name == "Executor":
        from gpu_launch.sessions.call_executor import Executor

        return Executor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def balance(
    dataset: Any,
    *,
    batch: int,
    speeds: Sequence[float] | None = None,
    most: int | Sequence[int] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    sampler: Any = None,
    model: Any = None,
    rebalance_every: int | None = None,
    device: Any = None,
    group: Any = None,
) -> BatchBalancer:
    """Divide each batch between ranks on GPUs of different speed, so that no rank waits for a slower one.

    Call it in every rank, after `torch.distributed.init_process_group()`. The gradient that DistributedDataParallel
    computes is exactly the mean over the whole batch:

        balanced = gpu_launch.balance(dataset, batch=256, model=model)
        loader = balanced.loader(num_workers=4)
        for epoch in range(epochs):
            balanced.set_epoch(epoch)
            for inputs, targets in loader:
                with balanced.step() as step:
                    # The mean over this rank's samples.
                    loss = loss_function(model(inputs.to(device)), targets.to(device))
                    optimizer.zero_grad()
                    (loss * step.scale).backward()
                    optimizer.step()
            balanced.rebalance()

    `batch` is the number of samples of all ranks together. It may be smaller than the number of ranks: ranks without a
    sample compute the first one of the batch with `step.scale` 0, so that all make the same number of steps.

    `speeds` has a number for each rank; only the ratios matter, and a rank with 0 gets no samples. Without it, each
    rank multiplies matrices on its device for some tenths of a second. `most` is the largest number of samples that
    this rank has memory for, or a list with one for each rank.

    `shuffle`, `seed` and `drop_last` are as in torch's DistributedSampler, but each sample is computed exactly once in
    an epoch. `sampler` gives another order, the same on all ranks; it needs a length and `set_epoch`.

    `model`, wrapped in DistributedDataParallel or not, lets `rebalance()` measure the time of a step up to its last
    gradient, before the wait for other ranks. With `rebalance_every`, that many steps are followed by a `rebalance()`.
    `device` is the current GPU, or the CPU where there is none; `group` is the process group of the ranks.

    One all_gather exchanges speeds and bounds, and checks that all ranks were called with the same settings.

    Raises:
        UsageError: on all ranks alike, if their arguments are equal: the data set or the sampler is empty or has no
            length, the sampler has no `set_epoch`, `batch` is not positive, all ranks together have less room than
            `batch`, all speeds are 0, settings differ between ranks, or there is no process group yet.
    """
    from gpu_launch.training.balancer import BatchBalancer

    return BatchBalancer(
        dataset,
        batch=batch,
        speeds=speeds,
        most=most,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        sampler=sampler,
        model=model,
        rebalance_every=rebalance_every,
        device=device,
        group=group,
    )


def estimate_memory(
    model: Any,
    *,
    batch: int = 1,
    sequence: int = 1024,
    rank: int = 16,
    checkpointing: bool = True,
    cards: Sequence[str] | None = None,
) -> MemoryEstimate:
    """Estimate the GPU memory of fine-tuning a language model, before any GPU is requested.

    `print(gpu_launch.estimate_memory("/models/Qwen3-8B", sequence=2048))` shows a table for all weights, LoRA and
    QLoRA, on one card and with FSDP2 over several, and which of the cluster's cards have the memory. `check` refuses
    what does not fit, and says what is short and what would fit:

        estimate = gpu_launch.estimate_memory("/models/Qwen3-8B", sequence=2048)
        estimate.check("lora", ranks=2)  # two cards, each with the whole model
        estimate.check("full", cards=4)  # FSDP2 divides it between four

    `model` is a folder with a config.json, a name in the Hugging Face cache, or a configuration of transformers. No
    weights are read. `batch` is the number of sequences that a card computes at once, `sequence` their tokens, `rank`
    that of LoRA's matrices on all linear layers. With `checkpointing`, activations are computed again in the backward
    pass.
    `cards` are sizes such as `["32G", "12G"]`; without it, all cards of the cluster count, whoever holds them.

    The optimizer is AdamW. Weights of `full` are in float32 with bfloat16 autocast, frozen ones of `lora` in bfloat16,
    of `qlora` in 4 bits.

    Raises:
        UsageError: transformers or peft is not installed, there is no such model, or a number or size is wrong.
        BrokerError: the broker does not answer, and `cards` is not given.
    """
    from gpu_launch import environment
    from gpu_launch.broker.cards import list_cards
    from gpu_launch.prediction import memory_estimate, model_trace

    for name, value in (("batch", batch), ("sequence", sequence), ("rank", rank)):
        if value < 1:
            raise UsageError(f"{name} is {value}: give a number from 1")
    known = list_cards(environment.read()) if cards is None else memory_estimate.parse_cards(cards)
    trace = model_trace.trace_model(model, batch=batch, sequence=sequence, rank=rank, checkpointing=checkpointing)
    return memory_estimate.MemoryEstimate(trace, known)


def load_ipython_extension(shell: Any) -> None:
    """Register the magics; nothing heavy is imported before the first launch."""
    from gpu_launch.magics import magics

    magics.register(shell)


def run(
    script: str | Path | Callable[..., Any],
    arguments: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    nnodes: int | str = 1,
    nproc_per_node: int = 1,
    module: bool = False,
    no_python: bool = False,
    model: str | Sequence[str] | None = None,
    memory: str | None = None,
    cpus: float | str | None = None,
    ram: str | None = None,
    shm: str | None = None,
    same_model: bool = False,
    exclusive: bool = False,
    stage: str | Sequence[str] | None = None,
    scavenge: bool = False,
    priority: int | None = None,
    time_limit: str | None = None,
    timeout_s: float | None = None,
    max_restarts: int = 0,
    log_dir: str | Path | None = None,
    send: Mapping[str, Any] | None = None,
    returns: Sequence[str] = (),
    preload: Sequence[str] = (),
    cold: bool = False,
    comm: str | None = None,
    keep: str | None = None,
    stacks_after: str | None = None,
    debug: int | None = None,
) -> LaunchResult:
    """Run `script` with torchrun over `nnodes` nodes, as `%gpu_launch` does; return when all ranks have ended well.

    A function instead of a script is called in every rank with `arguments` and `kwargs`; what it returns is in
    `LaunchResult.results`, by rank. A script's `arguments` are its own, such as `["--epochs", 2]`. `send` gives ranks
    variables by name, `returns` names those that are copied to `LaunchResult.returned`. Everything else is as in
    `%gpu_launch --help`: `nnodes="1:3"`, `model=["RTX 5090", "RTX 5070"]`, `memory="24G"`, `time_limit="2h"`.

    All workers are freed in every case.

    Raises:
        UsageError: before anything is asked for.
        LaunchFailed: with the failing rank's traceback.
        LaunchInterrupted: (a KeyboardInterrupt) after the user's interrupt.
    """
    from gpu_launch.launch.notebook_launch import launch

    if isinstance(arguments, str) or not isinstance(arguments, Sequence):
        raise UsageError(f'the script\'s arguments are a list, such as ["--epochs", "2"], not {arguments!r}')
    function = script if callable(script) else None
    if kwargs and function is None:
        raise UsageError(f"kwargs are for a function, and {script} is a script; its arguments are a list")
    if function is not None and (module or no_python):
        raise UsageError("module and no_python are for scripts, and this is a function")
    keywords = {
        "nnodes": nnodes,
        "nproc_per_node": nproc_per_node,
        "module": module,
        "no_python": no_python,
        "model": model or None,
        "memory": memory,
        "cpus": cpus,
        "ram": ram,
        "shm": shm,
        "same_model": same_model,
        "exclusive": exclusive,
        "stage": stage or None,
        "scavenge": scavenge,
        "priority": priority,
        "time_limit": time_limit,
        "timeout_s": timeout_s,
        "max_restarts": max_restarts,
        "log_dir": log_dir,
        "send": tuple(send or ()),
        "returns": returns,
        "preload": preload,
        "cold": cold,
        "comm": comm,
        "keep": keep,
        "stacks_after": stacks_after,
        "debug": debug,
    }
    if function is None:
        options = _command.build_from_keywords(
            keywords, script=str(script), arguments=[str(word) for word in arguments]
        )
        return launch(options, before=_BEFORE, exchange=_exchange(send, options.returns, None))
    from gpu_launch.common.exchange import FunctionCall

    call = FunctionCall(function=function, arguments=tuple(arguments), keywords=dict(kwargs or {}))
    options = _command.build_from_keywords(keywords)
    # The script of every rank is this line; then the rank calls the function, see `worker.rank_main`.
    cell = f"# gpu_launch.run calls {call.name} here.\n"
    return launch(options, cell=cell, before=_BEFORE, exchange=_exchange(send, options.returns, call))


def serve(
    model: str | Path,
    *,
    nnodes: int = 1,
    nproc_per_node: int = 1,
    name: str | None = None,
    context: int | None = None,
    slots: int = 8,
    idle: str = "30m",
    sleeps: bool = True,
    engine: str = "auto",
    port: int = 8000,
    allow_users: Sequence[str] = (),
    gpu_model: str | Sequence[str] | None = None,
    memory: str | None = None,
    same_model: bool = False,
    scavenge: bool = False,
    priority: int | None = None,
    time_limit: str | None = None,
) -> Endpoint:
    """Serve a language model over the GPUs of `nnodes` nodes, with OpenAI's API; return its endpoint at once.

    It is a job that runs without the notebook, as `gpu-launch serve` starts it:

        endpoint = gpu_launch.serve("Qwen/Qwen3-8B", nnodes=2)
        endpoint.chat("What is a lease?")

    `chat` waits for the GPUs and the weights, and shows the answer as it comes. `endpoint.stop()` ends the job. After
    the time `idle` without a request (`"0s"`: never) it releases its GPUs, and waits for them again at the next
    request; with `sleeps=False` it ends then.

    `model` is a folder that all nodes have, or the name of a shared model or of one in the Hugging Face cache. `name`
    is how requests call it. `context` is the number of tokens of the longest prompt and answer together, `slots` that
    of requests that are computed at the same time. `allow_users` may use it as well. `gpu_model` and `memory` choose
    the GPUs, as `model` and `memory` of `run` do.

    Raises:
        UsageError: before anything is asked for: there is no such model, it cannot be served, or it fits no such cards.
        BrokerError: the broker refuses.
    """
    from gpu_launch.detached import endpoint
    from gpu_launch.serving.settings import MAX_IDLE_S, ServerSettings, ServingEngine, name_model
    from gpu_launch.units import parse_span

    if engine not in set(ServingEngine):
        raise UsageError(f"engine={engine!r}: one of {', '.join(ServingEngine)} is needed.")
    settings = ServerSettings(
        model=str(model),
        name=name or name_model(str(model)),
        port=port,
        context=context,
        slots=slots,
        idle_s=parse_span("idle", idle, least=0, most=MAX_IDLE_S),
        engine=ServingEngine(engine),
    )
    demand = {
        "nnodes": nnodes,
        "nproc_per_node": nproc_per_node,
        "model": gpu_model or None,
        "memory": memory,
        "same_model": same_model,
        "scavenge": scavenge,
        "priority": priority,
        "time_limit": time_limit,
    }
    return endpoint.serve(settings, demand, users=allow_users, sleeps=sleeps, before=_BEFORE)


def _exchange(send: Mapping[str, Any] | None, returns: Sequence[str], call: Any) -> ExchangeFiles | None:
    if not (send or returns or call):
        return None
    from gpu_launch.common import exchange
    from gpu_launch.magics import notebook

    return exchange.build_exchange(send=send, returns=returns, call=call, labels=notebook.labels_here())
