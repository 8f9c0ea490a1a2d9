"""`colo bench generation`: tokens a second of vLLM on weights that the trainer owns, and of stock vLLM on its own.

Both in processes of their own on one GPU, with CUDA graphs and torch.compile, in turns, and with log-probabilities of
the sampled tokens, as training needs them.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from typing import Any

import psutil
import torch
from transformers import PretrainedConfig

from colo.bench.common import Result, clear, result
from colo.bench.workload import (
    SIZES,
    Row,
    Size,
    Tell,
    device_copy_bytes_per_s,
    launched,
    seconds,
    shape,
    shut_down,
    size_name,
    stock,
    wait_for_pinning,
)
from colo.engines.vllm.options import LOGPROBS_MODE, save_config

ROUNDS = {"0.6b": 17, "8b": 7}
"""The first is not measured. A large model's differ less: what it samples waits for the GPU, not for the host."""


def run(*, shape_name: str, device: str, tell: Tell = lambda text: None) -> Result:
    """Measure one shape; on a CPU with a tiny one, which shows that it works and no more."""
    target = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    config = shape(shape_name, target)
    limit = {"device_copy_gb_per_s": device_copy_bytes_per_s(target) / 1e9}
    rows = _measure(config, target, SIZES[device], ROUNDS[shape_name], tell)
    command = f"colo bench generation --shape {shape_name} --device {device}"
    return result(f"generation {size_name(shape_name, device)}", command, limit=limit, rows=rows)


def _measure(config: PretrainedConfig, device: torch.device, size: Size, rounds: int, tell: Tell) -> list[Row]:
    """Ours and stock vLLM. `of_stock` is the median of the rounds' ratios, beside the least and the most of them."""
    from vllm import SamplingParams

    with tempfile.TemporaryDirectory(prefix="colo-") as folder:
        save_config(config, folder)
        tell("stock vLLM")
        llm = stock(folder, device, size, logprobs_mode=LOGPROBS_MODE)
    tell("an engine on the trainer's weights")
    rt = launched(config, device, size)
    driven: Any = rt.engine
    wait_for_pinning([psutil.Process().pid, *driven.pids])
    tell("both, in turns")
    params = SamplingParams(max_tokens=size.new_tokens, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": ids} for ids in size.token_ids]
    ours_s: list[float] = []
    stock_s: list[float] = []
    with rt.rollout():
        for _ in range(rounds):
            for engine, times in ((llm, stock_s), (driven.llm, ours_s)):
                engine.reset_prefix_cache()
                times.append(seconds(partial(engine.generate, prompts, params, use_tqdm=False)))
    shut_down(llm)
    rt.close()
    del llm, rt
    clear(device)
    tokens = size.prompts * size.new_tokens
    ratios = [theirs / mine for mine, theirs in zip(ours_s[1:], stock_s[1:], strict=True)]
    spread = {"of_stock": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return [
        {"way": "colo, mapped weights", "tokens_per_s": tokens / statistics.median(ours_s[1:]), **spread},
        {"way": "stock vLLM, its own weights", "tokens_per_s": tokens / statistics.median(stock_s[1:])},
    ]
