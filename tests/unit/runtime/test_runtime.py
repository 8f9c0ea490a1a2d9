"""What users do with a runtime, through the public API, on a CPU that plays a small device."""

import copy
import gc
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, Qwen3Config

import colo
from colo.config import Offload, RuntimeConfig
from colo.engines.embedded.layout import empty_model
from colo.engines.embedded.torch import TorchEngine
from colo.memory import region as regions
from colo.memory.offload import Mover
from colo.phases.phase import Phase, Residency
from colo.trainer.master_weights import MasterWeights
from colo.units import MIB

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]


def qwen3(**changes):
    options = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "eos_token_id": None,
    }
    return Qwen3Config(**(options | changes))


def adamw(params):
    return AdamW(params, lr=1e-2)


def launch(**options):
    options = {"optimizer": adamw, "config": RuntimeConfig(kv_cache_bytes=MIB), "device": "cpu"} | options
    return colo.launch(qwen3(), **options)


def train_step(rt, tokens=((1, 2, 3, 4),)):
    ids = torch.tensor(tokens)
    loss = rt.model(input_ids=ids, labels=ids).loss
    loss.backward()
    rt.optimizer.step()
    rt.optimizer.zero_grad()
    return float(loss.detach())


def engine_logits(rt, ids):
    with torch.no_grad():
        return rt.engine.module(input_ids=torch.tensor([ids])).logits


def segment(rt, name):
    return rt.scheduler.segments[name]


@pytest.fixture
def rt():
    runtime = launch()
    yield runtime
    runtime.close()


# ---- the job -------------------------------------------------------------------------------------------------------


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


def test_gradients_of_a_skipped_step_are_zeroed_for_good_after_a_rollout():
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload="always"))
    ids = torch.tensor([[1, 2, 3]])
    with rt.train():
        (rt.model(input_ids=ids, labels=ids).loss * float("nan")).backward()
    with rt.rollout():
        assert segment(rt, "trainer.gradients").residency is Residency.OFFLOADED
    assert all(p.grad.isnan().any() for p in rt.model.parameters())
    rt.optimizer.zero_grad()
    with rt.train():
        train_step(rt)
    assert all(p.isfinite().all() for p in rt.model.parameters())
    rt.close()


def test_calls_of_several_threads_wait_for_each_other(rt):
    alone = [rt.generate([prompt], max_tokens=8, temperature=0)[0].token_ids for prompt in PROMPTS]
    with rt.rollout(), ThreadPoolExecutor(len(PROMPTS)) as pool:
        calls = [pool.submit(rt.generate, [prompt], max_tokens=8, temperature=0) for prompt in PROMPTS * 4]
        assert [call.result()[0].token_ids for call in calls] == alone * 4


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


def test_a_pass_through_what_was_unfrozen_before_a_step_brings_parked_state_back():
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS))
    norm, embedding = rt.model.model.norm, rt.model.model.embed_tokens
    rt.model.requires_grad_(False)
    norm.requires_grad_(True)
    with rt.train():
        train_step(rt)
    rt.generate([[1]], max_tokens=1)
    norm.requires_grad_(False)
    embedding.requires_grad_(True)
    ids = torch.tensor([[1, 2, 3]])
    with rt.train():
        assert segment(rt, "trainer.optimizer").residency is Residency.OFFLOADED
        rt.model(input_ids=ids, labels=ids).loss.backward()
        assert segment(rt, "trainer.optimizer").residency is Residency.RESIDENT
    rt.close()


def test_state_that_came_back_stays_where_no_step_was_taken():
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS))
    with rt.train():
        train_step(rt)
    assert segment(rt, "trainer.optimizer").residency is Residency.OFFLOADED, "a rollout is what follows a step"
    ids = torch.tensor([[1, 2, 3]])
    with rt.train():
        rt.model(input_ids=ids, labels=ids).loss.backward()
    assert segment(rt, "trainer.optimizer").residency is Residency.RESIDENT
    rt.close()


def test_an_engines_own_call_after_one_of_the_runtimes_has_what_was_written_between(rt):
    with rt.rollout():
        params = rt.engine.sampling_params(max_tokens=2)
        rt.generate(PROMPTS, params)
        with torch.no_grad():
            rt.model.model.norm.weight.mul_(2)
        assert rt.engine.generate(PROMPTS, params)[0].weights_version == rt.weights_version == 1


@pytest.mark.parametrize("lora", [False, True])
def test_an_error_of_numbers_names_the_weight_that_is_to_blame_or_is_raised_as_it_is(lora, monkeypatch):
    rt = lora_runtime() if lora else launch()

    def fail(*args, **kwargs):
        raise FloatingPointError("somewhere")

    monkeypatch.setattr(rt.engine, "generate", fail)
    with pytest.raises(FloatingPointError, match="^somewhere$"):
        rt.generate([[1]], max_tokens=1)
    name = next(n for n, _ in rt.model.named_parameters() if ("lora_B" in n) is lora)
    rt.model.get_parameter(name).data.view(-1)[:2] = float("nan")
    named = (
        r"q_proj.*has 2 values that are NaN" if lora else r"embed_tokens\.weight \(100, 64\) has 2 values that are NaN"
    )
    with pytest.raises(FloatingPointError, match=named):
        rt.generate([[1]], max_tokens=1)
    rt.close()


