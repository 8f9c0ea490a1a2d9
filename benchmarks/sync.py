"""`sync`: all weights of a model to vLLM in another process, ours beside what people use today.

Ours: direct out of the trainer's memory, and staged through a buffer, with and without checksums. Others, to stock vLLM
in the same run: its own CUDA IPC transfer, `load_weights` a tensor at a time out of memory that its process has
mapped before (as TRL does, within one process), one serialized tensor at a time (as verl does) and flattened buckets
(as slime does). Without a GPU only ours is measured, through shared host memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from transformers import AutoModelForCausalLM

from benchmarks.common import Record, Row, clear, median_s
from benchmarks.tenants import VLLMIpc
from benchmarks.workload import (
    Setup,
    device_copy_bytes_per_s,
    growth,
    held_bytes,
    prepared,
    require_room,
    shut_down,
    wait_for_pinning,
    worker_of,
)
from colo.engines.vllm import compat
from colo.engines.vllm.client.engine import VLLMEngine
from colo.units import MIB
from colo.weights.sources.module import ModuleSource
from colo.weights.sources.names import checkpoint_views
from colo.weights.transports.ipc import IpcTransport

FLAT_BYTES = 512 * MIB
PUBLICATIONS = 200


def run(record: Record, *, shape: str, device: str) -> None:
    """Measure one shape; see `prepared`."""
    with prepared(record, shape, device, copies=False) as prepared_setup:
        setup = prepared_setup.small()
        require_room(setup, weights=2)  # a copy on either side
        with setup.device:
            model = AutoModelForCausalLM.from_config(setup.config, dtype=setup.config.dtype)
        limit_s = sum(p.nbytes for p in model.parameters()) / device_copy_bytes_per_s(setup.device)
        record.limit["device_copy_s"] = limit_s
        for part in (_ours, _others) if device == "cuda" else (_ours,):
            record.tell(part.__name__.strip("_"))
            for row in part(setup, model):
                record.add(row | ({"of_limit": row["median_s"] / limit_s} if "median_s" in row else {}))


# ---- ours ------------------------------------------------------------------------------------------------------------


def _ours(setup: Setup, model: nn.Module) -> Iterator[Row]:
    device = setup.device
    # On a CPU vLLM's own weights are packed, and only those that colo has loaded can be copied to.
    driven = setup.engine(share_memory=device.type == "cpu")
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
            yield _growth(name, transport, driven, device)
        transport.close()
    driven.close()
    clear(device)


def _publish(transport: IpcTransport, driven: Any) -> None:
    """Publish as the runtime does while the engine is paused."""
    driven.reset_prefix_cache()
    transport.transfer()
    driven.commit(0)


def _growth(name: str, transport: IpcTransport, driven: VLLMEngine, device: torch.device) -> Row:
    """Bytes that many publications leave behind, on either side, after as many to warm up."""

    def publish() -> None:
        for _ in range(PUBLICATIONS):
            _publish(transport, driven)

    row, _ = growth(publish, partial(held_bytes, device, driven))
    return {"way": f"growth over {PUBLICATIONS} publications, {name}", **row}


# ---- others ----------------------------------------------------------------------------------------------------------


def _others(setup: Setup, model: nn.Module) -> Iterator[Row]:
    from vllm.config import WeightTransferConfig

    device, model_type = setup.device, setup.config.model_type
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    views = checkpoint_views(weights, model_type)
    with compat.variable("VLLM_ALLOW_INSECURE_SERIALIZATION", "1"):  # for pickled handles
        llm = setup.stock(weight_transfer_config=WeightTransferConfig(backend="ipc"))
        ipc = VLLMIpc(llm)
        for packed in (False, True):
            way = f"vLLM's own IPC transfer, {'packed' if packed else 'tensor by tensor'}"
            yield _row(way, model, partial(ipc.send, views, packed=packed), device, repeats=3)
        llm.collective_rpc(_map, args=(_pickled(views),))
        load = partial(llm.collective_rpc, _load_mapped)
        yield _row("load_weights, a tensor at a time, mapped before", model, load, device, repeats=2)
        llm.collective_rpc(_unmap)
        often = {"repeats": 2, "warmup": 1} if len(views) < 1000 else {"repeats": 1, "warmup": 0}  # minutes, otherwise
        yield _row("one serialized tensor at a time", model, partial(_one_by_one, llm, views), device, **often)
        yield _row("flattened buckets", model, partial(_flattened, llm, weights, model_type), device, repeats=3)
        shut_down(llm)
    clear(device)


def _pickled(views: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Names and CUDA IPC handles."""
    return pickle.dumps([(name, reduce_tensor(tensor)[1]) for name, tensor in views])


def _one_by_one(llm: Any, views: list[tuple[str, torch.Tensor]]) -> None:
    """Send every tensor by a handle, a pickle and a call of its own."""
    for view in views:
        llm.collective_rpc(_load_pickled, args=(_pickled([view]),))


def _flattened(llm: Any, weights: Mapping[str, torch.Tensor], model_type: str | None) -> None:
    """Send tensors in flattened buckets, a handle and a call for each."""
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
    _load(worker, _rebuilt(worker, blob))


def _map(worker: Any, blob: bytes) -> None:
    worker_of(worker).mapped = _rebuilt(worker, blob)


def _unmap(worker: Any) -> None:
    del worker_of(worker).mapped


def _load_mapped(worker: Any) -> None:
    _load(worker, *([item] for item in worker_of(worker).mapped))


def _load_flattened(worker: Any, blob: bytes) -> None:
    handle, shapes, model_type = pickle.loads(blob)
    flat, tensors, start = _tensor(worker, handle), {}, 0
    for name, dims in shapes:
        count = int(torch.Size(dims).numel())
        tensors[name] = flat[start : start + count].view(dims)
        start += count
    _load(worker, checkpoint_views(tensors, model_type))


@torch.no_grad()
def _load(worker: Any, *parts: list[tuple[str, torch.Tensor]]) -> None:
    """Call vLLM's loader once for each part."""
    model = worker_of(worker).get_model()
    for part in parts:
        model.load_weights(part)
    torch.cuda.synchronize()


def _rebuilt(worker: Any, blob: bytes) -> list[tuple[str, torch.Tensor]]:
    return [(name, _tensor(worker, handle)) for name, handle in pickle.loads(blob)]


def _tensor(worker: Any, handle: Any) -> torch.Tensor:
    arguments = list(handle)
    arguments[6] = torch.device(worker_of(worker).device).index or 0
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
