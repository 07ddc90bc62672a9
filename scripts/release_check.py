"""Check what a release would upload: build, metadata, and the quickstart in fresh environments outside the checkout.

    make release-check
    python scripts/release_check.py --out dist

1. Build the sdist and the wheel, and the wheel again from the sdist; both wheels must have equal files.
2. Check the metadata with twine, warnings included.
3. Install the wheel, and the sdist, each into a new virtual environment in a temporary directory, with the versions of
   constraints.txt; run the quickstart of the README there, with no access to the checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
QUICKSTART = re.compile(r"^## Quickstart\n+```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without the caller's Python path and return its output; end the check if it fails."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def contents(wheel: Path) -> dict[str, str]:
    """Return the hash of every file in a wheel, except the list of hashes itself."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}


def built(out: Path, place: Path) -> tuple[Path, Path]:
    """Build sdist and wheel into `out`; check that the sdist builds the same wheel. Return both."""
    shutil.rmtree(out, ignore_errors=True)
    build = [sys.executable, "-m", "build", "--no-isolation"]
    run(*build, "--sdist", "--wheel", "--outdir", out, cwd=ROOT)
    (sdist,) = out.glob("*.tar.gz")
    (wheel,) = out.glob("*.whl")
    shutil.unpack_archive(sdist, place / "unpacked")
    (source,) = (place / "unpacked").iterdir()
    run(*build, "--wheel", "--outdir", place / "rebuilt", source, cwd=place)
    (rebuilt,) = (place / "rebuilt").glob("*.whl")
    ours, theirs = contents(wheel), contents(rebuilt)
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if different:
        sys.exit(f"the wheel built from the sdist differs in: {', '.join(different)}")
    print(f"built {sdist.name} and {wheel.name}; the sdist builds the same wheel of {len(ours)} files")
    return sdist, wheel


def check_installed(distribution: Path, place: Path, pip_args: list[str]) -> None:
    """Install a distribution into a fresh environment and run the quickstart there."""
    environment = place / f"environment-{distribution.name.split('.')[-1]}"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, "-c", ROOT / "constraints.txt", *pip_args, distribution, cwd=place)
    code = QUICKSTART.search((ROOT / "README.md").read_text())
    assert code is not None, "the README has no quickstart"
    where = run(python, "-c", "import esper; print(esper.__file__)", cwd=place).strip()
    if not where.startswith(str(environment)):
        sys.exit(f"the quickstart would run {where}, not the installed package")
    printed = run(python, "-c", code.group(1), cwd=place)
    run(environment / "bin" / "esper", "--help", cwd=place)
    print(f"{distribution.name}: quickstart ends with {printed.splitlines()[-1]!r}")
    shutil.rmtree(environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dist"), help="directory of the built files; emptied first")
    parser.add_argument("--pip-args", default="", help="further arguments of pip install")
    options = parser.parse_args()
    out = options.out.resolve()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        sdist, wheel = built(out, place)
        print(run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel, cwd=place).strip())
        for distribution in (wheel, sdist):
            check_installed(distribution, place, options.pip_args.split())
    print(f"release check passed: {out}")


if __name__ == "__main__":
    main()
