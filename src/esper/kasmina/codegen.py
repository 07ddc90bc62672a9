"""Write a plain module, such as a hardened model, as readable Python source.

    text = source_of(harden(body))     # classes of torch parts; the root is `Model`

Each module with its own forward becomes a class, its forward traced one level deep. Torch's own layers become
constructor calls. Names are kept, so the state dict of the module fits the written one. Anything that cannot be
written raises HardenError with its name. The caller still has to run the source and compare outputs.
"""

from __future__ import annotations

import builtins
import inspect
import keyword
import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from esper.leyline.errors import HardenError

WIDTH = 72
"""Maximum length, in characters, of an expression that is inlined into another line."""
IMPORTS = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
RESERVED = {"torch", "nn", "F", "self", "super"}
INFIX: dict[Any, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.matmul: "@", operator.or_: "|", operator.and_: "&",
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==", operator.ne: "!=",
}  # fmt: skip


def source_of(plain: nn.Module, name: str = "Model") -> str:
    """Return imports and classes as source. The last class is `name`, the module itself."""
    hooked = [n for n, m in plain.named_modules() if m._forward_hooks or m._forward_pre_hooks]
    if hooked:
        raise HardenError(f"module {hooked[0]!r} has a hook, which cannot be written as source. Export as torch-export")
    writer = _Writer()
    writer.class_of(plain, name)
    return IMPORTS + "".join(f"\n\n{text}" for text in writer.texts)


class _Writer:
    """Collect class definitions. Modules with equal source share one class."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.names: dict[tuple[str, str], str] = {}  # (preferred name, body) → class name

    def class_of(self, module: nn.Module, preferred: str) -> str:
        """Write the class of a module if it is new, and return its name."""
        lines = ["    def __init__(self):", "        super().__init__()"]
        for key, p in module._parameters.items():
            if p is not None:
                lines.append(f"        self.{key} = nn.Parameter(torch.zeros({tuple(p.shape)}))")
        for key, buffer in module._buffers.items():
            if buffer is None or key in module._non_persistent_buffers_set:
                raise HardenError(f"buffer {key!r} of a {type(module).__name__} is not saved with the weights")
            zeros = f"torch.zeros({tuple(buffer.shape)}, dtype={buffer.dtype})"
            lines.append(f"        self.register_buffer({key!r}, {zeros})")
        lines += [f"        self.{key} = {self.expression(child, key)}" for key, child in module.named_children()]
        if type(module) is not nn.Module:
            lines += ["", *_forward(module)]
        body = "\n".join(lines) + "\n"
        if (preferred, body) not in self.names:
            used_names = set(self.names.values())
            free = next(n for n in (preferred, *(f"{preferred}{i}" for i in range(2, 10_000))) if n not in used_names)
            self.names[preferred, body] = free
            self.texts.append(f"class {free}(nn.Module):\n{body}")
        return self.names[preferred, body]

    def expression(self, module: nn.Module, key: str) -> str:
        """Return the expression that creates a child: a torch constructor call or a call of a written class."""
        if type(module) in (nn.Sequential, nn.ModuleList, nn.Module) and _numbered(module):
            last = max(map(int, module._modules))  # fx omits modules that a graph does not call
            children = [module._modules.get(str(i)) or nn.Identity() for i in range(last + 1)]
            parts = _laid_out([self.expression(child, key) for child in children])
            return f"nn.Sequential({parts})" if type(module) is nn.Sequential else f"nn.ModuleList([{parts}])"
        if type(module).__module__.startswith("torch.nn.modules.") and type(module) is not nn.Module:
            return constructor(module)
        preferred = type(module).__name__ if type(module) is not nn.Module else key.title().replace("_", "")
        return f"{self.class_of(module, preferred)}()"


def _laid_out(parts: list[str]) -> str:
    """Return the arguments on one line, or one per line if that would be too long."""
    line = ", ".join(parts)
    if len(line) <= WIDTH and "\n" not in line:
        return line
    deeper = [part.replace("\n", "\n    ") for part in parts]
    return "".join(f"\n            {part}," for part in deeper) + "\n        "


def _numbered(module: nn.Module) -> bool:
    """Return whether a module is a list: numbered children and nothing else."""
    named = any(not key.isdigit() for key in module._modules)
    return bool(module._modules) and not (named or module._parameters or module._buffers)


def constructor(layer: nn.Module) -> str:
    """Return the constructor call that recreates a torch layer, verified by evaluating it.

    >>> constructor(nn.Conv2d(3, 8, 3, padding=1, bias=False))
    'nn.Conv2d(3, 8, 3, padding=1, bias=False)'
    """
    arguments = []
    for p in inspect.signature(type(layer).__init__).parameters.values():
        if p.name in ("self", "device", "dtype") or p.name.startswith("_") or not hasattr(layer, p.name):
            continue
        value = getattr(layer, p.name)
        if callable(value) and p.default is None:  # a method of the same name: `modules` of an empty nn.ModuleList
            continue
        if isinstance(value, tuple) and len(set(value)) == 1 and isinstance(value[0], int):
            value = value[0]  # (3, 3) is written as 3
        value = value is not None if p.name == "bias" else value
        if p.default is p.empty:
            arguments.append(repr(value))
        elif value != p.default:
            arguments.append(f"{p.name}={value!r}")
    text = f"nn.{type(layer).__name__}({', '.join(arguments)})"
    try:
        with torch.device("meta"):
            again = eval(text, {"nn": nn})
    except Exception as error:
        raise HardenError(f"a {type(layer).__name__} cannot be written as source: {text} fails with {error}") from error
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (again, layer)]
    if repr(again) != repr(layer) or shapes[0] != shapes[1]:
        raise HardenError(f"a layer cannot be written as source: {text} makes {again}, not {layer}")
    return text


class _Shallow(fx.Tracer):
    """Tracer that treats every submodule as a leaf."""

    def is_leaf_module(self, _module: nn.Module, _name: str) -> bool:
        """Return True."""
        return True


def _forward(module: nn.Module) -> list[str]:
    """Return the lines of a module's forward. A value used only by the next step is inlined there."""
    try:
        graph = module.graph if isinstance(module, fx.GraphModule) else _Shallow().trace(module)
    except Exception as error:
        raise HardenError(f"the forward of {type(module).__name__} cannot be traced: {error}") from error
    nodes = list(graph.nodes)
    following = dict(pairwise(nodes))
    texts: dict[fx.Node, tuple[str, bool]] = {}  # node → its text, and whether it needs brackets
    inputs = ["self"]
    lines = []
    for node in nodes:
        if node.op == "placeholder":
            inputs.append(str(node.target) + (f"={node.args[0]!r}" if node.args else ""))
            texts[node] = str(node.target), False
            continue
        text, compound = _step(node, lambda n: texts[n])
        if node.op == "output":
            lines.append(f"return {text}")
        elif node.op == "get_attr" or _joins(node, following[node], text):
            texts[node] = text, compound
        else:
            name = f"{node.name}_" if node.name in RESERVED or keyword.iskeyword(node.name) else node.name
            texts[node] = name, False
            lines.append(f"{name} = {text}")
    return [f"    def forward({', '.join(inputs)}):", *(f"        {line}" for line in lines)]


