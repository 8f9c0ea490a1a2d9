"""`colo demo`: a small model learns one-digit addition by GRPO, on a device that is too small for both tenants.

Everything is made on the spot: a Qwen3-shaped model, a tokenizer of single characters, problems such as `3+5=`. The
model is warmed up until it answers about a fifth of them, then an engine and a trainer take turns on one copy of its
weights while the trainer's state leaves the device for every rollout.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3Config

from colo.assembly.arguments import chosen_device, default_engine
from colo.assembly.launch import launch
from colo.config import Offload, RuntimeConfig
from colo.engine import Completion
from colo.errors import Unsupported
from colo.phases.phase import TRAINER_MASTER_WEIGHTS, TRAINER_OPTIMIZER, Phase
from colo.rl.loop import GRPOConfig, Problem, grpo
from colo.runtime import Runtime
from colo.testing import tiny_config, tiny_tokenizer
from colo.units import KIB, MIB
from colo.weights.sources.module import ModuleSource

if TYPE_CHECKING:
    from peft import LoraConfig

ALPHABET = "0123456789+=;"
END = ALPHABET.index(";")
NUM_DIGITS = 10
GROUP_SIZE = 8
PROBLEMS_PER_STEP = 50
MAX_TOKENS = 3
WARM_UP_ACCURACY = 0.2
WARM_UP_STEPS = 400
WARM_UP_CHECK_EVERY = 4
WARM_UP_LEARNING_RATE = 3e-3
LEARNING_RATE = {"full": 5e-4, "lora": 1e-3}
BETAS = (0.9, 0.95)
"""AdamW's usual 0.999 lets a rare large gradient make too large a step: the reward fell by a third at step 200."""

LORA_RANK = 32
KV_CACHE_WEIGHTS = 2.5
"""Size of the KV cache in multiples of the model's: rollout and train then need about the same."""

VLLM_OPTIONS = {
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 32,
    "max_num_seqs": 512,
    "disable_log_stats": True,
}
VLLM_POOL_BYTES = 20 * MIB
"""Size of vLLM's KV cache on a GPU, where its pool gives memory in pieces of this size."""

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """Results of the demo; `--json` writes `to_json`."""

    engine: str
    device: str
    mode: str
    rewards: list[float]  # mean of each step
    weights_bytes: int
    bytes_synced: int
    weights_version: int
    phase_peak_bytes: dict[str, int]
    peak_bytes: int
    optimizer_bytes: int  # fp32 masters included
    base_unchanged: bool | None  # true if the frozen weights under an adapter kept every bit; None without an adapter
    seconds: dict[str, float]
    runtime: Runtime = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """The result as plain data."""
        names = [each.name for each in fields(self) if each.name != "runtime"]
        return {"steps": len(self.rewards)} | {name: getattr(self, name) for name in names}


def run(
    *,
    steps: int = 300,
    engine: Literal["torch", "vllm"] | None = None,
    own_process: bool = True,
    device: str | None = None,
    mode: str = "full",
    seed: int = 0,
    tell: Tell = lambda text: None,
    on_step: Callable[[dict[str, float]], None] = lambda metrics: None,
) -> DemoResult:
    """Warm a model up, train it for `steps`, and return what was measured with the runtime still open.

    The engine is by default that of `launch`.
    Raises: `ValueError` for an unknown mode or fewer than one step, `Unsupported` for a device that is not there.
    """
    if mode not in LEARNING_RATE:
        raise ValueError(f"mode must be one of {', '.join(LEARNING_RATE)}, not {mode!r}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, but is {steps}")
    torch.manual_seed(seed)
    target = chosen_device(device)
    chosen = default_engine(target) if engine is None else engine
    options = {"own_process": own_process, **VLLM_OPTIONS} if chosen == "vllm" else {}
    rt = _runtime(warm_up(target, seed, tell), target, mode, chosen, options)
    config = GRPOConfig(group_size=GROUP_SIZE, max_tokens=MAX_TOKENS, micro_batch_size=1024, seed=seed)
    rewards = []
    base = {name: p.detach().clone() for name, p in ModuleSource(rt.model)} if mode == "lora" else None
    start_s = time.perf_counter()
    try:
        for metrics in grpo(rt, _batches(steps, seed), reward, config):
            rewards.append(metrics["reward"])
            on_step(metrics | _pace(rt, metrics))
        return _result(rt, mode, rewards, time.perf_counter() - start_s, base)
    except BaseException:
        rt.close()
        raise


def _pace(rt: Runtime, metrics: dict[str, float]) -> dict[str, float]:
    """Tokens a second of the last rollout, and the most bytes that were on the device so far."""
    rollout = next(s for s in reversed(rt.trace.spans) if s.category == "phase" and s.phase is Phase.ROLLOUT)
    num_tokens = metrics["completion_tokens"] * PROBLEMS_PER_STEP * GROUP_SIZE
    return {"tokens_per_s": num_tokens / rollout.duration_s, "device_bytes": float(rt.trace.peak_bytes())}


def reward(completion: Completion, answer: str) -> float:
    """1 for the right sum, ended; else 0."""
    return float(completion.token_ids == tuple(ALPHABET.index(c) for c in answer + ";"))


def warm_up(device: torch.device, seed: int, tell: Tell) -> Any:
    """A model that has seen sums until it samples about a fifth of them right."""
    model = AutoModelForCausalLM.from_config(_model_config()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_UP_LEARNING_RATE)
    ids, labels = (t.to(device) for t in _all_sums())
    generator = random.Random(seed)
    accuracy = 0.0
    for step in range(WARM_UP_STEPS):
        rows = torch.tensor(generator.sample(range(len(ids)), 64), device=device)
        logits = model(input_ids=ids[rows]).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), labels[rows, 1:].flatten(), ignore_index=-100).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % WARM_UP_CHECK_EVERY == WARM_UP_CHECK_EVERY - 1:
            accuracy = _sampled_accuracy(model, ids, labels)
            if accuracy >= WARM_UP_ACCURACY:
                break
    tell(f"warmed up for {step + 1} steps: a sampled answer is right with probability {accuracy:.2f}")
    return model


