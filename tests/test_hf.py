"""Growth in Hugging Face's Trainer, with the real library and models made from configurations."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration, Trainer, TrainerCallback

import esper
from esper.hf import GROWER_FILE, GrowthCallback, GrowthTrainer, GrowthTrainerMixin, load_pretrained
from esper.kasmina.body import SEEDS_FILE
from esper.leyline.errors import CheckpointError, ConfigError, OptimizerError
from tests.support.controllers import Planter
from tests.support.hf import QUALITY, Tokens, arguments, make_body
from tests.support.models import bert


def growth(kind, **changes):
    rules = esper.Rules(one_at_a_time=False)
    return {"controller": Planter(), "quality": QUALITY[kind], "mixing_steps": 0, "rules": rules, **changes}


def make_trainer(directory, kind="bert", *, of=GrowthTrainer, body=None, rows=32, changes=None, **options):
    body = make_body(kind) if body is None else body
    sets = {"train_dataset": Tokens(kind, rows), "eval_dataset": Tokens(kind, 16, 1)}
    args = arguments(directory, **(changes or {}))
    return of(model=body, args=args, **{**sets, "growth": growth(kind), **options})


def weights(body):
    return {name: value.clone() for name, value in body.state_dict().items()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_trainer_grows_a_model_every_epoch(tmp_path, kind):
    trainer = make_trainer(tmp_path, kind, changes={"eval_strategy": "epoch", "save_strategy": "no"})
    trainer.train()
    seeds = [entry["growth_seeds"] for entry in trainer.state.log_history if "growth_seeds" in entry]
    assert seeds == [1, 2, 2]
    assert all("eval_loss" in e for e in trainer.state.log_history if "eval_runtime" in e)  # labels were found
    first = next(iter(trainer.body.slots.values()))
    assert first.blueprint == "lora"
    assert first.seed[1].weight.abs().sum() > 0  # it was trained


def test_without_growth_the_weights_are_those_of_a_plain_trainer(tmp_path):
    """Label smoothing shifts the labels of causal language models, which it finds out by the class name."""
    changes = {"save_strategy": "no", "label_smoothing_factor": 0.1, "max_grad_norm": 0.5, "weight_decay": 0.1}
    settings = growth("gpt2", controller="none")
    grown = make_trainer(tmp_path, "gpt2", growth=settings, grow_every=12, changes=changes)
    grown.train()
    plain = Trainer(
        model=make_body("gpt2").model, args=arguments(tmp_path, **changes), train_dataset=Tokens("gpt2", 32)
    )
    plain.train()
    assert_equal(weights(grown.body.model), weights(plain.model))


class Focal(Trainer):
    """A user's own Trainer with its own loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.calls = getattr(self, "calls", 0) + 1
        labels = inputs["labels"]
        output = model(input_ids=inputs["input_ids"])
        loss = F.cross_entropy(output.logits, labels, reduction="none").square().mean()
        return (loss, output) if return_outputs else loss


def test_mixin_works_with_a_subclass_that_computes_its_own_loss(tmp_path):
    class GrowingFocal(GrowthTrainerMixin, Focal):
        pass

    trainer = make_trainer(tmp_path, of=GrowingFocal, changes={"save_strategy": "no"})
    trainer.train()
    assert trainer.calls >= 12
    assert trainer.body.structure()


def test_growth_every_k_steps_with_gradient_accumulation_and_max_steps(tmp_path):
    changes = {
        "gradient_accumulation_steps": 2,
        "max_steps": 7,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
    }
    trainer = make_trainer(tmp_path, changes=changes, grow_every=2)
    trainer.train()
    steps = [entry["step"] for entry in trainer.state.log_history if "growth_seeds" in entry]
    assert steps == [2, 4, 6]
    assert trainer.grower.horizon == 4
    assert trainer.grower._batches == 7  # a micro-batch is no optimiser step


def test_growth_under_bf16_autocast(tmp_path):
    trainer = make_trainer(tmp_path, "gpt2", changes={"bf16": True, "save_strategy": "no"})
    trainer.train()
    assert {p.dtype for p in trainer.body.parameters()} == {torch.float32}
    assert all(torch.isfinite(p).all() for p in trainer.body.parameters())
    assert len(trainer.body.structure()) == 2