def test_completions_are_compared_once_and_only_with_the_weights_that_they_were_sampled_from(rt):
    rt.generate(PROMPTS, max_tokens=4)
    for _ in range(2):
        with rt.train():
            assert len(rt.trace.metrics["mismatch_sampled"]) == 1
    rt.generate(PROMPTS, max_tokens=4)
    with torch.no_grad():
        rt.model.model.norm.weight.mul_(2)
    with rt.train():
        assert len(rt.trace.metrics["mismatch_sampled"]) == 1
    assert rt.weights_version == 1


def test_memory_is_recorded_as_an_engine_generates_and_as_an_optimizer_steps(rt):
    with rt.rollout():
        before = len(rt.trace.samples)
        rt.generate([[1]], max_tokens=1)
        assert len(rt.trace.samples) > before
    with rt.train():
        rt.model(input_ids=torch.tensor([[1, 2]])).logits.sum().backward()
        before = len(rt.trace.samples)
        rt.optimizer.step()
        assert rt.trace.samples[-1].segments["trainer.optimizer"] > 0 and len(rt.trace.samples) > before


def test_a_baseline_without_the_adapter_is_not_compared_with_the_model_that_has_it():
    rt = lora_runtime()
    with rt.train():
        train_step(rt)
    with rt.model.disable_adapter(), rt.rollout():
        rt.generate(PROMPTS, max_tokens=4)
    with rt.train():
        pass
    assert "mismatch_sampled" not in rt.trace.metrics
    rt.close()


@pytest.mark.parametrize("also", ["filtered", "without the adapter"])
def test_samples_of_another_distribution_do_not_take_the_place_of_those_to_compare(also):
    rt = lora_runtime()
    with rt.rollout():
        rt.generate(PROMPTS, max_tokens=4)
        if also == "filtered":
            rt.generate(PROMPTS, max_tokens=4, top_p=0.9)
        else:
            with rt.model.disable_adapter():
                rt.generate(PROMPTS, max_tokens=4)
    with rt.train():
        pass
    assert rt.trace.metrics["mismatch_sampled"][-1] < 1e-4
    rt.close()


def test_what_is_closed_lets_go_of_the_engines_memory_though_it_is_still_a_variable():
    rt = launch()
    memory = weakref.ref(next(iter(rt.transport._aliases.values())).untyped_storage())
    rt.close()
    gc.collect()
    assert memory() is None


def test_a_small_device_peaks_at_the_larger_phase_and_not_at_the_sum():
    model_bytes = sum(p.numel() * 4 for p in AutoModelForCausalLM.from_config(qwen3()).parameters())
    kv_bytes = 2 * model_bytes
    limit_bytes = int(4.2 * model_bytes)  # train: weights, gradients, two moments; rollout: weights, KV cache
    rt = launch(config=RuntimeConfig(kv_cache_bytes=kv_bytes, device_limit_bytes=limit_bytes))
    for _ in range(3):
        with rt.rollout():
            rt.generate(PROMPTS, max_tokens=2)
        assert segment(rt, "trainer.optimizer").device_bytes == 0
        with rt.train():
            train_step(rt)
            assert segment(rt, "engine.kv_cache").device_bytes == 0
    rollout, train = rt.trace.peak_bytes(Phase.ROLLOUT), rt.trace.peak_bytes(Phase.TRAIN)
    assert rt.trace.peak_bytes() <= limit_bytes
    assert rt.trace.peak_bytes() <= 1.05 * max(rollout, train)
    assert rt.trace.peak_bytes() < 0.75 * (3 * model_bytes + 4 * model_bytes)
    rt.close()


def test_what_fits_stays_where_it_is(rt):
    for _ in range(2):
        with rt.rollout():
            rt.generate(PROMPTS, max_tokens=2)
        with rt.train():
            train_step(rt)
    assert not [span for span in rt.trace.spans if span.category == "copy"]


def test_a_phase_never_holds_more_than_its_plan_promised():
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, device_limit_bytes=3 * MIB))
    for _ in range(2):
        with rt.rollout():
            rt.generate(PROMPTS, max_tokens=2)
            assert rt.trace.peak_bytes(Phase.ROLLOUT) <= rt.scheduler.promised_bytes <= 3 * MIB
        with rt.train():
            train_step(rt)
            assert rt.trace.peak_bytes(Phase.TRAIN) <= rt.scheduler.promised_bytes <= 3 * MIB
    rt.close()


