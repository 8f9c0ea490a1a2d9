"""Estimates the bytes of a run before it starts: by segment, by phase, and what would make it fit.

Engine and trainer share one copy of the weights. For a rollout, trainer state that does not fit beside weights and KV
cache is parked on the host; for training the KV cache goes. Weights, KV cache, gradients and optimizer state are exact;
activations and workspaces follow formulas stated where they are computed, which err towards too much. NCCL buffers,
which `tp` above 1 adds, are not counted. Imports neither torch nor transformers until a model's config is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import Any

from colo.config import MomentDtype, OptimizerState
from colo.engine import check_number, plain
from colo.phases import phase as names
from colo.planning.cards import Card, read_card, smallest_card
from colo.planning.model_shape import ModelShape, load_model_config
from colo.units import GIB, MIB, format_bytes

ACTIVATIONS, LOGITS, RESIDUAL = "activations", "logits", "residual"
START, STEP = "start", "step"
"""Before the first phase, as the engine warms up and there is no state yet; and the end of a training phase that
streams its state: activations are gone, and the window is there."""

MOVABLE = (names.TRAINER_GRADIENTS, names.TRAINER_OPTIMIZER, names.TRAINER_MASTER_WEIGHTS)

LOGITS_WORKSPACE_BYTES = 512 * MIB  # log-probabilities are computed from chunks of logits that fit this
ENGINE_BATCH_TOKENS = 8192  # of one engine step: vLLM's default of max_num_batched_tokens on GPUs below 70 GiB
# Logits, their fp32 copies, sorted values and indices, as vLLM warms its sampler up. Measured: its peak grows by
# 1.38 GiB from 256 to 512 sequences of a 4-billion Qwen3, whose vocabulary is 151,936.
SAMPLER_BYTES_PER_LOGIT = 38
# The same as tokens are drawn from all of the vocabulary, with log-probabilities. Measured.
SAMPLED_BYTES_PER_LOGIT = 4
# What torch's allocator keeps of vLLM's warm-up until the KV cache is there, in steps. Measured with steps of 4,096
# tokens: 1.35 GiB of Qwen3-8B, of which two hold 1.28 GiB, and 0.6 GiB of 1.7B, of which two hold 0.66 GiB.
WARM_UP_STEPS = 2
BUS_BYTES_PER_S = 54.6e9  # each way at once; measured: pinned memory to an H200 (examples/bench/results/offload.json)
PASS_FRACTION = 1 / 8
"""Share of a device without a set limit that is left to a training pass beside resident state: for activations,
log-probabilities, and what a step computes in."""
# as colo/trainer/window.py has them, which imports torch
RANGE_BYTES, NUM_SLOTS = 128 * MIB, 3
# Left resident by vLLM 0.26 asleep (context, CUDA graphs, workspaces), measured: Qwen3-8B on an H200.
ENGINE_RESIDUAL_BYTES = round(1.4 * GIB)
TRAINER_RESIDUAL_BYTES = GIB // 2  # an allowance, not measured: cuBLAS workspaces, what the allocator rounds up
RESIDUAL_BYTES = ENGINE_RESIDUAL_BYTES + TRAINER_RESIDUAL_BYTES
NORM_BYTES = 8  # an RMS norm keeps, of each element, its input and the normalised value in fp32


class Mode(StrEnum):
    """The trained weights: every weight, or fp32 adapters on a base in 16 bits (lora) or in NF4 (qlora)."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


