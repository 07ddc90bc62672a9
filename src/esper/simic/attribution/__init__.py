"""What a seed is worth: coalitions into contributions, interactions and Shapley values, with error bars."""

from esper.simic.attribution.counterfactual import CounterfactualEngine, CounterfactualHelper, report
from esper.simic.attribution.worth import Worth

__all__ = ["CounterfactualEngine", "CounterfactualHelper", "Worth", "report"]
