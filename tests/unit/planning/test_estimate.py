import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from colo.planning import estimate as module
from colo.planning.estimate import Estimate, Mode, ModelShape, Optimizer, Workload, estimate, max_generations, what_fits
from colo.planning.estimate import plan as plan_of_folder
from colo.trainer import window
from colo.units import GIB, MIB

HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
SIZES = {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
GEMMA = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024}
QWEN3_8B = ModelShape.from_config({"model_type": "qwen3", **SIZES, **HEADS})
GEMMA_3_4B = ModelShape.from_config({"model_type": "gemma3_text", **GEMMA})
MOE = ModelShape.from_config({"model_type": "qwen3_moe", **SIZES, **HEADS, **EXPERTS, "hidden_size": 2048})
SHAPES = [QWEN3_8B, GEMMA_3_4B, MOE]
PARAMETERS = 8_190_735_360  # of Qwen3-8B
MOVABLE = {"trainer.gradients", "trainer.optimizer", "trainer.master_weights"}
HUGE = 1 << 60  # a GPU on which everything stays
NO_GPU = 1  # a GPU for which everything that can leave does


def plan(shape=QWEN3_8B, **changes) -> Estimate:
    base = {"gpu_memory_bytes": 80 * GIB, "mode": "full", "context": 4096, "generations": 16}
    return estimate(shape, **{**base, **changes})


@st.composite
def workloads(draw, gpu=None):
    """Arguments of `estimate`, for GPUs of 8 to 256 GiB unless one is given."""
    return {
        "gpu_memory_bytes": gpu or draw(st.integers(8, 256)) * GIB,
        "mode": draw(st.sampled_from(Mode)),
        "optimizer": draw(st.sampled_from(Optimizer)),
        "state": draw(st.sampled_from(["resident", "streamed"])),
        "context": draw(st.integers(1, 40_000)),
        "generations": draw(st.integers(1, 300)),
        "tp": draw(st.sampled_from([1, 2, 4])),
        "lora_rank": draw(st.sampled_from([1, 16, 64])),
        "micro_batch": draw(st.integers(1, 4)),
        "offload_activations": draw(st.booleans()),
    }


def test_full_fine_tuning_of_qwen3_8b_in_bytes():
    segments = plan().segments
    assert segments["engine.weights"] == 16_381_470_720  # 16.38e9
    assert segments["trainer.parameters"] == 0  # the engine's weights are the trainer's
    assert segments["trainer.gradients"] == 2 * PARAMETERS
    assert segments["trainer.optimizer"] == 8 * PARAMETERS
    assert segments["trainer.master_weights"] == 2 * PARAMETERS
    assert segments["engine.kv_cache"] == 16 * 4096 * 147_456
    fp32 = plan(dtype_bytes=4).segments
    assert (fp32["trainer.master_weights"], fp32["trainer.gradients"]) == (0, 4 * PARAMETERS)


def test_logits_that_are_never_held_would_take_18_gib():
    found = plan(micro_batch=4, context=16_384)
    assert found.logits_bytes == 4 * 16_384 * 151_936 * 2
    assert round(found.logits_bytes / GIB, 2) == 18.55
    assert found.segments["logits"] == 512 << 20
    assert found.kv_bytes_per_token == 147_456
    assert plan(context=8, generations=1).segments["logits"] == 8 * 151_936 * (2 + 4)


def test_lora_trains_fp32_adapters_beside_a_shared_base():
    segments = plan(mode="lora", lora_rank=16).segments
    adapters = 16 * 36 * (3 * (4096 + 12_288) + 2 * (4096 + 4096) + 2 * (4096 + 1024))
    assert segments["engine.weights"] == 16_381_470_720
    assert segments["trainer.parameters"] == segments["trainer.gradients"] == 4 * adapters
    assert segments["trainer.optimizer"] == 8 * adapters
    assert segments["trainer.master_weights"] == 0
    assert segments["residual"] - plan().segments["residual"] == 2 * adapters  # the engine's own copy, 87 MB
    assert round(2 * adapters / 1e6) == 87


