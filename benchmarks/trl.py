"""`trl`: TRL's GRPOTrainer on one GPU, in its own colocate mode and with colo's flag: same data, same seeds.

Each side runs in a process of its own, one after the other. A row has the most device memory that the driver saw in
use, and by how much the most that torch's allocator took from it exceeds the most that it has given out; of colo's also
what it counts itself in each phase, what training has taken beside that, such as activations, and the host memory that
its arena has pinned; seconds a step (median of all but the first two), from the end of one to the end of the next:
TRL's own `step_time` leaves the optimizer's out; seconds in which weights were sent or phases changed, of colo's also
those of each phase, and the last reward. With `--card` another process holds the rest of the GPU, and is not counted. A
side that fails, for want of memory say, has a row that says so. On a CPU the flag's side runs alone, with a tiny model.
Unsloth's own trainer, in its standby, has a row where `--lora` is given and `--sides` asks for it.

With `--context` completions are a fifth longer in each step, until one fails for want of memory, and `context` is the
longest that a whole step took; `--from` leaves shorter ones out. Their first tokens are sampled, the others are drawn
at random: every phase has what it has in a run, the engine room in its KV cache for a sequence of the full length, and
no time goes into sampling them. A side that is cut off, by `--minutes` say, has a row of what it had reached.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.common import Record, Row, clocked, own_processes, timed
from benchmarks.common import shape as shape_of
from benchmarks.workload import peak_device_bytes
from colo.errors import BudgetError
from colo.memory.probe import free_device_bytes, used_device_bytes
from colo.phases.phase import Phase
from colo.units import GIB, format_bytes

SIDES: dict[str, Row] = {
    "colo's flag, bf16 with fp32 masters": {"stock": False, "dtype": "bfloat16"},
    "colo's flag, bf16, the adapter folded": {"stock": False, "dtype": "bfloat16", "colo_fold_adapter": True},
    "TRL colocate, bf16": {"stock": True, "dtype": "bfloat16"},
    "TRL colocate, bf16, sleep mode": {"stock": True, "dtype": "bfloat16", "vllm_enable_sleep_mode": True},
    "TRL colocate, fp32 as it loads": {"stock": True, "dtype": None},
    "TRL, transformers' continuous batching": {
        "stock": True,
        "dtype": "bfloat16",
        "use_vllm": False,
        "use_transformers_continuous_batching": True,
    },
    "TRL with DeepSpeed's ZeRO-Offload": {
        "stock": True,
        "asked": "ZeRO",
        "dtype": "bfloat16",
        "deepspeed": {
            "bf16": {"enabled": True},
            "optimizer": {  # of which DeepSpeed makes its own for host memory
                "type": "AdamW",
                "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
            },
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        },
    },
    "Unsloth, standby": {
        "stock": True,
        "asked": "Unsloth",
        "dtype": None,  # its engine's
        "optim": "adamw_torch_fused",  # here and below TRL's defaults, for which Unsloth has others
        "weight_decay": 0.0,
        "vllm_importance_sampling_correction": True,
    },
}
"""Settings of each way. One that needs packages of its own is chosen where `--sides` has what is `asked`."""

UNSLOTH = {
    "UNSLOTH_VLLM_STANDBY": "1",
    "UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE": "1",  # sampling takes --utilization, not nearly all of the GPU
    "UNSLOTH_DISABLE_STATISTICS": "1",
}
"""What Unsloth's process has in its environment."""

_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
"""Environment variables of the folders that keep compiled kernels, and what vLLM knows of models."""


