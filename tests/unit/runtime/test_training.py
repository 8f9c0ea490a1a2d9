"""Training through a runtime is training without it, and the engine samples from what the trainer writes."""

from dataclasses import replace

import pytest
import torch
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

from colo.config import Offload, RuntimeConfig
from colo.phases.phase import Phase, Residency
from colo.runtime import turns
from colo.trainer.master_weights import MasterWeights, fraction_of
from colo.units import MIB
from tests.runtimes import ALWAYS, PROMPTS, adamw, launch, qwen3, segment, train_step


def engine_logits(rt, ids):
    with torch.no_grad():
        return rt.engine.module(input_ids=torch.tensor([ids])).logits


def test_what_the_trainer_writes_is_what_the_engine_samples_from_and_nothing_is_sent(rt):
    with rt.rollout():
        before = rt.generate(PROMPTS, n=2, max_tokens=4, temperature=0)
    for _ in range(3):
        with rt.train():
            train_step(rt)
    with rt.rollout():
        after = rt.generate(PROMPTS, n=2, max_tokens=4, temperature=0)
    assert [c.weights_version for c in before] == [0] * 6
    assert [c.weights_version for c in after] == [3] * 6
    assert [c.token_ids for c in before] != [c.token_ids for c in after]
    assert rt.bytes_synced == 0
    assert rt.transport.name == "shared"
    ids = [1, 2, 3, 4]
    with torch.no_grad():
        trainer = rt.model.eval()(input_ids=torch.tensor([ids])).logits
    assert torch.equal(trainer, engine_logits(rt, ids))


def test_log_probabilities_of_engine_and_trainer_agree_before_and_after_training(rt):
    for _ in range(2):
        with rt.rollout():
            completion = rt.generate([[5, 6, 7]], max_tokens=8, seed=1)[0]
        ids = torch.tensor([[*completion.prompt_token_ids, *completion.token_ids]])
        with torch.no_grad():
            logprobs = rt.model(input_ids=ids).logits[0, 2:-1].float().log_softmax(-1)
        expected = logprobs.gather(-1, ids[0, 3:, None]).squeeze(-1)
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)
        with rt.train():
            train_step(rt)


def test_training_through_the_runtime_is_bit_equal_to_training_without_it():
    torch.manual_seed(3)
    limited = RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS, region_bytes=50_000)
    rt = launch(config=limited)
    twin = AutoModelForCausalLM.from_config(qwen3())
    twin.load_state_dict({name: p.detach().clone() for name, p in rt.model.state_dict().items()})
    optimizer = adamw(twin.parameters())
    for step in range(3):
        ids = torch.tensor([[step, 2, 3, 4, 5]])
        with rt.rollout():
            rt.generate(PROMPTS, max_tokens=2)
        with rt.train():
            train_step(rt, ids.tolist())
        twin(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, mine), (_, other) in zip(rt.model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(mine, other), name
    rt.close()


def test_a_plain_loop_that_zeroes_first_and_knows_no_phases_is_bit_equal_whatever_leaves():
    for offload in ("auto", "always"):
        config = RuntimeConfig(kv_cache_bytes=MIB, offload=offload)
        rt = launch(config=config, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1))
        twin = AutoModelForCausalLM.from_config(qwen3())
        twin.load_state_dict(rt.model.state_dict())
        twins = torch.optim.SGD(twin.parameters(), lr=0.1)
        for step in range(3):
            rt.generate(PROMPTS, max_tokens=2)
            ids = torch.tensor([[step, 2, 3, 4, 5]])
            for model, optimizer in ((rt.model, rt.optimizer), (twin, twins)):
                optimizer.zero_grad()
                model(input_ids=ids, labels=ids).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(rt.model.parameters(), twin.parameters(), strict=True))
        rt.close()


def test_what_is_unfrozen_later_is_watched_too():
    rt = launch()
    rt.model.requires_grad_(False)
    rt.model.model.norm.requires_grad_(True)
    with rt.train():
        train_step(rt)
    rt.model.requires_grad_(True)
    ids = torch.tensor([[1, 2, 3]])
    with rt.train():
        train_step(rt)
        rt.model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in rt.model.parameters())
    rt.close()