def test_a_folded_adapter_leaves_the_weights_beneath_beside_the_engines():
    found, beside = plan(mode="lora", fold_adapter=True), plan(mode="lora")
    linear = sum(g.num_parameters() for g in QWEN3_8B.groups if g.module in ("attention", "mlp"))
    assert found.segments["trainer.base"] == 2 * linear
    assert "trainer.base" not in beside.segments
    adapters = beside.segments["trainer.parameters"] // 4
    assert beside.segments["residual"] - found.segments["residual"] == 2 * adapters  # of which the engine has no copy
    assert all(held["trainer.base"] == 2 * linear for held in found.phases.values())
    assert module.smallest_cards(QWEN3_8B, found.workload).keys() == module.WAYS.keys()


def test_qlora_packs_the_base():
    linear = sum(g.num_parameters() for g in QWEN3_8B.groups if g.module in ("attention", "mlp"))
    rest = PARAMETERS - linear
    assert plan(mode="qlora").segments["engine.weights"] == linear // 2 + linear // 64 * 4 + 2 * rest
    unpacked = 2 * 4096 * 12_288
    held = (plan(mode="qlora").phases["rollout"]["activations"], plan(mode="lora").phases["rollout"]["activations"])
    assert held[0] - held[1] == unpacked


def tiny(kind, **changes):
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    return AutoConfig.for_model(kind, **sizes, **heads, **(experts if kind == "qwen3_moe" else {}), **changes)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "adafactor"])
def test_optimizer_state_equals_what_torch_allocates(kind, optimizer):
    config = tiny(kind)
    parameters = list(AutoModelForCausalLM.from_config(config).float().parameters())
    kinds = {"adamw": torch.optim.AdamW, "sgd-momentum": torch.optim.SGD, "adafactor": torch.optim.Adafactor}
    built = kinds[optimizer](parameters, **({"momentum": 0.9} if optimizer == "sgd-momentum" else {}))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    built.step()
    state = [value for per in built.state.values() for key, value in per.items() if key != "step"]
    found = plan(ModelShape.from_config(config.to_dict()), optimizer=optimizer)
    assert found.segments["trainer.optimizer"] == sum(t.numel() * t.element_size() for t in state)