class Optimizer(StrEnum):
    """Optimizer state in fp32: two moments, one, or (adafactor) a row and a column for each matrix."""

    ADAMW = "adamw"
    SGD_MOMENTUM = "sgd-momentum"
    ADAFACTOR = "adafactor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The work of each GPU."""

    gpu_memory_bytes: int
    context: int  # tokens of the longest sequence, prompt and completion together
    generations: int  # sequences of `context` tokens that are alive at once in a rollout
    mode: Mode = Mode.FULL
    optimizer: Optimizer = Optimizer.ADAMW
    state: OptimizerState = OptimizerState.AUTO  # where the optimizer's state is while it steps
    moment_dtype: MomentDtype = MomentDtype.FLOAT32  # of streamed state, between steps
    release_gradients: bool = False  # each is stepped and dropped within the backward pass
    offload_activations: bool = False  # layers' inputs wait for the backward pass in host memory
    tp: int = 1  # tensor-parallel ranks, of engine and trainer alike
    lora_rank: int = 16
    fold_adapter: bool = False  # the engine gets weights with the adapter in them, and those beneath stay
    dtype_bytes: int = 2  # of weights, activations and KV cache; at 2, bf16, full fine-tuning adds 2 for each master
    micro_batch: int = 1  # sequences of `context` tokens in one forward and backward pass
    residual_bytes: int = RESIDUAL_BYTES  # on the device in every phase

    def __post_init__(self) -> None:
        kinds: dict[str, type[StrEnum]] = {"mode": Mode, "optimizer": Optimizer}
        for name, kind in (kinds | {"state": OptimizerState, "moment_dtype": MomentDtype}).items():
            value, known = getattr(self, name), [str(member) for member in kind]
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, but is {value!r}")
            object.__setattr__(self, name, kind(value))
        sizes = ("gpu_memory_bytes", "context", "generations", "tp", "lora_rank", "dtype_bytes", "micro_batch")
        for name, least in (*((size, 1) for size in sizes), ("residual_bytes", 0)):
            object.__setattr__(self, name, value := plain(getattr(self, name)))  # NumPy's numbers would overflow
            check_number(name, value, int, "a whole number")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, but is {value}")
        for name in ("release_gradients", "offload_activations", "fold_adapter"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        contrary = (("state", OptimizerState.RESIDENT), ("optimizer", Optimizer.ADAFACTOR))
        for name, value in contrary if self.moment_dtype is MomentDtype.BFLOAT16 else ():
            if getattr(self, name) is value:
                raise ValueError(f"moment_dtype bfloat16 is of streamed AdamW or SGD, and {name} is {value}")
        if self.release_gradients and self.state is OptimizerState.RESIDENT:
            raise ValueError("release_gradients steps streamed state, and state is resident: leave one out")
        if self.fold_adapter and self.mode is not Mode.LORA:
            raise ValueError(f"fold_adapter is for mode lora, an adapter on 16-bit weights, and mode is {self.mode}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """A workload that fits, and a sentence about the change."""

    workload: Workload
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Bytes on each GPU, and what would have to change for them to fit."""

    shape: ModelShape
    workload: Workload
    segments: Mapping[str, int]  # bytes where a segment is largest; parameters that are the engine's own count 0
    phases: Mapping[str, Mapping[str, int]]  # device bytes; `activations` of a rollout are the engine's workspace
    offloaded: Mapping[str, tuple[str, ...]]  # on the host then; gradients that must go are dropped, not moved
    streamed: bool = False  # the optimizer's state is on the device a range at a time, in a phase `step` of its own
    resident_slot_bytes: int = 0  # of its window, the slot that ranges which stay on the device pass through
    suggestions: tuple[Suggestion, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most device bytes of any phase. State that fits stays, so a larger GPU may see a larger peak."""
        return max(sum(held.values()) for held in self.phases.values())

    @property
    def needed_bytes(self) -> int:
        """The smallest GPU that runs this: the peak when everything that can leave for the rollout has left."""
        # a rollout is less than the start then, and no state stays beside the window
        held = {phase: sum(held.values()) for phase, held in self.phases.items() if phase != names.Phase.ROLLOUT}
        return max(held[phase] - (self.resident_slot_bytes if phase == STEP else 0) for phase in held)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state and masters."""
        return self.segments[names.TRAINER_OPTIMIZER] + self.segments[names.TRAINER_MASTER_WEIGHTS]

    @property
    def resident_state_bytes(self) -> int:
        """Streamed state that stays on the device, as `auto` has it: what every phase after the start leaves free."""
        w = self.workload
        if not self.streamed or w.state is not OptimizerState.AUTO or w.release_gradients:
            return 0
        if w.optimizer is Optimizer.ADAFACTOR:  # state of whole parameters, which leaves
            return 0
        totals = {phase: sum(held.values()) for phase, held in self.phases.items() if phase != START}
        train = self.phases["train"]
        pass_bytes = max(train[ACTIVATIONS] + train[LOGITS], int(PASS_FRACTION * w.gpu_memory_bytes))
        totals["train"] += pass_bytes - train[ACTIVATIONS] - train[LOGITS]
        # a runtime leaves room for the window beside a pass, whenever the step comes
        totals["train"] += self.phases.get(STEP, {}).get(names.TRAINER_OPTIMIZER, 0)
        return min(self.state_bytes, max(0, w.gpu_memory_bytes - max(totals.values())))

    @property
    def step_wait_s(self) -> float:
        """Seconds that a streamed step takes at least: for its state to come, and to leave at the same time."""
        return (self.state_bytes - self.resident_state_bytes) / BUS_BYTES_PER_S if self.streamed else 0.0

    @property
    def naive_peak_bytes(self) -> int:
        """Both tenants resident at once, each with its own copy of the weights, nothing offloaded or dropped."""
        return sum(self.segments.values()) + self.segments[names.ENGINE_WEIGHTS]

    @property
    def fits(self) -> bool:
        """True if no phase holds more than the GPU has."""
        return self.peak_bytes <= self.workload.gpu_memory_bytes

    @property
    def host_bytes(self) -> int:
        """Pinned host memory that the offloaded segments take."""
        away_bytes = max(sum(self.segments[name] for name in away) for away in self.offloaded.values())
        return away_bytes - self.resident_state_bytes

    @property
    def activation_host_bytes(self) -> int:
        """Pinned host memory that layers' inputs take beside that, with four more tensors of that size around the
        layers: torch pins a power of two for each."""
        w = self.workload
        one = w.micro_batch * w.context * self.shape.hidden_size * w.dtype_bytes
        return (self.shape.num_layers + 4) * (1 << (one - 1).bit_length()) if w.offload_activations else 0

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache of one token while every layer still keeps it; beyond a sliding window it is less."""
        return self._kv_bytes(1) - self._kv_bytes(0)

    @property
    def kv_bytes_per_sequence(self) -> int:
        """Recurrent states of one sequence, however long it is: of Mamba and linear attention."""
        return self._kv_bytes(0)

    @property
    def logits_bytes(self) -> int:
        """Bytes of the whole logits of one training micro-batch, which colo never holds at once."""
        return self.workload.micro_batch * self.workload.context * self.shape.vocab_size * self.workload.dtype_bytes

    @property
    def remarks(self) -> list[str]:
        """Sentences about what the numbers leave out, or go beyond."""
        shape, context, found = self.shape, self.workload.context, []
        if shape.max_context is not None and context > shape.max_context:
            found.append(f"{context} tokens are more than the {shape.max_context} that the model was made for")
        if shape.uncounted:
            found.append(f"the text model only: {', '.join(shape.uncounted)} is not counted")
        return found

    def _kv_bytes(self, context: int) -> int:
        return self.shape.kv_bytes(context, tp=self.workload.tp, dtype_bytes=self.workload.dtype_bytes)

    def to_json(self) -> dict[str, object]:
        """Return the estimate as plain values: bytes as integers, phases and segments by name."""
        sizes = (
            "peak_bytes",
            "needed_bytes",
            "naive_peak_bytes",
            "logits_bytes",
            "host_bytes",
            "activation_host_bytes",
            "resident_state_bytes",
        )
        caches = ("kv_bytes_per_token", "kv_bytes_per_sequence")
        numbers = (*sizes, *caches, "fits", "streamed", "step_wait_s")
        return {
            "segments": dict(self.segments),
            "phases": {phase: dict(held) for phase, held in self.phases.items()},
            "offloaded": {phase: list(away) for phase, away in self.offloaded.items()},
            "remarks": self.remarks,
            "suggestions": [suggestion.text for suggestion in self.suggestions],
            **{name: getattr(self, name) for name in numbers},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class FitRow:
    """The number of sequences of one length that fit."""

    context: int
    generations: int  # with trainer state parked; 0 when training at this length does not fit at all
    resident_generations: int  # with nothing moved to the host
    train_bytes: int  # device bytes of the train phase


def estimate(shape: ModelShape, **workload: Any) -> Estimate:
    """Estimate a workload, given by the fields of `Workload`, with suggestions when it does not fit.

    Raises: `ValueError` for a value out of range or a `tp` that does not divide the model, `TypeError` for a field
    that there is not, and for a size that is no whole number.
    """
    found = _evaluate(shape, Workload(**workload))
    return found if found.fits else replace(found, suggestions=tuple(_suggestions(found)))


def plan(
    model: str | os.PathLike[str],
    *,
    gpu_memory: str | int | None = None,
    mode: Mode | str = Mode.FULL,
    context: int = 4096,
    generations: int = 8,
    **options: Any,
) -> Estimate:
    """Estimate a run before anything is allocated: `estimate` for a hub id or a folder with a `config.json`.

    `gpu_memory` is a size such as `80GiB`, a number of bytes, 1 MiB at least, or the name of a card, such as `L4`
    (`colo.planning.cards.CARDS`); by default the GPU that is there, without one an H100. `options` are the other
    fields of `Workload`, such as `optimizer` or `tp`.

    Raises: as `load_model_config`, `ModelShape.from_config` and `estimate`.
    """
    shape = ModelShape.from_config(load_model_config(model))
    asked = {"mode": mode, "context": context, "generations": generations, **options}
    return estimate(shape, gpu_memory_bytes=read_card(gpu_memory).memory_bytes, **asked)


def max_generations(shape: ModelShape, *, resident: bool = False, **workload: Any) -> int:
    """The most sequences alive at once that fit; 0 when training itself does not. `workload` is as for `estimate`.

    Trainer state is parked where that helps, or with `resident` none of it may move to the host.
    """
    base = Workload(**{**workload, "generations": 1})

    def holds(generations: int) -> bool:
        found = _evaluate(shape, replace(base, generations=generations))
        return found.fits and not (resident and found.host_bytes)

    return _largest(holds)


def what_fits(shape: ModelShape, contexts: Iterable[int], **workload: Any) -> list[FitRow]:
    """Count the generations that fit, for each context. `workload` is as for `estimate`, without those two."""
    asked = [{**workload, "context": context, "generations": 1} for context in contexts]
    return [
        FitRow(
            context=one["context"],
            generations=max_generations(shape, **one),
            resident_generations=max_generations(shape, resident=True, **one),
            train_bytes=sum(_evaluate(shape, Workload(**one)).phases[names.Phase.TRAIN].values()),
        )
        for one in asked
    ]


WAYS: Mapping[str, tuple[Mode, OptimizerState, bool]] = {
    "QLoRA": (Mode.QLORA, OptimizerState.RESIDENT, False),
    "LoRA": (Mode.LORA, OptimizerState.RESIDENT, False),
    "full, resident": (Mode.FULL, OptimizerState.RESIDENT, False),
    "full, streamed": (Mode.FULL, OptimizerState.STREAMED, False),
    "full, streamed, gradients released": (Mode.FULL, OptimizerState.STREAMED, True),
}
"""Ways to train a model: what is trained, where the optimizer's state is, whether gradients are released."""


def smallest_cards(shape: ModelShape, workload: Workload) -> dict[str, tuple[int, Card | None]]:
    """Return for each of `WAYS` the bytes that the work needs and the smallest card that has them."""
    found: dict[str, tuple[int, Card | None]] = {}
    for way, (mode, state, release) in WAYS.items():
        is_folded = workload.fold_adapter and mode is Mode.LORA
        # kept in fp32 where the class keeps them itself
        dtype = MomentDtype.FLOAT32 if state is OptimizerState.RESIDENT else workload.moment_dtype
        settings: dict[str, Any] = {"mode": mode, "state": state, "moment_dtype": dtype, "release_gradients": release}
        changed = replace(workload, **settings, fold_adapter=is_folded)
        needed_bytes = _evaluate(shape, changed).needed_bytes
        found[way] = needed_bytes, smallest_card(needed_bytes)
    return found


def _largest(holds: Callable[[int], bool]) -> int:
    """The largest n for which `holds`, 0 if there is none. It must hold below n, and must fail somewhere above."""
    # doubling, then bisection: each try is a whole estimate
    below, above = 0, 1
    while holds(above):
        below, above = above, 2 * above
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if holds(middle) else (below, middle)
    return below


def _suggestions(found: Estimate) -> Iterator[Suggestion]:
    """Single changes that make an estimate fit, each tried."""
    w = found.workload
    step = 256 if w.context > 256 else 1
    shorter = _largest(lambda n: _fitting(found, context=n * step) is not None) * step
    fewer = _largest(lambda n: _fitting(found, generations=n) is not None)
    tries: list[tuple[str, dict[str, Any]]] = [
        (f"context {shorter}", {"context": shorter}),
        (f"at most {fewer} generation{'s' * (fewer > 1)}", {"generations": fewer}),
        (f"LoRA of rank {w.lora_rank}", {"mode": Mode.LORA} if w.mode is Mode.FULL else {}),
        (f"QLoRA of rank {w.lora_rank}", {"mode": Mode.QLORA}),
        ("layers' inputs in host memory (offload_activations)", {"offload_activations": True}),
        *((f"optimizer {kind}", {"optimizer": kind} if w.mode is Mode.FULL else {}) for kind in Optimizer),
    ]
    for words, changes in tries:
        fitting = _fitting(found, **changes)
        if fitting is not None:
            each = " on each GPU" if fitting.workload.tp > 1 else ""
            text = f"{words} would fit: needs {format_bytes(fitting.needed_bytes)}{each}"
            yield Suggestion(workload=fitting.workload, text=text)


def _fitting(found: Estimate, **changes: Any) -> Estimate | None:
    """The estimate with `changes` made, if there is one and it fits."""
    try:
        changed = _evaluate(found.shape, replace(found.workload, **changes))
    except ValueError:  # a tp that does not divide this model, or a context or generations of 0
        return None
    return changed if changed.fits else None


def _evaluate(shape: ModelShape, w: Workload) -> Estimate:
    """Estimate with the optimizer's state where it is asked for: `auto` streams it where the whole does not fit.

    So it does where moments are kept in bf16, of which then as much stays on the device as fits, and where gradients
    are released.
    """
    if w.state is OptimizerState.STREAMED or w.moment_dtype is MomentDtype.BFLOAT16 or w.release_gradients:
        return _estimated(shape, w, streamed=True)
    resident = _estimated(shape, w, streamed=False)
    if w.state is OptimizerState.RESIDENT or resident.fits:
        return resident
    streamed = _estimated(shape, w, streamed=True)
    return streamed if streamed.needed_bytes < resident.needed_bytes else resident


def _estimated(shape: ModelShape, w: Workload, *, streamed: bool) -> Estimate:
    shape.check_tp(w.tp)
    tokens = min(ENGINE_BATCH_TOKENS, w.generations * w.context)
    whole = _whole_matrix_bytes(shape, w, training=False)
    held = _step_bytes(shape, tokens, dtype_bytes=w.dtype_bytes, tp=w.tp)
    warm_up = whole + warm_up_bytes(shape, tokens, w.generations, dtype_bytes=w.dtype_bytes, tp=w.tp)
    workspace = whole + max(held, w.generations * shape.vocab_size * SAMPLED_BYTES_PER_LOGIT)
    activations = _activation_bytes(shape, w)
    state = trainer_state(shape, w)
    window = window_bytes(shape, w)
    if w.release_gradients:
        state[names.TRAINER_GRADIENTS] = min(state[names.TRAINER_GRADIENTS], window.gradients)
    logits = w.micro_batch * w.context * shape.vocab_size * (w.dtype_bytes + 4)  # and an fp32 copy
    # the engine's own copy, which never sleeps
    engine_adapters = 0 if w.fold_adapter else w.dtype_bytes * state[names.TRAINER_PARAMETERS] // 4
    segments = {
        names.ENGINE_WEIGHTS: shape.weight_bytes(tp=w.tp, dtype_bytes=w.dtype_bytes, nf4=w.mode is Mode.QLORA),
        names.ENGINE_KV_CACHE: w.generations * shape.kv_bytes(w.context, tp=w.tp, dtype_bytes=w.dtype_bytes),
        **state,
        ACTIVATIONS: max(warm_up, activations),
        LOGITS: min(LOGITS_WORKSPACE_BYTES, logits),
        RESIDUAL: w.residual_bytes + engine_adapters,
    }
    # streamed state is on the host in every phase, and on the device as a window within the step
    at_home = (names.TRAINER_OPTIMIZER, names.TRAINER_MASTER_WEIGHTS) if streamed else ()
    train = {**segments, names.ENGINE_KV_CACHE: 0, ACTIVATIONS: activations, **dict.fromkeys(at_home, 0)}
    sync = {**train, ACTIVATIONS: 0, LOGITS: 0}
    rollout = {**segments, ACTIVATIONS: workspace, LOGITS: 0, **dict.fromkeys(at_home, 0)}
    start = {**rollout, ACTIVATIONS: warm_up, **dict.fromkeys(MOVABLE, 0)}
    away = _leaving(rollout, w.gpu_memory_bytes)
    phases = {START: start, "rollout": {**rollout, **dict.fromkeys(away, 0)}, "sync": sync, "train": train}
    moved = tuple(name for name in (*at_home, *away) if name != names.TRAINER_GRADIENTS and segments[name])
    offloaded: dict[str, tuple[str, ...]] = {START: (), "rollout": moved, "sync": at_home, "train": at_home}
    if streamed and w.release_gradients:  # the step is made beside the backward pass
        train[names.TRAINER_OPTIMIZER] = window.state
    elif streamed:
        phases[STEP] = {**sync, names.TRAINER_OPTIMIZER: window.state}
        offloaded[STEP] = (names.TRAINER_MASTER_WEIGHTS,)
    found = Estimate(shape=shape, workload=w, segments=segments, phases=phases, offloaded=offloaded, streamed=streamed)
    if not found.resident_state_bytes:
        return found
    step = {**phases[STEP], names.TRAINER_OPTIMIZER: window.state + window.slot}
    beside = replace(found, phases={**phases, STEP: step}, resident_slot_bytes=window.slot)
    return beside if beside.resident_state_bytes else found


def _leaving(rollout: Mapping[str, int], limit_bytes: int) -> tuple[str, ...]:
    """Segments that leave for a rollout: gradients, which are dropped, then the fewest bytes that suffice, or all."""
    gradients, optimizer, master = MOVABLE
    moves = sorted([(optimizer,), (master,), (optimizer, master)], key=lambda away: sum(rollout[name] for name in away))
    for choice in ((), (gradients,), *((gradients, *move) for move in moves)):
        away = tuple(name for name in choice if rollout[name])
        if sum(rollout.values()) - sum(rollout[name] for name in away) <= limit_bytes:
            break
    return away


def warm_up_bytes(shape: ModelShape, tokens: int, sequences: int, *, dtype_bytes: int, tp: int = 1) -> int:
    """Device bytes that vLLM warms up in: the larger of steps of `tokens` and of the sampler over all `sequences`."""
    steps = WARM_UP_STEPS * _step_bytes(shape, tokens, dtype_bytes=dtype_bytes, tp=tp)
    return max(steps, sequences * shape.vocab_size * SAMPLER_BYTES_PER_LOGIT)


def _step_bytes(shape: ModelShape, tokens: int, *, dtype_bytes: int, tp: int) -> int:
    """Queries, keys and values of a step of the engine, and the MLP's three intermediates, going in and coming out."""
    heads = (shape.num_heads // tp + shape.local_kv_heads(tp)) * shape.head_dim
    dense, routed = shape.mlp_widths(tp)
    shared = shape.shared_intermediate_size // tp
    width = max(3 * dense, 3 * (routed + shared) + shape.experts_per_token * shape.hidden_size)
    mixed = max(heads, 2 * shape.mixer_width)
    return tokens * 2 * dtype_bytes * (mixed + width)


def _activation_bytes(shape: ModelShape, w: Workload) -> int:
    """Training with a checkpoint at the input of every layer (Chen et al. 2016, one segment a layer).

    Held at the worst moment: all checkpoints, or two where they wait in host memory; what the layer that is being
    recomputed keeps for its backward; the gradients on their way through it, taken as two of its widest and two of the
    hidden size; the final norm.
    """
    d, hidden = w.dtype_bytes, shape.hidden_size
    checkpoints = min(2, shape.num_layers) if w.offload_activations else shape.num_layers
    per_token = checkpoints * hidden * d + _layer_bytes(shape, w) + hidden * (NORM_BYTES + 2 * d)
    per_token += 2 * d * (max(*shape.mlp_widths(w.tp), shape.mixer_width) + hidden)
    return w.micro_batch * w.context * per_token + _whole_matrix_bytes(shape, w, training=True)


def _layer_bytes(shape: ModelShape, w: Workload) -> int:
    """Bytes that autograd keeps of one transformers layer for one token, with flash attention, which needs no mask.

    Norms; queries, keys, values, attention output and log-sum-exp; gate, activation, up and their product; the inputs
    of the linear layers, which LoRA keeps as an fp32 copy for each adapter. Counted tensor by tensor in the tests. Of a
    recurrent layer, three times its widest projection, which is a guess.
    """
    d, hidden, rank = w.dtype_bytes, shape.hidden_size, w.lora_rank
    heads, kv_heads = shape.num_heads // w.tp, shape.local_kv_heads(w.tp)
    q, kv = heads * shape.head_dim, kv_heads * shape.head_dim
    width, routed = shape.mlp_widths(w.tp)
    norms = shape.norms_per_layer * (NORM_BYTES * hidden + 4)
    norms += (NORM_BYTES * (q + kv) + 4 * (heads + kv_heads)) * shape.qk_norm
    attention = max(2 * d * (q + kv) + 4 * heads, 3 * d * shape.mixer_width)

    def dense(width: int) -> int:
        if w.mode is Mode.FULL:
            return 4 * d * width
        return 3 * d * width + 4 * (2 * hidden + width + 3 * rank)

    inputs = 2 * d * hidden if w.mode is Mode.FULL else 4 * (3 * hidden + q + 4 * rank)
    experts = shape.experts_per_token * (2 * d * hidden + 40) + 4 * d * routed + d * hidden + 4 * shape.num_experts
    experts += dense(shared) if (shared := shape.shared_intermediate_size // w.tp) else 0
    return norms + attention + inputs + max(dense(width) if width else 0, experts if routed else 0)


def _whole_matrix_bytes(shape: ModelShape, w: Workload, *, training: bool) -> int:
    """Short-lived matrices. NF4: the largest matrix, unpacked. Training: a new gradient before it is added to the sum,
    or, for LoRA on packed experts, one layer's merged weights and their delta."""
    sizes = [(group, prod(group.local_shape(w.tp))) for group in shape.groups]
    if w.mode is Mode.FULL:
        return w.dtype_bytes * max(size for _, size in sizes) if training else 0
    unpacked = max(size for group, size in sizes if group.quantizable) if w.mode is Mode.QLORA else 0
    experts = sum(size for group, size in sizes if group.module == "experts") if training else 0
    return w.dtype_bytes * unpacked + (w.dtype_bytes + 4) * experts


# ---- what the trainer keeps ----------------------------------------------------------------------------------------


def trainer_state(shape: ModelShape, w: Workload) -> dict[str, int]:
    """Parameters of the trainer's own, gradients, optimizer state and master weights of what is trained."""
    full, trained = w.mode is Mode.FULL, _trained(shape, w)
    num_trained = sum(prod(size) * count for size, count in trained)
    base = {names.TRAINER_BASE: w.dtype_bytes * shape.num_adapted(tp=w.tp)} if w.fold_adapter else {}
    return base | {
        names.TRAINER_PARAMETERS: 0 if full else 4 * num_trained,
        names.TRAINER_GRADIENTS: (w.dtype_bytes if full else 4) * num_trained,
        names.TRAINER_OPTIMIZER: sum(_moment_bytes(w, size) * count for size, count in trained),
        names.TRAINER_MASTER_WEIGHTS: 2 * num_trained if full and w.dtype_bytes < 4 else 0,
    }


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes that a streamed step has on the device."""

    state: int  # the slots, and what a range is stepped in
    slot: int  # one of the slots; a window that state stays beside has one more
    gradients: int  # those that are there at once where a range's are dropped as it is stepped


def window_bytes(shape: ModelShape, w: Workload) -> Window:
    """Size the window: ranges of elements for AdamW and SGD, some whole parameters for others.

    A range is stepped over a flat parameter and its gradient, in fp32 where there are masters.
    """
    masters = 2 if w.mode is Mode.FULL and w.dtype_bytes < 4 else 0
    dtype_bytes = w.dtype_bytes if w.mode is Mode.FULL else 4
    tensors = [(prod(size), count, _moment_bytes(w, size)) for size, count in _trained(shape, w)]
    num_trained = sum(elements * count for elements, count, _ in tensors)
    largest = max(elements for elements, _, _ in tensors)
    if w.optimizer is Optimizer.ADAFACTOR:
        held = max(masters * elements + state for elements, _, state in tensors)
        window = 3 * max(min(RANGE_BYTES, (masters + 1) * num_trained), held) + (8 if masters else 0) * largest
        return Window(state=window, slot=0, gradients=2 * largest * dtype_bytes)
    state_bytes = masters + _moment_bytes(w, (1,))
    elements = min(num_trained, RANGE_BYTES // state_bytes)
    flat_bytes = 2 * (4 if masters else dtype_bytes) + masters  # and the 16-bit weights
    # moments that are kept in bf16 are stepped in fp32
    flat_bytes += optimizer_bytes(w.optimizer, (1,)) if w.moment_dtype is MomentDtype.BFLOAT16 else 0
    return Window(
        state=(NUM_SLOTS * state_bytes + flat_bytes) * elements,
        slot=state_bytes * elements,
        gradients=2 * max(largest, elements) * dtype_bytes,
    )


def _trained(shape: ModelShape, w: Workload) -> Sequence[tuple[tuple[int, ...], int]]:
    """Shape and number of what is trained: every weight, or the adapter."""
    if w.mode is Mode.FULL:
        return [(group.local_shape(w.tp), group.count) for group in shape.groups]
    return shape.adapter_shapes(w.lora_rank, tp=w.tp)


def optimizer_bytes(optimizer: Optimizer, shape: tuple[int, ...]) -> int:
    """State of one tensor; adafactor factors the last two axes (Shazeer and Stern 2018, as `torch.optim.Adafactor`)."""
    if optimizer is Optimizer.ADAFACTOR and len(shape) > 1:
        return 4 * prod(shape[:-2]) * (shape[-2] + shape[-1])
    return (8 if optimizer is Optimizer.ADAMW else 4) * prod(shape)


def _moment_bytes(w: Workload, shape: tuple[int, ...]) -> int:
    return optimizer_bytes(w.optimizer, shape) // (2 if w.moment_dtype is MomentDtype.BFLOAT16 else 1)
