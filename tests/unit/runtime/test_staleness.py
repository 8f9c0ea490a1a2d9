"""Invariant 1: what the engine samples from is what the trainer computes with, or it refuses, whatever was changed."""

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.engine import EngineState
from colo.memory.arena import PinnedArena
from colo.phases.phase import Phase
from colo.trainer.master_weights import MasterWeights
from colo.units import MIB
from tests.models import small_qwen3
from tests.runtimes import adamw, make_engine

PROMPT = [1, 2, 3]


def config(*, tied=False):
    return small_qwen3(tie_word_embeddings=tied)


def launch(weights="auto", *, tied=False, **options):
    settings = {k: options.pop(k) for k in ("max_mismatch", "verify", "offload") if k in options}
    settings = colo.RuntimeConfig(kv_cache_bytes=MIB, weights=weights, **settings)
    options = {"optimizer": adamw, "device": "cpu"} | options
    return colo.launch(config(tied=tied), config=settings, **options)


def train_step(model, optimizer, number=0):
    ids = torch.tensor([[number, 2, 3, 4]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def logprob_gap(rt):
    """How far what the engine samples with is from the model as it is now."""
    return _gap(rt, rt.generate([PROMPT], max_tokens=4, temperature=0)[0])


def _gap(rt, found):
    ids = torch.tensor([[*found.prompt_token_ids, *found.token_ids]])
    with torch.no_grad():
        logits = rt.model.eval()(input_ids=ids).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(found.token_ids)[:, None])[:, 0]
    return float((expected - torch.tensor(found.logprobs)).abs().max())


def untie(model):
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))


def add_bias(model):
    model.lm_head.bias = nn.Parameter(torch.randn(100))


def remake(model):
    made = nn.Linear(64, 100, bias=False)
    del model.lm_head
    model.lm_head = made


@pytest.mark.parametrize("breaks", [lambda m: m.to(torch.float64), lambda m: m.half()], ids=["to", "half"])
def test_a_broken_alias_is_noticed_at_the_next_rollout_and_names_the_parameter(rt, breaks):
    breaks(rt.model)
    with pytest.raises(colo.StaleWeights, match=r"model.embed_tokens.weight is no longer the engine's memory"):
        with rt.rollout():
            pytest.fail("the rollout must not begin")
    assert rt.phase is Phase.IDLE
    with pytest.raises(colo.StaleWeights):
        rt.engine.resume()
        rt.engine.generate([[1]], colo.SamplingParams())


def test_a_parameter_given_other_memory_is_told_how_to_be_written_to(rt):
    weight = rt.model.lm_head.weight
    values, shared = torch.randn_like(weight), weight.data
    weight.data = values
    with pytest.raises(colo.StaleWeights, match=r"parameter.data = x.* instead, parameter\.data\.copy_\(x\)"):
        rt.generate([PROMPT])
    weight.data = shared  # had it been written to
    weight.data.copy_(values)
    assert logprob_gap(rt) < 1e-4


def test_one_replaced_parameter_is_enough(rt):
    layer = rt.model.model.layers[1].mlp
    layer.up_proj.weight = torch.nn.Parameter(layer.up_proj.weight.detach().clone())
    with pytest.raises(colo.StaleWeights, match=r"model.layers.1.mlp.up_proj.weight is no longer"):
        rt.generate([[1]])


@pytest.mark.parametrize("weights", ["auto", "copy"])
@pytest.mark.parametrize(
    ("change", "tied", "named"), [(untie, True, "lm_head.weight"), (add_bias, False, "lm_head.bias")]
)
def test_weights_that_appear_after_the_start_are_refused_by_name(weights, change, tied, named):
    with launch(weights, tied=tied) as rt:
        assert logprob_gap(rt) < 1e-4
        change(rt.model)
        for _ in range(2):
            with pytest.raises(colo.StaleWeights, match=f"1 weights that it did not have .* {named}"):
                rt.generate([PROMPT], max_tokens=2)
        with rt.train():
            pass


@pytest.mark.parametrize("weights", ["auto", "copy"])
def test_weights_that_appear_within_a_rollout_are_refused_too(weights):
    with launch(weights, tied=True) as rt, rt.rollout():
        logprob_gap(rt)
        untie(rt.model)
        with pytest.raises(colo.StaleWeights, match="lm_head.weight"):
            rt.generate([PROMPT], max_tokens=2)


