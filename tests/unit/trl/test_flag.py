import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    HfArgumentParser,
)
from transformers.training_args import ParallelMode
from trl import GRPOTrainer, RLOOTrainer, TrlParser
from trl.trainer import grpo_trainer

import colo
from colo.config import Offload, OptimizerState
from colo.engines.torch import TorchEngine
from colo.errors import Unsupported
from colo.phases.phase import Phase
from colo.testing import tiny_checkpoint
from colo.trl import ColoGRPOConfig, ColoGRPOTrainer, ColoRLOOConfig, ColoRLOOTrainer
from colo.units import MIB
from tests.checkpoints import save_revisions
from tests.trainers import ALPHABET, digits, logged, options, sums

CONFIGS = [ColoGRPOConfig, ColoRLOOConfig]
OF_FLAG = ["colo_partial_rollouts", "colo_offload_activations"]
SWITCHES = ["fast_inference", "colo_release_gradients", "colo_fold_adapter", "colo_seeded", *OF_FLAG]
FLAG = {"fast_inference": True, "colo_engine": "torch", "colo_kv_cache_bytes": "1MiB"}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_command_line_is_parsed(kind, tmp_path):
    words = [
        "--output_dir",
        str(tmp_path),
        "--use_cpu",
        "--bf16",
        "False",
        "--fast_inference",
        "--colo_engine",
        "torch",
    ]
    words += ["--colo_kv_cache_bytes", "8MiB", "--colo_offload", "auto", "--colo_seeded"]
    words += ["--colo_optimizer", "streamed", "--colo_resident_state_bytes", "1MiB", "--colo_fold_adapter"]
    words += ["--colo_moment_dtype", "bfloat16"]
    words += ["--colo_engine_options", '{"max_num_seqs": 4}']
    (args,) = HfArgumentParser(kind).parse_args_into_dataclasses(words)
    assert (args.fast_inference, args.colo_engine, args.colo_seeded) == (True, "torch", True)
    assert args.colo_engine_options == {"max_num_seqs": 4}
    assert (args.colo_config().kv_cache_bytes, args.colo_config().offload) == (8 * MIB, Offload.AUTO)
    assert (args.colo_config().resident_state_bytes, args.colo_config().moment_dtype) == (MIB, "bfloat16")
    assert (args.colo_config().optimizer, args.colo_config().fold_adapter) == (OptimizerState.STREAMED, True)


