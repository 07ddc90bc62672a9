"""Commands that must fail, and what is checked of each."""

from __future__ import annotations

import contextlib
import hashlib
import io
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from esper import cli
from esper.nissa.run import read_manifest

MOST = 600
"""Maximum length of a paragraph in characters."""


@dataclass(frozen=True)
class Case:
    """A command line, built in the directory where it will run, and texts that its error must contain."""

    name: str
    args: list[str] | Callable[[], list[object]]
    output: tuple[str, ...]
    begun: bool = False
    """The run had begun when it failed: it leaves a run directory with that status."""
    usage: bool = False
    """An error of the argument parser: it shows the usage instead of a paragraph."""
    warned: bool = False
    """Warnings name what was damaged, before the error states the rest."""


def esper(*args: object) -> tuple[int, str]:
    """Run the command line; return its exit code and its stderr, warnings included."""
    output, before = io.StringIO(), sys.argv
    sys.argv = ["esper", *map(str, args)]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(output), warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=output)
            cli.main()
    except SystemExit as leaving:
        return int(leaving.code or 0), output.getvalue()
    finally:
        sys.argv = before
    return 0, output.getvalue()


def tree(root: Path) -> dict[str, str]:
    """Return every file below a directory, with the hash of its content."""
    files = {p: hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "" for p in root.rglob("*")}
    return {str(p.relative_to(root)): h for p, h in files.items()}


def check(case: Case, place: Path) -> None:
    """Assert that a command fails with exit code 2, one paragraph and no new file below `place`."""
    args = case.args() if callable(case.args) else case.args
    before = tree(place)
    code, output = esper(*args)
    new = {name for name, content in tree(place).items() if before.get(name) != content}

    assert code == 2, output
    assert "Traceback" not in output
    lines = output.strip().splitlines()
    if case.usage:
        assert lines[0].startswith("Usage")
        assert len(output) < 2 * MOST
    else:
        result = [line for line in lines if not (case.warned and line.startswith("esper: warning: "))]
        assert len(result) == 1, output  # one paragraph
        assert result[0].startswith("esper: ")
        assert len(result[0]) <= MOST, len(result[0])
    flat = " ".join(output.replace("│", " ").split())
    for word in case.output:
        assert word in flat, f"{word!r} is not in: {flat}"
    assert set(before) <= set(tree(place))
    if case.begun and new:
        for run in {place / "runs" / Path(name).parts[1] for name in new if len(Path(name).parts) > 1}:
            assert read_manifest(run)["status"] == "failed"
    else:
        assert not new, new
