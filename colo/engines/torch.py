"""The embedded engine: transformers in this process, on the CPU or on one GPU.

Its parameters lie in regions, fused and padded as vLLM lays them out; the transformers module that computes with them
is views of that memory, and so may be a trainer's. Its KV cache is one buffer that every call cuts into rows, or, for a
model that keeps more than keys and values of one shape, the model's own cache, whose bytes are counted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from colo.engine import AdapterWeights, Completion, SamplingParams, SleepLevel
from colo.engines.base import EngineBase
from colo.engines.caches import Footprint, KVCacheBuffer, ModelCaches, Reservation, Wave
from colo.engines.layout import FusedWeights, Layout, LoadedAdapters, bind, empty_model
from colo.engines.sampling import check_seeds, sample_rows
from colo.engines.text import check_count, check_prompts, positions_of
from colo.errors import PhaseError
from colo.memory.load_plan import LoadPlan
from colo.memory.offload import Mover, RegionSegment
from colo.memory.region import Region, allocate_region, close_all
from colo.memory.uninterrupted import uninterrupted
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, Move, Residency, Segment
from colo.weights.mismatch import first_not_finite, not_numbers
from colo.weights.packed import refuse_quantized

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class TorchEngine(EngineBase):
    """An `Engine` (see `colo.engine`) that runs a transformers model in this process. One caller at a time.

    Ownership: owns the memory of its weights and KV cache, and its mover where none was given, until `close`. Rotary
    buffers, adapters and logits of cached prompts are ordinary tensors, and survive every sleep.

    It starts awake and poisoned: load weights and `commit` a version. The weights alone may be woken, and updated,
    before the KV cache.
    """

    name = "torch"
    placement = "transformers in this process"
    called = "the embedded engine"
    or_else = "leave it out, or use vLLM (engine='vllm')"

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        kv_cache_bytes: int,
        mover: Mover | None = None,
        attn_implementation: str | None = None,
    ) -> None:
        """Take the memory for a model of `config`. No checkpoint is read.

        `module.generation_config`, made from `config`, names the end-of-sequence tokens: replace it by a checkpoint's.
        Raises: `ValueError` when `kv_cache_bytes` holds no token, `BudgetError` when memory is missing, `Unsupported`
        for a model that cannot go on from what it keeps of a sequence, and for quantized weights.
        """
        own_mover = mover or Mover(torch.device(device))
        self.module: PreTrainedModel = empty_model(config, dtype=dtype, attn_implementation=attn_implementation)
        refuse_quantized(self.module.config)
        # A trainer may compute gradients over this memory, which tensors made in inference mode do not allow.
        with torch.inference_mode(False), ExitStack() as undo:
            self.weights = FusedWeights(Layout.of(self.module), device=torch.device(device))
            undo.callback(close_all, [region.close for region in self.weights.regions])
            bind(self.module, self.weights.hf_views(), self.weights.layout.tied)
            self._positions = positions_of(self.module.config)
            region = self._make_cache(kv_cache_bytes, dtype)
            undo.pop_all()
        regions, on_move = self.weights.regions, self._on_weights_move
        self._weights_segment = _Segment(ENGINE_WEIGHTS, regions, Residency.OFFLOADED, own_mover, on_move)
        self._kv_segment = _Segment(ENGINE_KV_CACHE, [region], Residency.DISCARDED, own_mover, self._on_kv_move)
        super().__init__(region.device, (self._weights_segment, self._kv_segment), mover=own_mover)
        # the base was given a mover either way, and must close only one that was made here
        self._owns_mover = mover is None
        self._adapters = LoadedAdapters(self.module)

    def _make_cache(self, size_bytes: int, dtype: torch.dtype) -> Region:
        """Choose what holds the states of sequences, and take or count its memory."""
        for region in self.weights.regions:
            region.bytes.zero_()  # the measuring pass must not meet NaN in fresh memory
        # measured rather than read from the config: what a family caches is not in it
        footprint, device = Footprint.of(self.module, self._positions), self.weights.regions[0].device
        if footprint.buffer is None:
            room = Reservation(ENGINE_KV_CACHE, size_bytes, device)
            self._caches: KVCacheBuffer | ModelCaches = ModelCaches(room, footprint, self._positions)
            return room
        layers, heads, size = footprint.buffer
        region = allocate_region(size_bytes, device, name=ENGINE_KV_CACHE)
        try:
            self._caches = KVCacheBuffer(
                region, num_layers=layers, num_heads=heads, head_dim=size, dtype=dtype, positions=self._positions
            )
        except BaseException:
            region.close()
            raise
        return region

    @property
    def model_type(self) -> str | None:
        """`model_type` of the model's configuration."""
        kind: str | None = getattr(self.module.config, "model_type", None)
        return kind

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return int(self.module.config.get_text_config().vocab_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache for each token of a sequence."""
        return self._caches.bytes_per_token

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, *, adapter: str | None = None
    ) -> list[Completion]:
        """Sample `params.n` completions for each prompt; see `Engine.generate`."""
        version = self.ready()
        if adapter is not None:
            self._adapters.require(adapter)
        waves = self._plan(prompts, params)
        plain = torch.autocast(self.device.type, enabled=False)  # a caller's autocast is for training
        with torch.no_grad(), plain, self._adapters.applied(adapter):
            completions = [c for wave in waves for c in self._run(wave, params, adapter, version)]
        # waves group prompts by length: the order of the caller is put back
        return sorted(completions, key=lambda c: (c.prompt_index, c.sample_index))

    def check_request(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        """Raise what `generate` would raise for these prompts and parameters."""
        self._plan(prompts, params)

    @property
    def longest_prompt(self) -> int | None:  # type: ignore[override]
        """The most tokens of a prompt after which a position is left; `None` where the model has no such limit."""
        count = self._positions.count
        return None if count is None else count - 1

    @property
    def boundary(self) -> int | None:  # type: ignore[override]
        """The tokens at which LongRoPE's frequencies change; see `Positions`."""
        return self._positions.boundary

    def why_it_stays(self, segment: Segment) -> str:
        """The reason why a segment never leaves: a trainer works on it."""
        return f"the trainer's memory too ({segment.size_bytes} bytes): level 'keep-weights' drops the KV cache only"

    def share_weights(self) -> bool:
        """Let a trainer work on the weights (`weights.hf_views()`), which never leave from now on; see `Engine`."""
        self._require_weights("share its weights")
        self._weights_segment.away = None
        # in one process nothing has to be exported
        return False

    def reset_prefix_cache(self) -> None:
        """Forget everything computed from earlier weights."""
        self._caches.forget()

    def record_plan(self, source: Mapping[str, torch.Tensor]) -> LoadPlan:
        """Record what the loader does with `source`; see `Engine.record_plan`. `PhaseError` unless resident."""
        self._require_weights("record a load plan")
        return LoadPlan.record(self.weights.load, source, self.weights.unpadded())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy `weights` (name, tensor) to their places; see `FusedWeights.load`. Poisons until the next `commit`."""
        self._require_weights("load weights")
        self.poison_for_load()
        self.weights.load(weights)

    def commit(self, version: int) -> None:
        """Declare that the engine now holds `version`; lifts a poisoning. `PhaseError` unless they are resident."""
        super().commit(version)
        self._weights_segment.settle()

    def load_adapter(self, name: str, adapter: AdapterWeights) -> None:
        """Make a LoRA adapter available by name; see `LoadedAdapters.add`. Modules go by their Hugging Face names."""
        self._status.require_open("load an adapter")
        self._adapters.add(name, adapter)

    def replace_adapter(self, old: str, new: str, adapter: AdapterWeights) -> None:
        """Remove `old` and load `adapter` as `new`; see `Engine.replace_adapter`."""
        self._status.require_open("replace an adapter")
        self._adapters.require(old)
        if new != old and new in self._adapters.names:
            raise ValueError(f"there is an adapter {new!r} already: give each version a name of its own")
        self.remove_adapter(old)
        self.load_adapter(new, adapter)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter, and prompts computed with it. `ValueError` when there is none of that name."""
        self._adapters.remove(name)
        self._caches.forget()

    def _release(self) -> None:
        """Release everything, also what `weights.hf_views()` returned."""
        self._adapters.clear()
        self._caches.forget()
        # on meta: whoever holds the module keeps no memory by it
        self.module.to_empty(device="meta")
        # the regions can close only when no view refers to them
        self.weights.drop_views()
        close_all([self._weights_segment.close, self._kv_segment.close])

    def _plan(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Wave]:
        # `operator.index` takes NumPy's and torch's integers, and refuses floats
        token_ids = [tuple(map(operator.index, prompt)) for prompt in prompts]
        check_count(len(token_ids), params.n)
        check_seeds(params.seed, len(token_ids))
        check_prompts(token_ids, self.vocab_size, self._positions.count)
        # refuses a sequence that does not fit before anything is computed
        return self._caches.plan(token_ids, n=params.n, max_tokens=params.max_tokens)

    def _run(self, wave: Wave, params: SamplingParams, adapter: str | None, version: int) -> list[Completion]:
        logits, rows = self._caches.start(self.module, wave, adapter)
        stop_token_ids = self._stop_token_ids(params)
        transcript = sample_rows(
            logits,
            wave.rows,
            params,
            stop_token_ids,
            advance=lambda tokens: rows.append(self.module, tokens),
            keep=rows.keep,
            limits=wave.limits,
        )
        if transcript.has_nan():
            self._caches.forget()  # keys and values of the prompts may be NaN too
            raise FloatingPointError(self._why_nan(adapter))
        return [
            Completion(
                prompt_index=prompt_index,
                sample_index=sample_index,
                prompt_token_ids=wave.prompts[slot],
                token_ids=tokens,
                logprobs=logprobs,
                finish_reason="stop" if tokens[-1] in stop_token_ids else "length",
                weights_version=version,
                adapter=adapter,
            )
            for (prompt_index, sample_index), slot, (tokens, logprobs) in zip(
                wave.rows, wave.slots, transcript.results(), strict=True
            )
        ]

    def _why_nan(self, adapter: str | None) -> str:
        """Words about log-probabilities that are not numbers, with the first tensor that is to blame."""
        return not_numbers(first_not_finite([*self.weights.hf_views().items(), *self._adapters.tensors(adapter)]))

    def _stop_token_ids(self, params: SamplingParams) -> set[int]:
        token_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            for config in (self.module.config.get_text_config(), self.module.generation_config):
                # a checkpoint's generation config names end tokens that its config does not have
                eos = config.eos_token_id
                token_ids |= {eos} if isinstance(eos, int) else set(eos or ())
        return token_ids

    def _on_weights_move(self, source: Residency, target: Residency) -> None:
        self._status.paused = True
        if target is Residency.DISCARDED:
            self.poison("its weights have been dropped: wake it and publish weights to it")
        elif source is Residency.DISCARDED:
            self.weights.zero_padding()

    def _on_kv_move(self, source: Residency, target: Residency) -> None:
        self._status.paused = True
        # keys and values of prompts went with the memory
        self._caches.forget()

    def _require_weights(self, verb: str) -> None:
        """Raise `PhaseError` unless the weights are there. The KV cache comes last, so it may still be away."""
        self._status.require_weights(verb)
        self._weights_segment.settle()


class _Segment(RegionSegment):
    """A segment that tells the engine of every move. With `away=None` it never leaves the device."""

    def __init__(
        self,
        name: str,
        regions: Sequence[Region],
        away: Residency,
        mover: Mover,
        on_move: Callable[[Residency, Residency], None],
    ) -> None:
        """`on_move` is told where it was and where it is going, once it is on its way."""
        super().__init__(name, regions=regions, away=away, mover=mover)
        self._on_move = on_move

    def begin(self, target: Residency) -> Move:
        """Start moving to `target`. Raises: as `Segment.begin`, and `PhaseError` when it must not leave."""
        source = self.residency
        if target is not source and self.away is None and target is not Residency.RESIDENT:
            raise PhaseError(
                f"segment {self.name} cannot become {target}: a trainer works on these {self.size_bytes} bytes. "
                f"Put the engine to sleep with level '{SleepLevel.KEEP_WEIGHTS}', which drops the KV cache only"
            )
        with uninterrupted():  # a move that the engine has not heard of would leave it awake without memory
            move = super().begin(target)
            if target is not source:
                self._on_move(source, target)
        return move
