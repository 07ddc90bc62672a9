"""Export of a run's best host as a plain model that loads without Esper, gives the same outputs and can be trained."""

import ast
import dataclasses
import importlib.util
import io
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from esper.commands.export import FORMATS, Plain, as_program, run_export, write_all
from esper.kasmina.blueprints import blueprints_for
from esper.kasmina.codegen import constructor, source_of
from esper.kasmina.harden import harden
from esper.leyline.actions import Operator
from esper.leyline.errors import ConfigError, DataError, EsperError, HardenError, RunError
from esper.leyline.stages import SeedStage
from esper.nissa.run import RunDirectory
from esper.tamiyo.controllers.simple import wait_everywhere
from esper.tolaria.best_host import BEST_HOST, GrownHost
from esper.tolaria.checkpoint import Checkpoints
from esper.tolaria.engine import Engine
from esper.tolaria.tasks import get_task
from tests.support.models import ZOO, PlainCNN, grow, grow_everywhere, perturb

TASKS = {
    "cnn": dataclasses.replace(get_task("rescue"), batches_per_epoch=2, val_size=40),
    "mlp": dataclasses.replace(get_task("digits"), batches_per_epoch=2, val_size=40),
    "transformer": dataclasses.replace(get_task("moby"), batches_per_epoch=1, batch=4, val_size=12),
}
SEEDS = {"cnn": ("conv_light", "attention"), "mlp": ("lora", "norm"), "transformer": ("attention", "mlp_small")}


def grown(host: str) -> Engine:
    """Return a trained host with a gated fossil, a live seed at alpha 0.7, and a seed that has no effect yet."""
    engine = Engine(TASKS[host], [5])
    engine.plant_fossils(0, {"r0c0": (SEEDS[host][0], Operator.GATE)})
    network = engine.networks[0]
    perturb(network.body.slots["r0c0"])
    engine.step(wait_everywhere(1))
    for slot, stage, alpha in (("r0c1", SeedStage.BLENDING, 0.7), ("r0c2", SeedStage.TRAINING, 0.0)):
        operator = Operator.MULTIPLY if slot == "r0c1" else Operator.ADD
        perturb(network.body.plant(slot, SEEDS[host][1], operator, rng_seed=8))
        network.body.set_slot(network.body.slots[slot], stage, alpha)
    network.average.resync()
    return engine


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a run of each host, with validation samples and the outputs of the averaged body for them."""
    paths = {}
    for host in TASKS:
        root = tmp_path_factory.mktemp(host)
        with RunDirectory.create(root, host, name="run", manifest={}) as run:
            engine = grown(host)
            GrownHost.of(engine, 0, utility=0.25, round=3).save(run.path / BEST_HOST)
        network, x = engine.networks[0], engine.data.val.x.contiguous()
        with network.final(), torch.no_grad():
            expected = network.body.eval()(x).contiguous()
        save_file({"x": x, "expected": expected}, root / "example.safetensors")
        paths[host] = run.path
    return paths


ALONE = """
import json, sys
sys.modules["esper"] = None
import pathlib
import torch
from safetensors.torch import load_file
torch.set_num_threads(1)

def close(output, expected):
    assert output.shape == expected.shape
    away = (output - expected).abs().max().item()
    assert away <= 1e-5 * max(1.0, expected.abs().max().item()), away

def check(root, form):
    example = load_file(root / "example.safetensors")
    x, expected = example["x"], example["expected"]
    place = root / "run" / "export" / form
    if form in ("torch", "safetensors"):
        sys.path.insert(0, str(root / "run" / "export" / "torch"))
        sys.modules.pop("model", None)
        import model as home
        model = home.load() if form == "torch" else home.load(place / "model.safetensors")
        close(model(x), expected)
        assert home.ABOUT["grown"][1]["alpha"] == 0.7
        y = expected.argmax(-1).roll(1, 0)
        loss = lambda: torch.nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        model.train()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        first = loss()
        first.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        for _ in range(5):
            optimizer.step(), optimizer.zero_grad()
            last = loss()
            last.backward()
        assert last < first
    elif form == "torch-export":
        program = torch.export.load(place / "model.pt2").module()
        close(program(x), expected)
        assert torch.allclose(program(x[:1]), expected[:1], atol=1e-5)
    else:
        import onnxruntime
        session = onnxruntime.InferenceSession(str(place / "model.onnx"))
        close(torch.from_numpy(session.run(None, {"input": x.numpy()})[0]), expected)
        assert "alpha" in session.get_modelmeta().custom_metadata_map["about"]

for root, formats in json.loads(sys.argv[1]).items():
    for form in formats:
        check(pathlib.Path(root), form)
try:
    import esper
