from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from colo.engine import AdapterWeights, Completion, Engine, EngineState, SamplingParams, SleepLevel
from colo.engines import caches as kv_cache
from colo.engines.sampling import processed_logprobs
from colo.engines.torch import TorchEngine
from colo.errors import BudgetError, PhaseError, StaleWeights, TransferError, Unsupported
from colo.memory.offload import Mover
from colo.phases.phase import Residency
from colo.testing import check_engine
from tests.models import SMALL

CPU = torch.device("cpu")
VOCAB = 100
SIZES = SMALL | {"intermediate_size": 96, "pad_token_id": None, "bos_token_id": None}
QWEN3 = Qwen3Config(**SIZES, tie_word_embeddings=True)
CONFIGS = {
    "qwen3-tied": QWEN3,
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "mistral-sliding": MistralConfig(**SIZES, sliding_window=5, tie_word_embeddings=False),
    "qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
}
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11], [8], [12, 13, 14, 15]]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
KV_BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4

MakeEngine = Callable[..., TorchEngine]


def make_reference(config: PretrainedConfig, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2)
            if "norm" in name:
                parameter.add_(1)
    return model


@pytest.fixture
def make_engine(mover: Mover) -> Iterator[MakeEngine]:
    """Makes engines that hold the reference's weights as version 1, with room for 400 tokens, and closes them."""
    engines: list[TorchEngine] = []

    def make(config=QWEN3, *, tokens=400, weights=True, attn_implementation=None) -> TorchEngine:
        engine = TorchEngine(
            config,
            device=CPU,
            dtype=torch.float32,
            kv_cache_bytes=tokens * KV_BYTES_PER_TOKEN,
            mover=mover,
            attn_implementation=attn_implementation,
        )
        engines.append(engine)
        if weights:
            engine.load_weights(make_reference(config).state_dict().items())
            engine.commit(1)
        return engine

    yield make
    for engine in engines:
        engine.close()


def logits_after(model: nn.Module, completion: Completion) -> torch.Tensor:
    """What `model` says at every generated position, [tokens, vocab], without cache or padding."""
    token_ids = [*completion.prompt_token_ids, *completion.token_ids]
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits[len(completion.prompt_token_ids) - 1 : -1]


def assert_sampled_from(model: nn.Module, completion: Completion, params: SamplingParams, *, atol: float = 1e-4):
    logprobs = processed_logprobs(logits_after(model, completion), params)
    expected = logprobs.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=atol)