@pytest.mark.parametrize("kind", CONFIGS)
def test_yaml_is_parsed(kind, tmp_path, monkeypatch):
    path = tmp_path / "flag.yaml"
    given = {"fast_inference": True, "colo_engine_options": {"own_process": True}, "colo_kv_cache_bytes": "8MiB"}
    path.write_text(yaml.safe_dump({"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, **given}))
    monkeypatch.setattr(sys, "argv", ["script", "--config", str(path), "--colo_offload", "never"])
    (args,) = TrlParser(kind).parse_args_and_config()
    assert {name: getattr(args, name) for name in given} == given
    assert args.colo_offload == "never"


@pytest.mark.parametrize("kind", CONFIGS)
def test_by_default_it_is_trls_config(kind, tmp_path):
    args = kind(**options(tmp_path))
    assert (args.fast_inference, args.colo_engine, args.colo_offload) == (False, "torch", "auto")
    assert args.colo_config().kv_cache_bytes is None
    kind(**options(tmp_path, use_vllm=True))  # without the flag this is TRL's own


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_earlier_name_of_the_caches_size_is_taken_with_a_warning_and_kept_nowhere(kind, tmp_path):
    with pytest.warns(FutureWarning, match='pass colo_kv_cache_bytes="8MiB"'):
        args = kind(**options(tmp_path), colo_kv_cache_mib=8)
    assert args.colo_config().kv_cache_bytes == 8 * MIB
    assert "colo_kv_cache_mib" not in repr(args)
    assert "colo_kv_cache_mib" not in args.to_dict()
    with pytest.raises(TypeError, match='pass colo_kv_cache_bytes="8MiB" alone'):
        kind(**options(tmp_path), colo_kv_cache_mib=8, colo_kv_cache_bytes="4MiB")


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fast_inference": True, "use_vllm": True}, "fast_inference takes the place of use_vllm"),
        ({"colo_engine": "sglang"}, "colo_engine must be 'auto', 'vllm' or 'torch', not 'sglang'"),
        ({"colo_offload": "sometimes"}, "colo_offload must be one of auto, always, never, not 'sometimes'"),
        ({"colo_optimizer": "paged"}, "colo_optimizer must be one of auto, resident, streamed, not 'paged'"),
        ({"colo_kv_cache_bytes": "0"}, "colo_kv_cache_bytes must be a positive number of bytes or None, not 0"),
        ({"colo_offload": "always", "colo_resident_state_bytes": "1GiB"}, "colo_resident_state_bytes keeps .*always"),
        ({"colo_moment_dtype": "fp8"}, "colo_moment_dtype must be one of float32, bfloat16, not 'fp8'"),
        ({"colo_moment_dtype": "bfloat16", "colo_offload": "never"}, "colo_moment_dtype=.* is of streamed state"),
        ({"colo_kv_cache_bytes": "4 gibs"}, "colo_kv_cache_bytes: cannot read '4 gibs' as a size"),
        ({"colo_release_gradients": True, "gradient_accumulation_steps": 1}, "pass max_grad_norm=0"),
        ({"colo_release_gradients": True, "gradient_accumulation_steps": 2}, "accumulation_steps must be 1, not 2"),
        *(({name: "false"}, f"{name} must be True or False, not 'false'") for name in SWITCHES),
        ({"num_generations": 0}, "num_generations must be at least 2, not 0"),
        ({"fast_inference": None}, "fast_inference must be True or False, not None"),
        ({"colo_engine_options": [1]}, r"colo_engine_options must be a mapping, or JSON of one, not \[1\]"),
    ],
    ids=[
        "use_vllm",
        "engine",
        "offload",
        "optimizer",
        "cache",
        "resident",
        "moments",
        "not streamed",
        "unit",
        "clipped",
        "accumulated",
        *SWITCHES,
        "groups",
        "none",
        "options",
    ],
)
def test_wrong_values_are_refused_before_anything_is_loaded(kind, changes, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        kind(**options(tmp_path, **changes))


def make_flagged(make, **changes):
    return make(**({"kind": ColoGRPOTrainer, "config": ColoGRPOConfig} | FLAG | changes))


@pytest.mark.parametrize("later", [False, True], ids=["made with", "set later"])
@pytest.mark.parametrize(("kind", "config"), [(GRPOTrainer, ColoGRPOConfig), (RLOOTrainer, ColoRLOOConfig)])
def test_a_trainer_of_trls_says_that_it_does_not_read_the_flag(make, kind, config, later):
    trainer = make(kind=kind, config=config, **({} if later else FLAG))
    trainer.args.fast_inference = True
    with pytest.warns(UserWarning, match=r"fast_inference=True is in the config .* make a ColoGRPOTrainer"):
        trainer.train()


def test_options_of_a_config_hold_for_a_trainer_that_is_attached(make):
    given = {**FLAG, "colo_seeded": True, "colo_optimizer": "streamed", "colo_kv_cache_bytes": "1MiB"}
    trainer = make(config=ColoGRPOConfig, **given)
    rt = colo.attach(trainer)
    assert (rt.config.optimizer, rt.config.kv_cache_bytes) == ("streamed", MIB)
    assert trainer.vllm_generation._seeded
    colo.trl.detach(trainer)
    rt = colo.attach(trainer, config=replace(rt.config, kv_cache_bytes=2 * MIB), seeded=False)
    assert rt.config.kv_cache_bytes == 2 * MIB and not trainer.vllm_generation._seeded


@pytest.mark.parametrize("option", OF_FLAG)
def test_an_option_that_a_trainer_of_trls_cannot_carry_out_is_refused(make, monkeypatch, option):
    trainer = make(config=ColoGRPOConfig, **FLAG, **{option: True})
    monkeypatch.setattr("colo.trl.checks.check_args", lambda _: None)  # which refuses the second on a CPU
    match = f"{option} needs a ColoGRPOTrainer with fast_inference=True.* this is a GRPOTrainer"
    with pytest.raises(Unsupported, match=match):
        colo.attach(trainer)
    assert not hasattr(trainer, "colo")


def test_activations_of_a_cpu_are_refused_before_an_engine_is_started(make, monkeypatch):
    monkeypatch.setattr("colo.trl.flag.start", lambda *_, **__: pytest.fail("an engine was started"))
    with pytest.raises(ValueError, match="colo_offload_activations=True moves .* those of a CPU are: leave it out"):
        make_flagged(make, colo_offload_activations=True)


class HandedOver(saved_tensors_hooks):
    """Stands for TRL's class, which is of GPUs: notes the shapes of tensors that it was handed, and the phases."""

    def __init__(self, max_fwd_stash_size):
        super().__init__(self.pack, torch.clone)
        self.shapes, self.phases, self.model, self.runtime = [], [], None, None

    def pack(self, tensor):
        self.shapes.append(tuple(tensor.shape))
        return tensor

    def update_model_params(self, model):
        self.model = model

    def __enter__(self):
        self.phases.append(self.runtime.phase)
        return super().__enter__()


@pytest.fixture
def handed_over(monkeypatch):
    monkeypatch.setattr("colo.trl.flag.OffloadActivations", HandedOver)
    for place in ("flag", "checks"):
        monkeypatch.setattr(f"colo.trl.{place}.check_args", lambda _: None)  # which refuses it on a CPU


@pytest.mark.usefixtures("handed_over")
@pytest.mark.parametrize(("kind", "config"), [(ColoGRPOTrainer, ColoGRPOConfig), (ColoRLOOTrainer, ColoRLOOConfig)])
def test_activations_are_handed_over_while_a_loss_is_computed_and_train_to_the_same_bits(make, kind, config):
    common = {"kind": kind, "config": config, "gradient_checkpointing": True, "colo_seeded": True}
    kept = make_flagged(make, **common)
    kept.train()
    away = make_flagged(make, **common, colo_offload_activations=True)
    handed = away._activations
    handed.runtime = away.colo
    away.train()
    assert "_activations" not in vars(kept)
    assert handed.model is away.model and handed.phases == [Phase.TRAIN] * 4  # two steps of two passes
    inputs = [shape for shape in handed.shapes if len(shape) == 3 and shape[2] == away.model.config.hidden_size]
    assert len(inputs) >= 4 * away.model.config.num_hidden_layers
    for one, other in zip(kept.model.parameters(), away.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert logged(kept, "loss") == logged(away, "loss")
    away.colo.close()
    away.args.max_steps = 3
    away.train()  # as TRL's own
    assert len(logged(away)) > len(logged(kept)) and len(handed.phases) == 4


@pytest.mark.usefixtures("handed_over")
def test_two_losses_of_one_pass_are_handed_over_at_once(make):
    # TRL's class begins anew where it is entered: the first graph would be given tensors of the second
    class Own(ColoGRPOTrainer):
        def compute_loss(self, *args, **given):
            return super().compute_loss(*args, **given) + super().compute_loss(*args, **given)

    trainer = make_flagged(make, kind=Own, colo_offload_activations=True)
    handed = trainer._activations
    handed.runtime = trainer.colo
    trainer.train()
    assert handed.phases == [Phase.TRAIN] * 4  # two steps of two passes


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"bias": "lora_only"}, {"modules_to_save": ["lm_head"]}])
def test_an_adapter_that_is_more_than_lora_is_refused_with_the_option_that_takes_it(make, monkeypatch, changes):
    monkeypatch.setattr("colo.trl.flag.start", lambda *_, **__: pytest.fail("an engine was started"))
    lora = LoraConfig(r=2, target_modules=["q_proj"], **changes)
    with pytest.raises(Unsupported, match="not supported: .*; or publish it folded .*: colo_fold_adapter=True"):
        make_flagged(make, made_with={"peft_config": lora})


