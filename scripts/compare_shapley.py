"""Compare Esper's anytime Shapley values with other estimators at equal distinct evaluations.

    pip install shap shapiq
    python scripts/compare_shapley.py [--tables FILE.json] [--repeats 30]

Games: random values, saturating sums, decaying interactions, and recorded coalition tables of grown hosts
(`--tables`: a JSON list of lists of 2ⁿ values). The figure is the mean absolute error over players, divided by the
mean absolute Shapley value; each method may evaluate the same number of *distinct* coalitions.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from esper.simic.attribution.counterfactual import coalition_order, estimate, exact_weights

Game = np.ndarray
Method = Callable[[Game, int, int, int], np.ndarray]


class Counted:
    """A game that counts the distinct coalitions that were evaluated."""

    def __init__(self, values: Game) -> None:
        self.values = values
        self.evaluated = set()

    def __call__(self, masks: np.ndarray) -> np.ndarray:
        masks = np.atleast_1d(masks)
        self.evaluated |= set(map(int, masks))
        return self.values[masks]


def esper(values: Game, n: int, budget: int, seed: int) -> np.ndarray:
    masks = [m for m, _ in zip(coalition_order(n, seed), range(budget), strict=False)]
    return estimate(n, masks, values[masks]).values


def permutations(values: Game, n: int, budget: int, seed: int, antithetic: bool = False) -> np.ndarray:
    rng = np.random.default_rng(seed)
    evaluated = set()
    total = np.zeros(n)
    count = 0
    while True:
        order = rng.permutation(n)
        for walk in (order, order[::-1]) if antithetic else (order,):
            prefixes = [0, *np.cumsum(1 << walk.astype(np.int64)).tolist()]
            if len(evaluated | set(prefixes)) > budget or count > 50 * budget:
                return total / max(count, 1)
            evaluated |= set(prefixes)
            total[walk] += np.diff(values[prefixes])
            count += 1


def antithetic(values: Game, n: int, budget: int, seed: int) -> np.ndarray:
    return permutations(values, n, budget, seed, antithetic=True)


def within(run: Callable[[Counted, int], np.ndarray], values: Game, budget: int) -> np.ndarray:
    """Return an estimate within a budget of distinct coalitions; the libraries themselves limit only their calls."""
    best = None
    calls = budget
    for _ in range(8):
        game = Counted(values)
        estimated = run(game, calls)
        if len(game.evaluated) > budget:
            calls = int(calls * budget / len(game.evaluated)) if best is None else calls
            if best is not None:
                break
            continue
        best = estimated
        if len(game.evaluated) >= 0.97 * budget or len(game.evaluated) == len(values):
            break
        calls = int(calls * 1.15) + 1
    return best if best is not None else estimated


def shap_kernel(values: Game, n: int, budget: int, seed: int) -> np.ndarray:
    import shap

    def run(game: Counted, calls: int) -> np.ndarray:
        np.random.seed(seed)
        weights = 1 << np.arange(n)
        explainer = shap.KernelExplainer(lambda x: game(x.round().astype(int) @ weights), np.zeros((1, n)))
        return explainer.shap_values(np.ones((1, n)), nsamples=max(calls - 2, 1), silent=True, l1_reg=0)[0]

    return within(run, values, budget)


def shapiq_method(name: str) -> Method:
    def method(values: Game, n: int, budget: int, seed: int) -> np.ndarray:
        import shapiq

        def run(game: Counted, calls: int) -> np.ndarray:
            weights = 1 << np.arange(n)
            approximator = getattr(shapiq.approximator, name)(n=n, random_state=seed)
            values_by_player = approximator.approximate(budget=calls, game=lambda x: game(x.astype(int) @ weights))
            return np.array([values_by_player[(i,)] for i in range(n)])

        return within(run, values, budget)

    return method


METHODS: dict[str, Method] = {
    "esper": esper,
    "permutations": permutations,
    "antithetic": antithetic,
    "shap KernelExplainer": shap_kernel,
    **{f"shapiq {m}": shapiq_method(m) for m in ("KernelSHAP", "SVARM", "StratifiedSamplingSV", "UnbiasedKernelSHAP")},
}


def game_of(kind: str, n: int, rng: np.random.Generator) -> Game:
    masks = np.arange(2**n)
    member = (masks[:, None] >> np.arange(n)) & 1
    if kind == "random values":
        return rng.normal(size=2**n)
    if kind == "saturating":
        return 1 - np.exp(-member @ np.abs(rng.normal(size=n)))
    values = np.zeros(2**n)
    for team in range(1, 2**n):
        values += rng.normal() * 0.4 ** (team.bit_count() - 1) * ((masks & team) == team)
    return values


def compare(games: list[tuple[str, int, Game]], shares: tuple[float, ...]) -> None:
    rows: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    for i, (kind, n, values) in enumerate(games):
        exact = exact_weights(n) @ values
        for share in shares:
            budget = max(2 * n + 2, int(share * 2**n))
            cell = rows.setdefault((kind, n, budget), {m: [] for m in METHODS})
            for name, method in METHODS.items():
                error = np.abs(method(values, n, budget, i) - exact).mean()
                cell[name].append(error / max(np.abs(exact).mean(), 1e-12))
    print("| game | n | distinct evaluations | " + " | ".join(METHODS) + " |\n|" + "---|" * (3 + len(METHODS)))
    for (kind, n, budget), cell in rows.items():
        means = {m: float(np.mean(v)) for m, v in cell.items()}
        best = min(means.values())
        shown = [f"**{v:.3f}**" if v <= best * 1.0001 else f"{v:.3f}" for v in means.values()]
        print(f"| {kind} | {n} | {budget} of {2**n} | " + " | ".join(shown) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the random games")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    rng = np.random.default_rng(arguments.seed)
    games = [
        (kind, n, game_of(kind, n, rng))
        for n in (5, 8)
        for kind in ("random values", "saturating", "interactions")
        for _ in range(arguments.repeats)
    ]
    if arguments.tables:
        for values in json.loads(arguments.tables.read_text()):
            games.append(("grown hosts", len(values).bit_length() - 1, np.array(values)))
    compare(games, (0.0, 0.25, 0.5))


if __name__ == "__main__":
    main()
