import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from colo.planning.estimate import Mode, ModelShape, estimate
from colo.planning.table import plan_tables
from colo.units import GIB, format_bytes

HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40_960}
SIZES = {"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36}
QWEN3_8B = ModelShape.from_config({"model_type": "qwen3", **SIZES, **HEADS})
GEMMA = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024}


def plan(**changes):
    base = {"gpu_memory_bytes": 120 * GIB, "mode": "full", "context": 8192, "generations": 32, "state": "resident"}
    return estimate(changes.pop("shape", QWEN3_8B), **{**base, **changes})


def render(found, **arguments):
    console = Console(file=io.StringIO(), width=80)
    for part in plan_tables(found, **arguments):
        console.print(part)
    return console.file.getvalue()


def row(text, name):
    """The cells of one row, by its first words."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(name + "  ")]
    return [cell.strip() for cell in line.strip().removeprefix(name).split("  ") if cell.strip()]


def test_segments_show_bytes_or_where_they_are():
    text = render(plan(), model="Qwen/Qwen3-8B")
    assert row(text, "segment") == ["rollout", "sync", "train"]
    assert row(text, "engine.weights") == ["15.26 GiB"] * 3
    assert row(text, "engine.kv_cache") == ["36.00 GiB", "dropped", "dropped"]
    assert row(text, "trainer.parameters") == ["shared"] * 3
    assert row(text, "trainer.gradients") == ["dropped", "15.26 GiB", "15.26 GiB"]
    assert row(text, "trainer.master_weights") == ["host", "15.26 GiB", "15.26 GiB"]
    assert row(text, "logits") == ["-", "-", "512.00 MiB"]
    assert row(text, "total") == ["115.46 GiB", "108.70 GiB", "115.33 GiB"]


def test_marks_are_explained_where_they_are_used():
    text = render(plan())
    for word in ("shared", "host", "dropped", "activations", "logits", "residual"):
        assert f"{word}: " in text
    roomy = render(plan(gpu_memory_bytes=1000 * GIB))
    assert "host: " not in roomy
    assert row(roomy, "trainer.gradients") == ["15.26 GiB"] * 3


def test_what_was_asked_comes_first():
    lines = render(plan(mode="lora", tp=2), model="Qwen/Qwen3-8B").splitlines()
    assert lines[:3] == [
        "Qwen/Qwen3-8B: 8.19 billion parameters",
        "LoRA of rank 16 with adamw, on each of 2 GPUs of 120.00 GiB",
        "32 x 8192 tokens in a rollout, 1 x 8192 in a training pass",
    ]
    assert render(plan()).startswith("qwen3: 8.19 billion parameters\nfull fine-tuning with adamw, on one GPU")


def test_peak_is_compared_with_the_gpu_and_with_not_taking_turns():
    text = render(plan())
    assert "Peak 115.46 GiB of 120.00 GiB: fits, 4.54 GiB to spare" in text
    assert "a copy of the weights each: 166.58 GiB" in text
    assert "As the engine starts, 55.72 GiB: 2.56 GiB to warm up" in text
    assert "Parked during rollouts, 15.26 GiB of host memory: trainer.master_weights" in text
    assert "KV cache: 144.00 KiB a token" in text
    assert "makes it fit" not in text


def test_streamed_state_says_where_it_is_and_what_a_step_waits_for():
    text = render(plan(gpu_memory_bytes=48 * GIB, state="auto", context=4096, generations=8))
    assert row(text, "segment") == ["rollout", "sync", "train", "step"]
    assert row(text, "trainer.optimizer") == ["host", "host", "host", "640.00 MiB"]
    assert row(text, "trainer.master_weights") == ["host"] * 4
    assert "The optimizer's state, 76.28 GiB, is streamed: in host memory" in text
    assert "8.96 GiB of it stay on the device. A step waits 1.32 s for the rest at 54.6 GB/s" in text
    text = render(plan(gpu_memory_bytes=48 * GIB, state="streamed", context=4096, generations=8))
    assert "A step waits 1.50 s for it at 54.6 GB/s" in text and "stay on the device" not in text
    text = render(plan(gpu_memory_bytes=140 * GIB, state="auto", moment_dtype="bfloat16", context=4096, generations=8))
    assert "The optimizer's state, 45.77 GiB, stays on the device, stepped range by range" in text
    assert "A step waits" not in text and "in host memory, and" not in text


def test_the_smallest_card_is_named_for_each_way_to_train():
    text = render(plan(context=4096, generations=8))
    assert row(text, "LoRA") == ["24.46 GiB", "RTX 5090", "31.30 GiB"]
    assert row(text, "full, resident") == ["112.84 GiB", "H200", "139.70 GiB"]
    assert row(text, "full, streamed") == ["36.56 GiB", "A100 40GB", "39.40 GiB"]
    assert row(render(plan(context=4096, generations=1600)), "full, resident")[1] == "none"


def test_a_peak_above_what_a_smaller_gpu_needs_says_both():
    lora = {"mode": "lora", "lora_rank": 64, "context": 4096, "generations": 8}
    text = render(plan(**lora, gpu_memory_bytes=28 * GIB))
    assert "Peak 25.86 GiB of 28.00 GiB: fits, 2.14 GiB to spare; 25.19 GiB would do, with" in text
    assert row(text, "LoRA")[0] == "25.19 GiB"
    tight = render(plan(**lora, gpu_memory_bytes=int(25.2 * GIB)))
    assert "Peak 25.19 GiB of 25.20 GiB" in tight and "would do" not in tight


def test_a_gpu_with_a_name_is_called_by_it():
    assert "on one GPU of 120.00 GiB (H100 of old)" in render(plan(), card="H100 of old")


MAMBA = {"model_type": "mamba", "hidden_size": 256, "num_hidden_layers": 4, "state_size": 16, "intermediate_size": 512}


def test_a_recurrent_state_counts_by_the_sequence_and_not_by_the_token():
    states = ModelShape.from_config(MAMBA | {"vocab_size": 1000})
    for context in (128, 65_536):
        found = plan(shape=states, context=context)
        assert found.kv_bytes_per_token == 0
        assert found.segments["engine.kv_cache"] == 32 * found.kv_bytes_per_sequence > 0
        assert f"KV cache: {format_bytes(found.kv_bytes_per_sequence)} a sequence. Logits" in render(found)
    both = ModelShape.from_config(
        {"model_type": "qwen3_next", "num_hidden_layers": 4, "num_experts": 4, "vocab_size": 1000}
    )
    found = plan(shape=both)
    assert found.kv_bytes_per_token == 2 * 2 * 256 * 2  # one layer of attention in four
    assert " a token and " in render(found) and "a sequence. Logits" in render(found)


def test_what_does_not_fit_says_what_would():
    found = plan(gpu_memory_bytes=24 * GIB, mode="lora", context=4096, generations=16)
    text = render(found)
    assert "does not fit, 4.96 GiB missing" in text
    assert found.suggestions
    for suggestion in found.suggestions:
        assert f"  {suggestion.text}" in text


def test_nothing_parked_and_nothing_to_suggest_are_said():
    assert "Nothing has to be parked on the host" in render(plan(gpu_memory_bytes=1000 * GIB))
    assert "Layers' inputs" not in render(plan())
    assert "Layers' inputs wait in 2.50 GiB of host memory" in render(plan(offload_activations=True))
    assert "No single change makes it fit" in render(plan(gpu_memory_bytes=GIB))


def test_contexts_go_up_to_what_the_model_was_made_for():
    text = render(plan(context=5000))
    assert row(text, "asked: 5000")[0].isdigit()
    assert row(text, "32768")[-1] == "130.24 GiB (too much)"
    assert row(text, "32768")[:2] == ["none", "none"]
    assert "65536" not in text
    assert row(text, "4096") == ["44", "178", "112.84 GiB"]


def test_a_context_beyond_the_models_own_is_pointed_out():
    assert "50000 tokens are more than the 40960 that the model was made for" in render(plan(context=50_000))
    assert "made for" not in render(plan(context=40_960))


def test_parts_that_are_not_counted_are_named():
    nested = ModelShape.from_config({"model_type": "gemma3", "text_config": GEMMA, "vision_config": {}})
    assert "the text model only: vision_config is not counted" in render(plan(shape=nested))
    assert "not counted" not in render(plan())


@given(
    mode=st.sampled_from(Mode),
    gpu=st.integers(1, 2000),
    context=st.integers(1, 131_072),
    generations=st.integers(1, 4096),
)
@settings(max_examples=40)
def test_tables_fit_80_columns_and_hold_the_peak(mode, gpu, context, generations):
    found = plan(mode=mode, gpu_memory_bytes=gpu * GIB, context=context, generations=generations)
    text = render(found)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\u2026" not in text  # nothing is cut
    assert f"Peak {format_bytes(found.peak_bytes)} of" in text


@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_adapters_are_the_trainers_own_parameters(mode):
    assert row(render(plan(mode=mode)), "trainer.parameters") == ["166.50 MiB"] * 3
