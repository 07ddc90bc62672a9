"""Test that checkpoints are written atomically, and that damaged ones are reported and skipped."""

import contextlib
import errno
import hashlib
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from esper.leyline.checksums import seal_json
from esper.leyline.errors import CheckpointError, ConfigError, UnknownNameError
from esper.tolaria import checkpoint
from esper.tolaria.checkpoint import Checkpoints
from esper.tolaria.packing import packed, unpacked
from tests.support import ROOT

SYSTEM = {name: getattr(os, name) for name in ("open", "write", "fsync", "mkdir", "rename", "rmdir", "unlink")}


@pytest.fixture
def _a_quick_disk(monkeypatch):
    """Disable fsync, which dominates the run time of tests with many writes."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


quick = pytest.mark.usefixtures("_a_quick_disk")


def write(checkpoints, i, name=None, **more):
    """Write a small checkpoint with each kind of file, all containing `i`."""
    return checkpoints.write(
        name or f"round-{i}",
        tensors={"policy": {"weight": torch.full((3, 4), float(i)), "steps": torch.tensor(i)}},
        documents={"run": {"i": i, "curve": [0.5 * i, None, "a"]}, "notes": f"i={i}"},
        **more,
    )


def stored_number(saved):
    """Return the number that all files of a checkpoint contain, or None without a checkpoint."""
    if saved is None:
        return None
    tensors, document = saved.tensors("policy"), saved.document("run")
    i = document["i"]
    assert document == {"i": i, "curve": [0.5 * i, None, "a"]}
    assert tensors.keys() == {"weight", "steps"}
    assert torch.equal(tensors["weight"], torch.full((3, 4), float(i)))
    assert torch.equal(tensors["steps"], torch.tensor(i))
    assert saved.document("notes") == f"i={i}"
    return i


def newest(checkpoints):
    """Return the number in the newest checkpoint and the warnings of opening it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved = checkpoints.newest()
    return stored_number(saved), [str(each.message) for each in caught]


def drafts(root):
    return [each.name for each in root.iterdir() if each.name.startswith(".draft-")]


# Write and read -----------------------------------------------------------------------------------------------------


def test_write_then_read_round_trips(tmp_path):
    checkpoints = Checkpoints(tmp_path / "runs" / "checkpoints")
    assert checkpoints.newest() is None
    assert checkpoints.names() == []

    written = write(checkpoints, 7, kind="body", score=0.5)

    saved = checkpoints.newest()
    assert stored_number(saved) == 7
    assert (saved.path, saved.name, saved.kind, saved.score) == (written.path, "round-7", "body", 0.5)
    assert written.path == tmp_path / "runs" / "checkpoints" / "round-7"
    names = {"policy.safetensors", "run.json", "notes.json", "index.json"}
    assert {each.name for each in written.path.iterdir()} == names
    assert written.size_bytes == sum(each.stat().st_size for each in written.path.iterdir())
    assert written.write_ms > 0
    assert stored_number(Checkpoints(checkpoints.root).newest()) == 7  # as in another process


def test_empty_checkpoint_is_valid(tmp_path):
    Checkpoints(tmp_path).write("empty")
    assert Checkpoints(tmp_path).newest().name == "empty"


def test_unknown_file_error_lists_the_files(tmp_path):
    write(Checkpoints(tmp_path), 1)
    saved = Checkpoints(tmp_path).newest()
    for ask in (lambda: saved.document("runs"), lambda: saved.tensors("x"), lambda: saved.file("index.json")):
        with pytest.raises(UnknownNameError, match=r"run\.json"):
            ask()


@quick
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.uint32, torch.bool, torch.complex64],
)
def test_tensors_of_any_dtype_and_layout_round_trip_bit_identically(tmp_path, dtype):
    values = (torch.arange(24) - 12).reshape(2, 3, 4).to(dtype)
    tensors = {
        "": values,
        "a view": values[:, 1:, ::2],
        "turned": values.transpose(0, 2),
        "none": values[:0],
        "one": values[0, 0, 0],
        "shared": values,
        "a name. with / signs": values,
    }
    Checkpoints(tmp_path).write("x", tensors={"t": tensors})
    loaded = Checkpoints(tmp_path).newest().tensors("t")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == dtype
        assert loaded[name].shape == tensor.shape
        assert loaded[name].is_contiguous()
        assert torch.equal(loaded[name], tensor)


