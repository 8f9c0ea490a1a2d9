"""Links to a `vllm.LLM`, in this process or in a process of its own, and its types: parameters in, completions out."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch

from colo.engine import Completion, SamplingParams
from colo.engines.base import EngineStatus
from colo.engines.sampling import completion_seed, needing_tokenizer, without_neutral
from colo.engines.text import with_text
from colo.engines.vllm import compat
from colo.engines.vllm.client import NamedAdapter, PauseMode, WorkerLink, answers_of, check_numbers
from colo.engines.vllm.processes import Caller, NoAnswer, ProcessEnded
from colo.engines.vllm.wire import WORKER_EXTENSION, Request, WorkerInfo
from colo.errors import EngineLost, PhaseError, StaleWeights, TransferError, Unsupported
from colo.memory.share import Description
from colo.memory.uninterrupted import uninterrupted

T = TypeVar("T")

DEADLINE_S = 300.0
"""Silence, without an answer or a token, after which an engine in a process of its own counts as lost."""

_ABORT_S = 10.0
"""Wait of an interrupt for a generation to end. A longer one holds up the next call."""


class LLMLink(WorkerLink):
    """The common part of links to a `vllm.LLM`. `close` shuts down only an LLM that `start_llm` has started."""

    def __init__(
        self, llm: Any, device: torch.device, status: EngineStatus, *, deadline_s: float, is_own: bool = False
    ) -> None:
        """Connect to `llm`. Raises: `Unsupported` when it runs on another device, `PhaseError` when it is asleep."""
        super().__init__(device, status, deadline_s)
        self.llm = llm
        self.model_config = llm.llm_engine.vllm_config.model_config
        self.is_own = is_own
        self.log_says: Callable[[], str | None] = lambda: None
        """Words about its log for where it has ended, or `None`: set by `start_llm`."""
        try:
            self.infos = self.meet_workers()
            self.check_device()
            self.check_awake()
        except BaseException:
            # an own LLM would otherwise go on without anybody who ends it
            self.close()
            raise

    how_to_free: Mapping[str, str] = {
        "pool": "start vLLM with enable_sleep_mode=True to let it go",
        "weights": "on a GPU, start vLLM with enable_sleep_mode=True to let it go",
        "slabs": "start it with share_memory=False to let it go",
    }
    name_of_vllm = "vllm.LLM"
    for_logprobs = "start it with logprobs_mode='processed_logprobs'"
    for_positions = ", or give vLLM a larger max_model_len, and the kv_cache_bytes that hold it"

    @abstractmethod
    def run(self, operation: str, function: Callable[[], T], *, deadline: bool = True) -> T:
        """Call into vLLM, which is silent when it neither answers nor samples anything until the deadline."""

    @abstractmethod
    def abort_requests(self) -> None:
        """End every request in vLLM, whoever waits for it."""

    def sampling_params(self, params: Any, options: Mapping[str, Any]) -> Any:
        """vLLM's `SamplingParams` from options by name; colo's and vLLM's own as they are.

        Raises: as `sampling_params`; `Unsupported` for what takes a tokenizer, which this vLLM has not.
        """
        asked = sampling_params(params, options)
        if self.model_config.skip_tokenizer_init and (words := needing_tokenizer(asked)):
            raise Unsupported(
                f"this vLLM has no tokenizer, and {', '.join(words)} would be without effect: start it with one "
                "(engine_options={'tokenizer': folder, 'skip_tokenizer_init': False}), or leave "
                f"{'it' if len(words) == 1 else 'them'} out; stop_token_ids and allowed_token_ids need none"
            )
        return asked

    @property
    def distorting(self) -> tuple[str, ...]:
        """Names of start options of this vLLM that change every request's distribution."""
        found = {
            "logits_processors": getattr(self.model_config, "logits_processors", None),
            "watermark_config": getattr(self.llm.llm_engine.vllm_config, "watermark_config", None),
        }
        return tuple(name for name, value in found.items() if value)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Any, *, version: int, adapter: NamedAdapter | None
    ) -> list[Completion]:
        """Sample from weights of `version`; see `Engine.generate`.

        Raises: also `PhaseError` while other requests are in flight, and when somebody else has put vLLM to sleep.
        """
        llm = self.llm
        self.check_awake()
        # vLLM's `generate` collects the outputs of every request that is in flight
        if llm.llm_engine.has_unfinished_requests():
            raise PhaseError(
                "requests that you have added to llm.llm_engine are in flight or not collected, and their outputs "
                "would be mixed with these: step until none is left, or abort them"
            )
        # checked again: parameters may come from `generate` itself, without `sampling_params`
        params = self.sampling_params(params, {})
        inputs = [{"prompt_token_ids": list(ids)} for ids in self.check_request(prompts, params)]
        if not inputs:
            return []
        each = for_prompts(params, len(prompts))
        asked = each[0] if isinstance(each, list) and each else each
        request = _lora_request(*adapter) if adapter is not None else None
        try:
            outputs = self._outputs(inputs, each, request)
        except BaseException:
            self.abort_requests()  # else they would be taken for a user's, or hold up what comes next
            raise
        # vLLM has the text already where an option asked for it; else it is decoded when it is read
        has_tokenizer = not self.model_config.skip_tokenizer_init
        has_text = asked.detokenize and has_tokenizer
        tokenizer = llm.get_tokenizer() if has_tokenizer else None
        name = adapter[0] if adapter is not None else None
        return completions(outputs, version, name, has_text=has_text, tokenizer=tokenizer)

    def check_awake(self) -> None:
        """Raise `PhaseError` for a vLLM that sleeps by its own `sleep`: what it is asked would wait for ever."""
        if self.run("is_sleeping", self.llm.llm_engine.is_sleeping):
            whose = "colo's" if self.is_own else "your"
            raise PhaseError(f"{whose} vllm.LLM is asleep, by its own sleep(): call its wake_up() first")

    def _outputs(self, inputs: Sequence[Any], params: Any, adapter: Any) -> Sequence[Any]:
        """vLLM's outputs of prompts, in their order."""
        llm = self.llm
        return self.run("generate", lambda: llm.generate(inputs, params, use_tqdm=False, lora_request=adapter))

    def reset_prefix_cache(self) -> None:
        """Forget what earlier requests have computed, and disturb requests in flight only if necessary."""
        llm = self.llm
        # first the gentle way: blocks of running requests are kept
        if not (
            self.run("reset_prefix_cache", llm.reset_prefix_cache)
            or self.run("reset_prefix_cache", lambda: llm.reset_prefix_cache(reset_running_requests=True))
        ):
            raise TransferError("vLLM did not reset its prefix cache: requests still hold blocks of it")

    def stop_requests(self, mode: PauseMode) -> None:
        """Stop generating."""
        llm = self.llm
        self.run("pause", lambda: llm.sleep(level=0, mode=mode), deadline=mode != "wait")

    def go_on(self) -> None:
        """Generate again."""
        llm = self.llm
        # level 0 paused the scheduler alone; it wakes by this tag
        self.run("resume", lambda: llm.wake_up(tags=["scheduling"]))

    def tell_version(self, version: int) -> None:
        """Tell vLLM the version of its weights, for its clients, where it takes one (from 0.30)."""
        tell = getattr(self.llm, "update_weight_version", None)
        if tell is not None:
            self.run("update_weight_version", lambda: tell(str(version)))

    def why_not_recovered(self, lost: str) -> str:
        """Advice about a `vllm.LLM` of the user's own that is lost."""
        return f"your vllm.LLM is lost ({lost}): close the runtime, start another and share it"

    def close(self) -> None:
        """Let go of the `vllm.LLM`, and shut it down where it is ours. Idempotent."""
        llm, self.llm = self.llm, None
        if llm is not None and self.is_own:
            llm.llm_engine.engine_core.shutdown()
            del llm
            # the engine's memory is in cycles of vLLM's, and freed only by a collection
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


