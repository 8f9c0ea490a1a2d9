import warnings
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer, LlamaConfig, Olmo2Config, Qwen3Config, SmolLM3Config, Starcoder2Config
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import colo
from colo.config import RuntimeConfig
from colo.engine import Engine
from colo.errors import Unsupported
from colo.trainer.master_weights import MasterWeights, MasterWeightsOptimizer
from colo.trl import attachment
from colo.trl.attachment import add_tokenizer, add_vllm_options, choose_process
from colo.units import format_bytes
from tests.trainers import SMALL_CACHE, logged, trained, use_fsdp2


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


def test_rewards_and_names_of_different_number_are_refused_and_leave_no_hook(make, attach):
    trainer = make()
    names, trainer.reward_func_names = trainer.reward_func_names, []
    with pytest.raises(ValueError, match="zip"):
        attach(trainer)
    trainer.reward_func_names = names
    assert not any(module._forward_pre_hooks for module in trainer.model.modules())
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


def test_a_model_that_vllm_serves_by_transformers_own_class_gets_a_process_of_its_own():
    pytest.importorskip("vllm", reason="vLLM is not installed")
    for config in (SmolLM3Config(), Olmo2Config(), Starcoder2Config()):
        choose_process(options := {}, 1, config)
        assert options == {"own_process": True}
    for config in (Qwen3Config(), LlamaConfig()):
        choose_process(options := {}, 1, config)
        assert options == {"own_process": False}
        choose_process(options := {"model_impl": "transformers"}, 1, config)
        assert options["own_process"] is True


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


@pytest.mark.parametrize("kind", [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)], ids=["grpo", "rloo"])
@pytest.mark.parametrize(
    ("given", "stops"),
    [
        ({"stop_token_ids": [5, 12]}, [12, 5]),
        ({"stop_token_ids": [5], "ignore_eos": True}, [5]),
        ({"stop_token_ids": None}, [12]),
    ],
    ids=["beside", "alone", "none"],
)
def test_stop_token_ids_are_beside_the_end_of_a_sequence(make, attach, kind, given, stops):
    trainer = make(kind=kind[0], config=kind[1], generation_kwargs=given)
    attach(trainer)
    assert trainer.vllm_generation.sampling["stop_token_ids"] == stops
    assert trainer.args.generation_kwargs == given


def test_stop_token_ids_that_are_no_list_are_refused_by_name(make, attach):
    with pytest.raises(TypeError, match="stop_token_ids must be a list of token ids"):
        attach(make(generation_kwargs={"stop_token_ids": 5}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_p": 0.9, "min_p": 0.1}, "with top_p, min_p changes which tokens are .*trl#6789.*return_sampling_mask"),
        ({"generation_kwargs": {"top_k": 3}}, "with top_k changes"),
        ({"generation_kwargs": {"temperature": 0.5}}, "temperature=0.5, and TRL computes .* at temperature=1.0"),
        ({"generation_kwargs": {"seed": 7}}, r"seed=7, and every step draws the same .*colo_seeded=True"),
    ],
    ids=str,
)
def test_sampling_that_trl_computes_something_else_of_is_warned_about(make, attach, changes, words):
    with pytest.warns(UserWarning, match=words):
        attach(make(**changes))


def test_plain_sampling_is_not_warned_about(make, attach):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        attach(make(generation_kwargs={"max_tokens": 3, "top_p": 1.0, "seed": None}))
        attach(make(generation_kwargs={"seed": 7}), seeded=True)  # whose seeds take its place
        attach(make(top_p=0.9, vllm_importance_sampling_correction=False))
    assert [str(warning.message) for warning in told if warning.category is UserWarning] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vllm_gpu_memory_utilization": 0.5}, "vllm_gpu_memory_utilization=0.5 .* no effect .* kv_cache_bytes"),
        ({"vllm_enable_sleep_mode": True, "vllm_model_impl": "transformers"}, "=True, vllm_model_impl='transformers' "),
        (
            {"vllm_server_base_url": "http://127.0.0.1:8000"},
            "vllm_server_base_url='http://127.0.0.1:8000' .* no effect",
        ),
        ({"vllm_mode": "server", "vllm_server_port": 8001}, "vllm_mode='server', vllm_server_port=8001 .* no effect"),
    ],
    ids=str,
)
def test_settings_of_trls_own_vllm_are_warned_about(make, attach, changes, words):
    with pytest.warns(UserWarning, match=words):
        attach(make(**changes))


