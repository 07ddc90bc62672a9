"""The commands as a user runs them: real files, a real terminal, and real processes where the process matters."""

import inspect
import json
import os
import pty
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET

import msgspec
import pytest

from esper import __version__
from esper.cli import grow
from esper.commands.growing import GrowSettings
from tests.support import command_line
from tests.support.command_line import ESPER, SETTINGS
from tests.support.run_outcomes import restore_signal_handling
from tests.support.sample_runs import grow_run

ENV = {**os.environ, **SETTINGS, "COLUMNS": "100", "TERM": "xterm"}


def esper(*args: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return command_line.esper(*args, env=ENV, **kwargs)


def esper_in_process(*args: str) -> subprocess.CompletedProcess[str]:
    return command_line.esper_in_process(*args, env=ENV)


def test_grow_trains_compares_and_writes_all_outputs(tmp_path):
    out = tmp_path / "run"
    done = esper("grow", "--task", "digits", "--controller", "schedule", "--epochs", "19", "--out", str(out))
    assert done.returncode == 0, done.stderr

    for row in ("grown", "no growth", "same structure from step 0", "wider host of equal size", "r0c0", "epoch  19/19"):
        assert row in done.stdout, row

    values = json.loads((out / "result.json").read_text())
    assert [r["name"] for r in values["results"]][:2] == ["grown", "no growth"]
    assert values["structure"]["r0c0"]["blueprint"] == "mlp_small"
    assert values["results"][0]["params"] > values["results"][1]["params"]
    assert len(values["results"][0]["history"]) == 19
    assert "r0c0" in values["worth"]["slots"]
    assert ET.parse(out / "worth.svg").getroot().tag.endswith("svg")

    loads_without_esper = (
        "import sys; sys.modules['esper'] = None\nimport torch\n"
        f"m = torch.export.load({str(out / 'plain.pt2')!r}).module()\nprint(tuple(m(torch.randn(7, 1, 8, 8)).shape))"
    )
    answer = subprocess.run([sys.executable, "-c", loads_without_esper], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "(7, 10)"

    again = esper_in_process("grow", "--task", "digits", "--out", str(out))
    assert again.returncode == 2
    assert "not empty" in again.stderr


def test_same_seed_gives_the_same_figures(tmp_path):
    figures = []
    for name, run in (("a", esper), ("b", esper_in_process)):
        run("grow", "--task", "digits", "--epochs", "3", "--no-compare", "--out", str(tmp_path / name), "--seed", "5")
        values = json.loads((tmp_path / name / "result.json").read_text())["results"][0]
        figures.append((values["accuracy"], values["loss"], values["history"]))
    assert figures[0] == figures[1]


def test_terminal_shows_the_lifecycle_of_every_slot_while_running():
    ours, theirs = pty.openpty()
    command = [str(ESPER), "grow", "--task", "digits", "--controller", "schedule", "--epochs", "6", "--no-compare"]
    command += ["--birth", "isolated"]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=ENV)
    os.close(theirs)
    output = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:
            break
        if not piece:
            break
        output += piece
    assert process.wait(60) == 0
    text = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]", b"", output).decode()
    assert "epoch   6/6" in text
    assert re.search(r"r0c0\s+training\s+mlp_small", text)
    assert b"\x1b[" in output  # it redraws in place


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["grow", "--task", "fashon"], "Did you mean 'fashion'?"),
        (["grow", "--controller", "heuristics"], "Did you mean 'heuristic'?"),
        (["grow", "--task", "cifar", "--data", "nowhere"], "nowhere"),
        (["grow", "--incubation", "none"], "shadow"),
        (["grow", "--birth", "sudden"], "isolated"),
        (["grow", "--lr-schedule", "cosine"], "wsd"),
        (["blueprints", "--task", "rescu"], "Did you mean 'rescue'?"),
    ],
)
def test_expected_failures_are_reported_with_a_message(args, message):
    done = esper_in_process(*args)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_piped_output_keeps_the_order_of_results_and_messages(tmp_path):
    grow_run(tmp_path / "run")
    command = [str(ESPER), "sql", str(tmp_path / "run"), "select step from steps", "--json", "--limit", "1"]
    env = {key: value for key, value in ENV.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, timeout=300)
    assert re.search(r"^\[.*\]\nesper: \d+ more rows; use --limit 0 for all\n$", done.stdout, re.DOTALL), done.stdout


def test_interrupt_ends_after_the_epoch_and_prints_how_to_resume(tmp_path):
    process = subprocess.Popen(
        [str(ESPER), "grow", "--task", "digits", "--epochs", "5000", "--out", str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
        preexec_fn=restore_signal_handling,
    )
    assert process.stdout is not None
    while "epoch   5/" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    printed, message = process.communicate(timeout=120)
    assert process.returncode == 130
    assert message.strip() == "esper: stopping after this epoch; repeat the signal to exit immediately"
    assert f"Resume with: esper grow --resume {tmp_path / 'run'}" in printed.replace("\n", "")


def test_tasks_and_blueprints_are_listed_with_their_sizes():
    tasks = esper_in_process("tasks").stdout
    assert re.search(r"rescue\s+cnn\s+390", tasks)
    assert "cifar10*" in tasks
    assert "\\n" not in tasks
    costs = esper_in_process("blueprints", "--task", "rescue").stdout
    assert re.search(r"conv_light\W+152\W+28,224", costs)  # 4 channels at 14×14


def test_defaults_of_grow_equal_those_of_its_settings():
    options = inspect.signature(grow).parameters
    defaults = {f.name: f.default for f in msgspec.structs.fields(GrowSettings) if f.name in options and not f.required}
    assert {name: options[name].default for name in defaults} == defaults
    assert defaults.keys() >= {"birth", "incubation", "lr_schedule", "seed", "compare", "threads", "telemetry"}


def test_help_describes_each_command():
    for command in (["--help"], ["grow", "--help"], ["train", "--help"]):
        done = esper(*command)
        assert done.returncode == 0
        assert "Usage" in done.stdout


def test_version_and_short_help_are_printed():
    printed = esper_in_process("--version")
    assert (printed.returncode, printed.stdout) == (0, f"esper {__version__}\n")
    assert "--task" in esper_in_process("grow", "-h").stdout


def test_report_without_a_run_takes_the_newest(tmp_path):
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return command_line.esper_in_process(*args, env=ENV, cwd=tmp_path)

    missing = run("report")
    assert missing.returncode != 0
    assert "there is no run yet" in missing.stderr
    for name in ("first", "second"):
        done = run("grow", "--task", "digits", "--epochs", "1", "--no-compare", "--out", f"runs/{name}")
        assert done.returncode == 0, done.stderr
    assert run("report").stdout.rstrip().endswith("report: runs/second/report.html")
