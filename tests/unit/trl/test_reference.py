"""The reference of TRL's KL term is what training began with, whatever the adapter's initialization did to the base."""

import warnings

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, VeraConfig, get_peft_model
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import RLOOConfig, RLOOTrainer

from colo.config import RuntimeConfig
from colo.errors import Unsupported
from colo.trl import ColoGRPOConfig, ColoGRPOTrainer, ColoRLOOConfig, ColoRLOOTrainer
from colo.units import MIB
from tests.trainers import logged, trained

INITS = [True, "gaussian", False, "pissa", "pissa_niter_4", "olora", "orthogonal"]
FLAG = {"fast_inference": True, "colo_engine": "torch", "colo_kv_cache_bytes": "1MiB", "colo_seeded": True}
IDS = torch.tensor([[3, 11, 5, 12, 8]])
QV = {"target_modules": ["q_proj", "v_proj"]}


def lora(init):
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=init)


def adapted(checkpoint, init):
    torch.manual_seed(0)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32"), lora(init))


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.fixture
def by_flag(checkpoint, make):
    def build(init, *, given=False, kind=ColoGRPOTrainer, config=ColoGRPOConfig, **changes):
        model = adapted(checkpoint, init) if given else None
        made_with = {} if given else {"peft_config": lora(init)}
        return make(model, kind=kind, config=config, made_with=made_with, **FLAG, **changes)

    return build


def assert_begins_at_zero(trainer):
    trainer.train()
    kl = logged(trainer, "kl")
    assert len(kl) == 3
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[2] > 1e-5


@pytest.mark.parametrize("init", INITS)
def test_under_attach_the_kl_of_an_untrained_policy_is_zero(make, attach, init):
    trainer = make(made_with={"peft_config": lora(init)}, beta=0.1, max_steps=3)
    names = set(trainer.model.peft_config)
    attach(trainer)
    assert ("ref" in trainer.model.peft_config) is (init not in (True, "gaussian"))
    assert all(".ref." not in name for name in trained(trainer.model))
    assert_begins_at_zero(trainer)
    trainer.colo.close()
    assert set(trainer.model.peft_config) == names


@pytest.mark.parametrize("given", [False, True], ids=["named", "given"])
@pytest.mark.parametrize("init", INITS)
def test_under_the_flag_it_is_zero_and_the_base_is_initialized_once(by_flag, checkpoint, init, given):
    trainer = by_flag(init, given=given, beta=0.1, max_steps=3)
    assert trainer.model.peft_config["default"].init_lora_weights == init
    if init is not False:
        whole = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
        assert torch.allclose(logits(trainer.model), logits(whole), atol=1e-4)
    assert_begins_at_zero(trainer)


@pytest.mark.parametrize("init", [True, "pissa"])
def test_the_comparison_with_the_engine_is_with_the_policy_and_not_with_the_reference(by_flag, init):
    trainer = by_flag(init, beta=0.1, max_steps=3, learning_rate=0.1, vllm_importance_sampling_correction=False)
    trainer.train()
    assert logged(trainer, "kl")[-1] > 1e-3
    assert max(logged(trainer, "colo/mismatch")) < 1e-4


def test_rloo_has_its_reference_too(by_flag):
    trainer = by_flag("pissa", kind=ColoRLOOTrainer, config=ColoRLOOConfig, beta=0.1, max_steps=2)
    trainer.train()
    assert logged(trainer, "kl")[0] == pytest.approx(0, abs=1e-6)


def test_rloo_under_attach(make, attach):
    trainer = make(kind=RLOOTrainer, config=RLOOConfig, made_with={"peft_config": lora("olora")}, beta=0.1, max_steps=2)
    attach(trainer)
    trainer.train()
    assert logged(trainer, "kl")[0] == pytest.approx(0, abs=1e-6)


def test_a_resumed_run_compares_with_the_same_reference(by_flag, tmp_path):
    changes = {"beta": 0.1, "save_strategy": "steps", "save_steps": 2}
    whole = by_flag("pissa", max_steps=4, output_dir=str(tmp_path / "whole"), **changes)
    whole.train()
    resumed = by_flag("pissa", max_steps=4, output_dir=str(tmp_path / "resumed"), **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert logged(resumed, "kl") == logged(whole, "kl")  # those before are in the checkpoint
    expected = trained(whole.model)
    assert all(torch.equal(expected[name], p) for name, p in trained(resumed.model).items())


ADAPTERS = {  # their names with their ranks, and those that train
    "another than default": ({"default": 4, "mine": 2}, ["mine"]),
    "none is default": ({"first": 4, "mine": 2}, ["mine"]),
    "named as a layer": ({"layers": 4}, ["layers"]),
    "ref": ({"default": 2, "ref": 4}, ["ref"]),
    "ref alone": ({"ref": 4}, ["ref"]),
    "several": ({"default": 4, "mine": 2}, ["default", "mine"]),
    "several, none is default": ({"first": 4, "mine": 2}, ["mine", "first"]),
}


@pytest.fixture
def of_adapters(checkpoint, make):
    def build(ranks, active, **changes):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32")
        configs = {name: LoraConfig(r=r, init_lora_weights=False, **QV) for name, r in ranks.items()}
        (first, config), *others = configs.items()
        model = get_peft_model(model, config, adapter_name=first)
        for name, config in others:
            model.add_adapter(name, config)
        model.base_model.set_adapter(active)
        options = FLAG | {"colo_fold_adapter": len(active) > 1}
        return make(model, kind=ColoGRPOTrainer, config=ColoGRPOConfig, **options, **changes)

    return build


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_run_resumes_with_every_adapter_that_trains_whatever_its_name(of_adapters, tmp_path, kind):
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "learning_rate": 0.1}
    whole = of_adapters(*ADAPTERS[kind], output_dir=str(tmp_path / "whole"), **changes)
    whole.train()
    resumed = of_adapters(*ADAPTERS[kind], output_dir=str(tmp_path / "resumed"), **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    expected, found = trained(whole.model), trained(resumed.model)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], p) for name, p in found.items())
    assert max(logged(resumed, "colo/mismatch")) < 1e-4


