"""A grower that is saved, and loaded by another process, continues without any difference.

The reference for every resumed run is the uninterrupted run: both must be bit-identical.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

import esper
from esper.grower import Grower
from esper.kasmina.blueprints import unregister
from esper.kasmina.hosts import TransformerHost
from esper.leyline.actions import Head, Op
from esper.leyline.errors import CheckpointError, ConfigError
from esper.leyline.events import Checkpoint
from esper.leyline.stages import SeedStage
from esper.nissa.journal_reader import read
from esper.tamiyo.controllers import Heuristic, HeuristicConfig, Random, Wait, wait_everywhere
from esper.tolaria.checkpoint import Checkpoints
from esper.tolaria.packing import packed, unpacked
from tests.support import ROOT
from tests.support.fork_server import exit_codes, start
from tests.support.grower import EASY, EventList, batch, make_body

EPOCHS, BATCHES = 25, 2
Data = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
Make = Callable[[], tuple[Grower, Any, Data]]
Script = dict[int, Callable[[Grower], object]]


def lifecycle_script(one: str = "conv_light", two: str = "bottleneck") -> Script:
    """Return operations by step: every stage, both directions of alpha, early and late gates, a prune, a new seed."""
    return {
        1: lambda g: g.germinate("first", one, tempo="FAST", style="LINEAR_ADD"),
        2: lambda g: (g.advance("first"), g.germinate("second", two, style="GATED_GATE")),
        4: lambda g: (g.advance("first"), g.advance("second")),
        7: lambda g: (g.advance("first"), g.advance("second")),
        8: lambda g: g.set_alpha_target("first", 0.5, speed="FAST", style="GATED_GATE"),
        11: lambda g: g.set_alpha_target("first", 1.0, speed="INSTANT"),
        12: lambda g: (g.advance("first"), g.prune("second", speed="FAST")),
        13: lambda g: g.fossilize("first"),
        23: lambda g: g.germinate("second", two),
    }


def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), y.flatten())


class Loop:
    """A user's training loop, divided into the smallest steps between which one may save."""

    def __init__(self, make: Make, script: Script) -> None:
        self.grower, self.scheduler, self.data = make()
        self.script, self.at = script, 0
        self.held_out = [self.data(99_991, 40), self.data(99_992, 24)]

    @property
    def steps(self) -> list[tuple[Any, ...]]:
        epoch = [
            (self.act,),
            *((half, b) for b in range(BATCHES) for half in (self.backward, self.update)),
            (self.grow,),
        ]
        return [(do, e, *rest) for e in range(EPOCHS) for do, *rest in epoch]

    def act(self, epoch: int) -> None:
        self.script.get(epoch, lambda _g: None)(self.grower)

    def backward(self, epoch: int, b: int) -> None:
        body = self.grower.body.train()
        x, y = self.data(1000 * epoch + b, 16)
        if x.is_floating_point():  # draw from every generator
            x = x + 0.01 * torch.randn_like(x) + 0.1 * random.random() + 0.1 * np.random.rand()
        self.grower.optimizer.zero_grad()
        loss(body(x), y).backward()
        if body.incubation == "shadow" and (epoch + b) % 3:
            self.grower.shadow(lambda: loss(body(x), y))

    def update(self, _epoch: int, _b: int) -> None:
        self.grower.clip_grad_norm_(1.0)
        self.grower.optimizer.step()

    def grow(self, epoch: int) -> None:
        self.scheduler.step()
        self.grower.step(self.held_out if epoch % 3 else None)

    def run(self, until: int | None = None) -> Iterator[int]:
        """Run step by step; yield the number of steps done."""
        steps = self.steps
        while self.at < (len(steps) if until is None else until):
            do, *where = steps[self.at]
            do(*where)
            self.at += 1
            yield self.at

    def save(self, directory: Path) -> Path:
        return self.grower.save(directory, extra={"at": self.at, "scheduler": self.scheduler.state_dict()})

    def load(self, directory: Path) -> None:
        extra = self.grower.load(directory)
        self.at = extra["at"]
        self.scheduler.load_state_dict(extra["scheduler"])


