"""`generation`: tokens a second of vLLM on weights that the trainer owns, and what `rt.generate` adds.

Stock vLLM on its own weights is beside the first, both in processes of their own on one GPU, with CUDA graphs and
torch.compile. Beside `rt.generate` is `llm.generate` of the same engine, in a process of its own and in this one. All
take turns, and return the log-probabilities of the sampled tokens, which training needs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import psutil

from benchmarks.common import Record, Row, clear, clocked
from benchmarks.workload import Setup, prepared, shut_down, wait_for_pinning
from colo.engines.vllm.client.start import LOGPROBS_MODE
from colo.runtime import Runtime

ROUNDS = {"0.6b": 17, "8b": 7}
"""The first is not measured. Rounds of a large model differ less: its sampling waits for the GPU, not the host."""

ADDED_ROUNDS = 9
"""At most so many where `rt.generate` and `llm.generate` take turns: the first is not measured here either."""


def run(record: Record, *, shape: str, device: str, prompts: int | None = None, new_tokens: int | None = None) -> None:
    """Measure one shape; see `prepared`. `prompts` and `new_tokens` of each are the device's usual ones by default."""
    given = {"prompts": prompts, "new_tokens": new_tokens}
    with prepared(record, shape, device) as setup:
        setup = setup.resized(**{name: count for name, count in given.items() if count is not None})
        for part in (_own_process, _in_process):
            for row in part(setup):
                record.add(row)


def _own_process(setup: Setup) -> Iterator[Row]:
    """Ours and stock vLLM. `of_stock` is the median of the rounds' ratios; `least` and `most` are their extremes."""
    size = setup.size
    setup.tell("stock vLLM")
    llm = setup.stock(logprobs_mode=LOGPROBS_MODE)
    setup.tell("an engine on the trainer's weights")
    rt = setup.launched()
    driven: Any = rt.engine
    wait_for_pinning([psutil.Process().pid, *driven.pids])
    setup.tell("both, in turns")
    ours_s: list[float] = []
    stock_s: list[float] = []
    with rt.rollout():
        for _ in range(ROUNDS[setup.shape_name]):
            for engine, times in ((llm, stock_s), (driven.llm, ours_s)):
                engine.reset_prefix_cache()
                times.append(clocked(_bare(setup, engine))[1])
    shut_down(llm)
    tokens = size.prompts * size.new_tokens
    ratios = [theirs / mine for mine, theirs in zip(ours_s[1:], stock_s[1:], strict=True)]
    spread = {"of_stock": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    yield {"way": "colo, mapped weights", "tokens_per_s": tokens / statistics.median(ours_s[1:]), **spread}
    yield {"way": "stock vLLM, its own weights", "tokens_per_s": tokens / statistics.median(stock_s[1:])}
    yield from _added(setup, rt, "own process")
    rt.close()
    del llm, rt, driven, engine
    clear(setup.device)


def _in_process(setup: Setup) -> Iterator[Row]:
    setup.tell("an engine in this process")
    rt = setup.launched(own_process=False)
    wait_for_pinning([psutil.Process().pid])
    yield from _added(setup, rt, "in process")
    rt.close()


def _added(setup: Setup, rt: Runtime, where: str) -> list[Row]:
    """Time that `rt.generate` adds to `llm.generate` of its engine, called in turns.

    `ours_s` is what a call spends outside of vLLM. colo asks for flat log-probabilities, which are
    less work for vLLM, so there is a bare call with those too.
    """
    setup.tell(f"rt.generate and llm.generate in turns, {where}")
    size, engine = setup.size, rt.engine
    llm, token_ids = engine.llm, size.token_ids  # type: ignore[attr-defined]
    calls: dict[str, Callable[[], Any]] = {
        "bare": _bare(setup, llm),
        "bare, flat": _bare(setup, llm, flat_logprobs=True),
        "rt.generate": partial(rt.generate, token_ids, max_tokens=size.new_tokens, ignore_eos=True),
    }
    times: dict[str, list[float]] = {way: [] for way in calls}
    within: dict[str, list[float]] = {way: [] for way in calls}
    with rt.rollout():
        for _ in range(min(ROUNDS[setup.shape_name], ADDED_ROUNDS)):
            for way, call in calls.items():
                engine.reset_prefix_cache()
                with _clocked_calls(llm, within[way]):
                    times[way].append(clocked(call)[1])
    rows = []
    for way, seconds in times.items():
        outside = [total - inner for total, inner in zip(seconds, within[way], strict=True)]
        of_bare = [mine / bare for mine, bare in zip(seconds, times["bare"], strict=True)]
        rows.append(
            {
                "way": f"{way}, {where}",
                "call_s": statistics.median(seconds[1:]),
                "least_s": min(seconds[1:]),
                "most_s": max(seconds[1:]),
                "of_bare": statistics.median(of_bare[1:]),
                "ours_s": statistics.median(outside[1:]) if way == "rt.generate" else None,
            }
        )
    return rows


def _bare(setup: Setup, llm: Any, **options: Any) -> Callable[[], Any]:
    """A call of vLLM's `generate`, with log-probabilities of what is sampled."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=setup.size.new_tokens, temperature=1.0, ignore_eos=True, detokenize=False, logprobs=0, **options
    )
    prompts = [{"prompt_token_ids": ids} for ids in setup.size.token_ids]
    return lambda: llm.generate(prompts, params, use_tqdm=False)


@contextmanager
def _clocked_calls(llm: Any, seconds: list[float]) -> Iterator[None]:
    """Note what vLLM takes for a generation meanwhile: its `generate`, or the requests and steps that this makes."""
    spent_s: list[float] = []
    outermost: list[Any] = []

    def clock(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if outermost:
                return function(*arguments, **options)
            outermost.append(function)
            try:
                result, took_s = clocked(partial(function, *arguments, **options))
            finally:
                outermost.clear()
            spent_s.append(took_s)
            return result

        return call

    calls = ((llm, "generate"), (llm, "enqueue"), (llm.llm_engine, "step"))
    for owner, name in calls:
        setattr(owner, name, clock(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name in calls:
            delattr(owner, name)
    seconds.append(sum(spent_s))
