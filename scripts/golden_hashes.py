"""Record and compare hashes of short runs of every kind, to prove that a refactoring changes no result.

    python scripts/golden_hashes.py record golden.json      # on the commit before
    python scripts/golden_hashes.py check golden.json       # on each commit after

A hash covers weights, rewards and the journal without times. Results depend on the processor, so the file is only
valid on the machine that recorded it and is not committed. The runs use the command line and the public API alone,
so the same script runs before and after a change of structure.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

import esper

ISOLATED = ["--birth", "isolated", "--lr-schedule", "constant"]
OPEN = ["--birth", "open", "--lr-schedule", "wsd"]
DIGITS = ["--task", "digits", "--epochs", "14", "--no-compare"]
RESCUE = ["--task", "rescue", "--controller", "schedule", "--epochs", "16", "--seed", "3"]
GROW = {
    f"grow {controller}": [*DIGITS, "--controller", controller, *ISOLATED]
    for controller in ("none", "schedule", "heuristic", "random", "tamiyo")
} | {
    "grow rescue": [*RESCUE, *ISOLATED],
    "grow straight-through": [*DIGITS, "--controller", "schedule", *ISOLATED, "--incubation", "straight_through"],
    "grow rescue, open": [*RESCUE, *OPEN],
    "grow heuristic, open": [*DIGITS, "--controller", "heuristic", *OPEN],
    "grow tamiyo, open": [*DIGITS, "--controller", "tamiyo", *OPEN],
}
SMALL = ["--envs", "4", "--no-compare", "--set", "ppo.minibatches=2", "--set", "checkpoint_share=1"]
REAL = ["--task", "digits", "--epochs", "12", *SMALL]
BIRTH = {name: ["--set", f"rules.birth={name}"] for name in ("isolated", "open")}
STACKED = ["--set", "engine.strategy=stacked"]
TRAIN = {
    "train simulated": ["--sim", "--rounds", "3", *SMALL, *BIRTH["isolated"]],
    "train real": [*REAL, "--rounds", "3", *BIRTH["isolated"]],
    "train real, 2 workers": [*REAL, "--rounds", "3", "--workers", "2", *BIRTH["isolated"]],
    "train stacked": [*REAL, "--rounds", "2", *STACKED, *BIRTH["isolated"]],
    "train simulated, open": ["--sim", "--rounds", "3", *SMALL, *BIRTH["open"]],
    "train stacked, open": [*REAL, "--rounds", "2", *STACKED, *BIRTH["open"]],
}
UNSTABLE_KINDS = {"phase_profile", "health", "checkpoint"}
UNSTABLE_FIELDS = {
    "time_s",
    "time",
    "t",
    "wall_s",
    "wall_ms",
    "run_id",
    "sum",
    "crc",
    "seq",
    "rank",
    "path",
    "size_bytes",
}


def run(*args: str) -> None:
    subprocess.run([sys.executable, "-m", "esper", *args], check=True, capture_output=True, text=True)


def tensors_digest(path: Path) -> str:
    """Hash the tensors of a safetensors file by name, whatever their order in the file."""
    digest = hashlib.sha256()
    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            digest.update(
                name.encode() + file.get_tensor(name).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
    return digest.hexdigest()[:16]


def journal_digest(directory: Path) -> str:
    """Hash the events of a run that do not depend on time, in an order that does not depend on ranks."""
    lines = []
    for path in sorted((directory / "events").glob("*.jsonl")):
        for text in path.read_text().splitlines():
            record = json.loads(text)
            event = {**record, **record.pop("event", {})} if isinstance(record.get("event"), dict) else record
            if event.get("kind") not in UNSTABLE_KINDS:
                lines.append(json.dumps({k: v for k, v in event.items() if k not in UNSTABLE_FIELDS}, sort_keys=True))
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16] + f"/{len(lines)}"


def grower_digest(incubation: str, birth: str) -> str:
    """Hash the weights of a model grown in a hand-written loop."""
    torch.manual_seed(0)
    x, y = torch.randn(256, 12), torch.randint(0, 4, (256,))
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    body = esper.graft(model, at=["1", "3"], probe=x[:3])
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9)
    rules = esper.Rules(birth=birth)
    grower = esper.Grower(body, optimizer, controller="schedule", incubation=incubation, rules=rules)
    reports = []
    for _ in range(30):
        for i in range(0, 256, 32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(body(x[i : i + 32]), y[i : i + 32]).backward()
            if incubation == "shadow":
                grower.shadow(lambda i=i: nn.functional.cross_entropy(body(x[i : i + 32]), y[i : i + 32]))
            grower.clip_grad_norm_(1.0)
            optimizer.step()
        report = grower.step([(x, y)])
        reports.append((report.quality, report.op.name, report.effects))
    digest = hashlib.sha256(repr(reports).encode())
    for name, value in sorted(body.state_dict().items()):
        digest.update(name.encode() + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def digests() -> dict[str, str]:
    digest_of: dict[str, str] = {}
    torch.set_num_threads(1)
    for incubation in ("shadow", "straight_through"):
        digest_of[f"Grower {incubation}"] = grower_digest(incubation, "isolated")
    digest_of["Grower, open"] = grower_digest("straight_through", "open")
    with tempfile.TemporaryDirectory() as place:
        for name, options in GROW.items():
            out = Path(place) / name.replace(" ", "-")
            run("grow", *options, "--out", str(out))
            digest_of[f"{name}: weights"] = tensors_digest(out / "body.safetensors")
            digest_of[f"{name}: journal"] = journal_digest(out)
            print(name, digest_of[f"{name}: weights"], digest_of[f"{name}: journal"], flush=True)
        for name, options in TRAIN.items():
            out = Path(place) / name.replace(" ", "-").replace(",", "")
            run("train", *options, "--out", str(out))
            digest_of[f"{name}: weights"] = tensors_digest(out / "policy.safetensors")
            digest_of[f"{name}: journal"] = journal_digest(out)
            print(name, digest_of[f"{name}: weights"], digest_of[f"{name}: journal"], flush=True)
        out = Path(place) / "resumed"
        run("train", *REAL, *BIRTH["isolated"], "--rounds", "2", "--out", str(out))
        run("train", "--resume", str(out), "--rounds", "3", "--no-compare")
        digest_of["train resumed: weights"] = tensors_digest(out / "policy.safetensors")
    return digest_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "check"])
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    actual = digests()
    if options.action == "record":
        options.file.write_text(json.dumps(actual, indent=1) + "\n")
        return 0
    expected = json.loads(options.file.read_text())
    differing = [name for name in expected if actual.get(name) != expected[name]]
    for name in differing:
        print(f"differs: {name}: {expected[name]} before, {actual.get(name)} now")
    print(f"{len(expected) - len(differing)} of {len(expected)} equal")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
