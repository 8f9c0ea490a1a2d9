"""The demo's options, problems, rewards and result; that it learns is tested in tests/integration/test_demo.py."""

import random
import sys
from types import SimpleNamespace

import pytest
import torch

from colo import demo
from colo.demo import ALPHABET, LEARNING_RATE
from colo.engine import Completion
from colo.errors import Unsupported
from colo.phases.phase import TRAINER_OPTIMIZER, Phase


@pytest.fixture(scope="module")
def two_steps():
    """Runs the demo for two steps, once for each of its options, and closes the runtimes after the last test."""
    results = {}

    def find(mode="full", seed=0):
        if (mode, seed) not in results:
            results[mode, seed] = demo.run(steps=2, device="cpu", mode=mode, seed=seed)
        return results[mode, seed]

    yield find
    for result in results.values():
        result.runtime.close()


def completion(text):
    token_ids = tuple(map(ALPHABET.index, text))
    return Completion(
        prompt_index=0,
        sample_index=0,
        prompt_token_ids=(1,),
        token_ids=token_ids,
        logprobs=(-1.0,) * len(token_ids),
        finish_reason="stop",
        weights_version=0,
    )


def test_trainer_state_leaves_the_device_in_full_mode(two_steps):
    samples = two_steps().runtime.trace.samples
    rollouts = [s for s in samples if s.phase is Phase.ROLLOUT and s.segments["engine.kv_cache"]]
    assert rollouts
    assert {sample.segments[TRAINER_OPTIMIZER] for sample in rollouts} == {0}


@pytest.mark.parametrize("mode", list(LEARNING_RATE))
def test_the_seed_makes_a_run_repeatable(run_demo, two_steps, mode):
    assert run_demo(mode=mode, seed=3).rewards == two_steps(mode=mode, seed=3).rewards


def test_seeds_differ(two_steps):
    assert two_steps(seed=3).rewards != two_steps(seed=0).rewards


def test_the_engine_is_that_of_launch_where_none_is_named(monkeypatch):
    asked = []

    class Asked(Exception):
        pass

    def launch(model, *, engine, **options):
        raise Asked(engine)

    monkeypatch.setattr(demo, "default_engine", lambda device: asked.append(device.type) or "torch")
    monkeypatch.setattr(demo, "launch", launch)
    for named in (None, "torch"):
        with pytest.raises(Asked, match="torch"):
            demo.run(steps=1, engine=named, device="cpu")
    assert asked == ["cpu"]


def test_seconds_of_the_phases_and_between_them_are_told(two_steps):
    seconds = two_steps().seconds
    assert set(seconds) == {"rollout", "train", "switch"}
    assert min(seconds.values()) > 0
    assert seconds["switch"] < seconds["rollout"] + seconds["train"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"mode": "half"}, "mode must be one of full, lora, not 'half'"), ({"steps": 0}, "at least 1, but is 0")],
)
def test_bad_arguments_are_refused(run_demo, options, message):
    with pytest.raises(ValueError, match=message):
        run_demo(**options)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_whatever_ends_a_run_closes_its_runtime(run_demo, monkeypatch, error):
    closed = []
    close = demo.Runtime.close

    def record(rt):
        closed.append(rt)
        close(rt)

    def stop(metrics):
        raise error

    monkeypatch.setattr(demo.Runtime, "close", record)
    with pytest.raises(error):
        run_demo(on_step=stop)
    assert len(closed) == 1


def test_an_adapter_without_peft_says_what_to_install(run_demo, monkeypatch):
    monkeypatch.setattr(demo, "warm_up", lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(Unsupported, match=r"--mode lora needs PEFT: pip install 'colo-rl\[lora\]'"):
        run_demo(mode="lora")


def test_the_result_as_plain_data_leaves_the_runtime_out(two_steps):
    result = two_steps()
    data = result.to_json()
    assert "runtime" not in data
    assert (data["steps"], data["rewards"], data["peak_bytes"]) == (2, result.rewards, result.peak_bytes)


@pytest.mark.parametrize(("text", "expected"), [("12;", 1.0), ("12", 0.0), ("21;", 0.0), (";", 0.0), ("112;", 0.0)])
def test_the_reward_is_one_for_the_right_sum_that_has_ended(text, expected):
    assert demo.reward(completion(text), "12") == expected


def test_every_sum_comes_once_before_any_comes_again():
    problems = [problem for batch in demo._batches(4, seed=1) for problem in batch]
    assert len(problems) == 200
    for half in (problems[:100], problems[100:]):
        assert len({problem.prompt for problem in half}) == 100
    for problem in problems:
        a, b = problem.prompt.removesuffix("=").split("+")
        assert problem.answer == str(int(a) + int(b))


def test_the_model_is_warmed_up_to_sample_about_a_fifth_right():
    lines = []
    torch.manual_seed(0)
    model = demo.warm_up(torch.device("cpu"), 0, lines.append)
    ids, labels = demo._all_sums()
    assert 0.2 <= demo._sampled_accuracy(model, ids, labels) < 0.5
    assert len(lines) == 1 and lines[0].startswith("warmed up for ")


def test_the_probability_of_a_right_answer_is_the_product_over_its_tokens():
    class Uniform(torch.nn.Module):
        def forward(self, input_ids):
            logits = torch.zeros(*input_ids.shape, len(ALPHABET))
            return SimpleNamespace(logits=logits)

    ids, labels = demo._all_sums()
    answers = [len(str(a + b)) + 1 for a in range(10) for b in range(10)]
    expected = sum(len(ALPHABET) ** -n for n in answers) / 100
    assert demo._sampled_accuracy(Uniform(), ids, labels) == pytest.approx(expected)
    row = random.Random(0).randrange(100)
    assert (labels[row] >= 0).sum() == answers[row]