def drawn(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


# ---- generating -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("attn_implementation", [None, "eager"])
def test_greedy_tokens_and_logprobs_are_those_of_a_model_made_by_transformers(make_engine, config, attn_implementation):
    engine, reference = make_engine(config, attn_implementation=attn_implementation), make_reference(config)
    completions = engine.generate(PROMPTS, GREEDY)
    assert [c.prompt_token_ids for c in completions] == [tuple(prompt) for prompt in PROMPTS]
    for completion in completions:
        assert torch.equal(logits_after(reference, completion).argmax(-1), torch.tensor(completion.token_ids))
        assert_sampled_from(reference, completion, GREEDY)
        assert (completion.finish_reason, completion.weights_version, completion.adapter) == ("length", 1, None)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        engine.reset_prefix_cache()
        (alone,) = engine.generate([prompt], GREEDY)
        assert alone.token_ids == completion.token_ids
        assert alone.logprobs == pytest.approx(completion.logprobs, abs=1e-4)


def test_samples_come_in_prompt_order_then_sample_order_with_the_logprobs_of_what_was_drawn(make_engine):
    params = SamplingParams(n=3, max_tokens=6, seed=1, temperature=0.8, top_k=40, top_p=0.95)
    completions = make_engine().generate(PROMPTS, params)
    assert [(c.prompt_index, c.sample_index) for c in completions] == [(p, s) for p in range(5) for s in range(3)]
    assert len(set(drawn(completions))) == 15
    for completion in completions:
        assert_sampled_from(make_reference(QWEN3), completion, params)


@pytest.mark.parametrize("tokens", [400, 100, 45, 15])
def test_seeded_completions_depend_neither_on_waves_nor_on_the_batch(make_engine, tokens):
    params = SamplingParams(n=4, max_tokens=8, seed=7)
    expected = make_engine(tokens=4000).generate(PROMPTS, params)
    completions = make_engine(tokens=tokens).generate(PROMPTS, params)
    assert drawn(completions) == drawn(expected)
    first = make_engine().generate(PROMPTS[:1], SamplingParams(n=1, max_tokens=3, seed=7))
    assert first[0].token_ids == expected[0].token_ids[:3]


def test_rows_that_have_stopped_do_not_disturb_the_others(make_engine):
    engine, params = make_engine(tokens=4000), SamplingParams(n=20, max_tokens=30, seed=3)
    stop = tuple(range(0, VOCAB, 8))
    unstopped = engine.generate(PROMPTS, params)
    stopped = engine.generate(PROMPTS, SamplingParams(n=20, max_tokens=30, seed=3, stop_token_ids=stop))
    assert {c.finish_reason for c in stopped} == {"stop", "length"}
    for short, long in zip(stopped, unstopped, strict=True):
        ends = [i for i, token in enumerate(long.token_ids) if token in stop]
        assert short.token_ids == long.token_ids[: ends[0] + 1 if ends else 30]
        assert short.logprobs == pytest.approx(long.logprobs[: len(short.token_ids)], abs=1e-4)
        assert short.finish_reason == ("stop" if ends else "length")


def test_end_of_sequence_tokens_come_from_the_config_and_the_generation_config(make_engine):
    tokens = make_engine().generate([[1]], SamplingParams(temperature=0, max_tokens=6))[0].token_ids
    assert len(set(tokens)) >= 4, "the test needs a continuation without early repeats"
    config = copy.deepcopy(QWEN3)
    config.eos_token_id = [tokens[2], 99]
    engine = make_engine(config)
    params = SamplingParams(temperature=0, max_tokens=6)
    (completion,) = engine.generate([[1]], params)
    assert (completion.token_ids, completion.finish_reason) == (tokens[:3], "stop")
    engine.module.generation_config.eos_token_id = tokens[1]
    assert engine.generate([[1]], params)[0].token_ids == tokens[:2]
    engine.module.generation_config.eos_token_id = None
    assert engine.generate([[1]], params)[0].token_ids == tokens[:3]
    ignored = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop_token_ids=(tokens[3],))
    assert engine.generate([[1]], ignored)[0].token_ids == tokens[:4]


def test_rows_that_pad_the_vocabulary_are_never_sampled(make_engine):
    engine = make_engine(CONFIGS["llama"])
    engine.weights.parameters["lm_head.weight"][VOCAB:] = 1e4
    params = SamplingParams(n=16, max_tokens=8, temperature=100.0, seed=0)
    tokens = {token for completion in engine.generate(PROMPTS, params) for token in completion.token_ids}
    assert 60 < len(tokens) <= VOCAB
    assert max(tokens) < VOCAB


def test_prompts_are_prefilled_once_and_in_bounded_batches(make_engine, monkeypatch):
    engine, shapes = make_engine(), []
    engine.module.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    expected = engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=3, temperature=0))
    assert shapes == [(4, 7), (10, 1), (10, 1)]
    engine.reset_prefix_cache()
    shapes.clear()
    monkeypatch.setattr(kv_cache, "PREFILL_TOKENS", 21)
    assert drawn(engine.generate(PROMPTS, SamplingParams(n=2, max_tokens=3, temperature=0))) == drawn(expected)
    assert shapes == [(3, 7), (1, 7), (10, 1), (10, 1)]