@pytest.mark.parametrize("options", [{}, {"own_process": True, "max_model_len": 64}], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {"vllm_structured_outputs_regex": "[0-9]"},
        {"generation_kwargs": {"bad_words": ["3"]}},
        {"generation_kwargs": {"stop": ["="]}},
        {"generation_kwargs": {"min_tokens": 2}},
        {},
    ],
    ids=str,
)
def test_vllm_gets_the_trainers_tokenizer_where_an_option_takes_one(make, changes, options):
    trainer = make(**changes)
    trainer.processing_class.add_tokens(["<new>"])
    given = changes.get("generation_kwargs", {})
    with ExitStack() as folders:
        add_tokenizer(options := dict(options), trainer.args, trainer.processing_class, folders)
        takes_one = bool(changes) and "min_tokens" not in given
        assert ("tokenizer" in options) is takes_one is (options.get("skip_tokenizer_init") is False)
        if takes_one:
            folder = options["tokenizer"]
            assert "<new>" in AutoTokenizer.from_pretrained(folder).get_vocab()
    assert not takes_one or not Path(folder).exists()
    add_tokenizer(own := {"tokenizer": "mine"}, trainer.args, trainer.processing_class, ExitStack())
    assert own["tokenizer"] == "mine"


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({}, {}, (8, 4096)),
        ({"steps_per_generation": 4}, {}, (16, 4096)),
        ({"per_device_train_batch_size": 4096}, {}, (8192, 8192)),
        ({}, {"max_num_seqs": 3, "max_num_batched_tokens": 512}, (3, 512)),
        ({}, {"enable_chunked_prefill": False}, (8, None)),
    ],
    ids=str,
)
def test_vllm_gets_room_for_the_completions_of_a_rollout(make, changes, options, expected):
    trainer = make(**{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2} | changes)
    add_vllm_options(options := dict(options), trainer.args, 1, trainer.model.config)
    assert (options["max_num_seqs"], options.get("max_num_batched_tokens")) == expected


def test_attaching_twice_says_that_a_runtime_is_there(make, attach):
    trainer = make()
    rt = attach(trainer)
    with pytest.raises(ValueError, match=r"has a runtime, trainer.colo: train with it, or call colo.trl.detach"):
        attach(trainer)
    assert trainer.colo is rt
    colo.trl.detach(trainer)
    attach(trainer)


def test_completions_without_a_limit_end_with_the_models_positions(make, attach):
    trainer = make(max_completion_length=None, generation_kwargs={"ignore_eos": True})
    attach(trainer, config=RuntimeConfig(kv_cache_bytes=4 << 20))
    _, ids, *_ = trainer.vllm_generation.generate([[1, 10, 2, 11]], None, 1)
    assert len(ids[0]) == trainer.model.config.max_position_embeddings - 4


def test_an_fp32_model_has_an_engine_in_bf16_on_a_gpu_and_the_report_says_what_that_costs(make, attach, monkeypatch):
    monkeypatch.setattr("colo.assembly.share._dtype", lambda *_: torch.bfloat16)  # as on a GPU
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


def test_the_optimizer_is_the_one_that_trl_makes_and_prepared_in_place(make, attach):
    trainer, stock = make(weight_decay=0.1), make(weight_decay=0.1)
    stock.create_optimizer()
    attach(trainer)
    made = trainer.optimizer.optimizer
    assert type(made) is type(stock.optimizer)
    assert [len(g["params"]) for g in made.param_groups] == [len(g["params"]) for g in stock.optimizer.param_groups]
    assert [g["weight_decay"] for g in made.param_groups] == [0.1, 0.0]
    assert trainer.optimizer._is_accelerate_prepared


def test_weights_in_16_bits_have_masters(make, attach):
    trainer = make(model_init_kwargs={"dtype": "bfloat16"}, weight_decay=0.1)
    attach(trainer)
    made = trainer.optimizer.optimizer
    assert isinstance(made, MasterWeightsOptimizer) and isinstance(made.inner, torch.optim.AdamW)
    assert [g["weight_decay"] for g in made.param_groups] == [0.1, 0.0]
    assert {p.dtype for g in made.inner.param_groups for p in g["params"]} == {torch.float32}
    assert trainer.optimizer_cls_and_kwargs is None


def test_an_optimizer_of_the_users_is_kept_and_one_without_masters_is_warned_about(make, attach):
    trainer = make(model_init_kwargs={"dtype": "bfloat16"})
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    with pytest.warns(UserWarning, match="swallow updates"):
        attach(trainer)
    assert isinstance(trainer.optimizer.optimizer, torch.optim.SGD)
    trainer = make(model_init_kwargs={"dtype": "bfloat16"})
    given = MasterWeights(lambda params: torch.optim.SGD(params, lr=1.0))(trainer.model.parameters())
    trainer.optimizer = given
    attach(trainer)
    assert trainer.optimizer.optimizer is given