def test_a_hundred_cycles_grow_nothing():
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS))
    readings = []
    for cycle in range(100):
        with rt.rollout():
            rt.generate([[1]], max_tokens=1)
        with rt.train():
            train_step(rt)
        if cycle in (2, 99):
            gc.collect()
            tensors = sum(1 for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
            arena = rt.engine.mover.arena
            readings.append((arena.pinned_bytes, arena.used_bytes, rt.trace.samples[-1].total_bytes, tensors))
    assert readings[0][:3] == readings[1][:3]
    assert readings[1][3] <= readings[0][3] + 2
    rt.close()


def test_the_record_of_a_long_run_stops_growing(monkeypatch):
    monkeypatch.setattr("colo.phases.trace.MAX_SPANS", 60)
    monkeypatch.setattr("colo.phases.trace.MAX_SAMPLES", 60)
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS))

    def held_after(cycles):
        for _ in range(cycles):
            with rt.rollout():
                rt.generate([[1]], max_tokens=1)
            with rt.train():
                train_step(rt)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = held_after(30)
        per_cycle_bytes = (held_after(50) - before) / 50
    finally:
        tracemalloc.stop()
    assert per_cycle_bytes < 2048, "a publication, a few metrics, and what others keep; the record is three times that"
    assert max(len(rt.trace.spans), len(rt.trace.samples)) <= 60
    assert "since" in str(rt.report())
    rt.close()


def test_parked_state_comes_back_beside_the_last_backward_pass():
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS, accumulation_steps=2))
    with rt.train():
        train_step(rt)
    with rt.rollout():
        rt.generate([[1]], max_tokens=1)
    ids = torch.tensor([[1, 2, 3]])
    with rt.train():
        optimizer = segment(rt, "trainer.optimizer")
        rt.model(input_ids=ids, labels=ids).loss.backward()
        assert optimizer.residency is Residency.OFFLOADED, "one more backward pass is to come"
        rt.model(input_ids=ids, labels=ids).loss.backward()
        assert optimizer.residency is Residency.RESIDENT
        rt.optimizer.step()
    rt.close()


def test_a_step_without_a_backward_pass_has_the_state_that_a_rollout_parked():
    rt, twin = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload="always")), launch()
    twin.model.load_state_dict(rt.model.state_dict())
    for made in (rt, twin):
        for step in range(3):
            with made.rollout():
                made.generate(PROMPTS, max_tokens=1)
            with made.train():
                assert made is twin or step == 0 or segment(made, "trainer.optimizer").residency is Residency.OFFLOADED
                for number, parameter in enumerate(made.model.parameters()):
                    parameter.grad = torch.full_like(parameter, number + step)
                made.optimizer.step()
                made.optimizer.zero_grad()
    assert_same_weights(rt.model, twin.model)
    rt.close()
    twin.close()


def test_gradients_are_kept_as_without_colo_until_the_loop_drops_them(rt):
    ids = torch.tensor([[1, 2, 3]])
    with rt.train():
        rt.model(input_ids=ids, labels=ids).loss.backward()
    kept = [p.grad.clone() for p in rt.model.parameters()]
    with rt.rollout():
        rt.generate([[1]], max_tokens=1)
    with rt.train():
        assert all(torch.equal(a, p.grad) for a, p in zip(kept, rt.model.parameters(), strict=True))
        rt.optimizer.step()
    assert all(torch.equal(a, p.grad) for a, p in zip(kept, rt.model.parameters(), strict=True))


def test_gradients_that_came_after_the_last_step_are_kept(rt):
    ids = torch.tensor([[1, 2, 3]])
    with rt.train():
        train_step(rt)
        rt.model(input_ids=ids, labels=ids).loss.backward()
        kept = [p.grad.clone() for p in rt.model.parameters()]
    assert all(torch.equal(a, p.grad) for a, p in zip(kept, rt.model.parameters(), strict=True))


def test_accumulation_may_go_on_over_several_train_blocks_and_still_prefetches():
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS, accumulation_steps=2))
    with rt.train():
        train_step(rt)
    ids = torch.tensor([[1, 2, 3]])
    for is_last in (False, True):
        with rt.rollout():
            rt.generate([[1]], max_tokens=1)
        with rt.train():
            rt.model(input_ids=ids, labels=ids).loss.backward()
            assert (segment(rt, "trainer.optimizer").residency is Residency.RESIDENT) is is_last
    rt.close()