def test_generating_allocates_no_kv_cache(make_engine):
    engine = make_engine()
    engine._kv_segment.regions[0].bytes.zero_()
    engine.generate([[1, 2, 3]], SamplingParams(n=2, max_tokens=4))
    used = engine._kv_segment.regions[0].bytes.view(-1, 64).any(-1).sum().item() * 64
    assert used == (3 + 2 * (3 + 4 - 1)) * engine.kv_bytes_per_token  # the last token's states are never needed


def test_calls_that_cannot_work_are_refused_before_anything_is_generated(make_engine):
    engine = make_engine(tokens=20)
    calls = []
    engine.module.register_forward_pre_hook(lambda module, args: calls.append(1))
    with pytest.raises(BudgetError, match="prompt of 7 tokens and max_tokens=14 need") as caught:
        engine.generate(PROMPTS, SamplingParams(max_tokens=14))
    assert caught.value.needed_bytes == 21 * KV_BYTES_PER_TOKEN
    assert caught.value.free_bytes == 20 * KV_BYTES_PER_TOKEN
    for prompts, message in (([[1], []], "prompt 1 is empty"), ([[1, 100]], "token id 100"), ([[-1]], "token id -1")):
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts, GREEDY)
    with pytest.raises(ValueError, match="no adapter 'x'"):
        engine.generate([[1]], GREEDY, adapter="x")
    assert engine.generate([], GREEDY) == []
    assert calls == []


def test_sampling_that_it_does_not_have_is_refused_by_name(make_engine):
    engine = make_engine()
    with pytest.raises(ValueError, match=r"does not take detokenize, stop, but n, max_tokens, .*: leave it out"):
        engine.sampling_params(stop=["x"], detokenize=False)
    for params in (None, SamplingParams()):
        with pytest.raises(ValueError, match="max_tokens cannot be None: give a value, or leave it out for 16"):
            engine.sampling_params(params, max_tokens=None)
    with pytest.raises(TypeError, match=r"one colo.SamplingParams for all prompts, or options by name, not a list"):
        engine.sampling_params([SamplingParams()])
    assert engine.sampling_params(SamplingParams(n=2), seed=None) == SamplingParams(n=2)


def test_sampling_options_that_change_nothing_are_taken(make_engine):
    engine = make_engine()
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0, "min_tokens": 0, "stop": [], "logit_bias": None}
    neutral |= {
        "guided": None,
        "structured_outputs": None,
        "skip_special_tokens": True,
        "logprobs": 0,
        "detokenize": None,
    }
    assert engine.sampling_params(**neutral, min_p=0.0, top_k=-1, n=2) == SamplingParams(n=2)
    assert engine.sampling_params(SamplingParams(top_k=3), top_k=-1).top_k == 0
    for name, value in (("repetition_penalty", 1.1), ("stop", ["x"]), ("logit_bias", {1: 2.0}), ("guided", "json")):
        with pytest.raises(ValueError, match=f"the embedded engine does not take {name}, but n, .*use vLLM"):
            engine.sampling_params(**neutral | {name: value})
    with pytest.raises(
        ValueError, match="the embedded engine does not take temprature, but n, max_tokens, temperature"
    ):
        engine.sampling_params(temprature=1.0)
    with pytest.raises(ValueError, match="top_k must be 0 .all. or positive, but is -2"):
        engine.sampling_params(top_k=-2)


def test_what_a_trainer_writes_is_what_the_next_call_computes_with(make_engine):
    engine, trainer = make_engine(), make_reference(QWEN3, seed=5)
    engine.share_weights()
    with torch.no_grad():
        for name, parameter in trainer.named_parameters():
            view = engine.weights.hf_views()[name]
            parameter.data = view.copy_(parameter)
    loss = trainer(torch.tensor([PROMPTS[0]]), labels=torch.tensor([PROMPTS[0]])).loss
    loss.backward()
    torch.optim.SGD(trainer.parameters(), lr=0.1).step()
    engine.commit(2)
    engine.reset_prefix_cache()
    for completion in engine.generate(PROMPTS, GREEDY):
        assert completion.weights_version == 2
        assert_sampled_from(trainer, completion, GREEDY)


