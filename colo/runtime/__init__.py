"""The runtime: an engine and a trainer that take turns on one device."""

from colo.runtime.runtime import PhaseBlock, Runtime, check_free

__all__ = ["PhaseBlock", "Runtime", "check_free"]