def test_unfinished_gradients_leave_a_full_device_and_the_step_sees_them():
    model_bytes = sum(p.numel() * 4 for p in AutoModelForCausalLM.from_config(qwen3()).parameters())
    config = RuntimeConfig(kv_cache_bytes=3 * model_bytes, device_limit_bytes=int(4.2 * model_bytes))
    rt, twin = launch(config=config), AutoModelForCausalLM.from_config(qwen3())
    twin.load_state_dict({name: p.detach().clone() for name, p in rt.model.state_dict().items()})
    optimizer = adamw(twin.parameters())
    first, second = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])
    with rt.train():
        rt.model(input_ids=first, labels=first).loss.backward()
    with rt.rollout():
        assert segment(rt, "trainer.gradients").device_bytes == 0
    with rt.train():
        rt.model(input_ids=second, labels=second).loss.backward()
        rt.optimizer.step()
    for ids in (first, second):
        twin(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    for mine, other in zip(rt.model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)
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


def test_checkpoints_can_be_taken_in_every_phase():
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS))
    with rt.train():
        train_step(rt)
        in_train = rt.optimizer.state_dict()
    idle = rt.optimizer.state_dict()
    with rt.rollout():
        in_rollout = rt.optimizer.state_dict()
        weights = {name: t.clone() for name, t in rt.model.state_dict().items()}
    for index in in_train["state"]:
        for other in (idle, in_rollout):
            assert torch.equal(in_train["state"][index]["exp_avg"], other["state"][index]["exp_avg"])
    assert all(torch.equal(weights[name], t) for name, t in rt.model.state_dict().items())
    rt.close()


# ---- share ---------------------------------------------------------------------------------------------------------


def make_engine(dtype=torch.float32, config=None):
    mover = Mover(torch.device("cpu"))
    return TorchEngine(config or qwen3(), device="cpu", dtype=dtype, kv_cache_bytes=MIB, mover=mover)


def test_sharing_your_own_model_keeps_its_parameters_objects_values_and_optimizer():
    model = AutoModelForCausalLM.from_config(qwen3())
    optimizer = adamw(model.parameters())
    objects = list(model.parameters())
    values = [p.detach().clone() for p in objects]
    rt = colo.share(make_engine(), model, optimizer)
    assert [id(p) for p in model.parameters()] == [id(p) for p in objects]
    assert all(torch.equal(a, p) for a, p in zip(values, objects, strict=True))
    assert rt.transport.name == "shared"
    with rt.train():
        train_step(rt)
    trained = [p.detach().clone() for p in objects]
    rt.close()
    assert all(torch.equal(a, p) for a, p in zip(trained, model.parameters(), strict=True))
    ids = torch.tensor([[1, 2, 3]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


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


# ---- never silently stale ------------------------------------------------------------------------------------------


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


def test_one_replaced_parameter_is_enough(rt):
    layer = rt.model.model.layers[1].mlp
    layer.up_proj.weight = torch.nn.Parameter(layer.up_proj.weight.detach().clone())
    with pytest.raises(colo.StaleWeights, match=r"model.layers.1.mlp.up_proj.weight is no longer"):
        rt.generate([[1]])


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


# ---- LoRA ----------------------------------------------------------------------------------------------------------


def lora_runtime(**options):
    return launch(lora=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False), **options)


def test_lora_trains_an_adapter_over_the_shared_base_and_the_engine_applies_it():
    rt = lora_runtime()
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
    rt = lora_runtime()
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


def test_a_users_own_peft_model_is_shared():
    model = get_peft_model(AutoModelForCausalLM.from_config(qwen3()), LoraConfig(r=2, target_modules=["q_proj"]))
    rt = colo.share(make_engine(), model, adamw([p for p in model.parameters() if p.requires_grad]))
    assert rt.transport.name == "shared"
    with rt.train():
        train_step(rt)
    assert rt.generate([[1]])[0].adapter == "policy@1"
    rt.close()


# ---- misuse --------------------------------------------------------------------------------------------------------


def test_training_inside_rollout_says_what_to_do(rt):
    ids = torch.tensor([[1, 2, 3]])
    with rt.rollout():
        with pytest.raises(colo.PhaseError, match=r"backward\(\) inside rollout\(\).*with rt.train\(\)"):
            rt.model(input_ids=ids, labels=ids).loss.backward()
        with pytest.raises(colo.PhaseError, match=r"optimizer.step\(\) inside rollout\(\)"):
            rt.optimizer.step()
    assert rt.weights_version == 0


def test_generating_inside_train_says_what_to_do(rt):
    with rt.train(), pytest.raises(colo.PhaseError, match=r"generate\(\) inside train\(\).*with rt.rollout\(\)"):
        rt.generate([[1]])


@pytest.mark.parametrize("outer", ["rollout", "train"])
@pytest.mark.parametrize("inner", ["rollout", "train"])
def test_phases_do_not_nest(rt, outer, inner):
    with getattr(rt, outer)():
        with pytest.raises(colo.PhaseError, match=rf"{inner}\(\) inside {outer}\(\): phases do not nest"):
            with getattr(rt, inner)():
                pytest.fail("entered")
        assert rt.phase == outer
    assert rt.phase is Phase.IDLE


def test_phases_are_entered_and_left_without_a_block(rt):
    for phase in (Phase.ROLLOUT, Phase.ROLLOUT, Phase.TRAIN, Phase.TRAIN, Phase.ROLLOUT, None, None):
        rt.enter(phase)
        assert rt.phase is (phase or Phase.IDLE)
        if phase is Phase.ROLLOUT:
            assert len(rt.generate([[1]], max_tokens=1)) == 1
    assert [span.name for span in rt.trace.spans if span.category == "phase"][1:] == ["rollout", "train", "rollout"]
    rt.enter("rollout")
    assert len(rt.generate([[1]], max_tokens=1)) == 1
    rt.enter("train")
    assert rt.phase is Phase.TRAIN
    for phase in (Phase.SYNC, Phase.IDLE, "generate"):
        with pytest.raises(ValueError, match=r"enter\(\) takes Phase.ROLLOUT, Phase.TRAIN or None"):
            rt.enter(phase)


def test_state_of_a_launched_model_goes_home_to_the_host_though_the_device_is_full(monkeypatch):
    rt = launch(config=RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS))
    with rt.train():
        train_step(rt)
    rt.generate([[1]], max_tokens=1)
    assert segment(rt, "trainer.optimizer").residency is Residency.OFFLOADED

    def full(region):
        raise colo.BudgetError("no room", needed_bytes=1, free_bytes=0)

    monkeypatch.setattr(regions.ResizedRegion, "_restore", full)
    rt.close()
    assert all(state["exp_avg"].any() for state in rt.optimizer.state.values())


