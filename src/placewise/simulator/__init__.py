"""The one definition of time: `simulate` shows a placement in full, `evaluate` scores many, `violations` says what is
wrong with one. See docs/execution-model.md for what a timeline means."""

from placewise.simulator.evaluation import Evaluation, evaluate, simulate, violations
from placewise.simulator.timeline import Timeline, Transfers

__all__ = ["Evaluation", "Timeline", "Transfers", "evaluate", "simulate", "violations"]