except ImportError:
    print("alone")
"""

QUICK = {"cnn": ("torch", "safetensors"), "mlp": ("torch-export",)}
ALL = dict.fromkeys(TASKS, tuple(FORMATS))


@pytest.mark.parametrize("formats", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_every_format_loads_without_esper_and_matches_the_final_body(runs, formats):
    for host in formats:
        for format in formats[host]:
            run_export(runs[host], format, out=None, force=True)

    directories = {str(runs[host].parent): formats[host] for host in formats}
    alone = [sys.executable, "-I", "-c", ALONE, json.dumps(directories)]
    done = subprocess.run(alone, capture_output=True, text=True, cwd=runs["cnn"].parent)

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "alone"


def test_shorter_sequences_than_the_exported_ones_are_accepted(runs):
    model = Plain.of(GrownHost.load(runs["transformer"] / BEST_HOST))
    program = torch.export.load(io.BytesIO(as_program(model, "model")[0])).module()
    x = model.host.inputs[:3, :17]
    assert torch.allclose(program(x), model.body(x), atol=1e-5)


@pytest.mark.parametrize("operator", Operator)
@pytest.mark.parametrize(
    ("host", "layout"), [("cnn_host", "map"), ("mlp_host", "vector"), ("transformer_host", "sequence")]
)
def test_generated_source_of_every_blueprint_computes_the_same(host, layout, operator):
    case = ZOO[host]
    for blueprint in blueprints_for(layout):
        body = case.body()
        grow(body, case.at[1], blueprint, operator=operator, stage=SeedStage.BLENDING, alpha=0.7)
        grow(body, case.at[0], blueprint, stage=SeedStage.FOSSILIZED)
        plain, names = harden(body), {}

        exec(source_of(plain), names)
        model = names["Model"]()
        model.load_state_dict(plain.state_dict())

        for training in (False, True):
            model.train(training), body.train(training)
            torch.manual_seed(0)
            expected = body(case.batch(7))
            torch.manual_seed(0)
            assert torch.allclose(model(case.batch(7)), expected, atol=1e-5, rtol=1e-5), blueprint


def test_generated_source_of_foreign_networks_computes_the_same():
    for name in ("cnn", "residual"):
        case = ZOO[name]
        body = case.body()
        grow_everywhere(body)
        plain, names = harden(body).eval(), {}
        exec(source_of(plain), names)
        model = names["Model"]().eval()
        model.load_state_dict(plain.state_dict())
        assert torch.allclose(model(case.batch(5)), body.eval()(case.batch(5)), atol=1e-5)


def test_identical_layers_share_a_class_and_long_lines_are_wrapped():
    text = source_of(ZOO["transformer_host"].model())
    tree = ast.parse(text)
    assert [n.name for n in tree.body if isinstance(n, ast.ClassDef)] == ["CausalAttention", "Block", "Model"]
    assert max(map(len, text.splitlines())) <= 130


def test_unsupported_module_is_refused_by_name():
    hooked = PlainCNN()
    hooked.features[0].register_forward_hook(lambda *_: None)
    with pytest.raises(HardenError, match=r"features\.0.*hook.*torch-export"):
        source_of(hooked)

    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(HardenError, match="Branching cannot be traced"):
        source_of(Branching())

    class Foreign(nn.Module):
        def forward(self, x):
            return torch.fft.fft(x)

    with pytest.raises(HardenError, match="fft"):
        source_of(Foreign())
    with pytest.raises(HardenError, match="MultiheadAttention"):
        constructor(nn.MultiheadAttention(8, 2, add_bias_kv=True, kdim=4))


def test_node_used_twice_or_later_gets_its_own_variable():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x, scale=2.0):
            y = self.drop(x.exp())  # drawn once, however many nodes use it
            z = y * y
            late = x.sin()
            return (z - scale) * -late[:, None, 1:2], [late.float(), {"a": x**-1}]

    names = {}
    exec(source_of(Twice()), names)
    x = torch.rand(3, 4)
    torch.manual_seed(0)
    expected = Twice()(x)[0]
    torch.manual_seed(0)
    assert torch.equal(names["Model"]()(x)[0], expected)
    assert torch.equal(names["Model"]()(x, 3.0)[1][1]["a"], Twice()(x)[1][1]["a"])


def test_existing_files_are_overwritten_only_with_force(runs, tmp_path):
    out = tmp_path / "mine" / "net.py"
    run_export(runs["mlp"], "torch", out=out, force=False)
    assert sorted(p.name for p in out.parent.iterdir()) == ["net.py", "net.safetensors"]
    before = out.read_text()
    out.write_text("# changed")
    with pytest.raises(ConfigError, match=r"net\.safetensors and .*net\.py already exist\. .*--force"):
        run_export(runs["mlp"], "torch", out=out, force=False)
    with pytest.raises(ConfigError, match=r"net\.safetensors already exists\. .*--force"):
        run_export(runs["mlp"], "safetensors", out=out.with_suffix(".safetensors"), force=False)
    assert out.read_text() == "# changed"
    run_export(runs["mlp"], "torch", out=out, force=True)
    assert out.read_text() == before
    run_export(runs["mlp"], "safetensors", out=tmp_path, force=False)  # a directory: the file is written into it
    weights = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(v, weights[k]) for k, v in load_file(out.with_suffix(".safetensors")).items())


@pytest.mark.parametrize(
    ("format", "name", "message"),
    [("torch", "net.pt", r"is \.py"), ("onnx", "net", r"net\.onnx"), ("torch", "my-net.py", "not a Python identifier"),
     ("pickle", "net.pkl", "no format named 'pickle'")],
)  # fmt: skip
def test_unsuitable_output_name_is_refused(runs, tmp_path, format, name, message):
    with pytest.raises(EsperError, match=message):
        run_export(runs["mlp"], format, out=tmp_path / name, force=False)
    assert not list(tmp_path.iterdir())


def test_text_from_a_run_is_never_emitted_as_code(runs, tmp_path):
    host = GrownHost.load(runs["mlp"] / BEST_HOST)
    evil = '"""\nraise SystemExit("ran")\n{__import__}'
    task = dataclasses.replace(host.task, name=evil)
    host = dataclasses.replace(host, task=task, data=host.data | {"name": evil, "vocabulary": evil})
    with RunDirectory.create(tmp_path, "mlp", name="run", manifest={}) as run:
        host.save(run.path / BEST_HOST)
    run_export(run.path, "torch", out=None, force=False)
    spec = importlib.util.spec_from_file_location("home", run.path / "export" / "torch" / "model.py")
    home = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(home)
    assert home.ABOUT["task"] == evil