def test_an_engine_is_not_recovered_inside_a_phase(rt):
    with (
        rt.rollout(),
        pytest.raises(colo.PhaseError, match=r"recover\(\) inside rollout\(\): .* leave the block"),
    ):
        rt.recover()


@pytest.mark.parametrize("engine", ["http://localhost:8000", object()])
def test_what_is_no_engine_is_refused_with_what_would_be(rt, engine):
    other = AutoModelForCausalLM.from_config(qwen3())
    with pytest.raises(TypeError, match=r"a vllm.LLM, an engine of colo's or colo.connect\(url\) first, not \w+"):
        colo.share(engine, other, AdamW(other.parameters()))


def test_a_model_has_one_runtime_at_a_time(rt):
    with pytest.raises(colo.PhaseError, match="has a runtime already"):
        colo.share(make_engine(), rt.model, rt.optimizer)
    with rt.train():
        train_step(rt)
    assert rt.generate([[1]])[0].weights_version == 1, "the first runtime is as it was"


def test_a_runtime_that_cannot_be_built_leaves_model_and_optimizer_as_they_were():
    config = qwen3(tie_word_embeddings=False)
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=2, target_modules=["embed_tokens"]))
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(colo.Unsupported, match="adapted as an embedding"):
        colo.share(make_engine(config=config), model, optimizer)
    ids = torch.tensor([[1, 2, 3]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    rt = colo.launch(qwen3(), device="cpu", config=RuntimeConfig(kv_cache_bytes=MIB))
    rt.close()


def test_nothing_works_after_close_and_closing_twice_is_fine():
    rt = launch()
    with rt.train():
        train_step(rt)
    rt.close()
    rt.close()
    assert rt.engine.before_generate is None
    for use in (lambda: rt.generate([[1]]), lambda: rt.rollout().__enter__(), lambda: rt.train().__enter__()):
        with pytest.raises(colo.PhaseError, match="the runtime is closed"):
            use()
    ids = torch.tensor([[1, 2, 3]])
    rt.model(input_ids=ids, labels=ids).loss.backward()
    rt.optimizer.step()


def test_closing_without_room_for_the_state_loses_nothing_and_can_be_repeated(monkeypatch):
    model = AutoModelForCausalLM.from_config(qwen3())
    twin = copy.deepcopy(model)
    optimizer, other = adamw(model.parameters()), adamw(twin.parameters())
    rt = colo.share(make_engine(), model, optimizer, config=RuntimeConfig(offload=Offload.ALWAYS))
    ids = torch.tensor([[1, 2, 3]])

    def step(net, opt):
        net(input_ids=ids, labels=ids).loss.backward()
        opt.step()
        opt.zero_grad()

    step(twin, other)
    with rt.train():
        step(model, optimizer)
    rt.generate(PROMPTS)
    assert rt.scheduler.segments["trainer.optimizer"].residency is Residency.OFFLOADED

    def full(region):
        raise colo.BudgetError("no room", needed_bytes=1, free_bytes=0)

    with monkeypatch.context() as patch, pytest.raises(colo.BudgetError, match="no room"):
        patch.setattr(regions.ResizedRegion, "_restore", full)
        rt.close()
    assert rt.generate(PROMPTS)[0].weights_version == 1, "it is open as before"
    rt.close()
    step(twin, other)
    step(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


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


def test_what_you_have_put_into_evaluation_mode_stays_there(rt):
    frozen = rt.model.model.layers[0].eval()
    rt.generate(PROMPTS, max_tokens=4)
    with rt.train():
        assert "mismatch_sampled" in rt.trace.metrics
        assert rt.model.training and rt.model.model.layers[1].training
        assert not any(module.training for module in frozen.modules())


@pytest.mark.parametrize("verb", ["rollout", "train"])
def test_closing_leaves_the_phase_first_and_its_block_has_nothing_left_to_do(rt, verb):
    with getattr(rt, verb)():
        rt.close()
        assert rt.phase is Phase.IDLE
    with pytest.raises(colo.PhaseError, match="closed"):
        getattr(rt, verb)().__enter__()


def test_an_exception_inside_a_phase_leaves_it_and_the_next_one_works(rt):
    for verb in (rt.rollout, rt.train):
        with pytest.raises(KeyError):
            with verb():
                raise KeyError("user")
        assert rt.phase is Phase.IDLE
    with rt.train():
        train_step(rt)
    assert rt.generate([[1]])[0].weights_version == 1


def test_steps_outside_train_are_a_train_phase_of_their_own(rt):
    ids = torch.tensor([[1, 2, 3]])
    rt.model(input_ids=ids, labels=ids).loss.backward()
    rt.optimizer.step()
    assert (rt.phase, rt.weights_version) == (Phase.IDLE, 1)


def test_a_rollout_that_does_not_fit_changes_nothing():
    model_bytes = sum(p.numel() * 4 for p in AutoModelForCausalLM.from_config(qwen3()).parameters())
    config = RuntimeConfig(
        kv_cache_bytes=3 * model_bytes, device_limit_bytes=int(4.5 * model_bytes), offload=Offload.NEVER
    )
    rt = launch(config=config)
    with rt.train():
        train_step(rt)
    before = {name: s.residency for name, s in rt.scheduler.segments.items()}
    with pytest.raises(colo.BudgetError, match=r"phase rollout needs .*\n.*ledger of the device") as caught:
        with rt.rollout():
            pytest.fail("entered")
    assert caught.value.missing_bytes > 0
    assert {name: s.residency for name, s in rt.scheduler.segments.items()} == before
    with rt.train():
        train_step(rt)
    rt.close()


def test_weights_and_cache_that_cannot_fit_are_refused_before_the_engine_is_built():
    with pytest.raises(colo.BudgetError, match="do not fit in 512.00 KiB: pass a smaller kv_cache_bytes"):
        launch(config=RuntimeConfig(kv_cache_bytes=MIB, device_limit_bytes=512 * 1024))


def test_texts_need_a_tokenizer(rt):
    with pytest.raises(ValueError, match="the runtime has no tokenizer"):
        rt.generate(["hello"])


def test_cuda_is_refused_with_advice_where_there_is_none():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(colo.Unsupported, match="colo doctor"):
        launch(device="cuda")


# ---- report --------------------------------------------------------------------------------------------------------


def test_the_report_names_engine_weights_peaks_and_reasons(rt, tmp_path):
    with rt.rollout():
        rt.generate(PROMPTS, max_tokens=2)
    with rt.train():
        train_step(rt)
    rt.log(reward=0.5)
    text = str(rt.report())
    for words in ("torch on cpu", "shared: all", "rollout", "no state of the trainer had to leave", "reward"):
        assert words in text
    assert rt.report().to_json()["facts"]["engine"] == "torch on cpu: transformers in this process"
    page = rt.plot(tmp_path / "run.html").read_text()
    assert page.startswith("<!doctype html>") and "engine.kv_cache" in page
    with pytest.raises(ValueError, match="ends in .html or .png"):
        rt.plot(tmp_path / "run.txt")


# ---- what a newcomer broke -----------------------------------------------------------------------------------------


def parked_gradients():
    """A runtime whose gradients of one block were parked by a rollout, its plain twin, and a batch for each block."""
    rt = launch(optimizer=lambda ps: torch.optim.SGD(ps, lr=1.0), config=ALWAYS)
    twin = AutoModelForCausalLM.from_config(qwen3())
    twin.load_state_dict({name: p.detach().clone() for name, p in rt.model.state_dict().items()})
    first, second = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])
    with rt.train():
        rt.model(input_ids=first, labels=first).loss.backward()
    with rt.rollout():
        assert segment(rt, "trainer.gradients").residency is Residency.OFFLOADED
    return rt, twin, first, second


ALWAYS = RuntimeConfig(kv_cache_bytes=MIB, offload=Offload.ALWAYS)


def assert_same_weights(model, twin):
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)