class InProcessLink(LLMLink):
    """A link to a `vllm.LLM` whose engine runs in this process, and is never lost."""

    same_process = True

    def __init__(
        self, llm: Any, device: torch.device, status: EngineStatus, *, seed: int | None = None, **options: Any
    ) -> None:
        """Connect to `llm`; its random numbers begin by `seed`, or the caller's. Raises: as `LLMLink`."""
        config = llm.llm_engine.vllm_config
        # ranks that sample the same tokens have to draw the same, whatever each has drawn before
        if config.parallel_config.distributed_executor_backend == "external_launcher":
            seed = config.model_config.seed
        self._random_numbers = compat.OwnRandomNumbers(device, seed)
        super().__init__(llm, device, status, **options)

    @property
    def placement(self) -> str:
        """A phrase for reports: which vLLM runs where."""
        return f"vLLM {compat.vllm_version()} in this process"

    def close(self) -> None:
        """Let go of the `vllm.LLM`, and shut it down where it is ours. Idempotent."""
        if self.llm is not None and self.is_own:
            with suppress(Exception):  # of an engine that is broken
                self.llm.collective_rpc(compat.forget_lora_buffers)
        super().close()

    def run(self, operation: str, function: Callable[[], T], *, deadline: bool = True) -> T:
        """Call into vLLM."""
        return function()

    def _outputs(self, inputs: Sequence[Any], params: Any, adapter: Any) -> Sequence[Any]:
        # as `generate` does, but a step that Ctrl-C splits would leave the model's runner unable to take another
        engine, found = self.llm.llm_engine, []
        with self._random_numbers.used():
            with uninterrupted():
                self.llm.enqueue(inputs, params, use_tqdm=False, lora_request=adapter)
            while engine.has_unfinished_requests():
                with uninterrupted():
                    found += [output for output in engine.step() if output.finished]
        return sorted(found, key=lambda output: int(output.request_id))

    def ask(self, request: Request) -> list[Any]:
        """Run an operation in every worker: the answer of each, or its `WorkerError`. Tensors go as they are."""
        from colo.engines.vllm.worker.agent import call

        # A function of colo's needs no worker extension, which a caller's own engine may lack.
        told = self.llm.collective_rpc(call, args=(self.envelope(request),))
        return answers_of(told, self.status)

    def gather(self, value: T) -> list[T]:
        """`value` of every rank, where each runs its own part of the engine (`external_launcher`); else it alone."""
        values = [value]
        if self.llm.llm_engine.vllm_config.parallel_config.world_size == 1:
            return values
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        # both kinds of group, one after the other: ranks are their product
        for group in (get_tp_group(), get_pp_group()):  # those of this replica; there may be others
            if group.world_size > 1:
                found: list[Any] = [None] * group.world_size
                torch.distributed.all_gather_object(found, values, group=group.cpu_group)
                values = [one for part in found for one in part]
        return values

    def check_mode(self, mode: PauseMode) -> None:
        """Raise `Unsupported` for `wait`: requests in flight go on only while their owner steps."""
        if mode == "wait":
            raise Unsupported(
                "the engine runs in this process, where requests in flight go on only while you step, so it cannot "
                "wait for them: step until they have finished, or pause with mode 'keep' or 'abort'"
            )

    def stop_requests(self, mode: PauseMode) -> None:
        """Stop generating."""
        super().stop_requests(mode)
        if mode == "abort":
            # vLLM (0.26, 0.30) ends them in its scheduler only here, and whoever steps would wait for them forever.
            self.abort_requests()

    def go_on(self) -> None:
        """Generate again, without what others have asked for who resumed vLLM meanwhile, and was refused."""
        # whoever has resumed vLLM meanwhile was refused by the hook on the model, and the request is still queued
        if not self.llm.llm_engine.is_sleeping():
            self.abort_requests()
        super().go_on()

    def abort_requests(self) -> None:
        """End every request in vLLM, whoever waits for it."""
        core = self.llm.llm_engine
        _abort(core, core.output_processor.request_states)


