"""vLLM as an engine: in this process, in one of its own, or a server, through its documented extension points.

The weights lie in slabs that the trainer owns (colo/engines/vllm/store.py): a trainer's parameters can be that
memory, in one process and across two, and the engine may be killed and started again on it. What can be given back in
between is the KV cache and, where the weights are vLLM's own, the weights.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from colo.engine import AdapterWeights, Completion, EngineState, SleepLevel
from colo.engines.base import EngineBase, EngineStatus
from colo.engines.elsewhere import Broadcast
from colo.engines.sampling import sampling_temperature
from colo.engines.vllm import compat, plugin, wire
from colo.engines.vllm.client import PauseMode, WorkerLink
from colo.engines.vllm.client.elsewhere import WorkersTakeSlices
from colo.engines.vllm.client.llm_link import DEADLINE_S
from colo.engines.vllm.client.memory import AdapterRegistry, WorkerMemory, WorkerWeights
from colo.engines.vllm.client.start import (
    architectures,
    changes_transformers,
    check_main_guard,
    import_apart,
    link_to,
    llm_options,
    quantization_of,
    save_config,
    start_llm,
)
from colo.engines.vllm.store import WeightStore
from colo.engines.vllm.wire import Forget
from colo.errors import EngineLost, PhaseError, TransferError, Unsupported
from colo.memory.copy_plan import compile_ahead, kernels
from colo.memory.load_plan import LoadPlan
from colo.memory.offload import Mover
from colo.memory.probe import device_of
from colo.memory.share import Staging
from colo.phases.phase import ENGINE_WEIGHTS, Residency, Segment
from colo.weights.packed import PackedWeight
from colo.weights.transports.remote import SliceTaker

_COLDEST = 0.01
"""Temperature that vLLM samples at where a lower one, but 0, is asked for (`_MAX_TEMP` in its sampling_params.py)."""


class VLLMEngine(EngineBase):
    """An `Engine` (see `colo.engine`) that runs vLLM. Not thread-safe: one caller at a time.

    Ownership: owns the `vllm.LLM` that it has started and its weights' memory until `close`; with `around` and
    `colo.connect` it owns neither. It starts awake and poisoned, until `commit` names what it holds.
    """

    name = "vllm"

    _link: WorkerLink
    _store: WeightStore | None
    _weights: WorkerWeights
    _adapters: AdapterRegistry

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
        names = [] if own_process else architectures(model, options)
        if own_process:
            # vLLM's process imports the main script anew: without a guard it would start vLLM again
            check_main_guard()
        elif changes_transformers(names, options):
            raise Unsupported(
                "vLLM serves this model by transformers' own class and changes that, so that no other model of the "
                "class works in this process (vllm#15463): give vLLM a process of its own, own_process=True"
            )
        compat.warn_if_untested()
        compile_ahead(device_of(device))  # beside vLLM's import and start
        # before the first `import vllm` of this process, which must not happen on a caller's stack
        import_apart()
        compat.import_model(names)
        plugin.register()
        self._begin(device_of(device), mover, when_lost="call recover() to start it again")
        try:
            if isinstance(model, (PretrainedConfig, PreTrainedModel)):
                folder = self._owned.enter_context(TemporaryDirectory(prefix="colo-"))
                save_config(model, folder)
                options.setdefault("load_format", "dummy")
                model = folder
            # Quantized weights cannot be a trainer's, and what they were made from would stay beside them.
            if share_memory and quantization_of(model, options) is None:
                self._store = WeightStore(self.device)
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
            if not own_process and self._store is None:
                # nothing else may run on the device while vLLM captures graphs; colo's loader waits by itself
                kernels(self.device)
            # kept, so that `recover` starts exactly this engine again
            self._start: Callable[[], WorkerLink] | None = partial(
                start_llm, options, self.device, self._status, own_process=own_process, deadline_s=deadline_s
            )
            self._connect(self._start())
        except BaseException:
            self._owned.close()
            raise

    @classmethod
    def around(cls, llm: Any) -> VLLMEngine:
        """An engine over your own `vllm.LLM`, left awake by `close`. `Unsupported` without colo's worker extension."""
        compat.warn_if_untested()
        device = device_of(llm.llm_engine.vllm_config.device_config.device)
        own_process = not compat.is_in_this_process(llm)
        return cls.over(
            lambda status: link_to(llm, device, status, own_process=own_process, deadline_s=DEADLINE_S),
            device,
            when_lost="the vllm.LLM is your own: close the runtime, start another and share it",
        )

    @classmethod
    def over(cls, link: Callable[[EngineStatus], WorkerLink], device: torch.device, *, when_lost: str) -> VLLMEngine:
        """An engine over a vLLM that is someone else's, by a link to it. Raises: what making the link raises."""
        # not `__init__`: nothing is started here
        engine = cls.__new__(cls)
        engine._begin(device, None, when_lost=when_lost)
        engine._start = None
        try:
            engine._connect(link(engine._status))
        except BaseException:
            engine._owned.close()
            raise
        return engine

    def _begin(self, device: torch.device, mover: Mover | None, *, when_lost: str) -> None:
        """An engine without a link, until `_connect`; `when_lost` is advice."""
        self._memory = WorkerMemory(self._before_leaving)
        status = EngineStatus(
            lambda: self.segments,
            # a lambda: the link is there only after `_connect`, and another one after a restart
            check_alive=lambda: self._link.check_alive(),
            on_loss=self._memory.lose,
            when_lost=when_lost,
        )
        EngineBase.__init__(self, device, self._memory.segments, mover=mover, status=status)
        self._owned = ExitStack()
        if self._owns_mover:
            self._owned.callback(self.mover.close)
        self._staging = Staging(device)
        self._owned.callback(self._staging.close)
        self._store = None

    def _connect(self, link: WorkerLink) -> None:
        """Take `link` for the engine's, once everything that may fail has not; it is closed otherwise."""
        try:
            # workers that cannot map this GPU's memory read tensors from host memory
            self._staging.move_to(self.device if link.ipc_refusal is None else torch.device("cpu"))
            weights = WorkerWeights(link, store=self._store, staging=self._staging)
            self._memory.hold(link, weights)
        except BaseException:
            link.close()
            raise
        self._link, self._weights = link, weights
        self._adapters = AdapterRegistry(link)

    # ---- what a runtime asks -----------------------------------------------------------------------------------------

    @property
    def wakes_to_close(self) -> bool:
        """True if what sleeps is woken as it closes: for its owner, or since vLLM frees mapped memory only."""
        return self._start is None or self._link.same_process

    @property
    def llm(self) -> Any:
        """The `vllm.LLM`; `None` when closed."""
        return self._link.llm

    @property
    def link(self) -> WorkerLink:
        """The way to vLLM's workers."""
        return self._link

    @property
    def pids(self) -> Sequence[int]:
        """Process of every worker."""
        return self._link.pids

    @property
    def same_process(self) -> bool:
        """True when vLLM's workers are in this process."""
        return self._link.same_process

    @property
    def ipc_refusal(self) -> str | None:
        """The reason why a worker cannot map the trainer's memory; host memory is in between then."""
        return self._link.ipc_refusal

    @property
    def model_type(self) -> str | None:
        """`model_type` of the model's configuration."""
        return self._link.infos[0].model_type

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._link.infos[0].vocab_size

    @property
    def placement(self) -> str:
        """A phrase for reports: where it runs and its weights lie."""
        return f"{self._link.placement}, weights in {self._weights.where}"

    @property
    def way_of_weights(self) -> str:
        """A phrase: how they reach a server."""
        if self._link.through is not None:
            return f"copied, by {self._link.through}"
        how = "copied by the workers out of the trainer's memory"
        return how if self.ipc_refusal is None else f"{how}, through host memory, since {self.ipc_refusal}"

    @property
    def lacking_flags(self) -> Mapping[str, str]:
        """Options that a server was started without, and what it cannot do therefore."""
        info = self._link.infos[0]
        wanted = {
            "--enable-sleep-mode": (info.kv_cache_can_leave, "its KV cache stays on the device"),
            "--enable-lora": (bool(info.max_adapters), "it takes no adapters"),
        }
        return {flag: lack for flag, (has, lack) in wanted.items() if not has}

    @property
    def cache_bytes(self) -> int:
        """KV cache of a server elsewhere, whose segments have no bytes here."""
        return self._link.cache_bytes

    @property
    def pinned_bytes(self) -> int:
        """Host memory that the workers have pinned now."""
        return 0 if self._link.through is not None else sum(self._link.call(wire.PinnedBytes()))

    @property
    def residual_bytes(self) -> Mapping[str, int]:
        """Device bytes that no sleep gives back: what they are, and how many; measured when vLLM has started."""
        known: Counter[str] = sum((Counter(info.residual_bytes) for info in self._link.infos), Counter())
        in_segments = sum(segment.size_bytes for segment in self.segments)
        # what the driver says that the start took, less what has a name
        rest = self._link.taken_bytes - in_segments - sum(known.values())
        return dict(known) | ({"context, libraries and the rest": rest} if rest > 0 else {})

    def sampling_params(self, params: Any = None, **options: Any) -> Any:
        """Make what `generate` takes, from options by name or from parameters; a server takes none of vLLM's own."""
        if params is not None and options:
            raise TypeError(f"give {sorted(options)} within the sampling parameters, or all options by name")
        return self._link.sampling_params(params, options)

    def sampling_temperature(self, params: Any) -> float | None:
        """The temperature that `logprobs` have in them; `None` where filters or penalties change them too."""
        found = None if self._link.distorting else sampling_temperature(params)
        return None if found is None else max(found, _COLDEST)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Any, *, adapter: str | None = None
    ) -> list[Completion]:
        """Sample `params.n` completions for each prompt; see `Engine.generate`. `params` may be vLLM's own.

        vLLM's `seed`, also by name, is the same for every prompt and counts up with the samples; a list by name has one
        for each prompt. A server takes colo's parameters only, whose seed differs for every prompt and sample.
        """
        version = self.ready()
        named = self._adapters.named(adapter) if adapter is not None else None
        if named is not None:
            # a request of somebody else may have had vLLM evict it
            self._adapters.keep(named)
        return self._link.generate(prompts, params, version=version, adapter=named)

    def check_request(self, prompts: Sequence[Sequence[int]], params: Any) -> None:
        """Raise what `generate` would raise for these prompts and parameters."""
        self._link.check_request(prompts, params)

    @property
    def longest_prompt(self) -> int:  # type: ignore[override]
        """The most tokens of a prompt after which a position is left."""
        return self._link.infos[0].max_length - 1

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generating, so that weights may change. Idempotent; `PhaseError` when asleep or closed.

        `mode` says what becomes of requests in flight, which you have added to `llm.llm_engine`, or other clients have
        sent to a server: `abort` ends them (the next `step` says so; in this process they are gone without a word);
        `wait` lets those that have begun finish, however long it takes; `keep` continues them after `resume`, from
        tokens computed again where the KV cache has been dropped or weights have changed. Those that have not begun
        wait for `resume`, unless aborted. A pause that is on stays as it was asked for.

        Raises: `Unsupported` for `wait` in this process, where requests go on only while you step.
        """
        self._status.require("pause", EngineState.AWAKE, EngineState.PAUSED)
        self._link.pause(mode)

    def resume(self) -> None:
        """Generate again. Idempotent; `PhaseError` unless every segment is resident."""
        self._status.require("resume", EngineState.AWAKE, EngineState.PAUSED)
        self._memory.settle()
        self._link.resume()

    def sleep(self, level: SleepLevel | int, mode: PauseMode = "abort") -> None:
        """Give memory back, unless it is given back already; see `Engine.sleep`. `mode` is that of `pause`."""
        self._status.require_open("sleep")
        leaving = self.leaving(SleepLevel(str(level)))
        self._link.pause(mode)
        self._leave(leaving)

    def why_it_stays(self, segment: Segment) -> str:
        """The reason why a segment never leaves, in words that follow `it is`."""
        return self._memory.why_it_stays(segment.name)

    def reset_prefix_cache(self) -> None:
        """Forget everything computed from earlier weights. Raises: `TransferError` when vLLM does not let go of it."""
        self._status.require_open("reset its prefix cache")
        self._link.reset_prefix_cache()
        self._adapters.forget_names()

    def record_plan(self, source: Mapping[str, torch.Tensor]) -> LoadPlan:
        """Record what vLLM's loader does with `source`; see `Engine.record_plan`. Every worker records its own."""
        self._status.require_weights("record a load plan")
        return self._weights.record_plan(source)

    def packed_weights(self) -> Mapping[str, PackedWeight]:
        """Weights that bitsandbytes has packed, by name, within one process. `Unsupported` for other packing."""
        if not self._link.same_process:
            return {}
        packed: Mapping[str, PackedWeight] = self._link.call(wire.Packed())[0]
        return packed

    def share_weights(self) -> bool:
        """Let a trainer work on the same memory: from now on it never leaves the device; see `LoadPlans`."""
        self._status.require_weights("share its weights")
        # a server's memory is its own, and other clients may wake or move it
        if self._link.why_not_shared is not None:
            raise Unsupported("the memory of a server's weights cannot be shared: they are copied")
        self._memory.share_weights()
        return self._start is None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int | None:
        """Run vLLM's layerwise reload on all tensors of the model. Poisons until the next `commit`.

        A server elsewhere may take changes alone (`delta=True`); the bytes that it was sent are returned.
        Raises: `PhaseError` while the weights are away; what a worker raised: then load all of it again.
        """
        self.poison_for_load()
        sent_bytes = self._weights.reload(weights)
        self.reset_prefix_cache()
        return sent_bytes

    @property
    def slice_taker(self) -> SliceTaker | None:
        """The taker of slices in a server elsewhere that is sent all weights over a process group, else `None`."""
        through = self._link.through
        if not isinstance(through, Broadcast) or through.delta:
            return None
        return WorkersTakeSlices(self._link, through.address, self.poison_for_load)

    def receive(self, operation: str, **arguments: Any) -> list[Any]:
        """Run a step of `Receiver` in every worker; see `receive_all`."""
        return self.receive_all([(operation, arguments)])

    def receive_all(self, operations: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
        """Run steps of `Receiver` in every worker. Poisons from `begin` until `commit`. `PhaseError` while asleep."""
        if self._link.through is not None:
            raise Unsupported("the server is elsewhere, and its workers map no memory of the trainer's")
        names = [name for name, _ in operations]
        if names != ["release"]:
            self._status.require_weights("take weights")
        # poisoned before the first byte: an interrupted transfer leaves a mixture
        if "begin" in names:  # from here to `commit` the weights are neither the old nor the new ones
            self.poison("weights have been copied into it and not committed: publish all of them")
        steps = [{"step": name, "arguments": arguments} for name, arguments in operations]
        return self._link.call(wire.Receive(steps=steps))

    def commit(self, version: int) -> None:
        """Declare that the engine now holds `version`; lifts a poisoning. `PhaseError` unless they are resident."""
        self._status.require_weights(f"hold version {version}")
        # before the commit: clients of vLLM must not read the old version beside new weights
        self._link.tell_version(version)
        super().commit(version)

    def gather(self, value: Any) -> list[Any]:
        """All-gather `value` over the ranks of a torchrun group (a collective); see `in_all_ranks`."""
        return self._link.gather(value)

    @property
    def adapters(self) -> Sequence[str]:
        """Names of the adapters that are loaded."""
        return tuple(self._adapters.numbers)

    @property
    def adapter_refusal(self) -> str | None:
        """The reason why the adapter loaded last is loaded anew for each version; `None` if written in place."""
        return self._adapters.refusal

    @property
    def why_adapter_staged(self) -> str | None:
        """The reason why the adapter sent last went through a slab; `None` where workers have read it in place."""
        return self._adapters.why_staged

    def load_adapter(self, name: str, adapter: AdapterWeights) -> None:
        """Make a LoRA adapter available by name, from memory; see `Engine.load_adapter`."""
        self._status.require_weights("load an adapter")
        if self._adapters.load(name, adapter):
            self.reset_prefix_cache()

    def replace_adapter(self, old: str, new: str, adapter: AdapterWeights) -> None:
        """Put `adapter`, named `new`, in the place of `old`, over it if shapes agree; see `Engine.replace_adapter`."""
        self._status.require_weights("replace an adapter")
        if self._adapters.replace(old, new, adapter):
            self.reset_prefix_cache()

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter. `ValueError` when there is none of that name."""
        self._status.require_open("remove an adapter")
        self._adapters.remove(name)

    # ---- told by its segments -----------------------------------------------------------------------------------

    def _before_leaving(self, name: str, target: Residency) -> None:
        """Make ready for a segment to leave the device for `target`: nobody may use it any more."""
        self._link.pause()
        self.reset_prefix_cache()
        if name == ENGINE_WEIGHTS and target is Residency.DISCARDED:
            self.poison("its weights have been dropped: wake it and publish weights to it")

    def look(self) -> None:
        """Find out by asking whether vLLM has ended, or another has taken its place: the engine is lost then."""
        if self._status.lost is None and not self._status.closed:
            with suppress(EngineLost):
                try:
                    self._link.look()
                except TransferError as error:
                    self._status.lose(str(error))

    def recover(self) -> None:
        """Start a lost engine again, on the same weights. It is awake and poisoned then.

        Raises: `PhaseError` unless it is lost and ours; `TransferError` when vLLM has overwritten the trainer's weights
        as it started; whatever vLLM raises.
        """
        self.look()
        # the state first: with it a process that has ended is found out
        if self.state is not EngineState.LOST or (lost := self._status.lost) is None:
            raise PhaseError("the engine is not lost: nothing to recover")
        if self._start is None:
            raise PhaseError(self._link.why_not_recovered(lost))
        self._link.close()
        self._adapters.close()
        # a starting vLLM maps the trainer's weights: it must not have written to them
        held = self._store.digest() if self._store is not None else None
        self._status.revive()
        try:
            self._connect(self._start())
        except BaseException:
            # lost before it failed: the same `recover` can be tried again
            self._status.lost = self._status.lost or lost
            raise
        changed = held.differs(self._store.digest()) if held is not None and self._store is not None else []
        if changed:
            cause = (
                f"vLLM has written over weights of the trainer as it started ({changed[0]}, {len(changed)} in all): "
                "restore them from a checkpoint, and start this model with share_memory=False"
            )
            self._status.lose(cause)
            self._link.close()
            raise TransferError(cause)
        self.poison("it has been started again: publish to it")

    def close(self) -> None:
        """Release everything, and leave a vLLM of the caller's awake and running. Idempotent.

        Raises: `BudgetError` when the device has no room to wake a vLLM that is asleep: free some and close again.
        """
        self._status.check_process()
        if self._status.closed:
            return
        if self._status.lost is None:
            with suppress(EngineLost):  # nothing is left to bring back then
                self._leave_as_found()
        self._status.close()
        self._link.close()  # workers let go of memory before its owners here do
        self._adapters.close()
        self._weights.close()
        self._owned.close()

    # ---- start and end -----------------------------------------------------------------------------------------------

    def _leave_as_found(self) -> None:
        """Wake what stays or is freed in this process: vLLM maps and frees whole allocations only."""
        if self._start is not None and not self._link.same_process:
            return  # everything ends with the process
        if self._start is None:
            was_dropped = self._memory.weights.residency is Residency.DISCARDED
            self.wake()
            self.resume()
            if was_dropped:
                warnings.warn(
                    f"your {self._link.name_of_vllm} is awake without weights, since a level-2 sleep dropped them: "
                    "load them before it generates",
                    stacklevel=4,
                )
        self._memory.release()
        if self._start is not None:
            self._link.call(Forget())
