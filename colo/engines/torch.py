"""`TorchEngine`, by its public name."""

from colo.engines.embedded.torch import TorchEngine

__all__ = ["TorchEngine"]
