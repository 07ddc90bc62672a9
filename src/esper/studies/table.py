"""The tables of studies, of growth and of settings: one row per study. Add a study by adding a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from esper.leyline.errors import unknown_name
from esper.simic.rewards import REWARDS
from esper.simic.training.config import HELD_OUT_FROM
from esper.studies import arms as _registered  # noqa: F401  registers the trainers
from esper.studies.contract import Arm, Claim, Study
from esper.studies.simulated_policies import SettingsStudy

FULL = {"structure": "full"}
"""The largest blueprint in every slot of the task."""
HOST_ONLY = {"structure": "none"}
"""The host without seeds."""
LIMIT: dict[str, Any] = {"limit": 0.7}
"""Limit of multiply-adds per sample, as a share of the full structure's: 110,622 for `rescue`."""

WEAK: dict[str, Any] = {"weak": "kernel"}
"""One block of the host sees single pixels only; the world draws which one."""


def _planted(name: str, birth: str, start: int, ramp: int = 0, **further: Any) -> Arm:
    settings = {**FULL, "birth": birth, "start": start, "open_ramp": ramp, **further}
    return Arm(name=name, kind="planted", settings=settings)


def _placed(name: str, **settings: Any) -> Arm:
    return Arm(name=name, kind="placed", settings={**WEAK, "start": 4, **settings})


def _candidates(arm: Arm, **choices: Sequence[Any]) -> tuple[Arm, ...]:
    """Return an arm, then arms that differ from it in one setting each, named for it, such as `start_16`."""
    others = [(setting, value) for setting, values in choices.items() for value in values]
    return (
        arm,
        *(
            Arm(name=f"{setting}_{value}".replace(".", "_"), kind=arm.kind, settings={**arm.settings, setting: value})
            for setting, value in others
        ),
    )


def _chosen(arm: Arm) -> tuple[Arm, ...]:
    """Return the structure that an arm chooses in each world from step 0, and the host alone for as many steps."""
    settings = {"choice": arm.kind, **arm.settings}
    return (
        Arm(name="same_structure", kind="chosen", settings={**settings, "equal": "compute"}),
        Arm(name="equal_steps", kind="chosen", settings={**settings, "equal": "steps"}),
        Arm(name="no_growth", kind="chosen", settings={**settings, **HOST_ONLY, "equal": "steps"}),
    )


def _static(name: str, **settings: Any) -> Arm:
    return Arm(name=name, kind="static", settings=settings)


def _references(**situation: Any) -> tuple[Arm, ...]:
    """Return the arms that most growth is compared with, in the same situation (see `arms.SITUATION`)."""
    return (_static("from_start", **FULL, **situation), _static("small_host", **HOST_ONLY, **situation))


def _equal_steps(*epochs: int, **situation: Any) -> tuple[Arm, ...]:
    """Return the full structure from step 0, and the host alone, for as many epochs as a grown arm at each budget.

    The grown arm of a study has the same epochs on all of its tasks: costs of seeds relative to the host are alike.
    """
    return (
        _static("equal_steps", **FULL, epochs=[*epochs], **situation),
        _static("no_growth", **HOST_ONLY, epochs=[*epochs], **situation),
    )


def _larger_hosts(deeper: dict[str, Any] | None = None, **situation: Any) -> tuple[Arm, ...]:
    """Return hosts as large as the full structure, without seeds. `deeper` has further settings of the deeper one."""
    wider = _static("wider_host", host="wider", **situation)
    return wider, _static("deeper_host", host="deeper", **situation, **(deeper or {}))


_LARGER_CLAIMS = tuple(Claim(arm="grown", against=against) for against in ("wider_host", "deeper_host"))
_GROWN_CLAIMS = tuple(Claim(arm="grown", against=against) for against in ("from_start", "small_host"))
_STEPS_CLAIMS = tuple(Claim(arm="grown", against=against, at="equal steps") for against in ("equal_steps", "no_growth"))
_AUDITION = Arm(name="audition", kind="audition", settings={**LIMIT, "start": 4, "trial": 0.025, "keep": 0.6})
_SEARCHES = (
    Arm(name="random_search", kind="random_search", settings=LIMIT),
    Arm(name="successive_halving", kind="halving", settings=LIMIT),
    _AUDITION,
)
_TRAINED = 250
"""Epochs that a model was trained for before a study of trained models begins."""
_TRAINED_GROWN = _planted("grown", "open", 0, slots=1, pretrain=_TRAINED)
_TRAINED_ARMS = (
    _static("restart", **FULL, slots=1),
    *_larger_hosts(seeds=1),
    _static("continued", pretrain=_TRAINED),
    _TRAINED_GROWN,
    # `restart` has as many new steps as `grown`; these have as many in all
    _static("equal_steps", **FULL, slots=1, epochs=[_TRAINED + 46, _TRAINED + 93]),
    _static("no_growth", **HOST_ONLY, pretrain=_TRAINED, epochs=[46, 93]),
)
_SEARCH_CLAIMS = tuple(Claim(arm="audition", against=other) for other in ("random_search", "successive_halving"))


