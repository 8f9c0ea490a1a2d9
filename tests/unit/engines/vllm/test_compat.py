import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from colo.engines.vllm import compat


def test_lora_buffers_of_a_worker_leave_the_tables_and_those_of_others_stay(monkeypatch):
    ours, others = [torch.ones(2, 1, 4, 3) for _ in range(5)], torch.ones(2, 1, 4, 3)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].lora_a_stacked, model[0].lora_b_stacked = tuple(ours[:2]), list(ours[2:4])
    model[1].scale_stacked, model[1].rows_stacked = ours[4], None
    tables = {"_A_PTR_DICT": ours[:2], "_B_PTR_DICT": ours[2:4], "_SCALE_PTR_DICT": ours[4:]}
    for number, (name, tensors) in enumerate(tables.items()):
        module = ModuleType(f"vllm.lora.ops.triton_ops.op{number}")
        table = {(tensor.data_ptr(), 8): tensor for tensor in tensors} | {(others.data_ptr(),): others}
        setattr(module, name, table)
        module.unrelated = {(tensors[0].data_ptr(),): 1}
        monkeypatch.setitem(sys.modules, module.__name__, module)
    compat.forget_lora_buffers(SimpleNamespace(get_model=lambda: model))
    for number, name in enumerate(tables):
        module = sys.modules[f"vllm.lora.ops.triton_ops.op{number}"]
        assert list(getattr(module, name)) == [(others.data_ptr(),)]
        assert len(module.unrelated) == 1


def test_the_class_of_a_model_is_imported_where_vllm_would_ask_another_process_about_it(monkeypatch, tmp_path):
    registry = pytest.importorskip("vllm.model_executor.models.registry")
    models = pytest.importorskip("vllm.model_executor.models")
    known = {
        name: registry._LazyRegisteredModel(f"vllm.model_executor.models.{name[:5].lower()}", name)
        for name in ("LlamaForCausalLM", "MissingForCausalLM")
    }
    before = dict(known)
    monkeypatch.setattr(models, "ModelRegistry", registry._ModelRegistry(known))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # where nothing is known of any class
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda _: pytest.fail("another process is asked"))
    for names in ([], ["nobody's"], ["MissingForCausalLM", "LlamaForCausalLM"]):
        compat.import_model(names)  # of the first that there is, and vLLM tells what is wrong with it
        assert known == before
    for _ in "12":  # also where it has been imported
        compat.import_model(["nobody's", "LlamaForCausalLM", "MissingForCausalLM"])
        assert models.ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls().is_text_generation_model
    assert known == before | {"LlamaForCausalLM": known["LlamaForCausalLM"]} != before


def test_what_runs_at_once_is_what_is_given_or_vllms_own():
    vllm = pytest.importorskip("vllm.engine.arg_utils")
    from vllm.usage.usage_lib import UsageContext

    tokens, sequences = (each[UsageContext.LLM_CLASS] for each in vllm.EngineArgs.get_batch_defaults(world_size=1))
    assert compat.most_at_once({}) == compat.most_at_once({"max_num_seqs": None}) == (tokens, sequences)
    assert tokens > sequences > 4
    assert compat.most_at_once({"performance_mode": "throughput"}) == (2 * tokens, 2 * sequences)
    assert compat.most_at_once({"max_num_batched_tokens": 4}) == (4, 4), "a step has a token of each"
    assert compat.most_at_once({"max_num_seqs": 3, "performance_mode": "throughput"}) == (2 * tokens, 3)
    assert compat.most_at_once({"max_num_seqs": 3, "max_model_len": 100}) == (300, 3), "no step is larger"
    assert compat.most_at_once({"max_num_batched_tokens": 400, "max_num_seqs": 3, "max_model_len": 100}) == (400, 3)
    whole = {"enable_chunked_prefill": False, "max_model_len": 100 * tokens}
    assert compat.most_at_once(whole) == (100 * tokens, sequences), "or the longest prompt would not fit"
    assert compat.most_at_once({"max_model_len": "auto"}) == compat.most_at_once({"max_model_len": -1})


@pytest.mark.parametrize("seed", [None, 5])
def test_random_numbers_of_vllm_begin_by_a_seed_or_by_the_callers_and_leave_those_alone(seed):
    drawn = []
    for callers in (1, 2, 2):
        torch.manual_seed(callers)
        expected = torch.rand(2, device="cpu").tolist()
        torch.manual_seed(callers)
        own = compat.OwnRandomNumbers(torch.device("cpu"), seed)
        with own.used():
            first = torch.rand(2, device="cpu").tolist()
        assert torch.rand(2, device="cpu").tolist() == expected
        with own.used():
            drawn.append((first, torch.rand(2, device="cpu").tolist()))
    one, other, again = drawn
    assert other == again and other[0] != other[1]
    assert (one == other) == (seed is not None)