class WithOwnOptimizer(GRPOTrainer):
    make = staticmethod(lambda params: torch.optim.SGD(params, lr=1.0))

    def create_optimizer(self, model=None):
        self.optimizer = self.make(self.model.parameters())
        return self.optimizer


def test_an_optimizer_that_a_subclass_makes_is_warned_about_too(make, attach):
    with pytest.warns(UserWarning, match="swallow updates"):
        attach(make(kind=WithOwnOptimizer, model_init_kwargs={"dtype": "bfloat16"}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        attach(make(kind=WithOwnOptimizer))
        trainer = make(kind=WithOwnOptimizer, model_init_kwargs={"dtype": "bfloat16"})
        trainer.make = MasterWeights(trainer.make)
        attach(trainer)


def test_several_optimizers_for_weights_in_16_bits_are_refused_by_name(make, attach):
    trainer = make(model_init_kwargs={"dtype": "bfloat16"})
    trainer.optimizer_cls_and_kwargs = (lambda: None), {}
    with pytest.raises(Unsupported, match="makes several optimizers"):
        attach(trainer)
    assert not hasattr(trainer, "colo")


class Averaged(torch.optim.SGD):
    """Like schedule-free optimizers, which evaluate an average of the weights that they train."""

    def train(self):
        """Put the weights that are trained into the parameters."""

    def eval(self):
        """Put their average into the parameters."""


def test_an_optimizer_that_evaluates_other_weights_in_16_bits_is_refused_by_name(make, attach):
    trainer = make(model_init_kwargs={"dtype": "bfloat16"})
    trainer.optimizer_cls_and_kwargs = Averaged, {"lr": 0.1}
    with pytest.raises(Unsupported, match="trains other weights than it evaluates"):
        attach(trainer)
    assert not hasattr(trainer, "colo")
    trainer = make()
    trainer.optimizer_cls_and_kwargs = Averaged, {"lr": 0.1}
    attach(trainer)
    assert isinstance(trainer.optimizer.optimizer, Averaged)


@pytest.fixture
def sharded(mesh, make, monkeypatch):
    """Makes trainers with the plugin; what accelerate's processes share is as before afterwards."""
    for state in (PartialState, AcceleratorState):
        monkeypatch.setattr(state, "_shared_state", state._shared_state)

    def build(**changes):
        trainer = make(**changes)
        for state in (PartialState, AcceleratorState):
            monkeypatch.setattr(state, "_shared_state", dict(state._shared_state))
        use_fsdp2(trainer)
        return trainer

    return build


def test_the_optimizer_is_made_of_the_shards_and_training_keeps_it(sharded, attach):
    trainer = sharded()
    model = trainer.model
    rt = attach(trainer)
    params = list(model.parameters())
    assert trainer.model is trainer.model_wrapped is model
    assert all(isinstance(p, DTensor) for p in params)
    trainer.train()
    assert rt.weights_version == 2
    assert {id(p) for g in trainer.optimizer.param_groups for p in g["params"]} == set(map(id, params))


def test_an_optimizer_of_the_users_is_switched_to_the_shards(sharded, attach):
    trainer = sharded()
    given = trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    attach(trainer)
    assert trainer.optimizer.optimizer is given
    assert all(isinstance(p, DTensor) for g in given.param_groups for p in g["params"])
    trainer.train()
    assert trainer.colo.weights_version == 2


def test_masters_of_whole_weights_are_refused_before_anything_is_sharded(sharded, attach):
    trainer = sharded(model_init_kwargs={"dtype": "bfloat16"})
    made = MasterWeights(lambda params: torch.optim.SGD(params, lr=1.0))(trainer.model.parameters())
    trainer.optimizer = made
    with pytest.raises(Unsupported, match="give the trainer no optimizer"):
        attach(trainer)
    assert trainer.optimizer is made
    assert not any(isinstance(p, DTensor) for p in trainer.model.parameters())


def test_weights_that_accelerate_keeps_in_fp32_need_no_masters(sharded, attach):
    trainer = sharded(model_init_kwargs={"dtype": "bfloat16"}, bf16=True)
    attach(trainer)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert isinstance(trainer.optimizer.optimizer, torch.optim.AdamW)


def test_a_rank_without_a_part_of_several_weights_is_refused(sharded, attach, monkeypatch):
    """accelerate knows parameters by their address, which is the same for all that have no memory."""
    monkeypatch.setattr(attachment, "local_shard", lambda p: torch.empty(0) if p.ndim == 1 else p)
    with pytest.raises(Unsupported, match=r"nothing of model.layers.0\S+ and \d+ other weights.*fewer ranks"):
        attach(sharded())