def run(record: Record, *, shape: str, device: str, sides: str, **options: Any) -> None:
    """Train by the side named `sides`, or all whose name has it in it; `options` are those of the command line."""
    # an adapter is served beside the weights unless it is folded into a copy of them, as TRL does
    possible = [
        name
        for name, side in SIDES.items()
        if (device == "cuda" or not side["stock"])
        and (options["lora"] or not side.get("colo_fold_adapter"))
        and (not options["context"] or side.get("use_vllm", True))  # it lengthens what vLLM has sampled
        and (not _is_unsloths(name) or (options["lora"] and not options["context"]))
    ]
    chosen = [name for name in possible if sides in name and SIDES[name].get("asked", "") in sides]
    chosen = [sides] if sides in chosen else chosen  # "TRL colocate, bf16" is the beginning of another
    if not chosen:
        raise ValueError(f"--sides {sides!r} is in none of: {'; '.join(possible)}")
    if options["first"] > (options["context"] or 0):
        raise ValueError(f"--from {options['first']} wants a --context that is as long at least")
    card_bytes = options["card"] if device == "cuda" else None
    with tempfile.TemporaryDirectory() as place:
        longest, model = 64 + (options["context"] or options["tokens"]), Path(place) / "model"
        reached = _reached(str(model))
        with own_processes() as process:  # this one uses no GPU: what it took would be counted
            folder = process.submit(_checkpoint, shape, device, model, max(4096, longest)).result()
        for name in chosen:
            record.tell(name)
            reached.unlink(missing_ok=True)
            environment = {cache: tempfile.mkdtemp(dir=place) for cache in _CACHES if options["cold"]}
            if _is_unsloths(name):
                environment |= UNSLOTH | {"UNSLOTH_COMPILE_LOCATION": f"{place}/unsloth"}
            own = own_processes(first="unsloth" if _is_unsloths(name) else None, environment=environment)
            with _others(card_bytes) if card_bytes else nullcontext(0) as held_bytes, own as process:
                try:
                    row = process.submit(_measured, name, str(folder), options | {"device": device}).result()
                except Exception as error:  # noqa: BLE001 - the others are measured
                    traceback.print_exc()
                    record.add({"way": name, "failed": str(error).partition("\n")[0] or type(error).__name__})
                    continue
                except BaseException:
                    if reached.exists():
                        record.add({"way": name, "context": int(reached.read_text()), "ended": "cut off"})
                    raise
                record.add(row | {"peak_bytes": row["peak_bytes"] and row["peak_bytes"] - held_bytes})
                process.submit(_end)  # the row is kept, whatever becomes of this


def _is_unsloths(name: str) -> bool:
    return name.startswith("Unsloth")


@contextmanager
def _others(card_bytes: int) -> Iterator[int]:
    """Leave `card_bytes` of the GPU free, while another process holds the rest of it; yields how many bytes."""
    with own_processes() as process:
        yield process.submit(_hold, card_bytes).result()


def _hold(card_bytes: int) -> int:
    """Take all but so many bytes of the GPU; returns how many are in use then."""
    device = torch.device("cuda")
    if (free_bytes := free_device_bytes(device)) < card_bytes:
        raise ValueError(f"--card {format_bytes(card_bytes)}: the GPU has {format_bytes(free_bytes)} free")
    _held.append(torch.empty(free_bytes - card_bytes, dtype=torch.uint8, device=device))
    return used_device_bytes(device) or 0


_held: list[torch.Tensor] = []  # in the process that plays a smaller card


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Notes when each step has ended: what one leaves queued on a GPU the next waits for."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the end of a step, after the optimizer's."""
        self.ends_s.append(time.perf_counter())

    on_train_begin = on_step_end

    @property
    def seconds(self) -> list[float]:
        """What each step has taken."""
        return [end_s - start_s for start_s, end_s in pairwise(self.ends_s)]


