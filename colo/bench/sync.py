"""`colo bench sync`: all weights of a model to vLLM in another process, ours beside what people use today.

Ours: direct out of the trainer's memory, and staged through two buckets, with and without checksums. Others, to stock
vLLM in the same run: its own CUDA IPC transfer, `load_weights` a tensor at a time out of memory that its process has
mapped before (as TRL does, within one process), one serialized tensor at a time (as verl does) and flattened buckets
(as slime does). Without a GPU only ours is measured, through shared host memory.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from colo.bench.common import Result, clear, median_s, result
from colo.bench.workload import (
    SIZES,
    Row,
    Size,
    Tell,
    device_copy_bytes_per_s,
    engine,
    insecure_serialization,
    ipc_options,
    shape,
    shut_down,
    size_name,
    stock,
    wait_for_pinning,
)
from colo.engines.vllm.engine import VLLMEngine
from colo.engines.vllm.options import save_config
from colo.memory.probe import torch_pinned_bytes, used_device_bytes
from colo.units import GIB, MIB
from colo.weights.sources.checkpoint import checkpoint_views
from colo.weights.sources.module import ModuleSource
from colo.weights.transports.ipc.sender import IpcTransport

FLAT_BYTES = 512 * MIB
PUBLICATIONS = 200


def run(*, shape_name: str, device: str, tell: Tell = lambda text: None) -> Result:
    """Measure one shape; on a CPU with a tiny one, which shows that it works and no more."""
    target = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    config = shape(shape_name, target)
    size = replace(SIZES[device], enforce_eager=True)
    size = replace(size, kv_cache_bytes=min(size.kv_cache_bytes, GIB))
    with torch.device(target):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    limit_s = sum(p.nbytes for p in model.parameters()) / device_copy_bytes_per_s(target)
    with tempfile.TemporaryDirectory(prefix="colo-") as folder:
        save_config(config, folder)
        rows: list[Row] = []
        if device == "cuda":
            tell("others")
            rows += _others(model, config, folder, target, size)
        tell("ours")
        rows += _ours(model, folder, target, size)
    for row in rows:
        if "median_s" in row:
            row["of_limit"] = row["median_s"] / limit_s
    limit = {"device_copy_s": limit_s}
    command = f"colo bench sync --shape {shape_name} --device {device}"
    return result(f"sync {size_name(shape_name, device)}", command, limit=limit, rows=rows)


# ---- ours ------------------------------------------------------------------------------------------------------------


def _ours(model: nn.Module, folder: str, device: torch.device, size: Size) -> Iterator[Row]:
    # On a CPU vLLM's own weights are packed, and only those that colo has loaded can be copied to.
    driven = engine(folder, device, size, share_memory=device.type == "cpu")
    driven.pause()
    wait_for_pinning(driven.pids)
    for name, staged, verify in (
        ("direct", False, False),
        ("direct, every byte compared", False, True),
        ("staged", True, False),
        ("staged, checksums of every byte", True, True),
    ):
        transport = IpcTransport(ModuleSource(model), driven, why_not_shared="measured", staged=staged, verify=verify)
        yield _row(f"colo, {name}", model, partial(_publish, transport, driven), device)
        if not verify:
            yield _growth(name, lambda: _publish(transport, driven), device, driven)  # noqa: B023 - called at once
        transport.close()
    driven.close()
    clear(device)


def _publish(transport: IpcTransport, driven: Any) -> None:
    """Publish as the runtime does while the engine is paused."""
    driven.reset_prefix_cache()
    transport.transfer()
    driven.commit(0)


def _growth(name: str, publish: Callable[[], None], device: torch.device, driven: VLLMEngine) -> Row:
    """Bytes that many publications leave behind, on either side, after as many to warm up."""

    def held() -> tuple[int, int, int]:
        clear(device)
        resident = sum(psutil.Process(pid).memory_info().rss for pid in (psutil.Process().pid, *driven.pids))
        return used_device_bytes(device) or 0, resident, torch_pinned_bytes() + driven.pinned_bytes

    for _ in range(PUBLICATIONS):
        publish()
    before = held()
    for _ in range(PUBLICATIONS):
        publish()
    device_bytes, host_bytes, pinned_bytes = (after - b for after, b in zip(held(), before, strict=True))
    return {
        "way": f"growth over {PUBLICATIONS} publications, {name}",
        "device_bytes": device_bytes,
        "host_bytes": host_bytes,
        "pinned_bytes": pinned_bytes,
    }


# ---- others ----------------------------------------------------------------------------------------------------------


def _others(model: nn.Module, config: PretrainedConfig, folder: str, device: torch.device, size: Size) -> Iterator[Row]:
    from torch.multiprocessing.reductions import reduce_tensor

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    views = checkpoint_views(weights, config.model_type)
    with insecure_serialization():
        llm = stock(folder, device, size, **ipc_options(device))
        for packed in (False, True):
            way = f"vLLM's own IPC transfer, {'packed' if packed else 'tensor by tensor'}"
            yield _row(way, model, partial(_vllm_ipc, llm, views, packed), device, repeats=3)
        mapped = [(name, reduce_tensor(tensor)[1]) for name, tensor in views]
        llm.collective_rpc(_map, args=(pickle.dumps(mapped),))
        load = partial(llm.collective_rpc, _load_mapped)
        yield _row("load_weights, a tensor at a time, mapped before", model, load, device, repeats=2)
        llm.collective_rpc(_unmap)
        often = {"repeats": 2, "warmup": 1} if len(views) < 1000 else {"repeats": 1, "warmup": 0}  # minutes, otherwise
        yield _row("one serialized tensor at a time", model, partial(_one_by_one, llm, views), device, **often)
        yield _row("flattened buckets", model, partial(_flattened, llm, weights, config.model_type), device, repeats=3)
        shut_down(llm)
    clear(device)


def _vllm_ipc(llm: Any, views: list[tuple[str, torch.Tensor]], packed: bool) -> None:
    """Send all weights over vLLM's own CUDA IPC transfer (four calls, and its trainer side, as in 0.26)."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    llm.init_weight_transfer_engine({"init_info": {}})
    llm.start_weight_update()
    how: dict[str, Any] = {"send_mode": lambda update: llm.update_weights({"update_info": asdict(update)})}
    if packed:  # a tensor that is larger than vLLM's buffer is refused
        how |= {"packed": True, "packed_buffer_size_bytes": max(GIB, *(tensor.nbytes for _, tensor in views))}
    IPCWeightTransferEngine.trainer_send_weights(iter(views), how)
    llm.finish_weight_update()


