"""`MasterWeights`, by its public name."""

from colo.trainer.master_weights import MakeOptimizer, MasterWeights

__all__ = ["MakeOptimizer", "MasterWeights"]
