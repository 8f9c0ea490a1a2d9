"""An adapter is trained over the shared base, and the engine applies it."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import colo
from tests.runtimes import ALWAYS, launch, launch_lora, qwen3, train_step


def test_lora_trains_an_adapter_over_the_shared_base_and_the_engine_applies_it():
    rt = launch_lora()
    base = {name: p.detach().clone() for name, p in rt.model.named_parameters() if "lora_" not in name}
    for version in range(3):
        with rt.rollout():
            completion = rt.generate([[5, 6, 7]], max_tokens=6, seed=1)[0]
        assert (completion.weights_version, completion.adapter) == (version, f"policy@{version}")
        ids = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
        with torch.no_grad():
            logprobs = rt.model(input_ids=ids).logits[0, 2:-1].log_softmax(-1)
        expected = logprobs.gather(-1, ids[0, 3:, None]).squeeze(-1)
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)
        with rt.train():
            train_step(rt)
    assert rt.bytes_synced == 0
    for name, parameter in rt.model.named_parameters():
        if name in base:
            assert torch.equal(base[name], parameter), name
    rt.close()


def test_merging_the_adapter_is_noticed_and_named():
    rt = launch_lora()
    rt.model.merge_adapter()
    with pytest.raises(colo.StaleWeights, match=r"merged into model.layers.0.self_attn.q_proj.weight"):
        rt.generate([[1]])
    rt.model.unmerge_adapter()
    rt.generate([[1]])
    rt.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_what_an_engine_cannot_apply_is_refused_by_name_before_anything_is_built(options, words):
    with pytest.raises(colo.Unsupported, match=words):
        launch(lora=LoraConfig(r=4, target_modules=["q_proj"], **options))


def test_the_active_adapter_is_the_one_that_is_applied():
    rt = launch_lora(config=ALWAYS)
    rt.model.add_adapter("other", LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))

    def sample():
        completion = rt.generate([[5, 6, 7]], max_tokens=4, temperature=0)[0]
        ids = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
        with torch.no_grad():
            logprobs = rt.model(input_ids=ids).logits[0, 2:-1].log_softmax(-1)
        expected = logprobs.gather(-1, ids[0, 3:, None]).squeeze(-1)
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)
        return completion

    texts = [sample().token_ids]
    rt.model.set_adapter("other")
    texts.append(sample().token_ids)
    rt.model.set_adapter("default")
    assert sample().token_ids == texts[0] != texts[1]
    with rt.rollout():
        rt.model.set_adapter("other")
        assert sample().token_ids == texts[1]
    with rt.model.disable_adapter():
        assert sample().adapter is None
    rt.close()


def test_the_base_is_bit_identical_after_100_steps_where_merging_and_unmerging_drifts():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(qwen3(), dtype=torch.bfloat16)
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    merged = get_peft_model(copy.deepcopy(model), lora)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with launch(model, lora=lora, dtype=torch.bfloat16) as rt:
        for _ in range(100):
            rt.generate([[1, 2, 3]], max_tokens=1)
            with rt.train():
                train_step(rt)
        base = rt.model.get_base_model().named_parameters()
        held = {name.replace(".base_layer", ""): p for name, p in base if "lora_" not in name}
        assert held.keys() == before.keys()
        assert all(torch.equal(held[name], value) for name, value in before.items())
    for _ in range(100):  # as trainers do that send an adapter by merging it
        merged.merge_adapter()
        merged.unmerge_adapter()
    drifted = {
        n.replace(".base_layer", ""): p for n, p in merged.get_base_model().named_parameters() if "lora_" not in n
    }
    assert any(not torch.equal(drifted[name], value) for name, value in before.items())
