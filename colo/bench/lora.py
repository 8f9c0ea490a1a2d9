"""`colo bench lora`: the next version of a LoRA adapter to vLLM, ours beside disk, RAM disk and a fresh load.

Random weights, rank 16 on every linear layer of the decoder but experts, by the public call that a publication makes.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig

from colo.bench.common import Result, clear, median_s, result
from colo.bench.workload import SIZES, Row, Size, Tell, engine, shape
from colo.engines.base import AdapterWeights
from colo.engines.vllm.engine import VLLMEngine
from colo.engines.vllm.options import save_config
from colo.units import GIB

RANK = 16
ALPHA = 32
RAM_DISK = Path("/dev/shm")

_numbers = itertools.count(1)


def run(*, shape_name: str, device: str, tell: Tell = lambda text: None) -> Result:
    """Measure adapters of one shape; on a CPU of a tiny model, which shows that it works and no more."""
    target = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    config = shape(shape_name, target)
    size = replace(SIZES[device], enforce_eager=True)
    size = replace(size, kv_cache_bytes=min(size.kv_cache_bytes, GIB))
    adapter = _adapter(config, target)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="colo-") as folder:
        save_config(config, folder)
        for own_process in (True, False):
            tell("in its own process" if own_process else "in this process")
            rows += _measure(folder, target, size, adapter, own_process=own_process)
    command = f"colo bench lora --shape {shape_name} --device {device}"
    return result(f"lora {shape_name}", command, limit={}, rows=rows)


def _measure(
    folder: str, device: torch.device, size: Size, adapter: AdapterWeights, *, own_process: bool
) -> Iterator[Row]:
    where = "own process" if own_process else "in process"
    modules = sorted({name.rpartition(".")[2] for name in adapter.a})
    options = {"own_process": own_process, "max_lora_rank": RANK, "lora_target_modules": modules}
    driven = engine(folder, device, size, **options)
    driven.pause()
    driven.load_adapter("policy@0", adapter)
    yield _row(f"colo, {where}", adapter, median_s(partial(_replace, driven, adapter), device, repeats=20, warmup=3))
    yield _row(f"a fresh load from tensors, {where}", adapter, median_s(partial(_reload, driven, adapter), device))
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


def _reload(driven: VLLMEngine, adapter: AdapterWeights) -> None:
    _forget(driven)
    driven.load_adapter(f"policy@{next(_numbers)}", adapter)


def _forget(driven: VLLMEngine) -> None:
    for name in list(driven.adapters):
        driven.remove_adapter(name)


def _through_files(driven: VLLMEngine, adapter: AdapterWeights, folder: Path) -> None:
    """As PEFT saves it, and as vLLM loads it."""
    from vllm.lora.request import LoRARequest

    prefix = "base_model.model."
    tensors = {f"{prefix}{name}.lora_A.weight": t for name, t in adapter.a.items()}
    tensors |= {f"{prefix}{name}.lora_B.weight": t for name, t in adapter.b.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = sorted({name.rsplit(".", 1)[1] for name in adapter.a})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
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
    )


def _row(way: str, adapter: AdapterWeights, seconds: float) -> Row:
    tensors = [*adapter.a.values(), *adapter.b.values()]
    return {"way": way, "bytes": sum(t.nbytes for t in tensors), "tensors": len(tensors), "median_s": seconds}