def _checkpoint(name: str, device: str, folder: Path, context: int) -> Path:
    """Write a checkpoint of random weights, for `context` tokens, with a tokenizer of characters."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    from colo.testing import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = shape_of(name, torch.device(device))
    config.update(ends | {"max_position_embeddings": context, "vocab_size": max(config.vocab_size, len(tokenizer))})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def low_tokens(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
    """Reward tokens with an even id."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def _measured(name: str, folder: str, options: Mapping[str, Any]) -> Row:
    """Train by one side, and return its row."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    side, on_cpu = dict(SIDES[name]), options["device"] == "cpu"
    stock, dtype, context = side.pop("stock"), side.pop("dtype"), options["context"]
    side.pop("asked", None)
    passes, clock = 1 if options["released"] else options["accumulation"], _Clock()
    if stock:
        kinds: tuple[Any, Any] = GRPOConfig, GRPOTrainer
        os.environ["MASTER_PORT"] = "0"  # asks TRL for a free one: beside another run the usual one is taken
        if side.setdefault("use_vllm", True):
            side |= {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": options["utilization"]}
        else:  # which takes its cache anew for each batch, by default nine tenths of what is free
            side["transformers_continuous_batching_config"] = {"max_memory_percent": options["utilization"]}
        if "deepspeed" in side:  # what its launcher would set
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    else:
        from colo.trl import ColoGRPOConfig, ColoGRPOTrainer

        kinds = ColoGRPOConfig, ColoGRPOTrainer
        side |= {
            "fast_inference": True,
            "colo_kv_cache_bytes": str(options["kv_cache"]),
            "colo_engine": options["engine"],
            "colo_offload": options["offload"],
            "colo_optimizer": options["optimizer"],
            "colo_resident_state_bytes": str(options["resident_state"]) if options["resident_state"] else None,
            "colo_moment_dtype": options["moment_dtype"],
            "colo_release_gradients": options["released"],
            "colo_offload_activations": options["offload_activations"],
            "colo_engine_options": {"enforce_eager": True}
            if options["eager"] and options["engine"] == "vllm"
            else None,
        }
    config, kind = kinds
    args = config(
        f"{folder}/out",
        use_cpu=on_cpu,
        bf16=not on_cpu,
        max_steps=len(_lengths(context, options["first"])) if context else options["steps"],
        per_device_train_batch_size=options["batch"],
        gradient_accumulation_steps=passes,
        max_grad_norm=0.0 if options["released"] else 1.0,
        num_generations=min(8, options["batch"] * passes),
        max_completion_length=16 if context else options["tokens"],
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        model_init_kwargs={"dtype": dtype} if dtype and not on_cpu else None,
        vllm_max_model_length=64 + (context or options["tokens"]),
        **side,
    )
    prompts = [f"{a}+{b}=" for a in range(10) for b in range(10)]
    with peak_device_bytes(torch.device(options["device"])) as peak:
        data = Dataset.from_dict({"prompt": prompts})
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if options["lora"] else None

        def made() -> Any:
            model = _unsloths(folder, options) if _is_unsloths(name) else {"model": folder, "peft_config": lora}
            return kind(reward_funcs=[low_tokens], args=args, train_dataset=data, callbacks=[clock], **model)

        trainer, ready_s = clocked(made)
        synced_s = _time_syncs(trainer) if stock and args.use_vllm else []
        found = _longest(trainer, _lengths(context, options["first"]), _reached(folder)) if context else trainer.train()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    if not stock:
        _to_close.append(trainer.colo)
    if context:
        return {"way": name, **found, "peak_bytes": peak[0] or None}
    steps = clock.seconds[2:] or clock.seconds[-1:]
    between = synced_s or [entry.get("colo/switch_s", 0.0) + entry.get("colo/sync_s", 0.0) for entry in history]
    return {
        "way": name,
        "start_s": ready_s,
        "step_s": statistics.median(steps),
        "least_s": min(steps),
        "most_s": max(steps),
        "between_s": statistics.median(between[2:] or between),
        "rollout_s": None if stock else _median_s(history, "colo/rollout_s"),
        "train_s": None if stock else _median_s(history, "colo/train_s"),
        "peak_bytes": peak[0] or None,
        "cached_bytes": torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated() if peak[0] else None,
        "rollout_bytes": None if stock else int(history[-1]["colo/rollout_gib"] * GIB),
        "train_bytes": None if stock else int(history[-1]["colo/train_gib"] * GIB),
        "train_working_bytes": None if stock else trainer.colo.scheduler.working_bytes[Phase.TRAIN],
        "pinned_bytes": None if stock else trainer.colo._mover.arena.pinned_bytes,
        "reward": history[-1]["reward"],
        "mismatch": history[-1].get("sampling/sampling_logp_difference/mean"),
    }


def _unsloths(folder: str, options: Mapping[str, Any]) -> Row:
    """Start Unsloth's engine; returns what its trainer takes, the model on that engine's memory with an adapter."""
    from unsloth import FastLanguageModel

    os.chdir(Path(folder).parent)  # it writes each step's adapter where it runs
    model, tokenizer = FastLanguageModel.from_pretrained(
        folder,
        max_seq_length=64 + options["tokens"],
        dtype=torch.bfloat16,
        load_in_4bit=False,
        fast_inference=True,
        max_lora_rank=16,
        gpu_memory_utilization=options["utilization"],
        enforce_eager=options["eager"],
    )
    return {"model": FastLanguageModel.get_peft_model(model, r=16, lora_alpha=32), "processing_class": tokenizer}


def _median_s(history: list[dict[str, float]], metric: str) -> float:
    """Take the median of a metric, without the first two steps if there are more."""
    values = [entry[metric] for entry in history]
    return statistics.median(values[2:] or values)


def _lengths(context: int, first: int) -> list[int]:
    """Lengths of completions from `first` up to `context` tokens, each 2 ** 0.25 times the one before it."""
    return [length for step in range(16, -1, -1) if (length := round(context * 2 ** (-step / 4))) >= first]


def _reached(folder: str) -> Path:
    """The file with the longest completions of a whole step so far, beside the model's `folder`."""
    return Path(folder).parent / "reached"


