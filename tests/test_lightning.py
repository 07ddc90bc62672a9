"""Growth in Lightning, with the real library."""

import os
import subprocess
import sys
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.leyline.errors import CheckpointError, ConfigError
from esper.lightning import GrowthCallback
from tests.support import ROOT
from tests.support.controllers import Planter
from tests.support.grower import batch
from tests.support.lightning_module import Module

pytestmark = [
    # Lightning's own: few workers, small logging interval, a directory that exists, torch's pytree
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
]


class Shadowed(Module):
    calls = 0

    def shadow_loss(self, data):
        self.calls += 1
        return self.loss(data)


def fit(module, directory, *, ckpt_path=None, callbacks=(), growth=None, train=None, **options):
    L.seed_everything(0, verbose=False)
    defaults = {
        "max_epochs": 4, "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": directory, "enable_checkpointing": False,
    }  # fmt: skip
    growth = GrowthCallback() if growth is None else growth
    trainer = L.Trainer(**{**defaults, **options}, callbacks=[*callbacks, growth])
    train = DataLoader(TensorDataset(*batch(1, 64)), 16, shuffle=True) if train is None else train
    trainer.fit(module, train, DataLoader(TensorDataset(*batch(2, 32)), 16), ckpt_path=ckpt_path)
    return trainer


def assert_equal_states(a, b):
    assert a.state_dict().keys() == b.state_dict().keys()
    for name, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[name]), name


def test_callback_grows_after_each_validation_and_logs(tmp_path):
    logger = CSVLogger(tmp_path)
    module = Module()
    trainer = fit(module, tmp_path, logger=logger)
    assert list(module.body.structure()) == ["first", "second"]
    assert module.grower.controller.calls == 4  # not after the sanity check
    assert module.grower._batches == 16
    logged = [row["growth/seeds"] for row in logger.experiment.metrics if "growth/seeds" in row]
    assert logged == [1, 2, 2, 2] or trainer.loggers[0].experiment.metrics == []  # already written to the file
    assert "growth/seeds" in (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()


def test_fast_dev_run(tmp_path):
    module = Module(schedule=False)
    fit(module, tmp_path, fast_dev_run=True)
    assert module.grower.controller.calls == 1


def saving(directory, **options):
    return ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1, **options)


def test_resumed_training_is_bit_equal(tmp_path):
    options = {"enable_checkpointing": True, "gradient_clip_val": 0.5}
    whole = Module()
    fit(whole, tmp_path, callbacks=[saving(tmp_path)], **options)  # given first: Lightning moves it behind the growth
    again = Module()
    torch.manual_seed(99)
    fit(again, tmp_path, callbacks=[saving(tmp_path)], ckpt_path=tmp_path / "epoch=1.ckpt", **options)
    assert_equal_states(again, whole)
    assert again.grower.controller.calls == 4
    a, b = again.grower.optimizer.state_dict(), whole.grower.optimizer.state_dict()
    assert a["param_groups"] == b["param_groups"]
    assert all(torch.equal(a["state"][i]["exp_avg_sq"], b["state"][i]["exp_avg_sq"]) for i in b["state"])


class PositionLoader:
    """A loader that saves its position, as torchdata's StatefulDataLoader does."""

    def __init__(self):
        self.x, self.y = batch(1, 64)
        self.position = 0

    def __len__(self):
        return 4

    def __iter__(self):
        self.position %= 4
        while self.position < 4:
            rows = slice(16 * self.position, 16 * self.position + 16)
            self.position += 1
            yield self.x[rows], self.y[rows]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("when", [{"every_n_train_steps": 3}, {"save_on_train_epoch_end": False}], ids=str)
