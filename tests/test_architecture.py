"""Imports, one rollout loop, assignments, files of a step, sizes, docstrings, layout of the tests, lazy imports."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from esper.karn.report import SCRIPT_LINK, STYLE_LINK

SRC = Path(__file__).parent.parent / "src" / "esper"
PACKAGES = {"grower", "leyline", "kasmina", "tolaria", "tamiyo", "simic", "nissa", "karn", "studies"}
MAY_IMPORT = {
    "leyline": set(),
    "kasmina": {"leyline"},
    "tolaria": {"leyline", "kasmina"},
    "tamiyo": {"leyline"},
    "nissa": {"leyline"},
    "karn": {"leyline", "nissa"},
    "simic": {"leyline", "kasmina", "tolaria", "tamiyo"},
    "grower": {"leyline", "kasmina", "tolaria", "tamiyo", "simic"},
    "studies": {"leyline", "kasmina", "tolaria", "tamiyo", "simic"},
}
NO_TORCH = {"leyline", "nissa", "karn"}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


FILES = [p for p in sorted(SRC.rglob("*.py")) if p.relative_to(SRC).parts[0] in PACKAGES]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SRC)))
def test_imports_follow_the_layers(path):
    package = path.relative_to(SRC).parts[0]
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "esper" and len(parts) > 1:
            assert parts[1] == package or parts[1] in MAY_IMPORT[package], f"{package} may not import {name}"
        if package in NO_TORCH:
            assert parts[0] != "torch", f"{package} imports no torch"


ROOT = SRC.parent.parent
PROGRAMS = [p for folder in (SRC, ROOT / "benchmarks", ROOT / "scripts") for p in sorted(folder.rglob("*.py"))]


def decides_and_steps(loop):
    """Return whether a loop both chooses actions and steps environments."""
    called = {
        call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        for call in ast.walk(loop)
        if isinstance(call, ast.Call)
    }
    return "step" in called and called & {"act", "wait_everywhere"}


def test_only_rollout_lets_a_controller_step_environments():
    """Training, growing, evaluation, baselines, benchmarks and studies all use `tolaria.rollout.rollout`."""
    loops = {
        str(path.relative_to(ROOT))
        for path in PROGRAMS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.For, ast.While)) and decides_and_steps(node)
    }
    assert loops == {"src/esper/tolaria/rollout.py"}


STEPS = {"src/esper/tolaria/engine.py", "src/esper/simic/simulator.py"}
"""Files with a step of environments. `grower/` has that of a user's own loop."""


def lifecycle_names(tree):
    """Return what a file calls the lifecycle rules: local name → name in `esper.leyline.lifecycle`."""
    return {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("esper.leyline.lifecycle", "esper.leyline")
        for alias in node.names
    }


def rules_called(function, names):
    """Return the lifecycle rules that a function calls, by imported name or as `lifecycle.NAME`."""
    called = set()
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            called.add(names.get(call.func.id))
        elif isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            owner = call.func.value
            if isinstance(owner, ast.Name) and names.get(owner.id) == "lifecycle":
                called.add(call.func.attr)
    return called


def steps_lifecycles(text):
    """Return whether a function of this source both applies actions and ticks."""
    tree = ast.parse(text)
    names = lifecycle_names(tree)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return any({"apply", "tick"} <= rules_called(function, names) for function in functions)


def test_only_engine_simulator_and_grower_step_lifecycles():
    """A second implementation of a step would train or record differently."""
    steps = {str(path.relative_to(ROOT)) for path in PROGRAMS if steps_lifecycles(path.read_text())}
    assert {file for file in steps if not file.startswith("src/esper/grower/")} == STEPS


@pytest.mark.parametrize(
    "text",
    [
        "from esper.leyline.lifecycle import apply, tick\ndef train():\n    apply()\n    tick()",
        "from esper.leyline.lifecycle import apply as act, tick\ndef train():\n    act()\n    tick()",
        "from esper.leyline import lifecycle\ndef train():\n    lifecycle.apply()\n    lifecycle.tick()",
    ],
)
def test_second_step_is_detected(text):
    assert steps_lifecycles(text)
    assert not steps_lifecycles(text.replace("tick()", "tock()"))


