"""What a runtime records and reports."""

import gc
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.models import tiny_qwen3
from tests.runtimes import ALWAYS, PROMPTS, launch, train_step


def test_memory_is_recorded_as_an_engine_generates_and_as_an_optimizer_steps(rt):
    with rt.rollout():
        before = len(rt.trace.samples)
        rt.generate([[1]], max_tokens=1)
        assert len(rt.trace.samples) > before
    with rt.train():
        rt.model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()
        before = len(rt.trace.samples)
        rt.optimizer.step()
        assert rt.trace.samples[-1].segments["trainer.optimizer"] > 0 and len(rt.trace.samples) > before


def test_the_record_of_a_long_run_stops_growing(monkeypatch):
    monkeypatch.setattr("colo.phases.trace.MAX_SPANS", 60)
    monkeypatch.setattr("colo.phases.trace.MAX_SAMPLES", 60)
    rt = launch(tiny_qwen3(), config=ALWAYS)

    def held_after(cycles):
        for _ in range(cycles):
            with rt.rollout():
                rt.generate([[1]], max_tokens=1)
            with rt.train():
                train_step(rt)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        held = [held_after(30), held_after(25), held_after(25)]
    finally:
        tracemalloc.stop()
    per_cycle_bytes = min(after - before for before, after in pairwise(held)) / 25  # of two: some things are made once
    assert per_cycle_bytes < 2048, "a publication, a few metrics, and what others keep; the record is three times that"
    assert max(len(rt.trace.spans), len(rt.trace.samples)) <= 60
    assert "since" in str(rt.report())
    rt.close()


def test_the_report_names_engine_weights_peaks_and_reasons(rt, tmp_path):
    with rt.rollout():
        rt.generate(PROMPTS, max_tokens=2)
    with rt.train():
        train_step(rt)
    rt.log(reward=0.5)
    text = str(rt.report())
    for words in ("torch on cpu", "shared: all", "rollout", "no state of the trainer had to leave", "reward"):
        assert words in text
    assert rt.report().to_json()["facts"]["engine"] == "torch on cpu: transformers in this process"
    page = rt.plot(tmp_path / "run.html").read_text()
    assert page.startswith("<!doctype html>") and "engine.kv_cache" in page
    with pytest.raises(ValueError, match="ends in .html or .png"):
        rt.plot(tmp_path / "run.txt")


@pytest.mark.parametrize("value", ["fast", None, torch.ones(2), [1.0], 1j, 10**400, {}], ids=str)
def test_what_is_no_number_is_refused_by_the_metrics_name_and_nothing_is_logged(rt, value):
    with pytest.raises(ValueError, match=r"rt.log\(entropy=...\) takes one number, not "):
        rt.log(reward=1.0, entropy=value, length=2.0)
    assert not {"reward", "entropy", "length"} & rt.trace.metrics.keys()
    rt.log(reward=torch.tensor(0.5), entropy=np.float32(1), length=True)
    assert [rt.trace.metrics[name] for name in ("reward", "entropy", "length")] == [[0.5], [1.0], [1.0]]


def test_a_report_takes_metrics_by_names_that_colo_has_for_its_own(rt, tmp_path):
    names = "carried", "token_age", "token_age_max", "mismatch", "mismatch_own_routing", "changed_fraction"
    for given in [(a, b) for a in names for b in names]:
        rt.trace.metrics.clear()
        rt.log(**dict.fromkeys(given, 0.5))
        assert given[0] in str(rt.report())
    assert rt.plot(tmp_path / "run.html").is_file()
