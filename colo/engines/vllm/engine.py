"""vLLM as an engine, in this process or in one of its own, through its documented extension points.

The weights lie in slabs that the trainer owns (`colo.engines.vllm.store`): a trainer's parameters can be that memory,
in one process and across two, and the engine may be killed and started again on it. What can be given back in between
is the KV cache and, where the weights are vLLM's own, the weights.
"""

from __future__ import annotations

import gc
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from tempfile import TemporaryDirectory
from typing import Any, Literal, NoReturn, TypeVar

import torch
from transformers import PretrainedConfig, PreTrainedModel

from colo import errors
from colo.engines.base import AdapterWeights, Completion, EngineState, SamplingParams, SleepLevel
from colo.engines.common import ADVICE, WEIGHTS_AT, check_prompts, is_deeper, wake_segments
from colo.engines.vllm import compat, plugin
from colo.engines.vllm.calls import Caller, NoAnswer, ProcessEnded
from colo.engines.vllm.options import llm_options, save_config
from colo.engines.vllm.segment import WorkerSegment
from colo.engines.vllm.store import WeightStore, device_id
from colo.errors import BudgetError, EngineLost, PhaseError, StaleWeights, TransferError, Unsupported
from colo.memory.offload import Mover
from colo.memory.probe import free_device_bytes, used_device_bytes
from colo.memory.region import carve, carved_bytes
from colo.memory.segment import Segment
from colo.memory.slab import Slab, open_slab
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, Residency
from colo.units import MIB
from colo.weights.load_plan import Copy, LoadPlan

T = TypeVar("T")

PauseMode = Literal["abort", "wait", "keep"]

DEADLINE_S = 300.0
"""How long an operation in the engine's process may take before the engine counts as lost."""

_STAGING_BYTES = 256 * MIB

_FIRST_ADAPTER = 1 << 20
"""Adapters are numbered from here, out of the way of those that a user loads by hand."""