def test_one_that_is_attached_has_its_engine_and_says_nothing(make, attach):
    trainer = make(config=ColoGRPOConfig, **FLAG)
    attach(trainer)
    trainer.train()
    assert trainer.colo.weights_version > 0


def test_options_without_the_flag_are_named(make):
    given = {"colo_seeded": True, "colo_kv_cache_bytes": "1MiB"}
    with pytest.warns(UserWarning, match="engine, and colo_kv_cache_bytes, colo_seeded without effect: pass args="):
        make(kind=ColoGRPOTrainer, config=ColoGRPOConfig, **given)


def test_use_vllm_that_is_set_later_is_refused_before_a_server_is_waited_for(make, checkpoint, tmp_path):
    args = ColoGRPOConfig(**options(tmp_path), **FLAG)
    args.use_vllm = True
    with pytest.raises(ValueError, match="takes the place of use_vllm"):
        ColoGRPOTrainer(checkpoint, digits, args, train_dataset=sums())


def test_a_model_is_named_by_a_path_too(make, checkpoint):
    assert make_flagged(make, model=Path(checkpoint)).colo.transport.shares


def test_an_attribute_that_a_subclass_lacks_is_the_one_that_is_named(make):
    class Own(ColoGRPOTrainer):
        @property
        def share(self):
            return self.args.of_nothing

    with pytest.raises(AttributeError, match="has no attribute 'of_nothing'"):
        make_flagged(make, kind=Own).share  # noqa: B018