def test_zero_grad_clears_gradients_that_a_rollout_had_parked():
    rt, twin, _, second = parked_gradients()
    with rt.train():
        rt.optimizer.zero_grad()
        rt.model(input_ids=second, labels=second).loss.backward()
        rt.optimizer.step()
    twin(input_ids=second, labels=second).loss.backward()
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert_same_weights(rt.model, twin)
    rt.close()


def test_clipping_sees_gradients_that_a_rollout_had_parked():
    rt, twin, first, second = parked_gradients()
    with rt.train():
        rt.model(input_ids=second, labels=second).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(rt.model.parameters(), 0.1)
        rt.optimizer.step()
    for ids in (first, second):
        twin(input_ids=ids, labels=ids).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert torch.allclose(norm, expected)
    assert_same_weights(rt.model, twin)
    rt.close()


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


def test_an_engine_and_an_optimizer_have_one_runtime_at_a_time_too(rt):
    other = AutoModelForCausalLM.from_config(qwen3())
    with pytest.raises(colo.PhaseError, match="this engine has a runtime already"):
        colo.share(rt.engine, other, adamw(other.parameters()))
    with pytest.raises(colo.PhaseError, match="this optimizer has a runtime already"):
        colo.share(make_engine(), other, rt.optimizer)
    assert colo.Runtime.of(rt.model) is colo.Runtime.of(rt.engine) is rt
    with pytest.raises(ValueError, match="has no open runtime"):
        colo.Runtime.of(other)