def digest(value: Any) -> Any:
    """Return a bit-exact comparable form of any tree of tensors and arrays."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return str(value.dtype), tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return {k: digest(v) for k, v in value.items()}
    return [digest(v) for v in value] if isinstance(value, (list, tuple)) else value


def state_hashes(grower: Grower) -> dict[str, str]:
    """Return a hash of each part of the state that decides how training continues."""
    body, optimizer, controller = grower.body, grower.optimizer, grower.controller
    parts = {
        "weights": digest(dict(body.state_dict())),
        "gradients": [digest(p.grad) for p in body.parameters()],
        "learning": [(n, p.requires_grad, p.stride()) for n, p in body.named_parameters()],
        "modes": [m.training for m in body.modules()],
        "slots": [(s.stage, s.alpha.item(), s.operator, s.rng_seed, s.blueprint, s.mode) for s in body.slots.values()],
        "optimizer": digest(optimizer.state_dict()),
        "strides": [v.stride() for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)],
        "table": digest(grower.table.arrays()),
        "counters": [grower._batches, grower._shadow_passes, sorted(grower.network.unsampled)],
        "meter": [digest(grower.network.meter.latest), grower.network.meter.smoothed],
        "forks": [body.forking.points, sorted(body.forking.proven), body.forking.failure],
        "generators": [digest(torch.get_rng_state()), digest(np.random.get_state()), random.getstate()],
        "controller": digest(getattr(controller, "state_dict", dict)()),
    }
    return {name: hashlib.sha256(repr(part).encode()).hexdigest() for name, part in parts.items()}


def seed_generators() -> None:
    torch.manual_seed(11)
    np.random.seed(12)
    random.seed(13)


def change_generators() -> None:
    """Change the state of all random generators, as in a new process."""
    torch.manual_seed(99)
    np.random.seed(98)
    random.seed(97)


def uninterrupted(make: Make, script: Script, saves: dict[int, Path]) -> tuple[Loop, list[Any]]:
    """Run without interruption, saving at some points; return the loop and its state after each step."""
    loop = Loop(make, script)
    seed_generators()
    history: list[Any] = []
    for at in chain([0], loop.run()):
        history.append((state_hashes(loop.grower), len(loop.grower.emit.hub)))
        if at in saves:
            loop.save(saves[at])
            assert state_hashes(loop.grower) == history[-1][0]  # saving changes nothing
            assert type(loop.grower.emit.hub.pop()) is Checkpoint
    return loop, history


def resumed_equals_uninterrupted(make: Make, script: Script, points: list[int], root: Path, more: int) -> Loop:
    """Assert that a run resumed at each of these points equals the uninterrupted one for `more` further steps."""
    saves = {at: root / str(at) for at in points}
    whole, history = uninterrupted(make, script, saves)
    for at in points:
        change_generators()
        again = Loop(make, script)
        again.load(saves[at])
        assert again.at == at
        hub = again.grower.emit.hub
        hub.clear()
        assert state_hashes(again.grower) == history[at][0], f"loaded at {at}"
        for now in again.run(min(at + more, len(whole.steps))):
            assert state_hashes(again.grower) == history[now][0], f"resumed at {at}, step {now}"
        assert list(hub) == whole.grower.emit.hub[history[at][1] : history[again.at][1]]
    return whole


def optimizer_of(kind: str, body: esper.Body) -> optim.Optimizer:
    matrices = [p for p in body.model.parameters() if p.ndim > 1]
    vectors = [p for p in body.model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return {
        "sgd": lambda: optim.SGD(body.parameters(), lr=0.05, momentum=0.9),
        "fused sgd": lambda: optim.SGD(body.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True),
        "adamw": lambda: optim.AdamW(body.parameters(), lr=0.01),
        "fused adamw": lambda: optim.AdamW(body.parameters(), lr=0.01, fused=True),
        "groups": lambda: optim.AdamW(groups, lr=0.01, amsgrad=True),
        "named": lambda: optim.Adam(body.named_parameters(), lr=torch.tensor(0.01)),
        "adafactor": lambda: optim.Adafactor(body.parameters(), lr=0.01),
        "rmsprop": lambda: optim.RMSprop(body.parameters(), lr=0.01, momentum=0.5, centered=True),
    }[kind]()


class UnusualModel(nn.Module):
    """Channels last, shared weights, a buffer outside the state dict, extra state, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.second = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.mix = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6, bias=False)
        self.again.weight = self.mix.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 3)
        self.calls = 0
        self.register_buffer("pulse", torch.zeros(6), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(self.first(x)).mean((2, 3))
        if self.training:
            self.calls += 1
            self.pulse.mul_(0.5).add_(h.detach().mean(0))
        h = self.again(F.dropout(self.mix(self.frozen(h) + self.pulse), 0.1, self.training))
        return self.head(h) * (1 + 0.01 * self.calls)


def unusual() -> tuple[esper.Body, Data]:
    torch.manual_seed(1)
    model = UnusualModel().to(memory_format=torch.channels_last)
    at = {"first": "first", "second": "second"}
    return esper.graft(model, at=at, probe=batch(0, 4)[0].to(memory_format=torch.channels_last)), batch


def text() -> tuple[esper.Body, Data]:
    """Return a causal language model whose head shares the embedding's weights."""
    torch.manual_seed(1)
    model = TransformerHost(vocab=11, dim=8, heads=2, layers=3, block_size=6, dropout=0.1)

    def tokens(seed: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randint(11, (size, 7), generator=torch.Generator().manual_seed(seed))
        return x[:, :-1], x[:, 1:]

    return esper.graft(model, at={"first": "blocks.0", "second": "blocks.1"}, probe=tokens(0, 4)[0]), tokens


HOSTS: dict[str, Callable[[], tuple[esper.Body, Data]]] = {
    "cnn": lambda: (make_body(), batch),
    "unusual": unusual,
    "text": text,
}


def maker(kind: str = "sgd", host: str = "cnn", **options: Any) -> Make:
    def make() -> tuple[Grower, Any, Data]:
        body, data = HOSTS[host]()
        optimizer = optimizer_of(kind, body)
        settings = {
            "controller": "none",
            "rules": EASY,
            "gradient_telemetry_stride": 3,
            "telemetry": EventList(),
            **options,
        }
        grower = Grower(body, optimizer, **settings)
        return grower, optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS), data

    return make


PER_EPOCH = 2 + 2 * BATCHES
AT = {
    "before anything": 0,
    "GERMINATED": PER_EPOCH + 1,
    "TRAINING, between backward and step": 3 * PER_EPOCH + 2,
    "BLENDING, mid-ramp and mid-epoch": 5 * PER_EPOCH + 3,
    "HOLDING": 7 * PER_EPOCH + 4,
    "on its way to another alpha, by a gate born later": 9 * PER_EPOCH + 2,
    "FOSSILIZED, and one on its way out": 13 * PER_EPOCH + 3,
    "cooling": 17 * PER_EPOCH + 5,
    "planted again": 23 * PER_EPOCH + 1,
}


def test_scenario_visits_every_stage():
    loop, met = Loop(maker(), lifecycle_script()), set()
    for at in loop.run():
        now = {view.stage for view in loop.grower.slots.values()}
        met |= now
        for name, point in AT.items():
            if at == point and name.isupper():
                assert SeedStage[name] in now
    assert met == set(SeedStage)


@pytest.mark.parametrize("incubation", ["straight_through", "shadow"])
def test_run_resumes_bit_for_bit_from_every_stage(incubation, tmp_path):
    resumed_equals_uninterrupted(
        maker(incubation=incubation), lifecycle_script(), list(AT.values()), tmp_path, more=PER_EPOCH
    )


@pytest.mark.parametrize("kind", ["fused sgd", "adamw", "fused adamw", "groups", "named", "adafactor", "rmsprop"])
def test_run_resumes_bit_for_bit_with_every_optimiser(kind, tmp_path):
    points = [AT["on its way to another alpha, by a gate born later"], AT["FOSSILIZED, and one on its way out"]]
    resumed_equals_uninterrupted(
        maker(kind, incubation="shadow", lr=0.02), lifecycle_script(), points, tmp_path, more=PER_EPOCH
    )


@pytest.mark.parametrize(
    ("host", "seeds"), [("unusual", ("conv_light", "bottleneck")), ("text", ("lora", "mlp_small"))]
)
def test_run_resumes_bit_for_bit_with_every_host(host, seeds, tmp_path):
    points = [AT["BLENDING, mid-ramp and mid-epoch"], AT["FOSSILIZED, and one on its way out"]]
    resumed_equals_uninterrupted(maker("adamw", host), lifecycle_script(*seeds), points, tmp_path, more=PER_EPOCH)


@pytest.mark.slow
# a process resumed after the last batch of an epoch calls the scheduler before its first optimizer.step()
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
@pytest.mark.parametrize("incubation", ["straight_through", "shadow"])
@pytest.mark.parametrize("kind", ["sgd", "groups"])
def test_run_resumes_bit_for_bit_from_any_step(kind, incubation, tmp_path):
    resumed_equals_uninterrupted(
        maker(kind, incubation=incubation),
        lifecycle_script(),
        list(range(0, EPOCHS * PER_EPOCH, 5)),
        tmp_path,
        more=PER_EPOCH,
    )


@pytest.mark.slow
def test_resumed_run_ends_as_the_uninterrupted_one(tmp_path):
    resumed_equals_uninterrupted(maker("adamw"), lifecycle_script(), [AT["HOLDING"]], tmp_path, more=10_000)


class CountingController:
    """A custom controller with state."""

    def __init__(self) -> None:
        self.turns = 0

    def act(self, table: esper.SlotTable, legal: Any) -> Any:
        self.turns += 1
        actions = wait_everywhere(1)
        if self.turns % 4 == 0 and legal[0, Op.GERMINATE].any():
            actions[0, [Head.OP, Head.SLOT]] = Op.GERMINATE, legal[0, Op.GERMINATE].argmax()
            actions[0, Head.BLUEPRINT] = np.nonzero(table.takes[0])[0][self.turns % 3]
        return actions

    def state_dict(self) -> dict[str, Any]:
        return {"turns": self.turns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turns = state["turns"]


BRISK = esper.Rules(min_prune_age=1)
EAGER = HeuristicConfig(plateau_epochs=1, settled_epochs=1, first_epoch=1, holding_patience=1, plateau_gain=0.5)


def plan() -> dict[str, str]:
    return {"second": "conv_light", "first": "bottleneck"}


@pytest.mark.filterwarnings("ignore:the model lies outside")
@pytest.mark.parametrize(
    "controller",
    ["schedule", "random", "tamiyo", lambda: Heuristic(EAGER), CountingController, plan],
    ids=lambda c: getattr(c, "__name__", c),
)
def test_run_resumes_bit_for_bit_under_every_controller(controller, tmp_path):
    def make() -> tuple[Grower, Any, Data]:
        chosen = controller if isinstance(controller, str) else controller()
        return maker("adamw", rules=BRISK, controller=chosen, horizon=EPOCHS, mixing_steps=0)()

    points = [PER_EPOCH * 3 - 1, PER_EPOCH * 9 + 2]
    whole = resumed_equals_uninterrupted(make, {}, points, tmp_path, more=6 * PER_EPOCH)
    assert whole.grower.table.next_serial[0] > 0  # it did germinate something
    if controller is plan:
        assert {name: slot.blueprint for name, slot in whole.grower.slots.items()} == plan()


# -- in separate processes


def continue_run(where: Path, until: int, summary: Path) -> None:
    """Load the run if it was saved, continue it, save it and write its whole state. Called in a new process."""
    torch.set_num_threads(1)
    loop = Loop(maker("adamw", "unusual", incubation="shadow"), lifecycle_script())
    seed_generators()
    if where.exists():
        loop.load(where)
    for _ in loop.run(until):
        pass
    loop.save(where)
    summary.write_text(f"{loop.at} {state_hashes(loop.grower)}")


@pytest.mark.slow
def test_run_of_three_processes_equals_the_run_of_one(tmp_path):
    def run(name: str, until: int) -> str:
        assert exit_codes([start(continue_run, tmp_path / name, until, tmp_path / f"{name}.txt")]) == [0]
        return (tmp_path / f"{name}.txt").read_text()

    end = 15 * PER_EPOCH
    for until in (AT["BLENDING, mid-ramp and mid-epoch"], AT["FOSSILIZED, and one on its way out"], end):
        last = run("many", until)
    assert last == run("one", end)


def python(script: str, *args: object) -> str:
    script = script.format(root=str(ROOT))
    done = subprocess.run([sys.executable, "-c", script, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
import torch
torch.set_num_threads(1)
from pathlib import Path
from tests.grower.test_saving import *
loop, where = Loop(maker(), lifecycle_script()), Path(sys.argv[1])
seed_generators()
for at in loop.run(AT["HOLDING"]):
    if at == AT["GERMINATED"]:
        loop.save(where)

def kill_at_call(nth):
    calls = 0
    def killing(plain):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*args, **kwargs)
        return call
    for name in ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir"):
        setattr(os, name, killing(getattr(os, name)))
    loop.grower.save(where, keep=1, extra={{"at": loop.at, "scheduler": loop.scheduler.state_dict()}})
    os._exit(0)

import shutil
first = where.with_name("first")
shutil.copytree(where, first)
nth = status = 1
while status:
    shutil.rmtree(where)
    shutil.copytree(first, where)
    pid = os.fork() or kill_at_call(nth)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), status
    again = Loop(maker(), lifecycle_script())
    again.load(where)
    print(nth, again.at, [p.name for p in where.glob(".draft*")])
    nth += 1
os.waitpid(os.fork() or kill_at_call(nth // 2), 0)
again.save(where)
assert not list(where.glob(".draft*")), "drafts of killed writers are removed"
"""


@pytest.mark.slow
def test_kill_at_any_point_while_saving_leaves_the_old_or_the_new_save(tmp_path):
    done = python(KILLED, tmp_path / "saves")
    stages = [int(line.split()[1]) for line in done.splitlines()]
    assert set(stages) == {AT["GERMINATED"], AT["HOLDING"]}
    assert stages == sorted(stages)
    assert len(stages) > 20  # points at which it was killed


# -- faulty saves


def grown(where: Path, at: str = "HOLDING", **options: Any) -> Loop:
    """Run to a point and save."""
    loop = Loop(maker(**options), lifecycle_script())
    seed_generators()
    for _ in loop.run(AT[at]):
        pass
    loop.save(where)
    return loop


def test_damaged_save_is_named_and_the_previous_one_is_used(tmp_path):
    loop = grown(tmp_path, "TRAINING, between backward and step")
    before = state_hashes(loop.grower)
    for _ in loop.run(AT["HOLDING"]):
        pass
    newest = loop.save(tmp_path)
    damaged = newest / "body.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)

    again = Loop(maker(), lifecycle_script())
    with pytest.warns(UserWarning, match=f"'{newest.name}' is damaged"):
        again.load(tmp_path)

    assert state_hashes(again.grower) == before


def test_as_many_saves_are_kept_as_requested(tmp_path):
    loop = grown(tmp_path)
    for _ in range(3):
        path = loop.grower.save(tmp_path, keep=3)
    assert path.parent == tmp_path
    assert len(list(tmp_path.glob("epoch*"))) == 3
    loop.grower.save(tmp_path)
    assert len(list(tmp_path.glob("epoch*"))) == 2


def test_directory_without_a_save_is_reported(tmp_path):
    grower = maker()()[0]
    with pytest.raises(CheckpointError, match=r"there is no usable checkpoint in .*nowhere"):
        grower.load(tmp_path / "nowhere")
    path = grower.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"Pass its parent"):
        grower.load(path)
    Checkpoints(tmp_path / "run").write("run", kind="run")
    with pytest.raises(CheckpointError, match="of kind 'run'; a grower's is of kind 'body'"):
        grower.load(tmp_path / "run")


def test_unsaveable_state_is_refused_before_anything_is_written(tmp_path):
    grower = maker()()[0]
    with pytest.raises(CheckpointError, match=r"extra\.loader: it is a .*DataLoader"):
        grower.save(tmp_path, extra={"loader": DataLoader([1])})
    assert not list(tmp_path.iterdir())


def conv(a: int, b: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())


def head(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3)]


def grafted(model: nn.Module, at: Any = None, blueprints: Sequence[str] = ()) -> esper.Body:
    sites = at or {"first": "0", "second": "2"}
    return esper.graft(model, at=sites, probe=torch.randn(3, 1, 6, 6), blueprints=blueprints)


def plain(width: int = 6, bias: bool = True) -> nn.Sequential:
    model = nn.Sequential(conv(1, width), nn.Dropout(0.2), conv(width, width), *head(width))
    if not bias:
        model[-1] = nn.Linear(width, 3, bias=False)
    return model


def sgd(body: esper.Body) -> optim.Optimizer:
    return optim.SGD(body.parameters(), lr=0.05, momentum=0.9)


def halves(body: esper.Body) -> optim.Optimizer:
    params = list(body.parameters())
    return optim.SGD([{"params": params[:3]}, {"params": params[3:]}], lr=0.05, momentum=0.9)


MISFITS: dict[str, tuple[Callable[[], esper.Body], Callable[[esper.Body], optim.Optimizer], str]] = {
    "wider": (lambda: grafted(plain(8)), sgd, r"slot 'first' follows '0', a map of 6; here it follows '0', a map of 8"),
    "no bias": (lambda: grafted(plain(bias=False)), sgd, r"'5.bias' is only in the checkpoint. Build the same"),
    "one more layer": (
        lambda: grafted(nn.Sequential(*plain(), nn.Linear(3, 3))), sgd, r"'6.weight' is not in the checkpoint, as are",
    ),
    "another precision": (lambda: grafted(plain()).double(), sgd, r"float32 in the checkpoint and .*float64 here"),
    "fewer slots": (lambda: grafted(plain(), {"first": "0"}), sgd, r"slots first, second; this body has first. Graft"),
    "other names": (lambda: grafted(plain(), ["0", "2"]), sgd, r"has slots first, second; this body has 0, 2"),
    "another order": (lambda: grafted(plain(), {"second": "2", "first": "0"}), sgd, r"this body has second, first"),
    "another place": (lambda: grafted(plain(), {"first": "0", "second": "2.0"}), sgd, r"'second' follows '2', .*'2.0'"),
    "other blueprints": (
        lambda: grafted(plain(), blueprints=["norm", "bottleneck"]), sgd, r"is not among the blueprints that this body",
    ),
    "another optimiser": (make_body, lambda b: optim.Adam(b.parameters()), r"saved with SGD, this optimiser is Adam"),
    "more groups": (make_body, halves, r"had 2 groups of parameters, the seeds' included; this one has 3"),
    "fewer parameters": (
        make_body, lambda b: optim.SGD(list(b.parameters())[1:], lr=0.05, momentum=0.9),
        r"group 0 of the optimiser holds 'model.0.0.weight' in the checkpoint only",
    ),
    "parameters of others": (
        make_body, lambda b: optim.SGD([*b.parameters(), nn.Parameter(torch.zeros(2))], lr=0.05, momentum=0.9),
        r"group 0 of the optimiser holds 'outside.0.0' here only",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("saved")
    grown(where)
    return where


@pytest.mark.parametrize("case", MISFITS)
@pytest.mark.parametrize("fresh", [True, False])
def test_mismatching_save_is_refused_with_nothing_changed(case, fresh, saved):
    build, optimiser, text = MISFITS[case]
    body = build()
    grower = Grower(body, optimiser(body), rules=EASY, gradient_telemetry_stride=3, controller="none")
    if not fresh:
        dtype = next(body.parameters()).dtype
        grower.germinate("first" if "first" in body.slots else "0", "norm")
        for i in range(2):
            loss(body(batch(i)[0].to(dtype)), batch(i)[1]).backward()
            grower.optimizer.step()
        grower.step()
    before = state_hashes(grower)

    with pytest.raises(CheckpointError, match=text) as error:
        grower.load(saved)

    assert state_hashes(grower) == before
    assert str(error.value).startswith(f"cannot load {saved}")
    assert str(error.value).endswith("Nothing was changed.")


FORGED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "format": (lambda t: t.update(format=1), "it has format 1, this version of Esper reads format 2"),
    "kind of a field": (lambda t: t.update(batches="many"), r"valid state of a grower: Expected `int`, got `str`"),
    "further field": (lambda t: t.update(more=1), "not a valid state of a grower: .*unknown field `more`"),
    "column": (lambda t: t["table"].pop("age"), "its table differs in column 'age'"),
    "column's shape": (lambda t: t["table"].update(age=np.zeros((1, 3), np.int32)), r"\(1, 3\) for 'age', expected"),
    "stage": (lambda t: t["table"]["stage"].fill(77), "stages that do not exist"),
    "seed": (lambda t: t["table"]["stage"].fill(0), "disagree on the seed in 'first'"),
    "operator": (lambda t: t["slots"]["first"].update(operator=9), "9 is not a valid Operator"),
    "fork": (lambda t: t["slots"]["first"].update(fork=(True, "nowhere")), "modules or slots that do not exist"),
    "sample": (lambda t: t["sampled"].update(third=torch.zeros(3)), "modules or slots that do not exist"),
    "torch's generator": (lambda t: t["rng_states"].update(torch=torch.zeros(3)), "random generator is not valid"),
    "numpy's generator": (lambda t: t["rng_states"].update(numpy={"state": 1}), "random generator is not valid"),
    "Python's generator": (lambda t: t["rng_states"].update(python=(3, (1, 2), None)), "random generator is not valid"),
    "optimiser's shape": (
        lambda t: t["optimizer"]["shapes"].update({"model.0.0.bias": (7,)}), r"'model.0.0.bias' of shape \(7,\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_forged_save_with_a_valid_checksum_is_refused_with_nothing_changed(case, saved, tmp_path):
    forge, text = FORGED[case]
    true = Checkpoints(saved).newest()
    tree = unpacked(true.document("grower"), true.tensors("grower"))
    forge(tree)
    document, tensors = packed(tree)
    parts = {"body": true.tensors("body"), "gradients": true.tensors("gradients"), "grower": tensors}
    Checkpoints(tmp_path).write("forged", tensors=parts, documents={"grower": document}, kind="body")
    grower = maker()()[0]
    before = state_hashes(grower)
    with pytest.raises(CheckpointError, match=text):
        grower.load(tmp_path)
    assert state_hashes(grower) == before


def test_body_part_of_a_save_loads_as_a_state_dict(saved):
    again = Loop(maker(), lifecycle_script())
    again.load(saved)
    body = make_body()
    body.load_state_dict(Checkpoints(saved).newest().tensors("body"))
    assert torch.equal(body.eval()(batch(3)[0]), again.grower.body.eval()(batch(3)[0]))


@pytest.mark.parametrize(
    ("controller", "state"), [(Heuristic(), {"settled": 3}), (Random(), {}), (Random(), {"rng": 3})]
)
def test_controller_refuses_a_foreign_state(controller, state):
    before = digest(controller.state_dict())
    with pytest.raises(ConfigError, match="is not one of a"):
        controller.load_state_dict(state)
    assert digest(controller.state_dict()) == before


def test_save_replaces_whatever_had_grown(saved):
    again = Loop(maker(), lifecycle_script())
    again.grower.germinate("second", "norm")
    again.grower.germinate("first", "attention")
    effects: list[str] = []
    again.grower.on_change(lambda effect, slot: effects.append(f"{effect.kind.name} {slot.name}"))
    again.load(saved)
    assert effects == ["BUILD first", "BUILD second"]

    fresh = Loop(maker(), lifecycle_script())
    fresh.load(saved)
    assert state_hashes(again.grower) == state_hashes(fresh.grower)


def test_save_of_a_bare_body_removes_growth_and_notifies_listeners(tmp_path):
    maker()()[0].save(tmp_path)
    grower = maker()()[0]
    grower.germinate("second", "norm")
    effects: list[str] = []
    grower.on_change(lambda effect, slot: effects.append(f"{effect.kind.name} {slot.name}"))
    with pytest.warns(UserWarning, match="no seed in second: the seeds there are removed"):
        grower.load(tmp_path)
    assert effects == ["DROP second"]
    assert grower.slots["second"].stage == SeedStage.DORMANT
    grower.germinate("second", "norm")


def test_changed_arguments_are_reported_and_used(saved):
    rules = esper.Rules(**{f: getattr(EASY, f) for f in EASY.__struct_fields__} | {"max_seeds": 3})
    grower = maker(rules=rules, incubation="shadow", controller="heuristic", rng_seed=4)()[0]
    with pytest.warns(UserWarning, match="settings differ from those of the checkpoint") as warned:
        grower.load(saved)
    text = " ".join(str(w.message) for w in warned)
    for difference in (
        "controller was 'Wait', is 'Heuristic'",
        "incubation was 'straight_through', is 'shadow'",
        "rng_seed was 0, is 4",
        "rules.max_seeds was 0, is 3",
    ):
        assert difference in text
    assert text.count(" was ") == 4
    assert grower.rules.max_seeds == 3
    assert grower.body.incubation == "shadow"


def test_state_that_the_controller_refuses_changes_nothing(tmp_path, monkeypatch):
    def refuse(_state: Any) -> None:
        raise ConfigError("the state is of another controller.")

    grower = maker(controller="heuristic")()[0]
    grower.step()
    grower.save(tmp_path)
    other = maker(controller="heuristic")()[0]
    monkeypatch.setattr(other.controller, "load_state_dict", refuse)
    before = state_hashes(other)
    with pytest.raises(CheckpointError, match="of another controller"):
        other.load(tmp_path)
    assert state_hashes(other) == before


def test_state_of_a_controller_that_has_none_now_is_refused(tmp_path):
    grower = maker(controller="heuristic")()[0]
    grower.step()
    grower.save(tmp_path)
    stateless = type("Heuristic", (Wait,), {})
    other = maker(controller=stateless())()[0]
    before = state_hashes(other)
    with pytest.raises(CheckpointError, match="its controller 'Heuristic' had a state"):
        other.load(tmp_path)
    assert state_hashes(other) == before


def test_trained_policy_takes_over_a_grown_body(saved):
    again = Loop(maker(), lifecycle_script())
    again.load(saved)
    body = make_body()
    body.load_state_dict(again.grower.body.state_dict())
    grower = Grower(body, sgd(body), controller="tamiyo")
    bare = make_body()
    fresh = Grower(bare, sgd(bare), controller="tamiyo")
    assert grower.controller.context.host_macs == fresh.controller.context.host_macs
    assert grower.controller.context.host_params == fresh.controller.context.host_params
    with pytest.warns(UserWarning, match="the model lies outside what the policy was trained on.*number of slots"):
        grower.step([batch(1)])


# -- custom blueprints


def zero_conv(dim: int) -> nn.Module:
    layer = nn.Conv2d(dim, dim, 1)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    names: list[str] = []

    def one(name: str, factory: Callable[[int], nn.Module] = zero_conv) -> None:
        esper.blueprint(name, layouts="map")(factory)
        names.append(name)

    one.forget = lambda name: (names.remove(name), unregister(name))  # type: ignore[attr-defined]
    yield one
    for name in names:
        unregister(name)


def test_custom_seed_is_restored_and_an_unknown_one_is_named(register, tmp_path):
    grower = maker()()[0]
    register("mine")  # after the grower was built
    grower.germinate("second", "mine")
    grower.save(tmp_path)

    again = maker()()[0]
    again.load(tmp_path)
    assert state_hashes(again) == state_hashes(grower)

    register.forget("mine")
    other = maker()()[0]
    before = state_hashes(other)
    with pytest.raises(CheckpointError, match=r"seed of blueprint 'mine' in slot 'second', which is not registered"):
        other.load(tmp_path)
    assert state_hashes(other) == before

    register("mine", lambda dim: nn.Sequential(nn.Conv2d(dim, dim, 1), zero_conv(dim)))
    with pytest.raises(CheckpointError, match=r"'esper\.second\.seed\.\w+' is only in the checkpoint"):
        other.load(tmp_path)
    register.forget("mine")
    register("mine", lambda dim: nn.Conv2d(dim, dim, 1))
    with pytest.raises(CheckpointError, match="Δ is not zero at birth"):
        other.load(tmp_path)
    assert state_hashes(other) == before


def test_blueprints_with_other_numbers_are_refused(register, tmp_path):
    register("mine")
    grower = maker()()[0]
    grower.germinate("second", "mine")
    grower.save(tmp_path)
    register.forget("mine")
    register("other")
    register("mine")
    with pytest.raises(
        CheckpointError, match=r"blueprint 'mine' had number 13, here it has 14. Register .* same order"
    ):
        maker()()[0].load(tmp_path)


def test_unused_blueprint_may_be_missing_and_is_no_choice_then(register, tmp_path):
    register("mine")
    maker()()[0].save(tmp_path)
    register.forget("mine")
    again = maker()()[0]
    again.load(tmp_path)
    assert not again.table.takes[:, 13].any()
    assert again.table.takes[:, 1].all()


# -- further state


def test_gradients_are_saved_and_none_take_no_space(tmp_path):
    loop = grown(tmp_path / "with", "TRAINING, between backward and step")
    loop.grower.optimizer.zero_grad()
    loop.save(tmp_path / "without")
    sizes = [sum(f.stat().st_size for f in p.rglob("grad*")) for p in (tmp_path / "with", tmp_path / "without")]
    assert sizes[0] > 1000 > sizes[1]


def test_sparse_gradient_is_refused_with_a_remedy(tmp_path):
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 3))
    body = esper.graft(model, at=["2"], probe=torch.zeros(3, 2, dtype=torch.long))
    grower = Grower(body, optim.SGD(body.parameters(), lr=0.1), controller="none")
    body(torch.zeros(3, 2, dtype=torch.long)).sum().backward()
    with pytest.raises(CheckpointError, match=r"gradient of 'model.0.weight' is sparse.*zero_grad"):
        grower.save(tmp_path)
    grower.optimizer.zero_grad()
    grower.save(tmp_path)


def test_frozen_parameters_and_eval_modes_are_kept(tmp_path):
    def frozen(loop: Loop) -> list[bool]:
        return [p.requires_grad for p in loop.grower.body.parameters()]

    loop = grown(tmp_path, "FOSSILIZED, and one on its way out")
    loop.grower.body.model[0].requires_grad_(False).eval()
    for p in loop.grower.body.slots["first"].parameters():
        p.requires_grad_(False)
    loop.save(tmp_path)
    again = Loop(maker(), lifecycle_script())
    again.load(tmp_path)
    assert frozen(again) == frozen(loop)
    assert not again.grower.body.model[0][1].training
    assert again.grower.body.model[2][1].training


def test_optimiser_state_of_higher_precision_is_not_rounded(tmp_path):
    grower = maker("adamw")()[0]
    loss(grower.body(batch(0)[0]), batch(0)[1]).backward()
    grower.optimizer.step()
    p = next(grower.body.parameters())
    grower.optimizer.state[p]["exp_avg"] = grower.optimizer.state[p]["exp_avg"].double() / 3
    grower.save(tmp_path)
    again = maker("adamw")()[0]
    again.load(tmp_path)
    momentum = again.optimizer.state[next(again.body.parameters())]["exp_avg"]
    assert momentum.dtype == torch.float64
    assert torch.equal(momentum, grower.optimizer.state[p]["exp_avg"])


def test_parameters_find_their_state_by_name_in_any_order(saved):
    again = Loop(maker(), lifecycle_script())
    again.load(saved)
    body = make_body()
    turned = Grower(
        body,
        optim.SGD(list(body.parameters())[::-1], lr=0.05, momentum=0.9),
        rules=EASY,
        gradient_telemetry_stride=3,
        controller="none",
    )
    turned.load(saved)
    assert state_hashes(turned) == state_hashes(again.grower)


def test_parameters_outside_the_body_keep_their_state(tmp_path):
    def make() -> tuple[Grower, nn.Parameter]:
        body, own = make_body(), nn.Parameter(torch.ones(3))
        return Grower(body, optim.AdamW([*body.parameters(), own]), rules=EASY, controller="none"), own

    grower, own = make()
    grower.germinate("first", "norm")
    (loss(grower.body(batch(0)[0]) * own, batch(0)[1])).backward()
    grower.optimizer.step()
    grower.save(tmp_path, extra={"own": own})
    again, mine = make()
    with torch.no_grad():
        mine.copy_(again.load(tmp_path)["own"])
    assert torch.equal(again.optimizer.state[mine]["exp_avg"], grower.optimizer.state[own]["exp_avg"])
    assert torch.equal(mine, own)


def test_extra_is_returned_unchanged(tmp_path):
    grower = maker()()[0]
    stream = torch.Generator().manual_seed(5)
    torch.rand(3, generator=stream)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    extra = {
        "epoch": 3, "best": (0.5, float("nan")), 7: None, "scaler": scaler.state_dict(), "stream": stream.get_state(),
        "order": np.arange(5),
    }  # fmt: skip
    grower.save(tmp_path, extra=extra)
    loaded = maker()()[0].load(tmp_path)
    assert digest(loaded).__repr__() == digest(extra).__repr__()
    grower.save(tmp_path)
    assert maker()()[0].load(tmp_path) is None


# -- telemetry


class FlushRecorder(EventList):
    """Records when it is flushed, as the hub is."""

    def flush(self) -> bool:
        self.append("flushed")
        return True


def test_events_reach_the_disk_before_the_save_which_is_an_event_itself(tmp_path):
    hub = FlushRecorder()
    grower = maker(telemetry=hub)()[0]
    grower.step()
    path = grower.save(tmp_path)
    *_, flushed, event = hub
    assert flushed == "flushed"
    assert (event.path, event.reason) == (str(path), "requested")
    assert event.size_bytes == sum(f.stat().st_size for f in path.iterdir())
    assert event.write_ms > 0


def test_recorded_run_reports_its_saves(tmp_path):
    with esper.record("mine", out=tmp_path / "run") as run:
        grower = maker(telemetry=run.hub)()[0]
        grower.step()
        grower.save(tmp_path / "saves")
    kinds = [entry.kind for entry in read(tmp_path / "run")]
    assert kinds.index("checkpoint") > kinds.index("step")


# -- the state as a dict, for checkpoints of training libraries


def trained_grower(batches: int) -> Grower:
    """Return a grower after some batches with a seed of each kind of growth: blending, and with a gate."""
    seed_generators()
    body = make_body()
    grower = Grower(
        body, optim.AdamW(body.parameters(), lr=1e-3), rules=esper.Rules(one_at_a_time=False), controller="none"
    )
    grower.germinate("first", "conv_light")
    grower.germinate("second", "norm", style="GATED_GATE")
    train_on(grower, range(batches))
    grower.step([batch(5)])
    return grower


def train_on(grower: Grower, batches: range) -> None:
    for b in batches:
        x, y = batch(b)
        grower.optimizer.zero_grad()
        loss(grower.body(x), y).backward()
        grower.optimizer.step()
    grower.optimizer.zero_grad()


def test_state_dict_and_body_state_resume_bit_exactly(tmp_path):
    grower = trained_grower(3)
    torch.save({"body": grower.body.state_dict(), "grower": grower.state_dict()}, tmp_path / "checkpoint.pt")
    train_on(grower, range(3, 6))
    grower.step([batch(5)])
    change_generators()
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)  # no pickled class
    body = make_body()
    again = Grower(
        body, optim.AdamW(body.parameters(), lr=1e-3), rules=esper.Rules(one_at_a_time=False), controller="none"
    )
    body.load_state_dict(saved["body"])
    again.load_state_dict(saved["grower"])
    train_on(again, range(3, 6))
    again.step([batch(5)])
    assert state_hashes(again) == state_hashes(grower)


def test_load_state_dict_without_the_state_of_the_body_is_refused():
    state = trained_grower(1).state_dict()
    body = make_body()
    again = Grower(
        body, optim.AdamW(body.parameters(), lr=1e-3), rules=esper.Rules(one_at_a_time=False), controller="none"
    )
    before = state_hashes(again)
    with pytest.raises(CheckpointError, match="Load the state of the body first"):
        again.load_state_dict(state)
    with pytest.raises(CheckpointError, match="not the state of a grower"):
        again.load_state_dict({"tensors": {}})
    assert state_hashes(again) == before
