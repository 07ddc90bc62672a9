"""Test the error classes and their messages: the requested name, the known names, and a suggestion."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from esper.leyline import EsperError, Thresholds, errors
from esper.leyline.errors import ConfigError, UnknownNameError, unknown_name

FAMILY = [e for _, e in inspect.getmembers(errors, inspect.isclass) if e.__module__ == errors.__name__]


def test_error_classes_match_the_module_docstring():
    drawn = {word for word in errors.__doc__.split() if word.endswith("Error")}
    assert drawn == {e.__name__ for e in FAMILY}


@pytest.mark.parametrize("error", FAMILY)
def test_every_error_is_an_esper_error_with_an_unchanged_message(error):
    assert issubclass(error, EsperError)
    assert error.__doc__
    assert str(error("no slot 'a': there are b, c")) == "no slot 'a': there are b, c"
    with pytest.raises(EsperError, match="no slot"):
        raise error("no slot 'a'")


def test_errors_derive_from_builtin_exceptions():
    assert issubclass(UnknownNameError, KeyError)
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [("conv_lite", "conv_light"), ("Norm", "norm"), ("bottelneck", "bottleneck"), ("lora-large", "lora_large")],
)
def test_typo_suggests_the_nearest_name(typed, nearest):
    names = ["conv_light", "norm", "bottleneck", "lora", "lora_large"]
    error = unknown_name("blueprint", typed, names)
    assert isinstance(error, UnknownNameError)
    assert str(error).startswith(f"no blueprint named {typed!r}. Did you mean {nearest!r}? There are: ")
    assert str(error).endswith(", ".join(sorted(names)))


def test_dissimilar_name_gets_no_suggestion():
    assert str(unknown_name("task", "zzzzzz", ["digits", "fashion"])) == (
        "no task named 'zzzzzz'. There are: digits, fashion"
    )


def test_empty_list_of_names_is_reported_as_none():
    assert str(unknown_name("task", "digits", [])) == "no task named 'digits'. There are: none"


def test_long_list_of_names_is_truncated():
    message = str(unknown_name("slot", "x", (f"slot_{i:03}" for i in range(100))))
    assert message.endswith("slot_039 and 60 more")


@pytest.mark.parametrize(
    ("nonsense", "message"),
    [
        ({"blend_dwell": -1}, "a dwell must be ≥ 0, got -1"),
        ({"hold_dwell": -2}, "a dwell must be ≥ 0, got 10 and -2"),
        ({"z": -0.5}, "z must be ≥ 0, got -0.5"),
        ({"z": float("nan")}, "z must be ≥ 0, got nan"),
        ({"blend_health": float("nan")}, "blend_health must be a number or None, got nan"),
        ({"fossil_contribution": float("nan")}, "fossil_contribution must be a number or None, got nan"),
    ],
)
def test_thresholds_reject_invalid_values(nonsense, message):
    with pytest.raises(ConfigError, match=message):
        Thresholds(**nonsense)


def test_leyline_does_not_import_torch():
    code = "import sys, esper.leyline, esper.leyline.errors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