def test_non_finite_and_conjugated_tensors_round_trip(tmp_path):
    odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    turned = torch.tensor([1 + 2j]).conj()
    parameter = nn.Parameter(torch.ones(2))
    Checkpoints(tmp_path).write("x", tensors={"t": {"odd": odd, "turned": turned, "parameter": parameter}})
    loaded = Checkpoints(tmp_path).newest().tensors("t")
    assert loaded["odd"].view(torch.int32).tolist() == odd.view(torch.int32).tolist()
    assert loaded["turned"].tolist() == [1 - 2j]
    assert loaded["parameter"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"documents": {"d": {"x": math.nan}}}, "'d' is not plain JSON"),
        ({"documents": {"d": {"x": (1, 2)}}}, "'d' would be loaded with other types"),
        ({"documents": {"d": {1: 2}}}, "'d' would be loaded with other types"),
        ({"documents": {"d": {"x": object()}}}, "'d' is not plain JSON"),
        ({"documents": {"d": 10**5000}}, "'d' is not plain JSON"),
        ({"documents": {"a/b": 1}}, "'a/b.json' is not a valid name"),
        ({"documents": {"../x": 1}}, "'../x.json' is not a valid name"),
        ({"documents": {".x": 1}}, "'.x.json' is not a valid name"),
        ({"documents": {"index": 1}}, "'index.json' is not a valid name"),
        ({"tensors": {"t": {"w": torch.zeros(2).to_sparse()}}}, "t\\['w'\\] is a tensor of .*sparse"),
        ({"tensors": {"t": {"w": torch.zeros(2, device="meta")}}}, "t\\['w'\\] .* on meta"),
        ({"tensors": {"t": {"w": torch.zeros(2, dtype=torch.complex128)}}}, "t\\['w'\\] .*complex128"),
        ({"tensors": {"t": {"w": [1.0]}}}, "t\\['w'\\] is a list"),
        ({"tensors": {"t": {"__metadata__": torch.zeros(1)}}}, "__metadata__"),
    ],
)
def test_invalid_content_is_rejected_before_writing(tmp_path, content, message):
    write(Checkpoints(tmp_path), 1)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=message):
        Checkpoints(tmp_path).write("x", **content)
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(CheckpointError, match="is not a valid name"):
        Checkpoints(tmp_path).write("../x")


def test_checkpoint_of_too_many_files_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "MOST_INDEX_BYTES", 1000)
    with pytest.raises(CheckpointError, match="20 files"):
        Checkpoints(tmp_path).write("x", documents={f"f{i}": None for i in range(20)})
    assert [each.name for each in tmp_path.iterdir()] == [".lock"]


# Retention ----------------------------------------------------------------------------------------------------------


def slowly_kept(scores, keep):
    """Return the numbers of the retained checkpoints, simulating one write after the other."""
    kept = []
    for number in range(len(scores)):
        kept.append(number)
        scored = [each for each in kept if scores[each] is not None and math.isfinite(scores[each])]
        best = max(scored, key=lambda each: (scores[each], each), default=None)
        kept = [each for each in kept if each in kept[-keep:] or each == best]
    return kept


@quick
@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.one_of(st.none(), st.sampled_from([0.0, -1.5, 2.5, math.nan, math.inf])), max_size=8),
    st.integers(1, 4),
)
def test_last_and_best_are_kept(tmp_path_factory, scores, keep):
    """Names do not determine the order."""
    root = tmp_path_factory.mktemp("root")
    names = [f"round-{hash((i, len(scores))) % 9973}" for i in range(len(scores))]
    for name, score in zip(names, scores, strict=True):
        Checkpoints(root, keep=keep).write(name, score=score)
    checkpoints = Checkpoints(root, keep=keep)
    kept = slowly_kept(scores, keep)
    assert checkpoints.names() == [names[i] for i in kept]
    newest = checkpoints.newest()
    assert (newest and newest.name) == (names[-1] if names else None)


def test_keep_must_be_at_least_one(tmp_path):
    with pytest.raises(ConfigError, match="keep must be ≥ 1, got 0"):
        Checkpoints(tmp_path, keep=0)


