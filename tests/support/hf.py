"""Small models and data sets for Hugging Face's Trainer, made from configurations without downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import TrainingArguments

import esper
from tests.support.models import bert, gpt2

AT = {"gpt2": "transformer.h.*", "bert": "bert.encoder.layer.*"}
QUALITY = {"gpt2": "next_token_accuracy", "bert": "accuracy"}


class Tokens(Dataset):
    """Rows of tokens that count upwards; the label is the first token's class, or the row itself."""

    def __init__(self, kind: str, rows: int, rng_seed: int = 0) -> None:
        start = torch.randint(0, 9, (rows, 1), generator=torch.Generator().manual_seed(rng_seed))
        self.ids = (start + torch.arange(8)) % 9
        self.labels = self.ids if kind == "gpt2" else start[:, 0] % 3

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": self.ids[i], "labels": self.labels[i], "unused": torch.zeros(1)}


def make_body(kind: str) -> esper.Body:
    torch.manual_seed(0)
    model = {"gpt2": gpt2, "bert": bert}[kind]()
    return esper.graft(model, at=AT[kind], probe={"input_ids": Tokens(kind, 4).ids})


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    defaults = {
        "output_dir": str(directory), "num_train_epochs": 3, "per_device_train_batch_size": 8, "report_to": "none",
        "per_device_eval_batch_size": 16, "learning_rate": 1e-2, "save_strategy": "epoch", "use_cpu": True,
        "disable_tqdm": True, "logging_strategy": "no",
    }  # fmt: skip
    return TrainingArguments(**{**defaults, **changes})
