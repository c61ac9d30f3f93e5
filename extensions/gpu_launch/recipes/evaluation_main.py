"""`recipe:evaluate`: loss, perplexity and accuracy of a causal language model on text; every rank runs this module."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from gpu_launch.errors import UsageError
from gpu_launch.recipes import program
from gpu_launch.recipes.run_record import RunRecord
from gpu_launch.report import report

#: Batches between two lines of metrics.
_EVERY = 20


def main(words: list[str] | None = None) -> None:
    """Evaluate, and write the result into the current folder."""
    asked = program.parse_arguments(
        words, model=str, data=program.read_path, adapter=program.read_path, batch=int, sequence=int, held_out=float,
        most=int,
    )  # fmt: skip
    with program.reported_errors("evaluate"):
        from gpu_launch.recipes.causal_model import joined_group

        with joined_group():
            _evaluate(vars(asked), RunRecord(Path.cwd()))


def _evaluate(asked: dict[str, Any], record: RunRecord) -> None:
    import torch

    from gpu_launch.recipes import text_data
    from gpu_launch.recipes.causal_model import Device, find_model, load_model

    device = Device.find()
    if device.rank == 0:
        record.write_parameters(asked)
        record.continue_from(-1)
    folder = find_model(asked["model"])
    model = _add_adapter(load_model(folder, device), asked["adapter"]).eval()
    codec = text_data.load_codec(folder, model.config.vocab_size)
    sequences = text_data.build_sequences(asked["data"], codec, asked["sequence"])
    if asked["held_out"] < 1:
        sequences = text_data.split_held_out(sequences, asked["held_out"])[1]
    sequences = sequences[: asked["most"] or None]
    batches = sequences.split(asked["batch"])
    # All ranks make the same number of rounds, so that they meet in each sum.
    rounds = math.ceil(len(batches) / device.world)
    loss = right = tokens = 0.0
    for number in range(rounds):
        index = number * device.world + device.rank
        sums = [0.0, 0.0, 0.0]
        if index < len(batches):
            with torch.no_grad():
                sums = _measure(model, batches[index].to(device.torch), device)
        loss, right, tokens = (
            total + device.sum(value) for total, value in zip((loss, right, tokens), sums, strict=True)
        )
        if number + 1 == rounds or (number + 1) % _EVERY == 0:
            report(number + 1, rounds, loss=loss / tokens, accuracy=right / tokens)
            if device.rank == 0:
                record.append(step=number + 1, loss=loss / tokens, accuracy=right / tokens)
    if device.rank == 0:
        record.write_result(
            {
                "loss": loss / tokens,
                "perplexity": math.exp(min(loss / tokens, 700)),
                "accuracy": right / tokens,
                "tokens": int(tokens),
                "sequences": len(sequences),
            }
        )


def _add_adapter(model: Any, folder: Path | None) -> Any:
    if folder is None:
        return model
    from peft import PeftModel

    if not (folder / "adapter_config.json").is_file():
        raise UsageError(f"{folder}: it is not a folder with an adapter, such as `adapter` of a fine-tuning.")
    return PeftModel.from_pretrained(model, folder)


def _measure(model: Any, batch: Any, device: Any) -> list[float]:
    """Return the sum of the losses, the number of right predictions, and the number of predictions of a batch."""
    import torch

    with torch.autocast(device.torch.type, torch.bfloat16, enabled=device.is_gpu):
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
    targets = batch[:, 1:]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return [loss.item(), float((logits.argmax(-1) == targets).sum().item()), float(targets.numel())]


if __name__ == "__main__":
    main()
