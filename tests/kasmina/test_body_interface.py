"""A body looks like its model to code that inspects it: class, signature, attributes, saving."""

import copy
import inspect
import io
import os
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file, save_file

import esper
from esper.kasmina.body import SEEDS_FILE, load_seeds
from esper.leyline.errors import ConfigError, OptimizerError
from tests.support.models import bert, gpt2

IDS = torch.randint(0, 9, (4, 8), generator=torch.Generator().manual_seed(0))


def gpt2_body():
    torch.manual_seed(0)
    return esper.graft(gpt2(), at="transformer.h.*", probe={"input_ids": IDS})


def grown(body):
    grower = esper.Grower(
        body, torch.optim.SGD(body.parameters(), lr=0.1), quality="next_token_accuracy", controller="none"
    )
    grower.germinate("transformer.h.0", "lora")
    torch.nn.init.normal_(body.slots["transformer.h.0"].seed[1].weight)
    grower.step([{"input_ids": IDS, "labels": IDS}])
    return body


def test_forward_has_the_signature_of_the_model():
    model = gpt2()
    body = esper.graft(model, at="transformer.h.1", probe={"input_ids": IDS})
    assert inspect.signature(body.forward) == inspect.signature(model.forward)
    assert inspect.signature(type(body).forward) == inspect.signature(type(model).forward)


def test_transformers_finds_labels_and_class_of_a_body():
    from transformers.utils.generic import find_labels

    assert find_labels(type(gpt2_body())) == ["labels"]
    assert gpt2_body()._get_name() == "GPT2LMHeadModel"  # label smoothing shifts labels by this name
    assert isinstance(gpt2_body(), esper.Body)


def test_attributes_and_methods_reach_the_model():
    body = gpt2_body()
    body.gradient_checkpointing_enable()
    assert body.config.n_embd == 16
    assert body.device == torch.device("cpu")
    assert body.dtype == torch.float32
    assert body.model.is_gradient_checkpointing
    assert body.generate(IDS[:1], max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, 10)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda body: reloaded(body)], ids=["deepcopy", "pickle"])
def test_a_copy_of_a_body_has_the_same_class_and_output(copied):
    body = grown(gpt2_body()).eval()
    other = copied(body)
    assert type(other) is type(body)
    assert torch.equal(other(input_ids=IDS).logits, body(input_ids=IDS).logits)


def reloaded(body):
    file = io.BytesIO()
    torch.save(body, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_model_without_save_pretrained_gets_none():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    body = esper.graft(model, at=["1"], probe=torch.randn(4, 4))
    assert not hasattr(body, "save_pretrained")


def test_tied_weights_save_and_stay_tied(tmp_path):
    body = grown(gpt2_body()).eval()
    save_file(body.state_dict(), tmp_path / "body.safetensors")
    other = gpt2_body().eval()
    other.load_state_dict(load_file(tmp_path / "body.safetensors"))
    assert other.lm_head.weight is other.transformer.wte.weight
    assert torch.equal(other(input_ids=IDS).logits, body(input_ids=IDS).logits)


def test_save_pretrained_writes_the_model_and_its_seeds(tmp_path):
    from transformers import GPT2LMHeadModel

    body = grown(gpt2_body()).eval()
    body.save_pretrained(tmp_path)
    model = GPT2LMHeadModel.from_pretrained(tmp_path)  # the host alone, with its own keys
    assert not torch.equal(model(input_ids=IDS).logits, body(input_ids=IDS).logits)
    other = esper.graft(model, at="transformer.h.*", probe={"input_ids": IDS}).eval()
    load_seeds(other, tmp_path)
    assert torch.equal(other(input_ids=IDS).logits, body(input_ids=IDS).logits)


def test_save_pretrained_removes_the_seeds_of_an_earlier_save(tmp_path):
    grown(gpt2_body()).save_pretrained(tmp_path)
    assert (tmp_path / SEEDS_FILE).exists()
    gpt2_body().save_pretrained(tmp_path)
    assert not (tmp_path / SEEDS_FILE).exists()


def test_push_to_hub_uploads_the_seeds(tmp_path, monkeypatch):
    from transformers import GPT2LMHeadModel
    from transformers.utils import hub

    files = []
    monkeypatch.setattr(hub, "hf_api", MagicMock())
    monkeypatch.setattr(hub, "create_and_tag_model_card", MagicMock())
    monkeypatch.setattr(
        GPT2LMHeadModel, "_upload_modified_files", lambda _self, folder, *_, **__: files.extend(os.listdir(folder))
    )
    grown(gpt2_body()).push_to_hub("someone/model")
    assert {SEEDS_FILE, "model.safetensors", "config.json"} <= set(files)
    with pytest.raises(ConfigError, match=r"Use body\.push_to_hub"):
        grown(gpt2_body()).save_pretrained(tmp_path, push_to_hub=True)


def accelerated(optimizer):
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(optimizer)


def test_grower_unwraps_an_accelerated_optimizer():
    body = esper.graft(bert(), at="bert.encoder.layer.*", probe={"input_ids": IDS})
    inner = torch.optim.AdamW(body.parameters())
    grower = esper.Grower(body, accelerated(inner), controller="none")
    assert grower.optimizer is inner


def test_a_scheduler_on_an_accelerated_optimizer_is_refused():
    body = esper.graft(bert(), at="bert.encoder.layer.*", probe={"input_ids": IDS})
    optimizer = accelerated(torch.optim.AdamW(body.parameters()))
    torch.optim.lr_scheduler.LinearLR(optimizer)
    with pytest.raises(OptimizerError, match="Build the grower first"):
        esper.Grower(body, optimizer, controller="none")
