"""`recipe:finetune`: fine-tunes a causal language model on text; every rank runs this module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gpu_launch.recipes import program
from gpu_launch.recipes.run_record import RunRecord

#: Folders of the results, in the job's folder.
ADAPTER, MODEL = "adapter", "model"


def main(words: list[str] | None = None) -> None:
    """Train in the current folder, and write the adapter, or the model."""
    asked = program.parse_arguments(
        words, model=str, data=program.read_path, method=str, epochs=float, steps=int, batch=int, sequence=int,
        rate=float, adapter_rank=int, every=int, held_out=float, seed=int, merge=program.read_flag,
    )  # fmt: skip
    with program.reported_errors("finetune", *(["bitsandbytes"] if asked.method == "qlora" else [])):
        from gpu_launch.recipes.causal_model import joined_group

        with joined_group():
            _train(vars(asked), Path.cwd())


def _train(asked: dict[str, Any], folder: Path) -> None:
    from gpu_launch.recipes.causal_model import Device, find_model
    from gpu_launch.recipes.trainer import Trainer, TrainerSettings

    is_first = Device.find().rank == 0
    record = RunRecord(folder)
    if is_first:
        record.write_parameters(asked)
    is_merged = asked.pop("merge")
    settings = TrainerSettings(**asked | {"model": find_model(asked["model"])})
    trainer = Trainer(settings, folder)
    result = trainer.train()
    if result.is_interrupted or not is_first:
        return
    artefacts = _save(trainer.model, settings.model, folder, method=settings.method, is_merged=is_merged)
    record.write_result(
        {
            "steps": result.steps,
            "loss": result.loss,
            "held_out_loss": result.held_out_loss,
            "tokens_per_s": result.tokens_per_s,
            "artefacts": artefacts,
        }
    )


def _save(model: Any, source: Path, folder: Path, *, method: str, is_merged: bool) -> list[str]:
    """Write the adapter, the model or both, and return their folders."""
    if method != "full":
        model.save_pretrained(folder / ADAPTER)
        if not is_merged:
            return [ADAPTER]
        model = _merge(source, folder / ADAPTER)
    model.save_pretrained(folder / MODEL)
    for file in source.iterdir():  # its tokenizer, without which nothing reads the model
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template", "added_tokens")):
            (folder / MODEL / file.name).write_bytes(file.read_bytes())
    return [MODEL] if method == "full" else [ADAPTER, MODEL]


def _merge(source: Path, adapter: Path) -> Any:
    """Return the model, never in 4 bits, with the adapter in its weights."""
    import torch
    from peft import PeftModel

    from gpu_launch.recipes.causal_model import Device, load_model

    model = load_model(source, Device(torch.device("cpu"), 0, 1))
    return PeftModel.from_pretrained(model, adapter).merge_and_unload()


if __name__ == "__main__":
    main()
