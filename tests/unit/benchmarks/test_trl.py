import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks import trl
from benchmarks.__main__ import app
from benchmarks.common import Record

pytest.importorskip("trl", reason="TRL is not installed: pip install 'colo-rl[trl]'")
FLAG = next(iter(trl.SIDES))


@pytest.mark.slow
@pytest.mark.parametrize(("first", "limit", "longest"), [(200, 10**6, 256), (0, 100, 91), (0, 1, 0)])
def test_the_longest_completion_is_the_last_that_a_whole_step_took(tmp_path, monkeypatch, first, limit, longest):
    lengths = []

    def fails(completions, completion_ids, **_):
        lengths.append(len(completion_ids[0]))
        if len(completion_ids[0]) > limit:
            raise torch.OutOfMemoryError("no memory\nand where it went")
        return [float(len(ids)) for ids in completion_ids]

    monkeypatch.setattr(trl, "low_tokens", fails)
    words = ["--device", "cpu", "--engine", "torch", "--batch", "1", "--accumulation", "2", "--kv-cache", "64MiB"]
    options = app.commands["trl"].make_context("trl", [*words, "--context", "256", "--from", str(first)]).params
    row = trl._measured(FLAG, str(trl._checkpoint("0.6b", "cpu", tmp_path / "model", 512)), options)
    trl._to_close.pop().close()
    gc.collect()
    assert (row["context"], row["ended"]) == (longest, None if limit > 256 else "no memory")
    assert lengths[0] == (215 if first else 16)
    reached = tmp_path / "reached"
    assert (int(reached.read_text()) if reached.exists() else 0) == (215 if first else longest)


DEFAULTS = {"card": None, "context": None, "first": 0, "tokens": 8, "lora": False, "cold": False}


@contextmanager
def in_a_thread(*, first=None, environment=None):
    """Stands in for a process of its own, with its environment."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        yield pool


@pytest.fixture
def two_sides(tmp_path, monkeypatch):
    """Measure the flag's side and another as a test does it."""

    def measure(record, measured, context=None, cold=False):
        monkeypatch.setattr(trl, "_measured", measured)
        trl.run(record, shape="8b", device="cpu", sides="", **DEFAULTS | {"context": context, "cold": cold})

    monkeypatch.setattr(trl, "SIDES", {FLAG: {"stock": False}, "other": {"stock": False}})
    monkeypatch.setattr(trl, "_reached", lambda _: tmp_path / "reached")
    monkeypatch.setattr(trl, "_checkpoint", lambda *_: tmp_path)
    monkeypatch.setattr(trl, "own_processes", in_a_thread)
    return measure


def test_a_side_that_is_cut_off_has_a_row_of_what_it_had_reached(two_sides, tmp_path):
    def measured(name, folder, options):
        (tmp_path / "reached").write_text("64")
        if name == FLAG:
            return {"way": name, "context": 128, "peak_bytes": None}
        raise KeyboardInterrupt

    record = Record("trl", "command")
    with pytest.raises(KeyboardInterrupt):
        two_sides(record, measured, context=256)
    assert record.rows[1:] == [{"way": "other", "context": 64, "ended": "cut off"}]


def test_a_side_that_lacks_memory_is_a_row_and_the_others_go_on(two_sides):
    def measured(name, folder, options):
        if name == FLAG:
            raise torch.OutOfMemoryError("no memory\nand where it went")
        return {"way": name, "peak_bytes": 8}

    record = Record("trl", "command")
    two_sides(record, measured)
    assert record.rows == [{"way": FLAG, "failed": "no memory"}, {"way": "other", "peak_bytes": 8}]


@pytest.mark.parametrize("cold", [False, True])
def test_caches_of_what_was_compiled_are_everybodys_or_each_sides_own_and_empty(two_sides, monkeypatch, cold):
    caches = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT")
    for name in caches:
        monkeypatch.setenv(name, "everybody's")
    seen, found = [], []

    def measured(name, folder, options):
        seen.extend(os.environ[cache] for cache in caches)
        if cold:
            found.extend(file for folder in seen[-3:] for file in Path(folder).iterdir())
            (Path(seen[-1]) / "compiled").touch()
        return {"way": name, "peak_bytes": None}

    record = Record("trl", "command")
    two_sides(record, measured, cold=cold)
    assert not found and not any("failed" in row for row in record.rows)
    assert len(set(seen)) == (6 if cold else 1)