@pytest.mark.parametrize(
    "given", [{"use_cache": False}, {"device_map": "auto", "dtype": "float32"}], ids=["cache", "map"]
)
def test_model_init_kwargs_that_would_be_dropped_are_refused_by_name(make, given):
    with pytest.raises(Unsupported, match=f"model_init_kwargs has {next(iter(given))}, which fast_inference"):
        make_flagged(make, model_init_kwargs=given)


def test_a_dtype_among_model_init_kwargs_is_taken(make):
    trainer = make_flagged(make, model_init_kwargs={"dtype": "bfloat16"})
    assert str(trainer.model.dtype) == "torch.bfloat16"
    assert trainer.args.model_init_kwargs == {"dtype": "bfloat16"}
    trainer.train()


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, target_modules="all-linear")], ids=["full", "lora"])
def test_attention_among_model_init_kwargs_is_the_trainers(make, lora):
    given = {"attn_implementation": "eager"}
    trainer = make_flagged(make, model_init_kwargs=given, made_with={"peft_config": lora})
    assert trainer.model.config._attn_implementation == "eager"
    assert trainer.colo.engine.module.config._attn_implementation != "eager"
    assert trainer.colo.transport.shares
    trainer.train()


def test_attention_that_is_not_there_ends_the_engine(make, monkeypatch):
    closed = []
    monkeypatch.setattr("colo.trl.flag.check_attention", lambda *_: None)  # which an attention may pass, and fail later
    monkeypatch.setattr(TorchEngine, "close", lambda engine: closed.append(engine))
    with pytest.raises(ValueError, match="flash_attention_of_mine"):
        make_flagged(make, model_init_kwargs={"attn_implementation": "flash_attention_of_mine"})
    assert len(closed) == 1