class VLLMEngine:
    """An `Engine` (see `colo.engines.base`) that runs vLLM.

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
        With `share_memory` the weights lie where a trainer can map them and stay on
        the device; without, they are vLLM's own and may leave (levels 1 and 2). `options` are those of `vllm.LLM`, such
        as `max_model_len`, `enforce_eager` or `load_format`; what colo sets itself may be overridden.

        Raises: `Unsupported` without vLLM, or when it runs on another device; whatever vLLM raises.
        """
        compat.warn_if_untested()
        plugin.register()
        self.device = _device(device)
        self.mover = mover or Mover(self.device)
        self._owns_mover = mover is None
        self._deadline_s = deadline_s
        self._own_process = own_process
        self._store = WeightStore(self.device) if share_memory else None
        self._folder: TemporaryDirectory[str] | None = None
        if isinstance(model, (PretrainedConfig, PreTrainedModel)):
            self._folder = TemporaryDirectory(prefix="colo-")
            save_config(model, self._folder.name)
            options.setdefault("load_format", "dummy")
            model = self._folder.name
        self._options = llm_options(
            os.fspath(model),
            self._store.address if self._store is not None else None,
            kv_cache_bytes=kv_cache_bytes,
            device=self.device,
            dtype=dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32),
            max_lora_rank=max_lora_rank,
            options=options,
        )
        self._begin_life()
        try:
            self._start()
        except BaseException:
            self._shut_down()
            self._close_memory()
            raise

    @classmethod
    def around(cls, llm: Any, *, mover: Mover | None = None, deadline_s: float = DEADLINE_S) -> VLLMEngine:
        """An engine over your own `vllm.LLM`, which stays yours: `close` leaves it awake and running.

        Raises: `Unsupported` for an engine in its own process without colo's worker extension.
        """
        compat.warn_if_untested()
        engine = cls.__new__(cls)
        engine._own_process = not compat.is_in_this_process(llm)
        kind = str(llm.llm_engine.vllm_config.device_config.device)
        engine.device = _device(kind)
        engine.mover = mover or Mover(engine.device)
        engine._owns_mover = mover is None
        engine._deadline_s = deadline_s
        engine._store = engine._folder = None
        engine._options = {}
        engine._begin_life()
        try:
            engine._connect(llm)
        except BaseException:
            engine._close_memory()
            raise
        return engine

    def _begin_life(self) -> None:
        self.llm: Any = None
        self._calls: Caller | None = None
        self._opened: dict[int, list[torch.Tensor]] = {}
        self._staging: _Staging | None = None
        self._adapters: dict[str, int] = {}
        self._last_adapter = _FIRST_ADAPTER
        self._adapter_sent: tuple[list[list[Any]], dict[str, float]] = ([], {})
        self._paused = self._closed = self._shared = False
        self._lost: str | None = None
        self._version: int | None = None
        self._cause = "no weights have been committed yet"
        self._infos: list[dict[str, Any]] = []
        self._taken_bytes = 0  # what vLLM took of the device when it started, where that was seen
        self._segments: dict[str, WorkerSegment] = {}

    # ---- what a runtime asks -----------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """What the engine can do now."""
        if self._closed:
            return EngineState.CLOSED
        if self._lost is not None:
            return EngineState.LOST
        if any(segment.residency is not Residency.RESIDENT for segment in self._segments.values()):
            return EngineState.ASLEEP
        return EngineState.PAUSED if self._paused else EngineState.AWAKE

    @property
    def weights_version(self) -> int | None:
        """Version of the weights it holds; `None` while poisoned."""
        return self._version

    @property
    def segments(self) -> Sequence[Segment]:
        """`engine.weights` and `engine.kv_cache`."""
        return tuple(self._segments.values())

    @property
    def pids(self) -> Sequence[int]:
        """Process of every worker."""
        return tuple(info["pid"] for info in self._infos)

    @property
    def placement(self) -> str:
        """Where the engine runs and its weights lie, in a phrase for reports."""
        where = "in its own process" if self._own_process else "in this process"
        memory = {
            "slabs": "memory that the trainer owns"
            if self._store is not None
            else "memory of its own that can be mapped",
            "pool": "vLLM's sleep pool",
            "memory": "vLLM's own memory",
        }
        return f"vLLM {compat.vllm_version()} {where}, weights in {memory[self._infos[0]['weights_in']]}"

    @property
    def residual_bytes(self) -> Mapping[str, int]:
        """Device bytes that no sleep gives back: what they are, and how many; measured when vLLM has started."""
        known: dict[str, int] = {}
        for info in self._infos:
            for kind, num_bytes in info["residual_bytes"].items():
                known[kind] = known.get(kind, 0) + num_bytes
        rest = self._taken_bytes - sum(s.size_bytes for s in self._segments.values()) - sum(known.values())
        return known | ({"context, libraries and the rest": rest} if rest > 0 else {})

    def why_it_stays(self, name: str) -> str:
        """Why a segment never leaves, in words that follow `it is`."""
        if name == ENGINE_KV_CACHE:
            return "not in vLLM's sleep pool (start vLLM with enable_sleep_mode=True to let it go)"
        if self._shared:
            return "the trainer's memory too"
        if self._infos[0]["weights_in"] == "slabs":
            return "in memory that outlives the engine (start it with share_memory=False to let it go)"
        return "not in vLLM's sleep pool (on a GPU, start vLLM with enable_sleep_mode=True to let it go)"

    def sampling_params(self, params: Any = None, **sampling: Any) -> Any:
        """vLLM's `SamplingParams` from options by name, from colo's or from vLLM's own."""
        from vllm import SamplingParams as VLLMSamplingParams

        if params is not None and sampling:
            raise TypeError(f"give {sorted(sampling)} within the sampling parameters, or all options by name")
        if isinstance(params, SamplingParams):
            sampling = {field: getattr(params, field) for field in params.__dataclass_fields__}
            sampling["stop_token_ids"] = list(params.stop_token_ids)
            params = None
        params = VLLMSamplingParams(**sampling) if params is None else params.clone()
        if params.logprobs is None:
            params.logprobs = 0  # that of the sampled token
        return params

    def sampling_temperature(self, params: Any) -> float | None:
        """The temperature that `logprobs` have in them; `None` where filters or penalties change them too."""
        if self.llm.llm_engine.vllm_config.model_config.logprobs_mode != "processed_logprobs":
            return 1.0
        plain = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        plain |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        if any(getattr(params, name) not in (value, -1) for name, value in plain.items()):
            return None
        return params.temperature or 1.0

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Any, *, adapter: str | None = None
    ) -> list[Completion]:
        """Sample `params.n` completions for each prompt; see `Engine.generate`. `params` may be vLLM's own."""
        self._require("generate", EngineState.AWAKE)
        if self._version is None:
            raise StaleWeights(f"the engine does not generate: {self._cause}")
        if self.llm.llm_engine.has_unfinished_requests():
            raise PhaseError(
                "requests that you have added to llm.llm_engine are in flight or not collected, and their outputs "
                "would be mixed with these: step until none is left, or abort them"
            )
        params = self.sampling_params(params)
        token_ids = [tuple(map(operator.index, prompt)) for prompt in prompts]
        check_prompts(token_ids, self._vocab_size, self._max_length)
        request = self._lora_request(adapter)
        inputs = [{"prompt_token_ids": list(ids)} for ids in token_ids]
        outputs = self._in_engine(
            "generate",
            lambda: self.llm.generate(inputs, params, use_tqdm=False, lora_request=request),
            deadline=False,
        )
        return [
            _completion(prompt_index, output, sample, self._version, adapter)
            for prompt_index, output in enumerate(outputs)
            for sample in sorted(output.outputs, key=lambda sample: sample.index)
        ]

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
        self._pause(mode)

    def resume(self) -> None:
        """Generate again. Idempotent; `PhaseError` unless every segment is resident."""
        self._require("resume", EngineState.AWAKE, EngineState.PAUSED)
        for segment in self._segments.values():
            if segment.device_bytes != segment.size_bytes:
                segment.settle()
        if self._paused:
            self._in_engine("resume", lambda: self.llm.wake_up(tags=["scheduling"]))
            self._paused = False

    def sleep(self, level: SleepLevel | int, mode: PauseMode = "abort") -> None:
        """Give memory back, unless it is given back already; see `Engine.sleep`. `mode` is that of `pause`."""
        self._require_open("sleep")
        weights_at = WEIGHTS_AT[SleepLevel(str(level))]
        targets = ((ENGINE_WEIGHTS, weights_at), (ENGINE_KV_CACHE, Residency.DISCARDED))
        moving = [(self._segments[n], t) for n, t in targets if is_deeper(t, self._segments[n].residency)]
        stuck = next((s for s, _ in moving if s.away is None), None)
        if stuck is not None:
            raise PhaseError(f"level {level} would move {stuck.name}, which is {self.why_it_stays(stuck.name)}")
        self._pause(mode)
        for move in [segment.begin(target) for segment, target in moving]:
            move.wait()

    def wake(self, tags: Iterable[str] | None = None) -> None:
        """Bring back `weights`, `kv_cache`, or both (`None`); see `Engine.wake`. `ValueError` for another tag."""
        self._require_open("wake")
        wake_segments(self.segments, tags)

    def reset_prefix_cache(self) -> None:
        """Forget everything computed from earlier weights. Raises: `TransferError` when vLLM does not let go of it."""
        self._require_open("reset its prefix cache")
        llm = self.llm
        if not (
            self._in_engine("reset_prefix_cache", llm.reset_prefix_cache)
            or self._in_engine("reset_prefix_cache", lambda: llm.reset_prefix_cache(reset_running_requests=True))
        ):
            raise TransferError("vLLM did not reset its prefix cache: requests still hold blocks of it")

    def record_plan(self, source: Mapping[str, torch.Tensor]) -> LoadPlan:
        """Record what vLLM's loader does with `source`; see `Engine.record_plan`. Every worker records its own."""
        self._require_weights("record a load plan")
        parameters = [
            [name, str(t.dtype).removeprefix("torch."), list(t.shape), list(t.stride())] for name, t in source.items()
        ]
        plans: list[Any] = self._call(
            "record", parameters=parameters, model_type=self.model_type, same_process=not self._own_process
        )
        if not self._own_process:
            plan: LoadPlan = plans[0]  # one worker a process
            return plan
        copies = tuple(
            Copy(
                name=name,
                shape=tuple(shape),
                stride=tuple(stride),
                offset=offset,
                target=self._mapped(rank, place, dtype, target_shape, target_stride),
            )
            for rank, plan in enumerate(plans)
            for name, shape, stride, offset, place, dtype, target_shape, target_stride in plan["copies"]
        )
        fallbacks = {name: why for plan in plans for name, why in plan["fallbacks"].items()}
        return LoadPlan(
            copies=copies,
            sources={name: (t.dtype, tuple(t.shape)) for name, t in source.items()},
            strides={name: tuple(t.stride()) for name, t in source.items()},
            fallbacks=fallbacks,
        )

    def share_weights(self) -> None:
        """Let a trainer work on the same memory: from now on it never leaves the device."""
        self._require_weights("share its weights")
        self._shared = True
        self._segments[ENGINE_WEIGHTS].away = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run vLLM's layerwise reload, post-processing and quantization included. Poisons until the next `commit`.

        Every tensor of the model has to be given. Raises: `PhaseError` while the weights are away; whatever a worker
        raised, with its traceback, after which all of it has to be loaded again.
        """
        self._require_weights("load weights")
        self.poison("weights have been loaded into it and not committed: call commit(version) once all of them have")
        self._call("begin_reload")
        if not self._own_process:
            self._call(
                "reload", tensors=[[n, t.detach()] for n, t in weights], model_type=self.model_type, staging=None
            )
        else:
            for tensors, staging in self._staged(weights):
                self._call("reload", tensors=tensors, model_type=self.model_type, staging=staging)
        self._call("finish_reload")

    def receive(self, operation: str, **arguments: Any) -> list[Any]:
        """One step of copying weights from this process, in every worker; see `colo.weights.transports.ipc.Peer`.

        Poisons from `begin` until the next `commit`. Raises: `PhaseError` while the weights are away.
        """
        if operation != "release":
            self._require_weights("take weights")
        if operation == "begin":
            self.poison("weights have been copied into it and not committed: publish all of them")
        return self._call("receive", step=operation, arguments=arguments)

    def commit(self, version: int) -> None:
        """Declare that the engine now holds `version`; lifts a poisoning. `PhaseError` unless they are resident."""
        self._require_weights(f"hold version {version}")
        self._version = version

    def poison(self, cause: str) -> None:
        """Refuse to generate, with `cause`, until the next `commit`."""
        self._version, self._cause = None, cause

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the adapters that are loaded."""
        return tuple(self._adapters)

    @property
    def adapter_refusal(self) -> str | None:
        """Why the adapter that was loaded last is loaded anew for each version; `None` where it is written in place."""
        refusals: list[str | None] = self._call("adapter_refusal")
        return next(filter(None, refusals), None)

    def load_adapter(self, name: str, adapter: AdapterWeights) -> None:
        """Make a LoRA adapter available by name, from memory; see `Engine.load_adapter`."""
        self._require_weights("load an adapter")
        if name in self._adapters:
            raise ValueError(f"adapter {name} is loaded already: remove it first, or give each version its own name")
        capacity = self._infos[0]["max_adapters"]
        if capacity and len(self._adapters) >= capacity:
            raise Unsupported(
                f"the engine holds {len(self._adapters)} adapters and takes no more: remove one, or start it with a "
                "larger max_loras"
            )
        self._last_adapter += 1
        self._send_adapter("add_adapter", self._last_adapter, adapter)
        self._adapters[name] = self._last_adapter

    def replace_adapter(self, old: str, new: str, adapter: AdapterWeights) -> None:
        """Put `adapter`, named `new`, in the place of `old`; see `Engine.replace_adapter`.

        The workers know it by the same number as before and write it over what they hold, without vLLM's loader, where
        its modules and shapes are those of `old`. `PhaseError` while the weights are away, whose memory that is in.
        """
        self._require_weights("replace an adapter")
        number = self._adapter_number(old)
        if new != old and new in self._adapters:
            raise ValueError(f"adapter {new} is loaded already: give each version its own name")
        del self._adapters[old]
        try:
            self._send_adapter("update_adapter", number, adapter)
        except Exception:
            with suppress(EngineLost):
                self._call("remove_adapter", number=number)
            raise
        self._adapters[new] = number

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter. `ValueError` when there is none of that name."""
        self._call("remove_adapter", number=self._adapter_number(name))
        del self._adapters[name]

    def recover(self) -> None:
        """Start a lost engine again, on the same weights. It is awake and poisoned then.

        Raises: `PhaseError` for an engine that is not lost, or that is not ours to start; whatever vLLM raises.
        """
        if self._lost is None:
            raise PhaseError("the engine is not lost: nothing to recover")
        if not self._options:
            raise PhaseError(f"the engine is your own and is lost ({self._lost}): start another and share it")
        self._shut_down()
        self._lost = None
        self._paused = False
        self._adapters.clear()
        self._start()
        self.poison("it has been started again: publish to it")

    def close(self) -> None:
        """Release everything; a `vllm.LLM` of the caller's is left awake and running. Idempotent.

        Raises: `BudgetError` when a `vllm.LLM` of the caller's, or one in this process, is asleep and the device has no
        room to wake it: free some and close again.
        """
        if self._closed:
            return
        if self._lost is None:
            with suppress(EngineLost):  # nothing is left to bring back then
                self._leave_as_found()
        self._closed = True
        self.poison("it is closed")
        if self._options:
            self._shut_down()
        self.llm = None
        self._opened.clear()
        self._close_memory()

    # ---- start and end -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        from vllm import LLM

        before_bytes = used_device_bytes(self.device) or 0
        with compat.in_this_process(not self._own_process):
            llm = LLM(**self._options)
        self._taken_bytes = (used_device_bytes(self.device) or 0) - before_bytes
        self._connect(llm)

    def _connect(self, llm: Any) -> None:
        self.llm = llm
        if self._own_process:
            self._calls = Caller()
        hf_config = llm.llm_engine.vllm_config.model_config.hf_config
        self.model_type: str | None = getattr(hf_config, "model_type", None)
        model_config = llm.llm_engine.vllm_config.model_config
        self._vocab_size, self._max_length = int(model_config.get_vocab_size()), int(model_config.max_model_len)
        self._infos = self._call("describe", same_process=not self._own_process)
        if self._calls is not None:
            self._calls.watch(self.pids)
        info = self._infos[0]
        if info["device"] != device_id(self.device):
            raise Unsupported(
                f"vLLM runs on {info['device']} and the trainer on {device_id(self.device)}: set CUDA_VISIBLE_DEVICES "
                "so that both see the same GPU first"
            )
        if info["weights_in"] == "slabs" and self._own_process and self._store is None:
            for rank, descriptions in enumerate(self._call("export", to_pid=os.getpid())):
                self._opened[rank] = [open_slab(description, self.device) for description in descriptions]
        weights_away = Residency.OFFLOADED if info["weights_can_leave"] and not self._shared else None
        kv_away = Residency.DISCARDED if info["kv_cache_bytes"] else None
        for name, size_bytes, away in (
            (ENGINE_WEIGHTS, info["weights_bytes"], weights_away),
            (ENGINE_KV_CACHE, info["kv_cache_bytes"], kv_away),
        ):
            # A scheduler holds on to segments, so those of an engine that is started again are the same objects.
            self._segments.setdefault(name, WorkerSegment(self, name)).reset(size_bytes, away)
        if weights_away is not None:
            self._call("prepare")

    def _leave_as_found(self) -> None:
        """Wake what stays or is freed in this process: vLLM maps and frees whole allocations only."""
        if self._options and self._own_process:
            return  # everything ends with the process
        if not self._options:
            was_dropped = self._segments[ENGINE_WEIGHTS].residency is Residency.DISCARDED
            self.wake()
            self.resume()
            if was_dropped:
                warnings.warn(
                    "your vllm.LLM is awake without weights, since a level-2 sleep dropped them: load them before it "
                    "generates",
                    stacklevel=4,
                )
        self._call("release")
        if self._options:
            self._call("forget")
        for segment in self._segments.values():
            segment.residency, segment.device_bytes = Residency.RESIDENT, segment.size_bytes

    def _shut_down(self) -> None:
        llm, self.llm = self.llm, None
        if self._calls is not None:
            self._calls.close()
            self._calls = None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _close_memory(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None
        if self._store is not None:
            self._store.close()
        if self._folder is not None:
            self._folder.cleanup()
        if self._owns_mover:
            self.mover.close()

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _call(self, operation: str, **arguments: Any) -> list[Any]:
        """Run an operation in every worker and return their answers. Raises: what the first failing one raised."""
        answers = self._ask(operation, arguments)
        for answer in answers:
            if "error" in answer:
                raise _error_from(answer["error"])
        return [answer["value"] for answer in answers]

    def _ask(self, operation: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        if self._lost is not None:
            raise EngineLost(f"the engine is lost: {self._lost}. Call recover()")
        rpc = self.llm.collective_rpc
        if self._own_process:
            return self._in_engine(operation, lambda: list(rpc("colo", args=(operation, arguments))))
        from colo.engines.vllm.worker import call

        # A function of this module needs no worker extension, which a caller's own engine may lack.
        return list(rpc(call, args=(operation, arguments)))

    def _in_engine(self, operation: str, function: Callable[[], T], *, deadline: bool = True) -> T:
        """Call into vLLM; the end of its process, or its silence, becomes `EngineLost`."""
        if self._lost is not None:
            raise EngineLost(f"the engine is lost: {self._lost}. Call recover()")
        if self._calls is None:
            return function()
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return self._calls.call(function, deadline_s=self._deadline_s if deadline else None)
        except (ProcessEnded, EngineDeadError) as error:
            self._lose(f"its process ended during {operation}", error)
        except NoAnswer as error:
            self._lose(f"it did not answer {operation} within {self._deadline_s:.0f} s", error)
        except Exception as error:
            if self._calls.has_ended():  # a dying engine may still answer, with whatever it died of
                self._lose(f"its process ended during {operation}", error)
            if "has no attribute 'colo'" in str(error):
                raise Unsupported(
                    "this vllm.LLM runs in a process of its own, where colo has no foothold: start it with "
                    f"worker_extension_cls='{plugin.WORKER_EXTENSION}' and load_format='colo', or set "
                    "VLLM_ENABLE_V1_MULTIPROCESSING=0 before"
                ) from error
            raise

    def _lose(self, cause: str, error: BaseException) -> NoReturn:
        self._lost = cause
        self.poison(f"it is lost: {cause}")
        outlives = self._store is not None and bool(self._infos) and self._infos[0]["weights_in"] == "slabs"
        for name, segment in self._segments.items():
            if name == ENGINE_KV_CACHE or not outlives:
                segment.vanish()
        raise EngineLost(
            f"the engine is lost: {cause}. The trainer's weights are intact; call recover() to start it again"
        ) from error

    def _pause(self, mode: PauseMode = "abort") -> None:
        if mode == "wait" and not self._own_process:
            raise Unsupported(
                "the engine runs in this process, where requests in flight go on only while you step, so it cannot "
                "wait for them: step until they have finished, or pause with mode 'keep' or 'abort'"
            )
        if self._paused:
            return
        self._in_engine("pause", lambda: self.llm.sleep(level=0, mode=mode), deadline=mode != "wait")
        self._paused = True
        if mode == "abort" and not self._own_process:
            # vLLM (0.26, 0.30) ends them in its scheduler only here, and whoever steps would wait for them forever.
            core = self.llm.llm_engine
            core.abort_request(list(core.output_processor.request_states), internal=True)

    def before_move(self, name: str, target: Residency) -> None:
        """Make ready for a segment's move: room in the device, or nobody who uses what leaves."""
        if target is Residency.RESIDENT:
            self._make_room(self._segments[name].size_bytes)
        else:
            self._pause()
            self.reset_prefix_cache()
            if name == ENGINE_WEIGHTS and target is Residency.DISCARDED:
                self.poison("its weights have been dropped: wake it and publish weights to it")

    def _make_room(self, size_bytes: int) -> None:
        """Return what torch caches in this process to the driver, when the engine's process will need it."""
        if self.device.type == "cuda" and free_device_bytes(self.device) < size_bytes:
            torch.cuda.empty_cache()

    def begin_move(self, name: str, source: Residency, target: Residency) -> None:
        """Start a move in every worker; where one refuses, the others go back."""
        answers = self._ask("begin", {"segment": name, "target": str(target)})
        failed = [answer["error"] for answer in answers if "error" in answer]
        if failed:
            if len(failed) < len(answers):
                self._ask("begin", {"segment": name, "target": str(source)})
            raise _error_from(failed[0])

    def wait_for(self, name: str) -> int:
        """Return, when every worker has moved a segment, the device bytes that it holds."""
        return int(self._call("wait", segment=name)[0])

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _mapped(self, rank: int, place: Any, dtype: str, shape: Any, stride: Any) -> torch.Tensor:
        """Engine memory of one worker, as a tensor of this process."""
        index, offset = place
        slab = self._store.slab(rank, index) if self._store is not None else self._opened[rank][index]
        kind: torch.dtype = getattr(torch, dtype)
        return slab.view(kind).as_strided(tuple(shape), tuple(stride), offset // kind.itemsize)

    def _send_adapter(self, operation: str, number: int, adapter: AdapterWeights) -> None:
        prefix = "base_model.model."
        tensors = [(f"{prefix}{module}.lora_A.weight", tensor) for module, tensor in adapter.a.items()]
        tensors += [(f"{prefix}{module}.lora_B.weight", tensor) for module, tensor in adapter.b.items()]
        scalings = {prefix + module: float(scaling) for module, scaling in adapter.scalings.items()}
        if not self._own_process:
            given = [list(pair) for pair in tensors]
            self._call(operation, number=number, tensors=given, scalings=scalings, staging=None)
            return
        described, staging = self._stage(tensors)
        places, scalings_before = self._adapter_sent
        if operation == "update_adapter" and places is described and scalings_before == scalings:
            self._call(operation, number=number, tensors=None, scalings=None, staging=staging)
            return
        self._call(operation, number=number, tensors=described, scalings=scalings, staging=staging)
        self._adapter_sent = (described, scalings)

    def _staged(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[list[list[Any]], dict[str, Any]]]:
        """Groups of tensors in memory that the workers can map: [name, dtype, shape, offset] each, and the slab."""
        group: list[tuple[str, torch.Tensor]] = []
        specs: list[tuple[tuple[int, ...], torch.dtype]] = []
        for name, tensor in weights:
            spec = (tuple(tensor.shape), tensor.dtype)
            if group and carved_bytes([*specs, spec]) > _STAGING_BYTES:
                yield self._stage(group)
                group, specs = [], []
            group.append((name, tensor))
            specs.append(spec)
        if group:
            yield self._stage(group)

    def _stage(self, tensors: list[tuple[str, torch.Tensor]]) -> tuple[list[list[Any]], dict[str, Any]]:
        if self._staging is None:
            self._staging = _Staging(self.device)
        return self._staging.put(tensors, to_pid=self.pids[0])

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _lora_request(self, adapter: str | None) -> Any:
        if adapter is None:
            return None
        from vllm.lora.request import LoRARequest

        # The path is never opened, since the workers know the number; vLLM asks for one.
        return LoRARequest(lora_name=adapter, lora_int_id=self._adapter_number(adapter), lora_path="in-memory")

    def _adapter_number(self, name: str) -> int:
        if name not in self._adapters:
            raise ValueError(f"there is no adapter {name}; loaded are {sorted(self._adapters) or 'none'}")
        return self._adapters[name]

    def _require(self, verb: str, *states: EngineState) -> None:
        if self._lost is not None:
            raise EngineLost(f"the engine is lost: {self._lost}. Call recover()")
        if self.state not in states:
            raise PhaseError(f"the engine is {self.state} and cannot {verb}: {ADVICE[self.state]}")

    def _require_open(self, verb: str) -> None:
        self._require(verb, EngineState.AWAKE, EngineState.PAUSED, EngineState.ASLEEP)

    def _require_weights(self, verb: str) -> None:
        self._require_open(verb)
        residency = self._segments[ENGINE_WEIGHTS].residency
        if residency is not Residency.RESIDENT:
            raise PhaseError(f"the engine's weights are {residency} and it cannot {verb}: wake them first")


class _Staging:
    """Memory that workers can map, for tensors on their way. Where they lie is kept for the next that are like them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._slab: Slab | None = None
        self._layout: list[tuple[str, torch.Size, torch.dtype]] = []
        self._views: list[torch.Tensor] = []
        self._described: list[list[Any]] = []

    @torch.inference_mode(False)
    @torch.no_grad()
    def put(
        self, tensors: Sequence[tuple[str, torch.Tensor]], *, to_pid: int
    ) -> tuple[list[list[Any]], dict[str, Any]]:
        """Copy `tensors`, and wait until they are there; [name, dtype, shape, offset] of each, and the slab."""
        layout = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]
        if self._slab is None or layout != self._layout:
            self._slab = self._lay_out(layout)
        if tensors:
            torch._foreach_copy_(self._views, [tensor for _, tensor in tensors])
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return self._described, self._slab.describe(to_pid=to_pid)

    def close(self) -> None:
        """Let go of the memory."""
        self._layout, self._views, self._described = [], [], []
        if self._slab is not None:
            self._slab.close()
            self._slab = None

    def _lay_out(self, layout: list[tuple[str, torch.Size, torch.dtype]]) -> Slab:
        specs = [(tuple(shape), dtype) for _, shape, dtype in layout]
        needed_bytes, slab = carved_bytes(specs), self._slab
        if slab is None or slab.size_bytes < needed_bytes:
            self.close()
            slab = Slab(max(needed_bytes, MIB), self._device)
        base = slab.bytes.data_ptr()
        self._views = carve(slab.bytes, specs)
        self._described = [
            [name, str(dtype).removeprefix("torch."), list(shape), view.data_ptr() - base]
            for (name, shape, dtype), view in zip(layout, self._views, strict=True)
        ]
        self._layout = layout
        return slab


def _device(device: torch.device | str | None) -> torch.device:
    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if str(found) == "cuda" else found


def _completion(prompt_index: int, output: Any, sample: Any, version: int, adapter: str | None) -> Completion:
    token_ids = tuple(sample.token_ids)
    return Completion(
        prompt_index=prompt_index,
        sample_index=sample.index,
        prompt_token_ids=tuple(output.prompt_token_ids),
        token_ids=token_ids,
        logprobs=tuple(row[token].logprob for token, row in zip(token_ids, sample.logprobs or (), strict=True)),
        finish_reason=sample.finish_reason or "abort",
        weights_version=version,
        adapter=adapter,
        text=sample.text or None,
        output=sample,
    )


def _error_from(error: Mapping[str, Any]) -> Exception:
    """The error that a worker described."""
    kind: Callable[..., Exception] = getattr(errors, error["kind"], ValueError)
    if kind is BudgetError:
        return BudgetError(error["message"], needed_bytes=error["needed_bytes"], free_bytes=error["free_bytes"])
    raised = kind(error["message"])
    if "traceback" in error:
        raised.add_note("in the worker:\n" + error["traceback"])
    return raised
