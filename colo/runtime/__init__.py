"""The runtime: an engine and a trainer that take turns on one device."""

from colo.runtime.runtime import Runtime
from colo.runtime.turns import PhaseBlock

__all__ = ["PhaseBlock", "Runtime"]
