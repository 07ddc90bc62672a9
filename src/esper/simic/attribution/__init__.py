"""Seed worth: contributions, interactions and Shapley values from coalition scores, with standard errors."""

from esper.simic.attribution.counterfactual import CounterfactualEngine, CounterfactualHelper, report
from esper.simic.attribution.worth import Worth

__all__ = ["CounterfactualEngine", "CounterfactualHelper", "Worth", "report"]
