import warnings
from dataclasses import replace

import pytest
import torch
from trl import GRPOTrainer

import colo
from colo.engine import Engine
from colo.errors import Unsupported
from colo.integrations.trl.attachment import choose_process
from colo.units import format_bytes
from tests.trainers import SMALL_CACHE, logged, trained


def assert_untouched(trainer):
    """Nothing of colo is left at a trainer whose attaching has failed."""
    assert not hasattr(trainer, "colo")
    assert not hasattr(trainer, "vllm_generation")
    assert trainer.use_vllm is False
    assert trainer.optimizer is None
    with pytest.raises(ValueError):
        colo.Runtime.of(trainer.model)
    trainer.train()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vllm_structured_outputs_regex": "[0-9]+"}, "vllm_structured_outputs_regex needs vLLM"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"generation_kwargs": {"num_beams": 4}}, "num_beams"),
        ({"generation_kwargs": {"frequency_penalty": 1.0}}, "frequency_penalty"),
    ],
    ids=["structured outputs", "repetition_penalty", "generation_kwargs", "of vLLM alone"],
)
def test_what_the_embedded_engine_lacks_is_refused_by_name_and_the_trainer_trains_on_alone(
    make, attach, changes, words
):
    trainer = make(**changes)
    with pytest.raises((Unsupported, TypeError, ValueError), match=words):
        attach(trainer)
    if "frequency_penalty" in str(changes):  # which transformers' own generation does not know either
        trainer.args.generation_kwargs = trainer.generation_kwargs = None
        trainer.generation_config.frequency_penalty = None
    assert_untouched(trainer)


def test_tensor_parallelism_is_refused_by_name(make, attach):
    trainer = make(vllm_tensor_parallel_size=2)
    with pytest.raises(Unsupported, match="vllm_tensor_parallel_size=2"):
        attach(trainer)
    assert_untouched(trainer)


@pytest.mark.parametrize("engine", ["sglang", 3])
def test_another_engine_is_refused(make, attach, engine):
    trainer = make()
    with pytest.raises((TypeError, ValueError)):
        attach(trainer, engine=engine)
    assert_untouched(trainer)


def test_vllm_runs_in_this_process_unless_there_are_several_ranks():
    alone, given, ranks = {}, {"own_process": True}, {}
    choose_process(alone, 1)
    choose_process(given, 1)
    choose_process(ranks, 2)
    assert (alone, given, ranks) == ({"own_process": False}, {"own_process": True}, {"own_process": True})
    with pytest.raises(Unsupported, match="within each of 2 ranks takes them for its own: leave own_process=False out"):
        choose_process({"own_process": False}, 2)


def test_sampling_is_the_trainers(make, attach):
    seen = {}
    trainer = make(temperature=0.7, top_p=0.9, top_k=5, min_p=0.01, vllm_importance_sampling_correction=False)
    rt = attach(trainer)
    generate = rt.engine.generate

    def noted(prompts, params, **options):
        seen["params"] = params
        return generate(prompts, params, **options)

    rt.engine.generate = noted
    _, ids, *_ = trainer.vllm_generation.generate([[1, 10, 2, 11]] * 4, None, 4)
    params = seen["params"]
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.9, 5, 0.01)
    assert (params.max_tokens, params.n, tuple(params.stop_token_ids)) == (4, 4, (12,))
    assert len(ids) == 4 and max(map(len, ids)) <= 4


def test_generation_kwargs_that_the_engine_has_are_honoured(make, attach):
    trainer = make(generation_kwargs={"ignore_eos": True, "max_tokens": 3})
    attach(trainer)
    _, ids, *_ = trainer.vllm_generation.generate([[1, 10, 2, 11]] * 8, None, 8)
    assert [len(row) for row in ids] == [3] * 8


def test_filters_with_trls_correction_are_warned_about(make, attach):
    with pytest.warns(UserWarning, match="with top_p, min_p cuts tokens off, .*trl#6789.*return_sampling_mask"):
        attach(make(top_p=0.9, min_p=0.1))
    trainer = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        attach(trainer)


def test_an_fp32_model_has_an_engine_in_bf16_on_a_gpu_and_the_report_says_what_that_costs(make, attach, monkeypatch):
    monkeypatch.setattr("colo.assembly.existing._dtype", lambda *_: torch.bfloat16)  # as on a GPU
    trainer = make()
    rt = attach(trainer)
    trainer.train()
    copy_bytes = sum(2 * p.numel() for p in trainer.model.parameters())
    reason = rt.report().facts["weights"]
    assert "it is torch.float32 here and torch.bfloat16 in the engine" in reason
    assert f"the engine's copy takes {format_bytes(rt.scheduler.segments['engine.weights'].size_bytes)}" in reason
    assert logged(trainer, "colo/sent_bytes")[-1] == copy_bytes == rt.bytes_synced / 2
    assert 1e-5 < max(logged(trainer, "colo/mismatch")) < 0.05


def test_an_engine_that_runs_already_is_taken(make, attach, checkpoint):
    engine, model = colo.start(checkpoint, engine="torch", device="cpu", config=SMALL_CACHE)
    assert isinstance(engine, Engine)
    trainer = make(model)
    rt = attach(trainer, engine=engine)
    assert rt.engine is engine and rt.transport.shares
    trainer.train()


def test_attaching_and_detaching_changes_no_weight(make, attach):
    trainer = make()
    before = trained(trainer.model)
    rewards = list(trainer.reward_funcs)
    attach(trainer)
    assert trainer.reward_funcs != rewards
    colo.trl.detach(trainer)
    assert trainer.reward_funcs == rewards
    assert all(torch.equal(before[name], p) for name, p in trained(trainer.model).items())


def test_the_trainers_accumulation_is_the_runtimes(make, attach):
    trainer = make(gradient_accumulation_steps=2)
    assert attach(trainer).accumulation_steps == 2
    trainer.args.gradient_accumulation_steps = 1
    trainer.args.steps_per_generation = 1
    trainer.train()
    assert trainer.colo.accumulation_steps == 1


def test_released_gradients_leave_none_to_clip(make, attach):
    config = replace(SMALL_CACHE, release_gradients=True)
    with pytest.raises(ValueError, match="leaves no gradients for max_grad_norm=1.0 to clip: pass max_grad_norm=0"):
        attach(make(gradient_accumulation_steps=1), config=config)
    with pytest.raises(ValueError, match="accumulation_steps must be 1, not 2"):
        attach(make(gradient_accumulation_steps=2, max_grad_norm=0.0), config=config)


def test_a_trainer_that_is_none_is_refused():
    with pytest.raises(Unsupported, match="object of TRL .* has no accelerator"):
        colo.trl.attach(object())
    assert GRPOTrainer is not None
