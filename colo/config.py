"""Settings of a runtime. Every field has a default that is right for most people; sizes are bytes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from enum import StrEnum
from functools import wraps
from numbers import Real
from typing import Any

from colo.units import GIB, MIB, check_digits, parse_bytes


class Offload(StrEnum):
    """When trainer state leaves the device for a rollout."""

    AUTO = "auto"
    """No more than must go."""

    ALWAYS = "always"
    """Everything that a rollout does not use, and what torch caches; for devices with other users, too."""

    NEVER = "never"


class Weights(StrEnum):
    """One copy of the weights for trainer and engine, or a way to the engine's own copy."""

    AUTO = "auto"
    """One copy where that can be; otherwise copied in the fastest way there is."""

    COPY = "copy"
    """A copy each, where the engine's workers read the trainer's memory if they can map it."""

    STAGED = "staged"
    """A copy each, sent through a buffer in two halves to an engine in another process; nothing of the trainer's
    is mapped."""


class OptimizerState(StrEnum):
    """Place of the optimizer's state while it steps."""

    AUTO = "auto"
    """On the device as a whole where that fits beside weights and gradients; streamed otherwise."""

    RESIDENT = "resident"
    """On the device as a whole."""

    STREAMED = "streamed"
    """In host memory; a step brings a range of elements to the device at a time."""


class MomentDtype(StrEnum):
    """Precision in which moments are kept between steps: means and sums of gradients, and of their squares."""

    FLOAT32 = "float32"
    """The precision in which classes make them."""

    BFLOAT16 = "bfloat16"
    """In half of the bytes; stepped in fp32, and rounded stochastically."""


_CHOICES: dict[str, type[Offload] | type[Weights] | type[OptimizerState] | type[MomentDtype]] = {
    "offload": Offload,
    "weights": Weights,
    "optimizer": OptimizerState,
    "moment_dtype": MomentDtype,
}
_ELSEWHERE = {
    "kv_cache_mib": 'pass kv_cache_bytes="512MiB"',
    "kv_cache_size": 'pass kv_cache_bytes="4GiB"',
    "gpu_memory_utilization": 'pass kv_cache_bytes="4GiB", or device_limit_bytes for everything together',
    "lr": "pass optimizer=lambda params: AdamW(params, lr=...) to launch",
}
"""Advice for names that others have for such settings."""

