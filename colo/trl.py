"""`colo.integrations.trl` under a shorter name."""

from colo.integrations.trl import (
    ColoGRPOConfig,
    ColoGRPOTrainer,
    ColoRLOOConfig,
    ColoRLOOTrainer,
    attach,
    detach,
)

__all__ = ["ColoGRPOConfig", "ColoGRPOTrainer", "ColoRLOOConfig", "ColoRLOOTrainer", "attach", "detach"]