def _trained_claims(arm: str) -> tuple[Claim, ...]:
    """Return the claims that an arm which grows a trained model has a lower loss than every other way."""
    compute = ("restart", "wider_host", "deeper_host", "continued")
    steps = ("equal_steps", "no_growth")
    return (
        *(Claim(arm=arm, against=against, direction="lower") for against in compute),
        *(Claim(arm=arm, against=against, at="equal steps", direction="lower") for against in steps),
    )


_CHEAPER_SEARCH_CLAIMS = tuple(
    Claim(arm="audition", budget=budget, against=other, against_budget=4.0)
    for budget in (1.0, 2.0)
    for other in ("random_search", "successive_halving")
)

_OPEN = _planted("open_birth", "open", 8)
_AT_THE_CHANGE = _planted("grown", "open", 20, change=20)
_FEW_SAMPLES = _planted("grown", "open", 8, samples=1000)
_PLACED_BY_TRIALS = _placed("grown", trial=2)
_BUDGETED = _planted("grown", "open", 4)
_DEEPENED = _planted("grown", "open", 50)

_ROWS = (
    Study(
        name="open_birth",
        question="Is it cheaper to add the structure I want during training than to train it from step 0?",
        task=("rescue", "search_cifar"),
        arms=(
            *_references(),
            *_equal_steps(14, 17, 25, 33),
            *_larger_hosts(),
            _planted("isolated_birth", "isolated", 1),
            _OPEN,
            _planted("open_birth_late", "open", 16),
            _planted("open_birth_ramped", "open", 8, ramp=8),
            _planted("ramp_from_start", "open", 0, ramp_share=0.5),
        ),
        candidates=_candidates(_OPEN, start=(4, 16), open_ramp=(8,)),
        budgets=(0.1, 0.2, 0.4, 0.6),
        worlds=(100, 16),
        claims=(
            Claim(arm="open_birth", against="from_start"),
            Claim(arm="open_birth_late", against="from_start"),
            Claim(arm="ramp_from_start", against="from_start"),
            Claim(arm="open_birth_ramped", against="open_birth"),
            Claim(arm="open_birth", against="small_host"),
            Claim(arm="open_birth", against="wider_host"),
            Claim(arm="open_birth", against="deeper_host"),
            Claim(arm="open_birth", against="isolated_birth"),
            Claim(arm="open_birth", against="from_start", at="frontier area"),
            Claim(arm="open_birth", against="equal_steps", at="equal steps"),
            Claim(arm="open_birth", against="no_growth", at="equal steps"),
        ),
        min_worlds=16,
    ),
    Study(
        name="structure_search",
        question="I do not know which structure I need: does a host that tries seeds on copies of itself find it?",
        task=("search_fashion", "search_cifar"),
        arms=_SEARCHES,
        candidates=_candidates(_AUDITION, keep=(0.4, 0.8), trial=(0.0125, 0.05)),
        budgets=(1.0, 2.0, 4.0),
        worlds=(200, 16),
        claims=(*_SEARCH_CLAIMS, *_CHEAPER_SEARCH_CLAIMS),
        min_worlds=16,
    ),
    Study(
        name="search_or_enlarge",
        question="I have a limit on the size of the network: is a search for seeds better than a wider or deeper host?",
        task=("search_fashion", "search_cifar"),
        arms=(*_larger_hosts(**LIMIT), _AUDITION),
        budgets=(1.0, 2.0, 4.0),
        worlds=(200, 8),
        claims=tuple(Claim(arm="audition", against=against) for against in ("wider_host", "deeper_host")),
        min_worlds=8,
    ),
    Study(
        name="long_search",
        question="The same at eight full trainings.",
        task=("search_fashion", "search_cifar"),
        arms=_SEARCHES,
        budgets=(8.0,),
        worlds=(200, 8),
        claims=_SEARCH_CLAIMS,
        min_worlds=8,
    ),
    Study(
        name="task_change",
        question="New classes arrive during training: is it cheaper to add the structure then?",
        task=("rescue", "search_cifar"),
        arms=(
            *_references(change=20),
            *_equal_steps(41, 49, 61, change=20),
            _static("restart", **FULL),  # the full structure, trained on all classes from its step 0
            *_larger_hosts(change=20, deeper=HOST_ONLY),
            _AT_THE_CHANGE,
            _planted("grown_early", "open", 16, change=20),  # what tuning chose after the study of `grown`
        ),
        candidates=_candidates(_AT_THE_CHANGE, start=(16, 24)),
        budgets=(0.5, 0.7, 1.0),
        worlds=(100, 8),
        claims=(
            *_GROWN_CLAIMS,
            *_LARGER_CLAIMS,
            Claim(arm="grown", against="restart"),
            *_STEPS_CLAIMS,
            *(
                Claim(arm="grown_early", against=against)
                for against in ("from_start", "small_host", "wider_host", "deeper_host", "restart", "grown")
            ),
        ),
        min_worlds=8,
    ),
    Study(
        name="little_data",
        question="I have 1,000 samples: does a network that grew generalise better?",
        task=("rescue", "search_cifar"),
        arms=(
            *_references(samples=1000),
            *_equal_steps(17, 25, 41, samples=1000),
            *_larger_hosts(samples=1000, deeper=HOST_ONLY),
            _FEW_SAMPLES,
        ),
        candidates=_candidates(_FEW_SAMPLES, start=(4, 16, 24)),
        budgets=(0.2, 0.4, 0.8),
        worlds=(100, 8),
        claims=(*_GROWN_CLAIMS, *_LARGER_CLAIMS, *_STEPS_CLAIMS),
        min_worlds=8,
    ),
    Study(
        name="weak_spot",
        question="One block of my network is a bottleneck, and I do not know which: does growth find and mend it?",
        task=("rescue", "search_cifar"),
        arms=(
            *_larger_hosts(**WEAK, seeds=1),
            _static("small_host", **WEAK),
            _static("from_start", **FULL, **WEAK),
            *(_placed(f"slot_{slot}", slot=slot) for slot in range(3)),
            _PLACED_BY_TRIALS,
            *_chosen(_PLACED_BY_TRIALS),
        ),
        candidates=_candidates(_PLACED_BY_TRIALS, start=(2, 8), trial=(1, 4)),
        budgets=(0.2, 0.4),
        worlds=(100, 8),
        claims=(
            *(
                Claim(arm="grown", against=against)
                for against in (
                    "small_host",
                    "from_start",
                    "wider_host",
                    "deeper_host",
                    "slot_0",
                    "slot_1",
                    "slot_2",
                    "same_structure",
                )
            ),
            *_STEPS_CLAIMS,
        ),
        min_worlds=8,
    ),
    Study(
        name="trained_model",
        question="I have a trained model that no longer improves: is it cheaper to grow it than to train a larger one?",
        task=("moby_deep", "sotu_deep"),
        arms=_TRAINED_ARMS,
        candidates=_candidates(_TRAINED_GROWN, slots=(2, 3)),
        budgets=(0.25, 0.5),
        worlds=(100, 8),
        metric="test_loss",
        claims=_trained_claims("grown"),
        min_worlds=8,
    ),
    Study(
        name="copied_birth",
        question="I grow a trained language model by a layer: should the layer start as a copy of a trained one?",
        task=("moby_deep", "sotu_deep"),
        arms=(
            *_TRAINED_ARMS,
            _planted("grown_by_copy", "open", 0, slots=1, pretrain=_TRAINED, copied="blocks.0"),
        ),
        budgets=(0.25, 0.5),
        worlds=(100, 8),
        metric="test_loss",
        claims=(
            Claim(arm="grown_by_copy", against="grown", direction="lower"),
            *_trained_claims("grown_by_copy"),
        ),
        min_worlds=8,
    ),
    Study(
        name="unknown_budget",
        question="I do not know how long I can train: which network is good at every budget?",
        task=("rescue", "rescue_cifar"),
        arms=(
            *_references(),
            *_equal_steps(6, 9, 10, 13, 21),
            *_larger_hosts(),
            _BUDGETED,
        ),
        candidates=_candidates(_BUDGETED, start=(2, 8)),
        budgets=(0.025, 0.05, 0.1, 0.2, 0.4),
        worlds=(100, 8),
        claims=(
            Claim(arm="grown", against="from_start", at="frontier area"),
            Claim(arm="grown", against="small_host", at="frontier area"),
            Claim(arm="grown", against="wider_host", at="frontier area"),
            Claim(arm="grown", against="deeper_host", at="frontier area"),
            *_GROWN_CLAIMS,
            *_LARGER_CLAIMS,
            *_STEPS_CLAIMS,
        ),
        min_worlds=8,
    ),
    Study(
        name="language_model",
        question="Is a deep language model cheaper to train if most of its layers are added during training?",
        task=("moby_deep", "sotu_deep"),
        arms=(
            *_references(),
            *_equal_steps(61, 72, 97),
            *_larger_hosts(),
            _DEEPENED,
        ),
        candidates=_candidates(_DEEPENED, start=(25, 75)),
        budgets=(0.25, 0.5, 1.0),
        worlds=(100, 8),
        metric="test_loss",
        claims=tuple(
            msgspec.structs.replace(claim, direction="lower", budget=budget)
            for budget in (0.5, 1.0)
            for claim in (*_GROWN_CLAIMS, *_LARGER_CLAIMS, *_STEPS_CLAIMS)
        ),
        min_worlds=8,
    ),
    Study(
        name="deep_from_start",
        question="Does the birth of a seed help to train a deep structure that I know from the start?",
        task=("moby_deep", "sotu_deep"),
        arms=(
            _static("usual_init", host="deeper"),
            _static("wider_host", host="wider"),
            _static("small_host", **HOST_ONLY),
            _static("seeds_at_once", **FULL),
            _static("no_growth", **HOST_ONLY, epochs=[12, 25, 50]),
        ),
        budgets=(0.25, 0.5, 1.0),
        worlds=(100, 8),
        metric="test_loss",
        claims=(
            *(
                Claim(arm="seeds_at_once", against=against, at="equal steps", direction="lower", budget=1.0)
                for against in ("usual_init", "no_growth")
            ),
            *(
                Claim(arm="seeds_at_once", against=against, direction="lower", budget=1.0)
                for against in ("wider_host", "small_host")
            ),
        ),
        min_worlds=8,
    ),
)
STUDIES = {study.name: study for study in _ROWS}

