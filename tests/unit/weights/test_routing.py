"""Routing replay: a pass goes through the experts that are given, with the router's own scores and gradients."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

import colo
from colo.engine import Completion
from colo.errors import Unsupported
from colo.weights.mismatch import logprob_difference
from colo.weights.routing import replaying, routing_of
from tests.runtimes import qwen3

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "eos_token_id": None,
    "bos_token_id": None,
}
GROUPED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES = {
    "qwen3": (Qwen3MoeConfig, {"num_experts": 8, "mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen2": (Qwen2MoeConfig, {"num_experts": 8, "shared_expert_intermediate_size": 24}),
    "mixtral": (MixtralConfig, {"num_local_experts": 8}),
    "olmoe": (OlmoeConfig, {"num_experts": 8}),
    "glm4": (Glm4MoeConfig, GROUPED),
    "deepseek": (DeepseekV3Config, GROUPED | LATENT | {"num_key_value_heads": 4}),
    "gpt-oss": (GptOssConfig, {"num_local_experts": 8}),
}
IDS = torch.randint(0, 61, (3, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=FAMILIES)
def model(request):
    kind, options = FAMILIES[request.param]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**SIZES | options), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def routers_of(model):
    return {int(n.split(".")[2]): m for n, m in model.named_modules() if isinstance(getattr(m, "top_k", None), int)}


def chosen(model, ids, run=None):
    """What each layer's router chooses in a pass, and the pass's logits."""
    found = {}
    hooks = [
        router.register_forward_hook(lambda _, __, out, layer=layer: found.__setitem__(layer, out[-1].detach()))
        for layer, router in routers_of(model).items()
    ]
    logits = (run or model)(input_ids=ids).logits
    for hook in hooks:
        hook.remove()
    return found, logits


def random_routing(num_layers=3, seed=2):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(8, generator=generator)[:2] for _ in range(3 * 7 * num_layers)]
    return torch.stack(rows).view(3, 7, num_layers, 2)


def test_a_pass_takes_the_experts_that_are_given(model):
    routing = random_routing()
    own, plain = chosen(model, IDS)
    with colo.replay_routing(model, routing):
        taken, logits = chosen(model, IDS)
    assert sorted(taken) == sorted(own) and len(taken) >= 2
    for layer, experts in taken.items():
        assert torch.equal(experts.view(3, 7, 2).sort().values, routing[:, :, layer].sort().values)
    assert not torch.allclose(logits, plain)
    assert torch.equal(chosen(model, IDS)[1], plain)  # nothing is left behind
    assert not any(router._forward_hooks or router._forward_pre_hooks for router in routers_of(model).values())


def test_its_own_choice_replayed_is_the_same_pass_bit_for_bit(model):
    own, plain = chosen(model, IDS)
    routing = torch.full((3, 7, 3, 2), -1)
    with colo.replay_routing(model, routing):  # nothing is given
        assert torch.equal(model(input_ids=IDS).logits, plain)
    for layer, experts in own.items():
        routing[:, :, layer] = experts.view(3, 7, 2)
    with colo.replay_routing(model, routing):
        logits = model(input_ids=IDS).logits
        assert torch.equal(logits, plain)
        logits.logsumexp(-1).sum().backward()
    replayed = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    plain.logsumexp(-1).sum().backward()
    assert all(torch.equal(replayed[n], p.grad) for n, p in model.named_parameters() if p.grad is not None)
    assert any("gate" in name or "router" in name for name in replayed)


def test_a_backward_pass_that_computes_again_takes_the_same_experts(model):
    routing = random_routing()

    def gradients():
        model.zero_grad()
        with colo.replay_routing(model, routing):
            model(input_ids=IDS).logits.logsumexp(-1).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    model.train()
    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again = gradients()
    assert plain.keys() == again.keys() and all(torch.equal(plain[name], again[name]) for name in plain)


def sampled(model, length=4, prompt=3, **given):
    ids = IDS[0, : prompt + length]
    logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    tokens = tuple(ids[prompt:].tolist())
    named = {"prompt_index": 0, "sample_index": 0, "finish_reason": "length", "weights_version": 0}
    return Completion(
        **named,
        prompt_token_ids=tuple(ids[:prompt].tolist()),
        token_ids=tokens,
        logprobs=tuple(float(logprobs[prompt - 1 + i, token]) for i, token in enumerate(tokens)),
        **given,
    )


@torch.no_grad()
def test_the_gap_to_an_engine_that_took_others_is_gone_with_its_experts(model):
    routing = random_routing()
    with colo.replay_routing(model, routing[:1]):
        found = sampled(model, routed_experts=routing[0, :6].numpy().astype(np.uint8))
    gaps = [logprob_difference(model, [found] * 2, temperature=1.0, device=IDS.device, replay=r) for r in (True, False)]
    assert gaps[0] < 1e-6 < 1e-2 < gaps[1]


def test_routing_of_a_batch_lies_where_its_tokens_do():
    plain = {"sample_index": 0, "logprobs": (), "finish_reason": "length", "weights_version": 0}
    rows = [np.arange(n * 2, dtype=np.uint8).reshape(n, 1, 2) for n in (4, 2)]
    made = [
        Completion(prompt_index=0, prompt_token_ids=(1, 2), token_ids=(3, 4, 5), routed_experts=rows[0], **plain),
        Completion(prompt_index=1, prompt_token_ids=(1,), token_ids=(3,), routed_experts=rows[1], **plain),
    ]
    right = routing_of(made)[:, :, 0, 0]
    assert right.tolist() == [[0, 2, 4, 6, -1], [0, 2, -1, -1, -1]]
    left = routing_of(made, length=6, left_padded=True)[:, :, 0, 0]
    assert left.tolist() == [[-1, 0, 2, 4, 6, -1], [-1, -1, -1, -1, 0, 2]]
    with pytest.raises(ValueError, match="length 4 is shorter than a sequence of 5 tokens"):
        routing_of(made, length=4)
    with pytest.raises(ValueError, match="routed experts of 1 tokens for a sequence of 5: the engine left some out"):
        routing_of([colo.engine.replace(made[0], routed_experts=rows[0][:1])])
    with pytest.raises(ValueError, match=r"1 of 2 completions have no routed experts: start vLLM with"):
        routing_of([made[0], colo.engine.replace(made[1], routed_experts=None)])


def test_what_cannot_be_replayed_is_refused_with_the_reason(model):
    routing = random_routing()
    for given in (None, 5, [[1, 2]]):
        with pytest.raises(TypeError, match="routing is that of a list of completions"):
            colo.replay_routing(model, given).__enter__()
    with (
        pytest.raises(ValueError, match=r"routing has shape \(3, 7, 3, 1\), not \(B, T, layers, 2\)"),
        colo.replay_routing(model, routing[..., :1]),
    ):
        pass
    with (
        pytest.raises(ValueError, match="routing has 1 layers, and the model a router in layer 2"),
        colo.replay_routing(model, routing[:, :, :1]),
    ):
        pass
    with colo.replay_routing(model, routing), pytest.raises(ValueError, match="over 14 tokens, and routing of 21"):
        model(input_ids=IDS[:2])
    dense = AutoModelForCausalLM.from_config(qwen3())
    with pytest.raises(Unsupported, match="is no mixture of experts"), colo.replay_routing(dense, routing):
        pass
    with pytest.raises(Unsupported, match="ModuleList is no model of transformers"):
        colo.replay_routing(torch.nn.ModuleList([model]), routing).__enter__()
    with (
        pytest.raises(Unsupported, match="no router of .* ran, since a compiled pass runs without hooks"),
        colo.replay_routing(model, routing),
    ):
        pass
    router = routers_of(model)[2]
    plain, router.forward = router.forward, lambda hidden: (hidden, hidden, hidden)
    try:
        with (
            colo.replay_routing(model, routing),
            pytest.raises(Unsupported, match=r"the router of layer 2, a \w+, chooses its experts in another way"),
        ):
            model(input_ids=IDS)
    finally:
        router.forward = plain


def test_a_compiled_model_is_refused():
    kind, options = FAMILIES["qwen3"]
    model = AutoModelForCausalLM.from_config(kind(**SIZES | options), dtype=torch.float32, attn_implementation="eager")
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(input_ids=IDS)
        with (
            pytest.raises(Unsupported, match="a compiled pass runs without hooks"),
            colo.replay_routing(model, random_routing()),
        ):
            compiled(input_ids=IDS)


@torch.no_grad()
def test_an_interrupt_within_a_router_leaves_nothing_behind(model):
    plain = model(input_ids=IDS).logits
    router = routers_of(model)[2]
    run, router.forward = router.forward, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), colo.replay_routing(model, random_routing()):
        model(input_ids=IDS)
    router.forward = run
    assert torch.equal(model(input_ids=IDS).logits, plain)
    assert torch.overrides._get_current_function_mode() is None


def elsewhere(run, hidden):
    """A router's choice, made where no mode sees it."""
    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        return pool.submit(torch.no_grad()(run), hidden).result()


@torch.no_grad()
def test_passes_that_nobody_has_asked_that_for_go_on_with_the_routers_own_choice(model):
    """Where the engine's experts cannot be replayed, or are not all there."""
    found = sampled(model, routed_experts=random_routing()[0, :6].numpy())
    lacking = colo.engine.replace(found, routed_experts=found.routed_experts[:2])
    assert logprob_difference(model, [lacking], temperature=1.0, device=IDS.device) < 1e-6
    router = routers_of(model)[2]
    run, router.forward = router.forward, lambda hidden: elsewhere(run, hidden)
    assert logprob_difference(model, [found], temperature=1.0, device=IDS.device) > 0
    router.forward = run
    dense = AutoModelForCausalLM.from_config(qwen3())
    with replaying(dense, [found]):
        dense(input_ids=IDS)
