"""vLLM as an engine, in this process or in one of its own, through its documented extension points.

The weights lie in slabs that the trainer owns (`colo.engines.vllm.store`): a trainer's parameters can be that memory,
in one process and across two, and the engine may be killed and started again on it. What can be given back in between
is the KV cache and, where the weights are vLLM's own, the weights.

What lasts as long as vLLM does is made anew with every `Connection`: `WorkerWeights`, `NamedAdapters`, `Requests`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from colo.engine import AdapterWeights, Completion, EngineState, SleepLevel
from colo.engines.common import ADVICE, wake_segments
from colo.engines.vllm import compat, plugin, sampling
from colo.engines.vllm.connection import DEADLINE_S, Connection
from colo.engines.vllm.memory import WorkerMemory
from colo.engines.vllm.named_adapters import NamedAdapters
from colo.engines.vllm.options import device_of, llm_options, quantization_of, save_config
from colo.engines.vllm.requests import PauseMode, Requests
from colo.engines.vllm.segment import residual_bytes
from colo.engines.vllm.store import WeightStore
from colo.engines.vllm.weights import WorkerWeights
from colo.errors import EngineLost, PhaseError, StaleWeights, TransferError
from colo.memory.load_plan import LoadPlan
from colo.memory.offload import Mover
from colo.phases.phase import ENGINE_WEIGHTS, Residency
from colo.phases.segment import Segment
from colo.weights.packed import PackedWeight
from colo.weights.transports.ipc.staging import Staging


class VLLMEngine:
    """An `Engine` (see `colo.engine`) that runs vLLM.

    Ownership: owns the `vllm.LLM` it has started and the memory of its weights until `close`; of an engine made by
    `around` it owns neither. It starts awake and poisoned, until `commit` names what it holds.
    Not thread-safe: one caller at a time.
    """

    name = "vllm"

    def __init__(
        self,
        model: str | os.PathLike[str] | PretrainedConfig | PreTrainedModel,
        *,
        kv_cache_bytes: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        own_process: bool = True,
        share_memory: bool = True,
        max_lora_rank: int = 0,
        mover: Mover | None = None,
        deadline_s: float = DEADLINE_S,
        **options: Any,
    ) -> None:
        """Start vLLM.

        `model` is a folder or a hub id; of a transformers config or model it takes the shape, with random weights.
        With `share_memory` the weights lie where a trainer can map them and stay on the device; without, and where
        vLLM quantizes them, they are its own and may leave (levels 1 and 2). `options` are those of `vllm.LLM`, such
        as `max_model_len`, `enforce_eager` or `load_format`; what colo sets itself may be overridden.

        Raises: `Unsupported` without vLLM, or when it runs on another device; whatever vLLM raises.
        """
        compat.warn_if_untested()
        compat.import_apart()
        plugin.register()
        self._begin_life(device_of(device), mover)
        try:
            if isinstance(model, (PretrainedConfig, PreTrainedModel)):
                folder = self._owned.enter_context(TemporaryDirectory(prefix="colo-"))
                save_config(model, folder)
                options.setdefault("load_format", "dummy")
                model = folder
            # Quantized weights cannot be a trainer's, and what they were made from would stay beside them.
            shares = share_memory and quantization_of(model, options) is None
            self._store: WeightStore | None = WeightStore(self.device) if shares else None
            if self._store is not None:
                self._owned.callback(self._store.close)
            options = llm_options(
                os.fspath(model),
                self._store.address if self._store is not None else None,
                kv_cache_bytes=kv_cache_bytes,
                device=self.device,
                dtype=dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32),
                max_lora_rank=max_lora_rank,
                options=options,
            )
            start = partial(Connection.start, options, self.device, own_process=own_process, deadline_s=deadline_s)
            self._start: Callable[[], Connection] | None = partial(start, on_loss=self._lose)
            self._connect(self._start())
        except BaseException:
            self._owned.close()
            raise

    @classmethod
    def around(cls, llm: Any, *, mover: Mover | None = None, deadline_s: float = DEADLINE_S) -> VLLMEngine:
        """An engine over your own `vllm.LLM`, which stays yours: `close` leaves it awake and running.

        Raises: `Unsupported` for an engine in its own process without colo's worker extension.
        """
        compat.warn_if_untested()
        engine = cls.__new__(cls)
        engine._begin_life(device_of(llm.llm_engine.vllm_config.device_config.device), mover)
        own_process = not compat.is_in_this_process(llm)
        try:
            engine._connect(
                Connection(llm, engine.device, own_process=own_process, deadline_s=deadline_s, on_loss=engine._lose)
            )
        except BaseException:
            engine._owned.close()
            raise
        return engine

    def _begin_life(self, device: torch.device, mover: Mover | None) -> None:
        self.device = device
        self._owned = ExitStack()
        self.mover = mover or Mover(device)
        if mover is None:
            self._owned.callback(self.mover.close)
        self._staging = Staging(device)
        self._owned.callback(self._staging.close)
        self._store = None
        self._start = None  # starts a vLLM of our own, the first time and after a loss
        self._memory = WorkerMemory(self._before_leaving)
        self.before_generate: Callable[[], None] | None = None
        self._closed = False
        self._version: int | None = None
        self._cause = "no weights have been committed yet"

    # ---- what a runtime asks -----------------------------------------------------------------------------------------

    @property
    def llm(self) -> Any:
        """The `vllm.LLM`; `None` when closed."""
        return self._connection.llm

    @property
    def state(self) -> EngineState:
        """What the engine can do now."""
        if self._closed:
            return EngineState.CLOSED
        if self._connection.lost is not None:
            return EngineState.LOST
        if any(segment.residency is not Residency.RESIDENT for segment in self.segments):
            return EngineState.ASLEEP
        return EngineState.PAUSED if self._requests.paused else EngineState.AWAKE

    @property
    def weights_version(self) -> int | None:
        """Version of the weights it holds; `None` while poisoned."""
        return self._version

    @property
    def segments(self) -> Sequence[Segment]:
        """`engine.weights` and `engine.kv_cache`."""
        return self._memory.segments

    @property
    def pids(self) -> Sequence[int]:
        """Process of every worker."""
        return self._connection.pids

    @property
    def ipc_refusal(self) -> str | None:
        """Why a worker cannot map the trainer's memory; host memory is in between then."""
        return self._connection.ipc_refusal

    @property
    def model_type(self) -> str | None:
        """Of the model's configuration."""
        return self._connection.model_type

    @property
    def placement(self) -> str:
        """Where the engine runs and its weights lie, in a phrase for reports."""
        where = "in its own process" if self._connection.own_process else "in this process"
        return f"vLLM {compat.vllm_version()} {where}, weights in {self._weights.where}"

    @property
    def pinned_bytes(self) -> int:
        """Host memory that the workers have pinned now."""
        return sum(self._connection.call("pinned_bytes"))

    @property
    def residual_bytes(self) -> Mapping[str, int]:
        """Device bytes that no sleep gives back: what they are, and how many; measured when vLLM has started."""
        known = residual_bytes(self._infos)
        in_segments = sum(segment.size_bytes for segment in self.segments)
        rest = self._connection.taken_bytes - in_segments - sum(known.values())
        return known | ({"context, libraries and the rest": rest} if rest > 0 else {})

    def sampling_params(self, params: Any = None, **options: Any) -> Any:
        """vLLM's `SamplingParams` from options by name, or colo's or vLLM's own as they are."""
        return sampling.sampling_params(params, options)

    def sampling_temperature(self, params: Any) -> float | None:
        """The temperature that `logprobs` have in them; `None` where filters or penalties change them too."""
        return sampling.sampling_temperature(params)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Any, *, adapter: str | None = None
    ) -> list[Completion]:
        """Sample `params.n` completions for each prompt; see `Engine.generate`. `params` may be vLLM's own.

        A `seed` by name or in those is vLLM's: the same for every prompt, and the next number for the next sample.
        """
        if self.before_generate is not None:
            self.before_generate()
        self._require("generate", EngineState.AWAKE)
        if self._version is None:
            raise StaleWeights(f"the engine does not generate: {self._cause}")
        return self._requests.generate(prompts, params, version=self._version, adapter=adapter)

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generating, so that weights may change. Idempotent; `PhaseError` when asleep or closed.

        `mode` says what becomes of requests in flight, which you have added to `llm.llm_engine`: `abort` ends them (the
        next `step` says so; in this process they are gone without a word); `wait` lets those that have begun finish,
        however long it takes; `keep` continues them after `resume`, from tokens computed again where the KV cache has
        been dropped or weights have changed. Those that have not begun wait for `resume`, unless aborted. A pause that
        is on stays as it was asked for.

        Raises: `Unsupported` for `wait` in this process, where requests go on only while you step.
        """
        self._require("pause", EngineState.AWAKE, EngineState.PAUSED)
        self._requests.pause(mode)

    def resume(self) -> None:
        """Generate again. Idempotent; `PhaseError` unless every segment is resident."""
        self._require("resume", EngineState.AWAKE, EngineState.PAUSED)
        self._memory.settle()
        self._requests.resume()

    def sleep(self, level: SleepLevel | int, mode: PauseMode = "abort") -> None:
        """Give memory back, unless it is given back already; see `Engine.sleep`. `mode` is that of `pause`."""
        self._require_open("sleep")
        leaving = self._memory.leaving(SleepLevel(str(level)))
        self._requests.pause(mode)
        for move in [segment.begin(target) for segment, target in leaving]:
            move.wait()

    def wake(self, tags: Iterable[str] | None = None) -> None:
        """Bring back `weights`, `kv_cache`, or both (`None`); see `Engine.wake`. `ValueError` for another tag."""
        self._require_open("wake")
        wake_segments(self.segments, tags)

    def reset_prefix_cache(self) -> None:
        """Forget everything computed from earlier weights. Raises: `TransferError` when vLLM does not let go of it."""
        self._require_open("reset its prefix cache")
        self._requests.reset_prefix_cache()

    def record_plan(self, source: Mapping[str, torch.Tensor]) -> LoadPlan:
        """Record what vLLM's loader does with `source`; see `Engine.record_plan`. Every worker records its own."""
        self._require_weights("record a load plan")
        return self._weights.record_plan(source)

    def packed_weights(self) -> Mapping[str, PackedWeight]:
        """Weights that bitsandbytes has packed, by parameter name; none of an engine in another process.

        Raises: `Unsupported` for what is packed in a way that no trainer can share.
        """
        if self._connection.own_process:
            return {}
        packed: Mapping[str, PackedWeight] = self._connection.call("packed")[0]
        return packed

    def share_weights(self) -> None:
        """Let a trainer work on the same memory: from now on it never leaves the device."""
        self._require_weights("share its weights")
        self._memory.share_weights()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run vLLM's layerwise reload, post-processing and quantization included. Poisons until the next `commit`.

        Every tensor of the model has to be given. Raises: `PhaseError` while the weights are away; whatever a worker
        raised, with its traceback, after which all of it has to be loaded again.
        """
        self._require_weights("load weights")
        self.poison("weights have been loaded into it and not committed: call commit(version) once all of them have")
        self._weights.reload(weights)
        self._requests.reset_prefix_cache()

    def receive(self, operation: str, **arguments: Any) -> list[Any]:
        """One step of copying weights from this process, in every worker; see `ipc.sender.Peer`.

        Poisons from `begin` until the next `commit`. Raises: `PhaseError` while the weights are away.
        """
        return self.receive_all([(operation, arguments)])

    def receive_all(self, operations: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
        """Several such steps in one call to the workers; see `receive`."""
        names = [name for name, _ in operations]
        if names != ["release"]:
            self._require_weights("take weights")
        if "begin" in names:
            self.poison("weights have been copied into it and not committed: publish all of them")
        return self._connection.call("receive", steps=[list(operation) for operation in operations])

    def commit(self, version: int) -> None:
        """Declare that the engine now holds `version`; lifts a poisoning. `PhaseError` unless they are resident."""
        self._require_weights(f"hold version {version}")
        self._connection.tell_version(version)
        self._version = version

    def gather(self, value: Any) -> list[Any]:
        """`value` of every rank of a torchrun group, all of which have to ask; see `in_all_ranks`."""
        return self._connection.gather(value)

    def poison(self, cause: str) -> None:
        """Refuse to generate, with `cause`, until the next `commit`."""
        self._version, self._cause = None, cause

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the adapters that are loaded."""
        return tuple(self._adapters.numbers)

    @property
    def adapter_refusal(self) -> str | None:
        """Why the adapter that was loaded last is loaded anew for each version; `None` where it is written in place."""
        return self._adapters.refusal

    def load_adapter(self, name: str, adapter: AdapterWeights) -> None:
        """Make a LoRA adapter available by name, from memory; see `Engine.load_adapter`."""
        self._require_weights("load an adapter")
        if self._adapters.load(name, adapter):
            self._requests.reset_prefix_cache()

    def replace_adapter(self, old: str, new: str, adapter: AdapterWeights) -> None:
        """Put `adapter`, named `new`, in the place of `old`; see `Engine.replace_adapter`.

        The workers know it by the same number as before and write it over what they hold, without vLLM's loader, where
        its modules and shapes are those of `old`. `PhaseError` while the weights are away, whose memory that is in.
        """
        self._require_weights("replace an adapter")
        if self._adapters.replace(old, new, adapter):
            self._requests.reset_prefix_cache()

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter. `ValueError` when there is none of that name."""
        self._require_open("remove an adapter")
        self._adapters.remove(name)

    def recover(self) -> None:
        """Start a lost engine again, on the same weights. It is awake and poisoned then.

        Raises: `PhaseError` for an engine that is not lost, or that is not ours to start; `TransferError` when the new
            one has written over the trainer's weights as it started; whatever vLLM raises.
        """
        lost = self._connection.lost
        if lost is None:
            raise PhaseError("the engine is not lost: nothing to recover")
        if self._start is None:
            raise PhaseError(f"your vllm.LLM is lost ({lost}): close the runtime, start another and share it")
        self._connection.close()
        held = self._store.checksums() if self._store is not None else {}
        self._connect(self._start())
        now = self._store.checksums() if self._store is not None else {}
        if changed := [key for key in held.keys() & now.keys() if now[key] != held[key]]:
            cause = (
                f"vLLM has written over weights of the trainer as it started ({len(changed)} of {len(held)} pieces): "
                "restore them from a checkpoint, and start this model with share_memory=False"
            )
            self._connection.give_up(cause)
            raise TransferError(cause)
        self.poison("it has been started again: publish to it")

    def close(self) -> None:
        """Release everything; a `vllm.LLM` of the caller's is left awake and running. Idempotent.

        Raises: `BudgetError` when a `vllm.LLM` of the caller's, or one in this process, is asleep and the device has no
        room to wake it: free some and close again.
        """
        if self._closed:
            return
        if self._connection.lost is None:
            with suppress(EngineLost):  # nothing is left to bring back then
                self._leave_as_found()
        self._closed = True
        self.poison("it is closed")
        self._connection.close()
        self._weights.close()
        self._owned.close()

    # ---- start and end -----------------------------------------------------------------------------------------------

    def _connect(self, connection: Connection) -> None:
        """Take `connection` for the engine's, once everything that may fail has not; it is closed otherwise."""
        try:
            self._staging.move_to(self.device if connection.ipc_refusal is None else torch.device("cpu"))
            weights = WorkerWeights(connection, store=self._store, staging=self._staging)
            self._memory.hold(connection, weights)
        except BaseException:
            connection.close()
            raise
        self._connection, self._infos, self._weights = connection, connection.infos, weights
        self._adapters = NamedAdapters(connection, self._staging)
        self._requests = Requests(connection, self._adapters)

    def _leave_as_found(self) -> None:
        """Wake what stays or is freed in this process: vLLM maps and frees whole allocations only."""
        if self._start is not None and self._connection.own_process:
            return  # everything ends with the process
        if self._start is None:
            was_dropped = self._memory.weights.residency is Residency.DISCARDED
            self.wake()
            self.resume()
            if was_dropped:
                warnings.warn(
                    "your vllm.LLM is awake without weights, since a level-2 sleep dropped them: load them before it "
                    "generates",
                    stacklevel=4,
                )
        self._memory.release()
        if self._start is not None:
            self._connection.call("forget")

    # ---- told by its segments and its connection ---------------------------------------------------------------------

    def _before_leaving(self, name: str, target: Residency) -> None:
        """Make ready for a segment to leave the device for `target`: nobody may use it any more."""
        self._requests.pause()
        self.reset_prefix_cache()
        if name == ENGINE_WEIGHTS and target is Residency.DISCARDED:
            self.poison("its weights have been dropped: wake it and publish weights to it")

    def _lose(self, cause: str) -> None:
        """Know that its process is gone, and what was in its memory."""
        self.poison(f"it is lost: {cause}")
        self._memory.lose()

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _require(self, verb: str, *states: EngineState) -> None:
        self._connection.require()
        if self.state not in states:
            raise PhaseError(f"the engine is {self.state} and cannot {verb}: {ADVICE[self.state]}")

    def _require_open(self, verb: str) -> None:
        self._require(verb, EngineState.AWAKE, EngineState.PAUSED, EngineState.ASLEEP)

    def _require_weights(self, verb: str) -> None:
        self._require_open(verb)
        residency = self._memory.weights.residency
        if residency is not Residency.RESIDENT:
            raise PhaseError(f"the engine's weights are {residency} and it cannot {verb}: wake them first")
