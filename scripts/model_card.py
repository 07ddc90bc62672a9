"""Write what the shipped policy's file says about it into docs/model_card.md: network, origin, ranges of its features.

python scripts/model_card.py            # update the text between the two markers
python scripts/model_card.py --check    # exit with code 1 if it is not up to date
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from esper.leyline.actions import HEAD_OPTIONS, Head
from esper.leyline.checksums import CHECKSUM, METADATA, check_tensors
from esper.tamiyo.controllers.learned import SHIPPED
from esper.tamiyo.policy.feature_table import ENV_FEATURES, SLOT_FEATURES, Feature

PAGE = Path(__file__).parent.parent / "docs" / "model_card.md"
BEGIN, END = "<!-- policy file: begin -->", "<!-- policy file: end -->"


def card(file: Path = SHIPPED) -> str:
    """Return the generated part of the page."""
    content = file.read_bytes()
    metadata = check_tensors(content)
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    weights = sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != METADATA)
    network, about = json.loads(metadata["network"]), json.loads(metadata["about"])
    fixed = {Head[name]: option for name, option in json.loads(metadata["fixed"]).items()}
    lows, highs = json.loads(metadata["ranges"])
    facts = {
        "file": f"`{file.name}`, {len(content):,} bytes, sha256 `{metadata[CHECKSUM][:16]}…`",
        "parameters": f"{weights:,}",
        "network": ", ".join(f"`{name}` {value}" for name, value in network.items()),
        "trained on": f"`{about['trained_on']}`, {about['env_steps']:,} epochs of real hosts",
        "heads that it does not choose": ", ".join(
            f"{head.name.lower()} = {(HEAD_OPTIONS[head] or ())[option]}" for head, option in fixed.items()
        ),
        "slots in training": f"{lows[-1]:.0f}" if lows[-1] == highs[-1] else f"{lows[-1]:.0f} to {highs[-1]:.0f}",
    }
    features = [*ENV_FEATURES, *SLOT_FEATURES]
    ranges = list(zip(features, lows, highs, strict=False))
    return "\n".join([
        "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), "",
        "Ranges of the scaled features that varied in training (`esper features` lists meanings and formulas):", "",
        "| feature | of | lowest | highest | possible |", "|---|---|---|---|---|",
        *(row(*each) for each in ranges if each[1] != each[2]), "",
        "Constant in training: " + ", ".join(f"`{f.name}` {low:g}" for f, low, high in ranges if low == high) + ".",
    ]).replace("-", "−").replace("|−−−", "|---")  # fmt: skip


def row(feature: Feature, low: float, high: float) -> str:
    """Return a feature and its range as a row of the table."""
    return f"| `{feature.name}` | {feature.scope} | {low:.3f} | {high:.3f} | {feature.low:g} to {feature.high:g} |"


def updated(text: str) -> str:
    """Return the text of the page with its generated part renewed."""
    return text[: text.index(BEGIN)] + f"{BEGIN}\n{card()}\n{END}" + text[text.index(END) + len(END) :]


def main() -> None:
    """Update or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page is not up to date")
    options = parser.parse_args()
    text = PAGE.read_text()
    if options.check:
        sys.exit(0 if updated(text) == text else f"not up to date: {PAGE}. Run: python scripts/model_card.py")
    PAGE.write_text(updated(text))


if __name__ == "__main__":
    main()