def test_a_step_does_not_wait_for_the_count_of_weights_that_it_has_changed(monkeypatch):
    read = []
    monkeypatch.setattr(turns, "fraction_of", lambda *changes: read.append(changes) or fraction_of(*changes))
    rt = launch(dtype=torch.bfloat16, optimizer=MasterWeights(lambda ps: AdamW(ps, lr=1e-5)))
    for _ in range(2):
        with rt.train():
            train_step(rt)
    assert read == []
    assert "of the 16-bit weights" in rt.report().facts["changed"] and len(read) == 2
    rt.close()


def test_master_weights_train_a_bf16_model_and_leave_with_the_optimizer():
    rt = launch(
        dtype=torch.bfloat16,
        optimizer=MasterWeights(lambda ps: AdamW(ps, lr=1e-5)),
        config=RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS),
    )
    for _ in range(3):
        with rt.train():
            train_step(rt)
        with rt.rollout():
            rt.generate(PROMPTS, max_tokens=2)
        assert segment(rt, "trainer.master_weights").residency is Residency.OFFLOADED
    assert 0 < rt.trace.metrics["changed_fraction"][-1] < 1
    assert rt.bytes_synced == 0
    rt.close()


def test_what_you_have_put_into_evaluation_mode_stays_there(rt):
    frozen = rt.model.model.layers[0].eval()
    rt.generate(PROMPTS, max_tokens=4)
    with rt.train():
        assert "mismatch_sampled" in rt.trace.metrics
        assert rt.model.training and rt.model.model.layers[1].training
        assert not any(module.training for module in frozen.modules())


def test_steps_outside_train_are_a_train_phase_of_their_own(rt):
    ids = torch.tensor([[1, 2, 3]])
    rt.model(input_ids=ids, labels=ids).loss.backward()
    rt.optimizer.step()
    assert (rt.phase, rt.weights_version) == (Phase.IDLE, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rollout_may_lie_within_a_block_of_inference_mode(dtype):
    """Also one that makes the runtime take memory, and bring gradients of an accumulation back."""

    def make(params):
        return MasterWeights(lambda ps: AdamW(ps, lr=1e-2))(params)

    rt = launch(optimizer=make, dtype=dtype, config=replace(ALWAYS, accumulation_steps=2))
    twin = AutoModelForCausalLM.from_config(qwen3(), dtype=dtype)
    twin.load_state_dict({name: p.detach().clone() for name, p in rt.model.state_dict().items()})
    optimizer = make(twin.parameters())
    ids = torch.tensor([[1, 2, 3]])
    for _ in range(3):
        for _ in range(2):
            with rt.train():
                rt.model(input_ids=ids, labels=ids).loss.backward()
            with torch.inference_mode(), rt.rollout():
                rt.generate([[1, 2]], max_tokens=2)
            twin(input_ids=ids, labels=ids).loss.backward()
        with rt.train():
            rt.optimizer.step()
        rt.optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    with torch.inference_mode():
        rt.generate([[1, 2]], max_tokens=2)
    assert all(torch.equal(a, b) for a, b in zip(rt.model.parameters(), twin.parameters(), strict=True))
    with torch.inference_mode():
        rt.close()
    assert not any(t.is_inference() for s in rt.optimizer.state.values() for t in s.values() if torch.is_tensor(t))


@pytest.mark.parametrize("options", [{"offload": "always"}, {"optimizer": "streamed"}, {"weights": "copy"}])
def test_the_loops_default_device_is_not_where_colo_keeps_what_belongs_on_the_host(options):
    """The device that has no bytes stands for a GPU, as of `torch.set_default_device`."""

    def trained(default_device):
        torch.manual_seed(3)
        rt, ids = launch(config=RuntimeConfig(kv_cache_bytes=MIB, **options)), torch.tensor([[1, 2, 3, 4]])
        found = []
        with torch.device(default_device):
            for _ in range(2):
                found += [c.token_ids for c in rt.generate(PROMPTS, n=2, max_tokens=4, seed=1)]
                with rt.train():
                    rt.model(input_ids=ids, labels=ids).loss.backward()
                    rt.optimizer.step()
                    rt.optimizer.zero_grad()
            found += [c.token_ids for c in rt.generate(PROMPTS, max_tokens=4, temperature=0)]
            rt.close()
        return found

    assert trained("meta") == trained("cpu")
