"""`esper export`: a run's best host as a plain model, in a form that loads without Esper.

Every form is built in memory, read back, and run on the validation samples for which the host's outputs were stored.
It is written, atomically, only if its outputs match.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import os
import pprint
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from esper.commands import plainly
from esper.commands.resuming import KINDS
from esper.kasmina.body import Body
from esper.kasmina.codegen import source_of
from esper.kasmina.harden import harden
from esper.leyline.actions import Operator
from esper.leyline.atomic_io import Draft, sync_directory
from esper.leyline.errors import ConfigError, DataError, RunError, unknown_name
from esper.leyline.stages import SeedStage
from esper.nissa.run import CHECKPOINTS, read_manifest
from esper.tolaria.best_host import BEST_HOST, GrownHost
from esper.tolaria.checkpoint import Checkpoints
from esper.tolaria.data.catalogue import SOURCES

FORMATS = {"torch": ".py", "torch-export": ".pt2", "onnx": ".onnx", "safetensors": ".safetensors"}
"""File name extension of each form."""
HOW = {
    "torch": "from {stem} import load; model = load()",
    "torch-export": "torch.export.load({path!r}).module()",
    "onnx": "onnxruntime.InferenceSession({path!r})",
    "safetensors": "safetensors.torch.load_file({path!r})  (weights only, named as in --format torch)",
}
SOURCE = '''"""A network that grew while it trained, as plain PyTorch. Requires torch and safetensors only.

    from {stem} import load

    model = load()            # in eval mode, as it was measured; model.train() to train it further
    logits = model(x)         # ABOUT["input"] describes x

