"""Bad input, one table: exit code 2, one paragraph with the fault and the remedy, no partial files left.

The commands run through `esper.cli.main`, in this process, for speed.
"""

import contextlib
import gzip
import io
import json
import math
import os
import pickle
import resource
import struct
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import nn

from esper.kasmina.blueprints import blueprint, unregister
from esper.kasmina.graft import graft
from esper.leyline.checksums import seal_json, seal_tensors
from esper.leyline.errors import BlueprintError, DataError, EsperError
from esper.nissa.run import Lock, RunDirectory, read_manifest
from esper.tamiyo.controllers.learned import SHIPPED
from esper.tamiyo.policy_file import FORMAT, view
from esper.tolaria.best_host import BEST_HOST, GrownHost
from esper.tolaria.checkpoint import Checkpoints
from esper.tolaria.data import load_data
from esper.tolaria.engine import Engine
from esper.tolaria.tasks import Task, get_task
from tests.support.bad_input import MOST, Case, check, esper

SIM = ["train", "--sim", "--rounds", "1", "--envs", "2", "--epochs", "2", "--no-compare", "--set", "ppo.minibatches=1"]
HOSTS = ["train", "--task", "digits", *SIM[2:]]
GROW = ["grow", "--task", "digits", "--epochs", "1", "--no-compare"]
CIFAR = ["grow", "--task", "cifar", "--epochs", "1", "--no-compare", "--data"]
TEXT = ["grow", "--task", "tinystories", "--epochs", "1", "--no-compare", "--data"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = tmp_path.parent / f"{tmp_path.name}-cache"
    monkeypatch.setenv("ESPER_CACHE", str(cache))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("ESPER_DATA", raising=False)
    return tmp_path


# -- settings


def toml(text: str | bytes) -> Callable[[], list[object]]:
    def args() -> list[object]:
        Path("my.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return [*SIM, "--config", "my.toml"]

    return args


def a_fifo(*args: object) -> Callable[[], list[object]]:
    def build() -> list[object]:
        os.mkfifo("fifo")
        return list(args)

    return build


def setting(text: str, *output: str, command: list[str] = SIM, begun: bool = False) -> Case:
    return Case(f"set {text[:30]}", [*command, "--set", text], output, begun)


SETTINGS = [
    setting("ppo.lr=fast", "ppo.lr must be float", "'fast'"),
    setting("seed=1.5", "seed must be int", "1.5"),
    setting("rounds=true", "rounds must be int", command=["train", "--sim"]),
    setting("ppo.lrr=1", "no setting 'ppo.lrr'", "Did you mean 'lr'?"),
    setting("nonsense", "--set takes a.b=c"),
    setting("ppo.minibatches=9223372036854775808", "ppo.minibatches must lie in 1…65536"),
    setting("ppo.clip_ratio=3", "between 0 and 1", "3.0"),
    setting("ppo.lr=nan", "above 0 and finite", "nan"),
    setting("rounds=-1", "rounds must be ≥ 1", command=["train", "--sim"]),
    setting("threads=100000000", "threads must be at most 1024"),
    setting("worlds=0", "worlds must be ≥ 1"),
    setting("network.width=100000000", "must lie in 1…8192"),
    setting("sim.slots=1000000000", "slots must be at most 1000"),
    setting("network=3", "group of settings", "network.…"),
    setting("reward.mode=bogus", "no reward mode named 'bogus'", "utility"),
    setting("reward.mode=shaped", "reward.gamma = ppo.gamma"),
    setting("fixed.op=WAIT", "nothing to decide", "Fix another op"),
    setting("fixed.tempo=WARP", "'WARP'", "STANDARD"),
    setting("telemetry=loud", "no telemetry level named 'loud'"),
    setting("task=resque", "Did you mean 'rescue'?"),
    setting("engine.device=quux", "cpu or cuda:0", "'quux'"),
    setting("engine.device=meta", "'meta'", "engine.device=cpu", command=HOSTS, begun=True),
    setting("engine.device=cuda:99", "'cuda:99' cannot be used here", "engine.device=cpu"),
    setting("seed=" + "9" * 5000, "seed must be int"),
    Case("config with an integer of 5,000 digits", toml("seed = " + "9" * 5000), ("my.toml is not TOML",)),
    Case("config is a device", [*SIM, "--config", "/dev/zero"], ("cannot read config file", "a device")),
    Case("config is a FIFO", a_fifo(*SIM, "--config", "fifo"), ("cannot read config file", "a FIFO")),
    Case("config larger than any", toml(b"#" * (2 << 20)), ("cannot read config file", "more than")),
    Case("config missing", [*SIM, "--config", "no.toml"], ("no config file", "no.toml")),
    Case("config is a directory", [*SIM, "--config", "."], ("cannot read config file",)),
    Case("config not TOML", toml("a = = b"), ("my.toml is not TOML", "line 1")),
    Case("config not text", toml(b"\xff\xfe\0"), ("cannot read config file my.toml", "utf-8")),
    Case("config nested without end", toml("a = " + "[" * 5000), ("my.toml is not TOML",)),
    Case("config hides a group", toml("ppo = 1"), ("ppo is a group of settings", "got 1")),
    Case("config wrong type", toml("[ppo]\nlr = 'x'"), ("ppo.lr must be float",)),
    Case("config unknown key", toml("[ppoo]\nlr = 1"), ("no setting 'ppoo'", "Did you mean 'ppo'?")),
    Case("unknown preset", [*SIM, "--preset", "quik"], ("Did you mean 'quick'?",)),
    Case("unknown task", ["grow", "--task", "fashon"], ("Did you mean 'fashion'?",)),
    Case("unknown controller", [*GROW, "--controller", "heuristics"], ("Did you mean 'heuristic'?",)),
    Case("unknown incubation", [*GROW, "--incubation", "egg"], ("'shadow' or 'straight_through'", "'egg'")),
    Case("epochs are no number", ["grow", "--epochs", "abc"], ("--epochs", "integer"), usage=True),
    Case("epochs below 1", ["grow", "--epochs", "0"], ("--epochs", "greater than or equal to 1"), usage=True),
    Case("no such option", ["grow", "--bogus"], ("--bogus",), usage=True),
    Case("no such command", ["growl"], ("growl",), usage=True),
]  # fmt: skip


# -- data files


class PickledCommand:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch canary",)


def batches(content: bytes, ending: str = "", *labels: str) -> Callable[[], list[object]]:
    """Write CIFAR-10 files, all with the same content."""

    def args() -> list[object]:
        folder = Path("data")
        folder.mkdir()
        for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
            (folder / f"{name}{ending}").write_bytes(content)
        for name, text in zip(("train_lables.json", "test_lables.json"), labels, strict=False):
            (folder / name).write_text(text)
        return [*CIFAR, folder]

    return args


def batch(width: int = 3072, records: int = 4, dtype: type = np.uint8) -> bytes:
    return pickle.dumps({b"data": np.zeros((records, width), dtype), b"labels": [0] * records})


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG")
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


BOMB = b"".join([b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", struct.pack(">IIBBBBB", 10**5, 10**5, 8, 2, 0, 0, 0)),
                 chunk(b"IDAT", b"x\x9c"), chunk(b"IEND", b"")])  # fmt: skip
SHEET = png(1024, 4)


def text(content: bytes) -> Callable[[], list[object]]:
    def args() -> list[object]:
        Path("my.txt").write_bytes(content)
        return [*TEXT, "my.txt"]

    return args


def incomplete() -> list[object]:
    args = batches(b"\0", ".bin")()
    (Path("data") / "data_batch_3.bin").unlink()
    return args


DATA = [
    Case("no folder", [*CIFAR, "nowhere"], ("no folder 'nowhere'", "https://")),
    Case("no folder named", CIFAR[:-1], ("your own files", "--data")),
    Case("no data for training", [*HOSTS, "--task", "cifar", "--data", "nowhere"], ("no folder",), begun=True),
    Case("empty folder", [*CIFAR, "."], ("Expected data_batch_1.bin", "https://")),
    Case("a file is missing", incomplete, ("incomplete", "data_batch_3.bin", "https://")),
    Case("binary cut short", batches(b"\3" * 5000, ".bin"), ("data_batch_1.bin", "not a multiple", "Fetch it again")),
    Case("binary too few", batches(b"\3" * 3073 * 4, ".bin"), ("expected 10000 images", "found 4")),
    Case("binary empty", batches(b"", ".bin"), ("found 0 images",)),
    Case(
        "pickle runs a command",
        batches(pickle.dumps(PickledCommand())),
        ("refers to", "system", "no CIFAR-10 batch needs"),
    ),
    Case("pickle cut short", batches(batch()[:90]), ("not a readable CIFAR-10 batch", "Fetch it again")),
    Case("pickle asks for a terabyte", batches(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40)), ("Fetch it again",)),
    Case("pickle of another shape", batches(batch(width=10)), ("shape (4, 10)", "[N, 3072]")),
    Case("pickle of another type", batches(batch(dtype=float)), ("float64", "expected bytes")),
    Case("pickle without data", batches(pickle.dumps({b"labels": [1]})), ("not a readable CIFAR-10 batch",)),
    Case("sheet cut short", batches(SHEET[: len(SHEET) // 2], ".png", "[0]", "[0]"), ("cannot be decoded",)),
    Case("sheet too narrow", batches(png(10, 4), ".png", str([0] * 50_000), "[0]"), ("10 pixels wide", "1024")),
    Case("sheet that unpacks to terabytes", batches(BOMB, ".png", str([0] * 50_000), "[0]"), ("cannot be decoded",)),
    Case("labels not JSON", batches(SHEET, ".png", "{oops", "[0]"), ("train_lables.json", "not JSON")),
    Case("labels of another kind", batches(SHEET, ".png", '["cat"]', "[0]"), ("flat list of class numbers",)),
    Case("labels nested without end", batches(SHEET, ".png", "[" * 10**5, "[0]"), ("train_lables.json", "not JSON")),
    Case("no text named", TEXT[:-1], ("your own files", "--data")),
    Case("no such text", [*TEXT, "no.txt"], ("no file 'no.txt'", "UTF-8 text file")),
    Case("text is a directory", [*TEXT, "."], ("no file '.'",)),
    Case("text empty", text(b""), ("my.txt is empty",)),
    Case("text is no text", text(b"\xff\xfe\xfd" * 100), ("not UTF-8", "byte 0")),
    Case("text too short", text(b"abc" * 20), ("53 characters", "longer text")),
]


# -- untrusted policies


def policy(
    name: str, *output: str, raw: bytes | None = None, change: dict[str, object] | None = None, **header: str
) -> Case:
    def args() -> list[object]:
        file = Path("theirs.safetensors")
        if raw is not None:
            file.write_bytes(raw)
        else:
            with safe_open(SHIPPED, "pt") as opened:
                result = dict(opened.metadata())
            weights = load_file(SHIPPED)
            first = next(iter(weights))
            for key, make in (change or {}).items():
                weights[first if key == "first" else key] = make(weights[first])
            file.write_bytes(seal_tensors(save(weights, result | header)))
        return [*GROW, "--controller", file]

    return Case(f"policy {name}", args, ("theirs.safetensors", *output))


def sized(length: int, rest: bytes) -> bytes:
    return struct.pack("<Q", length) + rest


HUGE = json.dumps(
    {
        "__metadata__": {"format": FORMAT, "view": view(), "network": "{}", "fixed": "{}"},
        "a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]},
    }
).encode()


def own_pickle() -> bytes:
    file = io.BytesIO()
    torch.save({"weights": PickledCommand()}, file)
    return file.getvalue()


def directory_named_as_policy() -> list[object]:
    (Path("run") / "policy.safetensors").mkdir(parents=True)
    return [*GROW, "--controller", "run"]


POLICIES = [
    policy("is a pickle", "Fetch it again", raw=pickle.dumps(PickledCommand())),
    policy("is torch's own pickle", "Fetch it again", raw=own_pickle()),
    policy("empty", "no checksum", raw=b""),
    policy("header larger than any memory", "no checksum", raw=sized(1 << 60, b"{}")),
    policy("header larger than the file", "no checksum", raw=sized(90_000_000, b"{" * 100)),
    policy("header not JSON", "no checksum", raw=sized(4, b"{{{{")),
    policy("tensor larger than the file", "not fully covered", raw=seal_tensors(sized(len(HUGE), HUGE))),
    policy("not one of ours", "not written by `esper train`", format="other"),
    policy("of another view", "other observations", "Train it again", view="0" * 16),
    policy("NaN", "NaN or infinite", "train one", change={"first": lambda t: t * math.nan}),
    policy("infinite", "NaN or infinite", change={"first": lambda t: t + math.inf}),
    policy("wrong shape", "settings require", "(3, 3)", change={"first": lambda t: torch.zeros(3, 3)}),
    policy("wrong type", "settings require", "int32", change={"first": lambda t: t.int()}),
    policy("one tensor more", "'more'", change={"more": lambda t: t.clone()}),
    policy("settings not JSON", "Fetch it again", network="{"),
    policy("settings without end", "must lie in 1…8192", network='{"width": 100000000}'),
    policy("settings of another network", "settings require", network='{"width": 4096}'),
    policy(
        "settings of another version",
        "other observations",
        "network settings",
        "Train it again",
        network='{"depth": 3}',
    ),
    policy("fixed heads not JSON", "Fetch it again", fixed="["),
    policy("fixed heads of another kind", "Expected", fixed='{"TEMPO": null}'),
    policy("fixed heads out of range", "TEMPO is fixed at 99", fixed='{"TEMPO": 99}'),
    policy("fixed heads unknown", "NOPE", fixed='{"NOPE": 0}'),
    policy("fixed slot", "SLOT is fixed at 7", fixed='{"SLOT": 7}'),
    Case("policy is a directory", directory_named_as_policy, ("there is no policy in", "esper train")),
    Case("policy is a device", [*GROW, "--controller", "/dev/null"], ("no policy in /dev/null",)),
    Case("no policy to begin with", [*SIM, "--start-from", "no"], ("no policy in no", "esper train"), begun=True),
    Case("no controller to compare", ["eval", "no", "--sim"], ("no controller or run named 'no'",)),
]


# -- paths, runs and models


def in_a_file(*args: object) -> Callable[[], list[object]]:
    def build() -> list[object]:
        Path("file").write_text("mine")
        return list(args)

    return build


def full_directory() -> list[object]:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years")
    return [*GROW, "--out", "mine"]


def a_run(name: str = "run", **manifest: object) -> Path:
    with RunDirectory.create(Path("."), "digits", name=name, manifest=manifest) as run:
        pass
    return run.path


def with_manifest(text: str, *args: str) -> Callable[[], list[object]]:
    def build() -> list[object]:
        Path("run").mkdir()
        Path("run/manifest.json").write_bytes(seal_json(text.encode()) if text.startswith('{"') else text.encode())
        return list(args)

    return build


def of_a_run(*args: str, **manifest: object) -> Callable[[], list[object]]:
    def build() -> list[object]:
        a_run(**manifest)
        return list(args)

    return build


def a_host(change: Callable[[dict, dict], None] = lambda document, tensors: None) -> list[object]:
    """Return the export arguments for a run whose saved host was modified by `change`, checksums included."""
    path = a_run()
    engine = Engine(get_task("digits"), [0])
    engine.table.quality[:] = 0.5
    host = GrownHost.of(engine, 0, utility=0.1, round=0)
    document, tensors = json.loads(json.dumps(host.document())), host.tensors()
    change(document, tensors)
    content = {"tensors": {BEST_HOST: tensors}, "documents": {BEST_HOST: document}, "kind": "host"}
    Checkpoints(path / BEST_HOST, keep=1).write("host", **content)
    return ["export", path]


def huge_host(document, tensors):
    document["task"]["host_kwargs"]["width"] = 10**9


def non_finite_host(document, tensors):
    tensors["state/head.weight"] = tensors["state/head.weight"] * math.nan


def other_host(document, tensors):
    tensors["state/head.weight"] = tensors["state/head.weight"] + 1


def no_host(document, tensors):
    document.clear()
    document["format"] = "mine"


def cut_host() -> list[object]:
    args = a_host()
    file = next(Path("run").rglob("best_host.safetensors"))
    file.write_bytes(file.read_bytes()[:-10])
    return args


def strange_checkpoint(**documents: object) -> Callable[[], list[object]]:
    def build() -> list[object]:
        Checkpoints(a_run() / "checkpoints").write("round-000001", documents=documents)
        return ["train", "--resume", "run"]

    return build


def cut_checkpoint() -> list[object]:
    args = strange_checkpoint(run={})()
    next(Path("run").rglob("run.json")).write_text("{")
    return args


PLACES = [
    Case("out below a file", in_a_file(*GROW, "--out", "file/a/b"), ("file/a", "Not a directory", "another directory")),
    Case("out is a file", in_a_file(*SIM, "--out", "file"), ("file exists", "nothing is overwritten")),
    Case("out is not empty", full_directory, ("mine exists and is not empty", "Choose another name")),
    Case("out too long", [*SIM, "--out", "x" * 300], ("too long", "another directory")),
    Case("report below a file", in_a_file("report", "file"), ("file is not a run", "esper runs")),
    Case("eval out below a file", in_a_file("eval", "none", "random", "--sim", "--out", "file/x"), ("file/x", "--out")),
    Case("export out below a file", lambda: [*a_host(), "--out", "run/manifest.json/x.py"], ("cannot write", "--out")),
    Case("no run to export", ["export", "nowhere"], ("nowhere is not a run", "esper runs")),
    Case("no run to report", ["report", "nowhere"], ("nowhere is not a run",)),
    Case("no run to query", ["sql", "nowhere", "select 1"], ("nowhere is not a run",)),
    Case("no run to watch", ["watch", "nowhere", "--once"], ("no run at 'nowhere'",)),
    Case("no runs to list", ["runs", "nowhere"], ("no runs at nowhere",)),
    Case("manifest not JSON", with_manifest("{", "export", "run"), ("manifest.json is damaged",)),
    Case("manifest of another kind", with_manifest('{"a": 1}', "export", "run"), ("no manifest of a run",)),
    Case("manifest nested without end", with_manifest("[" * 10**5, "export", "run"), ("manifest.json is damaged",)),
    Case("manifest with nonsense", with_manifest('{"status": "finished", "config": {"ppo": 3}}', "eval", "run", "none"),
         ("ppo is a group of settings",)),
    Case("run without a host", of_a_run("export", "run"), ("contains no grown host", "esper grow")),
    Case("run on simulated hosts", of_a_run("export", "run", config={"simulated": True}), ("simulated hosts",)),
    Case("unknown format", of_a_run("export", "run", "--format", "pickle"), ("no format named 'pickle'", "onnx")),
    Case("format and name differ", of_a_run("export", "run", "--out", "x.onnx"), ("is .py", "x.py")),
    Case("host file, huge", lambda: a_host(huge_host), ("larger than all its weights",)),
    Case("host file, NaN", lambda: a_host(non_finite_host), ("NaN or infinite",)),
    Case("host file, changed", lambda: a_host(other_host), ("differ from those of the measured host",)),
    Case("host file, nonsense", lambda: a_host(no_host), ("not a host saved by Esper",)),
    Case("host cut short", cut_host, ("no complete grown host",), warned=True),
    Case("resume nothing", ["train", "--resume", "nowhere"], ("nowhere is not a run",)),
    Case("resume a file", in_a_file("train", "--resume", "file"), ("file is not a run",)),
    Case("resume without a checkpoint", of_a_run("train", "--resume", "run"), ("no complete checkpoint to resume",)),
    Case("resume a recorded loop", of_a_run("grow", "--resume", "run"), ("resumed in that loop: grower.load",)),
    Case("resume with other settings", of_a_run("train", "--resume", "run", "--seed", "3"), ("--seed", "its settings")),
    Case("resume a damaged checkpoint", cut_checkpoint, ("no complete checkpoint to resume from",), warned=True),
    Case("resume a strange checkpoint", strange_checkpoint(run={}), ("checkpoint",)),
    Case("resume an empty checkpoint", strange_checkpoint(), ("checkpoint",)),
    Case("resume a checkpoint of another kind", strange_checkpoint(run=[1]), ("checkpoint",)),
]  # fmt: skip

CASES = [*SETTINGS, *DATA, *POLICIES, *PLACES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_bad_input_is_reported_in_one_paragraph_and_leaves_no_files(case, place):
    check(case, place)
    assert not (place / "canary").exists()  # no foreign code ran


ENVIRONMENTS = [
    ({"WORLD_SIZE": "abc"}, ("WORLD_SIZE", "'abc'", "torchrun")),
    ({"WORLD_SIZE": "0"}, ("WORLD_SIZE", "'0'", "torchrun")),
    ({"WORLD_SIZE": "9" * 5000, "RANK": "0"}, ("WORLD_SIZE", "torchrun")),
    ({"WORLD_SIZE": "2"}, ("RANK is not", "torchrun")),
    ({"RANK": "0"}, ("WORLD_SIZE is not", "torchrun")),
    ({"ESPER_RENDEZVOUS": "0/2/nowhere", "ESPER_SILENCE_S": "soon"}, ("esper: ESPER_SILENCE_S", "'soon'", "Unset it")),
    ({"WORLD_SIZE": "2", "RANK": "x"}, ("RANK", "'x'")),
    ({"WORLD_SIZE": "2", "RANK": "2"}, ("RANK=2 must be below WORLD_SIZE=2",)),
    ({"WORLD_SIZE": "2", "RANK": "0"}, ("requires MASTER_ADDR",)),
    ({"ESPER_RENDEZVOUS": "nonsense", "ESPER_PARENT": "x"}, ("ESPER_RENDEZVOUS", "Unset it")),
]


@pytest.mark.parametrize(("variables", "words"), ENVIRONMENTS, ids=lambda each: str(each)[:60])
def test_invalid_process_group_environment_is_refused(place, monkeypatch, variables, words):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check(Case("", SIM, words), place)


def test_cases_are_unique():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)


# -- two runs on one directory


def test_second_run_on_a_directory_is_refused_and_names_the_first(place):
    run = RunDirectory.create(place, "digits", name="run", manifest={})
    for args, output in (
        ([*GROW, "--out", "run"], "not empty"),
        (["train", "--resume", "run"], f"owned by a running process (pid {os.getpid()})"),
    ):
        check(Case("", args, (output,)), place)
    run.finish("finished")
    (place / "empty").mkdir()
    lock = Lock(place / "empty")
    check(Case("", [*GROW, "--out", "empty"], (f"owned by a running process (pid {os.getpid()})",)), place)
    lock.release()


# -- disk full


@contextlib.contextmanager
def files_of_at_most(size: int):
    """Within the block, no file of this process can grow beyond a number of bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_run_that_cannot_write_its_manifest_does_not_start(place):
    with files_of_at_most(200):
        check(Case("", [*GROW, "--out", "run"], ("cannot make a run directory", "another directory")), place)


@pytest.mark.parametrize("size", [36_000, 50_000])  # the manifest reserves 32 KiB and its own size
def test_full_disk_ends_a_run_with_a_message_and_no_partial_file(place, size):
    with files_of_at_most(size):
        code, output = esper(*GROW, "--out", "run")
    assert code == 2, output
    assert "Traceback" not in output
    assert "too large" in output
    assert len(output.strip().splitlines()[-1]) <= MOST
    names = {p.name for p in (place / "run").rglob("*")}
    assert not [name for name in names if name.endswith(".tmp") or name.startswith(".draft")]
    assert read_manifest(place / "run")["status"] == "failed"


def test_full_disk_leaves_an_export_complete_or_absent(place):
    args = a_host()
    with files_of_at_most(2_000):
        check(Case("", args, ("cannot write", "too large", "--out")), place)


def test_full_file_system_is_reported_as_such_on_export(place):
    """The same with a real full file system, where mounting one is permitted."""
    full = place / "full"
    full.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(full)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        code, output = esper(*a_host(), "--out", full / "model.py")
        remaining = list(full.iterdir())
    finally:
        subprocess.run(["umount", str(full)], check=True)
    assert (code, remaining) == (2, [])
    assert "No space left on device" in output
    assert "--out" in output


# -- in Python: tensors, IDX files and blueprints that violate their contract


def idx(shape: tuple[int, ...], body: bytes, kind: int = 8) -> bytes:
    return struct.pack(">BBBB", 0, 0, kind, len(shape)) + struct.pack(f">{len(shape)}I", *shape) + body


IDX = {
    "empty": (b"", "it is not an IDX file"),
    "ends within its header": (idx((2, 28, 28), b"")[:9], "within its header"),
    "cut short": (idx((2, 28, 28), b"\0" * 100), "needs 1584 bytes"),
    "larger than any memory": (idx((2**32 - 1,) * 3, b"\0"), "needs"),
    "of forty dimensions": (idx((2**32 - 1,) * 40, b"\0"), "40 dimensions"),
    "of unknown numbers": (idx((1,), b"\0", kind=7), "it is not an IDX file"),
    "of other images": (idx((2, 5, 5), b"\0" * 50), r"\[N, 28, 28\]"),
    "compressed and cut short": (gzip.compress(idx((2, 28, 28), b"\0" * 1568))[:-9], "compressed data is incomplete"),
    "a label too many": (idx((2, 28, 28), b"\0" * 1568), "expected 2 images with labels"),
}


@pytest.mark.parametrize("name", IDX)
def test_damaged_idx_file_is_named(place, name):
    content, output = IDX[name]
    for stem in ("train", "t10k"):
        (place / f"{stem}-images-idx3-ubyte").write_bytes(content)
        (place / f"{stem}-labels-idx1-ubyte").write_bytes(idx((3,), b"\0\1\2"))
    with pytest.raises(DataError, match=output) as caught:
        load_data("fashion-mnist", place)
    assert len(str(caught.value)) <= MOST


X, Y = torch.randn(40, 6), torch.arange(40) % 4
TENSORS = {
    "NaN": ((X * math.nan, Y), "NaN or infinite"),
    "other lengths": ((X, Y[:-1]), "40 samples and 39 targets"),
    "targets of another type": ((X, Y.float()), "cannot tell what"),
    "another shape": ((X[:, :, None], Y), "cannot tell what"),
    "negative classes": ((X, Y - 1), "from -1"),
    "nothing": ((X[:0], Y[:0]), "not 0"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_unusable_tensors_are_refused(name):
    tensors, output = TENSORS[name]
    with pytest.raises(DataError, match=output):
        Task.from_tensors("mine", *tensors)


class Bad(nn.Module):
    def __init__(self, dim: int, change: Callable[[nn.Linear, torch.Tensor], object]) -> None:
        super().__init__()
        self.last, self.change = nn.Linear(dim, dim), change

    def forward(self, h):
        return self.change(self.last, h)


LAWLESS = {
    "not zero at birth": (lambda last, h: last(h), "not zero at birth"),
    "another shape": (lambda last, h: h[..., :1] * 0, "shape and dtype"),
    "another type": (lambda last, h: (h * 0).double(), "shape and dtype"),
    "two outputs": (lambda last, h: (h, h), "returns tuple"),
    "writes into its input": (lambda last, h: h.mul_(0), "writes into its input"),
    "raises": (lambda last, h: h @ h @ h, "forward fails"),
    "NaN": (lambda last, h: h * math.nan, "not zero at birth"),
}


@pytest.mark.parametrize("name", LAWLESS)
def test_blueprint_that_violates_a_rule_is_not_germinated(name):
    change, output = LAWLESS[name]
    blueprint("lawless", layouts="vector")(lambda dim: Bad(dim, change))
    try:
        body = graft(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), ["0"], probe=X[:4])
        before = body(X)
        with pytest.raises(BlueprintError, match=output) as caught:
            body.plant("0", "lawless")
        assert len(str(caught.value)) <= MOST
        assert body.slots["0"].seed is None
        assert torch.equal(body(X), before)
    finally:
        unregister("lawless")


def test_blueprint_without_module_or_parameters_is_refused():
    for make in (lambda dim: "conv", lambda dim: nn.Identity(), lambda dim: None):
        blueprint("lawless", layouts="vector")(make)
        try:
            body = graft(nn.Sequential(nn.Linear(6, 6)), ["0"], probe=X[:4])
            with pytest.raises(EsperError):
                body.plant("0", "lawless")
        finally:
            unregister("lawless")