def test_missing_onnx_names_the_extra_to_install(runs, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("onnx") else find(name))
    with pytest.raises(ConfigError, match=r"onnx and onnxscript.*esper-lite\[onnx\]"):
        run_export(runs["mlp"], "onnx", out=tmp_path / "x.onnx", force=False)
    assert not list(tmp_path.iterdir())


def test_run_without_a_host_is_refused_with_the_reason(tmp_path):
    for name, manifest, message in (
        ("sim", {"config": {"simulated": True}}, "simulated"),
        ("early", {}, "no grown host"),
    ):
        with RunDirectory.create(tmp_path, "x", name=name, manifest=manifest) as run:
            pass
        with pytest.raises(RunError, match=message):
            run_export(run.path, "torch", out=None, force=False)
    with pytest.raises(RunError, match="not a run"):
        run_export(tmp_path / "nowhere", "torch", out=None, force=False)


def test_stopped_grow_run_without_a_host_names_the_command_that_resumes_it(tmp_path):
    with RunDirectory.create(tmp_path, "x", name="stopped", manifest={}) as run:
        Checkpoints(run.path / "checkpoints").write("epoch-1", tensors={}, documents={"run": {}}, kind="grow")
    with pytest.raises(RunError, match=f"Resume it with: esper grow --resume {run.path}"):
        run_export(run.path, "torch", out=None, force=False)


def test_failed_write_leaves_existing_files_unchanged(tmp_path, monkeypatch):
    deep = tmp_path / "a" / "b"
    files = {deep / "one": b"1", deep / "two": b"2"}
    replace = os.replace

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("esper.leyline.atomic_io.os.fsync", full)
    with pytest.raises(DataError, match=r"No space left.*--out"):
        write_all(files)
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    write_all(files)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(DataError):
        write_all({deep / "one": b"new"})
    monkeypatch.setattr(os, "replace", replace)
    assert sorted((p.name, p.read_bytes()) for p in deep.iterdir()) == [("one", b"1"), ("two", b"2")]


def test_images_have_a_free_batch_size_and_about_states_the_preprocessing(runs):
    model = Plain.of(GrownHost.load(runs["cnn"] / BEST_HOST))
    about = model.about()
    assert about["input"]["shape"] == ["batch", 1, 14, 14]
    assert (about["input"]["mean"], about["input"]["white"]) == ([0.2854], 255)
    assert [(g["slot"], g["operator"], g["committed"]) for g in about["grown"]] == [
        ("r0c0", "gate", True), ("r0c1", "multiply", False),
    ]  # fmt: skip
    assert about["parameters"] == model.params < sum(p.numel() for p in model.body.parameters())
    assert model.model(torch.randn(1, 1, 14, 14)).shape == (1, 10)