@pytest.fixture
def ways(tmp_path, monkeypatch):
    """The sides that a call chooses, by name, without measuring them."""
    monkeypatch.setattr(trl, "_measured", lambda name, *_: {"way": name, "peak_bytes": None})
    monkeypatch.setattr(trl, "_checkpoint", lambda *_: tmp_path)
    monkeypatch.setattr(trl, "own_processes", in_a_thread)

    def chosen(**options):
        record = Record("trl", "command")
        trl.run(record, shape="8b", **DEFAULTS | options)
        return [row["way"] for row in record.rows]

    return chosen


@pytest.mark.parametrize("lora", [False, True])
def test_an_adapter_is_folded_on_a_side_of_its_own_where_there_is_one(ways, lora):
    found = ways(device="cpu", sides="flag", lora=lora)
    assert found == [FLAG, "colo's flag, bf16, the adapter folded"][: 1 + lora]


def test_a_side_that_needs_deepspeed_is_chosen_by_its_name_alone(ways):
    zero = "TRL with DeepSpeed's ZeRO-Offload"
    assert ways(device="cuda", sides="ZeRO-Offload") == [zero]
    assert all(zero not in ways(device="cuda", sides=sides) for sides in ("", "TRL", "TRL colocate, bf16"))


@pytest.mark.parametrize("context", [None, 512])
def test_completions_are_lengthened_where_vllm_has_sampled_them(ways, context):
    found = ways(device="cuda", sides="TRL", context=context)
    assert all("colocate" in way for way in found[:3])
    assert found[3:] == ([] if context else ["TRL, transformers' continuous batching"])


def test_a_step_is_clocked_with_the_optimizers(tmp_path):
    """TRL's own `step_time` ends before it: a step that streams its state would look free."""

    def late(*_):
        time.sleep(0.5)

    hook = register_optimizer_step_pre_hook(late)
    words = ["--device", "cpu", "--engine", "torch", "--batch", "2", "--tokens", "4", "--steps", "3"]
    options = app.commands["trl"].make_context("trl", [*words, "--kv-cache", "64MiB"]).params
    try:
        row = trl._measured(FLAG, str(trl._checkpoint("0.6b", "cpu", tmp_path / "model", 512)), options)
    finally:
        hook.remove()
        trl._to_close.pop().close()
    assert row["least_s"] > 0.5


def test_what_trl_takes_between_turns_is_its_update_with_sleep_and_wake_counted_once(monkeypatch):
    llm = SimpleNamespace(sleep=lambda level: None, wake_up=lambda tags: None)
    generation = SimpleNamespace(llm=llm, sync_weights=lambda: llm.wake_up(tags=["weights"]))
    monkeypatch.setattr(trl, "timed", lambda work, device: work() or 1.0)
    seconds = trl._time_syncs(SimpleNamespace(vllm_generation=generation))
    for _ in range(2):
        generation.sync_weights()
        llm.wake_up(tags=["kv_cache"])
        llm.sleep(level=2)
    assert seconds == [3.0, 3.0]


def test_sides_that_are_none_are_refused_at_once(ways):
    with pytest.raises(ValueError, match="--sides 'flug' is in none of: colo's flag"):
        ways(device="cpu", sides="flug")


@pytest.mark.parametrize("context", [None, 512])
def test_completions_that_begin_longer_than_they_end_are_refused_at_once(ways, context):
    with pytest.raises(ValueError, match="--from 600 wants a --context that is as long at least"):
        ways(device="cpu", sides="", context=context, first=600)


def test_a_whole_name_chooses_one_side_and_a_part_of_names_all_that_have_it(ways):
    assert ways(device="cuda", sides="TRL colocate, bf16") == ["TRL colocate, bf16"]
    both = ["TRL colocate, bf16", "TRL colocate, bf16, sleep mode", "TRL colocate, fp32 as it loads"]
    assert ways(device="cuda", sides="TRL colocate") == both


@pytest.mark.parametrize("lora", [False, True])
def test_unsloth_is_measured_where_it_is_asked_for_and_trains_an_adapter(ways, lora):
    assert "Unsloth, standby" not in ways(device="cuda", sides="", lora=lora)
    if lora:
        assert ways(device="cuda", sides="Unsloth", lora=True) == ["Unsloth, standby"]
    else:
        with pytest.raises(ValueError, match=r"--sides 'Unsloth' is in none of: (?!.*Unsloth)"):
            ways(device="cuda", sides="Unsloth", lora=False)