class OwnProcessLink(LLMLink):
    """A link to a `vllm.LLM` whose engine runs in a process of its own, and may end or fall silent."""

    def __init__(
        self, llm: Any, device: torch.device, status: EngineStatus, *, deadline_s: float, is_own: bool = False
    ) -> None:
        """Connect to `llm`. Raises: `Unsupported` for one without colo's worker extension, or on another device."""
        self._calls: Caller | None = Caller(self._progress)
        # a child that is forked meanwhile must not run vLLM's finalizers
        compat.leave_to_parent(llm)
        super().__init__(llm, device, status, deadline_s=deadline_s, is_own=is_own)

    def meet_workers(self, *, home: Description | None = None) -> Sequence[WorkerInfo]:
        """Introduce this client to the workers, and notice from now on when one of them ends."""
        if not self.llm.llm_engine.vllm_config.parallel_config.worker_extension_cls:
            raise Unsupported(
                "this vllm.LLM runs in a process of its own, where colo has no foothold: start it with "
                f"worker_extension_cls='{WORKER_EXTENSION}' and load_format='colo', or set "
                "VLLM_ENABLE_V1_MULTIPROCESSING=0 before"
            )
        infos = super().meet_workers(home=home)
        if self._calls is not None:
            try:
                self._calls.watch([info.pid for info in infos])
            except ProcessEnded as error:
                raise self._ended("a process of its workers has ended") from error
        return infos

    @property
    def placement(self) -> str:
        """A phrase for reports: which vLLM runs where."""
        return f"vLLM {compat.vllm_version()} in its own process"

    def ask(self, request: Request) -> list[Any]:
        """Run an operation in every worker: the answer of each, or its `WorkerError`."""
        given = (self.envelope(request),)
        told = self.run(request.operation(), lambda: list(self.llm.collective_rpc("colo", args=given)))
        return answers_of(told, self.status)

    def run(self, operation: str, function: Callable[[], T], *, deadline: bool = True) -> T:
        """Call into vLLM. `EngineLost` when its process ends, or neither answers nor samples until the deadline."""
        self.status.require_present()
        if self._calls is None:
            return function()
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return self._calls.call(function, deadline_s=self.deadline_s if deadline else None)
        except (ProcessEnded, EngineDeadError) as error:
            raise self._ended(f"its process ended during {operation}") from error
        except NoAnswer as error:
            raise self.status.lose(f"it did not answer {operation} within {self.deadline_s:.0f} s") from error
        except Exception as error:
            if self._calls.has_ended():  # a dying engine may still answer, with whatever it died of
                raise self._ended(f"its process ended during {operation}") from error
            raise

    def check_alive(self) -> None:
        """Raise `EngineLost` when a worker has ended: vLLM answers some calls without it, in a process between."""
        if self.status.lost is None and self._calls is not None and self._calls.has_ended():
            raise self._ended("a process of its workers has ended")

    def _ended(self, words: str) -> EngineLost:
        error = self.status.lose(words)
        if (said := self.log_says()) is not None:  # vLLM itself says no more than that its process has ended
            error.add_note(said)
        return error

    def abort_requests(self) -> None:
        """End every request in vLLM, whoever waits for it; if the process is silent, once it answers again."""
        if self.status.lost is not None or self._calls is None:
            return
        core = self.llm.llm_engine
        states = core.output_processor.request_states
        taken: dict[str, Any] = {}

        # the thread that generates loops until these are empty, and cannot be interrupted otherwise
        def take() -> None:
            """Leave the thread that generates nothing to wait for."""
            for request in list(states):
                if (state := states.pop(request, None)) is not None:
                    taken[request] = state

        def abort() -> None:
            states.update(taken)  # for vLLM to take out of all that it has noted
            _abort(core, taken)

        self._calls.end_calls(take, abort, within_s=_ABORT_S)
        if self._calls.has_ended():
            self.status.lose("its process ended during generate")

    def close(self) -> None:
        """Let go of the `vllm.LLM`, and shut it down where it is ours. Idempotent."""
        # the thread first: nothing may call what is being shut down
        if self._calls is not None:
            self._calls.close()
            self._calls = None
        super().close()

    def _progress(self) -> object:
        """Requests that are left, and how many tokens each has; `None` where this vLLM does not let that be seen."""
        try:
            requests = list(self.llm.llm_engine.output_processor.request_states.values())
            return [(id(request), int(request.detokenizer.num_output_tokens())) for request in requests]
        except RuntimeError:  # another thread is changing what is read here
            return object()  # unlike any before
        except (AttributeError, TypeError):  # it keeps them elsewhere, or counts no tokens of some
            return None