def tuple_assignments(text):
    """Return the lines of a source that assign a literal of three or more values to as many targets."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign)
        and isinstance(node.value, (ast.Tuple, ast.List))
        and len(node.value.elts) >= 3
        and any(isinstance(target, (ast.Tuple, ast.List)) for target in node.targets)
    ]


def test_tuple_assignments_are_found():
    assert tuple_assignments("a, b, c = 1, 2, 3") == [1]
    assert tuple_assignments("d = 0\nself.a, (b, c), d = [\n    1, 2, 3\n]") == [2]
    assert tuple_assignments("a, b = b, a\nsizes = 1, 2, 3\na, b, c = sizes\na, b, c = f()") == []


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: str(p.relative_to(ROOT)))
def test_assignments_set_at_most_two_values(path):
    """Pairs (`low, high`) and swaps are allowed; three or more values are one statement each."""
    lines = path.read_text().splitlines()
    places = [f"{path.relative_to(ROOT)}:{n}: {lines[n - 1].strip()}" for n in tuple_assignments(path.read_text())]
    assert not places, "assign one value per line:\n" + "\n".join(places)


MOST_STEP_FILES = 30


def test_a_training_step_runs_few_files():
    """The first step of a round also looks up the no-growth baselines, so it is not counted."""
    script = runpy.run_path(str(ROOT / "scripts" / "step_files.py"))
    steps = script["trace_steps"](script["SETTINGS"])[1:]
    assert len(steps) > 5
    assert max(len(script["files_of"](step)) for step in steps) <= MOST_STEP_FILES
    assert all({"tolaria/engine.py", "simic/env.py", "tamiyo/network.py"} <= script["files_of"](step) for step in steps)


MOST_LINES, MOST_METHODS = 450, 20


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_files_and_classes_have_limited_size(path):
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            functions = [f for f in node.body if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))]
            public = [f.name for f in functions if not f.name.startswith("_")]
            assert len(public) <= MOST_METHODS, f"{node.name} has {len(public)} public methods: {', '.join(public)}"


WEB = sorted(path for path in (SRC / "karn" / "web").iterdir() if not path.name.startswith("uplot."))
"""The files of the page without the vendored ones."""


@pytest.mark.parametrize("path", WEB, ids=lambda path: path.name)
def test_files_of_the_page_have_limited_size(path):
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_index_page_links_every_script_and_style_of_the_page():
    html = (SRC / "karn" / "web" / "index.html").read_text()
    linked = SCRIPT_LINK.findall(html) + STYLE_LINK.findall(html)
    files = [path.name for path in (SRC / "karn" / "web").iterdir() if path.suffix in (".js", ".css")]
    assert sorted(linked) == sorted(files)


def names_between(text, before, after):
    """Return the names in the list between two markers of a script, or none."""
    block = re.search(rf"{re.escape(before)}([^}}]*){re.escape(after)}", text)
    return set(re.findall(r"\w+", block[1])) if block else set()


def test_scripts_of_the_page_take_only_names_of_earlier_scripts():
    """A name that an earlier script does not add to `esper` would be undefined without an error until it is used."""
    html = (SRC / "karn" / "web" / "index.html").read_text()
    added, taken = set(), set()
    for name in SCRIPT_LINK.findall(html)[1:]:
        text = (SRC / "karn" / "web" / name).read_text()
        names = names_between(text, "const {", "} = esper;")
        assert names <= added, name
        added |= names_between(text, "Object.assign(esper, {", "});")
        taken |= names
    assert taken == added


MOST_VIEW_LINES, MOST_WEB_LINES = 3500, 1500


def test_views_have_limited_size():
    """SQL and the plot of worth show no run: their files are not counted. Nor are the vendored files of the page."""
    karn = SRC / "karn"
    others = {"sql.py", "sql_process.py", "views.py", "worth_plot.py"}
    python = [path for path in karn.rglob("*.py") if path.name not in others]
    python_lines, web_lines = (sum(len(p.read_text().splitlines()) for p in paths) for paths in (python, WEB))
    assert python_lines <= MOST_VIEW_LINES
    assert web_lines <= MOST_WEB_LINES


def test_every_package_has_a_docstring():
    for package in SRC.iterdir():
        if (package / "__init__.py").exists():
            assert ast.get_docstring(ast.parse((package / "__init__.py").read_text())), package.name


def test_test_directories_mirror_packages():
    tests = Path(__file__).parent
    apart = {"benchmarks", "docs", "reference", "scripts", "support"}
    folders = [p.parent.relative_to(tests) for p in tests.rglob("__init__.py")]
    assert [str(f) for f in folders if f.parts and f.parts[0] not in apart and not (SRC / f).is_dir()] == []


def test_test_modules_do_not_import_each_other():
    """What several test modules use is in `tests/support`."""
    imports = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("tests", "benchmarks", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in imports_of(path)
        if re.match(r"tests\.(?!support|reference)|(.*\.)?test_", name)
    ]
    assert imports == []


@pytest.mark.parametrize("command", [["-c", "import esper"], ["-m", "esper.cli", "--help"]])
def test_import_and_help_do_not_load_torch(command):
    code = [sys.executable, "-X", "importtime", *command]
    done = subprocess.run(code, capture_output=True, text=True, check=True)
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert not {m for m in loaded if m.split(".")[0] in ("torch", "numpy")}
