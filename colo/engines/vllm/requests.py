"""Requests to a vLLM: generated, held back by a pause, and what was computed for them forgotten."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

from colo.engine import Completion
from colo.engines.common import check_count, check_prompts
from colo.engines.vllm.connection import Connection
from colo.engines.vllm.named_adapters import NamedAdapters
from colo.engines.vllm.sampling import check_logprobs, completions, for_prompt, sampling_params
from colo.errors import PhaseError, TransferError, Unsupported

PauseMode = Literal["abort", "wait", "keep"]


class Requests:
    """Requests to one connection's vLLM, ours and those that a user has added to `llm.llm_engine`."""

    def __init__(self, connection: Connection, adapters: NamedAdapters) -> None:
        self.paused = False
        self._connection = connection
        self._adapters = adapters

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Any, *, version: int, adapter: str | None
    ) -> list[Completion]:
        """Sample from weights of `version`; see `Engine.generate`. `PhaseError` while other requests are in flight."""
        llm, model_config = self._connection.llm, self._connection.model_config
        if llm.llm_engine.has_unfinished_requests():
            raise PhaseError(
                "requests that you have added to llm.llm_engine are in flight or not collected, and their outputs "
                "would be mixed with these: step until none is left, or abort them"
            )
        params = sampling_params(params, {})
        check_count(len(prompts), params.n)
        asked = for_prompt(params, 0)
        check_logprobs(asked, model_config.logprobs_mode, "start it with logprobs_mode='processed_logprobs'")
        if asked.stop and model_config.skip_tokenizer_init:
            raise Unsupported("this vLLM has no tokenizer and cannot see stop strings: give stop_token_ids")
        token_ids = [tuple(map(operator.index, prompt)) for prompt in prompts]
        check_prompts(token_ids, int(model_config.get_vocab_size()), int(model_config.max_model_len))
        request = self._adapters.request(adapter) if adapter is not None else None
        inputs = [{"prompt_token_ids": list(ids)} for ids in token_ids]
        each = asked if asked.seed is None else [for_prompt(params, index) for index in range(len(inputs))]
        try:
            outputs = self._connection.in_engine(
                "generate", lambda: llm.generate(inputs, each, use_tqdm=False, lora_request=request)
            )
        except BaseException:
            self._connection.abort_requests()  # else they would be taken for a user's, or hold up what comes next
            raise
        has_text = asked.detokenize and not model_config.skip_tokenizer_init
        return completions(outputs, version, adapter, has_text=has_text)

    def pause(self, mode: PauseMode = "abort") -> None:
        """Hold requests back; see `VLLMEngine.pause`. Idempotent, but for a mode that is not possible."""
        connection = self._connection
        if mode == "wait" and not connection.own_process:
            raise Unsupported(
                "the engine runs in this process, where requests in flight go on only while you step, so it cannot "
                "wait for them: step until they have finished, or pause with mode 'keep' or 'abort'"
            )
        if self.paused:
            return
        llm = connection.llm
        self.paused = True  # also after an interrupt: it may be, and to resume what is not does nothing
        try:
            connection.in_engine("pause", lambda: llm.sleep(level=0, mode=mode), deadline=mode != "wait")
        except Exception:
            self.paused = False
            raise
        if mode == "abort" and not connection.own_process:
            # vLLM (0.26, 0.30) ends them in its scheduler only here, and whoever steps would wait for them forever.
            connection.abort_requests()

    def resume(self) -> None:
        """Let requests go on. Idempotent."""
        if self.paused:
            llm = self._connection.llm
            self._connection.in_engine("resume", lambda: llm.wake_up(tags=["scheduling"]))
            self.paused = False

    def reset_prefix_cache(self) -> None:
        """Forget what earlier requests have computed, first without disturbing those in flight.

        Raises: `TransferError` when vLLM does not let go of it.
        """
        llm, in_engine = self._connection.llm, self._connection.in_engine
        if not (
            in_engine("reset_prefix_cache", llm.reset_prefix_cache)
            or in_engine("reset_prefix_cache", lambda: llm.reset_prefix_cache(reset_running_requests=True))
        ):
            raise TransferError("vLLM did not reset its prefix cache: requests still hold blocks of it")
