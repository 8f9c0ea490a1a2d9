"""TRL's own `GRPOTrainer`, with vLLM in its process and in sleep mode, as something that takes steps."""

from __future__ import annotations

import importlib.util
import threading
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from colo.assembly.launch import default_optimizer
from colo.bench.common import clear
from colo.bench.tenants import Stopwatch, Tenants
from colo.bench.workload import Setup, shut_down
from colo.errors import Unsupported
from colo.memory.probe import total_device_bytes
from colo.units import GIB

WAY = "sleep mode"
_BESIDE_BYTES = 8 * GIB
"""What vLLM counts beside its KV cache, about: weights, activations, CUDA graphs."""


def why_skipped(device: torch.device) -> str | None:
    """Why TRL cannot be measured here; `None` where it can."""
    if importlib.util.find_spec("trl") is None:
        return "TRL is not installed: pip install 'colo-rl[trl]'"
    return None if device.type == "cuda" else "vLLM has no sleep mode on a CPU"


class TRLColocate(Tenants):
    """A trainer that runs in a thread, and stops between steps until it is asked for the next.

    The same number of sequences, in micro-batches of the same size, by the same optimizer, without what TRL adds by
    default: gradient checkpoints, clipping, a pass for importance sampling. TRL needs two completions of each prompt.
    """

    def __init__(self, setup: Setup, own_process: bool, *, with_vllm: bool = True) -> None:
        """Start both. vLLM is in this process. `with_vllm=False` samples with transformers, on any device.

        Raises: `Unsupported` for vLLM in a process of its own.
        """
        super().__init__(setup)
        if own_process:
            raise Unsupported("TRL's colocate mode runs vLLM in the trainer's process")
        self._owned = ExitStack()
        folder = Path(self._owned.enter_context(TemporaryDirectory(prefix="colo-")))
        self._trainer = _trainer(setup, folder, with_vllm=with_vllm)
        self._watch = Stopwatch(setup.device)
        self._llm: Any = None
        if with_vllm:
            generation = self._trainer.vllm_generation
            self._llm = generation.llm
            self._owned.callback(shut_down, self._llm)
            parts = (("generate", "rollout"), ("sync_weights", "publish"))
            for owner, names in ((generation, parts), (self._llm, (("sleep", "switch"), ("wake_up", "switch")))):
                for method, part in names:
                    self._clock(owner, method, part)
        self._pace = _Pace()
        self._trainer.add_callback(self._pace)
        self._thread = threading.Thread(target=self._train, name="trl", daemon=True)
        self._thread.start()

    def step(self, way: str) -> Stopwatch:
        """One step; what is neither sampling, nor sending weights, nor sleeping and waking counts as training."""
        self._watch = watch = Stopwatch(self.setup.device)
        self._pace.one_step()
        watch.stop(rest="train")
        watch.sent_bytes = sum(p.nbytes for p in self._trainer.model.parameters())
        return watch

    def rest(self) -> None:
        """Return what torch caches: vLLM sleeps, at level 2, since it has sampled."""
        clear(self.setup.device)

    def close(self) -> None:
        """End the trainer, between two steps, and vLLM."""
        self._pace.end()
        self._thread.join()
        self._owned.close()

    def _train(self) -> None:
        if self.setup.device.type == "cuda":
            torch.cuda.set_device(self.setup.device)
        try:
            self._trainer.train()
            self._pace.fail(RuntimeError("TRL's trainer has ended by itself"))
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - raised where a step is waited for
            self._pace.fail(error)

    def _clock(self, owner: Any, method: str, part: str) -> None:
        """Count calls of an object's method as a part of the step that runs."""
        call = getattr(owner, method)

        def clocked(*arguments: Any, **options: Any) -> Any:
            with self._watch.part(part):
                return call(*arguments, **options)

        setattr(owner, method, clocked)


class _Ended(Exception):  # noqa: N818 - no error
    """Leaves a trainer's loop."""


class _Pace(TrainerCallback):  # type: ignore[misc]  # an untyped base
    """Lets a trainer take one step at a time."""

    def __init__(self) -> None:
        self._may_begin, self._is_done = threading.Semaphore(0), threading.Semaphore(0)
        self._has_ended = False
        self._error: BaseException | None = None

    def one_step(self) -> None:
        """Have the trainer take a step, and return when it has. Raises: what has ended it."""
        if self._error is None:
            self._may_begin.release()
            self._is_done.acquire()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """End the trainer before its next step."""
        self._has_ended = True
        self._may_begin.release()

    def fail(self, error: BaseException) -> None:
        """Say why there are no more steps."""
        self._error = error
        self._is_done.release()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for `one_step`."""
        self._may_begin.acquire()
        if self._has_ended:
            raise _Ended

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Tell `one_step`."""
        self._is_done.release()


def _trainer(setup: Setup, folder: Path, *, with_vllm: bool) -> Any:
    """A `GRPOTrainer` of a checkpoint with random weights, which is written to `folder` for vLLM to read."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from colo.testing import tiny_tokenizer

    size, device, tokenizer = setup.size, setup.device, tiny_tokenizer("0123456789 ")
    with device:
        made = AutoModelForCausalLM.from_config(setup.config, dtype=setup.config.dtype)
    made.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    del made
    clear(device)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=setup.config.dtype).to(device)
    sampling: dict[str, Any] = {"min_new_tokens": size.new_tokens}
    if with_vllm:
        taken_bytes = size.kv_cache_bytes + _BESIDE_BYTES
        sampling = {"ignore_eos": True}
    args = GRPOConfig(
        str(folder / "out"),
        use_vllm=with_vllm,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=with_vllm,
        vllm_gpu_memory_utilization=taken_bytes / total_device_bytes(device) if with_vllm else 0.3,
        vllm_max_model_length=size.max_length,
        vllm_importance_sampling_correction=False,
        generation_kwargs=sampling,
        max_completion_length=size.new_tokens,
        num_generations=2,
        per_device_train_batch_size=size.train_sequences,
        gradient_accumulation_steps=size.prompts // size.train_sequences,
        gradient_checkpointing=False,
        max_grad_norm=0.0,
        use_cpu=device.type == "cpu",
        bf16=False,  # the model is
        max_steps=1_000_000,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    digits = ["".join(str(token % 10) for token in ids) for ids in size.token_ids]
    return GRPOTrainer(
        model,
        [_even_tokens],
        args,
        train_dataset=Dataset.from_dict({"prompt": digits * 2}),
        processing_class=tokenizer,
        optimizers=(default_optimizer(model.parameters()), None),
    )


def _even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The share of tokens with an even id."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]
