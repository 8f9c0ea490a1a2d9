"""`colo bench generation`: tokens a second of vLLM on weights that the trainer owns, and of stock vLLM on its own.

Both run in processes of their own on one GPU, with CUDA graphs and torch.compile, in turns, and return the
log-probabilities of the sampled tokens, which training needs.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import psutil

from colo.bench.common import Result, Row, Tell, clear, clocked, silent
from colo.bench.workload import Setup, prepared, shut_down, wait_for_pinning
from colo.engines.vllm.options import LOGPROBS_MODE

ROUNDS = {"0.6b": 17, "8b": 7}
"""The first is not measured. Rounds of a large model differ less: its sampling waits for the GPU, not the host."""


def run(*, shape_name: str, device: str, tell: Tell = silent) -> Result:
    """Measure one shape; see `prepared`."""
    with prepared("generation", shape_name, device, tell) as setup:
        return setup.result(_measure(setup))


def _measure(setup: Setup) -> list[Row]:
    """Ours and stock vLLM. `of_stock` is the median of the rounds' ratios; `least` and `most` are their extremes."""
    from vllm import SamplingParams

    size = setup.size
    setup.tell("stock vLLM")
    llm = setup.stock(logprobs_mode=LOGPROBS_MODE)
    setup.tell("an engine on the trainer's weights")
    rt = setup.launched()
    driven: Any = rt.engine
    wait_for_pinning([psutil.Process().pid, *driven.pids])
    setup.tell("both, in turns")
    params = SamplingParams(max_tokens=size.new_tokens, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": ids} for ids in size.token_ids]
    ours_s: list[float] = []
    stock_s: list[float] = []
    with rt.rollout():
        for _ in range(ROUNDS[setup.shape_name]):
            for engine, times in ((llm, stock_s), (driven.llm, ours_s)):
                engine.reset_prefix_cache()
                times.append(clocked(partial(engine.generate, prompts, params, use_tqdm=False))[1])
    shut_down(llm)
    rt.close()
    del llm, rt
    clear(setup.device)
    tokens = size.prompts * size.new_tokens
    ratios = [theirs / mine for mine, theirs in zip(ours_s[1:], stock_s[1:], strict=True)]
    spread = {"of_stock": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    return [
        {"way": "colo, mapped weights", "tokens_per_s": tokens / statistics.median(ours_s[1:]), **spread},
        {"way": "stock vLLM, its own weights", "tokens_per_s": tokens / statistics.median(stock_s[1:])},
    ]
