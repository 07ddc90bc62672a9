"""Exception classes. Each message states the request, the cause and a remedy.

EsperError
├── UnknownNameError      a name that is not in a table; suggests the nearest one
├── ConfigError           an invalid setting
├── LifecycleError        an operation that the rules do not allow now; states why
├── GraftError            a model without slots where a body is needed, or a location that cannot hold a slot
├── OptimizerError        an optimiser or a wrapper that does not support growth
├── HardenError           a body that cannot be converted to a plain module
├── BlueprintError        a seed that violates the blueprint contract (shape, Δ = 0 when built)
├── DataError             a file or tensor that is missing, damaged or of the wrong kind
├── RunError              a run directory that is missing, damaged or owned by another process
├── CheckpointError       a checkpoint that cannot be written, or is damaged
└── TrainingError         training that cannot continue: non-finite updates, or ranks that disagree
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EsperError(Exception):
    """Base class of every error that Esper raises deliberately. Messages state the request, the cause and a remedy.

    Example:
        >>> try:
        ...     grower.germinate("1", "mlp_smal")
        ... except esper.EsperError as error:
        ...     print(str(error)[:69])
        no blueprint for slot '1' named 'mlp_smal'. Did you mean 'mlp_small'?
    """

    exit_code = 2
    """Exit code of a command that ends with this error."""


class UnknownNameError(EsperError, KeyError):
    """A name that is not in a table."""

    def __str__(self) -> str:
        """Return the message. KeyError would return its repr."""
        return str(self.args[0])


class ConfigError(EsperError, ValueError):
    """An invalid setting."""


class LifecycleError(EsperError):
    """An operation that the rules do not allow now."""


class GraftError(EsperError):
    """A model that was not grafted, or a location in a model that cannot hold a slot."""


class OptimizerError(EsperError):
    """An optimiser or a wrapper that does not support growth."""


class HardenError(EsperError):
    """A body that cannot be converted to a plain module."""


class BlueprintError(EsperError):
    """A seed that violates the blueprint contract."""


class DataError(EsperError):
    """A file or tensor that is missing, damaged or of the wrong kind."""


class TrainingError(EsperError):
    """Training that cannot continue."""


class RunError(EsperError):
    """A run directory that is missing, damaged or owned by another process."""


class CheckpointError(EsperError):
    """A checkpoint that cannot be written, or is damaged."""


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> UnknownNameError:
    """Return the error for a name that is not in a table, with the nearest valid ones.

    >>> str(unknown_name("blueprint", "conv_lite", ["conv_light", "norm"]))
    "no blueprint named 'conv_lite'. Did you mean 'conv_light'? There are: conv_light, norm"
    """
    names = sorted(valid)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(names[:40]) + (f" and {len(names) - 40} more" if len(names) > 40 else "")
    return UnknownNameError(f"no {kind} named {name!r}.{hint} There are: {listed or 'none'}")
