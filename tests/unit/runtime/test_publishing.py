"""Under which version the engine samples from what has been written, and what a failure leaves."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import colo
from colo.config import Offload, RuntimeConfig
from colo.phases.phase import Residency
from colo.units import MIB
from tests.runtimes import PROMPTS, adamw, launch, make_engine, qwen3, segment, train_step


def test_an_engines_own_call_after_one_of_the_runtimes_has_what_was_written_between(rt):
    with rt.rollout():
        params = rt.engine.sampling_params(max_tokens=2)
        rt.generate(PROMPTS, params)
        with torch.no_grad():
            rt.model.model.norm.weight.mul_(2)
        assert rt.engine.generate(PROMPTS, params)[0].weights_version == rt.weights_version == 1


def test_a_model_that_cannot_share_is_copied_and_the_reason_is_given():
    model = AutoModelForCausalLM.from_config(qwen3())
    rt = colo.share(make_engine(torch.bfloat16), model, adamw(model.parameters()))
    assert rt.transport.name == "local"
    assert "torch.float32 here and torch.bfloat16 in the engine" in rt.transport.reason
    sent = rt.bytes_synced
    with rt.train():
        train_step(rt)
    with rt.rollout():
        completion = rt.generate(PROMPTS, max_tokens=2)[0]
    assert completion.weights_version == 1
    assert rt.bytes_synced == 2 * sent == 2 * sum(p.numel() * 2 for p in model.parameters())
    expected = model.model.embed_tokens.weight.to(torch.bfloat16)
    assert torch.equal(rt.engine.module.model.embed_tokens.weight[:100], expected)
    with rt.rollout():
        pass
    assert len(rt.publications) == 2, "nothing changed, so nothing was sent"
    rt.close()


def test_weights_changed_without_the_optimizer_are_a_new_version(rt):
    with rt.rollout():
        first = rt.generate([[1, 2]], max_tokens=3, temperature=0)[0]
    state = {name: torch.randn_like(t) for name, t in rt.model.state_dict().items()}
    rt.model.load_state_dict(state)
    with rt.rollout():
        second = rt.generate([[1, 2]], max_tokens=3, temperature=0)[0]
    assert (first.weights_version, second.weights_version) == (0, 1)
    assert first.logprobs != second.logprobs


def test_a_publication_that_fails_poisons_the_engine_until_one_succeeds():
    model = AutoModelForCausalLM.from_config(qwen3())
    rt = colo.share(make_engine(torch.bfloat16), model, adamw(model.parameters()))
    with rt.train():
        train_step(rt)
    removed = model.model.norm.weight
    model.model.norm.weight = torch.nn.Parameter(torch.ones(65))
    with pytest.raises(colo.TransferError, match=r"model.norm.weight has shape \(65,\), but \(64,\) was recorded"):
        rt.generate([[1]])
    rt.engine.resume()
    with pytest.raises(colo.StaleWeights, match="publishing version 2 failed"):
        rt.engine.generate([[1]], colo.SamplingParams())
    model.model.norm.weight = removed
    assert rt.generate([[1]])[0].weights_version == rt.weights_version
    rt.close()


def resize(model):
    model.resize_token_embeddings(70, mean_resizing=False)


def transpose(model):
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t().contiguous().t()


@pytest.mark.parametrize("weights", ["copy", "staged"])
@pytest.mark.parametrize("change", [resize, transpose])
def test_a_weight_that_a_copy_cannot_take_is_named_with_what_to_do(weights, change):
    rt = launch(config=RuntimeConfig(weights=weights, kv_cache_bytes=MIB))
    kept = {name: (parameter, parameter.data) for name, parameter in rt.model.named_parameters()}
    change(rt.model)
    words = r"recorded: put it back as it was, or close the runtime and build another with the model as it is now$"
    with pytest.raises(colo.TransferError, match=words):
        rt.generate(PROMPTS)
    for name, (parameter, data) in kept.items():
        owner, _, attribute = name.rpartition(".")
        parameter.data = data
        setattr(rt.model.get_submodule(owner), attribute, parameter)
    assert len(rt.generate(PROMPTS, max_tokens=2)) == len(PROMPTS)
    rt.close()


def test_an_engines_own_weights_come_back_to_be_compared_where_no_step_was_taken():
    config = RuntimeConfig(weights="copy", offload=Offload.ALWAYS, kv_cache_bytes=MIB)
    rt = launch(config=config)
    before = rt.generate(PROMPTS, max_tokens=4, temperature=0)
    ids = torch.tensor([[1, 2, 3]])
    with rt.train():
        rt.model(input_ids=ids, labels=ids).loss.backward()
        assert rt.scheduler.segments["engine.weights"].residency is Residency.OFFLOADED
    after = rt.generate(PROMPTS, max_tokens=4, temperature=0)
    assert [c.token_ids for c in before] == [c.token_ids for c in after]
    assert after[0].weights_version == 0 and len(rt.publications) == 1
    rt.close()


def launched_with_a_copy_each():
    rt = launch(config=RuntimeConfig(weights="copy", offload=Offload.ALWAYS, kv_cache_bytes=MIB))
    rt.generate(PROMPTS, max_tokens=1)
    return rt


def copies(rt, name):
    return [span for span in rt.trace.spans if span.category == "copy" and span.name == name]


def test_weights_that_a_publication_replaces_do_not_come_back_from_the_host():
    rt, twin = launched_with_a_copy_each(), launch()
    twin.model.load_state_dict(rt.model.state_dict())
    for version in (1, 2):
        with rt.train():
            train_step(rt)
            assert segment(rt, "engine.weights").residency is Residency.OFFLOADED
        with twin.train():
            train_step(twin)
        mine, others = (one.generate(PROMPTS, max_tokens=4, temperature=0) for one in (rt, twin))
        assert [(c.token_ids, c.weights_version) for c in mine] == [(c.token_ids, version) for c in others]
        for one, other in zip(mine, others, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    assert len(copies(rt, "out engine.weights")) == 2 and not copies(rt, "back engine.weights")
    assert segment(rt, "engine.weights").host_bytes == 0, "the arena has their bytes again"
    with rt.train():  # without a step: they are compared, and nothing is published
        pass
    rt.generate(PROMPTS, max_tokens=1)
    assert len(copies(rt, "back engine.weights")) == 1
    rt.close()
    twin.close()


def test_a_publication_that_finds_no_room_leaves_an_engine_that_samples_from_nothing_old(monkeypatch):
    rt = launched_with_a_copy_each()
    with rt.train():
        train_step(rt)
    begin = type(segment(rt, "engine.weights")).begin

    def begin_but_for_weights(moved, target):
        if moved.name == "engine.weights" and target is Residency.RESIDENT:
            raise colo.BudgetError("no room", needed_bytes=2, free_bytes=1)
        return begin(moved, target)

    with monkeypatch.context() as patch, pytest.raises(colo.BudgetError, match="no room"):
        patch.setattr(type(segment(rt, "engine.weights")), "begin", begin_but_for_weights)
        rt.generate(PROMPTS)
    assert rt.engine.weights_version is None
    assert {c.weights_version for c in rt.generate(PROMPTS, max_tokens=2)} == {1}
    rt.close()


def test_an_interrupted_publication_poisons_the_engine(monkeypatch):
    model = AutoModelForCausalLM.from_config(qwen3())
    rt = colo.share(make_engine(torch.bfloat16), model, adamw(model.parameters()))
    with rt.train():
        train_step(rt)

    def interrupted(version):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(rt.transport, "transfer", interrupted)
        rt.generate([[1]])
    rt.engine.resume()
    with pytest.raises(colo.StaleWeights, match="publishing version 1 failed: KeyboardInterrupt"):
        rt.engine.generate([[1]], colo.SamplingParams())
    assert rt.generate([[1]])[0].weights_version == 1
    rt.close()


def test_weights_loaded_within_a_rollout_are_published_before_the_next_sample(rt):
    state = {name: torch.randn_like(t) for name, t in rt.model.state_dict().items()}
    with rt.rollout():
        rt.generate([[1, 2, 3]], max_tokens=1)
        rt.model.load_state_dict(state)
        inside = rt.generate([[1, 2, 3]], max_tokens=6, temperature=0)[0]
    with rt.rollout():
        after = rt.generate([[1, 2, 3]], max_tokens=6, temperature=0)[0]
    assert (inside.token_ids, inside.weights_version) == (after.token_ids, 1)


def test_writes_through_data_reach_the_next_rollout_shared_and_copied():
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_config(qwen3())
        rt = colo.share(make_engine(dtype), model, adamw(model.parameters()))
        before = rt.generate([[1, 2, 3]], max_tokens=4, temperature=0)[0]
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn_like(parameter))
        after = rt.generate([[1, 2, 3]], max_tokens=4, temperature=0)[0]
        with torch.no_grad():
            first = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1].log_softmax(-1).max()
        assert before.logprobs != after.logprobs
        assert abs(after.logprobs[0] - float(first)) < (1e-4 if dtype is torch.float32 else 0.5)
        rt.close()