def test_growth_with_gradient_checkpointing_and_frozen_layers(tmp_path):
    body = make_body("bert")
    body.bert.embeddings.requires_grad_(False)
    body.bert.encoder.layer[0].requires_grad_(False)
    before = weights(body.bert.encoder.layer[0])
    trainer = make_trainer(tmp_path, body=body, changes={"gradient_checkpointing": True, "save_strategy": "no"})
    trainer.train()
    assert_equal(weights(body.bert.encoder.layer[0]), before)
    assert body.slots["bert.encoder.layer.0"].seed[1].weight.abs().sum() > 0


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_save_model_writes_host_keys_and_seeds_next_to_them(tmp_path, kind):
    trainer = make_trainer(tmp_path / "run", kind, changes={"save_strategy": "no"})
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    keys = load_file(tmp_path / "saved" / "model.safetensors").keys()
    assert keys <= trainer.body.model.state_dict().keys()
    body = make_body(kind)
    load_pretrained(body, tmp_path / "saved")
    assert_equal(weights(body), weights(trainer.body))
    if kind == "gpt2":
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")  # the host alone


@pytest.mark.parametrize("changes", [{}, {"save_strategy": "steps", "save_steps": 5}], ids=["epoch", "within_an_epoch"])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_resumed_training_is_bit_equal(tmp_path, kind, changes):
    whole = make_trainer(tmp_path, kind, changes=changes)
    whole.train()
    at = 5 if changes else 8
    torch.manual_seed(99)
    again = make_trainer(tmp_path, kind, changes=changes)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    assert again.state.global_step == 12
    assert_equal(weights(again.body), weights(whole.body))
    a, b = again.grower.optimizer.state_dict(), whole.grower.optimizer.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert all(torch.equal(a["state"][i]["exp_avg_sq"], b["state"][i]["exp_avg_sq"]) for i in b["state"])
    assert again.grower.controller.calls == whole.grower.controller.calls


def test_checkpoint_holds_the_optimizer_once(tmp_path):
    make_trainer(tmp_path).train()
    assert torch.load(tmp_path / "checkpoint-12" / "optimizer.pt", weights_only=True) == {}
    assert (tmp_path / "checkpoint-12" / GROWER_FILE).exists()


