"""Event classes: each kind is documented, survives a round trip, and rejects what cannot be written."""

import ast
import inspect
import math
import typing

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline import events
from esper.leyline.errors import UnknownNameError
from esper.leyline.events import (
    KINDS,
    WORDS,
    Event,
    Level,
    NullReceiver,
    PhaseProfile,
    Update,
    encode,
    level,
    unspelled,
)
from esper.nissa.journal_reader import read, segment_name
from esper.nissa.record import Record, line

ALL = pytest.mark.parametrize("kind", list(KINDS.values()), ids=list(KINDS))
NUMBERS = st.none() | st.floats()
PLACE = {"seq", "time_s", "rank", "kind"}

UNITS = ("_s", "_ms", "_pct", "_bytes", "_epochs")
QUALITY = {
    "quality", "committed_quality", "quality_best", "test_quality", "baseline_quality",
    "contribution", "contribution_se", "solo", "solo_se", "shapley", "shapley_se",
    "interaction", "prospect", "prospect_se",
}  # fmt: skip
"""Fractions, or the task's own unit, by the convention of the module."""
DIMENSIONLESS = {
    "val_loss", "train_loss", "test_loss", "policy_loss", "value_loss", "entropy_loss",
    "reward", "episode_return", "utility", "value", "return_mean", "return_sd",
    "alpha", "alphas", "log_prob", "entropy", "learnable", "kl", "clip_fraction",
    "ratio_min", "ratio_max", "ratio", "health",
    "explained_variance", "value_nrmse", "grad_norm", "norm", "lr", "multiply_adds", "counters", "limit",
}  # fmt: skip
"""Dimensionless numbers. A new field that is none of these needs its unit in its name, or an entry here."""


