"""`MasterWeights` and `register_separable`, by their public names."""

from colo.trainer.master_weights import MakeOptimizer, MasterWeights
from colo.trainer.optimizers import register_separable

__all__ = ["MakeOptimizer", "MasterWeights", "register_separable"]
