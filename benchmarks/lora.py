"""`lora`: the next version of a LoRA adapter to vLLM, ours beside others.

A worker in another process reads it in place or, where that cannot be, in a slab. The others are files on disk and in
RAM, colo's own first load from tensors, and, in this process, vLLM's own `LoRAModel.from_lora_tensors`, added and
activated. Random weights, rank 16 on every linear layer of the decoder but experts, by the public call that a
publication makes. A call to the worker that does nothing is measured, too.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from benchmarks.common import Record, Row, clear, median_s
from benchmarks.workload import Setup, prepared, worker_of
from colo.engine import AdapterWeights
from colo.engines.vllm.client.engine import VLLMEngine
from colo.engines.vllm.wire import AdapterRefusal

RANK = 16
ALPHA = 32
RAM_DISK = Path("/dev/shm")

_numbers = itertools.count(1)


def run(record: Record, *, shape: str, device: str) -> None:
    """Measure adapters of one shape; see `prepared`."""
    with prepared(record, shape, device) as setup:
        adapter = _adapter(setup.config, setup.device)
        for own_process in (True, False):
            record.tell("in its own process" if own_process else "in this process")
            for row in _measure(setup.small(), adapter, own_process=own_process):
                record.add(row)


def _measure(setup: Setup, adapter: AdapterWeights, *, own_process: bool) -> Iterator[Row]:
    device = setup.device
    where = "own process" if own_process else "in process"
    modules = sorted({name.rpartition(".")[2] for name in adapter.a})
    driven = setup.engine(own_process=own_process, max_lora_rank=RANK, lora_target_modules=modules)
    driven.pause()
    driven.load_adapter("policy@0", adapter)
    yield _row(f"colo, {where}", adapter, median_s(partial(_replace, driven, adapter), device, repeats=20, warmup=3))
    if own_process:
        staged = replace(adapter, shared=False)
        way = partial(_replace, driven, staged)
        yield _row(f"colo, through a slab, {where}", staged, median_s(way, device, repeats=20, warmup=3))
    yield _row(f"an empty call, {where}", None, median_s(partial(_ask_nothing, driven), device, repeats=20, warmup=3))
    yield _row(f"a fresh load from tensors, {where}", adapter, median_s(partial(_reload, driven, adapter), device))
    if not own_process:
        yield _row(f"LoRAModel.from_lora_tensors, {where}", adapter, median_s(_from_tensors(driven, adapter), device))
    _forget(driven)
    for name, base in (("disk", Path(tempfile.gettempdir())), ("RAM disk", RAM_DISK)):
        with tempfile.TemporaryDirectory(prefix="colo-", dir=base) as path:
            way = partial(_through_files, driven, adapter, Path(path))
            yield _row(f"{name}, {where}", adapter, median_s(way, device, repeats=3))
    driven.close()
    clear(device)


def _replace(driven: VLLMEngine, adapter: AdapterWeights) -> None:
    (loaded,) = driven.adapters
    driven.replace_adapter(loaded, f"policy@{next(_numbers)}", adapter)


def _ask_nothing(driven: VLLMEngine) -> None:
    """One call to the worker and back: the least that replacing an adapter can take."""
    driven.link.call(AdapterRefusal())


def _reload(driven: VLLMEngine, adapter: AdapterWeights) -> None:
    _forget(driven)
    driven.load_adapter(f"policy@{next(_numbers)}", adapter)


def _forget(driven: VLLMEngine) -> None:
    for name in list(driven.adapters):
        driven.remove_adapter(name)


def _from_tensors(driven: VLLMEngine, adapter: AdapterWeights) -> Callable[[], None]:
    """Load an adapter from tensors as vLLM itself does, without colo."""
    (worker,) = driven.llm.collective_rpc(worker_of)
    tensors = _named(adapter)

    def load() -> None:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = worker.model_runner.lora_manager
        unscaled = {"lora_alpha": RANK}  # or vLLM scales the tensors that it is given, in place
        helper = PEFTHelper.from_dict(_settings(adapter) | unscaled | {"vllm_max_position_embeddings": None})
        loaded = LoRAModel.from_lora_tensors(
            1, tensors, helper, device=str(worker.device), dtype=manager.lora_config.lora_dtype
        )
        adapters = manager._adapter_manager
        adapters.remove_adapter(1)
        adapters.add_adapter(loaded)
        adapters.activate_adapter(1)

    return load


def _named(adapter: AdapterWeights) -> dict[str, torch.Tensor]:
    """An adapter's matrices by PEFT's names."""
    tensors = {f"base_model.model.{name}.lora_A.weight": t for name, t in adapter.a.items()}
    return tensors | {f"base_model.model.{name}.lora_B.weight": t for name, t in adapter.b.items()}


def _settings(adapter: AdapterWeights) -> dict[str, Any]:
    """The adapter's configuration, as PEFT writes it."""
    modules = sorted({name.rsplit(".", 1)[1] for name in adapter.a})
    return {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules, "bias": "none"}


def _through_files(driven: VLLMEngine, adapter: AdapterWeights, folder: Path) -> None:
    """Save an adapter with PEFT and load it with vLLM."""
    from vllm.lora.request import LoRARequest

    save_file(_named(adapter), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(_settings(adapter)))
    name = f"disk@{next(_numbers)}"
    driven.llm.llm_engine.add_lora(LoRARequest(name, 1, str(folder), load_inplace=True))


def _adapter(config: PretrainedConfig, device: torch.device) -> AdapterWeights:
    """Random matrices for every linear layer of the decoder, but for experts."""
    text: Any = config
    queries, values = text.num_attention_heads * text.head_dim, text.num_key_value_heads * text.head_dim
    sizes = {
        "self_attn.q_proj": (text.hidden_size, queries),
        "self_attn.k_proj": (text.hidden_size, values),
        "self_attn.v_proj": (text.hidden_size, values),
        "self_attn.o_proj": (queries, text.hidden_size),
    }
    if not hasattr(text, "num_experts"):
        sizes |= {
            "mlp.gate_proj": (text.hidden_size, text.intermediate_size),
            "mlp.up_proj": (text.hidden_size, text.intermediate_size),
            "mlp.down_proj": (text.intermediate_size, text.hidden_size),
        }
    names = {f"model.layers.{i}.{name}": size for i in range(text.num_hidden_layers) for name, size in sizes.items()}
    like = {"dtype": text.dtype, "device": device}
    return AdapterWeights(
        a={name: torch.randn(RANK, size[0], **like) * 0.02 for name, size in names.items()},
        b={name: torch.randn(size[1], RANK, **like) * 0.02 for name, size in names.items()},
        scalings=dict.fromkeys(names, ALPHA / RANK),
        shared=True,
    )


def _row(way: str, adapter: AdapterWeights | None, seconds: float) -> Row:
    tensors = [*adapter.a.values(), *adapter.b.values()] if adapter is not None else []
    return {"way": way, "bytes": sum(t.nbytes for t in tensors), "tensors": len(tensors), "median_s": seconds}
