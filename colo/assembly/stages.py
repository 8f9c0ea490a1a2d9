"""What `share` takes in place of a transformers model: the stages of a Megatron model, or weights placed over ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from colo.engine import Engine
from colo.errors import Unsupported
from colo.weights.sources.base import WeightSource
from colo.weights.sources.megatron.source import MegatronSource
from colo.weights.sources.megatron.stages import bare, is_megatron
from colo.weights.sources.module import ModuleSource
from colo.weights.sources.spread import PlacedWeights, SpreadSource


def as_module(model: Any) -> Any:
    """The stages of a list, or of placed weights, as one module; anything else as it is.

    Raises: `Unsupported` for a list of other modules than Megatron's.
    """
    if not isinstance(model, nn.Module) and isinstance(model, PlacedWeights):
        return nn.ModuleList(model.stages)
    if isinstance(model, (list, tuple)) and all(isinstance(stage, nn.Module) for stage in model):
        bare(model)
        return nn.ModuleList(model)
    return model


def placed_or_none(model: Any) -> PlacedWeights | None:
    """The given weights where they say themselves what lies on which rank."""
    return model if not isinstance(model, nn.Module) and isinstance(model, PlacedWeights) else None


def refuse_stages(model: nn.Module, placed: PlacedWeights | None, kind: str) -> None:
    """Raise `Unsupported` for weights whose places no tensor of torch's describes: no engine starts for them."""
    if placed is not None or is_megatron(_stages(model)):
        raise Unsupported(
            f"{kind!r} is started for a transformers model, and stages have Megatron's config: start the engine on the "
            f"checkpoint, engine, _ = colo.start(folder, engine={kind!r}), or give a vllm.LLM"
        )


def source_of(model: nn.Module, placed: PlacedWeights | None, engine: Engine) -> WeightSource:
    """The source of the weights of what was given. A collective for Megatron's stages.

    Names are those of the engine's family, and rows that pad the vocabulary are cut to the engine's.
    Raises: as `MegatronSource`.
    """
    if placed is None and not is_megatron(_stages(model)):
        return ModuleSource(model)
    if placed is None:
        if engine.model_type is None:
            raise Unsupported(
                "the engine does not say of which family its model is: pass MegatronSource(stages, "
                "family='qwen3', vocab_size=...) (colo/weights/sources/megatron/source.py) in place of the stages"
            )
        placed = MegatronSource(_stages(model), family=engine.model_type, vocab_size=engine.vocab_size)
    return SpreadSource(placed, device=next(model.parameters()).device)


def _stages(model: nn.Module) -> list[nn.Module]:
    return list(model) if isinstance(model, nn.ModuleList) else [model]