def _lengthen(trainer: Any, lengths: list[int], reached: Path) -> list[int]:
    """Give the completions of each step the next length; return those of the steps that have begun, which grows."""
    generation, began, left = trainer.vllm_generation, list[int](), iter(lengths)
    generate, vocabulary = generation.generate, len(trainer.processing_class)
    draw = random.Random(0)

    def lengthened(*args: Any, **given: Any) -> tuple[Any, ...]:
        prompts, completions, logprobs, tokens, *rest = generate(*args, **given)
        if began:
            reached.write_text(str(began[-1]))
        began.append(next(left))
        for row, row_logprobs, row_tokens in zip(completions, logprobs, tokens, strict=True):
            more = [draw.randrange(vocabulary) for _ in range(began[-1] - len(row))]
            row += more
            row_logprobs += [[-math.log(vocabulary)]] * len(more)
            row_tokens += [[token] for token in more]
        return (prompts, completions, logprobs, tokens, *rest)

    generation.generate = lengthened
    return began


def _longest(trainer: Any, lengths: list[int], reached: Path) -> Row:
    """Train until memory does not suffice; return the longest `context` of a whole step, and how it has `ended`."""
    began, why = _lengthen(trainer, lengths, reached), None
    try:
        trainer.train()
    except (torch.OutOfMemoryError, BudgetError) as error:
        traceback.print_exc()  # which tells the phase
        why = str(error).partition("\n")[0]
    done = began[:-1] if why else began  # the last that began has failed
    return {"context": done[-1] if done else 0, "ended": why}


_to_close: list[Any] = []  # runtimes, in the process of one side


def _end() -> None:
    for runtime in _to_close:
        runtime.close()


def _time_syncs(trainer: Any) -> list[float]:
    """Clock updates of vLLM's weights, with its sleep and wake; the list fills while the trainer runs."""
    generation, device = trainer.vllm_generation, torch.device("cuda")
    seconds: list[float] = []
    inside = False  # an update wakes vLLM itself

    def clock(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def timed_call(*args: Any, **given: Any) -> None:
            nonlocal inside
            if inside:
                original(*args, **given)
                return
            inside = True
            try:
                spent_s = timed(lambda: original(*args, **given), device)
            finally:
                inside = False
            if name == "sync_weights" or not seconds:
                seconds.append(0.0)
            seconds[-1] += spent_s

        setattr(owner, name, timed_call)

    clock(generation, "sync_weights")
    clock(generation.llm, "sleep")
    clock(generation.llm, "wake_up")
    return seconds