def test_an_optimizer_of_something_else_is_refused_before_anything_moves():
    model, other = (AutoModelForCausalLM.from_config(qwen3()) for _ in range(2))
    address = next(model.parameters()).data_ptr()
    with pytest.raises(colo.Unsupported, match="parameters of the optimizer are not the model's"):
        colo.share(make_engine(), model, adamw(other.parameters()))
    assert next(model.parameters()).data_ptr() == address


def test_weights_that_are_packed_are_refused_before_anything_moves():
    class Params4bit(torch.nn.Parameter):
        """Stands in for that of bitsandbytes, which runs on a GPU."""

    model = AutoModelForCausalLM.from_config(qwen3())
    address = next(model.parameters()).data_ptr()
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = Params4bit(layer.weight.data, requires_grad=False)
    with pytest.raises(colo.Unsupported, match=r"1 weights are quantized by bitsandbytes, .*down_proj.* 16 bits"):
        colo.share(make_engine(), model, adamw(p for p in model.parameters() if p.requires_grad))
    assert next(model.parameters()).data_ptr() == address


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


def test_the_active_adapter_is_the_one_that_is_applied():
    rt = lora_runtime(config=ALWAYS)
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


def test_a_callers_autocast_does_not_change_what_is_sampled(rt):
    plain = rt.generate([[1, 2, 3]], max_tokens=8, temperature=0)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rt.generate([[1, 2, 3]], max_tokens=8, temperature=0)[0].logprobs == plain.logprobs


def test_one_prompt_is_not_taken_for_many(rt):
    for prompt in ("1+2=", [1, 2, 3]):
        with pytest.raises(TypeError, match=r"prompts is a list of prompts.*pass \[prompt\] for one"):
            rt.generate(prompt)
    with pytest.raises(TypeError):
        rt.generate([[1.5]])


def test_a_prompt_longer_than_the_model_knows_is_refused(rt):
    with pytest.raises(ValueError, match="prompt 0 has 129 tokens, the model knows 128 positions"):
        rt.generate([[1] * 129], max_tokens=1)


def test_the_host_limit_holds_for_a_users_own_engine_too():
    model = AutoModelForCausalLM.from_config(qwen3())
    config = RuntimeConfig(host_limit_bytes=1000, offload=Offload.ALWAYS)
    rt = colo.share(make_engine(), model, adamw(model.parameters()), config=config)
    with rt.train():
        train_step(rt)
    with pytest.raises(colo.BudgetError, match="host arena in phase rollout needs"), rt.rollout():
        pytest.fail("entered")
    rt.close()


def test_a_compiled_model_keeps_its_names():
    model = AutoModelForCausalLM.from_config(qwen3())
    optimizer = adamw(model.parameters())
    rt = colo.share(make_engine(), torch.compile(model, backend="eager"), optimizer)
    assert rt.transport.name == "shared"
    rt.close()


# ---- weights that are no parameters --------------------------------------------------------------------------------