def test_load_best_model_restores_its_structure(tmp_path):
    """The first checkpoint is the best, with one seed; the last has two."""
    scores = iter([1.0, 0.5, 0.2])
    trainer = make_trainer(
        tmp_path,
        compute_metrics=lambda _: {"score": next(scores)},
        changes={"eval_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "score"},
    )
    trainer.train()
    best = tmp_path / "checkpoint-4"
    assert trainer.state.best_model_checkpoint == str(best)
    assert list(trainer.body.structure()) == ["bert.encoder.layer.0"]
    body = make_body("bert")
    load_pretrained(body, best)
    assert_equal(weights(trainer.body), weights(body))
    optimized = {id(p) for group in trainer.grower.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in trainer.body.parameters()}


def test_best_model_without_seeds(tmp_path):
    scores = iter([1.0, 0.5, 0.2])
    trainer = make_trainer(
        tmp_path,
        compute_metrics=lambda _: {"score": next(scores)},
        growth=growth("bert", controller=Planter((2, 3))),
        changes={"eval_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "score"},
    )
    trainer.train()
    assert trainer.body.structure() == {}
    assert not (tmp_path / "checkpoint-4" / SEEDS_FILE).exists()


def test_second_call_of_train_uses_the_same_grower(tmp_path):
    trainer = make_trainer(tmp_path, changes={"save_strategy": "no", "num_train_epochs": 1})
    trainer.train()
    grower = trainer.grower
    trainer.train()
    assert trainer.grower is grower
    assert grower.controller.calls == 2


def test_model_init_gives_a_new_grower(tmp_path):
    trainer = make_trainer(tmp_path, body=None, of=GrowthTrainer, changes={"save_strategy": "no"})
    assert trainer.body is not None
    trainer = GrowthTrainer(
        model_init=lambda: make_body("bert"), args=arguments(tmp_path, save_strategy="no", num_train_epochs=1),
        train_dataset=Tokens("bert", 16), eval_dataset=Tokens("bert", 16), growth=growth("bert"),
    )  # fmt: skip
    trainer.train()
    first = trainer.grower
    trainer.train()
    assert trainer.grower is not first
    assert trainer.grower.body is trainer.model


def test_encoder_decoder_grows_although_its_batches_have_no_decoder_inputs(tmp_path):
    """The model makes them from the labels, which a growth step takes away."""
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=9, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    ids = Tokens("gpt2", 32).ids
    probe = {"input_ids": ids[:4], "decoder_input_ids": ids[:4, :5]}
    body = esper.graft(T5ForConditionalGeneration(config), at=["encoder.block.0", "decoder.block.0"], probe=probe)
    settings = growth("bert", controller=Planter((1, 2)))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    changes = {"save_strategy": "no", "num_train_epochs": 2}
    trainer = make_trainer(
        tmp_path, body=body, growth=settings, changes=changes, train_dataset=rows, eval_dataset=rows[:8]
    )
    trainer.train()
    assert len(body.structure()) == 2
    layouts = [slot.spec.layout for slot in body.slots.values()]
    assert layouts == ["bidirectional", "sequence"]


@pytest.mark.slow
def test_compiled_by_trainer_grows_to_the_same_weights(tmp_path):
    """The eager backend traces and guards as the others do, so every growth recompiles, and computes the same bits."""
    bodies = []
    for changes in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        trainer = make_trainer(tmp_path, changes={"save_strategy": "epoch", **changes})
        trainer.train()
        bodies.append(trainer.body)
    assert len(bodies[1].structure()) == 2
    assert_equal(weights(bodies[1]), weights(bodies[0]))


# -- refusals


def test_a_plain_model_is_refused_with_a_remedy(tmp_path):
    trainer = make_trainer(tmp_path, body=make_body("bert").model)
    with pytest.raises(ConfigError, match=r"Use model=esper\.graft"):
        trainer.train()


def test_a_peft_model_is_refused_with_a_remedy(tmp_path):
    class PeftModel(torch.nn.Module):
        """The interface by which PEFT wraps a model."""

        def __init__(self):
            super().__init__()
            self.model = make_body("bert").model

        def get_base_model(self):
            return self.model

        def forward(self, *args, **kwargs):
            return self.model(*args, **kwargs)

    wrapped = PeftModel()
    for module in wrapped.modules():
        module._forward_hooks.clear()
    body = esper.graft(wrapped, at="model.bert.encoder.layer.*", probe={"input_ids": Tokens("bert", 4).ids})
    with pytest.raises(ConfigError, match=r"esper\.graft\(peft_model\.get_base_model\(\)"):
        make_trainer(tmp_path, body=body)


class LowRank(torch.nn.Module):
    """A linear layer that an adapter library has replaced, with keys that `from_pretrained` does not know."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = torch.nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = torch.nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_a_model_with_replaced_layers_saves_loads_and_resumes(tmp_path):
    def build():
        torch.manual_seed(0)
        model = bert()
        for layer in model.bert.encoder.layer:
            layer.attention.self.query = LowRank(layer.attention.self.query)
        return esper.graft(model, at="bert.encoder.layer.*", probe={"input_ids": Tokens("bert", 4).ids})

    trainer = make_trainer(tmp_path, body=build())
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    body = build()
    load_pretrained(body, tmp_path / "saved")
    assert_equal(weights(body), weights(trainer.body))
    again = make_trainer(tmp_path, body=build())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert_equal(weights(again.body), weights(trainer.body))


def test_settings_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="Give the trainer an eval_dataset"):
        make_trainer(tmp_path, eval_dataset=None)
    with pytest.raises(ConfigError, match="every positive number"):
        make_trainer(tmp_path, grow_every=0)
    with pytest.raises(ConfigError, match="straight_through"):
        make_trainer(tmp_path, growth=growth("bert", incubation="shadow"))


def test_training_that_ends_before_the_first_growth_step_warns(tmp_path):
    trainer = make_trainer(tmp_path, grow_every=100, changes={"max_steps": 2, "save_strategy": "no"})
    with pytest.warns(UserWarning, match="ended after 2 optimiser steps, so nothing was grown"):
        trainer.train()


def test_a_frozen_host_grows_if_a_seed_is_planted_before_training(tmp_path):
    class Plant(TrainerCallback):
        def on_train_begin(self, *_args, **_):
            trainer.grower.germinate("bert.encoder.layer.0", "lora")

    body = make_body("bert")
    body.model.requires_grad_(False)
    before = weights(body.model)
    settings = growth("bert", controller="none")
    changes = {"save_strategy": "no", "num_train_epochs": 1}
    trainer = make_trainer(tmp_path, body=body, growth=settings, callbacks=[Plant()], changes=changes)
    trainer.train()
    assert body.slots["bert.encoder.layer.0"].seed[1].weight.abs().sum() > 0
    assert_equal(weights(body.model), before)


def test_a_scheduler_given_with_the_optimizer_is_refused(tmp_path):
    body = make_body("bert")
    optimizer = torch.optim.AdamW(body.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    trainer = make_trainer(tmp_path, body=body, optimizers=(optimizer, scheduler))
    with pytest.raises(OptimizerError, match="Build the grower first"):
        trainer.train()


def test_a_checkpoint_of_a_plain_trainer_is_refused(tmp_path):
    plain = Trainer(
        model=make_body("bert").model, args=arguments(tmp_path, num_train_epochs=1), train_dataset=Tokens("bert", 16)
    )
    plain.train()
    with pytest.raises(CheckpointError, match="not a checkpoint of a growing model"):
        make_trainer(tmp_path).train(resume_from_checkpoint=True)


# -- the callback, with a plain Trainer


def with_callback(directory, *, rules=None, optimizer=None, every="epoch", **changes):
    body = make_body("bert")
    own = torch.optim.AdamW(body.parameters(), lr=1e-2)
    settings = growth("bert") if rules is None else growth("bert", rules=rules)
    grower = esper.Grower(body, own, **settings)
    callback = GrowthCallback(
        grower, [{"input_ids": (t := Tokens("bert", 16, 1)).ids, "labels": t.labels}], every=every
    )
    trainer = Trainer(
        model=body, args=arguments(directory, **changes), train_dataset=Tokens("bert", 32),
        eval_dataset=Tokens("bert", 16, 1), optimizers=(optimizer or own, None), callbacks=[callback],
    )  # fmt: skip
    return trainer, grower


def test_callback_grows_and_resumes_bit_equally(tmp_path):
    whole, grower = with_callback(tmp_path)
    whole.train()
    assert len(grower.body.structure()) == 2
    assert (tmp_path / "checkpoint-12" / "config.json").exists()
    torch.manual_seed(99)
    again, second = with_callback(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert_equal(weights(second.body), weights(grower.body))
    assert second.controller.calls == grower.controller.calls


def test_callback_loads_the_best_model_with_its_structure(tmp_path):
    trainer, grower = with_callback(
        tmp_path, every=2, eval_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="score"
    )
    scores = iter([1.0, 0.5, 0.2])
    trainer.compute_metrics = lambda _: {"score": next(scores)}
    grower.controller.plan = (1, 3)
    with pytest.warns(UserWarning, match="the state has no seed"):
        trainer.train()
    assert list(grower.body.structure()) == ["bert.encoder.layer.0"]


def test_callback_refuses_what_would_break_growth(tmp_path):
    body = make_body("bert")
    trainer, _ = with_callback(tmp_path, optimizer=torch.optim.AdamW(body.parameters()))
    with pytest.raises(ConfigError, match=r"Use optimizers=\(optimizer, None\)"):
        trainer.train()
    trainer, _ = with_callback(tmp_path, rules=esper.Rules(birth="isolated"))
    with pytest.raises(ConfigError, match="clips host and seeds by their joint norm"):
        trainer.train()
    trainer, _ = with_callback(tmp_path)
    trainer.model = trainer.model_wrapped = body
    with pytest.raises(ConfigError, match=r"model=grower\.body"):
        trainer.train()


class Plain(torch.nn.Module):
    """A model that is not of transformers, with the interface that Trainer expects."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.head = torch.nn.Embedding(9, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)

    def forward(self, input_ids, labels=None):
        logits = self.head(torch.relu(self.layer(self.embed(input_ids).mean(1))))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_a_model_that_is_not_of_transformers_grows_saves_and_loads(tmp_path):
    def build():
        torch.manual_seed(0)
        return esper.graft(Plain(), at=["layer"], probe={"input_ids": Tokens("bert", 4).ids})

    settings = growth("bert", controller=Planter((1,)))
    trainer = make_trainer(tmp_path, body=build(), growth=settings, changes={"save_strategy": "no"})
    trainer.train()
    assert list(trainer.body.structure()) == ["layer"]
    trainer.save_model(tmp_path / "saved")
    body = build()
    load_pretrained(body, tmp_path / "saved")
    assert_equal(weights(body), weights(trainer.body))