def test_memory_made_in_inference_mode_can_still_be_trained_on(make_engine):
    with torch.inference_mode():
        engine = make_engine(weights=False)
    weight = nn.Parameter(engine.weights.hf_views()["model.norm.weight"])
    (weight.detach().clone().requires_grad_() * weight).sum().backward()
    assert weight.grad is not None


# ---- prefix cache ---------------------------------------------------------------------------------------------------


def test_a_repeated_prompt_is_answered_from_old_weights_until_the_prefix_cache_is_reset(make_engine):
    engine, params = make_engine(), SamplingParams(temperature=0, max_tokens=1)
    before = engine.generate(PROMPTS, params)
    engine.load_weights(make_reference(QWEN3, seed=9).state_dict().items())
    engine.commit(2)
    stale = engine.generate(PROMPTS, SamplingParams(n=2, temperature=0, max_tokens=1))
    assert [c.logprobs for c in stale[::2]] == [c.logprobs for c in before]
    engine.reset_prefix_cache()
    fresh = engine.generate(PROMPTS, params)
    assert drawn(fresh) != drawn(before)
    for completion in fresh:
        assert_sampled_from(make_reference(QWEN3, seed=9), completion, params)


def test_a_hit_continues_as_a_fresh_call_would(make_engine):
    engine = make_engine()
    engine.generate(PROMPTS, SamplingParams(n=1, max_tokens=2))
    hit = engine.generate(PROMPTS, GREEDY)
    engine.reset_prefix_cache()
    assert drawn(engine.generate(PROMPTS, GREEDY)) == drawn(hit)


def test_the_prefix_cache_does_not_outlive_the_kv_cache_whoever_moves_it(make_engine):
    engine, params = make_engine(), SamplingParams(temperature=0, max_tokens=4)
    expected = drawn(engine.generate(PROMPTS, params))
    kv_cache = engine.segments[1]
    kv_cache.begin(Residency.DISCARDED).wait()
    kv_cache.begin(Residency.RESIDENT).wait()
    engine._kv_segment.regions[0].bytes.fill_(0x7F)
    engine.resume()
    assert drawn(engine.generate(PROMPTS, params)) == expected


# ---- adapters -------------------------------------------------------------------------------------------------------

KEY_PROJECTION = "model.layers.1.self_attn.k_proj"


def make_adapter(seed: int, module: str = KEY_PROJECTION) -> AdapterWeights:
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(4, 64, generator=generator), torch.randn(32, 4, generator=generator)
    a, b = nn.Parameter(a), nn.Parameter(b)
    return AdapterWeights(a={module: a}, b={module: b}, scalings={module: 0.5}, shared=True)


@torch.no_grad()
def merged(adapter: AdapterWeights) -> nn.Module:
    model = make_reference(QWEN3)
    delta = adapter.scalings[KEY_PROJECTION] * adapter.b[KEY_PROJECTION] @ adapter.a[KEY_PROJECTION]
    model.get_submodule(KEY_PROJECTION).weight.data += delta
    return model


def test_an_adapter_is_applied_to_the_calls_that_name_it(make_engine):
    engine, adapter = make_engine(), make_adapter(0)
    base = engine.generate(PROMPTS, GREEDY)
    engine.load_adapter("policy-1", adapter)
    for completion in engine.generate(PROMPTS, GREEDY, adapter="policy-1"):
        assert completion.adapter == "policy-1"
        assert_sampled_from(merged(adapter), completion, GREEDY)
    assert drawn(engine.generate(PROMPTS, GREEDY)) == drawn(base)


