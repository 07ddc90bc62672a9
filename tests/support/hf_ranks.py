"""Train with `GrowthTrainer` on one or more ranks: torchrun … -m tests.support.hf_ranks DIRECTORY CASE…

Each rank writes its weights and the numbers of seeds of each case to DIRECTORY.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, set_seed

import esper
from esper.hf import GrowthTrainer
from tests.support.controllers import Planter
from tests.support.hf import Tokens, arguments

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "reentrant checkpointing": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "best": {
        "save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
    },
    "resumed": {"save_strategy": "epoch"},
}  # fmt: skip


def make_model() -> BertForSequenceClassification:
    set_seed(0)
    config = BertConfig(
        vocab_size=9, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, num_labels=3,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def make_trainer(directory: Path, case: str) -> GrowthTrainer:
    """Return a trainer of one case. The batches of all ranks together are the same for any number of ranks."""
    args = arguments(
        directory, per_device_train_batch_size=8 // WORLD, per_device_eval_batch_size=16 // WORLD,
        average_tokens_across_devices=False, **{"save_strategy": "no", **CASES[case]},
    )  # fmt: skip
    sets: dict[str, Any] = {"train_dataset": Tokens("bert", 32), "eval_dataset": Tokens("bert", 16, 1)}
    body = esper.graft(make_model(), at="bert.encoder.layer.*", probe={"input_ids": Tokens("bert", 4).ids})
    growth = {"controller": Planter(), "mixing_steps": 0, "rules": esper.Rules(one_at_a_time=False)}
    return GrowthTrainer(model=body, args=args, growth=growth, **sets)


def main() -> None:
    torch.set_num_threads(1)
    for case in sys.argv[2:]:
        train(Path(sys.argv[1]), case)


def train(directory: Path, case: str) -> None:
    trainer = make_trainer(directory / case, case)
    trainer.train()
    if case == "resumed":
        trainer = make_trainer(directory / case, case)
        trainer.train(resume_from_checkpoint=str(directory / case / "checkpoint-8"))
    seeds = [entry["growth_seeds"] for entry in trainer.state.log_history if "growth_seeds" in entry]
    state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    rank = os.environ.get("RANK", "0")
    torch.save({"state": state, "seeds": seeds}, directory / f"{case}-{rank}.pt")


if __name__ == "__main__":
    main()