def same(a, b):
    """Return whether two values are equal, where NaN equals NaN, 1.0 differs from True, and None equals only None."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (a != a and b != b)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def values_of(hint):
    """Return a strategy for the values that a field of this type may hold."""
    if hint == events.Number:
        return NUMBERS
    if typing.get_origin(hint) is tuple:
        return st.lists(values_of(typing.get_args(hint)[0]), max_size=3).map(tuple)
    if typing.get_origin(hint) is dict:
        return st.dictionaries(st.text(max_size=5), values_of(typing.get_args(hint)[1]), max_size=3)
    if type(None) in typing.get_args(hint):
        return st.none() | values_of(typing.get_args(hint)[0])
    words = st.sampled_from([*WORDS, "", "ring\n", "größe", '"', "\u2028"]) | st.text(max_size=10)
    return {str: words, int: st.integers(-(2**63), 2**63 - 1), float: st.floats(), bool: st.booleans()}[hint]


def any_event(kind):
    return st.builds(kind, **{name: values_of(hint) for name, hint in hints_of(kind).items()})


def hints_of(kind):
    return {field.name: typing.get_type_hints(kind)[field.name] for field in msgspec.structs.fields(kind)}


def example(kind, **changes):
    """Return an event with a value in every required field."""
    plain = {str: "x", int: 3, float: 1.5, bool: True}
    values = {}
    for field in msgspec.structs.fields(kind):
        if field.required:
            hint = hints_of(kind)[field.name]
            origin = typing.get_origin(hint)
            values[field.name] = () if origin is tuple else {} if origin is dict else plain.get(hint, 0.25)
    return kind(**(values | changes))


# Round trips --------------------------------------------------------------------------------------------------------


@ALL
def test_every_kind_survives_a_round_trip(kind, tmp_path_factory):
    @given(event=any_event(kind), seq=st.integers(0, 2**40), rank=st.integers(0, 9))
    @settings(max_examples=25, deadline=None)
    def check(event, seq, rank):
        run_dir = tmp_path_factory.mktemp("run")
        (run_dir / "events").mkdir()
        text = line(Record(seq, 1763245000.123456, rank, event))
        assert text.count(b"\n") == 1
        assert text.endswith(b"\n")
        (run_dir / "events" / segment_name(rank, 0)).write_bytes(text)
        (entry,) = read(run_dir)

        assert entry[:4] == (seq, 1763245000.123456, rank, kind.__struct_config__.tag)
        assert same(entry.data, {name: getattr(event, name) for name in kind.__struct_fields__})

    check()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, None, 0.0, -0.0, 5e-324, 1.7976931348623157e308])
def test_non_finite_unmeasured_and_finite_are_distinct(number):
    event = example(Update, kl=number, entropy={"op": number})
    data = unspelled(msgspec.json.decode(encode(event)))
    assert same(data["kl"], number)
    assert same(data["entropy"], {"op": number})
    assert math.copysign(1.0, data["kl"] or 0.0) == math.copysign(1.0, number or 0.0) or not data["kl"]


@ALL
def test_lines_are_standard_json(kind):
    import json

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    numbers = {name: math.nan for name, hint in hints_of(kind).items() if hint in (events.Number, float)}
    data = json.loads(encode(example(kind, **numbers)), parse_constant=refuse)
    assert all(data[name] == "NaN" for name in numbers)


@ALL
def test_later_version_may_add_fields_and_omit_defaults(kind):
    data = msgspec.json.decode(encode(example(kind)))
    required = {field.name for field in msgspec.structs.fields(kind) if field.required}
    data = {name: value for name, value in data.items() if name in required or name == "kind"} | {"moons": [1]}
    assert msgspec.convert(data, kind) == example(kind)


# Rejection ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forgotten",
    [torch.tensor(1.0), torch.zeros(3), np.zeros(3), np.float64(1.0), np.float64("nan"), np.float32(1), np.int64(1)],
    ids=lambda value: f"{type(value).__name__}",
)
@pytest.mark.parametrize("where", ["alone", "beside NaN", "within"])
def test_tensor_or_array_in_an_event_raises(forgotten, where):
    fields = {
        "alone": {"kl": forgotten},
        "beside NaN": {"kl": forgotten, "grad_norm": math.nan},
        "within": {"entropy": {"op": forgotten}},
    }[where]
    with pytest.raises(TypeError, match="unsupported"):
        encode(example(Update, **fields))


def test_events_are_frozen_and_reject_unknown_fields():
    event = example(PhaseProfile)
    with pytest.raises(AttributeError):
        event.calls = 4
    with pytest.raises(TypeError):
        PhaseProfile(phase="p", wall_ms=1.0, cpu_ms=1.0, calls=1, call=2)
    with pytest.raises(TypeError):
        PhaseProfile("p", 1.0, 1.0, 1)


# Metadata of kinds --------------------------------------------------------------------------------------------------


def test_kinds_are_those_of_the_module():
    classes = {value for value in vars(events).values() if inspect.isclass(value) and issubclass(value, Event)}
    assert set(KINDS.values()) == classes - {Event}
    assert list(KINDS) == [
        "run_started", "run_finished", "step", "decision", "lifecycle", "worth", "gradient", "update", "episode",
        "governor", "checkpoint", "phase_profile", "health",
    ]  # fmt: skip


@ALL
def test_every_kind_has_a_docstring(kind):
    source = ast.parse(inspect.getsource(events))
    (node,) = [n for n in source.body if isinstance(n, ast.ClassDef) and n.name == kind.__name__]
    text = ast.get_docstring(node)
    assert text
    assert text.endswith(".")


@ALL
def test_every_number_has_a_unit_or_is_listed_as_dimensionless(kind):
    for name, hint in hints_of(kind).items():
        if "float" in str(hint) and (kind, name) != (events.GovernorAlarm, "value"):
            assert name.endswith(UNITS) or name in QUALITY | DIMENSIONLESS, f"{kind.__name__}.{name}: in which unit?"
        if name.endswith(("_s", "_ms", "_pct")):
            assert "float" in str(hint), f"{kind.__name__}.{name} has a unit and is no number"


@ALL
def test_no_field_clashes_with_the_envelope_of_a_line(kind):
    assert not PLACE & set(kind.__struct_fields__)


@ALL
def test_gauge_keys_are_fields_and_must_keep_kinds_have_none(kind):
    assert set(kind.KEY) <= set(kind.__struct_fields__)
    assert bool(kind.KEY) == (not kind.KEEP)
    assert Level.MINIMAL <= kind.LEVEL <= Level.DEBUG


def test_lifecycle_outcome_and_failure_kinds_are_kept_at_every_level():
    always = {kind for kind in KINDS.values() if kind.KEEP and kind.LEVEL == Level.MINIMAL}
    assert {"RunStarted", "RunFinished", "Lifecycle", "Update", "Episode", "GovernorAlarm", "Checkpoint", "Health"} == {
        kind.__name__ for kind in always
    }


def test_levels_by_name():
    assert [level(name) for name in ("off", "Minimal", "NORMAL", "debug")] == list(Level)
    with pytest.raises(UnknownNameError, match="normal"):
        level("norml")


def test_silent_hub_wants_nothing():
    assert not any(NullReceiver().wants(kind) for kind in KINDS.values())
    NullReceiver().emit(example(PhaseProfile))