_SWITCHES = ("verify", "release_gradients", "suspend_nccl", "fold_adapter")


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """Settings of how a runtime uses its device and its host. Sizes in bytes may be texts, such as `"4GiB"`."""

    offload: Offload = Offload.AUTO
    """`auto` moves only what would not fit, `always` parks all trainer state on every rollout, `never` refuses to. The
    KV cache is no trainer state: on a GPU without a `device_limit_bytes` it leaves for every training phase."""

    weights: Weights = Weights.AUTO
    """`auto` shares them where that can be, `copy` and `staged` give trainer and engine a copy each."""

    optimizer: OptimizerState = OptimizerState.AUTO
    """`resident` has the optimizer's state on the device while it steps, `streamed` some ranges of it at a time, for
    optimizers that update each parameter by itself; `auto` streams where the whole would not fit."""

    resident_state_bytes: int | None = None
    """Streamed state that stays on the device, and takes no time of the bus; it leaves for good when a phase needs its
    room. `None` keeps what both phases leave free where `auto` streams, and nothing with `optimizer="streamed"` or
    released gradients."""

    moment_dtype: MomentDtype = MomentDtype.FLOAT32
    """`bfloat16` keeps the moments of streamed state in half of the bytes, and fp32 masters as they are: AdamW then
    takes 6 bytes a parameter instead of 10, of host memory and of the bus. A step widens a range's moments, and rounds
    them stochastically, as `torch.manual_seed` seeds it: weights are not those of fp32 moments. `auto` streams then,
    and keeps on the device what fits. For torch's classes that step element by element, of Adam's kind and SGD's."""

    release_gradients: bool = False
    """Step each range of a streamed optimizer within the backward pass, as soon as its gradients are there, and drop
    them. `optimizer.step()` does the rest: call it after every backward pass. Nothing that looks at all gradients, such
    as `clip_grad_norm_` or a `GradScaler`, has an effect then."""

    fold_adapter: bool = False
    """Publish a PEFT adapter folded into the weights, one of any kind whose effect weights can have (DoRA, VeRA, OFT,
    IA3, ...), in place of a LoRA beside them. It takes one more copy of the adapted weights, and a publication computes
    and writes those anew."""

    device_limit_bytes: int | None = None
    """Play a device of this size: segments and `train_working_bytes` together may take so much. `None` takes what the
    device has, and counts the working memory that training was seen to use."""

    device_reserve_bytes: int = 0
    """Bytes of the device that are never planned for, such as another process's share."""

    host_limit_bytes: int | None = None
    """The most host memory the arena may pin. `None` allows what is available when the runtime starts."""

    kv_cache_bytes: int | None = None
    """Size of the engine's KV cache. `None` derives it from the limit and what must be resident beside it."""

    train_working_bytes: int = 0
    """Activations and other transient memory of `train()` to keep free; the least, where it is measured too."""

    region_bytes: int = 1 * GIB
    """Parked tensors move in packs of about this size, each by one copy. Of streamed state it is the size of a range,
    64 MiB at most, or 128 where gradients are released, of which three are on the device."""

    chunk_bytes: int = 64 * MIB
    """Copies between host and device are cut into pieces of this size, so that small copies get through."""

    accumulation_steps: int = 1
    """Backward passes before each `optimizer.step()`; parked state comes back during the last of them."""

    mismatch_sequences: int = 2
    """Sequences of each rollout whose log-probabilities are computed by the trainer too, to report the difference."""

    max_mismatch: float | None = 0.5
    """The largest mean difference of those log-probabilities, at temperature 1, with which a rollout is trained on.
    Engines of the same weights differ by some hundredths; only one that samples from another model reaches the default.
    `None` accepts any."""

    suspend_nccl: bool = False
    """Give back the memory of NCCL's communicators of a trainer that is spread over ranks while the engine samples:
    nothing may be sent through them within a rollout then. Needs torch 2.13 and NCCL 2.29.7. Not run so far."""

    verify: bool = True
    """Check at every rollout that trainer and engine still hold the same weights."""

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            value = getattr(self, name)
            if value not in tuple(kind):
                raise ValueError(f"{name} must be one of {', '.join(kind)}, not {value!r}")
            object.__setattr__(self, name, kind(value))
        if self.offload is Offload.NEVER and self.optimizer is OptimizerState.STREAMED:
            raise ValueError('optimizer="streamed" keeps state in host memory, which offload="never" rules out')
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.release_gradients and self.optimizer is OptimizerState.RESIDENT:
            raise ValueError('release_gradients=True steps a streamed optimizer: leave out optimizer="resident"')
        if self.moment_dtype is MomentDtype.BFLOAT16:
            for name, value in (("offload", Offload.NEVER), ("optimizer", OptimizerState.RESIDENT)):
                if getattr(self, name) is value:
                    raise ValueError(f'moment_dtype="bfloat16" is of streamed state: leave out {name}="{value}"')
        if self.release_gradients and self.accumulation_steps != 1:
            raise ValueError(
                f"release_gradients=True steps in every backward pass: accumulation_steps must be 1, not "
                f"{self.accumulation_steps}"
            )
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in (*_CHOICES, *_SWITCHES):
                continue
            if isinstance(value, str) and entry.name.endswith("_bytes"):
                value = _read_size(entry.name, value)
            # NumPy's numbers and torch's as Python's, and whatever else can stand for an integer
            value = value.tolist() if hasattr(value, "tolist") else value
            if hasattr(type(value), "__index__") and not isinstance(value, bool):
                value = operator.index(value)
            check_digits(entry.name, value)
            object.__setattr__(self, entry.name, value)
            if value is None and entry.default is None:
                continue
            if entry.name == "max_mismatch":
                if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
                    raise TypeError(f"max_mismatch must be a number or None, not {value!r}")
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                size = " of bytes, such as 4 * 2**30, or a text such as '4GiB'" if entry.name.endswith("_bytes") else ""
                raise TypeError(f"{entry.name} must be a whole number{size}, not {value!r}")
            if entry.name.endswith("_bytes") and value >= 2**63:
                raise ValueError(f"{entry.name} must be less than 2**63, as sizes of memory are, not {value}")
        if self.max_mismatch is not None and not self.max_mismatch > 0:
            raise ValueError(f"max_mismatch must be positive or None, not {self.max_mismatch}")
        for name in ("device_limit_bytes", "host_limit_bytes", "kv_cache_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be a positive number of bytes or None, not {value}")
        for name in ("device_reserve_bytes", "train_working_bytes", "mismatch_sequences", "resident_state_bytes"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must not be negative, but is {getattr(self, name)}")
        contrary = (("offload", Offload.ALWAYS), ("offload", Offload.NEVER), ("optimizer", OptimizerState.RESIDENT))
        for name, value in contrary if self.resident_state_bytes else ():
            if getattr(self, name) is value:
                raise ValueError(
                    f'resident_state_bytes keeps a part of streamed state on the device: leave out {name}="{value}"'
                )
        for name, least in (("region_bytes", 256), ("chunk_bytes", 4096), ("accumulation_steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, but is {getattr(self, name)}")


def _read_size(name: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def unknown_name(call: str, name: str, valid: Sequence[str], elsewhere: Mapping[str, str]) -> TypeError:
    """Make the error for a `name` that a call does not take: what does, `elsewhere`, or which names it has."""
    close = get_close_matches(name, valid, n=1)
    advice = elsewhere.get(name) or (f"did you mean {close[0]}?" if close else f"it takes {', '.join(valid)}")
    return TypeError(f"{call} takes no {name!r}: {advice}")


_SETTINGS = tuple(entry.name for entry in fields(RuntimeConfig))
_init = RuntimeConfig.__init__


@wraps(_init)
def _checked_init(self: RuntimeConfig, *args: Any, **settings: Any) -> None:
    for name in settings:
        if name not in _SETTINGS:
            raise unknown_name("RuntimeConfig", name, _SETTINGS, _ELSEWHERE)
    _init(self, *args, **settings)


RuntimeConfig.__init__ = _checked_init  # type: ignore[method-assign]  # dataclasses name no valid ones
