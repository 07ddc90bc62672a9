"""Overhead of growth in training libraries without live seeds, against the same loop without growth.

    python -m benchmarks.adapters --repeats 7

Each pair trains the same model on the same batches for the same number of steps, with one validation: Hugging Face's
Trainer and Lightning, with and without growth, and a plain loop. The growth step at the end of the epoch is included;
it measures 8 batches, the default of the adapters. Two figures are reported per loop:

  ratio   CPU time with growth over CPU time without, the median of alternating runs; sensitive to other load
  share   CPU time in the code of growth over the rest of the same run, so that other load cancels:
            hooks      of modules, optimiser and training library, in every training step
            decisions  of the growth step: table, controller, structure, reports
            measuring  forward passes of the growth step: once more the work of validating as many batches
            clipping   of host and seeds, which replaces the loop's own at the same cost

The overhead of an adapter is `hooks` + `decisions`. `measuring` is work that the user chooses by the number of batches.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import esper
from benchmarks.measure import add_output_options, make_parser, print_json, timed
from esper.grower import Grower
from esper.kasmina.slot import Slot

VOCABULARY = 96


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the model and of the training."""

    width: int = 128
    layers: int = 4
    length: int = 64
    batch: int = 16
    steps: int = 40
    val_batches: int = 8

    def tokens(self, batches: int) -> Tensor:
        """Return the rows of this many batches."""
        draw = torch.Generator().manual_seed(0)
        return torch.randint(0, VOCABULARY, (batches * self.batch, self.length), generator=draw)


def make_model(size: Size) -> Any:
    """Return a small GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=size.length, n_embd=size.width, n_layer=size.layers, n_head=4,
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def make_body(size: Size) -> esper.Body:
    """Return the same model with a slot after each block."""
    return esper.graft(make_model(size), at="transformer.h.*", probe={"input_ids": size.tokens(1)[:4]})


def plain_loop(size: Size, growing: bool) -> Callable[[], None]:
    """Return a function that trains in a plain loop."""
    model: Any = make_body(size) if growing else make_model(size)
    optimizer = torch.optim.AdamW(model.parameters())
    grower = esper.Grower(model, optimizer, quality="next_token_accuracy", controller="none") if growing else None
    train = size.tokens(size.steps).split(size.batch)
    val = size.tokens(size.val_batches).split(size.batch)

    def run() -> None:
        model.train()
        for ids in train:
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0) if grower is None else grower.clip_grad_norm_(1.0)
            optimizer.step()
        with torch.no_grad():
            for ids in val:
                model(input_ids=ids, labels=ids)
        if grower is not None:
            grower.step([{"input_ids": ids, "labels": ids} for ids in val])

    return run


def trainer(size: Size, growing: bool) -> Callable[[], None]:
    """Return a function that trains with Hugging Face's Trainer."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from esper.hf import GrowthTrainer

    def rows(batches: int) -> list[dict[str, Tensor]]:
        return [{"input_ids": ids, "labels": ids} for ids in size.tokens(batches)]

    args = TrainingArguments(
        tempfile.mkdtemp(), num_train_epochs=1, per_device_train_batch_size=size.batch, eval_strategy="epoch",
        per_device_eval_batch_size=size.batch, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    data: dict[str, Any] = {"train_dataset": rows(size.steps), "eval_dataset": rows(size.val_batches)}
    if growing:
        growth = {"controller": "none", "quality": "next_token_accuracy"}
        trainer: Any = GrowthTrainer(model=make_body(size), args=args, growth=growth, **data)
    else:
        trainer = Trainer(model=make_model(size), args=args, **data)
    trainer.remove_callback(PrinterCallback)
    return lambda: trainer.train()


def lightning(size: Size, growing: bool) -> Callable[[], None]:
    """Return a function that trains with Lightning."""
    import lightning as L
    from torch.utils.data import DataLoader

    from esper.lightning import GrowthCallback

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body: Any = make_body(size) if growing else make_model(size)

        def training_step(self, ids: Tensor, _index: int) -> Tensor:
            return self.body(input_ids=ids, labels=ids).loss

        def validation_step(self, ids: Tensor, _index: int) -> None:
            self.log("val_loss", self.body(input_ids=ids, labels=ids).loss)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.body.parameters())
            if growing:
                self.grower = esper.Grower(self.body, optimizer, quality="next_token_accuracy", controller="none")
            return optimizer

    growth = GrowthCallback(batches=size.val_batches, unpack=lambda ids: {"input_ids": ids, "labels": ids})
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, gradient_clip_val=1.0, num_sanity_val_steps=0,
        callbacks=[growth] if growing else [],
    )  # fmt: skip
    loaders: list[Any] = [DataLoader(list(size.tokens(n)), size.batch) for n in (size.steps, size.val_batches)]  # type: ignore[arg-type]
    return lambda: trainer.fit(Module(), *loaders)