def test_weights_that_are_gone_are_refused_by_name():
    with launch("copy") as rt:
        rt.model.lm_head.weight = rt.model.model.embed_tokens.weight  # tied now, and the engine is not
        with pytest.raises((colo.StaleWeights, colo.TransferError), match=r"lm_head\.weight"):
            rt.generate([PROMPT], max_tokens=2)


def test_a_module_made_anew_is_noticed_even_where_it_passes_for_the_old_one():
    with launch("copy") as rt:
        logprob_gap(rt)
        remake(rt.model)
        assert logprob_gap(rt) < 1e-4
    with launch() as rt:
        logprob_gap(rt)
        remake(rt.model)
        with pytest.raises(colo.StaleWeights, match=r"lm_head\.weight is no longer the engine's memory"):
            rt.generate([PROMPT], max_tokens=2)


def write_data(model):
    model.lm_head.weight.data.mul_(3)


def write_counted(model):
    with torch.no_grad():
        model.lm_head.weight.mul_(3)


def replace_with_equal_version(model):
    old = model.lm_head.weight
    made = nn.Parameter(old.detach() * 3)
    with torch.no_grad():
        while made._version < old._version:
            made.mul_(1)
    assert made._version == old._version
    model.lm_head.weight = made


@pytest.mark.parametrize("weights", ["auto", "copy"])
@pytest.mark.parametrize("change", [write_data, write_counted])
@pytest.mark.parametrize("whose", ["runtime", "engine"])
def test_a_write_within_a_rollout_reaches_the_next_call_under_a_version_of_its_own(weights, change, whose):
    with launch(weights) as rt, rt.rollout():
        params = rt.engine.sampling_params(max_tokens=4, temperature=0)
        generate = rt.generate if whose == "runtime" else rt.engine.generate
        first = generate([PROMPT], params)[0]
        assert generate([PROMPT], params)[0].weights_version == first.weights_version
        change(rt.model)
        second = generate([PROMPT], params)[0]
        assert _gap(rt, second) < 1e-4 < _gap(rt, first)
        assert second.weights_version == rt.weights_version == first.weights_version + 1


def test_a_parameter_replaced_within_a_rollout_by_one_written_to_as_often_reaches_the_engine():
    with launch("copy") as rt, rt.rollout():
        logprob_gap(rt)
        replace_with_equal_version(rt.model)
        assert logprob_gap(rt) < 1e-4


@pytest.mark.parametrize("weights", ["auto", "copy"])
def test_a_write_through_data_between_rollouts_is_a_version_of_its_own(weights):
    with launch(weights) as rt:
        first = rt.generate([PROMPT], max_tokens=2)[0]
        write_data(rt.model)
        second = rt.generate([PROMPT], max_tokens=2)[0]
        assert second.weights_version == first.weights_version + 1
        assert rt.generate([PROMPT], max_tokens=2)[0].weights_version == second.weights_version


@pytest.mark.parametrize("change", ["data", "scaling"])
def test_a_change_of_the_adapter_within_a_rollout_reaches_the_next_call(change):
    with launch(lora=LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)) as rt, rt.rollout():
        assert logprob_gap(rt) < 1e-4
        layer = rt.model.base_model.model.model.layers[0].self_attn.q_proj
        if change == "data":
            layer.lora_B["default"].weight.data.mul_(50)
        else:
            layer.set_scale("default", 50)
        assert logprob_gap(rt) < 1e-4


def share(weights, optimizer, *, dtype=torch.bfloat16):
    model = AutoModelForCausalLM.from_config(config(), dtype=dtype)
    engine = make_engine(dtype, config())
    settings = colo.RuntimeConfig(weights=weights, offload="always")
    return colo.share(engine, model, optimizer(model.parameters()), config=settings)


