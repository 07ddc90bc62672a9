"""Test policy files: exact round trip, and rejection of invalid files with a reason."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from esper.leyline.actions import Head
from esper.leyline.checksums import seal_tensors
from esper.leyline.errors import DataError
from esper.tamiyo import policy_file
from esper.tamiyo.network import NetworkConfig, TamiyoNetwork
from esper.tamiyo.policy.action_masks import DEFAULT_FIXED
from esper.tamiyo.policy_file import POLICY, load_policy, save_policy, view

CONFIGS = [
    NetworkConfig(),
    NetworkConfig(width=8, epsilon=0.1, patience=0.0),
    NetworkConfig(width=8, standardise=True),
]


def header(path):
    with safe_open(path, "pt") as opened:
        return opened.metadata()


def rewritten(path, **changed):
    """Rewrite a policy file with changed header fields. None removes a field."""
    new = {k: v for k, v in (header(path) | changed).items() if v is not None}
    path.write_bytes(seal_tensors(save(load_file(path), new)))


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / POLICY
    save_policy(TamiyoNetwork(NetworkConfig(width=8)), path, fixed=DEFAULT_FIXED, trained_on="sim", round=7)
    return path


@pytest.mark.parametrize("config", CONFIGS, ids=["default", "small", "standardised"])
def test_policy_round_trips_with_config_and_return_statistics(config, tmp_path):
    network = TamiyoNetwork(config)
    network.renormalise(0.3, 2.0)
    save_policy(network, tmp_path / "mine.safetensors", fixed={Head.TEMPO: 2})
    again, fixed = load_policy(tmp_path / "mine.safetensors")
    assert fixed == {Head.TEMPO: 2}
    assert again.config == config
    assert again.state_dict().keys() == network.state_dict().keys()
    assert all(torch.equal(again.state_dict()[name], x) for name, x in network.state_dict().items())
    assert float(again.std) == 2.0


def test_load_policy_accepts_a_run_directory(saved):
    assert load_policy(saved.parent)[0].config == load_policy(saved)[0].config


def test_header_contains_provenance_and_config_as_json(saved):
    assert json.loads(header(saved)["about"]) == {"trained_on": "sim", "round": 7}
    assert json.loads(header(saved)["network"])["width"] == 8


def test_save_replaces_an_older_file(saved):
    other = TamiyoNetwork(NetworkConfig(width=4))
    save_policy(other, saved, fixed={})
    assert [p.name for p in saved.parent.iterdir()] == [POLICY]
    assert load_policy(saved)[0].config.width == 4


def test_failed_save_keeps_the_older_file(saved):
    before = saved.read_bytes()
    with pytest.raises(TypeError):
        save_policy(TamiyoNetwork(), saved, fixed={}, about_what=object())
    assert saved.read_bytes() == before
    assert [p.name for p in saved.parent.iterdir()] == [POLICY]


def test_missing_policy_error_names_esper_train(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere.safetensors"):
        with pytest.raises(DataError, match=r"no policy in .* `esper train`"):
            load_policy(path)


def test_safetensors_file_without_a_policy_is_rejected(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(DataError, match="not a policy"):
        load_policy(path)


def test_policy_with_other_features_is_rejected(saved, monkeypatch):
    monkeypatch.setattr(policy_file, "feature_names", lambda _: ["another"])
    with pytest.raises(DataError, match=r"other observations, choices .* Train it again"):
        load_policy(saved)


def test_policy_of_a_version_with_other_network_settings_is_rejected(saved):
    rewritten(saved, network='{"width": 8, "core": "gru"}')
    with pytest.raises(DataError, match=r"other .* network settings than this version has\. Train it again"):
        load_policy(saved)


def test_view_depends_on_features_and_head_options(monkeypatch):
    views = {view()}
    assert view() in views
    with monkeypatch.context() as patch:
        patch.setattr(policy_file, "feature_names", lambda _: ["another"])
        views.add(view())
    with monkeypatch.context() as patch:
        patch.setattr(
            policy_file, "HEAD_OPTIONS", {**policy_file.HEAD_OPTIONS, next(iter(policy_file.HEAD_OPTIONS)): ()}
        )
        views.add(view())
    assert len(views) == 3


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
def test_truncated_file_is_reported_as_damaged(saved, share):
    whole = saved.read_bytes()
    saved.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(DataError, match="damaged or not a policy"):
        load_policy(saved)


@pytest.mark.parametrize(
    "changed",
    [
        {"network": None},
        {"network": "{"},
        {"network": '{"width": "wide"}'},
        {"network": '{"width": 0}'},
        {"network": '{"width": 9}'},
    ],
    ids=str,
)
def test_config_that_does_not_fit_the_weights_is_damage(saved, changed):
    rewritten(saved, **changed)
    with pytest.raises(DataError, match="damaged or not a policy"):
        load_policy(saved)


def test_missing_weights_are_reported_as_damage(saved):
    about, weights = header(saved), load_file(saved)
    del weights["choices.bias"]
    saved.write_bytes(seal_tensors(save(weights, about)))
    with pytest.raises(DataError, match=r"choices\.bias"):
        load_policy(saved)


def test_every_flipped_bit_is_rejected(saved):
    """Flip one bit in each byte of the header and of the first weights, and in every 97th byte of the rest."""
    whole = saved.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    places = {*range(header_end + 256), *range(header_end, len(whole), 97), len(whole) - 1}
    for place in sorted(places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        saved.write_bytes(damaged)
        with pytest.raises(DataError, match="damaged or not a policy"):
            load_policy(saved)
    saved.write_bytes(whole)
    load_policy(saved)


def test_every_truncation_and_extension_is_rejected(saved):
    whole = saved.read_bytes()
    for content in [*(whole[:size] for size in range(0, len(whole), 61)), whole[:-1], whole + b"\0", b"", whole * 2]:
        saved.write_bytes(content)
        with pytest.raises(DataError, match="damaged or not a policy"):
            load_policy(saved)


def test_policy_without_a_checksum_is_rejected(saved):
    save_file(load_file(saved), saved, {k: v for k, v in header(saved).items() if k != "sha256"})
    with pytest.raises(DataError, match="no checksum"):
        load_policy(saved)


def test_equal_policies_give_equal_bytes(tmp_path):
    network = TamiyoNetwork(NetworkConfig(width=8))
    again = TamiyoNetwork(NetworkConfig(width=8))
    again.load_state_dict(dict(reversed(network.state_dict().items())))
    save_policy(network, tmp_path / "one", fixed=DEFAULT_FIXED, trained_on="sim", round=7)
    contents = set()
    for _ in range(20):  # safetensors writes metadata in a different order per call
        save_policy(again, tmp_path / "two", fixed=DEFAULT_FIXED, trained_on="sim", round=7)
        contents.add((tmp_path / "two").read_bytes())
    assert contents == {(tmp_path / "one").read_bytes()}
