"""`make torture`: kill a real training run repeatedly with SIGKILL; the result must be bit-identical.

python -m tests.support.torture 100 [rng_seed]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.support.run_outcomes import TINY, esper, finished, is_whole, outcome_of, run_with_kills, seconds_per_round

if __name__ == "__main__":
    kills, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as place:
        home, rounds = Path(place), ["--rounds", str(2 * kills + 20)]
        finished(esper("train", "--out", home / "uninterrupted", *TINY, *rounds), timeout=3600)
        pace = seconds_per_round(home / "uninterrupted")
        survived = run_with_kills(
            home / "killed", [*TINY, *rounds], kills, seed, pace, lambda text: print(text, flush=True)
        )
        same, whole = outcome_of(home / "uninterrupted") == outcome_of(home / "killed"), is_whole(home / "killed")
        print(f"{survived} kills survived; the same end: {same}; the journal whole: {whole}")
        sys.exit(0 if same and whole else 1)
