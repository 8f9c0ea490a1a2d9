"""What goes into `generate`, and what must not come out of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    MambaConfig,
    OpenAIGPTConfig,
    PretrainedConfig,
    Qwen3Config,
)

import colo
from colo.engines.layout import LoadedAdapters
from colo.engines.torch import TorchEngine
from colo.memory.offload import Mover
from colo.units import MIB
from tests.checkpoints import char_tokenizer, save_checkpoint
from tests.models import add_adapter, tiny_qwen3
from tests.runtimes import PROMPTS

GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32, bos_token_id=None, eos_token_id=None)
LORA = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)


def qwen3(**changes: Any) -> Qwen3Config:
    return tiny_qwen3(**({"num_hidden_layers": 2} | changes))


def launch(config: PretrainedConfig, **options: Any) -> colo.Runtime:
    torch.manual_seed(0)
    return colo.launch(config, device="cpu", config=colo.RuntimeConfig(kv_cache_bytes=MIB), **options)


@torch.no_grad()
def logprobs_of(model: nn.Module, completion: Any) -> torch.Tensor:
    """Of a completion's tokens, at temperature 1, by one pass of the trainer's model over all of them."""
    token_ids = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
    logits = model(input_ids=token_ids).logits[0, len(completion.prompt_token_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def assert_sampled_from(model: nn.Module, completions: list[Any]) -> None:
    model.eval()
    for completion in completions:
        expected = logprobs_of(model, completion)
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


# ---- prompts --------------------------------------------------------------------------------------------------------


def test_prompts_from_a_generator_are_all_read_also_as_generators_of_token_ids():
    with launch(qwen3()) as rt:
        prompts = [[1, 2], [3], [4, 5, 6]]
        expected = rt.generate(prompts, max_tokens=3, temperature=0)
        assert rt.generate((p for p in prompts), max_tokens=3, temperature=0) == expected
        assert rt.generate((iter(p) for p in prompts), max_tokens=3, temperature=0) == expected
        params = colo.SamplingParams(max_tokens=3, temperature=0)
        with rt.rollout():
            found = rt.engine.generate((p for p in prompts), params)
        assert [c.token_ids for c in found] == [c.token_ids for c in expected]


def test_texts_need_a_tokenizer(rt):
    with pytest.raises(ValueError, match="the runtime has no tokenizer"):
        rt.generate(["hello"])


def test_one_prompt_is_not_taken_for_many(rt):
    for prompt in ("1+2=", [1, 2, 3]):
        with pytest.raises(TypeError, match=r"prompts is a list of prompts.*pass \[prompt\] for one"):
            rt.generate(prompt)
    with pytest.raises(TypeError):
        rt.generate([[1.5]])


def test_conversations_encodings_and_tensors_are_the_prompts_that_they_encode(tmp_path):
    talks = [[{"role": "user", "content": text}] for text in ("1+2=", "7")]
    with colo.launch(save_checkpoint(tmp_path), device="cpu", config=colo.RuntimeConfig(kv_cache_bytes=MIB)) as rt:
        template = rt.tokenizer.apply_chat_template
        ids = [template(talk, add_generation_prompt=True, return_dict=False) for talk in talks]
        options = {"max_tokens": 4, "temperature": 0}
        expected = rt.generate(ids, **options)
        encoding = template(talks, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)
        for prompts in (talks, encoding, map(torch.tensor, ids)):
            assert rt.generate(prompts, **options) == expected
        assert rt.generate(talks[0], **options) == rt.generate(ids[:1], **options)  # not a row of a larger batch
        neutral = {"repetition_penalty": 1.0, "top_k": -1, "min_p": 0.0, "logit_bias": None, "guided": None}
        assert rt.generate(talks, **neutral, **options) == expected
        with pytest.raises(ValueError, match="does not take repetition_penalty"):
            rt.generate(talks, repetition_penalty=1.2)
        with pytest.raises(ValueError, match="prompt 1 is empty: there is nothing to continue; give it at least one"):
            rt.generate(["1", ""])
        with pytest.raises(ValueError, match="prompt 0 has 68 tokens, the model knows 64 positions: shorten it"):
            rt.generate([{"role": "user", "content": "1" * 65}])
        with pytest.raises(colo.Unsupported, match="message 0 of prompt 0 has a part of type 'image'"):
            rt.generate([{"role": "user", "content": [{"type": "image"}]}])
        count = len(rt.trace.spans)
        for prompt, more in (
            ({"prompt": "1", "multi_modal_data": {}}, {}),
            ("1", {"n": 0}),
            ("1", {"until": 1, "n": 0}),
        ):
            with pytest.raises((colo.Unsupported, ValueError)):
                rt.generate([prompt], **more)
        assert len(rt.trace.spans) == count, "memory moved for what cannot be sampled"


def test_texts_are_decoded_when_they_are_read(tmp_path):
    config = colo.RuntimeConfig(kv_cache_bytes=MIB)
    with colo.launch(save_checkpoint(tmp_path), device="cpu", config=config, tokenizer=Counting()) as rt:
        completions = rt.generate(["1+2=", "7"], n=2, max_tokens=4)
        assert rt.tokenizer.num_decoded == 0
        assert completions[3].text == char_tokenizer().decode(completions[3].token_ids, skip_special_tokens=True)
        assert rt.tokenizer.num_decoded == 1


def test_a_text_ends_before_a_stop_token_of_the_callers(tmp_path):
    config = colo.RuntimeConfig(kv_cache_bytes=MIB)
    with colo.launch(save_checkpoint(tmp_path), device="cpu", config=config, tokenizer=Counting()) as rt:
        (first,) = rt.generate(["1+2="], temperature=0, max_tokens=1)
        (stopped,) = rt.generate(["1+2="], temperature=0, stop_token_ids=list(first.token_ids))
    assert (stopped.token_ids, stopped.finish_reason, stopped.text) == (first.token_ids, "stop", "")
    assert first.text


class Counting:
    """Counts the texts that it decodes."""

    def __init__(self) -> None:
        self.num_decoded = 0

    def __call__(self, text: str) -> Any:
        return char_tokenizer()(text)

    def decode(self, token_ids: Any, **options: Any) -> str:
        self.num_decoded += 1
        return str(char_tokenizer().decode(token_ids, **options))


def test_a_callers_autocast_does_not_change_what_is_sampled(rt):
    plain = rt.generate([[1, 2, 3]], max_tokens=8, temperature=0)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rt.generate([[1, 2, 3]], max_tokens=8, temperature=0)[0].logprobs == plain.logprobs


def test_calls_of_several_threads_wait_for_each_other(rt):
    alone = [rt.generate([prompt], max_tokens=8, temperature=0)[0].token_ids for prompt in PROMPTS]
    with rt.rollout(), ThreadPoolExecutor(len(PROMPTS)) as pool:
        calls = [pool.submit(rt.generate, [prompt], max_tokens=8, temperature=0) for prompt in PROMPTS * 4]
        assert [call.result()[0].token_ids for call in calls] == alone * 4


# ---- positions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [GPT2, qwen3(max_position_embeddings=32)], ids=["learned", "rotary"])
def test_a_completion_ends_where_the_positions_do_as_in_vllm(config):
    with launch(config) as rt:
        prompts = [[1] * 30, [2] * 5, [3] * 31]
        completions = rt.generate(prompts, n=2, max_tokens=20)
        lengths = [(len(c.token_ids), c.finish_reason) for c in completions]
        assert lengths == [(2, "length")] * 2 + [(20, "length")] * 2 + [(1, "length")] * 2
        assert_sampled_from(rt.model, completions)
        with pytest.raises(ValueError, match="prompt 1 has 32 tokens, the model knows 32 positions: shorten it"):
            rt.generate([[1], [1] * 32], max_tokens=1)


def test_a_prompt_longer_than_the_model_knows_is_refused(rt):
    with pytest.raises(ValueError, match="prompt 0 has 129 tokens, the model knows 128 positions"):
        rt.generate([[1] * 129], max_tokens=1)


def test_a_row_at_its_last_position_waits_there_for_the_others_in_its_batch():
    with launch(GPT2) as rt:
        token_ids = [c.token_ids for c in rt.generate([[1] * 31, [2]], max_tokens=31, temperature=0)]
        assert [len(ids) for ids in token_ids] == [1, 31]
        assert token_ids == [rt.generate([p], max_tokens=31, temperature=0)[0].token_ids for p in ([1] * 31, [2])]


def test_dynamic_rotary_frequencies_are_used_only_where_they_have_no_effect_yet():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    with launch(qwen3(max_position_embeddings=16, rope_parameters=rope)) as rt:
        completions = rt.generate([[1] * 3, [2] * 14], n=2, max_tokens=40)
        assert [len(c.token_ids) for c in completions] == [13, 13, 2, 2]
        assert_sampled_from(rt.model, completions)


def test_no_completion_grows_over_the_length_at_which_longrope_changes_all_frequencies():
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    with launch(qwen3(max_position_embeddings=64, rope_parameters=rope)) as rt:
        completions = rt.generate([[1] * 3, [2] * 20, [3] * 14], n=2, max_tokens=30)
        assert [len(c.token_ids) for c in completions] == [13, 13, 30, 30, 2, 2]
        assert_sampled_from(rt.model, completions)
        with pytest.raises(ValueError, match="prompt 0 has 16 tokens, after which LongRoPE"):
            rt.generate([[1] * 16], max_tokens=1)


# ---- other caches ---------------------------------------------------------------------------------------------------

MAMBA = MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4, eos_token_id=None)
DEEPSEEK = DeepseekV3Config(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    vocab_size=64,
    moe_intermediate_size=32,
    n_routed_experts=8,
    n_group=1,
    topk_group=1,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=16,
    q_lora_rank=None,
    max_position_embeddings=64,
    eos_token_id=None,
)


@pytest.mark.parametrize("config", [MAMBA, DEEPSEEK], ids=["mamba", "deepseek-v3"])
def test_models_with_caches_of_their_own_are_sampled_from_as_they_are_trained(config):
    with launch(config, optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2)) as rt:
        for _ in range(2):
            completions = rt.generate([[1, 2, 3], [4], [5, 6, 7], [8, 9]], n=3, max_tokens=5)
            assert [(c.prompt_index, c.sample_index) for c in completions] == [
                (p, s) for p in range(4) for s in range(3)
            ]
            assert_sampled_from(rt.model, completions)
            with rt.train():
                rt.model(input_ids=torch.tensor([[1, 2, 3]])).logits.logsumexp(-1).sum().backward()
                rt.optimizer.step()
                rt.optimizer.zero_grad()
        assert rt.bytes_synced == 0


def test_a_cache_of_a_models_own_is_counted_and_bounds_how_many_sequences_run_together():
    room = 40_000
    engine = TorchEngine(
        MAMBA, device="cpu", dtype=torch.float32, kv_cache_bytes=room, mover=Mover(torch.device("cpu"))
    )
    model = AutoModelForCausalLM.from_config(copy.deepcopy(MAMBA))
    rt = colo.share(engine, model, torch.optim.SGD(model.parameters(), lr=0.1))
    row_bytes = 2 * 64 * (4 + 4) * 4  # two layers of convolution and recurrent states, fp32
    waves = engine._caches.plan([(1, 2), (3, 4)], n=8, max_tokens=4)
    assert max(len(w.prompts) + len(w.rows) for w in waves) == room // row_bytes
    assert sum(len(w.rows) for w in waves) == 16
    (kv_cache,) = (s for s in engine.segments if s.name == "engine.kv_cache")
    with rt.rollout():
        assert kv_cache.device_bytes == room
    engine.sleep("keep-weights")
    assert kv_cache.device_bytes == 0
    rt.close()
    with pytest.raises(
        ValueError,
        match="a KV cache of 4000 bytes holds no sequence of one token, which takes 4096 bytes: raise kv_cache_bytes",
    ):
        TorchEngine(MAMBA, device="cpu", dtype=torch.float32, kv_cache_bytes=4000)


def test_a_model_that_keeps_nothing_of_a_sequence_is_refused_by_launch():
    config = OpenAIGPTConfig(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=64)
    with pytest.raises(colo.Unsupported, match=r"cannot run openai-gpt \(OpenAIGPTLMHeadModel\): it takes no cache"):
        launch(config)


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_numbers_are_an_error_that_names_the_first_bad_weight(value, temperature):
    with launch(qwen3()) as rt:
        expected = rt.generate([[1, 2, 3]], max_tokens=3, temperature=0)
        kept = rt.model.lm_head.weight[3].detach().clone()
        with torch.no_grad():
            rt.model.lm_head.weight[3].fill_(value)
        with pytest.raises(
            FloatingPointError, match=r"lm_head\.weight \(64, 32\) has 32 values that are NaN or infinite"
        ):
            rt.generate([[1, 2, 3]], max_tokens=3, temperature=temperature)
        with torch.no_grad():
            rt.model.lm_head.weight[3].copy_(kept)
        found = rt.generate([[1, 2, 3]], max_tokens=3, temperature=0)
        assert [c.logprobs for c in found] == [c.logprobs for c in expected]


def test_a_bad_matrix_of_an_adapter_is_named():
    with launch(qwen3(), lora=copy.deepcopy(LORA)) as rt:
        with torch.no_grad():
            rt.model.get_submodule("base_model.model.model.layers.1.mlp.down_proj.lora_B.default").weight[0, 0] = (
                math.nan
            )
        with pytest.raises(
            FloatingPointError, match=r"model\.layers\.1\.mlp\.down_proj\.lora_B \(32, 4\) has 1 values"
        ):
            rt.generate([[1, 2, 3]], max_tokens=3)


def test_an_activation_that_overflows_is_an_error_too():
    with launch(qwen3()) as rt:
        with torch.no_grad():
            rt.model.lm_head.weight.fill_(3e38)
        with pytest.raises(FloatingPointError, match="every weight is finite, so that an activation has overflowed"):
            rt.generate([[1, 2, 3]], max_tokens=3)


def test_filters_that_leave_a_single_token_are_no_error():
    with launch(qwen3()) as rt:
        (completion,) = rt.generate([[1]], max_tokens=4, top_k=1, min_p=0.5, top_p=0.1, temperature=1e-6)
        assert completion.logprobs == (0.0,) * 4


# ---- adapters -------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapted() -> Iterator[colo.Runtime]:
    with launch(qwen3(), lora=copy.deepcopy(LORA)) as rt:
        yield rt


def layers_of(rt: colo.Runtime) -> list[Any]:
    return [module for module in rt.model.modules() if "lora_A" in module._modules]


def test_a_layer_whose_adapter_is_switched_off_is_left_out_and_the_others_are_not(adapted):
    base = adapted.generate([[1, 2]], max_tokens=4)
    layers_of(adapted)[0].enable_adapters(False)
    assert_sampled_from(adapted.model, adapted.generate([[1, 2]], max_tokens=4))
    with adapted.rollout():
        layers_of(adapted)[2].enable_adapters(False)
        assert_sampled_from(adapted.model, adapted.generate([[1, 2]], max_tokens=4))
        for layer in layers_of(adapted):
            layer.enable_adapters(True)
        completions = adapted.generate([[1, 2]], max_tokens=4)
        assert_sampled_from(adapted.model, completions)
    assert completions[0].weights_version > base[0].weights_version


def test_switching_the_whole_adapter_off_samples_from_the_base_and_is_no_new_version(adapted):
    version = adapted.weights_version
    with adapted.model.disable_adapter():
        completions = adapted.generate([[1, 2]], max_tokens=4)
        assert_sampled_from(adapted.model, completions)
    assert [c.adapter for c in completions] == [None]
    assert_sampled_from(adapted.model, adapted.generate([[1, 2]], max_tokens=4))
    assert adapted.weights_version == version


def test_a_scaling_that_is_changed_within_a_rollout_is_seen_by_the_next_generate(adapted):
    from peft.helpers import rescale_adapter_scale

    with adapted.rollout():
        (before,) = adapted.generate([[1, 2]], max_tokens=4)
        with rescale_adapter_scale(adapted.model, multiplier=3.0):
            completions = adapted.generate([[1, 2]], max_tokens=4)
            assert_sampled_from(adapted.model, completions)
        assert completions[0].weights_version > before.weights_version
        layers_of(adapted)[1].set_scale("default", 0.25)
        assert_sampled_from(adapted.model, adapted.generate([[1, 2]], max_tokens=4))


def test_an_adapter_that_transformers_has_added_is_sampled_with_and_trained():
    model = AutoModelForCausalLM.from_config(qwen3())
    add_adapter(model, copy.deepcopy(LORA), "mine")
    engine = TorchEngine(qwen3(), device="cpu", dtype=torch.float32, kv_cache_bytes=MIB)
    params = [p for p in model.parameters() if p.requires_grad]
    rt = colo.share(engine, model, torch.optim.AdamW(params, lr=1e-1))
    for _ in range(2):
        completions = rt.generate([[1, 2]], max_tokens=4)
        assert completions[0].adapter is not None
        assert_sampled_from(model, completions)
        with rt.train():
            model(input_ids=torch.tensor([[1, 2, 3]])).logits.logsumexp(-1).sum().backward()
            rt.optimizer.step()
            rt.optimizer.zero_grad()
    model.disable_adapters()
    assert_sampled_from(model, rt.generate([[1, 2]], max_tokens=4))
    rt.close()


def test_an_interrupt_wherever_an_adapter_is_added_or_applied_leaves_it_to_count_once(adapted, monkeypatch):
    expected = adapted.generate([[1, 2]], max_tokens=3, temperature=0)[0].logprobs
    adapters, adapter = adapted.engine._adapters, adapted.engine._adapters._by_name[adapted.engine._adapters.names[0]]
    register = nn.Module.register_forward_hook

    def interrupted(module, hook, **options):
        register(module, hook, **options)
        raise KeyboardInterrupt

    fresh = LoadedAdapters(adapted.engine.module)
    monkeypatch.setattr(nn.Module, "register_forward_hook", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fresh.add("twice", adapter)
    monkeypatch.undo()
    fresh.add("twice", adapter)
    with torch.no_grad(), fresh.applied("twice"):
        logits = adapted.engine.module(input_ids=torch.tensor([[1, 2]])).logits
    with torch.no_grad(), adapters.applied(adapters.names[0]):
        assert torch.equal(adapted.engine.module(input_ids=torch.tensor([[1, 2]])).logits, logits)
    with pytest.raises(KeyboardInterrupt), adapters.applied(adapters.names[0]):
        raise KeyboardInterrupt
    assert adapted.generate([[1, 2]], max_tokens=3, temperature=0)[0].logprobs == expected
