"""Small trainings as their frameworks' users write them, for two processes without GPUs.

Each knows nothing of gpu_launch, and prints `RANK number of world`, then `WEIGHTS` with a sum that is the same on all
ranks if they train together: every rank has other data.
"""

from __future__ import annotations

LIGHTNING = """
    import lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset


    class Line(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, _):
            inputs, targets = batch
            return torch.nn.functional.mse_loss(self.layer(inputs), targets)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)


    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)
    model = Line()
    trainer = lightning.Trainer(accelerator="cpu", strategy="ddp", num_nodes=2, max_epochs=2, logger=False,
                                enable_checkpointing=False, enable_model_summary=False)
    trainer.fit(model, loader)
    assert trainer.num_training_batches == 4, trainer.num_training_batches
    print("RANK", trainer.global_rank, "of", trainer.world_size)
    print("WEIGHTS", f"{sum(value.sum().item() for value in model.parameters()):.6f}")
"""
ACCELERATE = """
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True)
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    assert len(loader) == 4, len(loader)
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    print("RANK", accelerator.process_index, "of", accelerator.num_processes)
    print("WEIGHTS", f"{sum(value.sum().item() for value in model.parameters()):.6f}")
    accelerator.end_training()
"""
TRANSFORMERS = """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    words = torch.randint(32, (32, 16), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(output_dir="trained", use_cpu=True, per_device_train_batch_size=4, max_steps=3,
                                  save_strategy="no", report_to="none", disable_tqdm=True)
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in words])
    trained = trainer.train()
    assert trained.global_step == 3
    print("RANK", arguments.process_index, "of", arguments.world_size)
    print("WEIGHTS", f"{sum(value.abs().sum().item() for value in model.parameters()):.4f}")
"""
