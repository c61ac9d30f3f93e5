"""A program for each rank: `gpu_launch.balance` in the loops of other libraries, as docs/mixed-cards.md describes it.

Its arguments are the library and a folder, to which rank N writes the model's parameters, `rank-N.pt`. With one rank, the
library gets whole batches from a plain loader, so that both can be compared.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import gpu_launch

BATCH, SAMPLES, EPOCHS = 18, 50, 2
SPEEDS = (10, 5, 3)
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def build_numbers() -> TensorDataset:
    """Return inputs and targets of a regression."""
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))


def balance(dataset: object, model: torch.nn.Module | None = None) -> gpu_launch.training.balancer.BatchBalancer:
    """Return the balanced batches of a data set, in its order."""
    return gpu_launch.balance(dataset, batch=BATCH, speeds=SPEEDS, shuffle=False, model=model)


def train_lightning() -> torch.nn.Module:
    """Lightning's loop, with the loader as it is."""
    import lightning

    class Line(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def train_dataloader(self) -> DataLoader:
            if RANKS == 1:
                return DataLoader(build_numbers(), batch_size=BATCH)
            self.balanced = balance(build_numbers(), self)
            return self.balanced.loader()

        def training_step(self, batch: list[torch.Tensor], _number: int) -> torch.Tensor:
            inputs, targets = batch
            if RANKS == 1:
                return torch.nn.functional.mse_loss(self.layer(inputs), targets)
            with self.balanced.step() as step:
                loss = torch.nn.functional.mse_loss(self.layer(inputs), targets)
            return loss * step.scale

        def on_train_epoch_end(self) -> None:
            if RANKS > 1:
                self.balanced.rebalance()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(1)
    model = Line()
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        num_nodes=RANKS,
        max_epochs=EPOCHS,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(model)
    return model


def train_accelerate() -> torch.nn.Module:
    """A loop of one's own, with model and optimizer prepared."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(1)
    plain = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    if RANKS == 1:
        for _ in range(EPOCHS):
            for inputs, targets in DataLoader(build_numbers(), batch_size=BATCH):
                optimizer.zero_grad()
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
        return plain
    balanced = balance(build_numbers(), model)
    for epoch in range(EPOCHS):
        balanced.set_epoch(epoch)
        for inputs, targets in balanced.loader():
            with balanced.step() as step:
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                accelerator.backward(loss * step.scale)
                optimizer.step()
    return plain


def train_transformers() -> torch.nn.Module:
    """transformers' Trainer on a language model whose samples have different numbers of tokens that count."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    words = torch.randint(32, (SAMPLES, 16), generator=torch.Generator().manual_seed(1))
    dataset = []
    for number, row in enumerate(words):
        labels = row.clone()
        labels[: number % 13] = -100
        dataset.append({"input_ids": row, "labels": labels})

    class BalancedTrainer(Trainer):
        def get_train_dataloader(self) -> DataLoader:
            if RANKS == 1:
                return DataLoader(self.train_dataset, batch_size=BATCH, collate_fn=self.data_collator)
            return balance(self.train_dataset).trainer_loader(collate_fn=self.data_collator)

    torch.manual_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0
        )
    )
    arguments = TrainingArguments(
        output_dir="trained",
        use_cpu=True,
        num_train_epochs=EPOCHS,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        optim="sgd",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    BalancedTrainer(model=model, args=arguments, train_dataset=dataset).train()
    return model


TRAININGS = {"lightning": train_lightning, "accelerate": train_accelerate, "transformers": train_transformers}

if __name__ == "__main__":
    model = TRAININGS[sys.argv[1]]()
    torch.save([parameter.detach() for parameter in model.parameters()], Path(sys.argv[2], f"rank-{RANK}.pt"))