def _joins(node: fx.Node, user: fx.Node, text: str) -> bool:
    """Return whether a step can be inlined into the next one: its only use, used once, and short enough."""
    uses: list[fx.Node] = []
    fx.node.map_arg((user.args, user.kwargs), uses.append)
    return list(node.users) == [user] and uses.count(node) == 1 and len(text) < WIDTH


TextOf = Callable[[fx.Node], tuple[str, bool]]
"""Function from a node to its text and whether it needs brackets."""


def _step(node: fx.Node, text_of: TextOf) -> tuple[str, bool]:
    """Return one step as an expression, and whether it needs brackets inside another."""
    args = [_value(a, text_of) for a in node.args]
    positional = [text for text, _ in args]
    keywords = [f"{k}={_value(v, text_of)[0]}" for k, v in node.kwargs.items()]
    call = ", ".join([*positional, *keywords])
    if node.op == "output":
        return args[0]
    if node.op == "get_attr":
        return _path(str(node.target)), False
    if node.op == "call_module":
        return f"{_path(str(node.target))}({call})", False
    if node.op == "call_method":
        return f"{_bracketed(args[0])}.{node.target}({', '.join([*positional[1:], *keywords])})", False
    if node.target in INFIX and len(args) == 2 and not node.kwargs:
        return f"{_bracketed(args[0])} {INFIX[node.target]} {_bracketed(args[1])}", True
    if node.target is operator.neg:
        return f"-{_bracketed(args[0])}", True
    if node.target is operator.getitem:
        return f"{_bracketed(args[0])}[{_index(node.args[1], text_of)}]", False
    if node.target is builtins.getattr:
        return f"{_bracketed(args[0])}.{node.args[1]}", False
    return f"{_function(node.target)}({call})", False


def _path(target: str) -> str:
    """Return an attribute path as an expression: `blocks.0.host` as `self.blocks[0].host`."""
    return "self" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in target.split("."))


def _function(target: Any) -> str:
    """Return the qualified name of a torch function. Raise HardenError for any other function."""
    name = getattr(target, "__name__", str(target))
    for space, label in ((F, "F"), (torch, "torch"), (torch.Tensor, "torch.Tensor")):
        if getattr(space, name, None) is target:
            return f"{label}.{name}"
    raise HardenError(f"the function {name} is not torch's own and cannot be written as source. Export as torch-export")


def _bracketed(expression: tuple[str, bool]) -> str:
    """Return the text, in parentheses if needed."""
    text, compound = expression
    return f"({text})" if compound else text


def _value(value: Any, text_of: TextOf) -> tuple[str, bool]:
    """Return a literal or node as an expression, and whether it needs brackets."""
    if isinstance(value, fx.Node):
        return text_of(value)
    if isinstance(value, (tuple, list)):
        inner = ", ".join(_value(v, text_of)[0] for v in value)
        if isinstance(value, list):
            return f"[{inner}]", False
        return f"({inner},)" if len(value) == 1 else f"({inner})", False
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_value(v, text_of)[0]}" for k, v in value.items()) + "}", False
    if isinstance(value, slice):
        return f"slice({', '.join(_value(v, text_of)[0] for v in (value.start, value.stop, value.step))})", False
    if isinstance(value, float):
        return (repr(value) if abs(value) < float("inf") else f"float({str(value)!r})"), value < 0
    if isinstance(value, int) and not isinstance(value, bool):
        return repr(value), value < 0
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})", False
    if value is None or value is ... or isinstance(value, (bool, str, torch.dtype)):
        return ("..." if value is ... else repr(value)), False
    raise HardenError(f"a {type(value).__name__} inside a forward cannot be written as source. Export as torch-export")


def _index(index: Any, text_of: TextOf) -> str:
    """Return the text inside square brackets, with slices written with colons."""
    if isinstance(index, tuple) and index:
        return ", ".join(_index(i, text_of) for i in index) + ("," if len(index) == 1 else "")
    if isinstance(index, slice):
        start, stop, step = ("" if v is None else _value(v, text_of)[0] for v in (index.start, index.stop, index.step))
        return f"{start}:{stop}" + (f":{step}" if step else "")
    return _value(index, text_of)[0]