def saved_bytes(layer, hidden, rotary, ignored):
    """Bytes of every distinct storage that autograd keeps of one layer, without those in `ignored`."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), storage)  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(hidden, position_embeddings=rotary, attention_mask=None)
    known = {tensor.untyped_storage().data_ptr() for tensor in (hidden, *rotary, *ignored)}
    return sum(size for address, (size, _) in kept.items() if address not in known)


@pytest.mark.parametrize("mode", ["full", "lora"])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"])
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning:peft")  # PEFT's own pattern
def test_activations_of_a_layer_cover_what_autograd_keeps(kind, mode):
    tokens = 512
    config = tiny(kind, attn_implementation="sdpa", **({"sliding_window": 4096} if kind == "gemma3_text" else {}))
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    if mode == "lora":
        get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    hidden = torch.randn(1, tokens, 128, dtype=torch.bfloat16, requires_grad=True)
    kinds = ("sliding_attention",) if kind == "gemma3_text" else ()
    rotary = model.model.rotary_emb(hidden, torch.arange(tokens)[None], *kinds)
    kept = saved_bytes(model.model.layers[0], hidden, rotary, list(model.parameters()))
    shape = ModelShape.from_config(config.to_dict())
    workload = Workload(gpu_memory_bytes=1, context=tokens, generations=1, mode=mode)
    merged = module._whole_matrix_bytes(shape, workload, training=True) if mode == "lora" else 0
    stated = tokens * module._layer_bytes(shape, workload) + merged
    assert 0.99 * kept <= stated <= 1.4 * kept


def test_activations_hold_a_checkpoint_for_every_layer():
    shapes = [ModelShape.from_config({**tiny("llama").to_dict(), "num_hidden_layers": n}) for n in (1, 11)]
    one, eleven = (plan(shape, context=1000).phases["train"]["activations"] for shape in shapes)
    assert eleven - one == 10 * 1000 * 128 * 2


def test_checkpoints_in_host_memory_leave_two_on_the_device():
    shapes = [ModelShape.from_config({**tiny("llama").to_dict(), "num_hidden_layers": n}) for n in (1, 2, 11)]
    kept, away = (
        [plan(shape, context=1000, offload_activations=each).phases["train"]["activations"] for shape in shapes]
        for each in (False, True)
    )
    assert away == [*kept[:2], kept[1]]
    found = plan(shapes[2], context=1000, offload_activations=True)
    assert found.activation_host_bytes == 15 * 2**18  # where each is 256,000 bytes
    assert found.to_json()["activation_host_bytes"] and not plan().activation_host_bytes


@pytest.mark.parametrize(("context", "fits"), [(77_936, True), (92_682, False)])
def test_the_longest_completions_that_were_measured_on_24_gib_are_planned(context, fits):
    found = plan_of_folder(
        "Qwen/Qwen3-1.7B",
        gpu_memory="24GiB",
        state="streamed",
        context=context,
        generations=1,
        offload_activations=True,
    )
    assert found.fits is fits


ATTENTION = 2 * (8 * 128 + 4) + 2 * 2 * (128 + 64) + 4 * 4
"""Bytes of two norms, of queries, keys, values and what comes out, and of the sums of exponentials, a token."""

ATTENTION_OF_ONE = 2 * (8 * 128 + 4) + 2 * 2 * (64 + 32) + 4 * 2  # of two ranks
QK_NORMS = 8 * (128 + 64) + 4 * (4 + 2)
ADAPTED_INPUTS = 4 * (3 * 128 + 128 + 4 * 16)
ADAPTED_MLP = 3 * 2 * 384 + 4 * (2 * 128 + 384 + 3 * 16)
ROUTED = 2 * (2 * 2 * 128 + 40) + 4 * 2 * 2 * 96 + 2 * 128 + 4 * 8  # two experts of eight


@pytest.mark.parametrize(
    ("kind", "options", "num_bytes"),
    [
        ("llama", {}, ATTENTION + 2 * 2 * 128 + 4 * 2 * 384),
        ("llama", {"tp": 2}, ATTENTION_OF_ONE + 2 * 2 * 128 + 4 * 2 * 192),
        ("llama", {"mode": "lora"}, ATTENTION + ADAPTED_INPUTS + ADAPTED_MLP),
        ("qwen3", {}, ATTENTION + QK_NORMS + 2 * 2 * 128 + 4 * 2 * 384),
        ("qwen3_moe", {}, ATTENTION + QK_NORMS + 2 * 2 * 128 + ROUTED),
        ("qwen3_moe", {"mode": "lora"}, ATTENTION + QK_NORMS + ADAPTED_INPUTS + ROUTED),
    ],
)
def test_what_a_layer_keeps_of_a_token_term_by_term(kind, options, num_bytes):
    workload = Workload(gpu_memory_bytes=1, context=8, generations=1, **options)
    assert module._layer_bytes(ModelShape.from_config(tiny(kind).to_dict()), workload) == num_bytes


def test_activations_are_checkpoints_a_layer_its_gradients_and_the_last_norm():
    shape = ModelShape.from_config(tiny("llama").to_dict())
    kept = 2 * 128 * 2 + module._layer_bytes(shape, Workload(gpu_memory_bytes=1, context=1, generations=1))
    per_token = kept + 128 * (8 + 2 * 2) + 2 * 2 * (384 + 128)
    found = plan(shape, context=50, micro_batch=3).phases["train"]["activations"]
    assert found == 3 * 50 * per_token + 2 * 384 * 128  # and a new gradient of the largest matrix


@pytest.mark.parametrize("width", [16, 960])
def test_layers_of_mixed_kinds_count_the_larger(width):
    config = {**tiny("qwen3_moe").to_dict(), "moe_intermediate_size": width}
    shapes = [ModelShape.from_config({**config, "mlp_only_layers": dense}) for dense in ([0, 1], [0], [])]
    workload = Workload(gpu_memory_bytes=1, context=8, generations=1)
    dense, mixed, experts = (module._layer_bytes(shape, workload) for shape in shapes)
    assert mixed == max(dense, experts) > min(dense, experts)


def test_engine_workspace_is_a_step_or_the_sampler():
    width = (32 + 8) * 128 + 3 * 12_288
    plans = [plan(context=context, generations=n) for context, n in ((1000, 1), (8192, 100), (8192, 1000))]
    sizes = [found.phases["start"]["activations"] for found in plans]
    assert sizes == [2 * 1000 * 4 * width, 2 * 8192 * 4 * width, 1000 * 151_936 * 38]
    assert plans[0].phases["rollout"]["activations"] == 1000 * 4 * width, "and less once it has warmed up"
    shared = plan(context=1000, generations=1, tp=2).phases["start"]["activations"]
    assert shared == max(2 * 1000 * 4 * width // 2, 151_936 * 38)
    routed = (32 + 8) * 128 + 8 * (3 * 768 + 2048)
    assert plan(MOE, context=4000, generations=1).phases["rollout"]["activations"] == 4000 * 4 * routed


def test_the_sampler_takes_most_as_the_engine_starts_when_there_is_no_state_yet():
    given = {"context": 512, "generations": 4000, "mode": "lora"}
    found = plan(**given, gpu_memory_bytes=HUGE)
    start, rollout = found.phases["start"], found.phases["rollout"]
    assert (start["activations"], rollout["activations"]) == (4000 * 151_936 * 38, 4000 * 151_936 * 4)
    same = ("engine.weights", "engine.kv_cache", "trainer.parameters", "residual")
    assert all(start[name] == rollout[name] for name in same)
    assert sum(start.values()) == start["activations"] + sum(start[name] for name in same)
    assert found.needed_bytes == found.peak_bytes == sum(start.values())
    assert plan(**given, gpu_memory_bytes=found.needed_bytes).offloaded["rollout"] == (), "which has room for the state"


def test_whole_matrices_that_exist_for_a_moment():
    full, lora = (Workload(gpu_memory_bytes=1, context=8, generations=1, mode=mode) for mode in ("full", "lora"))
    assert module._whole_matrix_bytes(QWEN3_8B, full, training=True) == 2 * 151_936 * 4096  # a gradient
    assert module._whole_matrix_bytes(QWEN3_8B, lora, training=True) == 0
    assert module._whole_matrix_bytes(MOE, lora, training=True) == (2 + 4) * 128 * 3 * 768 * 2048  # merged experts
    assert {module._whole_matrix_bytes(MOE, w, training=False) for w in (full, lora)} == {0}


def test_phases_hold_what_they_need():
    found = plan(gpu_memory_bytes=HUGE)
    rollout, sync, train = (found.phases[name] for name in ("rollout", "sync", "train"))
    assert set(found.phases) == set(found.offloaded) == {"start", "rollout", "sync", "train"}
    assert rollout["engine.kv_cache"] == found.segments["engine.kv_cache"]
    assert sync["engine.kv_cache"] == train["engine.kv_cache"] == 0
    assert rollout["logits"] == sync["logits"] == sync["activations"] == 0
    assert {phase["engine.weights"] for phase in (rollout, sync, train)} == {found.segments["engine.weights"]}
    assert all(list(held) == list(found.segments) for held in found.phases.values())


@pytest.mark.parametrize(
    ("gpu_gib", "gone", "moved"),
    [
        (145, set(), ()),  # all of it
        (144, {"trainer.gradients"}, ()),  # gradients cost nothing to drop
        (124, {"trainer.gradients", "trainer.master_weights"}, ("trainer.master_weights",)),  # the fewest bytes
        (90, {"trainer.gradients", "trainer.optimizer"}, ("trainer.optimizer",)),
        (60, MOVABLE, ("trainer.optimizer", "trainer.master_weights")),
    ],
)
def test_what_leaves_for_a_rollout_is_the_cheapest_that_makes_it_fit(gpu_gib, gone, moved):
    held = {
        "engine.weights": 20 * GIB,
        "trainer.gradients": 20 * GIB,
        "trainer.optimizer": 60 * GIB,
        "trainer.master_weights": 30 * GIB,
        "engine.kv_cache": 15 * GIB,
    }
    away = module._leaving(held, gpu_gib * GIB)
    assert set(away) == gone
    assert tuple(name for name in away if name != "trainer.gradients") == moved


def test_state_is_streamed_where_it_does_not_fit_as_a_whole():
    resident, streamed = plan(state="resident"), plan(state="streamed")
    assert not resident.fits and streamed.fits
    full = streamed.needed_bytes  # where nothing of it stays
    assert plan(gpu_memory_bytes=full).phases == plan(state="streamed", gpu_memory_bytes=full).phases
    assert not plan(gpu_memory_bytes=140 * GIB).streamed and plan(gpu_memory_bytes=140 * GIB).step_wait_s == 0
    assert streamed.step_wait_s == pytest.approx(10 * PARAMETERS / 54.6e9, rel=1e-3)
    step, elements = streamed.phases["step"], 128 * MIB // 10
    assert step["trainer.optimizer"] == (3 * 10 + 8 + 2) * elements  # and what is stepped: masters, gradients, weights
    assert step["activations"] == streamed.phases["train"]["trainer.optimizer"] == 0
    assert streamed.host_bytes == streamed.state_bytes == 10 * PARAMETERS
    assert all(
        "trainer.optimizer" in away for phase, away in streamed.offloaded.items() if phase not in ("start", "step")
    )


def test_of_streamed_state_stays_what_every_phase_leaves_free():
    streamed, found = plan(state="streamed"), plan()
    stays = found.resident_state_bytes
    held = {phase: sum(of.values()) for phase, of in found.phases.items() if phase != "start"}
    train = found.phases["train"]
    held["train"] += 10 * GIB - train["activations"] - train["logits"]  # an eighth of the GPU for the pass
    held["train"] += found.phases["step"]["trainer.optimizer"]  # and the window beside it
    assert max(held.values()) + stays == 80 * GIB and stays > 20 * GIB
    assert found.host_bytes == streamed.host_bytes - stays
    assert found.step_wait_s == pytest.approx((found.state_bytes - stays) / 54.6e9)
    assert streamed.resident_state_bytes == plan(state="resident").resident_state_bytes == 0
    assert plan(release_gradients=True).resident_state_bytes == 0
    assert plan(release_gradients=True).streamed, "as RuntimeConfig has it"
    assert plan(gpu_memory_bytes=found.needed_bytes).resident_state_bytes == 0
    assert plan(optimizer="adafactor", gpu_memory_bytes=50 * GIB).streamed
    assert plan(optimizer="adafactor", gpu_memory_bytes=50 * GIB).resident_state_bytes == 0, "of whole parameters"


def test_a_window_that_state_stays_beside_has_a_slot_more():
    streamed, found = plan(state="streamed"), plan()
    slot = 10 * (128 * MIB // 10)
    assert found.resident_slot_bytes == slot and not streamed.resident_slot_bytes
    step = streamed.phases["step"]
    assert found.phases == {**streamed.phases, "step": {**step, "trainer.optimizer": step["trainer.optimizer"] + slot}}
    assert found.needed_bytes == streamed.needed_bytes, "on a smaller GPU none stays"
    limit = next(of for of in range(found.needed_bytes, 80 * GIB, MIB) if plan(gpu_memory_bytes=of).resident_slot_bytes)
    assert 0 < plan(gpu_memory_bytes=limit).resident_state_bytes < 2 * MIB


def test_moments_in_bf16_take_half_of_the_host_and_of_the_bus():
    wide, found = plan(state="streamed"), plan(state="streamed", moment_dtype="bfloat16")
    assert found.host_bytes == found.state_bytes == 6 * PARAMETERS and wide.state_bytes == 10 * PARAMETERS
    assert found.step_wait_s == pytest.approx(0.6 * wide.step_wait_s)
    elements = 128 * MIB // 6  # slots, and of what is stepped masters, gradients and two moments in fp32, and weights
    assert found.phases["step"]["trainer.optimizer"] == (3 * 6 + 8 + 8 + 2) * elements
    auto = plan(moment_dtype="bfloat16", gpu_memory_bytes=140 * GIB)
    assert auto.streamed and auto.resident_state_bytes == auto.state_bytes and not auto.step_wait_s
    assert plan(mode="lora", moment_dtype="bfloat16").state_bytes * 2 == plan(mode="lora").state_bytes
    for name, value in (("state", "resident"), ("optimizer", "adafactor")):
        with pytest.raises(
            ValueError, match=f"moment_dtype bfloat16 is of streamed AdamW or SGD, and {name} is {value}"
        ):
            plan(moment_dtype="bfloat16", **{name: value})
    with pytest.raises(ValueError, match="moment_dtype must be one of float32, bfloat16"):
        plan(moment_dtype="bf16")


def test_qwen3_8b_is_trained_in_full_on_48_gib():
    assert plan(gpu_memory_bytes=48 * GIB, generations=8).fits
    assert not plan(gpu_memory_bytes=48 * GIB, generations=8, state="resident").fits


def test_ranges_are_as_large_as_a_runtime_makes_them():
    for name in ("RANGE_BYTES", "NUM_SLOTS"):
        assert getattr(module, name) == getattr(window, name)


def test_released_gradients_are_those_of_the_two_largest_parameters():
    kept, released = (plan(state="streamed", release_gradients=each) for each in (False, True))
    assert released.segments["trainer.gradients"] == 2 * 2 * 151_936 * 4096
    assert "step" not in released.phases and released.phases["train"]["trainer.optimizer"] > 0
    assert released.needed_bytes < kept.needed_bytes


def test_what_fills_a_gpu_to_the_last_byte_fits_it():
    needed = plan().needed_bytes
    assert plan(gpu_memory_bytes=needed).fits and not plan(gpu_memory_bytes=needed - 1).fits


def test_offloaded_bytes_are_on_the_host_and_not_on_the_device():
    found = plan(gpu_memory_bytes=124 * GIB, context=16_384)
    assert found.fits
    assert found.offloaded == {"start": (), "rollout": ("trainer.master_weights",), "sync": (), "train": ()}
    assert found.host_bytes == found.segments["trainer.master_weights"]
    assert found.phases["rollout"]["trainer.master_weights"] == found.phases["rollout"]["trainer.gradients"] == 0
    assert found.phases["train"]["trainer.master_weights"] == found.host_bytes


def test_json_has_exactly_these_keys_and_is_plain():
    found = plan()
    keys = "segments phases peak_bytes naive_peak_bytes fits kv_bytes_per_token logits_bytes suggestions offloaded"
    keys += (
        " host_bytes activation_host_bytes resident_state_bytes streamed step_wait_s needed_bytes kv_bytes_per_sequence"
        " remarks"
    )
    assert set(found.to_json()) == set(keys.split())
    assert json.loads(json.dumps(found.to_json())) == found.to_json()
    assert plan(gpu_memory_bytes=30 * GIB).to_json()["suggestions"]


@given(shape=st.sampled_from(SHAPES), arguments=workloads())
@settings(max_examples=150)
def test_peak_is_the_largest_phase_and_decides_what_fits(shape, arguments):
    found = estimate(shape, **arguments)
    totals = [sum(held.values()) for held in found.phases.values()]
    assert found.peak_bytes == max(totals)
    assert found.streamed or found.peak_bytes <= found.naive_peak_bytes
    assert found.fits == (found.peak_bytes <= arguments["gpu_memory_bytes"])
    assert found.fits == (found.needed_bytes <= arguments["gpu_memory_bytes"])
    parked = module._evaluate(shape, Workload(**{**arguments, "gpu_memory_bytes": NO_GPU}))
    assert found.needed_bytes == parked.peak_bytes
    for phase, held in found.phases.items():
        bound = found.segments | ({"trainer.optimizer": found.peak_bytes} if phase == "step" else {})
        assert all(0 <= held[name] <= size for name, size in bound.items())
    assert not (found.fits and found.suggestions)


@given(
    shape=st.sampled_from(SHAPES),
    arguments=st.one_of(workloads(gpu=HUGE), workloads(gpu=NO_GPU)),
    field=st.sampled_from(["context", "generations", "micro_batch", "lora_rank"]),
    more=st.integers(1, 1000),
)
@settings(max_examples=150)
def test_peak_grows_with_the_work(shape, arguments, field, more):
    workload = Workload(**arguments)
    grown = Workload(**{**arguments, field: arguments[field] + more})
    before, after = module._evaluate(shape, workload), module._evaluate(shape, grown)
    assert after.peak_bytes >= before.peak_bytes
    assert after.needed_bytes >= before.needed_bytes
    assert after.naive_peak_bytes >= before.naive_peak_bytes


@given(shape=st.sampled_from(SHAPES), arguments=st.one_of(workloads(gpu=HUGE), workloads(gpu=NO_GPU)))
@settings(max_examples=100)
def test_peak_shrinks_with_ranks(shape, arguments):
    one, two = (module._evaluate(shape, Workload(**{**arguments, "tp": n * arguments["tp"]})) for n in (1, 2))
    assert (two.peak_bytes, two.needed_bytes) < (one.peak_bytes, one.needed_bytes)
    assert two.needed_bytes < one.needed_bytes


@given(shape=st.sampled_from(SHAPES), arguments=workloads(), smaller=st.integers(1, 40_000))
@settings(max_examples=100)
def test_what_fits_still_fits_with_less_to_do_or_a_larger_gpu(shape, arguments, smaller):
    assume(estimate(shape, **arguments).fits)
    for field in ("context", "generations"):
        assert estimate(shape, **{**arguments, field: min(smaller, arguments[field])}).fits
    assert estimate(shape, **{**arguments, "gpu_memory_bytes": arguments["gpu_memory_bytes"] + smaller}).fits


@given(shape=st.sampled_from(SHAPES), arguments=workloads())
@settings(max_examples=60)
def test_suggestions_are_true(shape, arguments):
    for suggestion in estimate(shape, **arguments).suggestions:
        fields = {name: getattr(suggestion.workload, name) for name in Workload.__slots__}
        changed = {name for name in arguments if fields[name] != arguments[name]}
        assert len(changed) == 1
        assert estimate(shape, **fields).fits
        if changed & {"context", "generations"}:
            assert str(fields[changed.pop()]) in suggestion.text


def test_suggestions_name_what_would_do():
    texts = plan(gpu_memory_bytes=24 * GIB, mode="lora").to_json()["suggestions"]
    names = [text.split(" would fit: needs ")[0] for text in texts]
    assert names == ["context 1792", "at most 7 generations", "QLoRA of rank 16"]
    full = plan(gpu_memory_bytes=80 * GIB, state="resident").to_json()["suggestions"]
    names = [text.split(" would fit: needs ")[0] for text in full]
    assert names == ["LoRA of rank 16", "QLoRA of rank 16", "optimizer adafactor"]
    assert plan(gpu_memory_bytes=GIB).suggestions == ()  # hopeless
    few = plan(gpu_memory_bytes=24 * GIB, mode="lora", context=200, generations=300)
    assert few.suggestions[0].text.startswith("context 97 would fit: needs ")  # to the token, where there are few
    assert not plan(gpu_memory_bytes=24 * GIB, mode="lora", context=98, generations=300).fits


def test_suggestions_say_that_they_are_for_each_gpu_of_several():
    for tp in (1, 2):
        texts = plan(gpu_memory_bytes=40 * GIB, tp=tp, state="resident").to_json()["suggestions"]
        assert {text.endswith(" on each GPU") for text in texts} == {tp > 1}


def test_a_folder_is_planned_as_its_config_on_an_h100_unless_said_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **SIZES, **HEADS}))
    expected = plan(gpu_memory_bytes=int(79.1 * GIB), mode="full", context=4096, generations=8)
    assert plan_of_folder(tmp_path) == plan_of_folder(str(tmp_path)) == expected
    assert plan_of_folder(str(tmp_path), gpu_memory="2MiB", tp=2).workload == replace(
        expected.workload, gpu_memory_bytes=2 << 20, tp=2
    )
    with pytest.raises(ValueError, match="less than 1.00 MiB"):
        plan_of_folder(str(tmp_path), gpu_memory=1000)


@given(shape=st.sampled_from(SHAPES), arguments=workloads())
@settings(max_examples=60)
def test_max_generations_is_the_most_that_fit(shape, arguments):
    most = max_generations(shape, **arguments)
    if most:
        assert estimate(shape, **{**arguments, "generations": most}).fits
    assert not module._evaluate(shape, Workload(**{**arguments, "generations": most + 1})).fits


def test_table_of_contexts_against_generations():
    rows = what_fits(QWEN3_8B, [2048, 8192], gpu_memory_bytes=140 * GIB, mode="full")
    assert [row.context for row in rows] == [2048, 8192]
    assert rows[0].generations > rows[1].generations
    for row in rows:
        found = plan(gpu_memory_bytes=140 * GIB, context=row.context, generations=max(1, row.resident_generations))
        assert sum(found.phases["train"].values()) == row.train_bytes
        assert row.resident_generations <= row.generations
        assert (found.host_bytes == 0) == (row.resident_generations > 0)
    (row,) = what_fits(QWEN3_8B, [4096], gpu_memory_bytes=80 * GIB, mode="full", state="resident")
    assert (row.generations, row.resident_generations) == (0, 0)  # training itself does not fit
    assert row.train_bytes > 80 * GIB


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "dora"}, "mode must be one of full, lora, qlora, but is 'dora'"),
        ({"state": "host"}, "state must be one of auto, resident, streamed, but is 'host'"),
        ({"optimizer": "lion"}, "optimizer must be one of adamw, sgd-momentum, adafactor, but is 'lion'"),
        ({"context": 0}, "context must be at least 1, but is 0"),
        ({"generations": 0}, "generations must be at least 1, but is 0"),
        ({"gpu_memory_bytes": 0}, "gpu_memory_bytes must be at least 1, but is 0"),
        ({"residual_bytes": -1}, "residual_bytes must be at least 0, but is -1"),
        ({"fold_adapter": True}, "fold_adapter is for mode lora, an adapter on 16-bit weights, and mode is full"),
        ({"tp": 5}, "tp 5 does not divide num_attention_heads = 32"),
    ],
)
def test_a_workload_out_of_range_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": "4096"}, "context must be a whole number, not '4096'"),
        ({"context": 4096.5}, "context must be a whole number, not 4096.5"),
        ({"generations": True}, "generations must be a whole number, not True"),
        ({"tp": None}, "tp must be a whole number, not None"),
        ({"residual_bytes": "1GiB"}, "residual_bytes must be a whole number, not '1GiB'"),
        ({"offload_activations": "no"}, "offload_activations must be True or False, not 'no'"),
        ({"release_gradients": 1}, "release_gradients must be True or False, not 1"),
    ],
)
def test_a_field_of_another_type_is_named(changes, message):
    with pytest.raises(TypeError, match=message):
        plan(**changes)


def test_numbers_of_numpy_plan_what_pythons_plan():
    sizes = {"context": 4096, "generations": 8, "tp": 2, "micro_batch": 2, "gpu_memory_bytes": 2**31 - 1}
    found = plan(**{name: np.int32(size) for name, size in sizes.items()}).to_json()
    assert found == plan(**sizes).to_json()
    assert json.loads(json.dumps(found)) == found


def test_gradients_are_not_released_beside_resident_state():
    with pytest.raises(ValueError, match="release_gradients steps streamed state, and state is resident"):
        plan(release_gradients=True, state="resident")


def test_an_unknown_or_missing_field_is_refused():
    with pytest.raises(TypeError, match="micro_batches"):
        plan(micro_batches=2)
    with pytest.raises(TypeError, match="context"):
        max_generations(QWEN3_8B, gpu_memory_bytes=GIB)


def test_planning_imports_neither_torch_nor_transformers():
    code = "import sys, colo.planning.estimate; print({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
