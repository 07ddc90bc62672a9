"""Detect files of the other distribution that installs a package called `esper`, an entity-component library.

Whichever is installed last replaces `esper/__init__.py`. If it was ours, `import esper` warns. If it was the other's,
`import esper` gives the other package, and our entry points (the command line, `esper.hf`, `esper.lightning`) refuse
to work.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

REMEDY = (
    "Only one of them works in an environment. To use this one: pip uninstall -y esper esper-lite, then "
    "pip install esper-lite"
)


def other_distribution(site: Path) -> str | None:
    """Return name and version of the other distribution if its metadata lies in this directory."""
    distributions = [path.stem for suffix in ("dist-info", "egg-info") for path in site.glob(f"esper-*.{suffix}")]
    return distributions[0] if distributions else None


def warn_if_mixed() -> None:
    """Warn if the other distribution is installed beside this package."""
    other = other_distribution(Path(__file__).parents[1])
    if other is not None:
        warnings.warn(
            f"the distribution {other}, another package that is also imported as `esper`, is installed in the same "
            f"place, and its files are mixed with those of esper-lite. {REMEDY}",
            stacklevel=3,
        )


def require_own_package() -> None:
    """Raise ImportError if `esper/__init__.py` is not ours."""
    if not hasattr(sys.modules["esper"], "_HOME"):
        raise ImportError(
            "`import esper` does not give this package: the distribution `esper`, an entity-component library, has "
            f"replaced files of esper-lite in {Path(__file__).parent}, or removed them. {REMEDY}",
            name="esper",
        )