class Shares:
    """CPU seconds spent in each function of growth, without those of growth that it calls."""

    def __init__(self) -> None:
        self.seconds = {"hooks": 0.0, "decisions": 0.0, "measuring": 0.0, "clipping": 0.0}
        self._running: list[str] = []
        self._since = 0.0

    def timed(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time added to a kind."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._book()
            self._running.append(kind)
            try:
                return function(*args, **kwargs)
            finally:
                self._book()
                self._running.pop()

        return run

    def _book(self) -> None:
        """Add the time since the last call to the function that runs now."""
        now = time.process_time()
        if self._running:
            self.seconds[self._running[-1]] += now - self._since
        self._since = now

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Record the time of every function of growth that a loop calls within the context."""
        from esper.hf import GrowthTrainerMixin
        from esper.lightning import GrowthCallback

        hooks = ("on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "on_validation_batch_end")
        places: list[tuple[str, Any, str]] = [
            ("decisions", Grower, "step"), ("decisions", GrowthTrainerMixin, "grow"),
            ("decisions", GrowthCallback, "on_validation_end"), ("measuring", Grower, "_evaluate"),
            ("clipping", Grower, "clip_grad_norm_"), ("hooks", Grower, "_before_step"), ("hooks", Slot, "after"),
            *(("hooks", GrowthCallback, name) for name in hooks),
        ]  # fmt: skip
        before = [getattr(owner, name) for _, owner, name in places]
        for (kind, owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, self.timed(kind, function))
        try:
            yield
        finally:
            for (_, owner, name), function in zip(places, before, strict=True):
                setattr(owner, name, function)


def measure_shares(loop: Callable[[Size, bool], Callable[[], None]], size: Size) -> dict[str, float]:
    """Return the CPU time of growth in one run of a loop over the rest, by kind. The first run warms up."""
    for _ in range(2):
        shares = Shares()
        with shares.installed():
            total = timed(loop(size, True))
    rest = total - sum(shares.seconds.values())
    return {kind: seconds / rest for kind, seconds in shares.seconds.items()}


LOOPS = {"plain loop": plain_loop, "Trainer": trainer, "Lightning": lightning}


def measure(size: Size, repeats: int) -> dict[str, float]:
    """Return per library the median time with growth over the time without. Building is not timed."""
    ratios: dict[str, list[float]] = {name: [] for name in LOOPS}
    for i in range(repeats + 1):
        for name, loop in LOOPS.items():
            order = (True, False) if i % 2 else (False, True)
            seconds = {growing: timed(loop(size, growing)) for growing in order}
            ratios[name].append(seconds[True] / seconds[False])
    return {name: statistics.median(each[1:]) for name, each in ratios.items()}  # the first warms up


def shown(shares: dict[str, float]) -> str:
    return ", ".join(f"{kind} {100 * share:.2f} %" for kind, share in shares.items())


def main() -> None:
    parser = make_parser(__doc__, repeats=7)
    parser.add_argument("--shares", action="store_true", help="measure the shares only")
    parser.add_argument("--steps", type=int, default=Size().steps, help="optimiser steps per growth step")
    add_output_options(parser)
    options = parser.parse_args()
    size = Size(width=32, layers=1, length=8, batch=4, steps=3) if options.quick else Size(steps=options.steps)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    shares = {name: measure_shares(loop, size) for name, loop in LOOPS.items()}
    if options.shares:
        print("\n".join(f"{name:<12} share of {shown(each)}" for name, each in shares.items()))
        return
    ratios = measure(size, options.repeats)
    if options.json:
        print_json({"ratios": ratios, "shares": shares})
        return
    for name, ratio in ratios.items():
        print(f"{name:<12} with growth / without: {ratio:.3f}   share of {shown(shares[name])}")


if __name__ == "__main__":
    main()