@quick
def test_reused_name_makes_a_newer_checkpoint(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for i in range(4):
        write(checkpoints, i, name="body")
        assert newest(checkpoints) == (i, [])
    assert checkpoints.names() == ["body", "body"]


@quick
def test_writing_another_kind_is_rejected(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    write(checkpoints, 1, kind="run")
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoints of kind 'run'.*to another directory"):
        write(checkpoints, 2, kind="body")
    assert snapshot(tmp_path) == before


def snapshot(root):
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_foreign_files_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    first = write(checkpoints, 0).path
    shutil.copytree(first, tmp_path / "mine")  # a copy under a name chosen by the user
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for i in range(1, 4):
        write(checkpoints, i)
    assert {each.name for each in tmp_path.iterdir()} == {".lock", "round-3", "mine", "notes", "file"}
    assert newest(checkpoints)[0] == 3


@quick
def test_damaged_checkpoints_do_not_count_for_retention(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 0)
    for i, spoil in ((1, b'"i=9"'), (2, b"too long")):  # one is detected when opened, one by its size
        write(checkpoints, i)
        (tmp_path / f"round-{i}" / "notes.json").write_bytes(spoil)
        assert newest(checkpoints)[0] == 0
    write(checkpoints, 3)
    (tmp_path / "round-3" / "run.json").unlink()
    assert newest(checkpoints)[0] == 0  # not removed in favour of damaged ones
    write(checkpoints, 4)
    write(checkpoints, 5)
    assert checkpoints.names() == ["round-4", "round-5"]


@quick
def test_name_of_a_damaged_checkpoint_can_be_reused(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for i in (1, 2):
        write(checkpoints, i)
    (tmp_path / "round-2" / "notes.json").write_bytes(b'"i=9"')
    assert newest(checkpoints)[0] == 1
    shutil.rmtree(tmp_path / "round-2")
    for i in (2, 3):
        write(checkpoints, i)
    assert checkpoints.names() == ["round-2", "round-3"]


# Damage -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path, monkeypatch):
    """Return a root with checkpoints 1 and 2, and the bytes of every file."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    checkpoints = Checkpoints(tmp_path)
    write(checkpoints, 1, score=2.0)
    write(checkpoints, 2, score=1.0)
    return checkpoints, {each: each.read_bytes() for each in tmp_path.glob("round-*/*")}


def check_fallback(checkpoints, damaged):
    """Assert that checkpoint `damaged` is reported and skipped and the other one is intact."""
    other = {1: 2, 2: 1}[damaged]
    newest_round, warned = newest(checkpoints)
    assert newest_round == other
    if damaged == 2:
        assert len(warned) == 1
        assert "round-2" in warned[0]
        assert "damaged" in warned[0]
    else:
        assert not any("round-2" in each for each in warned)


FILES = ["policy.safetensors", "run.json", "notes.json", "index.json"]


@pytest.mark.parametrize("damaged", [1, 2])
@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_detected(pair, name, damaged):
    checkpoints, contents = pair
    path = checkpoints.root / f"round-{damaged}" / name
    content, dice = contents[path], random.Random(damaged)
    places = range(len(content)) if damaged == 2 else range(0, len(content), 7)
    for place in places:
        for bit in dice.sample(range(8), 2):
            spoilt = bytearray(content)
            spoilt[place] ^= 1 << bit
            path.write_bytes(spoilt)
            check_fallback(checkpoints, damaged)
    path.write_bytes(content)
    assert newest(checkpoints) == (2, [])


@pytest.mark.parametrize("name", FILES)
def test_truncation_and_appended_bytes_are_detected(pair, name):
    checkpoints, contents = pair
    path = checkpoints.root / "round-2" / name
    for length in range(len(contents[path])):
        path.write_bytes(contents[path][:length])
        check_fallback(checkpoints, 2)
    for more in (b"\0", b"\n", b" ", contents[path]):
        path.write_bytes(contents[path] + more)
        check_fallback(checkpoints, 2)


def complete_number(folder, good):
    """Return the number of the checkpoint whose files a directory holds completely, or None. Files may be swapped."""
    for i in (1, 2):
        mine = {each.name: content for each, content in good.items() if each.parent.name == f"round-{i}"}
        if all((folder / name).is_file() and (folder / name).read_bytes() == mine[name] for name in mine):
            return i
    return None


def slowly_newest(root, good):
    return max((i for each in (1, 2) if (i := complete_number(root / f"round-{each}", good))), default=None)


blows = st.tuples(
    st.sampled_from(["flip", "cut", "insert", "remove", "swap", "overwrite", "unlisted"]),
    st.sampled_from([(i, name) for i in (1, 2) for name in FILES]),
    st.sampled_from([(i, name) for i in (1, 2) for name in FILES]),
    st.integers(0, 1 << 16),
    st.integers(1, 255),
)


def apply_damage(root, good, damage):
    """Damage a checkpoint: flip bits, or cut, extend, remove, swap, overwrite or add a file."""
    kind, (i, name), (j, other), place, byte = damage
    path, second = root / f"round-{i}" / name, root / f"round-{j}" / other
    content = bytearray(path.read_bytes() if path.exists() else b"")
    place %= len(content) + 1
    if kind == "flip" and place < len(content):
        content[place] ^= byte
        path.write_bytes(content)
    elif kind == "cut":
        path.write_bytes(content[:place])
    elif kind == "insert":
        path.write_bytes(content[:place] + bytes([byte]) + content[place:])
    elif kind == "remove":
        path.unlink(missing_ok=True)
    elif kind == "swap" and second.exists():
        path.write_bytes(second.read_bytes())
        second.write_bytes(content)
    elif kind == "overwrite":
        path.write_bytes(good[second])
    elif kind == "unlisted":
        (path.parent / "unlisted.json").write_bytes(content)


@settings(deadline=None, max_examples=300)
@given(st.lists(blows, min_size=1, max_size=5))
def test_newest_returns_the_newest_intact_one_under_any_damage(tmp_path_factory, struck):
    root = tmp_path_factory.getbasetemp() / "mixture"
    if not root.exists():
        for i in (1, 2):
            write(Checkpoints(root), i)
    good = {each: each.read_bytes() for each in sorted(root.glob("round-*/*"))}
    try:
        for damage in struck:
            apply_damage(root, good, damage)
        newest_round, warned = newest(Checkpoints(root))
        assert newest_round == slowly_newest(root, good)
        for i, j in ((1, 2), (2, 1)):
            index, its = root / f"round-{i}" / "index.json", good[root / f"round-{j}" / "index.json"]
            is_the_others = index.exists() and index.read_bytes() == its  # then it has the other's number
            if newest_round != 2 and not complete_number(index.parent, good) and not is_the_others:
                assert any(f"round-{i}" in each for each in warned)
    finally:
        for path in root.glob("round-*/*"):
            path.unlink()
        for path, content in good.items():
            path.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_detected(pair, name):
    checkpoints, _ = pair
    (checkpoints.root / "round-2" / name).unlink()
    check_fallback(checkpoints, 2)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("thing", ["directory", "link", "pipe", "huge", "unreadable"])
def test_files_of_wrong_type_or_size_are_not_read(pair, thing, name):
    checkpoints, contents = pair
    path = checkpoints.root / "round-2" / name
    path.unlink()
    if thing == "directory":
        path.mkdir()
    elif thing == "link":
        path.symlink_to(checkpoints.root / "round-1" / name)
    elif thing == "pipe":
        os.mkfifo(path)
    elif thing == "huge":
        path.touch()
        os.truncate(path, 1 << 40)  # a sparse file of one terabyte
    else:
        if os.geteuid() == 0:
            pytest.skip("root reads everything")
        path.write_bytes(contents[path])
        path.chmod(0)
    check_fallback(checkpoints, 2)


def test_all_damaged_gives_none_and_names_all(pair):
    checkpoints, contents = pair
    for path in contents:
        if path.name == "index.json":
            path.unlink()
    newest_round, warned = newest(checkpoints)
    assert newest_round is None
    assert len(warned) == 2
    assert checkpoints.names() == []


def test_foreign_files_and_empty_directories_are_ignored(pair):
    checkpoints, _ = pair
    (checkpoints.root / "round-2" / "unlisted.bin").write_bytes(b"?")
    (checkpoints.root / "empty").mkdir()
    (checkpoints.root / ".draft-1-abc").mkdir()
    (checkpoints.root / ".draft-1-abc" / "policy.safetensors").write_bytes(b"half")
    (checkpoints.root / "a file").write_bytes(b"?")
    newest_round, warned = newest(checkpoints)
    assert newest_round == 2
    assert len(warned) == 1
    assert "empty" in warned[0]
    write(checkpoints, 3)
    assert drafts(checkpoints.root) == []


def test_files_changed_after_opening_are_rejected(pair):
    checkpoints, contents = pair
    saved = checkpoints.newest()
    for path in contents:
        if path.parent.name == "round-2":
            path.write_bytes(bytes([contents[path][0] ^ 1]) + contents[path][1:])
    for ask in (lambda: saved.document("run"), lambda: saved.tensors("policy"), lambda: saved.document("notes")):
        with pytest.raises(CheckpointError, match="damaged"):
            ask()


# Untrusted checkpoints: valid checksums, hostile content -----------------------------------------------------------


def forged(folder, contents, **changes):
    """Write a checkpoint with a valid index except for `changes`. `body` replaces the whole index body."""
    folder.mkdir(parents=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    promised = {name: {"size": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in contents.items()}
    index = {"format": "esper-checkpoint-1", "number": 99, "name": "x", "kind": "run", "score": None, "files": promised}
    body = changes.pop("body", None) or json.dumps(index | changes).encode()
    (folder / "index.json").write_bytes(seal_json(b'{"index":%s}\n' % body))


DEEP = b"[" * 200_000 + b"]" * 200_000


@pytest.mark.parametrize(
    "changes",
    [
        {"body": b"[" * 100_000 + b"]" * 100_000},
        {"body": b'{"number":' + b"9" * 100_000 + b"}"},
        {"body": b" " * (1 << 20)},
        {"body": b"{}"},
        {"body": b"\xff\xfe"},
        {"format": "esper-checkpoint-2"},
        {"number": "1"},
        {"number": 10**30},
        {"score": "NaN"},
        {"more": 1},
        {"name": "../x"},
        {"files": {"../../etc/passwd": {"size": 1, "sha256": ""}}},
        {"files": {"/etc/passwd": {"size": 1, "sha256": ""}}},
        {"files": {"a": {"size": 10**18, "sha256": ""}}},
        {"files": {"a": {"size": -1, "sha256": ""}}},
        {"files": {"a": [1]}},
        {"files": [DEEP.decode()]},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_hostile_index_is_reported_as_damage(pair, changes):
    checkpoints, _ = pair
    forged(checkpoints.root / "x", {"a": b"1"}, **changes)
    newest_round, warned = newest(checkpoints)
    assert newest_round == 2
    assert len(warned) == 1
    assert "damaged" in warned[0]
    write(checkpoints, 3)
    assert newest(checkpoints)[0] == 3


def header(text, size=None):
    return (len(text) if size is None else size).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        header(b"{}", size=1 << 62),
        header(b"{}", size=2**64 - 1),
        header(b"{" * 1000),
        header(DEEP),
        header(b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}}') + b"\0" * 4,
        header(b'{"a":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4000000000]}}'),
        header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}') + b"\0" * 4,
        header(b'{"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}}') + b"\0" * 4,
        header(b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}') + b"\0" * 4,
        header(b'{"a":1}'),
        header(b"\xff\xff"),
    ],
    ids=lambda content: repr(content[8:40]),
)
def test_hostile_tensors_are_reported_as_damage(tmp_path, content):
    forged(tmp_path / "x", {"t.safetensors": content})
    saved = Checkpoints(tmp_path).newest()
    with pytest.raises(CheckpointError, match=r"'x' is damaged: .*t\.safetensors"):
        saved.tensors("t")


@pytest.mark.parametrize("content", [b"", DEEP, b"9" * 100_000, b"\xff", b"{", b'{"a":1}x'], ids=lambda c: repr(c[:9]))
def test_hostile_documents_are_reported_as_damage(tmp_path, content):
    forged(tmp_path / "x", {"d.json": content})
    saved = Checkpoints(tmp_path).newest()
    with pytest.raises(CheckpointError, match=r"'x' is damaged: .*d\.json"):
        saved.document("d")


# Disk failures ------------------------------------------------------------------------------------------------------


class BadDisk:
    """Make `times` system calls that change the disk fail after `at` calls. A failing write writes half first."""

    def __init__(self, monkeypatch, at, code, times=1):
        self.patch, self.at, self.code, self.left, self.calls = monkeypatch, at, code, times, []

    def __enter__(self):
        for name in SYSTEM:
            self.patch.setattr(os, name, self.calling(name))
        return self

    def __exit__(self, *_):
        for name, call in SYSTEM.items():
            self.patch.setattr(os, name, call)

    def calling(self, name):
        def call(*args, **kwargs):
            if name == "open" and not args[1] & os.O_CREAT:
                return SYSTEM[name](*args, **kwargs)
            self.calls.append(name)
            if len(self.calls) > self.at and self.left > 0:
                self.left -= 1
                if name == "write" and len(args[1]) > 1:
                    SYSTEM["write"](args[0], bytes(args[1][: len(args[1]) // 2]))
                raise OSError(self.code, os.strerror(self.code))
            if name == "fsync":
                return None
            return SYSTEM[name](*args, **kwargs)

        return call


def refusal(act):
    try:
        act()
    except CheckpointError as error:
        return error
    return None


@pytest.mark.parametrize("times", [1, 10**9], ids=["once", "from then on"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_failure_at_any_system_call_keeps_the_last_checkpoint(tmp_path, monkeypatch, code, times):
    failed = 0
    for at in range(200):
        root = tmp_path / str(at)
        checkpoints = Checkpoints(root, keep=1)
        with BadDisk(monkeypatch, 10**9, code):
            write(checkpoints, 1)
        with BadDisk(monkeypatch, at, code, times) as disk, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = refusal(lambda: write(checkpoints, 2))  # noqa: B023 (called at once)
        if error is not None:
            failed += 1
            assert error.__cause__.errno == code
            assert f"cannot write checkpoint 'round-2' in {root}: {os.strerror(code)}" in str(error)
            assert str(error).endswith(("at the next checkpoint", "another directory"))
        renamed = error is None or "rename" in disk.calls[:at]
        if len(disk.calls) <= at:
            break
        assert newest(checkpoints) == (2 if renamed else 1, [])
        if times == 1:
            assert drafts(root) == [] or "rename" in disk.calls[at + 1 :] or disk.calls[at] in ("unlink", "rmdir")
        with BadDisk(monkeypatch, 10**9, code):
            write(checkpoints, 3)
        assert newest(checkpoints) == (3, [])
        assert drafts(root) == []
        assert checkpoints.names() == ["round-3"]
    assert failed == 17  # lock, draft; create, write and fsync of four files; two directory fsyncs; rename
    assert at < 199


def test_unusable_root_raises_checkpoint_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Choose a directory"):
        write(Checkpoints(tmp_path / "file"), 1)
    with pytest.raises(CheckpointError, match="Choose a directory"):
        write(Checkpoints(tmp_path / "file" / "below"), 1)
    with pytest.raises(CheckpointError, match="cannot list checkpoints"):
        Checkpoints(tmp_path / "file").newest()


def test_interrupt_during_writing_leaves_no_draft(tmp_path, monkeypatch):
    write(Checkpoints(tmp_path), 1)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write(Checkpoints(tmp_path), 2)
    assert drafts(tmp_path) == []
    assert newest(Checkpoints(tmp_path)) == (1, [])


@pytest.mark.slow
def test_file_size_limit_keeps_the_last_checkpoint(tmp_path):
    code = """
import resource, sys
from pathlib import Path
import torch
from esper.leyline.errors import CheckpointError
from esper.tolaria.checkpoint import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]))
checkpoints.write("small", tensors={"t": {"w": torch.ones(10)}})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    checkpoints.write("large", tensors={"t": {"w": torch.ones(10_000)}})
except CheckpointError as error:
    print(error)
