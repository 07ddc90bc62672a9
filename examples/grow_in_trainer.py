"""Grow a small GPT-2 on embedded text with Hugging Face's Trainer. Needs: pip install 'esper-lite[hf]'."""

import tempfile

from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import esper
from esper.hf import GrowthTrainer, load_pretrained

set_seed(0)
data = esper.load_data("moby")  # characters of a novel, embedded in the package
rows = [{"input_ids": x, "labels": x} for x in data.train.x[: 33 * 512].split(32)]
held_out = [{"input_ids": x, "labels": x} for x in data.val.x[: 32 * 64].split(32)]
config = GPT2Config(
    vocab_size=data.classes, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)


def make_body():
    probe = {"input_ids": data.train.x[: 32 * 8].view(8, 32)}
    return esper.graft(GPT2LMHeadModel(config), at="transformer.h.*", probe=probe)  # a slot after each block


directory = tempfile.mkdtemp()
trainer = GrowthTrainer(
    model=make_body(),
    args=TrainingArguments(directory, max_steps=60, learning_rate=3e-3, eval_strategy="steps", eval_steps=30),
    train_dataset=rows,
    eval_dataset=held_out,
    growth={"controller": "schedule", "quality": "next_token_accuracy", "mixing_steps": 0},
    grow_every=15,  # optimiser steps; "epoch" is the default
)
trainer.train()
print(trainer.grower)  # every slot: stage, blueprint, what the seed contributes

trainer.save_model(directory)  # model.safetensors has the keys of GPT-2, esper.safetensors the seeds
again = make_body()
load_pretrained(again, directory)
