import asyncio
import functools
import inspect
from types import SimpleNamespace

import pytest
import torch

from colo.integrations.trl.rewards import check_columns, checked
from colo.trl import ColoGRPOConfig, ColoGRPOTrainer
from tests.trainers import options, sums

TRAINER = SimpleNamespace(state=SimpleNamespace(global_step=3))
GOOD = [[1.0, 0.0], [1, True], [None, 0.5], [None, None], (0.1, 0.2), torch.ones(2), [torch.tensor(1.0), 0]]


def run(returned, **options):
    def mine(prompts, completions, **_):
        return returned

    return checked(mine, "mine", TRAINER)(prompts=["a", "b"], completions=["c", "d"], **options)


@pytest.mark.parametrize("returned", GOOD, ids=str)
def test_what_trl_takes_is_handed_on_as_it_is(returned):
    assert run(returned, answer=["e", "f"]) is returned


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        ([1.0], ValueError, "returned 1 values for 2 completions"),
        (["1", 1.0], TypeError, "returned '1' for completion 0"),
        ([1.0, float("nan")], ValueError, "returned nan for completion 1"),
        ([-float("inf"), 1.0], ValueError, "returned -inf for completion 0"),
        ("ab", TypeError, "returned 'ab'"),
        (None, TypeError, "returned None"),
        (1.0, TypeError, r"returned 1\.0"),
        ({0: 1.0, 1: 1.0}, TypeError, "returned a dict"),
        ([[1.0], [1.0]], TypeError, "returned a list for completion 0"),
        ([1j, 1.0], TypeError, "returned a complex for completion 0"),
    ],
    ids=str,
)
def test_anything_else_is_refused_with_the_reward_and_the_step(returned, error, words):
    with pytest.raises(error, match=f"reward 'mine' at step 3 {words}"):
        run(returned)


def test_names_stay_and_a_reward_model_passes_through():
    def mine(completions, **_):
        """Says something."""
        return [1.0]

    class Callable:
        def __call__(self, completions, **_):
            return ["no"]

    assert (checked(mine, "mine", TRAINER).__name__, checked(mine, "mine", TRAINER).__doc__) == ("mine", mine.__doc__)
    model = torch.nn.Linear(1, 1)
    assert checked(model, "other", TRAINER) is model
    for reward in (Callable(), functools.partial(Callable())):
        with pytest.raises(TypeError, match="returned 'no' for completion 0"):
            checked(reward, "other", TRAINER)(completions=["a"])


def test_what_an_asynchronous_reward_returns_is_checked_too():
    async def mine(completions, **_):
        return returned[0]

    class Judge:
        async def __call__(self, completions, **_):
            return returned[0]

    for reward in (mine, Judge()):
        call = checked(reward, "mine", TRAINER)
        assert inspect.iscoroutinefunction(call)
        returned = [[1.0, None]]
        assert asyncio.run(call(completions=["c", "d"])) is returned[0]
        returned = [[1.0, float("nan")]]
        with pytest.raises(ValueError, match="reward 'mine' at step 3 returned nan for completion 1"):
            asyncio.run(call(completions=["c", "d"]))


def answered(completions, answer, trainer_state, **_):
    return [0.0] * len(completions)


def test_columns_that_are_there_are_enough():
    check_columns([answered, len, torch.nn.Linear(1, 1), "a/model"], sums())
    check_columns([answered], sums().to_iterable_dataset().map(lambda row: row))  # whose columns are not known
    check_columns([answered], None)


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (
            sums().remove_columns("answer"),
            r"reward 'answered' takes answer, and the dataset has prompt: add the column",
        ),
        (sums().rename_column("prompt", "question"), r"the dataset has question, answer, and no 'prompt': rename"),
    ],
    ids=["a reward's", "the prompt"],
)
def test_a_column_that_is_missing_is_named(dataset, words):
    with pytest.raises(ValueError, match=words):
        check_columns([answered], dataset)


def test_a_column_that_an_evaluation_would_miss_is_named():
    lacking = sums().remove_columns("answer")
    check_columns([answered], sums(), {"one": sums(), "other": sums().to_iterable_dataset().map(lambda row: row)})
    with pytest.raises(ValueError, match="takes answer, and eval_dataset has prompt: add the column"):
        check_columns([answered], sums(), lacking)
    with pytest.raises(ValueError, match="takes answer, and eval_dataset other has prompt: add the column"):
        check_columns([answered], sums(), {"one": sums(), "other": lacking})


def test_a_missing_column_is_named_before_a_model_is_loaded(tmp_path):
    args = ColoGRPOConfig(**options(tmp_path), fast_inference=True, colo_engine="torch")
    with pytest.raises(ValueError, match="takes answer, and the dataset has prompt"):
        ColoGRPOTrainer("no/such-model", answered, args, train_dataset=sums().remove_columns("answer"))
