"""One family of errors. Each says what was asked, what was found, and the way out.

EsperError
├── UnknownNameError      a name that is not in a table; suggests the nearest one
├── ConfigError           a setting that makes no sense
├── LifecycleError        an operation that the rules do not allow now; says why
├── GraftError            a place in a model that cannot hold a slot
├── OptimizerError        an optimiser or a wrapper that cannot follow growth
├── HardenError           a body that cannot become a plain module
├── BlueprintError        a seed that breaks the laws (shape, identity at birth)
├── DataError             a file or tensor that is missing, damaged or of the wrong kind
├── RunError              a run directory that is missing, damaged or owned by another process
├── CheckpointError       a checkpoint that cannot be written, or is damaged
└── TrainingError         learning that cannot go on: updates that are not finite, legs that disagree
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EsperError(Exception):
    """The root of every error that Esper raises on purpose."""


class UnknownNameError(EsperError, KeyError):
    """A name that is not in a table."""

    def __str__(self) -> str:  # KeyError would show the message's repr
        return str(self.args[0])


class ConfigError(EsperError, ValueError):
    """A setting that makes no sense."""


class LifecycleError(EsperError):
    """An operation that the rules do not allow now."""


class GraftError(EsperError):
    """A place in a model that cannot hold a slot."""


class OptimizerError(EsperError):
    """An optimiser or a wrapper that cannot follow growth."""


class HardenError(EsperError):
    """A body that cannot become a plain module."""


class BlueprintError(EsperError):
    """A seed that breaks the laws of blueprints."""


class DataError(EsperError):
    """A file or tensor that is missing, damaged or of the wrong kind."""


class TrainingError(EsperError):
    """Learning that cannot go on."""


class RunError(EsperError):
    """A run directory that is missing, damaged or owned by another process."""


class CheckpointError(EsperError):
    """A checkpoint that cannot be written, or is damaged."""


def unknown_name(kind: str, asked: str, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that is not in a table, with the nearest valid ones.

    >>> str(unknown_name("blueprint", "conv_lite", ["conv_light", "norm"]))
    "no blueprint named 'conv_lite'. Did you mean 'conv_light'? There are: conv_light, norm"
    """
    names = sorted(known)
    near = difflib.get_close_matches(asked, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(names[:40]) + (f" and {len(names) - 40} more" if len(names) > 40 else "")
    return UnknownNameError(f"no {kind} named {asked!r}.{hint} There are: {listed or 'none'}")
