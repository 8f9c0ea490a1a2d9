"""One engine for all ranks of a trainer: who samples what, and failing together."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import colo
from colo.engine import EngineState, SamplingParams
from colo.engines.fleet import Fleet
from colo.engines.main_rank import MainRankEngine
from colo.errors import BudgetError, ColoError, PhaseError
from colo.phases.phase import Phase
from tests.runtimes import PROMPTS, adamw, make_engine, qwen3, train_step
from tests.unit.engines.test_fleet import Tepid
from tests.unit.runtime.test_carried import recomputed

GREEDY = {"max_tokens": 6, "temperature": 0}


def failure(call):
    try:
        call()
    except (ColoError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch):
    """A rank that waits for ever fails its test."""
    make = MainRankEngine.__init__
    monkeypatch.setattr(MainRankEngine, "__init__", lambda self, engine: make(self, engine, deadline_s=20.0))


def shared(rank, *, sharded=True, engine=None):
    """A runtime of this rank, and a whole copy of its model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(qwen3())
    twin = copy.deepcopy(model)
    if sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    engine = MainRankEngine((engine or make_engine)() if rank == 0 else None)
    return colo.share(engine, model, adamw(model.parameters())), twin


@pytest.mark.parametrize("sharded", [True, False])
def test_every_rank_gets_its_own_completions_from_the_present_weights(both, sharded):
    def of_rank(rank):
        rt, twin = shared(rank, sharded=sharded)
        optimizer, gaps = adamw(twin.parameters()), []
        for step in range(3):
            mine = [[*prompt, 10 + rank, step] for prompt in PROMPTS[rank:]]
            found = rt.generate(mine, **GREEDY)
            assert [(c.prompt_index, c.prompt_token_ids) for c in found] == list(enumerate(map(tuple, mine)))
            assert {c.weights_version for c in found} == {step}
            for c in found:
                gap = recomputed(twin, c, step) - torch.tensor(c.logprobs)
                gaps.append(float(gap.abs().max()))
            with rt.train():
                train_step(rt)
            ids = torch.tensor([[1, 2, 3, 4]])
            twin(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        placement, kept = rt.engine.placement, [s.size_bytes for s in rt.engine.segments]
        rt.close()
        assert rt.engine.state is EngineState.CLOSED
        return max(gaps), placement, kept

    (gap, placement, kept), (other, same, nothing) = both(of_rank)
    assert max(gap, other) < 1e-4
    assert placement == same and placement.startswith("of rank 0: ")
    assert min(kept) > 0 and nothing == [0, 0]


def test_seeds_draw_what_they_draw_alone_and_a_rank_without_prompts_calls_too(both):
    def of_rank(rank):
        rt, _ = shared(rank)
        drawn = [rt.generate(PROMPTS[: 3 * (1 - rank)], max_tokens=8, n=2, seed=5)]
        drawn.append(rt.generate(PROMPTS, max_tokens=8, seed=[rank, 1, 2]))
        drawn.append(rt.generate(PROMPTS, max_tokens=8 + rank, seed=5))  # two calls of the engine
        rt.close()
        return [[c.token_ids for c in found] for found in drawn]

    first, second = both(of_rank)
    assert second[0] == [] and len(first[0]) == 6
    assert first[1][0] != second[1][0] and first[1][1:] == second[1][1:]
    assert [len(tokens) for tokens in (first[2][0], second[2][0])] == [8, 9]
    alone = make_engine()
    torch.manual_seed(0)
    alone.load_weights(AutoModelForCausalLM.from_config(qwen3()).named_parameters())
    alone.commit(0)
    fleet = Fleet([alone])
    fleet._members[0].why_out = None
    fleet.commit(0)
    found = fleet.generate(PROMPTS, SamplingParams(max_tokens=8, n=2, seed=5))
    assert first[0] == [c.token_ids for c in found]


def test_log_probabilities_are_compared_at_the_temperature_that_the_engine_samples_at(both):
    def of_rank(rank):
        rt, _ = shared(rank, engine=Tepid.made)
        gaps = []
        for temperature in (0.1, 1.0 + rank):
            rt.generate(PROMPTS, max_tokens=4, temperature=temperature)
            with rt.train():
                gaps.append(rt.trace.metrics["mismatch_sampled"][-1])
        rt.close()
        return gaps

    for cold, warm in both(of_rank):
        assert max(cold, warm) < 1e-5


def test_what_fails_on_the_first_rank_fails_on_all_and_the_next_call_goes_on(both):
    def of_rank(rank):
        rt, _ = shared(rank)
        told = []
        for verb in ("generate", "resume", "reset_prefix_cache", "load_weights"):
            if rank == 0:
                engine = rt.engine.engine

                def fail(*_, engine=engine, verb=verb, **named):
                    delattr(engine, verb)
                    raise RuntimeError(f"no {verb}")

                setattr(engine, verb, fail)
            with rt.train():
                train_step(rt)
            told.append(failure(lambda: rt.generate(PROMPTS, **GREEDY)))
            assert len(rt.generate(PROMPTS, **GREEDY)) == 3
        told.append(failure(lambda: rt.generate([[]] if rank else PROMPTS, **GREEDY)))
        told.append(failure(lambda: rt.generate(PROMPTS, until=0.5)))
        told.append(failure(rt.async_rollout))
        assert len(rt.generate(PROMPTS, **GREEDY)) == 3
        rt.close()
        return told

    first, second = both(of_rank)
    verbs = ("generate", "resume", "reset_prefix_cache", "load_weights")
    assert first[:4] == [f"RuntimeError: no {verb}" for verb in verbs]
    for words, verb in zip(second, verbs, strict=False):
        assert words.startswith("TransferError: ") and f"RuntimeError: no {verb}" in words
    assert all("is empty" in words for words in (first[4], second[4]))
    assert all("with a MainRankEngine all ranks sample in the same calls" in words for words in first[5:] + second[5:])


def test_a_lost_engine_is_lost_to_all_and_recovered_by_all(both):
    class Mortal(type(make_engine())):
        died = False

        def recover(self):
            if self.state is not EngineState.LOST:
                raise PhaseError("the engine is not lost: nothing to recover")
            self._status.revive()

        def generate(self, *given, **named):
            if not Mortal.died:
                Mortal.died = True
                raise self._status.lose("its process has ended")
            return super().generate(*given, **named)

    def engine():
        made = make_engine()
        made.__class__ = Mortal
        return made

    def of_rank(rank):
        rt, _ = shared(rank, engine=engine)
        told = [failure(lambda: rt.generate(PROMPTS, **GREEDY)), rt.engine.weights_version]
        told.append(failure(lambda: rt.generate(PROMPTS, **GREEDY)))
        rt.recover()
        found = rt.generate(PROMPTS, **GREEDY)
        told += [len(found), failure(rt.recover)]
        rt.close()
        return told

    first, second = both(of_rank)
    assert first[0].startswith("EngineLost") and second[0].startswith(
        "TransferError: sampling failed on rank 0: Engine"
    )
    assert first[1] is None
    assert all("EngineLost" in words for words in (first[2], second[2]))
    assert first[3] == second[3] == 3
    assert "the engine is not lost: nothing to recover" in first[4] and "nothing to recover" in second[4]


@pytest.mark.parametrize("sharded", [True, False])
def test_a_rank_that_cannot_enter_a_phase_keeps_no_other_waiting(both, sharded):
    """Such as the first one, which alone has a KV cache to find room for."""

    def of_rank(rank):
        rt, _ = shared(rank, sharded=sharded)
        enter, told = rt.scheduler.enter, []

        def fail(phase):
            if phase is Phase.ROLLOUT:
                rt.scheduler.enter = enter
                raise BudgetError("no room", needed_bytes=2, free_bytes=1)
            return enter(phase)

        for failing in (0, 1):
            if rank == failing:
                rt.scheduler.enter = fail
            told.append(failure(lambda: rt.generate(PROMPTS, **GREEDY)))
            assert len(rt.generate(PROMPTS, **GREEDY)) == 3
        if rank == 0:
            rt.engine.engine.poison("another engine has joined the fleet")
        assert len(rt.generate(PROMPTS, **GREEDY)) == 3
        rt.close()
        return told

    first, second = both(of_rank)
    assert first[0].startswith("BudgetError") and second[1].startswith("BudgetError")
    assert all("entering a rollout failed on rank" in words for words in (first[1], second[0]))


def test_it_takes_one_engine_of_the_first_rank(both):
    def of_rank(rank):
        return [failure(lambda given=given: MainRankEngine(given)) for given in (None, make_engine())]

    for none, several in both(of_rank):
        assert "engines were given on ranks []" in none and "ranks [0, 1]: a MainRankEngine has that of" in several
    with pytest.raises(ValueError, match="call torch.distributed.init_process_group first"):
        MainRankEngine(make_engine())