def test_resuming_within_an_epoch_is_bit_equal_if_the_loader_knows_its_position(tmp_path, when):
    """With a plain DataLoader Lightning itself begins the epoch's data again, with or without growth."""

    def run(**options):
        module = Module(schedule=False)
        checkpoint = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **when)
        options |= {"callbacks": [checkpoint], "enable_checkpointing": True, "val_check_interval": 2}
        fit(module, tmp_path, train=PositionLoader(), **options)
        return module

    whole = run()
    assert whole.grower._batches == 16
    path = tmp_path / ("step=6.ckpt" if "every_n_train_steps" in when else "step=10.ckpt")
    again = run(ckpt_path=path)
    assert list(again.body.structure()) == ["first", "second"]
    assert_equal_states(again, whole)


def test_a_checkpoint_written_during_validation_resumes_in_training_mode(tmp_path):
    """Lightning itself does not resume such a checkpoint exactly: it loses a step of the scheduler."""

    def run(module, **options):
        callbacks = [saving(tmp_path, save_on_train_epoch_end=False)]
        fit(module, tmp_path, callbacks=callbacks, enable_checkpointing=True, **options)

    run(Module(schedule=False))
    again = Module(schedule=False)
    run(again, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert list(again.body.structure()) == ["first", "second"]
    assert all(m.training for m in again.body.model.modules())


def test_checkpoint_loads_into_a_module_for_inference(tmp_path):
    module = Module()
    saving = ModelCheckpoint(tmp_path, filename="last")
    fit(module, tmp_path, callbacks=[saving], enable_checkpointing=True)
    loaded = Module.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert_equal_states(loaded, module)


def test_seeds_planted_during_validation_are_trained_in_training_mode(tmp_path):
    class Modes(Callback):
        flags = ()

        def on_after_backward(self, _trainer, module):
            self.flags += (all(m.training for m in module.body.esper.modules()),)

    modes = Modes()
    fit(Module(), tmp_path, callbacks=[modes])
    assert all(modes.flags)


def test_seeds_planted_by_the_last_validation_are_left_in_training_mode(tmp_path):
    module = Module(controller=Planter((1, 4)))
    fit(module, tmp_path)
    assert module.body.structure().keys() == {"first", "second"}
    assert all(m.training for m in module.body.modules())


def test_gradient_clip_val_clips_host_and_seeds_separately(tmp_path):
    """With an isolated seed the host's weights are those of a run without it; joint clipping would change them."""

    def host(steps, rules):
        module = Module(controller=Planter(steps), rules=rules)
        trainer = fit(module, tmp_path, gradient_clip_val=0.05)
        assert trainer.gradient_clip_val == 0.05  # given back
        return module.body

    isolated = esper.Rules(birth="isolated", auto_blend=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*LeafSpec.*")
        warnings.filterwarnings("ignore", ".*num_workers.*")
        planted = host((1,), isolated)
    assert planted.slots["first"].seed is not None
    alone = host((), isolated)
    for name, value in alone.model.state_dict().items():
        assert torch.equal(value, planted.model.state_dict()[name]), name


def test_shadow_pass_uses_the_loss_of_the_module(tmp_path):
    rules = esper.Rules(birth="isolated", auto_blend=False)
    module = Shadowed(incubation="shadow", rules=rules, controller=Planter((1,)))
    fit(module, tmp_path, accumulate_grad_batches=2)
    assert module.calls >= 8
    assert module.body.slots["first"].seed[-1].weight.abs().sum() > 0
    with pytest.raises(ConfigError, match=r"Define shadow_loss"):
        fit(Module(incubation="shadow", rules=rules), tmp_path)


def test_gradient_accumulation_and_validation_within_an_epoch(tmp_path):
    module = Module(schedule=False)
    fit(module, tmp_path, accumulate_grad_batches=3, val_check_interval=2, max_epochs=2)
    assert module.grower.controller.calls == 4
    assert module.grower._batches == 4


class Manual(Module):
    """Every second batch makes an optimiser step."""

    automatic_optimization = False

    def training_step(self, data, index):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(data) / 2)
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()


def test_manual_optimization(tmp_path):
    module = Manual(schedule=False)
    fit(module, tmp_path)
    assert module.grower._batches == 8
    assert all(slot.seed[-1].weight.abs().sum() > 0 for slot in module.body.slots.values())


def test_loading_the_state_of_the_module_gives_its_seeds_to_the_optimizer(tmp_path):
    module, other = Module(schedule=False), Module(schedule=False)
    fit(module, tmp_path)
    other.configure_optimizers()
    other.load_state_dict(module.state_dict())
    held = {p for group in other.grower.optimizer.param_groups for p in group["params"]}
    assert held == set(other.parameters())
    assert [view.stage for view in other.grower.slots.values()] == [s.stage for s in module.body.slots.values()]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_bf16(tmp_path, precision):
    module = Module()
    fit(module, tmp_path, precision=precision)
    assert len(module.body.structure()) == 2
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_batches_of_another_form_are_unpacked(tmp_path):
    class Named(Module):
        def loss(self, data):
            return super().loss((data["x"], data["y"]))

    module = Named()
    growth = GrowthCallback(unpack=lambda data: (data["x"], data["y"]), batches=1)
    L.seed_everything(0, verbose=False)
    rows = [{"x": x, "y": y} for x, y in zip(*batch(1, 32), strict=True)]
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, enable_checkpointing=False, callbacks=[growth],
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, 16), DataLoader(rows, 16))
    assert growth.report.quality >= 0


