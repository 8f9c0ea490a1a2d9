"""What is known of Unsloth: which models and engines are its own, and its settings of the environment."""

import os
from types import SimpleNamespace

import pytest

from colo import unsloth
from colo.errors import PhaseError, Unsupported

HIDDEN = "UNSLOTH_RETURN_HIDDEN_STATES"
RANKS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


class LLM:
    """A `vllm.LLM` of Unsloth's, as far as it is looked at."""

    shared_weights = True

    def __init__(self, asleep=False):
        self.asleep = asleep
        self.llm_engine = SimpleNamespace(is_sleeping=lambda: self.asleep)

    def wake_up(self):
        assert self.asleep
        self.asleep = False


@pytest.mark.parametrize("llm", [None, SimpleNamespace(), SimpleNamespace(shared_weights=False)])
def test_a_model_without_an_engine_that_shares_its_weights_is_none_of_unsloths(llm):
    model = SimpleNamespace(vllm_engine=llm)
    assert unsloth.engine_of(model) is None
    unsloth.check_engine(model, "torch", fold=True)


def test_its_engine_may_be_given_itself_or_within_one_of_colos():
    model = SimpleNamespace(vllm_engine=LLM())
    unsloth.check_engine(model, model.vllm_engine)
    unsloth.check_engine(model, SimpleNamespace(llm=model.vllm_engine))
    for other in (LLM(), SimpleNamespace(llm=None), "vllm"):
        with pytest.raises(Unsupported, match="another engine would take them out"):
            unsloth.check_engine(model, other)


def test_one_that_is_asleep_is_refused_for_any_model_until_it_is_woken():
    llm = LLM(asleep=True)
    for model in (SimpleNamespace(vllm_engine=llm), SimpleNamespace()):
        with pytest.raises(PhaseError, match="wake_up"):
            unsloth.check_engine(model, llm)
    unsloth.wake(llm)
    unsloth.check_engine(model, llm)
    unsloth.wake(llm)


@pytest.mark.parametrize("before", [None, "0", "1"])
def test_logits_are_asked_for_and_the_setting_is_as_before(before, monkeypatch):
    monkeypatch.delenv(HIDDEN, raising=False)
    if before is not None:
        monkeypatch.setenv(HIDDEN, before)
    with pytest.raises(ZeroDivisionError):
        with unsloth.returning_logits():
            assert os.environ.get(HIDDEN, "0") == "0"
            raise ZeroDivisionError
    assert os.environ.get(HIDDEN) == before


@pytest.mark.parametrize(
    ("given", "num_processes", "left"),
    [({}, 1, {}), ({"TORCHELASTIC_RUN_ID": "1"}, 1, RANKS), ({}, 2, RANKS)],
    ids=["alone", "by torchrun", "two"],
)
def test_a_process_that_no_launcher_has_started_is_no_rank(given, num_processes, left, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for name, value in {**RANKS, **given}.items():
        monkeypatch.setenv(name, value)
    unsloth.forget_rank(SimpleNamespace(num_processes=num_processes, distributed_type="NO"))
    assert {name: os.environ[name] for name in RANKS if name in os.environ} == left


def test_a_trainer_that_takes_itself_for_a_rank_is_refused(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(Unsupported, match=r"\('RANK', 'LOCAL_RANK', 'WORLD_SIZE'\): os.environ.pop"):
        unsloth.forget_rank(SimpleNamespace(num_processes=1, distributed_type="MULTI_GPU"))