@pytest.mark.parametrize("weights", ["auto", "copy"])
@pytest.mark.parametrize("kind", ["launch", "share"])
def test_writes_through_data_between_steps_are_trained_on_from_masters(weights, kind):
    make = MasterWeights(lambda ps: AdamW(ps, lr=1e-3))
    rt = share(weights, make) if kind == "share" else launch(weights, optimizer=make, dtype=torch.bfloat16)
    for number in range(3):
        with rt.train():
            train_step(rt.model, rt.optimizer, number)
        for p in rt.model.parameters():
            p.data.mul_(2)
        written = [p.detach().clone() for p in rt.model.parameters()]
        rt.generate([PROMPT], max_tokens=2)
        for group in rt.optimizer.param_groups:
            group["lr"] = 0.0
        with rt.train():
            train_step(rt.model, rt.optimizer, number)
        assert all(torch.equal(p, w) for p, w in zip(rt.model.parameters(), written, strict=True))
        for group in rt.optimizer.param_groups:
            group["lr"] = 1e-3
    rt.close()


def test_an_engine_that_computes_something_else_is_refused_where_the_rollout_is_trained_on():
    with launch("copy", verify=False) as rt:
        with rt.rollout():
            for parameter in rt.engine.weights.parameters.values():
                parameter.mul_(-8)
            rt.generate([PROMPT, [4, 5]], max_tokens=16)
        with pytest.raises(
            colo.StaleWeights, match=r"differ from the trainer's by [0-9.]+ .* max_mismatch allows 0\.5"
        ):
            rt.train().__enter__()
        assert rt.trace.metrics["mismatch_sampled"][-1] > 0.5
        assert rt.phase == "idle"
        assert rt.engine.weights_version is None
        assert logprob_gap(rt) < 1e-4, "the next rollout sends the weights again"


def test_a_mismatch_is_judged_at_temperature_one_and_may_be_accepted():
    for accepted in (None, 100.0):
        with launch("copy", verify=False, max_mismatch=accepted) as rt:
            with rt.rollout():
                for parameter in rt.engine.weights.parameters.values():
                    parameter.mul_(-8)
                rt.generate([PROMPT], max_tokens=8)
            with rt.train():
                train_step(rt.model, rt.optimizer)
    with launch("copy", verify=False, max_mismatch=0.001) as rt:
        rt.generate([PROMPT], max_tokens=16, temperature=0.01)
        with rt.train():  # rounding, a hundred times as large at this temperature
            assert rt.trace.metrics["mismatch_sampled"][-1] < 0.1


def mismatch(limit):
    """What is measured at temperature 2 for an engine that computes something else."""
    torch.manual_seed(0)
    with launch("copy", verify=False, max_mismatch=limit) as rt:
        with rt.rollout():
            for parameter in rt.engine.weights.parameters.values():
                parameter.mul_(-8)
            rt.generate([PROMPT], max_tokens=8, temperature=2.0, seed=1)
        with rt.train():
            return rt.trace.metrics["mismatch_sampled"][-1]


def test_a_mismatch_at_a_higher_temperature_is_judged_as_it_is():
    found = mismatch(None)
    assert mismatch(found * 1.5) == found
    with pytest.raises(colo.StaleWeights, match="at temperature 2, and max_mismatch allows"):
        mismatch(found * 0.9)


def test_a_limit_of_the_mismatch_is_positive():
    with pytest.raises(ValueError, match="max_mismatch must be positive or None, not 0"):
        colo.RuntimeConfig(max_mismatch=0)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupted_change_of_adapters_is_made_by_the_next_rollout(moment):
    rt = launch(lora=LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    with rt.train():
        train_step(rt.model, rt.optimizer)
    replace = rt.engine.replace_adapter

    def interrupted(*args):
        if moment == "after":
            replace(*args)
        raise KeyboardInterrupt

    rt.engine.replace_adapter = interrupted
    with pytest.raises(KeyboardInterrupt):
        rt.generate([PROMPT], max_tokens=1)
    rt.engine.replace_adapter = replace
    assert logprob_gap(rt) < 1e-4
    rt.close()


def test_a_host_without_room_as_train_ends_does_not_take_the_step_back(monkeypatch):
    def full(self, num_bytes, max_slab_bytes):
        raise colo.BudgetError("the host is full", needed_bytes=num_bytes, free_bytes=0)

    rt = launch(offload="always")
    monkeypatch.setattr(PinnedArena, "_grow", full)
    with rt.train():
        train_step(rt.model, rt.optimizer)
    assert rt.weights_version == 1
    with pytest.raises(colo.BudgetError, match="the host is full"):
        rt.rollout().__enter__()
    monkeypatch.undo()
    assert logprob_gap(rt) < 1e-4
    assert rt.engine.state is not EngineState.CLOSED
    rt.close()
