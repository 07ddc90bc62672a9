"""Test embedded data sets, data order, augmentation, and the checks on user tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.errors import ConfigError, DataError, UnknownNameError
from esper.leyline.rng import derive_seed
from esper.tolaria.data import SOURCES, catalogue, crop_and_flip, load_data, minibatch_indices, window_starts
from esper.tolaria.data.dataset import balanced_order, from_tensors
from esper.tolaria.tasks import get_task
from tests.support import ROOT

EMBEDDED = {"digits": (1197, 300, 300), "fashion": (8000, 2000, 2000)}


@pytest.mark.parametrize(("name", "sizes"), EMBEDDED.items())
def test_embedded_images_are_normalised_balanced_and_disjoint(name, sizes):
    data = load_data(name)
    assert tuple(len(split) for split in data.splits.values()) == sizes
    assert data.train.x.mean().abs() < 1e-2
    assert (data.train.x.std() - 1).abs() < 1e-2
    assert data.train.x.is_contiguous(memory_format=torch.channels_last)
    assert data.train.x.min().item() == pytest.approx(data.black[0], abs=1e-5)
    assert data.chance_loss == pytest.approx(np.log(10))
    for split in data.splits.values():
        counts = torch.bincount(split.y, minlength=10)
        assert counts.max() - counts.min() <= (0 if name == "fashion" else 12)
    images = [{image.tobytes() for image in split.x.numpy()} for split in data.splits.values()]
    assert sum(map(len, images)) - len(set().union(*images)) == 0  # no image is in two splits


def test_printed_data_set_names_its_sizes_and_no_tensors():
    text = repr(load_data("digits"))
    assert text.startswith("Dataset 'digits': train 1,197, val 300, test 300 samples of shape [1, 8, 8], 10 classes; ")
    assert "tensor" not in text


def test_moby_text_and_targets_are_consistent():
    data = load_data("moby")
    text = "".join(data.vocabulary[i] for i in data.train.x[:42])
    assert text.startswith("CHAPTER 1. Loomings.\n\nCall me Ishmael.")
    assert data.train.x[1:].equal(data.train.y[:-1])
    assert 0.89 < len(data.train) / sum(len(s) for s in data.splits.values()) < 0.91


def test_windows_have_next_character_targets_without_padding():
    data = load_data("moby")
    cut = data.windowed(64)
    assert cut.train.x.shape == (len(data.train) - 63, 64)
    assert cut.val.x.shape == (len(data.val) // 64, 64)
    x, y = cut.train.take(torch.tensor([0, 5, 1000]))
    assert x[:, 1:].equal(y[:, :-1])
    assert cut.val.x.flatten().equal(data.val.x[: cut.val.x.numel()])  # each character once
    with pytest.raises(DataError, match="smaller block_size"):
        data.windowed(100_000)


def test_take_returns_indexed_samples_in_channels_last():
    data = from_tensors("mine", torch.randn(40, 3, 8, 8), torch.arange(40) % 4)
    index = torch.tensor([3, 1, 3])
    x, y = data.train.take(index)
    assert x.equal(data.train.x[index])
    assert y.equal(data.train.y[index])
    assert x.is_contiguous(memory_format=torch.channels_last)


def test_damaged_or_missing_embedded_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue, "FOLDER", tmp_path)
    with pytest.raises(DataError, match=r"digits\.npz is missing"):
        load_data("digits")
    (tmp_path / "digits.npz").write_bytes(b"PK not the file")
    with pytest.raises(DataError, match=r"digits\.npz is damaged.*Reinstall"):
        load_data("digits")


def test_unknown_data_set_error_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'fashion'"):
        load_data("fashon")


def test_embedded_files_have_checksums_and_licence_notes():
    embedded = {path.stem for path in catalogue.FOLDER.glob("*.npz")}
    assert embedded == {name for name, source in SOURCES.items() if source.sha256}
    notes = (catalogue.FOLDER / "LICENSES.md").read_text("utf-8")
    assert all(f"`{name}.npz`" in notes for name in embedded)


# Order


def one_by_one(world: int, steps: int, size: int, batch: int, batches: int) -> list[list[list[int]]]:
    """Return the order computed by writing out the whole index sequence and cutting it into batches."""
    endless: list[int] = []
    while len(endless) < steps * batch * batches:
        raw = np.random.Philox(key=derive_seed(world, "order", len(endless) // size)).random_raw(size)
        endless += sorted(range(size), key=lambda i, raw=raw: int(raw[i]))
    flat = iter(endless)
    return [[[next(flat) for _ in range(batch)] for _ in range(batches)] for _ in range(steps)]


sizes = st.integers(1, 60)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(1, 6), sizes, st.integers(1, 9), st.integers(1, 5))
def test_minibatch_indices_match_the_explicit_sequence(world, steps, size, batch, batches):
    orders = [
        minibatch_indices(world, step, size=size, batch=batch, batches_per_step=batches).tolist()
        for step in reversed(range(steps))  # any call order: a function of (world, step)
    ]
    assert orders[::-1] == one_by_one(world, steps, size, batch, batches)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), sizes, st.integers(1, 9), st.integers(1, 5))
def test_each_pass_contains_every_sample_once(world, size, batch, batches):
    steps = 3 * size // (batch * batches) + 1
    flat = torch.cat(
        [minibatch_indices(world, s, size=size, batch=batch, batches_per_step=batches).flatten() for s in range(steps)]
    )
    for number in range(3):
        part = flat[number * size : (number + 1) * size]
        if len(part) == size:
            assert part.sort().values.equal(torch.arange(size))


def test_order_differs_between_worlds_and_passes():
    first = minibatch_indices(1, 0, size=500, batch=500, batches_per_step=2)
    assert not first[0].equal(first[1])
    assert not first.equal(minibatch_indices(2, 0, size=500, batch=500, batches_per_step=2))


def test_order_of_a_world_has_fixed_values():
    """Changing the random stream would make earlier runs irreproducible."""
    assert minibatch_indices(7, 0, size=10, batch=10, batches_per_step=1).tolist() == [[6, 9, 5, 3, 2, 8, 1, 4, 7, 0]]
    assert window_starts(7, 0, size=1000, batch=4, batches_per_step=1).tolist() == [[812, 973, 853, 235]]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 50), st.integers(1, 10**7))
def test_window_starts_are_deterministic_and_in_range(world, step, size):
    first, second = (window_starts(world, step, size=size, batch=4, batches_per_step=3) for _ in range(2))
    assert first.equal(second)
    assert first.shape == (3, 4)
    assert 0 <= first.min() <= first.max() < size


def test_invalid_order_arguments_raise():
    with pytest.raises(DataError):
        minibatch_indices(0, 0, size=0, batch=1, batches_per_step=1)
    with pytest.raises(ConfigError):
        minibatch_indices(0, -1, size=5, batch=1, batches_per_step=1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_every_prefix_of_balanced_order_is_balanced(labels):
    array = np.array(labels)
    order = balanced_order(array, "x")
    assert sorted(order) == list(range(len(labels)))
    totals = np.bincount(array, minlength=5)
    for stop in range(len(labels)):
        counts = np.bincount(array[order[:stop]], minlength=5)
        open_classes = counts < totals
        assert not open_classes.any() or counts.max() - counts[open_classes].min() <= 1


# Derived random seeds


@given(
    st.lists(st.one_of(st.integers(), st.text()), max_size=4), st.lists(st.one_of(st.integers(), st.text()), max_size=4)
)
def test_derive_seed_is_injective_in_its_names(one, other):
    same = [(type(n), n) for n in one] == [(type(n), n) for n in other]
    assert (derive_seed(*one) == derive_seed(*other)) == same
    assert 0 <= derive_seed(*one) < 2**63


# Augmentation


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 99), st.integers(1, 5), st.integers(1, 3), st.integers(2, 7), st.integers(0, 3))
def test_crop_and_flip_matches_a_per_image_reference(seed, batch, channels, side, pad):
    x = torch.randn(batch, channels, side, side + 1)
    black = tuple(float(-c - 1) for c in range(channels))
    out = crop_and_flip(x, pad=pad, black=black, generator=torch.Generator().manual_seed(seed))

    generator = torch.Generator().manual_seed(seed)
    shifts = torch.randint(0, 2 * pad + 1, (2, batch), generator=generator)
    mirrored = torch.randint(0, 2, (batch, 1), generator=generator)
    for i in range(batch):
        image = torch.tensor(black)[:, None, None].repeat(1, side + 2 * pad, side + 1 + 2 * pad)
        image[:, pad : pad + side, pad : pad + side + 1] = x[i]
        dy, dx = shifts[:, i].tolist()
        crop = image[:, dy : dy + side, dx : dx + side + 1]
        assert out[i].equal(crop.flip(2) if mirrored[i] else crop)
    assert out.is_contiguous(memory_format=torch.channels_last)


# User tensors


def test_from_tensors_splits_without_overlap():
    x = torch.arange(200.0).view(100, 2)
    data = from_tensors("mine", x, torch.arange(100) % 5)
    rows = torch.cat([split.x for split in data.splits.values()])
    assert rows[:, 0].sort().values.equal(x[:, 0])
    assert torch.bincount(data.val.y).tolist() == [3] * 5
    assert data.classes == 5
    assert data.sha256 == from_tensors("mine", x, torch.arange(100) % 5).sha256
    assert data.sha256 != from_tensors("mine", x + 1, torch.arange(100) % 5).sha256


def with_value(x: torch.Tensor, value: float) -> torch.Tensor:
    x = x.clone()
    x[3, 0] = value
    return x


GOOD, LABELS = torch.randn(40, 6), torch.arange(40) % 4
BAD = [
    (with_value(GOOD, float("nan")), LABELS, {}, "1 NaN or infinite"),
    (with_value(GOOD, float("inf")), LABELS, {}, "1 NaN or infinite"),
    (GOOD, LABELS - 1, {}, "targets from -1"),
    (GOOD, LABELS, {"classes": 3}, "3 classes allow only 0 to 2"),
    (GOOD, LABELS.float(), {}, "int64 class"),
    (GOOD, LABELS[:-1], {}, "40 samples and 39 targets"),
    (GOOD[:0], LABELS[:0], {}, "0 samples"),
    (GOOD[:2], LABELS[:2], {}, "train split of 'mine' is empty"),
    (GOOD[:, :, None], LABELS, {}, "cannot tell what"),
    (GOOD, LABELS, {"val": (torch.randn(4, 5), LABELS[:4])}, r"samples of shape \(5,\)"),
    (GOOD, LABELS, {"test": (GOOD[:3], LABELS[:4])}, "3 samples but 4 targets"),
    (torch.randint(0, 9, (40, 6)), torch.randint(0, 9, (40, 6)), {"classes": 4}, "4 classes allow only"),
]


@pytest.mark.parametrize(("x", "y", "options", "words"), BAD)
def test_from_tensors_rejects_invalid_tensors(x, y, options, words):
    with pytest.raises(DataError, match=words):
        from_tensors("mine", x, y, **options)


def test_from_tensors_accepts_large_finite_values():
    from_tensors("mine", torch.full((40, 2), 3e38), LABELS)


def test_make_data_script_reproduces_the_digits():
    pytest.importorskip("sklearn")
    import importlib.util

    script = ROOT / "scripts" / "make_data.py"
    spec = importlib.util.spec_from_file_location("make_data", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with np.load(catalogue.FOLDER / "digits.npz", allow_pickle=False) as stored:
        built = module.digits()
        assert set(built) == set(stored)
        assert all(np.array_equal(built[key], stored[key]) for key in built)


def test_portions_cover_the_validation_split_once():
    data = get_task("moby").load_data()
    portions = data.val.portions()
    assert len(portions) > 1
    assert torch.equal(torch.cat([x for x, _ in portions]), data.val.x)
    assert torch.equal(torch.cat([y for _, y in portions]), data.val.y)
    images = get_task("digits").load_data().val
    assert [len(x) for x, _ in images.portions()] == [len(images)]