def _lora_request(name: str, number: int) -> Any:
    from vllm.lora.request import LoRARequest

    # The path is never opened, since the workers know the number; vLLM asks for one.
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path="in-memory")


def _abort(core: Any, states: Mapping[str, Any]) -> None:
    """Abort requests and their parents (of `n` samples), which vLLM would keep otherwise."""
    # with `n` samples vLLM knows a request and its children; aborting children alone leaves the parent
    parents = {state.parent_req.request_id for state in states.values() if getattr(state, "parent_req", None)}
    core.abort_request([*states, *parents], internal=True)


# ---- sampling parameters on the way in, completions on the way out ---------------------------------------------------


def sampling_params(params: Any, sampling: Mapping[str, Any]) -> Any:
    """vLLM's `SamplingParams` from options by name; colo's and vLLM's own stay what they are.

    Options that change nothing may be any that other engines have, and structured outputs a mapping, as in a config.
    Texts are decoded by colo, when they are read, where no option asks for more than the tokens' own.
    Raises: `Unsupported` for parameters of another kind, such as a list, and for `prompt_logprobs`.
    """
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if params is None:
        options = without_neutral(sampling, VLLMSamplingParams.__struct_fields__)
        if isinstance(among := options.get("structured_outputs"), Mapping):
            options["structured_outputs"] = StructuredOutputsParams(**among)
        given = _checked(VLLMSamplingParams(**options))
        if not options.keys() & _OF_TEXT and not given.stop:
            given.detokenize = False
        return _with_logprobs(given)
    if isinstance(params, VLLMSamplingParams):
        # a clone: the caller's own parameters must stay as they are
        return _with_logprobs(_checked(params).clone())
    if isinstance(params, SamplingParams):
        return params
    raise Unsupported(
        f"generate takes one SamplingParams for all prompts, not a {type(params).__name__}: call it once for each "
        "within one `with rt.rollout():`"
    )


