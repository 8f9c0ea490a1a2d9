"""The examples of docs/extending: what somebody writes who adds an engine, a source, a transport or a model."""

import copy
import dataclasses
import re
import runpy
from pathlib import Path

import pytest
import torch

import colo
from colo.engines.torch import TorchEngine
from colo.phases.phase import Residency
from colo.testing import check_engine

ROOT = Path(__file__).parents[2]
KINDS = ("engine", "model", "source", "transport")


def run(kind):
    """What the example's `main` returns."""
    return runpy.run_path(str(ROOT / "examples" / "extending" / f"{kind}.py"))["main"]()


def test_a_transport_of_ones_own_carries_every_version():
    sample, publications = run("transport")
    assert [one.version for one in publications] == [0, 1]
    assert {one.transport for one in publications} == {"numpy"}
    assert all(one.num_bytes > 40_000 for one in publications)
    assert sample.weights_version == 1


def test_a_transport_that_loses_a_byte_is_noticed(monkeypatch):
    example = runpy.run_path(str(ROOT / "examples" / "extending" / "transport.py"))
    copy = example["torch"].from_numpy

    def lossy(array):
        array.flat[0] += 1
        return copy(array)

    monkeypatch.setattr(torch, "from_numpy", lossy)
    with pytest.raises(example["TransferError"], match=r"\d+ weights differ after the transfer"):
        example["main"]()


def test_a_source_of_ones_own_brings_weights_of_other_names():
    sample, own = run("source")
    assert sample.weights_version == 2
    assert torch.allclose(torch.tensor(sample.logprobs), own, atol=1e-5)


def test_an_architecture_of_ones_own_shares_its_weights_with_the_embedded_engine():
    sample, own, transport, scale = run("model")
    assert transport == "shared"
    assert scale != 1  # trained along
    assert torch.allclose(torch.tensor(sample.logprobs), own, atol=1e-5)


def test_an_engine_of_ones_own_learns_on_one_copy_of_the_weights():
    rewards, bytes_sent, transport = run("engine")
    assert (bytes_sent, transport) == (0, "shared")
    assert rewards[-1] > rewards[0] + 0.3


def keeps_its_memory(engine):
    engine.segments[1]._let_go = lambda: None


def sleeps_on_paper(engine):
    engine.sleep = lambda level: None


def forgets_its_weights(engine):
    begin = engine.segments[1].begin
    engine.segments[1].begin = lambda target: (engine.table.copy_(engine.table.roll(1, 1)), begin(target))[1]


def takes_any_prompt(engine):
    generate = engine.generate
    engine.generate = lambda prompts, params, **how: generate([[t % 16 for t in p] or [1] for p in prompts], params)


def logits_for_log_probabilities(engine):
    generate = engine.generate

    def raw(prompts, params, **how):
        return [dataclasses.replace(one, logprobs=(3.0,) * len(one.logprobs)) for one in generate(prompts, params)]

    engine.generate = raw


LIES = {
    "takes any prompt": (takes_any_prompt, "does not refuse to continue an empty prompt (ValueError)"),
    "gives logits": (logits_for_log_probabilities, "gives log-probabilities of [3.0, 3.0"),
    "keeps its memory": (keeps_its_memory, "holds 4096 bytes of engine.kv_cache, discarded"),
    "sleeps on paper": (sleeps_on_paper, "is paused after sleep(keep-weights), not asleep"),
    "forgets its weights": (forgets_its_weights, "samples otherwise after sleep(keep-weights)"),
    "ignores poison": (lambda e: setattr(e, "ready", lambda: 7), "does not refuse to generate while it is poisoned"),
    "names no version": (lambda e: setattr(e, "commit", lambda version: None), "None, and 7 was committed"),
    "wakes too early": (lambda e: setattr(e, "resume", lambda: None), "does not refuse to resume asleep"),
    "makes segments anew": (
        lambda e: setattr(type(e), "segments", property(lambda self: [copy.copy(one) for one in self._segments])),
        "makes its segments anew each time",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_engine_that_lies_is_found_out(lie):
    example = runpy.run_path(str(ROOT / "examples" / "extending" / "engine.py"))
    engine = example["BigramEngine"]()
    engine.table[:, 3] = 1
    tell, words = LIES[lie]
    tell(engine)
    with pytest.raises(AssertionError, match=re.escape(words)):
        check_engine(engine)


def test_memory_that_an_engine_does_not_give_back_is_measured():
    engine = runpy.run_path(str(ROOT / "examples" / "extending" / "engine.py"))["BigramEngine"]()
    with pytest.raises(AssertionError, match=r"says that sleep\(keep-weights\) frees 4096 bytes of 0"):
        check_engine(engine, held_bytes=lambda: 5000)


def test_weights_that_could_leave_from_under_the_trainer_are_not_shared():
    example = runpy.run_path(str(ROOT / "examples" / "extending" / "engine.py"))
    engine, model = example["BigramEngine"](), example["Bigram"]()
    engine.segments[0].away = Residency.OFFLOADED
    with pytest.raises(TypeError, match=r"share_weights\(\) of the bigram engine has to set `away`"):
        colo.share(engine, model, torch.optim.Adam(model.parameters()))


def test_an_engine_that_lacks_members_is_told_which():
    class Half:
        load_weights = commit = None

    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"not Half, which lacks close, device, generate, .*weights_version$"):
        colo.share(Half(), model, torch.optim.AdamW(model.parameters()))


def test_the_engine_honours_sampling_options_and_refuses_prompts():
    engine = runpy.run_path(str(ROOT / "examples" / "extending" / "engine.py"))["BigramEngine"]()
    engine.commit(0)

    def draw(prompt=(1,), **options):
        return engine.generate([prompt], engine.sampling_params(**{"max_tokens": 16} | options))[0]

    assert draw(seed=1).token_ids == draw(seed=1).token_ids != draw(seed=2).token_ids
    assert draw().token_ids != draw().token_ids  # anew each time: alike once in 16 ** 16
    assert draw(top_k=1).logprobs == (0.0,) * 16
    ended = draw(stop_token_ids=range(16))
    assert (len(ended.token_ids), ended.finish_reason, draw().finish_reason) == (1, "stop", "length")
    for prompt in ((), (16,), (-1,)):
        with pytest.raises(ValueError, match="prompt 0"):
            draw(prompt)


def test_an_engine_that_gives_a_token_no_log_probability_is_refused(monkeypatch):
    example = runpy.run_path(str(ROOT / "examples" / "extending" / "engine.py"))
    engine = example["BigramEngine"]
    generate = engine.generate

    def shorter(*args, **options):
        return [dataclasses.replace(one, logprobs=one.logprobs[1:]) for one in generate(*args, **options)]

    monkeypatch.setattr(engine, "generate", shorter)
    with pytest.raises(ValueError, match=r"the engine bigram gave \d+ log-probabilities for the \d+ tokens"):
        example["train"](engine())


def test_a_path_in_place_of_a_config_is_told_what_is_meant(tmp_path):
    with pytest.raises(TypeError, match="takes a config of transformers, such as model.config, not a PosixPath"):
        TorchEngine(tmp_path, device="cpu", dtype=torch.float32, kv_cache_bytes=1 << 20)


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_shows_the_example_as_it_is(kind):
    page = (ROOT / "docs" / "extending" / f"{kind}.md").read_text()
    shown = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    code = (ROOT / "examples" / "extending" / f"{kind}.py").read_text()
    assert shown in code
    assert len(shown.splitlines()) >= 20
