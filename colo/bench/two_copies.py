"""What people do today: vLLM and a trainer, each on weights of its own, which are pushed after every step."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from colo.assembly.launch import default_optimizer
from colo.bench.common import clear, synchronize
from colo.bench.tenants import Stopwatch, Tenants
from colo.bench.vllm_ipc import VLLMIpc
from colo.bench.workload import Setup, shut_down, train_step, worker_model
from colo.engines.vllm import compat
from colo.engines.vllm.client.options import LOGPROBS_MODE
from colo.weights.sources.checkpoint import checkpoint_views

LEVELS = {"both resident": 0, "vLLM's level 1": 1, "vLLM's level 2": 2}
"""How deeply vLLM sleeps while the trainer works."""


class TwoCopies(Tenants):
    """vLLM in this process or in one of its own, and a trainer, with as many bytes of weights each."""

    def __init__(self, setup: Setup, own_process: bool) -> None:
        """Start both. vLLM returns the log-probabilities that colo asks it for."""
        super().__init__(setup)
        self._owned = ExitStack()
        options: dict[str, Any] = {"logprobs_mode": LOGPROBS_MODE}
        if own_process:
            from vllm.config import WeightTransferConfig

            options["weight_transfer_config"] = WeightTransferConfig(backend="ipc")
            self._owned.enter_context(compat.variable("VLLM_ALLOW_INSECURE_SERIALIZATION", "1"))
        self._llm = setup.stock(own_process=own_process, **options)
        self._owned.callback(shut_down, self._llm)
        self._ipc = VLLMIpc(self._llm) if own_process else None
        with setup.device:
            self._model = AutoModelForCausalLM.from_config(setup.config, dtype=setup.config.dtype)
        self._optimizer = default_optimizer(self._model.parameters())
        self._sleeps = False

    def step(self, way: str) -> Stopwatch:
        """One step of a way in `LEVELS`; every part of it waits for the device."""
        level, device, size = LEVELS[way], self.setup.device, self.setup.size
        self._wake()
        watch = Stopwatch(device)
        with watch.part("rollout"):
            outputs = self._generate()
        with watch.part("switch"):
            if level:
                self._llm.sleep(level=level)
        sequences = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
        with watch.part("train"):
            train_step(self._model, self._optimizer, sequences, size, device)
        with watch.part("switch"):
            if level:
                torch.cuda.empty_cache()  # else vLLM does not find the memory that it gave back
                self._llm.wake_up(tags=["weights"])
        with watch.part("publish"):
            self._push()
        with watch.part("switch"):
            if level:
                self._llm.wake_up(tags=["kv_cache"])
        watch.stop()
        watch.sent_bytes = sum(p.nbytes for p in self._model.parameters())
        return watch

    def rest(self) -> None:
        """Put vLLM to sleep, until the next step."""
        clear(self.setup.device)
        if self.setup.device.type == "cuda":
            self._llm.sleep(level=1)
            self._sleeps = True

    def close(self) -> None:
        """End vLLM."""
        self._owned.close()

    def _wake(self) -> None:
        if self._sleeps:
            self._llm.wake_up()
            synchronize(self.setup.device)
            self._sleeps = False

    def _generate(self) -> Any:
        from vllm import SamplingParams

        size = self.setup.size
        params = SamplingParams(
            max_tokens=size.new_tokens, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0
        )
        prompts: Any = [{"prompt_token_ids": ids} for ids in size.token_ids]
        self._llm.reset_prefix_cache()
        return self._llm.generate(prompts, params, use_tqdm=False)

    @torch.no_grad()
    def _push(self) -> None:
        """Push the weights: one tensor at a time through vLLM's loader, as TRL does; to a process of its own by IPC."""
        weights = {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        if self._ipc is not None:
            self._ipc.send(checkpoint_views(weights, self.setup.config.model_type))
            return
        (model,) = self._llm.collective_rpc(worker_model)
        for view in weights.items():
            model.load_weights([view])
