"""Docstrings of public names: every argument, result and error is described, and the examples run.

Examples begin with the code block of docs/reference/api.md.
"""

import doctest
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator

import pytest
import torch

import esper
from esper.leyline.errors import EsperError
from tests.support import ROOT

PAGE = (ROOT / "docs" / "reference" / "api.md").read_text()
PRELUDE = re.search(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL).group(1)
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: (\S+)\n((?:   :.*\n)*)", re.MULTILINE)
PARTS = ("Args", "Returns", "Yields", "Raises", "Example")
VALUES = {"autodata"}


def resolve(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def documented() -> Iterator[tuple[str, str]]:
    """Yield kind and path of every name of the API page, and of the members that it shows."""
    for kind, path, options in DIRECTIVE.findall(PAGE):
        if kind == "module":
            continue
        yield kind, path
        members = re.search(r":members:(.*)", options)
        if kind == "class" and members:
            named = [name.strip() for name in members.group(1).split(",") if name.strip()]
            cls = resolve(path)
            if ":inherited-members:" in options:
                scope = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
            else:
                scope = vars(cls)
            named = named or [name for name in scope if not name.startswith("_") and is_method(scope[name])]
            yield from (("property" if isinstance(scope[n], property) else "method", f"{path}.{n}") for n in named)


def is_method(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, (property, classmethod, staticmethod))


def find(path: str) -> object:
    """Return the object of a path such as `esper.Grower.step`."""
    for depth in (1, 2):
        module, *names = path.rsplit(".", depth)
        try:
            member = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        for name in names:
            member = inspect.getattr_static(member, name) if inspect.isclass(member) else getattr(member, name)
        return member
    raise LookupError(path)


def function_of(member: object) -> object:
    """Return the function of a method or property."""
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


def sections(doc: str) -> dict[str, str]:
    """Return the parts of a docstring by title; the text before them is the part ""."""
    parts = re.split(rf"^({'|'.join(PARTS)}):\n", doc, flags=re.MULTILINE)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


NAMES = list(documented())
CALLABLE = [(kind, path) for kind, path in NAMES if kind in ("function", "class", "method")]
METHODS_WITH_EXAMPLES = ("esper.Grower.", "esper.Worth.", "esper.Audition.", "esper.Task.from_tensors")


@pytest.mark.parametrize(("kind", "path"), CALLABLE, ids=[path for _, path in CALLABLE])
def test_arguments_results_and_errors_are_described(kind, path):
    function = function_of(find(path))
    doc = inspect.getdoc(function)
    parts = sections(doc)
    parameters = inspect.signature(function).parameters.values() if takes_arguments(function) else ()
    for parameter in parameters:
        if parameter.name in ("self", "cls"):
            continue
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        name = re.escape(stars + parameter.name)
        assert re.search(rf"^    {name}: \S", parts.get("Args", ""), re.MULTILINE), f"{path}: {parameter.name}"
    if kind != "class" and inspect.signature(function).return_annotation not in ("None", None):
        assert "Returns" in parts or "Yields" in parts, path
        first = parts.get("Returns", parts.get("Yields", "")).strip().splitlines()[0]
        assert ": " not in first, f"{path}: Sphinx reads the text before a colon as a type"
    if "raise " in inspect.getsource(function) and kind != "class":
        assert "Raises" in parts, path


def takes_arguments(member: object) -> bool:
    """Return whether the arguments of a name are described in its docstring.

    Fields of structs and dataclasses have docstrings of their own. Results such as `Worth` are not built by users.
    """
    return not inspect.isclass(member) or ("__init__" in vars(member) and not hasattr(member, "__dataclass_fields__"))


@pytest.mark.parametrize("path", [path for _, path in NAMES])
def test_described_errors_exist(path):
    doc = inspect.getdoc(function_of(find(path))) or ""
    for name in re.findall(r"^    ([\w.]+): ", sections(doc).get("Raises", ""), re.MULTILINE):
        errors = [EsperError, *subclasses(EsperError)]
        module, _, last = name.rpartition(".")
        other = getattr(importlib.import_module(module or "builtins"), last, None)
        assert name in {each.__name__ for each in errors} or isinstance(other, type), f"{path}: {name}"


def subclasses(cls: type) -> list[type]:
    importlib.import_module("esper.grower.ranks")
    return [each for sub in cls.__subclasses__() for each in (sub, *subclasses(sub))]


def examples() -> dict[str, str]:
    """Return the docstrings of public names that hold examples, by path."""
    docs = {path: inspect.getdoc(function_of(find(path))) or "" for kind, path in NAMES if kind != "data"}
    return {path: doc for path, doc in docs.items() if ">>>" in doc}


def test_every_public_name_has_an_example():
    without = [path for kind, path in NAMES if kind in ("function", "class", "exception") and path not in examples()]
    assert without == []
    methods = [path for kind, path in CALLABLE if kind == "method" and path.startswith(METHODS_WITH_EXAMPLES)]
    assert [path for path in methods if path not in examples()] == []


@pytest.mark.parametrize("path", examples())
def test_example_runs(path, tmp_path, monkeypatch):
    run_example(examples()[path], path, tmp_path, monkeypatch)


def run_example(text, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    torch.manual_seed(0)
    exec(PRELUDE, names)
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    output: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=output.append)
    assert result.failed == 0, "".join(output)
    assert result.attempted > 0


INTERNAL = sorted(
    path.relative_to(ROOT / "src").with_suffix("").as_posix().replace("/", ".")
    for path in (ROOT / "src" / "esper").rglob("*.py")
    if ">>>" in path.read_text()
)


@pytest.mark.parametrize("module", INTERNAL)
def test_examples_of_internal_functions_run(module):
    """Examples of names that are not public import what they need from their own module."""
    loaded = importlib.import_module(module)
    public = {textwrap.dedent(doc).strip() for doc in examples().values()}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(loaded, globs=vars(loaded).copy()):
        if inspect.cleandoc(test.docstring or "").strip() not in public:
            assert runner.run(test).failed == 0


def test_names_that_are_not_public_are_internal():
    assert set(esper.__all__) == set(esper.__dir__())
