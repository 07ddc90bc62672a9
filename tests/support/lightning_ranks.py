"""Train with Lightning's DDP and growth in two processes: -m tests.support.lightning_ranks DIRECTORY

A second training resumes the first from the checkpoint of its second epoch.
Each rank writes the module's weights to DIRECTORY. The ranks draw different dropout masks, so a resumed run is equal
only if each rank gets back its own random generators.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from esper.lightning import GrowthCallback
from tests.support.grower import batch
from tests.support.lightning_module import Module


class SeedsOutsideDDP(Callback):
    """Check that DDP, once it is built, ignores the seeds that the module has, and nothing else."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        esper = "body.esper."
        seeds = {name for name, _ in pl_module.named_parameters() if name.startswith(esper)}
        ignored = trainer.model.parameters_to_ignore  # type: ignore[union-attr]
        assert seeds <= ignored
        assert all(name.startswith(esper) for name in ignored)


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    train(directory, "whole", None)
    train(directory, "resumed", directory / "epoch=1.ckpt")


def train(directory: Path, name: str, checkpoint: Path | None) -> None:
    L.seed_everything(0, verbose=False)
    module = Module()
    callbacks = [GrowthCallback(), SeedsOutsideDDP()]
    if checkpoint is None:
        callbacks.append(ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1))
    trainer = L.Trainer(
        max_epochs=4, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=directory, gradient_clip_val=0.5, callbacks=callbacks,
        enable_checkpointing=checkpoint is None,
    )  # fmt: skip
    batches = DataLoader(TensorDataset(*batch(1, 64)), 8, shuffle=True)
    torch.manual_seed(trainer.global_rank + (100 if checkpoint else 0))
    trainer.fit(module, batches, DataLoader(TensorDataset(*batch(2, 32)), 8), ckpt_path=checkpoint)
    torch.save(module.state_dict(), directory / f"{name}-{trainer.global_rank}.pt")


if __name__ == "__main__":
    main()