@pytest.mark.slow
def test_two_ranks_of_ddp_stay_equal_and_resume_bit_for_bit(tmp_path):
    command = [sys.executable, "-m", "tests.support.lightning_ranks", str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    first = torch.load(tmp_path / "whole-0.pt", weights_only=True)
    assert {name.split(".")[2] for name in first if name.startswith("body.esper.")} == {"first", "second", "structure"}
    for name in ("whole-1", "resumed-0", "resumed-1"):
        other = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        assert other.keys() == first.keys()
        assert all(torch.equal(other[key], first[key]) for key in first), name


# -- refusals


class TwoOptimizers(Module):
    automatic_optimization = False

    def configure_optimizers(self):
        return [super().configure_optimizers()[0][0], torch.optim.SGD(self.body.parameters(), lr=0.1)]


class NoGrower(Module):
    def configure_optimizers(self):
        return torch.optim.SGD(self.body.parameters(), lr=0.1)


class OtherOptimizer(Module):
    def configure_optimizers(self):
        super().configure_optimizers()
        return torch.optim.SGD(self.body.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (TwoOptimizers, "returned 2 optimisers; a grower serves one"),
        (NoGrower, r"set self\.grower = esper\.Grower"),
        (OtherOptimizer, "another optimiser than the one that configure_optimizers returned"),
    ],
)
def test_modules_that_cannot_grow_are_refused(tmp_path, kind, message):
    with pytest.raises(ConfigError, match=message):
        fit(kind(), tmp_path)


@pytest.mark.parametrize("callback", [StochasticWeightAveraging(1e-3), EMAWeightAveraging()])
def test_callbacks_that_average_another_structure_are_refused(tmp_path, callback):
    with pytest.raises(ConfigError, match="averages a copy of the module that has no seeds"):
        fit(Module(), tmp_path, callbacks=[callback])


def test_checkpoint_written_without_growth_is_refused_with_a_remedy(tmp_path):
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path, callbacks=[saving(tmp_path)],
    )  # fmt: skip
    data = DataLoader(TensorDataset(*batch(1, 32)), 16)
    trainer.fit(NoGrower(), data, data)
    with pytest.raises(CheckpointError, match="load the weights alone"):
        fit(
            Module(), tmp_path, ckpt_path=tmp_path / "epoch=0.ckpt", callbacks=[saving(tmp_path)],
            enable_checkpointing=True,
        )  # fmt: skip


def test_training_that_ends_before_its_first_validation_warns(tmp_path):
    with pytest.warns(UserWarning, match="nothing was grown"):
        fit(Module(schedule=False), tmp_path, max_steps=3)


def test_training_without_validation_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="Define validation_step"):
        fit(Module(), tmp_path, limit_val_batches=0)