The weights are in the file of the same name with the suffix .safetensors.
"""

from pathlib import Path

{code}

ABOUT = {about}


def load(weights=None):
    """Return the trained model. Default of `weights`: the .safetensors file next to this file."""
    from safetensors.torch import load_file

    model = Model()
    model.load_state_dict(load_file(weights or Path(__file__).with_suffix(".safetensors")))
    return model.eval()
'''


def run_export(run: Path, format: str, *, out: Path | None, force: bool) -> None:
    """Write the best host of a run in this format and print how to load it."""
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    target = place_for(run, format, out)
    host = kept_host(run)
    files = [target.with_suffix(".safetensors"), target] if format == "torch" else [target]
    existing = [str(file) for file in files if os.path.lexists(file)]
    if existing and not force:
        raise ConfigError(
            f"{' and '.join(existing)} already exist{'s' * (len(existing) == 1)}. Use --force to overwrite, or --out "
            "to choose another path"
        )
    model = Plain.of(host)
    written = dict(zip(files, MAKERS[format](model, target.stem), strict=True))
    write_all(written)
    console = Console()
    plainly(console, f"{' and '.join(map(str, written))}: {model.description()}")
    plainly(console, f"load it with: {HOW[format].format(stem=target.stem, path=str(target))}")


def kept_host(run: Path) -> GrownHost:
    """Return the best host of a run. Raise RunError with the reason if it has none."""
    manifest = read_manifest(run)
    if not (run / BEST_HOST).is_dir():
        config = manifest.get("config")
        if isinstance(config, dict) and config.get("simulated"):
            raise RunError(f"{run} used simulated hosts, so there is no network to export. Train on a task instead")
        if _is_grow_run(run):
            raise RunError(
                f"{run} contains no grown host (no {BEST_HOST}/): `esper grow` was stopped before its end. Resume it "
                f"with: esper grow --resume {run}"
            )
        raise RunError(
            f"{run} contains no grown host (no {BEST_HOST}/): it ended before its first round, or was not recorded by "
            "`esper grow` or `esper train`. For your own model use esper.harden and torch.export"
        )
    return GrownHost.load(run / BEST_HOST)


def _is_grow_run(run: Path) -> bool:
    """Return whether the checkpoints of a run are those of `esper grow`."""
    saved = Checkpoints(run / CHECKPOINTS).newest() if (run / CHECKPOINTS).is_dir() else None
    return saved is not None and saved.kind == KINDS["grow"]


def place_for(run: Path, format: str, out: Path | None) -> Path:
    """Return the file to write: below the run, in the given directory, or the given file."""
    ending = FORMATS[format]
    if out is None:
        return run / "export" / format / f"model{ending}"
    if out.is_dir():
        return out / f"model{ending}"
    if out.suffix != ending:
        raise ConfigError(f"the suffix of --format {format} is {ending}, got {out}. Use {out.with_suffix(ending)}")
    if format == "torch" and not out.stem.isidentifier():
        raise ConfigError(
            f"{out.name} could not be imported: {out.stem!r} is not a Python identifier. Choose another name"
        )
    return out


@dataclass(frozen=True, slots=True)
class Plain:
    """The hardened model and the host it comes from."""

    host: GrownHost
    body: Body
    model: nn.Module

    @classmethod
    def of(cls, host: GrownHost) -> Plain:
        """Harden a host."""
        body = host.body()
        model = harden(body).eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return cls(host, body, model)

    @property
    def params(self) -> int:
        """Number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def grown(self) -> list[dict[str, Any]]:
        """The seeds in the model, with readable names."""
        return [
            {"slot": name, "after": slot.module_name, "blueprint": slot.blueprint,
             "operator": Operator(slot.operator).name.lower(), "alpha": round(slot.amplitude, 6),
             "committed": slot.stage == SeedStage.FOSSILIZED}
            for name, slot in self.body.slots.items()
            if slot.seed is not None and slot.stage >= SeedStage.BLENDING
        ]  # fmt: skip

    def about(self) -> dict[str, Any]:
        """Return the metadata that is stored with the model in every form."""
        host = self.host
        return {
            "task": host.task.name, "data": host.data["name"], "data_sha256": host.data["sha256"],
            "validation_quality": host.quality, "utility": host.utility, "round": host.round, "world": host.world,
            "parameters": self.params, "grown": self.grown, "input": self.input(),
        }  # fmt: skip

    def input(self) -> dict[str, Any]:
        """Return the model's input: shape, dtype, and preprocessing of pixels or characters."""
        host = self.host
        x = self.host.inputs
        facts: dict[str, Any] = {"shape": ["batch", *x.shape[1:]], "dtype": str(x.dtype).removeprefix("torch.")}
        source = SOURCES.get(host.data["name"])
        if source is not None and source.mean:
            facts |= {"pixels": "(pixel / white - mean) / std, per channel", "white": source.white,
                     "mean": list(source.mean), "std": list(source.std)}  # fmt: skip
        if host.data["vocabulary"]:
            facts |= {"characters": host.data["vocabulary"]}
        return facts

    def description(self) -> str:
        """Return a description of the model for the terminal."""
        grown = ", ".join(
            f"{g['slot']} {g['blueprint']}" + ("" if g["committed"] else f" at alpha {g['alpha']:g}")
            for g in self.grown
        )
        host = self.host
        return (
            f"task {host.task.name}, world {host.world}, validation quality {host.quality:.1%}, "
            f"{self.params:,} parameters; grown: {grown or 'nothing'}"
        )

    def check(self, model: Callable[[Tensor], Tensor], what: str) -> None:
        """Raise if the outputs of `model` differ from the host's."""
        with torch.no_grad():
            self.host.compare(model(self.host.inputs), what)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights as contiguous tensors."""
        return {name: value.contiguous() for name, value in self.model.state_dict().items()}

    def example(self) -> Tensor:
        """Return a few samples to trace with. A batch of one would be specialised as a constant."""
        x = self.host.inputs[:4]
        return x if len(x) > 1 else x.repeat(2, *[1] * (x.dim() - 1))

    def free_sizes(self) -> tuple[dict[int, Any]]:
        """Return the dynamic dimensions of the input: the batch, and the length of a text."""
        sizes = {0: torch.export.Dim("batch")}
        if self.host.inputs.dim() == 2 and self.host.data["kind"] == "text":
            sizes[1] = torch.export.Dim("tokens", min=2, max=self.host.inputs.shape[1])
        return (sizes,)


# -- forms: each function returns the verified content of its files


def as_safetensors(model: Plain, _stem: str) -> list[bytes]:
    """Return the weights."""
    content = save_tensors(model.weights(), {"about": json.dumps(model.about())})
    again = source_of(model.model)
    model.check(_built(again, load_tensors(content)), "the model of the weights written")
    return [content]


def as_torch(model: Plain, stem: str) -> list[bytes]:
    """Return weights and source: readable, editable, trainable, and without pickled classes."""
    about = pprint.pformat(model.about(), width=100, sort_dicts=False)  # as literals: no text of a run becomes code
    source = SOURCE.format(stem=stem, code=source_of(model.model).rstrip(), about=about)
    weights = save_tensors(model.weights(), {"about": json.dumps(model.about())})
    model.check(_built(source, load_tensors(weights)), "the model written as source")
    return [weights, source.encode()]


def _built(source: str, weights: dict[str, Tensor]) -> nn.Module:
    names: dict[str, Any] = {"__name__": "exported"}
    exec(compile(source, "<exported>", "exec"), names)
    model: nn.Module = names["Model"]()
    model.load_state_dict(weights)
    return model.eval()


def as_program(model: Plain, _stem: str) -> list[bytes]:
    """Return a torch.export program."""
    content = exported_program(
        model.model, model.example(), model.free_sizes(), {"about.json": json.dumps(model.about())}
    )
    with quiet():
        model.check(torch.export.load(io.BytesIO(content)).module(), "the exported program")
    return [content]


def exported_program(
    plain: nn.Module, example: Tensor, sizes: tuple[dict[int, Any]], extra: dict[str, Any] | None = None
) -> bytes:
    """Return the content of a .pt2 file."""
    file = io.BytesIO()
    with quiet():
        program = torch.export.export(plain, (example,), dynamic_shapes=sizes)
        for module in program.graph_module.modules():  # remove paths of the traced code
            for node in getattr(getattr(module, "graph", None), "nodes", ()):
                for trace in ("stack_trace", "nn_module_stack", "source_fn_stack"):
                    node.meta.pop(trace, None)
        torch.export.save(program, file, extra_files=extra)
    return file.getvalue()


def as_onnx(model: Plain, _stem: str) -> list[bytes]:
    """Return an ONNX model. It is verified only if onnxruntime is installed."""
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--format onnx needs {' and '.join(missing)}: pip install 'esper-lite[onnx]'. "
            "The other formats have no extra requirements"
        )
    with quiet():
        program = torch.onnx.export(
            model.model, (model.example(),), dynamo=True, dynamic_shapes=model.free_sizes(), verbose=False,
            input_names=["input"], output_names=["logits"],
        )  # fmt: skip
        assert program is not None
        proto = program.model_proto
    graphs = [proto.graph, *proto.functions]
    for part in [*graphs, *(node for graph in graphs for node in graph.node)]:
        part.ClearField("metadata_props")  # remove paths of the traced code
        part.ClearField("doc_string")
    entry = proto.metadata_props.add()
    entry.key, entry.value = "about", json.dumps(model.about())
    content: bytes = proto.SerializeToString()
    if importlib.util.find_spec("onnxruntime") is None:
        warnings.warn(
            "onnxruntime is not installed: the ONNX file is written without a check of its outputs", stacklevel=2
        )
        return [content]
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    model.check(lambda x: torch.from_numpy(session.run(None, {"input": x.numpy()})[0]), "the ONNX model")
    return [content]


MAKERS: dict[str, Callable[[Plain, str], list[bytes]]] = {
    "torch": as_torch,
    "torch-export": as_program,
    "onnx": as_onnx,
    "safetensors": as_safetensors,
}


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and logs of torch's exporters. Errors are raised."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def write_all(files: dict[Path, bytes]) -> None:
    """Write all files or none. Existing files are replaced at the end."""
    folder = next(iter(files)).parent
    new_folders = [p for p in (folder, *folder.parents) if not p.exists()]
    drafts: list[Draft] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            drafts.append(Draft(path, content))
        for draft in drafts:
            draft.replace()
        sync_directory(folder)
    except BaseException as error:
        for undo in (*(draft.discard for draft in drafts), *(directory.rmdir for directory in new_folders)):
            with suppress(OSError):
                undo()
        if not isinstance(error, OSError):
            raise
        raise DataError(
            f"cannot write {' and '.join(map(str, files))}: {error.strerror or error}. "
            "Free disk space, or use --out to choose another path"
        ) from error