print(checkpoints.newest().name, checkpoints.write("after").path.name)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "cannot write checkpoint 'large'" in done.stdout
    assert "File too large" in done.stdout
    assert done.stdout.endswith("small after\n")
    assert {each.name for each in tmp_path.iterdir()} == {".lock", "small", "after"}


@pytest.mark.slow
def test_full_disk_keeps_the_last_checkpoint(tmp_path):
    code = """
import sys
from pathlib import Path
import torch
from esper.leyline.errors import CheckpointError
from esper.tolaria.checkpoint import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]) / "root", keep=2)
for i, size in enumerate((5_000, 10_000, 40_000)):
    try:
        checkpoints.write(f"round-{i}", tensors={"t": {"w": torch.full((size,), float(i))}})
    except CheckpointError as error:
        print(error)
print(checkpoints.names(), checkpoints.newest().tensors("t")["w"].sum().item())
print([each.name for each in checkpoints.root.glob(".draft*")], checkpoints.write("small").path.name)
"""
    small = f"mount -t tmpfs -o size=200k none '{tmp_path}'"
    if subprocess.run(["unshare", "-rm", "sh", "-c", small], capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    run = ["unshare", "-rm", "sh", "-c", f'{small} && exec "$@"', "-", sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert "cannot write checkpoint 'round-2'" in lines[0]
    assert "No space left on device. Earlier ones are unchanged. Free some space" in lines[0]
    assert lines[1:] == ["['round-0', 'round-1'] 10000.0", "[] small"]


# Killed and concurrent processes ------------------------------------------------------------------------------------

WRITER = """
import os, sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[2])
from tests.tolaria.test_checkpoint import Checkpoints, write
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:
    start, most, keep = map(int, line.split())
    pid = os.fork()
    if pid == 0:
        for i in range(start, start + most):
            write(Checkpoints(Path(sys.argv[1]), keep=keep), i)
            os.write(1, f"wrote {i}\\n".encode())
        os._exit(0)
    print("pid", pid, flush=True)
    if most > 1000:
        os.waitpid(pid, 0)
        print("over", flush=True)
for _ in range(99):
    try:
        os.wait()
    except ChildProcessError:
        break
"""
"""Script that forks one writer per input line, so that torch is imported once."""


@pytest.fixture
def writers(tmp_path):
    root = tmp_path / "root"
    parent = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), str(ROOT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout.readline() == "ready\n"
    yield root, parent
    parent.stdin.close()
    parent.wait(60)
    parent.stdout.close()


@pytest.mark.slow
def test_killed_writer_leaves_a_complete_newest_checkpoint(writers):
    root, parent = writers
    dice, last, left_drafts = random.Random(6), -1, 0
    for kill in range(20):
        parent.stdin.write(f"{1000 * kill} 100000 2\n")
        parent.stdin.flush()
        pid = None
        lines = [parent.stdout.readline() for _ in range(3)]  # its process id, and the first writes
        pid = next(int(each.split()[1]) for each in lines if each.startswith("pid"))
        time.sleep(dice.random() * 0.06)
        os.kill(pid, signal.SIGKILL)
        while (newest_round := parent.stdout.readline()) != "over\n":
            lines.append(newest_round)
        last = max(int(each.split()[1]) for each in lines if each.startswith("wrote"))
        left_drafts += len(drafts(root))
        newest_number, warned = newest(Checkpoints(root))
        assert warned == []
        assert newest_number in (last, last + 1)  # it may be killed before it prints
    assert left_drafts > 0  # some were killed during a write
    write(Checkpoints(root), 99)
    assert drafts(root) == []
    assert newest(Checkpoints(root)) == (99, [])


@pytest.mark.slow
def test_concurrent_writers_and_readers_do_not_interfere(writers):
    root, parent = writers
    for start in (0, 100, 200):
        parent.stdin.write(f"{start} 12 2\n")
    parent.stdin.close()
    looks = 0
    while parent.poll() is None:
        try:
            newest_number, warned = newest(Checkpoints(root))
        except CheckpointError as error:
            if "was removed by a writer" in str(error):  # two newer ones were written during the read
                continue
            raise
        assert warned == []
        assert newest_number is not None or not looks
        looks += newest_number is not None
    assert parent.returncode == 0
    assert sum(each.startswith("wrote") for each in parent.stdout) == 36
    assert drafts(root) == []
    assert len(Checkpoints(root).names()) == 2
    numbers = [json.loads(each.read_bytes())["index"]["number"] for each in root.glob("*/index.json")]
    assert sorted(numbers) == [35, 36]


def test_second_writer_waits_and_then_times_out(tmp_path, monkeypatch):
    inside, go_on = threading.Event(), threading.Event()
    encode = checkpoint._encoded_index

    def slow(index):
        if index.name == "slow":
            inside.set()
            go_on.wait(20)
        return encode(index)

    monkeypatch.setattr(checkpoint, "_encoded_index", slow)
    first = threading.Thread(target=Checkpoints(tmp_path).write, args=("slow",))
    first.start()
    assert inside.wait(20)
    monkeypatch.setattr(checkpoint, "WAIT_S", 0.02)
    with pytest.raises(CheckpointError, match=r"another process holds the lock.*its own directory"):
        Checkpoints(tmp_path).write("second")
    assert len(drafts(tmp_path)) == 1  # the first writer's draft is kept
    go_on.set()
    first.join()
    Checkpoints(tmp_path).write("second")
    assert Checkpoints(tmp_path).names() == ["slow", "second"]


def test_write_works_without_file_locks_and_keeps_drafts(tmp_path, monkeypatch):
    import fcntl

    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    tmp_path.joinpath(".draft-1-abc").mkdir()
    write(Checkpoints(tmp_path), 1)
    assert newest(Checkpoints(tmp_path)) == (1, [])
    assert drafts(tmp_path) == [".draft-1-abc"]


def test_newest_retries_if_its_checkpoint_is_removed(tmp_path, monkeypatch):
    """A writer removes the newest checkpoint while the reader opens it."""
    write(Checkpoints(tmp_path, keep=1), 1)
    opened = checkpoint._opened

    @contextlib.contextmanager
    def late(path, size=None):
        if path.name == "run.json" and path.parent.name == "round-1":
            monkeypatch.setattr(checkpoint, "_opened", opened)
            write(Checkpoints(tmp_path, keep=1), 2)
        with opened(path, size) as file:
            yield file

    monkeypatch.setattr(checkpoint, "_opened", late)
    assert newest(Checkpoints(tmp_path)) == (2, [])


# Trees --------------------------------------------------------------------------------------------------------------


def same(a, b):
    """Return whether two trees are equal in values and types. NaN equals itself; 0.0 does not equal -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, j) and same(v, w) for (k, v), (j, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(v, w) for v, w in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return (a == b and str(a) == str(b)) or (a != a and b != b)


ints = st.integers(-(2**130), 2**130)
texts = st.one_of(st.text(max_size=4), st.sampled_from(["~", "nan", "items", "a.b", "a", "__metadata__", "\ud800"]))
plain = st.one_of(st.none(), st.booleans(), ints, st.floats(), texts)
arrays = st.builds(
    lambda kind, shape: (np.arange(math.prod(shape)) % 5).reshape(shape).astype(kind),
    st.sampled_from(["f4", "f8", "f2", "i1", "i8", "u1", "u2", "u4", "u8", "?", "c8"]),
    st.sampled_from([(), (0,), (3,), (2, 3)]),
)
leaves = st.one_of(plain, arrays, arrays.map(torch.from_numpy), arrays.map(lambda a: a.flat[0] if a.size else a))
keys = st.one_of(plain, st.tuples(ints, texts))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(texts, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


@quick
@settings(deadline=None, max_examples=300)
@given(trees)
def test_any_tree_round_trips(tmp_path_factory, tree):
    document, tensors = packed(tree)
    assert same(unpacked(document, tensors), tree)
    checkpoints = Checkpoints(tmp_path_factory.getbasetemp() / "trees", keep=1)
    checkpoints.write("x", documents={"t": document}, tensors={"t": tensors})
    saved = checkpoints.newest()
    assert same(unpacked(saved.document("t"), saved.tensors("t")), tree)


def test_optimiser_scheduler_and_rng_states_resume_exactly(tmp_path):
    def build():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
        schedulers = [
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
            torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        ]
        return model, optimizer, schedulers

    def train(model, optimizer, schedulers, steps):
        for _ in range(steps):
            x = torch.randn(8, 4) + random.random() + np.random.rand()
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for each in schedulers:
                each.step(loss.item()) if "Plateau" in type(each).__name__ else each.step()

    first = build()
    train(*first, 3)
    tree = {
        "model": first[0].state_dict(),
        "optimizer": first[1].state_dict(),
        "schedulers": [each.state_dict() for each in first[2]],
        "random": (random.getstate(), np.random.get_state(), torch.get_rng_state()),
        "generator": np.random.default_rng(5).bit_generator.state,
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
    }
    document, tensors = packed(tree)
    Checkpoints(tmp_path).write("body", documents={"state": document}, tensors={"state": tensors}, kind="body")
    train(*first, 4)

    second = build()
    saved = Checkpoints(tmp_path).newest()
    tree = unpacked(saved.document("state"), saved.tensors("state"))
    second[0].load_state_dict(tree["model"])
    second[1].load_state_dict(tree["optimizer"])
    for each, state in zip(second[2], tree["schedulers"], strict=True):
        each.load_state_dict(state)
    random.setstate(tree["random"][0])
    np.random.set_state(tree["random"][1])
    torch.set_rng_state(tree["random"][2])
    np.random.default_rng().bit_generator.state = tree["generator"]
    train(*second, 4)
    assert same(first[0].state_dict(), second[0].state_dict())
    assert same(first[1].state_dict(), second[1].state_dict())
    assert [each.state_dict() for each in first[2]] == [each.state_dict() for each in second[2]]


class Kind(int):
    pass


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [1, {"b": {1, 2}}]}, r"a\[1\]\.b: it is a builtins.set"),
        ({"a": object()}, "a: it is a builtins.object"),
        ({"f": len}, "f: it is"),
        ({"x": b"bytes"}, "x: it is a builtins.bytes"),
        ({"x": Kind(3)}, "x: it is a .*Kind"),
        ({"x": torch.Size([1])}, "x: it is a torch.Size"),
        ({"x": np.array(["a"])}, "x: it is a ndarray of"),
        ({"x": np.array([1.0]).astype(">f8")}, "x: it is a ndarray of >f8"),
        ({"x": np.ma.array([1.0])}, "x: it is a MaskedArray"),
        ({"x": np.array([object()])}, "x: it is a ndarray of object"),
        ({"x": torch.zeros(1).to_sparse()}, "x is a tensor of .*sparse"),
        ({"x": [torch.zeros(1, device="meta")]}, r"x\[0\] .*meta"),
        ({"x": 1 << 5000}, "x: it is an int of more than"),
        ({torch.zeros(1): 1}, "the tree: it is a Tensor as a key"),
        (object(), "cannot pack the tree"),
    ],
    ids=lambda each: str(each)[:30] if isinstance(each, str) else "",
)
def test_unpackable_values_are_rejected_with_their_path(tree, message):
    with pytest.raises(CheckpointError, match=message):
        packed(tree)


def test_self_referencing_tree_is_rejected():
    ring = []
    ring.append(ring)
    with pytest.raises(CheckpointError, match="nested too deeply, or contains itself"):
        packed(ring)


def test_tensors_are_named_by_their_path():
    _, tensors = packed({"state": {0: {"exp_avg": torch.ones(1)}}, "list": [torch.ones(2)]})
    assert tensors.keys() == {"state.0.exp_avg", "list[0]"}


@pytest.mark.parametrize(
    "document",
    [
        {"~": "tensor", "name": "missing"},
        {"~": "tensor"},
        {"~": "tensor", "name": ["x"]},
        {"~": "unknown", "name": "x"},
        {"~": ["dict"], "items": []},
        {"~": "float", "value": "1"},
        {"~": "tuple", "items": 3},
        {"~": "dict", "items": [[1]]},
        {"~": "dict", "items": [[[1], 2]]},
        {"~": "counter", "items": None},
    ],
    ids=lambda document: json.dumps(document)[:40],
)
def test_invalid_documents_are_rejected(document):
    with pytest.raises(CheckpointError, match="not made by packed"):
        unpacked(document, {"x": torch.zeros(1)})


def test_too_deeply_nested_document_is_rejected():
    deep = []
    for _ in range(50_000):
        deep = [deep]
    with pytest.raises(CheckpointError, match="not made by packed"):
        unpacked(deep, {})
