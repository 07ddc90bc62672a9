"""No pickle anywhere: input from outside, or from our own files, must not be able to run code."""

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "esper"
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
CALLS = {
    "torch.save",
    "torch.load",
    "torch.jit.load",
    "torch.hub.load",
    "torch.hub.load_state_dict_from_url",
    "torch.package.PackageImporter",
    "torch.distributed.all_gather_object",
    "torch.distributed.broadcast_object_list",
    "torch.distributed.gather_object",
    "torch.distributed.scatter_object_list",
    "torch.distributed.send_object_list",
    "torch.distributed.recv_object_list",
    "numpy.load",
    "numpy.save",
    "pandas.read_pickle",
}
METHODS = {"read_pickle", "to_pickle"}
READER = "tolaria/data/readers.py"
"""CIFAR-10 is distributed as a pickle: its reader has an unpickler restricted to numpy arrays."""
ALLOWED_OF_PICKLE = {"pickle.Unpickler", "pickle.UnpicklingError"}


def faults(tree, *, may_unpickle=False):
    """Return what in a module could load or write a pickle: (line, what)."""
    alias = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                alias[name.asname or name.name.split(".")[0]] = name.name if name.asname else name.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module:
            alias |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}

    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [each.name for each in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            for name in names:
                if name.split(".")[0] in MODULES and not (may_unpickle and name in {"pickle", *ALLOWED_OF_PICKLE}):
                    yield node.lineno, f"imports {name}"
        elif isinstance(node, (ast.Attribute, ast.Name)):
            name_used = dotted(node, alias)
            is_call = name_used in CALLS and not is_safe(node)
            is_pickles = name_used.startswith("pickle.") and name_used not in ALLOWED_OF_PICKLE
            if is_call or is_pickles or getattr(node, "attr", None) in METHODS:
                yield node.lineno, f"uses {name_used or node.attr}"
        elif isinstance(node, ast.keyword) and _is(node, "weights_only", False):
            yield node.value.lineno, "weights_only=False"
        elif isinstance(node, ast.keyword) and _is(node, "allow_pickle", True):
            yield node.value.lineno, "allow_pickle=True"


def dotted(node, alias):
    """Return a name without aliases: np.load → numpy.load. Empty where it starts with a call."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([alias.get(node.id, node.id), *reversed(parts)])


def parsed(text):
    """Return the tree, with a link from each called expression to its call."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            node.func.called_by = node
    return tree


def is_safe(node):
    """Return whether this is numpy's own reader or writer with pickles disabled."""
    call = getattr(node, "called_by", None)
    return call is not None and any(_is(each, "allow_pickle", False) for each in call.keywords)


def _is(keyword, name, value):
    return keyword.arg == name and isinstance(keyword.value, ast.Constant) and keyword.value.value is value


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda path: str(path.relative_to(SRC)))
def test_no_module_reads_or_writes_pickles(path):
    may_unpickle = path.relative_to(SRC).as_posix() == READER
    assert list(faults(parsed(path.read_text()), may_unpickle=may_unpickle)) == []


def test_restricted_unpickler_finds_only_the_classes_it_lists():
    tree = ast.parse((SRC / READER).read_text())
    unpicklers = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any(dotted(base, {}) == "pickle.Unpickler" for base in node.bases)
    ]
    assert len(unpicklers) == 1
    assert "find_class" in {node.name for node in unpicklers[0].body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import cloudpickle as c",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.save({}, 'x')",
        "from torch import load\nread = load",
        "from torch import load as l\nl('x')",
        "from torch import distributed as dist\ndist.all_gather_object([], 1)",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
        "import numpy as np\nnp.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nread = np.load",
        "f('x', weights_only=False)",
        "frame.to_pickle('x')",
    ],
)
def test_check_detects_unsafe_calls(text):
    assert list(faults(parsed(text)))


def test_check_accepts_code_that_runs_no_foreign_code():
    text = "import numpy as np, torch\nfrom safetensors.torch import load, save\n"
    text += (
        "np.load('x', allow_pickle=False)\nmodel.eval()\nload(b'')\nsave({})\ntorch.export.save(p, 'x')\njson.load(f)"
    )
    assert list(faults(parsed(text))) == []


def test_reader_may_subclass_but_not_load():
    assert list(faults(parsed("import pickle\nclass A(pickle.Unpickler): ..."), may_unpickle=True)) == []
    assert list(faults(parsed("import pickle\npickle.loads(b'')"), may_unpickle=True))
