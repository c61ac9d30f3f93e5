"""`recipe:sweep`: trials of a fine-tuning with learning rates and adapter ranks that Optuna chooses.

The study is a file in the job's folder, which the tasks of an array share.
"""

from __future__ import annotations

import gc
import math
import os
import shlex
from pathlib import Path
from typing import Any

from gpu_launch.errors import UsageError
from gpu_launch.recipes import program
from gpu_launch.recipes.run_record import RunRecord, draw_curves, write_line

STUDY = "study.journal"
_LEAST_ADAPTER_RANK = 4


def main(words: list[str] | None = None) -> None:
    """Run this task's trials in the current folder, and write the best values so far."""
    asked = program.parse_arguments(
        words, model=str, data=program.read_path, method=str, trials=int, steps=int, batch=int, sequence=int,
        least_rate=float, most_rate=float, most_adapter_rank=int, every=int, held_out=float, seed=int,
    )  # fmt: skip
    with program.reported_errors("sweep", "optuna"):
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise UsageError("a sweep uses one GPU; several work on it as tasks of an array: --array 0-3.")
        if asked.least_rate > asked.most_rate:
            raise UsageError(f"least_rate {asked.least_rate} is above most_rate {asked.most_rate}.")
        _search(vars(asked), Path.cwd())


def _search(asked: dict[str, Any], folder: Path) -> None:
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    record = RunRecord(folder)
    record.write_parameters(asked)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    task = int(os.environ.get("GPU_LAUNCH_ARRAY_INDEX") or 0)
    study = optuna.create_study(
        study_name="sweep",
        # Its lock is made for homes on NFS.
        storage=JournalStorage(JournalFileBackend(str(folder / STUDY))),
        # Tasks of an array must not all begin with the same values.
        sampler=optuna.samplers.TPESampler(seed=asked["seed"] + task),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=asked["every"]),
        load_if_exists=True,
    )
    done = sum(trial.user_attrs.get("task") == task for trial in study.get_trials(states=_ended_states(optuna)))
    for _ in range(done, asked["trials"]):
        study.optimize(lambda trial: _run_trial(trial, asked, folder, task), n_trials=1)
        _write(study, record, folder, asked)


def _ended_states(optuna: Any) -> tuple[Any, ...]:
    return (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)


def _run_trial(trial: Any, asked: dict[str, Any], folder: Path, task: int) -> float:
    """Train with the values that the study suggests; return the loss on held-out text."""
    import optuna
    import torch

    from gpu_launch.recipes.causal_model import find_model
    from gpu_launch.recipes.trainer import Trainer, TrainerSettings

    trial.set_user_attr("task", task)
    settings = TrainerSettings(
        model=find_model(asked["model"]),
        data=asked["data"],
        method=asked["method"],
        epochs=math.inf,
        steps=asked["steps"],
        batch=asked["batch"],
        sequence=asked["sequence"],
        rate=trial.suggest_float("rate", asked["least_rate"], asked["most_rate"], log=True),
        adapter_rank=trial.suggest_int("adapter_rank", _LEAST_ADAPTER_RANK, asked["most_adapter_rank"], log=True),
        every=asked["every"],
        held_out=asked["held_out"],
        seed=asked["seed"],
    )

    def note(step: int, loss: float) -> None:
        trial.report(loss, step)
        if trial.should_prune():
            raise optuna.TrialPruned

    write_line(f"trial {trial.number}: {trial.params}")
    try:
        result = Trainer(settings, folder / f"trial-{trial.number}", note).train()
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if result.is_interrupted:
        raise SystemExit(0)
    return result.loss if result.held_out_loss is None else result.held_out_loss


def _write(study: Any, record: RunRecord, folder: Path, asked: dict[str, Any]) -> None:
    """Write the best trial so far, and a chart of all that are complete."""
    complete = [trial for trial in study.trials if trial.value is not None and trial.state.name == "COMPLETE"]
    pruned = [trial for trial in study.trials if trial.value is not None and trial.state.name == "PRUNED"]
    if not complete:
        return
    points = {
        name: [(trial.params["rate"], trial.value) for trial in trials]
        for name, trials in (("complete", complete), ("ended early", pruned))
    }
    draw_curves(folder / "loss.png", points, x="learning rate", y="loss on held-out text", is_logarithmic=True)
    best = study.best_trial
    chosen = {name: asked[name] for name in ("model", "data", "method", "batch", "sequence")} | best.params
    sets = shlex.join(word for name, value in chosen.items() for word in ("--set", f"{name}={value}"))
    record.write_result(
        {
            "trials": len(complete) + len(pruned),
            "best_trial": best.number,
            "loss": best.value,
            "parameters": best.params,
            "train_with": f"gpu-launch run {sets} recipe:finetune",
        }
    )


if __name__ == "__main__":
    main()
