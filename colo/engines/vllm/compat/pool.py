"""Device memory of a worker: vLLM's sleep pool, its KV cache, and what no sleep gives back."""

from __future__ import annotations

from typing import Any

import torch

from colo.memory.load_plan import tensors_in


def prefer_sleep_backend(model_config: Any) -> None:
    """Let a worker whose weights colo has loaded sleep by colo's backend; vLLM offers no option for it.

    vLLM: 0.26 to 0.30; no ticket. Delete when the sleep-mode backend is an engine argument.
    """
    if getattr(model_config, "sleep_mode_backend", None) == "cumem":
        model_config.sleep_mode_backend = "colo"


def sleep_pool(worker: Any) -> Any | None:
    """vLLM's allocator of memory that can be unmapped, where the worker uses it.

    vLLM: 0.26 goes by `enable_sleep_mode`, later ones by `enable_cumem_allocator` too. Delete the first with 0.26.
    """
    from vllm.platforms import current_platform

    config = worker.vllm_config.model_config
    enabled = getattr(config, "enable_cumem_allocator", config.enable_sleep_mode)
    if not (enabled and current_platform.is_cuda()):
        return None
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()


def residual_bytes(worker: Any, *, same_process: bool) -> dict[str, int]:
    """Device bytes of torch's allocator that stay while a worker sleeps, by kind.

    In the trainer's process those of CUDA graphs alone, since the rest of torch's memory is not only vLLM's there.

    vLLM: Every version; #45623 and #51485 are about the memory of CUDA graphs. Delete when a sleep gives it back.
    """
    if torch.device(worker.device).type != "cuda":
        return {}
    from vllm.platforms import current_platform

    pool = sleep_pool(worker)
    pooled = pool.pointer_to_data if pool is not None else {}
    graphs = tuple(current_platform.get_global_graph_pool())
    found = {"CUDA graphs": 0, "workspaces and buffers": 0}
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] not in pooled:
            is_graph = tuple(segment["segment_pool_id"]) == graphs
            found["CUDA graphs" if is_graph else "workspaces and buffers"] += segment["total_size"]
    if same_process:
        del found["workspaces and buffers"]
    return {kind: num_bytes for kind, num_bytes in found.items() if num_bytes}


def unmap(record: Any) -> None:
    """Give an allocation of vLLM's sleep pool back to the driver; its address stays reserved.

    vLLM: 0.26 to 0.30. Delete when `CuMemAllocator` moves single allocations: 0.33 drops a tag (PR #44890).
    """
    from vllm.device_allocator.cumem import unmap_and_release

    unmap_and_release(record.handle)
    record.is_asleep = True


def remap(record: Any) -> None:
    """Give an allocation of vLLM's sleep pool memory again, with undefined content.

    vLLM: As `unmap`.
    """
    from vllm.device_allocator.cumem import create_and_map

    create_and_map(record.handle)
    record.is_asleep = False


def after_kv_cache_wake(worker: Any) -> None:
    """Run the model runner's hook for a KV cache that has come back; 0.30 has nothing to do.

    vLLM: 0.26, whose runner has the hook. Delete with 0.26.
    """
    hook = getattr(worker.model_runner, "post_kv_cache_wake_up", None)
    if hook is not None:
        hook()


def kv_cache_storages(worker: Any) -> list[torch.UntypedStorage]:
    """The memory of the KV cache, once each, where it is ordinary memory.

    vLLM: Every version. Stays.
    """
    return _storages(worker.model_runner.kv_caches)


def free_kv_cache(worker: Any) -> None:
    """Give the memory of the KV cache up for good: 0.26 with CUDA graphs keeps its tensors when it has shut down.

    vLLM: 0.26; no ticket. Delete with 0.26.
    """
    for storage in kv_cache_storages(worker):
        if storage.resizable():
            storage.resize_(0)


def kv_cache_bytes(vllm_config: Any) -> int:
    """Bytes of the KV cache that a worker's attention layers have been given.

    vLLM: Every version. Delete when vLLM tells the size.
    """
    layers = vllm_config.compilation_config.static_forward_context.values()
    return sum(storage.nbytes() for storage in _storages([getattr(layer, "kv_cache", None) for layer in layers]))


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """The memory of tensors in lists and tuples, once each."""
    storages = (tensor.untyped_storage() for tensor in tensors_in([values]))
    return list({storage.data_ptr(): storage for storage in storages}.values())