@pytest.mark.parametrize("option", ["model_init_kwargs", "colo_engine_options"])
@pytest.mark.parametrize(("kind", "config"), [(ColoGRPOTrainer, ColoGRPOConfig), (ColoRLOOTrainer, ColoRLOOConfig)])
def test_model_tokenizer_and_reference_are_of_one_revision(
    make, checkpoint, tmp_path, monkeypatch, kind, config, option
):
    other = tiny_checkpoint(tmp_path / "other", alphabet=ALPHABET[::-1], seed=1)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    name = save_revisions(tmp_path / "hub", main=checkpoint, v2=other)
    given = {option: {"revision": "v2"}}
    trainer = make_flagged(make, model=name, kind=kind, config=config, beta=0.1, learning_rate=0.0, **given)
    expected = AutoModelForCausalLM.from_pretrained(other).state_dict()
    for model in (trainer.model, trainer.ref_model):
        assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())
    vocabulary = AutoTokenizer.from_pretrained(other, padding_side="left", truncation_side="left")
    for name in ("padding_side", "truncation_side", "vocab"):
        assert getattr(trainer.processing_class, name) == getattr(vocabulary, name)
    assert getattr(trainer.args, option) == given[option]
    trainer.train()
    assert max(logged(trainer, "kl")) < 1e-6


def test_a_tokenizer_that_is_given_is_kept_beside_a_revision(make, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    name, tokenizer = save_revisions(tmp_path / "hub", v2=checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    made_with = {"processing_class": tokenizer}
    trainer = make_flagged(make, model=name, model_init_kwargs={"revision": "v2"}, made_with=made_with)
    assert trainer.processing_class is tokenizer


@pytest.fixture
def reward_model(checkpoint, tmp_path):
    folder = str(tmp_path / "reward")
    AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "given",
    [None, {"dtype": "bfloat16", "attn_implementation": "eager"}, '{"dtype": "bfloat16"}'],
    ids=["nothing", "dtype and attention", "json"],
)
@pytest.mark.parametrize(
    ("theirs", "kind", "config"),
    [(GRPOTrainer, ColoGRPOTrainer, ColoGRPOConfig), (RLOOTrainer, ColoRLOOTrainer, ColoRLOOConfig)],
)
def test_models_that_trl_loads_beside_the_policy_are_those_that_it_loads_alone(
    make, reward_model, caplog, theirs, kind, config, given
):
    of_both = {"config": config, "model_init_kwargs": given, "beta": 0.1}
    alone = make(kind=theirs, reward=[digits, reward_model], **of_both)  # in which TRL writes trust_remote_code
    trainer = make_flagged(make, kind=kind, reward=[digits, reward_model], **of_both)
    for ours, expected in ((trainer.reward_funcs[1], alone.reward_funcs[1]), (trainer.ref_model, alone.ref_model)):
        assert ours.config._attn_implementation == expected.config._attn_implementation
        tensors = expected.state_dict()
        for name, tensor in ours.state_dict().items():
            assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])
    assert trainer.reward_func_names == alone.reward_func_names
    assert "will be ignored" not in caplog.text
    trainer.train()


