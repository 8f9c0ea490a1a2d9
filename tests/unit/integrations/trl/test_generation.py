from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from colo.engine import Completion
from colo.errors import EngineLost, Unsupported
from colo.integrations.trl.generation import ColoGeneration
from colo.phases.phase import Phase


class Runtime:
    """A runtime that notes what it is asked, and loses its engine as often as it is told."""

    def __init__(self, losses=0):
        self.calls = []
        self.losses = losses

    def enter(self, phase):
        self.calls.append(("enter", phase))

    def recover(self):
        self.calls.append(("recover",))

    def generate(self, prompts, **sampling):
        self.calls.append(("generate", prompts, sampling))
        if self.losses:
            self.losses -= 1
            raise EngineLost("the engine has ended")
        return [
            Completion(
                prompt_index=index,
                sample_index=sample,
                prompt_token_ids=tuple(prompt),
                token_ids=(7, 8),
                logprobs=(-0.5, -0.25),
                finish_reason="length",
                weights_version=0,
            )
            for index, prompt in enumerate(prompts)
            for sample in range(sampling["n"])
        ]


def a_trainer(*, seed=0, rank=0):
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(seed=seed),
        accelerator=SimpleNamespace(process_index=rank),
    )


def make(runtime=None, *, seeded=False, trainer=None, context=16):
    sampling = {"max_tokens": 2, "temperature": 0.9}
    return ColoGeneration(trainer or a_trainer(), runtime or Runtime(), sampling, context=context, seeded=seeded)


def asked(runtime):
    return [call[1:] for call in runtime.calls if call[0] == "generate"]


def test_tokens_and_log_probabilities_come_as_trl_takes_them():
    prompts = [[1, 2], [1, 2]]
    generation = make()
    returned, ids, logprobs, tokens = generation.generate(prompts, None, 2)
    assert returned is prompts
    assert ids == [[7, 8]] * 2
    assert logprobs == [[[-0.5], [-0.25]]] * 2
    assert tokens == [[[7], [8]]] * 2
    assert generation.num_tokens == 4 and generation.seconds > 0
    assert generation.sync_weights() is None
    assert generation.llm.llm_engine.model_config.max_model_len == 16


def test_equal_prompts_of_a_group_are_asked_for_once():
    runtime = Runtime()
    make(runtime).generate([[1], [1], [2], [2]], None, 2)
    assert runtime.calls == [
        ("enter", Phase.ROLLOUT),
        ("generate", [[1], [2]], {"max_tokens": 2, "temperature": 0.9, "n": 2}),
    ]


@pytest.mark.parametrize(
    ("prompts", "num_generations"),
    [([[1], [2], [2], [1]], 2), ([[1], [1], [2]], 2), ([[1], [1], [1]], 2), ([[1], [2]], 1), ([[1], [1]], 0)],
    ids=["mixed", "cut short", "an odd one", "one each", "none"],
)
def test_prompts_in_other_groups_are_asked_for_one_by_one(prompts, num_generations):
    runtime = Runtime()
    _, ids, *_ = make(runtime).generate(prompts, None, num_generations)
    assert asked(runtime)[0][0] == prompts and asked(runtime)[0][1]["n"] == 1
    assert len(ids) == len(prompts)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "prompt 1 of this step has no tokens: remove empty prompts"),
        (list(range(16)), "prompt 1 of this step has 16 tokens and the engine's context 16: shorten or filter prompts"),
    ],
    ids=["empty", "long"],
)
def test_a_prompt_that_cannot_be_completed_is_refused_before_the_engine_is_asked(prompt, words):
    runtime = Runtime()
    with pytest.raises(ValueError, match=words):
        make(runtime).generate([[1], prompt], None, 1)
    assert runtime.calls == []
    make(runtime).generate([[1], list(range(15))], None, 1)


def test_images_are_refused_and_their_absence_is_not():
    generation = make()
    generation.generate([[1], [2]], [None, []], 1)
    with pytest.raises(Unsupported, match="images in a dataset are not supported"):
        generation.generate([[1]], [["an image"]], 1)


def test_a_lost_engine_is_started_again_once_and_asked_again():
    runtime = Runtime(losses=1)
    generation = make(runtime, seeded=True)
    _, ids, *_ = generation.generate([[1]], None, 1)
    assert ids == [[7, 8]]
    assert generation.recoveries == 1
    assert [call[0] for call in runtime.calls] == ["enter", "generate", "enter", "recover", "enter", "generate"]
    assert runtime.calls[2] == ("enter", None)
    assert runtime.calls[1] == runtime.calls[-1]  # with the same seed


def test_an_engine_that_is_lost_again_is_given_up():
    runtime = Runtime(losses=2)
    with pytest.raises(EngineLost):
        make(runtime).generate([[1]], None, 1)
    assert [call[0] for call in runtime.calls].count("recover") == 1


def test_the_profiler_is_around_the_call():
    runtime, within = Runtime(), []

    @contextmanager
    def profiler():
        within.append(len(runtime.calls))
        yield
        within.append(len(runtime.calls))

    make(runtime).generate([[1]], None, 1, profiler())
    assert within == [0, 2]


def seeds(generation, trainer, steps):
    found = []
    for step in steps:
        trainer.state.global_step = step
        generation.generate([[1]], None, 1)
        found.append(asked(generation.runtime)[-1][1].get("seed"))
    return found


def test_seeds_follow_the_run_the_step_the_mode_the_rank_and_the_call():
    trainer = a_trainer()
    first = seeds(make(seeded=True, trainer=trainer), trainer, [0, 0, 1, 2])
    assert len(set(first)) == 4
    assert seeds(make(seeded=True, trainer=trainer), trainer, [1, 2]) == first[2:]  # of a resumed run
    for other in (a_trainer(seed=1), a_trainer(rank=1)):
        assert not {*seeds(make(seeded=True, trainer=other), other, [0, 0, 1, 2])} & {*first}
    trainer.model.training = False
    assert not {*seeds(make(seeded=True, trainer=trainer), trainer, [0, 1])} & {*first}
    assert all(0 <= seed < 2**31 for seed in first)


def test_an_evaluation_in_between_does_not_change_the_seeds_of_training():
    trainer = a_trainer()
    plain = seeds(make(seeded=True, trainer=trainer), trainer, [0, 0])
    generation = make(seeded=True, trainer=trainer)
    first = seeds(generation, trainer, [0])
    trainer.model.training = False
    seeds(generation, trainer, [0, 0])
    trainer.model.training = True
    assert first + seeds(generation, trainer, [0]) == plain


def test_without_seeds_the_engine_draws_its_own():
    trainer = a_trainer()
    assert seeds(make(trainer=trainer), trainer, [0, 1]) == [None, None]