_FROM_SCRATCH = (
    "imitation=0", "rounds=20", "envs=256", "ppo.minibatches=2", "ppo.epochs=3", "ppo.lr=3e-3", "ppo.entropy_coef=0.05",
    "reward.gamma=1.0",
)  # fmt: skip
_SETTINGS_ROWS = (
    SettingsStudy(
        name="simulator_policy",
        question="Does a policy learn to read a simulated world in its first epochs?",
        arms={"policy": ()},
        references=("best_schedule", "uninformed_planner", "informed_planner", "replacing_planner"),
        seeds=(0, 1, 2, 3, 4),
        worlds=(HELD_OUT_FROM, 256),
        first_worlds=20,
    ),
    SettingsStudy(
        name="reward_modes",
        question="Which reward trains the best policy on the simulator?",
        arms={mode: (*_FROM_SCRATCH, f"reward.mode={mode}") for mode in REWARDS},
        seeds=(0, 1),
        worlds=(HELD_OUT_FROM, 256),
    ),
    SettingsStudy(
        name="sim_ablation",
        question="How much does each setting of the preset change U on the simulator?",
        arms={
            arm: ("rounds=34", *changes)
            for arm, changes in {
                "preset": (),
                "not_standardised": ("network.standardise=false",),
                "no_imitation": ("imitation=0",),
                "no_uniform_share": ("network.epsilon=0.0",),
                "constant_entropy": ("ppo.entropy_final=0.01",),
                "lambda_one": ("ppo.gae_lambda=1.0",),
                "small_rollouts": ("envs=128", "rounds=136", "imitation=40"),
            }.items()
        },
        seeds=(0, 1),
        worlds=(HELD_OUT_FROM, 256),
    ),
)
SETTINGS_STUDIES = {study.name: study for study in _SETTINGS_ROWS}


def get_study(name: str) -> Study | SettingsStudy:
    """Return the study of this name. Raise UnknownNameError if there is none."""
    study = STUDIES.get(name) or SETTINGS_STUDIES.get(name)
    if study is None:
        raise unknown_name("study", name, [*STUDIES, *SETTINGS_STUDIES])
    return study