def test_a_reward_model_that_is_named_is_of_the_models_revision_too(
    make, checkpoint, reward_model, tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    name = save_revisions(tmp_path / "hub", main=checkpoint, v2=reward_model)
    given = {"revision": "v2"}
    trainer = make_flagged(make, model=name, reward=name, model_init_kwargs=given)
    expected = AutoModelForSequenceClassification.from_pretrained(reward_model)
    assert torch.equal(trainer.reward_funcs[0].score.weight, expected.score.weight)
    assert trainer.args.model_init_kwargs == given == {"revision": "v2"}


@pytest.mark.parametrize("stop", [None, ["="]], ids=["no text", "stop"])
def test_vllm_gets_the_tokenizer_that_is_given_for_a_named_model(make, checkpoint, monkeypatch, stop):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    (tokenizer := AutoTokenizer.from_pretrained(checkpoint)).add_tokens(["<new>"])
    asked = {}

    def start(model, engine_options, **_):
        asked.update(engine_options)
        if stop:
            assert "<new>" in AutoTokenizer.from_pretrained(engine_options["tokenizer"]).get_vocab()
        raise ValueError("no engine")

    monkeypatch.setattr("colo.trl.flag.start", start)
    given = {"generation_kwargs": {"stop": stop}} if stop else {}
    with pytest.raises(ValueError, match="no engine"):
        make_flagged(make, colo_engine="vllm", made_with={"processing_class": tokenizer}, **given)
    assert ("tokenizer" in asked) is bool(stop)
    assert not stop or not Path(asked["tokenizer"]).exists()
    assert asked["max_num_seqs"] > 0


def test_a_named_model_that_will_be_sharded_is_loaded_by_trl(make, monkeypatch):
    """And shared afterwards: sharding would take it out of an engine's memory. One process shards nothing."""
    monkeypatch.setattr("colo.trl.flag.start", lambda *_, **__: pytest.fail("an engine was started first"))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")  # which transformers sets
    with pytest.raises(ValueError, match="Using fsdp only works in distributed training"):
        make_flagged(make, fsdp=True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    trainer = make_flagged(make)
    assert trainer.colo.transport.shares
    trainer.train()


@pytest.mark.skipif(not hasattr(grpo_trainer, "add_fused_lm_head"), reason="this TRL trains adapters of output layers")
@pytest.mark.parametrize("folded", [False, True])
def test_an_adapter_that_trl_would_not_train_is_refused_before_an_engine_starts(make, monkeypatch, folded):
    monkeypatch.setattr("colo.trl.flag.start", lambda *_, **__: pytest.fail("an engine was started"))
    lora = LoraConfig(r=2, target_modules=["q_proj", "lm_head"])
    given = {"model_init_kwargs": {"dtype": "float32"}, "colo_fold_adapter": folded}
    with pytest.raises(Unsupported, match="not be trained: leave the output layer out of target_modules"):
        make_flagged(make, made_with={"peft_config": lora}, **given)


def test_arguments_may_be_given_by_position(make, checkpoint, tmp_path):
    args = ColoGRPOConfig(**options(tmp_path), **FLAG)
    with pytest.raises(ValueError, match="eval_dataset has prompt: add the column"):
        ColoGRPOTrainer(checkpoint, lambda completions, answer: [], args, sums(), sums().remove_columns("answer"))


def test_a_start_that_fails_leaves_the_config_as_it_was(make):
    given = {"use_cache": False}
    args = []

    def config(**changes):
        args.append(ColoGRPOConfig(**changes))
        return args[0]

    with pytest.raises(Unsupported):
        make(kind=ColoGRPOTrainer, config=config, **FLAG, model_init_kwargs=given)
    assert args[0].model_init_kwargs == given


@pytest.mark.parametrize("kind", [ColoGRPOTrainer, ColoRLOOTrainer])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"report_to": "comet_ml"}, r"loggers cannot be had \(comet_ml is not installed here"),
        ({"seed": 2**32}, "seed must be in 0 to 4294967295"),
        (
            {"learning_rate": -1.0},
            r"optimizer and schedule cannot be had \(Invalid learning rate: -1.0\): change optim",
        ),
        (
            {"generation_kwargs": {"stop_token_ids": [1.5]}},
            r"completions cannot be had \(stop_token_ids must be a list",
        ),
    ],
    ids=str,
)
def test_options_that_fail_later_are_refused_before_an_engine_starts(make, monkeypatch, kind, changes, words):
    monkeypatch.setattr("colo.trl.flag.start", None)
    with pytest.raises(ValueError, match=words):
        make(kind=kind, config=CONFIGS[kind is ColoRLOOTrainer], **FLAG, **changes)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train_datasets": None}, "got an unexpected keyword argument 'train_datasets'"),
        ({"reward_funcs": 5}, "a reward is a function, a model or the name of one, not 5"),
        ({"reward_funcs": [len, None]}, "a reward is a function, a model or the name of one, not None"),
        ({"train_dataset": "sums.jsonl"}, "the dataset is one of the library datasets, not 'sums.jsonl': load it"),
        ({"train_dataset": Path("sums.jsonl")}, "the dataset is one of the library datasets, not .*sums.jsonl"),
        ({"eval_dataset": {"held": "sums.jsonl"}}, "eval_dataset held is one of the library datasets, not 'sums"),
    ],
    ids=str,
)
@pytest.mark.parametrize("number", [0, 1], ids=["GRPO", "RLOO"])
def test_what_a_trainer_does_not_take_is_refused_before_a_model_is_loaded(monkeypatch, tmp_path, number, given, words):
    monkeypatch.setattr("colo.trl.flag._started", None)
    args = CONFIGS[number](output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **FLAG)
    given = {"reward_funcs": lambda completions, **_: [0.0], "train_dataset": None} | given
    with pytest.raises(TypeError, match=words):
        (ColoGRPOTrainer, ColoRLOOTrainer)[number]("a-model", args=args, **given)


