"""Errors and warnings for common mistakes in growing your own models."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.kasmina.blueprints import cost, registered, unregister
from esper.leyline.errors import BlueprintError, ConfigError, GraftError, HardenError, LifecycleError, UnknownNameError
from esper.tamiyo.controllers import Schedule
from esper.tolaria.coalitions import evaluate
from esper.tolaria.tasks import per_sample_correct, per_sample_loss

QUICK = esper.Rules(birth="isolated", thresholds=esper.Thresholds(blend_dwell=2))


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))


def grafted(**options) -> tuple[esper.Body, torch.optim.Optimizer, esper.Grower]:
    body = esper.graft(small_model(), at=["1", "3"], probe=torch.randn(4, 6))
    optimizer = torch.optim.SGD(body.parameters(), lr=0.05, momentum=0.9)
    return (
        body,
        optimizer,
        esper.Grower(body, optimizer, gradient_telemetry_stride=1, **{"controller": "none", **options}),
    )


def epoch(body, optimizer, grower, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    x, y = torch.randn(32, 6, generator=noise), torch.randint(0, 3, (32,), generator=noise)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(body(x), y).backward()
        optimizer.step()
    grower.step([(x, y)])


def test_features_with_channels_before_length_take_convolutions():
    audio = nn.Sequential(nn.Conv1d(2, 8, 5, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 20, 3))
    body = esper.graft(audio, at=["0"], probe=torch.randn(4, 2, 20))
    assert "conv_light" in body.costs()["0"]


def test_time_first_features_take_the_seeds_of_sequences():
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.norm(x).mean(0))

    class BatchFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TimeFirst()

        def forward(self, x):
            return self.inner(x.transpose(0, 1))

    body = esper.graft(BatchFirst(), at=["inner.norm"], probe=torch.randn(4, 7, 8))
    assert {"attention", "mlp_small"} <= body.costs()["inner.norm"].keys()


def test_nested_tensors_of_an_encoder_are_explained():
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x, mask):
            return self.encoder(x, src_key_padding_mask=mask).mean(1)

    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[0, 3:] = True
    with pytest.raises(GraftError, match="nested"):
        esper.graft(Encoder(), at=["encoder.layers.0"], probe=(torch.randn(4, 5, 8), mask))


def test_causal_language_model_is_not_scored_on_its_own_inputs():
    class TinyForCausalLM(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix = nn.Embedding(10, 8), nn.Linear(8, 8)

        def forward(self, input_ids):
            return {"logits": self.mix(self.embed(input_ids)) @ self.embed.weight.T}

    tokens = torch.randint(0, 10, (6, 5))
    body = esper.graft(TinyForCausalLM(), at=["mix"], probe={"input_ids": tokens})
    with pytest.raises(ConfigError, match="next_token_accuracy"):
        esper.Grower(body, torch.optim.SGD(body.parameters(), lr=0.1), controller="none")
    grower = esper.Grower(
        body, torch.optim.SGD(body.parameters(), lr=0.1), quality="next_token_accuracy", controller="none"
    )
    report = grower.step([{"input_ids": tokens, "labels": tokens}])
    answer = body(tokens)["logits"][:, :-1].argmax(-1)
    assert report.quality == pytest.approx((answer == tokens[:, 1:]).float().mean().item())


def test_ignored_tokens_are_left_out():
    logits, target = torch.randn(2, 4, 5), torch.randint(0, 5, (2, 4))
    target[0, 2:] = -100
    loss = nn.functional.cross_entropy(logits[0, :2], target[0, :2])
    assert per_sample_loss(logits, target)[0] == pytest.approx(loss.item())
    right = (logits[0, :2].argmax(-1) == target[0, :2]).float().mean()
    assert per_sample_correct(logits, target)[0] == pytest.approx(right.item())


def test_non_finite_output_is_not_measured_and_commits_nothing():
    _, _, grower = grafted(controller="schedule")
    x, y = torch.full((16, 6), float("nan")), torch.zeros(16, dtype=torch.long)
    with pytest.warns(UserWarning, match="quality after epoch 0 is nan: .* Lower the learning rate"):
        report = grower.step([(x, y)])
    assert np.isnan(report.quality)


def test_seed_without_shadow_pass_raises_a_warning():
    body, optimizer, grower = grafted(incubation="shadow", rules=QUICK)
    grower.germinate("1", "lora")
    grower.step()
    with pytest.warns(UserWarning, match="it learns nothing"):
        epoch(body, optimizer, grower, 0)


def test_quality_must_be_one_score_per_sample():
    body, _, _ = grafted()
    grower = esper.Grower(
        body, torch.optim.SGD(body.parameters(), lr=0.1), quality=lambda out, y: out, controller="none"
    )
    with pytest.raises(ConfigError, match="one score per sample"):
        grower.step([(torch.randn(8, 6), torch.zeros(8))])


def test_targets_and_inputs_must_be_of_equal_number():
    body, _, _ = grafted()
    with pytest.raises(ConfigError, match="5 targets"):
        evaluate(body, [(torch.randn(16, 6), torch.zeros(5))], lambda out, y: out[:, 0])


def test_common_mistakes_get_clear_messages():
    with pytest.raises(GraftError, match="`at` takes module names"):
        esper.graft(small_model(), at=[nn.ReLU()], probe=torch.randn(4, 6))
    _, _, grower = grafted()
    with pytest.raises(ConfigError, match="tempo is one of FAST"):
        grower.germinate("1", "lora", tempo=5)


X, Y = torch.randn(4, 6), torch.zeros(4, dtype=torch.long)


def graft_small(model=None, at=("1", "3"), probe=X) -> esper.Body:
    return esper.graft(small_model() if model is None else model, at=at, probe=probe)


def full_body() -> esper.Body:
    body = graft_small()
    for name in body.slots:
        body.set_slot(body.plant(name, "lora"), esper.SeedStage.FOSSILIZED, 1.0)
    return body


def fossilize_unmeasured() -> None:
    _, _, grower = grafted()
    grower.germinate("1", "lora")
    grower.fossilize("1")


MISTAKES = {
    "telemetry a path": (
        lambda: grafted(telemetry="runs/a"),
        ConfigError,
        "got 'runs/a'. To record a run, pass run.hub",
    ),
    "telemetry an object": (lambda: grafted(telemetry=object()), ConfigError, "got <object object at"),
    "horizon a text": (
        lambda: grafted(horizon="30"),
        ConfigError,
        "horizon is a number of epochs, an integer ≥ 1, got '30'",
    ),
    "horizon 0": (lambda: grafted(horizon=0), ConfigError, "an integer ≥ 1, got 0"),
    "mixing_steps": (
        lambda: grafted(mixing_steps=-1),
        ConfigError,
        "mixing_steps is a number of optimiser steps, an integer ≥ 0",
    ),
    "audition without result": (
        lambda: esper.audition(graft_small(), print_only),
        ConfigError,
        "print_only returned None for the copy without a seed. It must return the quality",
    ),
    "audition without empty slot": (
        lambda: esper.audition(full_body(), lambda _: 0.0),
        ConfigError,
        "this body has none: '1' is FOSSILIZED, '3' is FOSSILIZED",
    ),
    "graft a function": (
        lambda: graft_small(lambda x: x),
        GraftError,
        "an instance of torch.nn.Module, got a function. Call it in the forward",
    ),
    "graft a class": (lambda: graft_small(nn.Linear), GraftError, "got the class Linear. Pass an instance of it"),
    "probe with targets": (
        lambda: graft_small(probe=(X, Y)),
        GraftError,
        "(A tuple is taken as positional arguments; of a batch (x, y), pass x alone.)",
    ),
    "probe an array": (
        lambda: graft_small(probe=X.numpy()),
        GraftError,
        "got a ndarray. Convert arrays to tensors with torch.from_numpy",
    ),
    "probe a loader": (lambda: graft_small(probe=DataLoader(TensorDataset(X, Y))), GraftError, "next(iter(loader))[0]"),
    "probe a number": (lambda: graft_small(probe=3), GraftError, "got a int. Pass one batch as the model takes it"),
    "module twice": (lambda: graft_small(at=["1", "3", "1"]), GraftError, "`at` names '1' more than once"),
    "harden a plain model": (
        lambda: esper.harden(small_model()),
        HardenError,
        "got Sequential. It has no slots, so it is plain already: use it as it is",
    ),
    "harden twice": (lambda: esper.harden(esper.harden(graft_small())), HardenError, "use it as it is"),
    "harden the inner model": (lambda: esper.harden(graft_small().model), HardenError, "It has slots: pass the body"),
    "misspelt blueprint": (
        lambda: grafted()[2].germinate("1", "conv_lite"),
        UnknownNameError,
        "no blueprint for slot '1' named 'conv_lite'. There are: lora, lora_large, mlp, mlp_small, norm",
    ),
    "fossilize unmeasured": (
        fossilize_unmeasured,
        LifecycleError,
        "only a HOLDING seed that was measured can be committed. Way out: call grower.step(val_batches) first",
    ),
}


def print_only(_body: esper.Body) -> None:
    """Train nothing and forget to return the quality."""


@pytest.mark.parametrize(("act", "kind", "text"), MISTAKES.values(), ids=MISTAKES.keys())
def test_message_says_what_was_given_and_a_remedy(act, kind, text):
    with pytest.raises(kind) as error:
        act()
    assert text in str(error.value)


def test_grower_says_that_its_plan_is_empty():
    _, _, grower = grafted(controller={})
    grower.step([(X, Y)])
    grower.step([(X, Y)])
    assert "the plan is empty" in repr(grower)


@pytest.mark.parametrize("controller", ["schedule", {"1": "mlp_small"}], ids=["schedule", "plan"])
def test_grower_asks_to_graft_a_plain_model_first(controller):
    model = small_model()
    with pytest.raises(GraftError, match=r"got Sequential\. Graft the model first\."):
        esper.Grower(model, torch.optim.SGD(model.parameters(), lr=0.1), controller=controller)


def test_audition_asks_to_graft_a_plain_model_first():
    with pytest.raises(GraftError, match=r"got Sequential\. Graft the model first\."):
        esper.audition(small_model(), lambda _: 0.0)


def test_loading_a_bare_state_into_a_grown_body_reports_what_it_drops():
    body, _, grower = grafted()
    plain = body.state_dict()
    grower.germinate("1", "lora")
    with pytest.warns(UserWarning, match="the seeds there are removed"):
        body.load_state_dict(plain)


# -- mixed precision


@pytest.mark.parametrize("style", ["SIGMOID_ADD", "LINEAR_MULTIPLY", "GATED_GATE"])
def test_seed_completes_its_lifecycle_under_autocast(style):
    body, optimizer, grower = grafted(rules=QUICK)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grower.germinate("1", "lora", style=style)
    x, y = torch.randn(32, 6), torch.randint(0, 3, (32,))
    for _ in range(14):
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(body(x), y)
            loss.backward()
            optimizer.step()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            grower.step([(x, y)])
    assert grower.slots["1"].stage == esper.SeedStage.HOLDING
    assert next(body.slots["1"].parameters()).dtype == torch.float32


# -- custom blueprints


@pytest.fixture
def own_blueprint():
    """Register a recipe as `mine` for vectors; unregister it after the test."""
    yield lambda recipe: esper.blueprint("mine", layouts="vector")(recipe)
    if "mine" in registered():
        unregister("mine")


def zero_linear(dim: int) -> nn.Module:
    layer = nn.Linear(dim, dim)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def two_widths(**options) -> esper.Grower:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    body = esper.graft(model, at=["1", "3"], probe=torch.randn(4, 6))
    return esper.Grower(body, torch.optim.SGD(body.parameters(), lr=0.05), **{"controller": "none", **options})


def test_raising_blueprint_is_named_when_the_grower_is_built(own_blueprint):
    own_blueprint(lambda dim: nn.Linear(dim, dim // 0))
    with pytest.raises(BlueprintError, match=r"'mine' cannot be built .* width 8: .*ZeroDivisionError") as error:
        two_widths()
    assert "no slot can take blueprint 'mine'" in str(error.value)
    assert "unregister('mine')" in str(error.value)


def test_raising_blueprint_is_named_when_it_is_germinated(own_blueprint):
    body, _, grower = grafted()
    own_blueprint(lambda dim: nn.Linear(dim, dim // 0))
    with pytest.raises(BlueprintError, match=r"'mine' cannot be built .*ZeroDivisionError"):
        grower.germinate("1", "mine")
    with pytest.raises(BlueprintError, match=r"'mine' cannot be built .*ZeroDivisionError"):
        body.plant("1", "mine")
    with pytest.raises(BlueprintError, match=r"'mine' cannot be built .*ZeroDivisionError"):
        cost("mine", body.slots["1"].spec)


def test_blueprint_violating_a_rule_is_refused_when_the_grower_is_built(own_blueprint):
    own_blueprint(lambda dim: nn.Linear(dim, dim))
    with pytest.raises(BlueprintError, match=r"no slot can take blueprint 'mine'.*Δ is not zero at birth"):
        two_widths()


def test_blueprint_is_offered_only_where_it_can_be_built(own_blueprint):
    def mine(dim: int) -> nn.Module:
        assert dim % 4 == 0, "the width must be a multiple of 4"
        return zero_linear(dim)

    own_blueprint(mine)
    with pytest.warns(UserWarning, match=r"'mine' is not offered in '3': .*must be a multiple of 4"):
        grower = two_widths()
    grower.germinate("1", "mine")
    with pytest.raises(LifecycleError, match="'mine' does not fit there"):
        grower.germinate("3", "mine")


# -- controllers


def test_controller_none_always_waits():
    _, _, grower = grafted(controller=None)
    assert grower.step([(torch.randn(8, 6), torch.zeros(8, dtype=torch.long))]).op.name == "WAIT"


@pytest.mark.parametrize("controller", [Schedule, 3, object(), lambda table, legal: None])
def test_controller_that_cannot_act_is_refused_at_construction(controller):
    with pytest.raises(ConfigError, match=r"controller must be a name .* or an object with act"):
        grafted(controller=controller)


def test_actions_of_a_wrong_shape_are_named():
    class Flat:
        def act(self, table, legal):
            return np.zeros(8, dtype=np.int64)

    _, _, grower = grafted(controller=Flat())
    with pytest.raises(ConfigError, match=r"integers \[1, 8\].*Flat returned int64 \[8\]"):
        grower.step()


def test_rules_must_be_rules():
    body = esper.graft(small_model(), at=["1"], probe=torch.randn(4, 6))
    with pytest.raises(ConfigError, match="rules must be"):
        esper.Grower(body, torch.optim.SGD(body.parameters(), lr=0.1), rules={"max_seeds": 1}, controller="none")


# -- a body in a file


def test_torch_save_of_a_body_omits_its_grower(tmp_path):
    body, optimizer, grower = grafted(quality=lambda output, target: output[:, 0])
    grower.on_change(lambda effect, slot: None)
    grower.germinate("1", "lora")
    epoch(body, optimizer, grower, 0)
    torch.save(body, tmp_path / "body.pt")
    loaded = torch.load(tmp_path / "body.pt", weights_only=False)
    x = torch.randn(4, 6)
    assert torch.equal(loaded.eval()(x), body.eval()(x))
    assert loaded.on_load == []
    assert len(body.on_load) == 1


def test_worth_without_seeds_says_that_there_are_none():
    _, _, grower = grafted()
    text = str(grower.worth([(X, Y)]))
    assert text.endswith("There are no seeds")
    assert "without these seeds" not in text
