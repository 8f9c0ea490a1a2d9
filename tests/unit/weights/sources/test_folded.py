"""Adapters that are more than LoRA, folded into the weights: the engine samples from them, and the base stays."""

import copy

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import colo
from colo.config import RuntimeConfig
from colo.errors import StaleWeights, Unsupported
from colo.phases.phase import Phase
from colo.rl.loop import Reference
from colo.units import MIB, format_bytes
from tests.models import TINY, add_adapter, tiny_qwen3
from tests.runtimes import adamw, segment

pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT's

QV = {"target_modules": ["q_proj", "v_proj"]}
LORA = {"r": 2, "init_lora_weights": False, **QV}
LM = {"task_type": "CAUSAL_LM"}
FOLD = RuntimeConfig(kv_cache_bytes=MIB, fold_adapter=True)
PROMPT = [1, 2, 3]

NAMED = {
    "VERA": ("VeraConfig", {"r": 2}),
    "OFT": ("OFTConfig", {"oft_block_size": 8, "r": 0}),
    "LOHA": ("LoHaConfig", {"r": 2}),
    "LOKR": ("LoKrConfig", {"r": 2}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "DoRA": ("LoraConfig", {**LORA, "use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 4}}),
    "ADALORA": ("AdaLoraConfig", {"total_step": 20, "init_r": 4, "target_r": 2}),
}
OTHERS = {
    "LORA": ("LoraConfig", {**LORA, "target_modules": "all-linear", "exclude_modules": ["o_proj"]}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4}),
    "C3A": ("C3AConfig", {"block_size": 8}),
    "DEFT": ("DeftConfig", {}),
    "DELORA": ("DeloraConfig", {"r": 2}),
    "FOURIERFT": ("FourierFTConfig", {"n_frequency": 40}),
    "FROD": ("FrodConfig", {}),
    "GLORA": ("GloraConfig", {}),
    "GRALORA": ("GraloraConfig", {"r": 4, "gralora_k": 2}),
    "HIRA": ("HiraConfig", {"r": 2}),
    "HRA": ("HRAConfig", {"r": 2}),
    "LN_TUNING": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "MISS": ("MissConfig", {"r": 2}),
    "OSF": ("OSFConfig", {}),
    "PEANUT": ("PeanutConfig", {}),
    "PSOFT": ("PsoftConfig", {"r": 2}),
    "RANDLORA": ("RandLoraConfig", {"r": 2}),
    "ROAD": ("RoadConfig", {"group_size": 8}),
    "SHIRA": ("ShiraConfig", {"r": 2}),
    "TINYLORA": ("TinyLoraConfig", {}),
    "TRAINABLE_TOKENS": ("TrainableTokensConfig", {"token_indices": [1, 2, 5], "target_modules": ["embed_tokens"]}),
    "UNILORA": ("UniLoraConfig", {}),
    "VBLORA": ("VBLoRAConfig", {"r": 2, "num_vectors": 8, "vector_length": 16, "topk": 2}),
    "WAVEFT": ("WaveFTConfig", {"n_frequency": 40}),
}
SETTINGS = {
    "lora_bias": ("LoraConfig", {"lora_bias": True}),
    "bias": ("LoraConfig", {"bias": "all"}),
    "modules_to_save": ("LoraConfig", {"modules_to_save": ["lm_head"]}),
    "modules_to_save, IA3": ("IA3Config", {"feedforward_modules": [], "modules_to_save": ["norm"]}),
    "trainable_token_indices": ("LoraConfig", {"trainable_token_indices": [1, 2, 5]}),
    "output layer": ("VeraConfig", {"r": 2, "target_modules": ["lm_head"]}),
    "embedding": ("LoraConfig", {"r": 2, "target_modules": ["embed_tokens"]}),
}


def config_of(name, options):
    if not hasattr(peft, name):
        pytest.skip(f"this PEFT has no {name}")
    if name == "LoraConfig":
        options = LORA | options
    return getattr(peft, name)(**(QV | options))


def base_model(config=None, **changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config or tiny_qwen3(attention_bias=True, **changes))


def drawn(model):
    """The model with an adapter of random values."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def adapted(name="VeraConfig", options=NAMED["VERA"][1], **changes):
    return drawn(peft.get_peft_model(base_model(**changes), config_of(name, options)))


def several(*configs, mixed=False):
    model = peft.get_peft_model(base_model(), configs[0], mixed=mixed)
    model.add_adapter("other", configs[1])
    (model if mixed else model.base_model).set_adapter(["default", "other"])
    return drawn(model)


@pytest.fixture
def share():
    open_ones = []

    def shared(model, config=FOLD, engine="torch"):
        optimizer = adamw([p for p in model.parameters() if p.requires_grad])
        open_ones.append(colo.share(engine, model, optimizer, config=config))
        return open_ones[-1]

    yield shared
    for rt in open_ones:
        rt.close()


def frozen_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


def assert_frozen(model, before):
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())


def gap(rt, model):
    """The largest difference of log-probabilities of what the engine samples greedily."""
    (made,) = rt.generate([PROMPT], max_tokens=6, temperature=0.0, ignore_eos=True)
    ids = torch.tensor([[*PROMPT, *made.token_ids]])
    modes = [(module, module.training) for module in model.modules()]
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits[0, 2:-1].float().log_softmax(-1)
    for module, training in modes:
        module.training = training
    return float((logits.gather(-1, ids[0, 3:, None])[:, 0] - torch.tensor(made.logprobs)).abs().max())


def step(rt, model):
    ids = torch.tensor([[1, 5, 9, 4, 2]])
    with rt.train():
        model(input_ids=ids, labels=ids).loss.backward()
        rt.optimizer.step()
        rt.optimizer.zero_grad()


def assert_followed(rt, model, atol=1e-5):
    """Two steps with a publication after each: the engine follows, and what is frozen stays bit for bit."""
    before = frozen_of(model)
    for version in range(3):
        assert gap(rt, model) < atol
        assert rt.weights_version == version
        assert_frozen(model, before)
        step(rt, model)


@pytest.mark.parametrize("kind", [*NAMED, *OTHERS])
def test_the_engine_samples_from_the_adapter_of_each_step_and_the_base_stays_bit_for_bit(share, kind):
    model = adapted(*(NAMED | OTHERS)[kind])
    rt = share(model)
    assert_followed(rt, model)
    assert rt.transport.shares


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_engines_lack_are_in_the_weights(share, setting):
    model = adapted(*SETTINGS[setting])
    assert_followed(share(model), model)


@pytest.mark.parametrize("kind", NAMED)
def test_without_the_switch_the_refusal_names_it_and_the_bytes(share, kind):
    model = adapted(*NAMED[kind])
    adapted_bytes = sum(
        p.nbytes
        for name, p in model.named_parameters()
        if ".base_layer." in name and any(part in name for part in config_of(*NAMED[kind]).target_modules)
    )
    with pytest.raises(Unsupported) as refused:
        share(model, RuntimeConfig(kv_cache_bytes=MIB))
    said = str(refused.value)
    assert "RuntimeConfig(fold_adapter=True)" in said
    assert format_bytes(adapted_bytes) in said


UNFOLDED = {
    "PROMPT_TUNING": ("PromptTuningConfig", {"num_virtual_tokens": 2, **LM}),
    "PREFIX_TUNING": ("PrefixTuningConfig", {"num_virtual_tokens": 2, **LM}),
    "P_TUNING": ("PromptEncoderConfig", {"num_virtual_tokens": 2, "encoder_hidden_size": 8, **LM}),
    "POLY": ("PolyConfig", {"r": 2, "n_tasks": 1, "n_skills": 1, "n_splits": 1}),
    "LILY": ("LilyConfig", {"r": 2}),
    "coft": ("OFTConfig", {"oft_block_size": 8, "r": 0, "coft": True}),
    "alora_invocation_tokens": ("LoraConfig", {"alora_invocation_tokens": [7], **LM}),
    "layer_replication": ("LoraConfig", {"layer_replication": [[0, 1], [0, 1]]}),
}


@pytest.mark.parametrize("kind", UNFOLDED)
def test_what_no_weights_can_do_is_refused_by_name_with_and_without_the_switch(share, kind):
    name, options = UNFOLDED[kind]
    if not hasattr(peft, name):
        pytest.skip(f"this PEFT has no {name}")
    where = {} if options.get("num_virtual_tokens") else LORA if name == "LoraConfig" else QV
    model = peft.get_peft_model(base_model(), getattr(peft, name)(**(where | options)))
    for config in (FOLD, RuntimeConfig(kv_cache_bytes=MIB)):
        with pytest.raises(Unsupported, match=kind if config is FOLD else "support|LoRA only") as refused:
            share(model, config)
        assert "fold_adapter" not in str(refused.value)


@pytest.mark.parametrize(
    "options", [{"target_modules": ["lm_head"]}, {"target_modules": ["embed_tokens"]}, {"modules_to_save": ["lm_head"]}]
)
def test_a_weight_that_is_another_layers_too_is_refused(share, options):
    with pytest.raises(
        Unsupported, match=r"does not fold into .*(lm_head|embed_tokens), whose weight is another layer"
    ):
        share(adapted("LoraConfig", options, tie_word_embeddings=True))


def test_rows_of_a_tied_embedding_are_trained_in_both_and_published_once(share):
    model = adapted("LoraConfig", {"trainable_token_indices": [1, 2, 5]}, tie_word_embeddings=True)
    assert_followed(share(model), model)


def test_weights_that_are_quantized_are_refused(share):
    model = adapted()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj.get_base_layer()
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(Unsupported, match=r"layers\.0\.self_attn\.q_proj\.weight, which is quantized .*int8"):
        share(model)


def test_several_adapters_are_folded_where_they_add_up(share):
    model = several(peft.LoraConfig(**LORA), peft.LoraConfig(**LORA))
    assert_followed(share(model), model)


@pytest.mark.parametrize("name", ["OFTConfig", "LoraConfig"])
def test_several_that_do_not_commute_are_refused(share, name):
    options = {"oft_block_size": 8, "r": 0} if name == "OFTConfig" else {"use_dora": True}
    with pytest.raises(Unsupported, match=r"2 adapters are active \(default, other\).*set_adapter"):
        share(several(config_of(name, options), config_of(name, options)))


@pytest.mark.parametrize("outer", ["OFTConfig", "LoHaConfig"])
def test_a_mixed_model_is_folded_from_the_inside_out(share, outer):
    options = {"oft_block_size": 8, "r": 0} if outer == "OFTConfig" else {"r": 2}
    model = several(peft.LoraConfig(**LORA), config_of(outer, options), mixed=True)
    with pytest.raises(Unsupported, match=r"PeftMixedModel mixes adapters.*fold_adapter=True"):
        share(model, RuntimeConfig(kv_cache_bytes=MIB))
    assert_followed(share(model), model)


def test_an_adapter_of_packed_experts_is_folded(share):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**(TINY | sizes))
    settings = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"], "target_modules": ["q_proj"]}
    model = drawn(peft.get_peft_model(base_model(config), peft.LoraConfig(**(LORA | settings))))
    rt, before = share(model), frozen_of(model)
    for _ in range(3):  # versions are not counted: a pass of PEFT's puts experts' parameters into another order
        assert gap(rt, model) < 1e-5
        assert_frozen(model, before)
        step(rt, model)


def test_an_adapter_that_transformers_has_added_is_folded(share):
    model = base_model()
    add_adapter(model, config_of(*NAMED["DoRA"]))
    drawn(model)
    assert_followed(share(model), model)


@pytest.mark.parametrize("weights", ["copy", "staged"])
def test_a_copy_each_gets_the_adapter_too(share, weights):
    model = adapted()
    rt = share(model, RuntimeConfig(kv_cache_bytes=MIB, fold_adapter=True, weights=weights))
    assert not rt.transport.shares
    assert_followed(rt, model)


def test_in_bf16_they_agree_as_far_as_that_rounds(share):
    torch.manual_seed(0)
    model = peft.get_peft_model(base_model().to(torch.bfloat16), config_of(*NAMED["DoRA"]))
    assert_followed(share(drawn(model)), model, atol=0.05)


def test_the_switch_does_nothing_without_an_adapter(share):
    model = base_model()
    rt = share(model)
    assert gap(rt, model) < 1e-5
    assert rt.transport.shares and rt.bytes_synced == 0


# ---- training, and what it is compared with --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["DoRA", "LOHA", "ADALORA"])
def test_training_is_bit_for_bit_what_it_is_without_colo(share, kind):
    name, options = NAMED[kind]
    dropout = {"rank_dropout" if kind == "LOHA" else "lora_dropout": 0.2}
    model = adapted(name, options | dropout).train()
    twin, seen = copy.deepcopy(model), []
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.register_forward_hook(lambda *_: seen.append(len(seen)))
    rt = share(model)
    modes = {name: module.training for name, module in model.named_modules()}
    grads = {name: p.requires_grad for name, p in model.named_parameters()}
    optimizer, ids = adamw([p for p in twin.parameters() if p.requires_grad]), torch.tensor([[1, 5, 9, 4, 2]])
    for number in range(2):
        rt.generate([PROMPT], max_tokens=2)
        assert modes == {name: module.training for name, module in model.named_modules()}
        assert grads == {name: p.requires_grad for name, p in model.named_parameters()}
        with rt.train():  # which compares with the engine
            num_seen = len(seen)
            torch.manual_seed(number)
            model(input_ids=ids, labels=ids).loss.backward()
            rt.optimizer.step()
            rt.optimizer.zero_grad()
        assert len(seen) == num_seen + 1
        torch.manual_seed(number)
        twin(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_hooks_by_which_an_adapter_changes_its_gradients_stay(share):
    model = adapted(*OTHERS["OSF"])
    hooks = {name: dict(p._backward_hooks) for name, p in model.named_parameters() if p._backward_hooks}
    assert hooks
    rt = share(model)
    for _ in range(2):
        rt.generate([PROMPT], max_tokens=2)
        step(rt, model)
    parameters = dict(model.named_parameters())
    assert all(hooks[name].items() <= parameters[name]._backward_hooks.items() for name in hooks)


@pytest.mark.parametrize("weights", ["auto", "copy"])
def test_a_layer_that_gets_its_first_adapter_later_is_named(share, weights):
    model = peft.get_peft_model(base_model(), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    rt = share(model, RuntimeConfig(kv_cache_bytes=MIB, fold_adapter=True, weights=weights))
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"]))
    with pytest.raises(StaleWeights, match="k_proj.* more have an adapter, and had none when"):
        rt.generate([PROMPT], max_tokens=2)


@pytest.mark.parametrize("kind", ["VERA", "IA3", "OFT"])
def test_the_reference_of_a_kl_term_is_the_policy_that_training_began_with(share, kind):
    model, ids = peft.get_peft_model(base_model(), config_of(*NAMED[kind])), torch.tensor([[1, 5, 9]])
    expected = base_model()(input_ids=ids).logits
    rt, reference = share(model), Reference(model)
    for _ in range(2):
        assert gap(rt, model) < 1e-5
        step(rt, model)
        found = reference.run(lambda policy: policy(input_ids=ids).logits)
        assert torch.allclose(found, expected, atol=1e-6)
    assert gap(rt, model) < 1e-5


# ---- what changes an adapter without a step --------------------------------------------------------------------------


def test_writes_to_an_adapter_are_versions_even_those_that_torch_does_not_count(share):
    model = adapted()
    rt = share(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    with rt.rollout():
        assert gap(rt, model) < 1e-5
        trained[0].data.mul_(-3)
        assert gap(rt, model) < 1e-5
        with torch.no_grad():
            trained[1].mul_(2)
        assert gap(rt, model) < 1e-5
    assert rt.weights_version == 2
    trained[0].data.mul_(2)
    assert gap(rt, model) < 1e-5
    model.base_model.model.model.layers[0].self_attn.q_proj.get_base_layer().weight.data.mul_(1.5)
    assert gap(rt, model) < 1e-5
    assert rt.weights_version == 4


def test_the_active_adapter_is_the_one_that_is_folded_and_none_where_it_is_disabled(share):
    model = adapted()
    model.add_adapter("other", config_of(*NAMED["VERA"]))
    for p in model.parameters():
        p.data.add_(0.01)
    rt = share(model)
    assert gap(rt, model) < 1e-5
    model.set_adapter("other")
    assert gap(rt, model) < 1e-5
    with model.disable_adapter():
        assert gap(rt, model) < 1e-5
    model.merge_adapter()
    assert gap(rt, model) < 1e-5
    model.unmerge_adapter()
    assert gap(rt, model) < 1e-5
    assert rt.weights_version == 4  # the base was sampled from once, and the merged one is another change


def test_after_merge_and_unload_the_engine_is_told_that_its_weights_are_gone(share):
    model = adapted()
    rt = share(model)
    rt.generate([PROMPT], max_tokens=2)
    model.merge_and_unload()
    with pytest.raises(StaleWeights, match="no longer the engine's memory"):
        rt.generate([PROMPT], max_tokens=2)


def test_without_its_adapter_the_engine_refuses_and_the_model_is_given_back(share):
    model = adapted()
    rt = share(model)
    rt.generate([PROMPT], max_tokens=2)
    model.delete_adapter(model.active_adapter)
    with pytest.raises(StaleWeights, match="default is active, and the model has it no longer"):
        rt.generate([PROMPT], max_tokens=2)
    rt.close()
    assert model.base_model.model(input_ids=torch.tensor([PROMPT])).logits.isfinite().all()


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_an_error_in_the_middle_of_folding_leaves_the_model_as_it_is_and_an_engine_that_refuses(share, monkeypatch):
    from peft.tuners.vera.layer import Linear

    model = adapted()
    rt = share(model)
    step(rt, model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merge, calls = Linear.merge, []

    def failing(layer, *args, **options):
        merge(layer, *args, **options)
        calls.append(layer)
        if len(calls) == 2:
            raise RuntimeError("broken on the way")

    with monkeypatch.context() as patched:
        patched.setattr(Linear, "merge", failing)
        with pytest.raises(RuntimeError, match="broken on the way"):
            rt.generate([PROMPT], max_tokens=2)
    assert rt.engine.weights_version is None
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not any(layer.merged for layer in model.modules() if hasattr(layer, "merged_adapters"))
    assert gap(rt, model) < 1e-5


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["auto", "copy"])
def test_one_more_copy_of_the_adapted_weights_is_counted_and_said(share, weights):
    model = adapted()
    base_bytes = sum(p.nbytes for name, p in model.named_parameters() if ".base_layer." in name)
    all_bytes = sum(p.nbytes for p in model.parameters())
    adapter_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    rt = share(model, RuntimeConfig(kv_cache_bytes=MIB, fold_adapter=True, weights=weights))
    sizes = {name: segment(rt, name).size_bytes for name in rt.scheduler.segments}
    assert sizes["trainer.base"] == base_bytes
    assert sizes["trainer.adapter"] == adapter_bytes
    assert sizes["trainer.parameters"] == all_bytes - adapter_bytes
    assert f"folded into 4 weights at each publication; a second copy of those takes {format_bytes(base_bytes)}" in str(
        rt.report().facts["adapter"]
    )
    if weights == "auto":
        rt.generate([PROMPT], max_tokens=2)
        assert rt.bytes_synced == base_bytes
        own = sum(segment(rt, name).device_bytes for name in sizes if name.startswith("trainer."))
        assert own - base_bytes - adapter_bytes <= 4 * adapter_bytes  # gradients and optimizer state
    assert rt.scheduler.working_bytes[Phase.SYNC] == 3 * 32 * (32 + 1) * 4  # the larger layer, its change and another
    source = rt.transport.source
    assert sum(tensor.untyped_storage().nbytes() for tensor in source.folded.values()) >= base_bytes
    rt.close()
    assert sum(tensor.untyped_storage().nbytes() for tensor in source.folded.values()) == 4 * 4  # an element of each


def test_a_base_in_the_engines_memory_gets_its_own(share):
    engine, base = colo.start(tiny_qwen3(), engine="torch", device="cpu", config=RuntimeConfig(kv_cache_bytes=MIB))
    expected = {name: p.detach().clone() for name, p in base.named_parameters()}
    model = drawn(peft.get_peft_model(base.requires_grad_(False), config_of(*NAMED["VERA"])))
    rt = share(model, engine=engine)
    assert_followed(rt, model)
    assert rt.transport.shares
    rt.close()
    plain = {name.replace(".base_layer", ""): p for name, p in base.named_parameters() if "vera" not in name}
    assert all(torch.equal(plain[name], tensor) for name, tensor in expected.items())


def test_launch_names_the_way_to_fold():
    with pytest.raises(Unsupported, match=r"fold_adapter=True.*colo\.start.*colo\.share"):
        colo.launch(tiny_qwen3(), lora=peft.LoraConfig(**LORA), device="cpu", config=FOLD)
    for config in (FOLD, None):
        with pytest.raises(Unsupported, match=r"colo\.start.*colo\.share.*config="):
            colo.launch(tiny_qwen3(), lora=peft.LoraConfig(**LORA, use_dora=True), device="cpu", config=config)
    with pytest.raises(Unsupported, match=r"layer_replication=.* is not supported") as refused:
        colo.launch(tiny_qwen3(), lora=peft.LoraConfig(**LORA, layer_replication=[[0, 1]]), device="cpu")
    assert "colo.start" not in str(refused.value)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_a_bias_of_an_adapter_needs_one_of_the_base(share):
    model = peft.get_peft_model(base_model(), peft.LoraConfig(target_modules=["gate_proj"], lora_bias=True))
    with pytest.raises(Unsupported, match="gate_proj has no bias, into which .* leave lora_bias out"):
        share(model)