def test_a_number_of_a_config_that_python_cannot_write_is_named(make):
    for name in ("num_generations", "seed", "colo_max_age"):
        with pytest.raises(ValueError, match=f"^{name} is a whole number of about 5000 digits: give one of 64 bits"):
            make_flagged(make, **{name: 10**5000})


def test_what_fsdp_would_do_with_weights_is_refused_before_they_are_loaded(make, monkeypatch):
    monkeypatch.setattr(GRPOTrainer, "__init__", lambda *_, **__: pytest.fail("the model is being loaded"))
    monkeypatch.setattr(ColoGRPOConfig, "parallel_mode", ParallelMode.DISTRIBUTED)  # as on several ranks
    with pytest.raises(Unsupported, match="offload_params keeps weights in host memory"):
        make_flagged(make, fsdp=True, fsdp_config={"cpu_offload": True})


def test_an_optimizer_of_a_subclass_takes_the_place_of_options_for_one(make):
    class Mine(ColoGRPOTrainer):
        def create_optimizer(self, *_):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    trainer = make_flagged(make, kind=Mine, optim="galore_adamw")
    assert isinstance(trainer.optimizer.optimizer, torch.optim.SGD)


def test_what_colo_does_not_do_is_refused_before_an_engine_starts(make, monkeypatch):
    monkeypatch.setattr("colo.trl.flag.start", lambda *_, **__: pytest.fail("an engine was started"))
    with pytest.raises(Unsupported, match="vllm_tensor_parallel_size=2: colo runs an engine on each GPU"):
        make_flagged(make, vllm_tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("engine", "words"), [("torch", "vLLM alone: colo_engine='vllm'"), ("vllm", "in 4 bits: load_in_4bit=True")]
)
def test_quantization_is_refused_where_it_cannot_be_shared(make, engine, words):
    config = BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(Unsupported, match=words):
        make_flagged(make, made_with={"quantization_config": config}, colo_engine=engine)


VLLMS = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}
"""The packing of vLLM."""

PLACES = {
    "argument": lambda given: {"made_with": {"quantization_config": BitsAndBytesConfig(**given)}},
    "among": lambda given: {"model_init_kwargs": {"quantization_config": BitsAndBytesConfig(**given)}},
    "json": lambda given: {"model_init_kwargs": json.dumps({"quantization_config": given})},
}
"""The places where TRL takes it."""


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, "set bnb_4bit_quant_type='nf4' "),
        ({"bnb_4bit_use_double_quant": False}, "set bnb_4bit_use_double_quant=True "),
        ({"bnb_4bit_compute_dtype": "float16"}, "set bnb_4bit_compute_dtype=torch.bfloat16 "),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "set bnb_4bit_quant_storage=torch.uint8 "),
        ({"llm_int8_skip_modules": ["q_proj"]}, "set llm_int8_skip_modules=None "),
        ({"load_in_4bit": False, "load_in_8bit": True}, "in 4 bits: load_in_4bit=True"),
    ],
    ids=lambda changes: next(iter(changes)) if isinstance(changes, dict) else "",
)
def test_a_packing_that_is_not_vllms_is_refused_before_an_engine_starts(make, monkeypatch, changes, words, place):
    monkeypatch.setattr("colo.trl.flag.start", lambda *_, **__: pytest.fail("an engine was started"))
    with pytest.raises(Unsupported, match=words):
        make_flagged(make, colo_engine="vllm", **place(VLLMS | changes))


