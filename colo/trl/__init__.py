"""colo inside TRL's `GRPOTrainer` and `RLOOTrainer`: `attach` for a trainer that exists, or a flag in its config."""

from colo.trl.attachment import attach, detach
from colo.trl.flag import ColoGRPOConfig, ColoGRPOTrainer, ColoRLOOConfig, ColoRLOOTrainer

__all__ = ["ColoGRPOConfig", "ColoGRPOTrainer", "ColoRLOOConfig", "ColoRLOOTrainer", "attach", "detach"]
