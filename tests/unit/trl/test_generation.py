from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from colo.engine import Completion
from colo.errors import EngineLost, Unsupported
from colo.phases.phase import Phase
from colo.trl.generation import ColoGeneration


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


def a_trainer(*, seed=0, rank=0, rows=8, eval_rows=8):
    args = {"per_device_train_batch_size": rows, "steps_per_generation": 1, "per_device_eval_batch_size": eval_rows}
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        state=SimpleNamespace(global_step=0),
        args=SimpleNamespace(seed=seed, **args),
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


def seeds(generation, trainer, steps, num_prompts=8, group=4):
    """The seeds of every completion of several steps, which the engine counts up within a prompt's samples."""
    found = []
    for step in steps:
        trainer.state.global_step = step
        generation.generate([[1 + row // group] for row in range(num_prompts)], None, group)
        prompts, sampling = asked(generation.runtime)[-1]
        assert len(sampling["seed"]) == len(prompts)
        found += [seed + sample for seed in sampling["seed"] for sample in range(sampling["n"])]
    return found


@pytest.mark.parametrize("change", [{"seed": 1}, {"rank": 1}, {"rank": 3}], ids=str)
def test_no_two_completions_of_a_run_have_one_seed_and_a_resumed_run_has_the_same(change):
    trainer = a_trainer()
    first = seeds(make(seeded=True, trainer=trainer), trainer, [0, 0, 1, 2])
    assert len(set(first)) == len(first) == 4 * 8
    assert seeds(make(seeded=True, trainer=trainer), trainer, [1, 2]) == first[2 * 8 :]
    other = a_trainer(**change)
    assert not {*seeds(make(seeded=True, trainer=other), other, [0, 0, 1, 2])} & {*first}
    trainer.model.training = False
    assert not {*seeds(make(seeded=True, trainer=trainer), trainer, [0, 1])} & {*first}
    assert all(0 <= seed < 2**63 for seed in first)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 12], ids=str)  # groups of six: whole ones, halves, parts of two
def test_a_completions_seed_is_that_of_its_place_on_however_many_ranks(ranks):
    trainer, each = a_trainer(rows=24), 24 // ranks
    alone = seeds(make(seeded=True, trainer=trainer), trainer, [0, 1], 24, group=6)
    trainers = [a_trainer(rank=rank, rows=each) for rank in range(ranks)]
    generations = [make(seeded=True, trainer=each) for each in trainers]
    together = [
        seed
        for step in (0, 1)
        for generation, of_rank in zip(generations, trainers, strict=True)
        for seed in seeds(generation, of_rank, [step], each, group=6)
    ]
    assert together == alone and len(set(alone)) == 48


@pytest.mark.parametrize("parts", [(5, 5), (7, 3), (1, 8), (3, 3)], ids=str)
def test_parts_of_a_batch_of_whatever_size_draw_apart_on_every_rank(parts):
    trainers = [a_trainer(rank=rank) for rank in range(2)]
    generations = [make(seeded=True, trainer=trainer) for trainer in trainers]
    drawn = []
    for generation, trainer, num_prompts in zip(generations, trainers, parts, strict=True):
        drawn += seeds(generation, trainer, [0]) + seeds(generation, trainer, [0], num_prompts)
    assert len(set(drawn)) == 16 + sum(parts)


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
    runtime = Runtime()
    make(runtime).generate([[1], [2]], None, 1)
    assert "seed" not in asked(runtime)[0][1]


def test_trls_llm_is_not_there_and_the_error_says_what_to_call():
    with pytest.raises(AttributeError, match=r"llm.generate: .*trainer.vllm_generation.generate\(prompts, None"):
        make().llm.generate([[1]])
