"""Worth reports as a table and a dict; and whether they separate a useful seed from a useless one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import esper
from esper.leyline.stages import SeedStage
from esper.simic.attribution import report
from esper.tolaria.data import load_data
from tests.support.models import grow
from tests.support.worth import complete_worth, unmeasured_worth

# -- as a dict


def test_dict_holds_plain_json_serialisable_numbers():
    worth = complete_worth(3, fossils=("b",))
    result = json.loads(json.dumps(worth.to_dict(), allow_nan=False))
    assert result == worth.to_dict()
    assert list(result["slots"]) == ["a", "b", "c"]
    assert [s["kind"] for s in result["slots"].values()] == ["contribution", "dependence", "contribution"]
    assert result["evaluations"] == 9
    for i, (name, slot) in enumerate(result["slots"].items()):
        for what in ("contribution", "contribution_se", "solo", "solo_se", "shapley", "shapley_se"):
            assert slot[what] == getattr(worth, what)[i]
        assert slot["shapley_design_se"] == 0.0
        for what in ("interaction", "interaction_se"):
            others = {o: getattr(worth, what)[i, j] for j, o in enumerate("abc") if o != name}
            assert slot[what] == others
    assert result["prospects"] == {
        "learner": dict(zip(("prospect", "prospect_se"), worth.prospect["learner"], strict=True))
    }


def test_unmeasured_values_are_none():
    result = unmeasured_worth().to_dict()
    json.dumps(result, allow_nan=False)
    assert result["quality"] == 0.5
    assert result["committed"] is result["quality_se"] is None
    slot = result["slots"]["a"]
    assert slot.pop("kind") == "contribution"
    assert slot.pop("interaction") == slot.pop("interaction_se") == {"b": None}
    assert set(slot.values()) == {None}
    assert result["prospects"] == {"learner": {"prospect": 0.1, "prospect_se": None}}


# -- as text


def test_print_separates_contribution_from_dependence_with_errors():
    worth = complete_worth(3, fossils=("b",))
    head, columns, a, b, _, learner, *legend = str(worth).splitlines()
    assert [line.split(":")[0] for line in legend] == [
        "contribution", "dependence", "Shapley φ", "interactions", "prospect",
    ]  # fmt: skip
    assert max(map(len, str(worth).splitlines())) <= 80
    numbers = f"quality {worth.quality:.4f} ± {worth.quality_se:.4f}, without these seeds {worth.committed:.4f}"
    assert head == f"{numbers} (±: standard error)"
    assert columns.index("kind") == b.index("dependence")
    assert columns.index("with − without") + len("with − without") == b.index("±") + len("± 0.0000")
    assert "Shapley" in columns
    assert a.startswith("a ")
    assert "contribution" in a
    assert "dependence" not in a
    assert "dependence" in b
    assert "contribution" not in b
    assert f"{worth.contribution[1]:+.4f} ± {worth.contribution_se[1]:.4f}" in b
    assert f"{worth.shapley[1]:+.4f} ± {worth.shapley_se[1]:.4f}" in b
    assert f"{np.nansum(worth.interaction[1]):+.4f}" in b
    assert "prospect" in learner


def test_print_omits_unknown_values():
    assert "nan" not in str(unmeasured_worth()).split("\n", 1)[1]
    assert str(complete_worth(0)).splitlines()[1].split()[:2] == ["slot", "kind"]  # a prospect alone has a header, too
    assert len(str(dataclasses.replace(complete_worth(0), prospect={})).splitlines()) == 1


# -- does it separate a useful seed from a useless one?


@pytest.fixture(scope="module")
def grown() -> tuple[esper.Grower, Any]:
    """Return a trained narrow MLP on digits, with one seed trained on the frozen host and one left without effect."""
    torch.manual_seed(0)
    digits = load_data("digits")
    x, y = digits.train.x.flatten(1), digits.train.y
    model = nn.Sequential(
        nn.Sequential(nn.Linear(64, 6), nn.ReLU()), nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Linear(6, 10)
    )
    body = esper.graft(model, at={"good": "0", "useless": "1"}, probe=x[:4])
    train(body, x, y, model.parameters(), 60)
    grow(body, "good", "mlp", stage=SeedStage.HOLDING, alpha=1.0, scale=0.1)
    train(body, x, y, body.slots["good"].parameters(), 200)
    grow(body, "useless", "mlp_small", stage=SeedStage.HOLDING, alpha=1.0, scale=0.0)
    with torch.no_grad():
        for p in body.slots["useless"].parameters():
            p.add_(0.01 * torch.randn_like(p))
    grower = esper.Grower(body, torch.optim.SGD(body.parameters(), lr=0.1), controller="none")
    batches = [(split.x.flatten(1), split.y) for split in (digits.val, digits.test)]
    return grower, batches


def train(body: nn.Module, x: torch.Tensor, y: torch.Tensor, params: Any, steps: int) -> None:
    optimizer = torch.optim.Adam(params, lr=0.01)
    for i in range(steps):
        pick = torch.randint(len(x), (128,), generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        F.cross_entropy(body(x[pick]), y[pick]).backward()
        optimizer.step()


def test_useful_seed_has_positive_worth_and_a_useless_one_has_not(grown):
    grower, batches = grown
    worth = grower.worth(batches)
    good, useless = worth.contribution
    of_good, of_useless = worth.contribution_se
    assert worth.slots == ("good", "useless")
    assert good > 2.5 * of_good > 0
    assert abs(useless) <= max(2.5 * of_useless, 1e-9)
    assert abs(useless) < 0.01
    assert worth.shapley[0] > 2.5 * worth.shapley_se[0]
    assert abs(worth.shapley[1]) <= max(2.5 * worth.shapley_se[1], 1e-9)
    assert abs(worth.interaction[0, 1]) < 0.01
    assert worth.quality - worth.committed == pytest.approx(worth.shapley.sum())


def test_any_quality_is_accepted(grown):
    grower, batches = grown
    result = {}
    for name in ("accuracy", "log_probability"):
        grower = esper.Grower(
            grower.body, torch.optim.SGD(grower.body.parameters(), lr=0.1), quality=name, controller="none"
        )
        result[name] = grower.worth(batches)
    assert 0 < result["accuracy"].quality <= 1
    assert result["log_probability"].quality < 0
    assert result["log_probability"].contribution[0] > 2.5 * result["log_probability"].contribution_se[0]


def test_fossil_is_reported_as_dependence_and_no_seed_stays_switched_off(grown):
    grower, batches = grown
    body = grower.body
    before = body(batches[0][0])
    body.set_slot(body.slots["good"], SeedStage.FOSSILIZED, 1.0)
    try:
        worth = grower.worth(batches)
    finally:
        body.set_slot(body.slots["good"], SeedStage.HOLDING, 1.0)
    assert worth.fossils == (True, False)
    assert "dependence" in str(worth)
    assert torch.equal(body(batches[0][0]), before)


def test_tolerance_stops_once_the_values_are_precise_enough():
    torch.manual_seed(0)
    names = [str(i) for i in range(8)]
    body = esper.graft(nn.Sequential(*(nn.Linear(6, 6) for _ in range(9))), at=names, probe=torch.randn(3, 6))
    for slot in body.slots.values():
        body.plant(slot.name, "mlp_small")
        nn.init.normal_(slot.seed[2].weight, std=0.3)
        body.set_slot(slot, SeedStage.HOLDING, 1.0)
    batch = [(torch.randn(64, 6), torch.zeros(64))]

    def quality(out, _y):
        return torch.tanh(out[:, 0])

    reports = [report(body, batch, quality, budget=256, tolerance=t) for t in (10.0, 1e-2, 0.0)]
    assert [w.evaluations for w in reports] == sorted(w.evaluations for w in reports)
    assert reports[0].evaluations == 18
    assert reports[-1].evaluations == 256
    whole = report(body, batch, quality, budget=256)
    np.testing.assert_allclose(reports[-1].shapley, whole.shapley, atol=1e-6)
    assert np.abs(reports[1].shapley - whole.shapley).max() < 5e-2