@pytest.mark.parametrize("kind", ADAPTERS)
def test_the_best_model_is_that_of_the_adapters_that_train(of_adapters, tmp_path, kind):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "greater_is_better": True}
    changes = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, **best}
    trainer = of_adapters(*ADAPTERS[kind], output_dir=str(tmp_path / "out"), max_steps=3, learning_rate=0.1, **changes)
    seen = {}

    class Watch(TrainerCallback):
        def on_save(self, args, state, control, **_):
            seen[state.global_step] = trained(trainer.model)

    trainer.add_callback(Watch())
    trainer.train()
    expected = seen[int(trainer.state.best_model_checkpoint.rpartition("-")[2])]
    found = trained(trainer.model)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], p) for name, p in found.items())


def test_several_adapters_have_no_reference_of_trls(of_adapters):
    with pytest.raises(
        Unsupported, match=r"2 adapters train \(default, mine\).*only 'default' would train: pass beta=0"
    ):
        of_adapters({"default": 4, "mine": 2}, ["default", "mine"], beta=0.1)


def test_a_base_that_trl_has_initialized_twice_is_refused_by_name(make, attach, checkpoint):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make(adapted(checkpoint, "pissa"), beta=0.1)
    with pytest.raises(Unsupported, match=r"by init_lora_weights='pissa' once more, .*init_lora_weights = True"):
        attach(trainer)
    assert not hasattr(trainer, "colo")


def test_a_reference_that_is_another_adapter_than_the_one_that_trains_is_refused(make, attach, checkpoint):
    model = adapted(checkpoint, False)
    model.add_adapter("mine", lora("olora"))
    model.set_adapter("mine")
    trainer = make(model, beta=0.1)
    with pytest.raises(Unsupported, match="from adapter 'default', and 'mine' is the one that trains"):
        attach(trainer)
    attach(make(model.base_model.unload(), made_with={"peft_config": lora(True)}, beta=0.1))


@pytest.mark.parametrize("init", ["orthogonal", "pissa", True])
def test_a_reference_leaves_the_random_numbers_of_training_alone(make, attach, init):
    trainer = make(made_with={"peft_config": lora(init)}, beta=0.1)
    before = torch.random.get_rng_state()
    attach(trainer)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_without_a_kl_term_nothing_is_added(make, attach):
    trainer = make(made_with={"peft_config": lora("pissa")})
    attach(trainer)
    assert set(trainer.model.peft_config) == {"default"}


def test_a_failed_attach_leaves_no_copy(make, attach):
    trainer = make(made_with={"peft_config": lora("pissa")}, beta=0.1, generation_kwargs={"num_beams": 4})
    with pytest.raises((Unsupported, TypeError, ValueError)):
        attach(trainer)
    assert set(trainer.model.peft_config) == {"default"}


# ---- adapters that are more than LoRA, folded into the weights -------------------------------------------------------

FOLDED = {
    "VeRA": VeraConfig(r=4, **QV),
    "DoRA": LoraConfig(r=4, use_dora=True, **QV),
    "AdaLoRA": AdaLoraConfig(total_step=20, init_r=4, target_r=2, **QV),
}


@pytest.mark.parametrize("kind", FOLDED)
def test_a_new_adapter_of_any_kind_is_its_own_reference_switched_off(make, kind):
    options = {**FLAG, "colo_fold_adapter": True, "beta": 0.1, "max_steps": 3, "learning_rate": 0.1}
    trainer = make(kind=ColoGRPOTrainer, config=ColoGRPOConfig, made_with={"peft_config": FOLDED[kind]}, **options)
    assert trainer.colo.transport.shares
    base = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    assert_begins_at_zero(trainer)
    assert set(trainer.model.peft_config) == {"default"}
    assert max(logged(trainer, "colo/mismatch")) < 1e-4
    now = dict(trainer.model.named_parameters())
    assert all(torch.equal(now[name], p) for name, p in base.items())


@pytest.mark.parametrize("by", ["flag", "attach"])
def test_the_reference_of_one_that_was_trained_before_is_a_copy_of_all_its_tensors(make, attach, checkpoint, by):
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32"), FOLDED["VeRA"])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    options = {"beta": 0.1, "max_steps": 3, "learning_rate": 0.1}
    if by == "flag":
        options |= FLAG | {"colo_fold_adapter": True}
        trainer = make(model, kind=ColoGRPOTrainer, config=ColoGRPOConfig, **options)
    else:
        trainer = make(model, **options)
        attach(trainer, config=RuntimeConfig(kv_cache_bytes=MIB, fold_adapter=True))
    assert all(".ref" not in name for name in trained(trainer.model))
    assert_begins_at_zero(trainer)


def test_attach_refuses_one_without_the_switch_and_leaves_the_trainer_as_it_is(make, attach):
    trainer = make(made_with={"peft_config": FOLDED["VeRA"]}, beta=0.1)
    with pytest.raises(Unsupported, match=r"VERA \(VeraConfig\).*RuntimeConfig\(fold_adapter=True\), for .*KiB"):
        attach(trainer)
    assert set(trainer.model.peft_config) == {"default"}