def test_a_shared_adapter_follows_the_trainer_and_is_cached_by_name(make_engine):
    engine, adapter = make_engine(), make_adapter(0)
    engine.load_adapter("policy", adapter)
    params = SamplingParams(temperature=0, max_tokens=1)
    before = engine.generate(PROMPTS, params, adapter="policy")
    adapter.b[KEY_PROJECTION].data.mul_(-3)
    assert engine.generate(PROMPTS, params, adapter="policy") == before
    engine.reset_prefix_cache()
    for completion in engine.generate(PROMPTS, params, adapter="policy"):
        assert_sampled_from(merged(adapter), completion, params)


def test_a_removed_adapter_is_gone_with_what_was_computed_with_it(make_engine):
    engine = make_engine()
    engine.load_adapter("policy", make_adapter(0))
    engine.generate(PROMPTS, GREEDY, adapter="policy")
    with pytest.raises(ValueError, match="'policy' already"):
        engine.load_adapter("policy", make_adapter(1))
    engine.remove_adapter("policy")
    with pytest.raises(ValueError, match="no adapter 'policy'"):
        engine.remove_adapter("policy")
    engine.load_adapter("policy", make_adapter(1))
    for completion in engine.generate(PROMPTS, GREEDY, adapter="policy"):
        assert_sampled_from(merged(make_adapter(1)), completion, GREEDY)
    with pytest.raises(Unsupported, match="'model.layers.0.self_attn.qkv_proj'"):
        engine.load_adapter("vllm", make_adapter(0, "model.layers.0.self_attn.qkv_proj"))


def test_a_replaced_adapter_is_gone_with_what_was_computed_with_it(make_engine):
    engine = make_engine()
    engine.load_adapter("policy-1", make_adapter(0))
    engine.generate(PROMPTS, GREEDY, adapter="policy-1")
    for name in ("policy-2", "policy-2"):
        engine.replace_adapter(engine._adapters.names[0], name, make_adapter(1))
        assert engine._adapters.names == ["policy-2"]
        for completion in engine.generate(PROMPTS, GREEDY, adapter="policy-2"):
            assert_sampled_from(merged(make_adapter(1)), completion, GREEDY)


def test_an_adapter_is_replaced_only_by_a_name_of_its_own(make_engine):
    engine = make_engine()
    engine.load_adapter("policy", make_adapter(0))
    engine.load_adapter("other", make_adapter(1))
    with pytest.raises(ValueError, match="no adapter 'missing'"):
        engine.replace_adapter("missing", "new", make_adapter(1))
    with pytest.raises(ValueError, match="'other' already"):
        engine.replace_adapter("policy", "other", make_adapter(1))
    assert engine._adapters.names == ["other", "policy"]
    with pytest.raises(Unsupported, match="qkv_proj"):
        engine.replace_adapter("policy", "new", make_adapter(0, "model.layers.0.self_attn.qkv_proj"))
    assert engine._adapters.names == ["other"]


# ---- states and sleep -----------------------------------------------------------------------------------------------

STATES = [state for state in EngineState if state is not EngineState.LOST]
AWAKE, PAUSED, ASLEEP, CLOSED = STATES
RESIDENT, OFFLOADED, DISCARDED = Residency.RESIDENT, Residency.OFFLOADED, Residency.DISCARDED
ENTER = {
    AWAKE: lambda engine: None,
    PAUSED: lambda engine: engine.pause(),
    ASLEEP: lambda engine: engine.sleep(1),
    CLOSED: lambda engine: engine.close(),
}


def replace_adapter(engine):
    engine._adapters._by_name["old"] = make_adapter(0)  # which no closed engine loads
    engine.replace_adapter("old", "new", make_adapter(1))