def _one_by_one(llm: Any, views: list[tuple[str, torch.Tensor]]) -> None:
    """Send every tensor by a handle, a pickle and a call of its own."""
    from torch.multiprocessing.reductions import reduce_tensor

    for name, tensor in views:
        llm.collective_rpc(_load_pickled, args=(pickle.dumps([(name, reduce_tensor(tensor)[1])]),))


def _flattened(llm: Any, weights: Mapping[str, torch.Tensor], model_type: str | None) -> None:
    """Send tensors in flattened buckets, a handle and a call for each."""
    from torch.multiprocessing.reductions import reduce_tensor

    bucket: list[tuple[str, torch.Tensor]] = []

    def send() -> None:
        flat = torch.cat([tensor.reshape(-1) for _, tensor in bucket])
        shapes = [(name, tuple(tensor.shape)) for name, tensor in bucket]
        torch.cuda.current_stream().synchronize()
        blob = pickle.dumps((reduce_tensor(flat)[1], shapes, model_type))
        llm.collective_rpc(_load_flattened, args=(blob,))

    for name, tensor in weights.items():
        if bucket and sum(t.nbytes for _, t in bucket) + tensor.nbytes > FLAT_BYTES:
            send()
            bucket = []
        bucket.append((name, tensor))
    send()


def _load_pickled(worker: Any, blob: bytes) -> None:
    worker = getattr(worker, "worker", worker)
    tensors = [(name, _rebuilt(worker, handle)) for name, handle in pickle.loads(blob)]
    with torch.no_grad():
        worker.get_model().load_weights(tensors)
    torch.cuda.synchronize()


def _map(worker: Any, blob: bytes) -> None:
    worker = getattr(worker, "worker", worker)
    worker.mapped = [(name, _rebuilt(worker, handle)) for name, handle in pickle.loads(blob)]


def _unmap(worker: Any) -> None:
    del getattr(worker, "worker", worker).mapped


def _load_mapped(worker: Any) -> None:
    worker = getattr(worker, "worker", worker)
    model = worker.get_model()
    with torch.no_grad():
        for item in worker.mapped:
            model.load_weights([item])
    torch.cuda.synchronize()


def _load_flattened(worker: Any, blob: bytes) -> None:
    worker = getattr(worker, "worker", worker)
    handle, shapes, model_type = pickle.loads(blob)
    flat, tensors, start = _rebuilt(worker, handle), {}, 0
    for name, dims in shapes:
        count = int(torch.Size(dims).numel())
        tensors[name] = flat[start : start + count].view(dims)
        start += count
    with torch.no_grad():
        worker.get_model().load_weights(checkpoint_views(tensors, model_type))
    torch.cuda.synchronize()


def _rebuilt(worker: Any, handle: Any) -> torch.Tensor:
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    arguments = list(handle)
    arguments[6] = torch.device(worker.device).index or 0
    tensor: torch.Tensor = rebuild_cuda_tensor(*arguments)
    return tensor


def _row(
    way: str,
    model: nn.Module,
    send: Callable[[], Any],
    device: torch.device,
    *,
    repeats: int = 5,
    warmup: int = 2,
) -> Row:
    num_bytes = sum(p.nbytes for p in model.parameters())
    return {"way": way, "bytes": num_bytes, "median_s": median_s(send, device, repeats=repeats, warmup=warmup)}