@torch.no_grad()
def _sampled_accuracy(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> float:
    """Probability that a sampled answer is right, averaged over all sums: the product over its tokens."""
    logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    targets = labels[:, 1:]
    picked = logprobs.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * (targets >= 0)
    return float(picked.sum(-1).exp().mean())


def _all_sums() -> tuple[torch.Tensor, torch.Tensor]:
    """Every sum of two digits as token ids, padded, and labels that count the answer only."""
    sums = [(f"{a}+{b}=", f"{a + b};") for a in range(NUM_DIGITS) for b in range(NUM_DIGITS)]
    length = max(len(prompt + answer) for prompt, answer in sums)
    ids = torch.full((len(sums), length), END, device="cpu")
    labels = torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(sums):
        tokens = [ALPHABET.index(character) for character in prompt + answer]
        ids[row, : len(tokens)] = torch.tensor(tokens, device="cpu")
        labels[row, len(prompt) : len(tokens)] = ids[row, len(prompt) : len(tokens)]
    return ids, labels


def _model_config() -> Qwen3Config:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 32}
    return tiny_config(vocab_size=len(ALPHABET), eos_token_id=END, **sizes)


def _adapter() -> LoraConfig:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise Unsupported("--mode lora needs PEFT: pip install 'colo-rl[lora]'") from error
    return LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear")


def _runtime(
    model: Any, device: torch.device, mode: str, engine: Literal["torch", "vllm"], options: dict[str, Any]
) -> Runtime:
    """A runtime on a device just large enough for the larger of the two phases."""
    lora = _adapter() if mode == "lora" else None
    # vLLM's LoRA kernels for CUDA take no fp32.
    dtype = torch.bfloat16 if lora and engine == "vllm" and device.type == "cuda" else torch.float32
    weights_bytes, trained_bytes = _sizes(model, lora, dtype)
    in_pool = engine == "vllm" and device.type == "cuda"
    kv_cache_bytes = VLLM_POOL_BYTES if in_pool else int(KV_CACHE_WEIGHTS * weights_bytes)
    adapter_bytes = trained_bytes if lora else 0
    train_bytes = weights_bytes + adapter_bytes + 3 * trained_bytes  # gradients and two moments
    larger_bytes = max(train_bytes, weights_bytes + adapter_bytes + kv_cache_bytes)
    config = RuntimeConfig(
        kv_cache_bytes=kv_cache_bytes,
        # Alignment of some dozens of tensors; of vLLM's sleep pool, whose pieces are larger than this model.
        device_limit_bytes=larger_bytes + (8 * MIB if in_pool else 64 * KIB),
        offload=Offload.ALWAYS if in_pool else Offload.AUTO,
        region_bytes=256 * KIB,
    )
    return launch(
        model,
        engine=engine,
        engine_options=options,
        lora=lora,
        optimizer=lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE[mode], betas=BETAS, weight_decay=0.0),
        device=device,
        dtype=dtype,
        tokenizer=tiny_tokenizer(ALPHABET),
        config=config,
    )


def _sizes(model: Any, lora: Any, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the weights in `dtype`, and of what is trained: all of them, or an adapter in fp32."""
    weights_bytes = sum(dtype.itemsize * p.numel() for p in model.parameters())
    if lora is None:
        return weights_bytes, weights_bytes
    linears = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "lm_head" not in n]
    return weights_bytes, sum(4 * LORA_RANK * (m.in_features + m.out_features) for m in linears)


def _batches(steps: int, seed: int) -> Iterator[list[Problem]]:
    """Every sum once in every `NUM_DIGITS ** 2` problems, in random order."""
    generator = random.Random(seed)
    deck: list[tuple[int, int]] = []
    for _ in range(steps):
        if len(deck) < PROBLEMS_PER_STEP:
            fresh = [(a, b) for a in range(NUM_DIGITS) for b in range(NUM_DIGITS)]
            generator.shuffle(fresh)
            deck += fresh
        hand, deck = deck[:PROBLEMS_PER_STEP], deck[PROBLEMS_PER_STEP:]
        yield [Problem(prompt=f"{a}+{b}=", answer=str(a + b)) for a, b in hand]


def _result(
    rt: Runtime, mode: str, rewards: list[float], total_s: float, base: dict[str, torch.Tensor] | None
) -> DemoResult:
    phases = rt.trace.seconds("phase")
    working_s = {phase.value: phases.get(phase, 0.0) for phase in (Phase.ROLLOUT, Phase.TRAIN)}
    segments = rt.scheduler.segments
    return DemoResult(
        engine=rt.engine.name,
        device=rt.device.type,
        mode=mode,
        rewards=rewards,
        weights_bytes=segments["engine.weights"].size_bytes,
        bytes_synced=rt.bytes_synced,
        weights_version=rt.weights_version,
        phase_peak_bytes={name: rt.trace.peak_bytes(Phase(name)) for name in working_s},
        peak_bytes=rt.trace.peak_bytes(),
        optimizer_bytes=sum(segments[name].size_bytes for name in (TRAINER_OPTIMIZER, TRAINER_MASTER_WEIGHTS)),
        base_unchanged=None if base is None else all(torch.equal(base[n], p) for n, p in ModuleSource(rt.model)),
        seconds=working_s | {"switch": total_s - sum(working_s.values())},
        runtime=rt,
    )