VERBS = {
    "generate": lambda engine: engine.generate(PROMPTS, GREEDY),
    "pause": lambda engine: engine.pause(),
    "resume": lambda engine: engine.resume(),
    "sleep": lambda engine: engine.sleep(SleepLevel.LEVEL_1),
    "wake": lambda engine: engine.wake(),
    "share_weights": lambda engine: engine.share_weights(),
    "load_weights": lambda engine: engine.load_weights([]),
    "commit": lambda engine: engine.commit(2),
    "record_plan": lambda engine: engine.record_plan(make_reference(QWEN3).state_dict()),
    "load_adapter": lambda engine: engine.load_adapter("policy", make_adapter(0)),
    "replace_adapter": replace_adapter,
    "close": lambda engine: engine.close(),
}
STAY = {AWAKE: AWAKE, PAUSED: PAUSED}
LEGAL = {
    "generate": {AWAKE: AWAKE},
    "pause": {AWAKE: PAUSED, PAUSED: PAUSED},
    "resume": {AWAKE: AWAKE, PAUSED: AWAKE},
    "sleep": {AWAKE: ASLEEP, PAUSED: ASLEEP, ASLEEP: ASLEEP},
    "wake": {**STAY, ASLEEP: PAUSED},
    "share_weights": STAY,
    "load_weights": STAY,
    "commit": STAY,
    "record_plan": STAY,
    "load_adapter": {**STAY, ASLEEP: ASLEEP},
    "replace_adapter": {**STAY, ASLEEP: ASLEEP},
    "close": dict.fromkeys(STATES, CLOSED),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("verb", VERBS)
def test_every_state_allows_what_it_should_and_refuses_the_rest(make_engine, verb, state):
    engine = make_engine()
    ENTER[state](engine)
    assert engine.state is state
    if state in LEGAL[verb]:
        VERBS[verb](engine)
    else:
        with pytest.raises(PhaseError, match="and (it )?cannot"):
            VERBS[verb](engine)
    assert engine.state is LEGAL[verb].get(state, state)


def residencies(engine: TorchEngine) -> list[Residency]:
    return [segment.residency for segment in engine.segments]


SLEPT = {"keep-weights": [RESIDENT, DISCARDED], 1: [OFFLOADED, DISCARDED], 2: [DISCARDED, DISCARDED]}


@pytest.mark.parametrize("level", SLEPT)
@pytest.mark.parametrize("first", [None, *SLEPT])
def test_sleep_only_ever_deepens(make_engine, first, level):
    engine = make_engine()
    held_bytes = [segment.device_bytes for segment in engine.segments]
    if first is not None:
        engine.sleep(first)
    engine.sleep(level)
    assert residencies(engine) == max(SLEPT[first or level], SLEPT[level], key=list(SLEPT.values()).index)
    for segment, size_bytes in zip(engine.segments, held_bytes, strict=True):
        assert segment.device_bytes == (size_bytes if segment.residency is RESIDENT else 0)
    engine.wake()
    assert [segment.device_bytes for segment in engine.segments] == held_bytes
    assert engine.state is PAUSED


@pytest.mark.parametrize("level", ["keep-weights", 1])
def test_weights_survive_the_lighter_levels(make_engine, level):
    engine = make_engine()
    expected = engine.generate(PROMPTS, GREEDY)
    for _ in range(3):
        engine.sleep(level)
        engine.wake()
        engine.resume()
        assert engine.generate(PROMPTS, GREEDY) == expected


def test_level_2_asks_for_new_weights_which_may_come_before_the_kv_cache(make_engine, monkeypatch):
    engine = make_engine(CONFIGS["llama"])
    expected = engine.generate(PROMPTS, GREEDY)
    engine.sleep(2)
    assert engine.weights_version is None
    (region,) = engine.weights.regions
    restore = region._restore
    monkeypatch.setattr(region, "_restore", lambda: (restore(), region.bytes.fill_(0x7F)))
    engine.wake(["weights"])
    assert (engine.state, residencies(engine)) == (ASLEEP, [RESIDENT, DISCARDED])
    assert engine.weights.parameters["lm_head.weight"][VOCAB:].eq(0).all()
    engine.load_weights(make_reference(CONFIGS["llama"]).state_dict().items())
    engine.wake(["kv_cache"])
    engine.resume()
    with pytest.raises(StaleWeights, match="loaded into it and not committed"):
        engine.generate(PROMPTS, GREEDY)
    engine.commit(1)
    assert engine.generate(PROMPTS, GREEDY) == expected


def assert_refuses(engine: TorchEngine, cause: str):
    """The engine is poisoned for this cause, until a commit."""
    engine.resume()
    assert engine.weights_version is None
    with pytest.raises(StaleWeights, match=cause):
        engine.generate(PROMPTS, GREEDY)
    engine.commit(4)
    assert engine.weights_version == 4


def test_an_engine_refuses_to_generate_from_weights_that_nobody_vouches_for(make_engine):
    engine = make_engine(weights=False)
    assert isinstance(engine, Engine)
    assert (engine.name, engine.state) == ("torch", AWAKE)
    assert_refuses(engine, "no weights have been committed yet")
    engine.poison("rank 3 failed")
    assert_refuses(engine, "rank 3 failed")
    with pytest.raises(TransferError):
        engine.load_weights([("model.norm.weight", torch.ones(1))])
    assert_refuses(engine, "loaded into it and not committed")
    for residency in (DISCARDED, RESIDENT):
        engine.segments[0].begin(residency).wait()
    assert engine.state is PAUSED
    assert_refuses(engine, "have been dropped")


def test_shared_weights_stay_where_they_are(make_engine):
    engine = make_engine()
    engine.share_weights()
    assert [segment.away for segment in engine.segments] == [None, DISCARDED]
    for act in (lambda: engine.sleep(1), lambda: engine.sleep(2), lambda: engine.segments[0].begin(DISCARDED)):
        with pytest.raises(PhaseError, match="'keep-weights'"):
            act()
        assert (engine.state, engine.weights_version) == (AWAKE, 1)
    engine.sleep("keep-weights")
    engine.commit(2)
    assert residencies(engine) == [RESIDENT, DISCARDED]


@pytest.mark.parametrize("level", [1, 2])
def test_a_wake_that_does_not_fit_leaves_the_engine_asleep_as_before(make_engine, monkeypatch, level):
    engine = make_engine()
    engine.sleep(level)
    asleep = residencies(engine)

    def refuse() -> None:
        raise BudgetError("no room", needed_bytes=2, free_bytes=1)

    with monkeypatch.context() as patch, pytest.raises(BudgetError):
        patch.setattr(engine._kv_segment.regions[0], "_restore", refuse)
        engine.wake()
    assert (engine.state, residencies(engine)) == (ASLEEP, asleep)
    engine.wake()
    engine.resume()
    assert engine.weights_version == (1 if level == 1 else None)


def test_unknown_levels_and_tags_are_refused(make_engine):
    engine = make_engine()
    with pytest.raises(ValueError, match="3"):
        engine.sleep(3)
    with pytest.raises(ValueError, match=r"unknown tags \['graphs'\]: wake takes \['kv_cache', 'weights'\]"):
        engine.wake(["weights", "graphs"])


def test_closing_gives_everything_back_once(make_engine):
    engine = make_engine()
    regions = [*engine.weights.regions, *engine._kv_segment.regions]
    assert [segment.name for segment in engine.segments] == ["engine.weights", "engine.kv_cache"]
    assert engine.kv_bytes_per_token == KV_BYTES_PER_TOKEN
    engine.close()
    engine.close()
    assert all(region.closed and region.device_bytes == 0 for region in regions)
    assert engine.weights.hf_views() == {}
    assert all(parameter.is_meta for parameter in engine.module.parameters())
    assert engine.weights_version is None


def test_it_does_what_an_engine_does_and_holds_what_it_says(make_engine):
    engine = make_engine()
    regions = [region for segment in engine.segments for region in segment.regions]
    check_engine(engine, (1, 2, 3), held_bytes=lambda: sum(r.bytes.untyped_storage().nbytes() for r in regions))