def _checked(params: Any) -> Any:
    # vLLM has them in its output of the prompt, of which completions keep nothing
    if params.prompt_logprobs is not None:
        raise Unsupported(
            "prompt_logprobs are of prompts, and a completion has none: leave it out, and ask the vllm.LLM itself "
            "(llm.generate within `with rt.rollout():`), or colo.rl.logprob.model_logprobs with the model"
        )
    return params


def for_prompts(params: Any, num_prompts: int) -> Any:
    """Make vLLM's parameters, for all prompts alike or for each, of colo's or of vLLM's own.

    vLLM gives every prompt the same seed, and each of its samples the next number. With a seed of colo's parameters,
    or a list of them, prompts draw apart.
    """
    from vllm import SamplingParams as VLLMSamplingParams

    seed, asked = params.seed, params
    if isinstance(params, SamplingParams):
        given = {field: getattr(params, field) for field in params.__dataclass_fields__}
        given |= {"stop_token_ids": list(params.stop_token_ids), "seed": None, "detokenize": False}
        asked = _with_logprobs(VLLMSamplingParams(**given))
    elif not isinstance(seed, Sequence):
        return asked
    return asked if seed is None else [_seeded(asked, completion_seed(seed, i, 0)) for i in range(num_prompts)]


def _seeded(params: Any, seed: int) -> Any:
    found = params.clone()
    found.seed = seed
    return found


def _with_logprobs(params: Any) -> Any:
    if params.logprobs is None:
        others = getattr(params, "logprob_token_ids", None) or ()
        params.logprobs = len(others)  # beside that of the sampled token
        if not others and hasattr(params, "flat_logprobs"):
            params.flat_logprobs = True  # a dictionary for every token costs as much as a small model's kernels
    return params


_OF_TEXT = {
    "bad_words",
    "detokenize",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop",
}
"""Options with which vLLM decodes by itself."""


def completions(
    outputs: Sequence[Any], version: int, adapter: str | None, *, has_text: bool, tokenizer: Any = None
) -> list[Completion]:
    """Every sample of vLLM's `RequestOutput`s, in prompt order, then sample order.

    Without `has_text` vLLM has decoded nothing, and its texts, all empty, are none. With its `tokenizer` they are those
    of every engine; see `with_text`.
    Raises: `StaleWeights` where vLLM itself (from 0.33) names another version for some of the tokens;
    `FloatingPointError` for log-probabilities that are not numbers.
    """
    return [
        with_text(_completion(prompt_index, output, sample, version, adapter, has_text=has_text), tokenizer)
        for prompt_index, output in enumerate(outputs)
        for sample in sorted(output.outputs, key=lambda sample: sample.index)
    ]


def _completion(
    prompt_index: int,
    output: Any,
    sample: Any,
    version: int,
    adapter: str | None,
    *,
    has_text: bool,
) -> Completion:
    for span in getattr(sample, "weight_versions", None) or ():
        if span.version != str(version):
            raise StaleWeights(
                f"vLLM sampled tokens {span.start} to {span.end} of prompt {prompt_index} from weights that it calls "
                f"{span.version!r}, not from version {version}: publish anew, and leave update_weight_version to colo"
            )
    token_ids = tuple(sample.token_ids)
    rows: Any = sample.logprobs or ()
    # the flat form has one array for all tokens, which is only the sampled ones' where no others were asked for
    if list(token_ids) == getattr(rows, "token_ids", None):  # flat, and nothing but what was sampled
        logprobs = tuple(rows.logprobs)
    else:
        logprobs = tuple(row[token].logprob for token, row in zip(token_ids, rows, strict=True))
    check_numbers(logprobs)
    return Completion(
        prompt_index=prompt_index,
        sample_index=sample.index,
        prompt_token_ids=tuple(output.prompt_token_ids),
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=sample.finish_reason or "abort",
        weights_version=version,
        adapter=adapter,
        routed_experts=getattr(sample, "routed_experts", None),
        text=str(sample.text) if has_text else None,
        output=sample,
    )