def glm(**changes):
    options = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 0,
        "norm_topk_prob": True,
    }
    own = qwen3().to_dict()
    sizes = {key: own[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
    return Glm4MoeConfig(**(sizes | heads | options | changes), eos_token_id=None, pad_token_id=None)


@pytest.fixture
def routed(tmp_path):
    """A model whose router has a correction bias, a buffer, that decides for other experts than its weights do."""
    model = AutoModelForCausalLM.from_config(glm()).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0, 3, generator=generator)
    model.save_pretrained(tmp_path)
    return model


@torch.no_grad()
def assert_samples_from(model, rt):
    (completion,) = rt.generate([[1, 2, 3, 4]], max_tokens=8, temperature=0)
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
    logprobs = model(input_ids=ids).logits[0, 3:-1].log_softmax(-1).gather(-1, ids[0, 4:, None])[:, 0]
    assert float((logprobs - torch.tensor(completion.logprobs)).abs().max()) < 1e-4


@pytest.mark.parametrize("weights", ["auto", "copy"])
@pytest.mark.parametrize("given", ["folder", "model"])
def test_buffers_of_a_checkpoint_are_the_engines_and_the_trainers(routed, tmp_path, weights, given):
    twin = copy.deepcopy(routed)
    source = str(tmp_path) if given == "folder" else routed
    rt = colo.launch(source, optimizer=adamw, device="cpu", config=RuntimeConfig(weights=weights, kv_cache_bytes=MIB))
    assert_samples_from(twin, rt)
    assert all(
        torch.equal(a, b) for a, b in zip(twin.state_dict().values(), rt.model.state_dict().values(), strict=True)
    )
    name, _ = next((n, b) for n, b in rt.model.named_buffers() if "correction_bias" in n)
    for model in (twin, rt.model):
        with torch.no_grad():
            model.get_buffer(name).neg_()
    assert_samples_from(twin, rt)
    assert rt.weights_version == 1
    rt.close()
    assert rt.model.get_buffer(name).device.type == "cpu"


def test_buffers_of_your_own_model_move_into_the_engine_and_home_again(routed):
    twin = copy.deepcopy(routed)
    engine = TorchEngine(glm(), device="cpu", dtype=torch.float32, kv_cache_bytes=MIB)
    rt = colo.share(engine, routed, adamw(routed.parameters()))
    assert rt.transport.name == "shared"
    assert_samples_from(twin, rt)
    rt.close()
    engine.close()
    assert all(torch.equal(a, b) for a, b in zip(twin.state_dict().values(), routed.state_dict().values(), strict=True))


def test_buffers_of_yours_are_no_weights_of_an_engines():
    model = AutoModelForCausalLM.from_config(qwen3())
    model.register_buffer("reward_mean", torch.zeros(1))
    model.model.layers[0].register_buffer("scale", torch.ones(1))
    rt = colo.share(make_engine(), model, adamw(model.parameters()))
    assert rt.transport.name == "shared"
    with rt.train():
        train_step(rt)
        model.reward_mean.add_(1)
    assert rt.generate([[1]])[0].weights_version == 1
    rt.close()


def test_a_bias_that_checkpoints_hold_in_fp32_stays_so_beside_16_bits():
    config = DeepseekV3Config(
        **{
            key: getattr(qwen3(), key)
            for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        },
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=1,
        q_lora_rank=None,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
    )
    model = empty_model(config, dtype=torch.bfloat16, attn_implementation=None)
    biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert [bias.dtype for bias in biases] == [torch.float32]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


# ---- sharded by FSDP2; two ranks are in tests/integration/test_sharded.py ----------------------------------------


@pytest.fixture
def mesh(tmp_path):
    """Of this process alone."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_sharded_fp32_weights_that_compute_in_bf16_reach_an_engine_in_bf16(mesh):
    model = AutoModelForCausalLM.from_config(qwen3())
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    rt = colo.share(make_engine(torch.bfloat16), model, adamw(model.parameters()))
    for _ in range(3):
        assert all(len(c.token_ids) == 4 for c in rt.generate(PROMPTS, max_tokens=4))
        held = rt.engine.weights.hf_views()
        assert all(torch.equal(held[n], p.full_tensor().bfloat16()) for n, p in model.named_parameters())
        with rt.train():
            train_step(rt)
    assert rt.trace.metrics["mismatch_sampled"][-1] < 0.02
    rt.close()


def test_sharded_16_bit_weights_are_trained_without_masters_of_ours(mesh):
    model = AutoModelForCausalLM.from_config(qwen3(), dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh)
    with pytest.raises(colo.Unsupported, match=r"float32 and let FSDP2 compute in 16 bits.*MixedPrecisionPolicy"):
        MasterWeights(adamw)(model.parameters())


def test_a_model_that_fsdp_has_flattened_is_refused(mesh):
    whole = AutoModelForCausalLM.from_config(qwen3())
    model = FullyShardedDataParallel(whole, device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(colo.Unsupported, match="shard the model with fully_shard"):
        colo.share(make_engine(), model, adamw(model.parameters()))


def test_a_sharded_adapter_is_refused_by_name(mesh):
    model = get_peft_model(AutoModelForCausalLM.from_config(qwen3()), LoraConfig(r=4, target_modules=["q_proj"]))
    fully_shard(model, mesh=mesh)
    with pytest.raises(colo.Unsupported, match=r"the adapter of model.layers.0.self_attn.q_proj is sharded over ranks"):
        colo.share(make_engine(), model, adamw([p for p in model.parameters() if p.requires_grad]))