@pytest.fixture
def asked(monkeypatch):
    """The options that vLLM would be started with."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    asked = {}

    def start(model, engine_options, **_):
        asked.update(engine_options)
        raise ValueError("no engine")

    monkeypatch.setattr("colo.trl.flag.start", start)
    return asked


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_vllms_packing_is_passed_on(make, asked, place):
    with pytest.raises(ValueError, match="no engine"):
        make_flagged(make, colo_engine="vllm", **place(VLLMS))
    assert asked["quantization"] == "bitsandbytes"


def test_what_a_packed_checkpoint_says_counts_before_the_trainers(make, asked, tmp_path):
    """As transformers has it."""
    folder = tiny_checkpoint(tmp_path / "packed", alphabet=ALPHABET)
    settings = json.loads((folder / "config.json").read_text())
    packed = BitsAndBytesConfig(load_in_4bit=True).to_dict() | {"quant_method": "bitsandbytes"}
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": packed}))
    with pytest.raises(ValueError, match="no engine"):
        make_flagged(make, model=str(folder), colo_engine="vllm", **PLACES["argument"]({"load_in_4bit": True}))
    assert asked["quantization"] == "bitsandbytes"


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"colo_engine_options": {"quantization": "fp8"}}, Unsupported, "has quantization='fp8', and the trainer is"),
        (
            {"colo_engine_options": {"revision": "v1"}},
            Unsupported,
            "has revision='v1', and the trainer is to have 'v2'",
        ),
        (
            {"made_with": {"quantization_config": BitsAndBytesConfig(**VLLMS)}},
            ValueError,
            "among model_init_kwargs too: leave one out",
        ),
    ],
    ids=["quantization", "revision", "twice"],
)
def test_two_settings_of_which_one_would_be_dropped_are_refused(make, monkeypatch, given, error, words):
    monkeypatch.setattr("colo.trl.flag.start", lambda *_, **__: pytest.fail("an engine was started"))
    kwargs = {"revision": "v2", "quantization_config": VLLMS}
    with pytest.raises(error, match=words):
        make_flagged(make, colo_engine="vllm", model_init_kwargs=kwargs, **given)


def test_the_engine_is_closed_where_the_trainer_cannot_be_made(make, monkeypatch):
    from colo.trl import flag

    closed, start = [], flag.start

    def started(*arguments, **given):
        engine, model = start(*arguments, **given)
        close = engine.close
        monkeypatch.setattr(engine, "close", lambda: (closed.append(1), close())[1])
        return engine, model

    monkeypatch.setattr(flag, "start", started)
    with pytest.raises(ValueError, match="reward weights"):
        make_flagged(make, reward_weights=[1.0, 2.0])
    assert closed == [1]


@pytest.mark.parametrize("by_name", [True, False], ids=["named", "given"])
def test_what_the_engine_lacks_is_refused_and_nothing_is_left(make, checkpoint, by_name):
    model = None if by_name else AutoModelForCausalLM.from_pretrained(checkpoint)
    with pytest.raises(ValueError, match="embedded engine does not take repetition_penalty"):
        make_flagged(make, model=model, repetition_penalty=1.5)
    make_flagged(make, model=model).train()


def test_rloo_has_the_flag(make):
    trainer = make(kind=ColoRLOOTrainer, config=ColoRLOOConfig, **FLAG)
    assert trainer.colo.transport.shares


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_whatever_ends_training_a_rollout_can_follow(kind, tmp_path, checkpoint):
    """In a notebook Ctrl-C ends a cell, and the next one asks the model something."""
    asked = 0

    def reward(completions, **columns):
        nonlocal asked
        asked += 1
        if asked == 2:
            raise kind("in a reward, within a rollout")
        return digits(completions)

    args = ColoGRPOConfig(**options(tmp_path, max_steps=3) | FLAG)
    trainer = ColoGRPOTrainer(checkpoint, [reward], args, train_dataset=sums())
    with pytest.raises(kind):
        trainer.train()
    with trainer.colo.rollout():
        assert len(trainer.colo.generate(["1+2="], max_tokens=2)) == 1
    trainer.train()
    assert trainer.state.global_step == 3
    trainer.colo.close()
