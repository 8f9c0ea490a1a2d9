"""SGLang's own server on a machine without a GPU: `python sglang_cpu.py --model-path FOLDER [SGLang's options]`.

Run by the Python that has SGLang, in an environment of its own; it imports nothing of colo. The wheel's server runs as
it is, but for what this file lends it, in its process and in those that it forks:

    sgl_kernel          has no wheel for a CPU: two of its kernels are called, the rest is only imported
    torchvision, IPython, zstandard   are only imported
    vllm                is looked for, and would be imported where it is
    torch_memory_saver  needs CUDA's driver: here it notes which tags are away, and fails as it does when asked twice
    torch               `pin_memory`, `torch.cuda.cudart` and `synchronize` fail without a GPU, where there is nothing
                        to do
    fork                in place of spawn, by which a start would import everything three times
    seeds               are heeded by deterministic inference alone, which refuses a CPU; its hash is Triton's
"""

import contextlib
import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
import types
from pathlib import Path

from hosted import host

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_COMPILE_DISABLE": "1",  # sampling with seeds would compile for a minute
}
OPTIONS = [  # of a tiny model; what the command line has comes after and wins
    *("--device", "cpu", "--host", "127.0.0.1", "--dtype", "float32", "--skip-tokenizer-init"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--lora-backend", "torch_native"),
    *("--cuda-graph-backend-decode", "disabled", "--cuda-graph-backend-prefill", "disabled"),
    *("--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle"),
    *("--max-total-tokens", "8192", "--max-running-requests", "32", "--mem-fraction-static", "0.5"),
]
FAMILIES = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")  # the other 200 take most of a start to import


# ---- sgl_kernel ------------------------------------------------------------------------------------------------------


def rows_to_table(rows, table, starts, ends, slots, width=None):
    for row, start, end, part in spans(rows, starts, ends):
        table[row, start:end] = slots[part].to(table.dtype)


def table_to_slots(rows, table, starts, ends, slots, width=None):
    for row, start, end, part in spans(rows, starts, ends):
        slots[part] = table[row, start:end].to(slots.dtype)


def spans(rows, starts, ends):
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        yield row, start, end, slice(taken, taken + end - start)
        taken += end - start


KERNELS = {"assign_req_to_token_pool_cpu": rows_to_table, "assign_extend_cache_locs_cpu": table_to_slots}


def missing_kernel(name):
    def missing(*_, **__):
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in on a CPU")

    return missing


# ---- torch_memory_saver ----------------------------------------------------------------------------------------------


class MemorySaver:
    """Notes what is away. Nothing is given back, so that what reads it anyway goes unnoticed."""

    def __init__(self):
        self.away = set()

    def region(self, **_):
        return contextlib.nullcontext()

    def cuda_graph(self, **_):
        return contextlib.nullcontext()

    disable = region

    def pause(self, tag):
        assert tag not in self.away, f"{tag} is paused already"
        self.away.add(tag)

    def resume(self, tag):
        self.away.remove(tag)


# ---- modules that are not there --------------------------------------------------------------------------------------


LENT = ("sgl_kernel", "torch_memory_saver", "torchvision", "IPython", "zstandard")


class AnyName(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Lent(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "sgl_kernel":
            return KERNELS.get(name, missing_kernel(name))
        return AnyName(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name == "vllm":
            raise ModuleNotFoundError("vLLM is not lent to SGLang", name=name)
        if name.partition(".")[0] in LENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = Lent(spec.name)
        if spec.name == "torch_memory_saver":
            module.torch_memory_saver = MemorySaver()
            module.configure_subprocess = contextlib.nullcontext
        return module

    def exec_module(self, module):
        pass


# ---- torch, seeds ----------------------------------------------------------------------------------------------------


def lend():
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    package = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
    others = {path.stem for path in (package / "srt" / "models").glob("*.py")} - {*FAMILIES, "__init__", "registry"}
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(sorted(others))
    sys.meta_path.insert(0, Finder())
    import torch

    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda *_, **__: None
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.pin_memory = lambda self, device=None: self
    torch.cuda.cudart = lambda: types.SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "rand", "empty_like", "zeros_like", "ones_like"):
        setattr(torch, name, without_pinning(getattr(torch, name)))


def lend_seeds():
    import sglang.srt.batch_invariant_ops as invariant
    import torch

    invariant.enable_batch_invariant_mode = lambda *_, **__: None  # its kernels are Triton's
    torch.library.define("sgl_kernel::murmur_hash32_cpu", "(Tensor seed, Tensor positions, Tensor ids) -> Tensor")
    torch.library.impl("sgl_kernel::murmur_hash32_cpu", "CPU", hashed)


def without_pinning(make):
    return functools.wraps(make)(lambda *a, pin_memory=False, **k: make(*a, **k))


def hashed(seeds, positions, ids):
    """MurmurHash3 of (seed, position, token id) in 32 bits, as the Triton kernel has it."""
    low = 0xFFFFFFFF
    seeds, ids = seeds.long()[:, None], ids.long()[None, :]
    value = 0
    for block in (seeds & low, (seeds >> 32) & low, positions.long()[:, None] & low, ids & low):
        block = (block * 0xCC9E2D51) & low
        block = ((block << 15 | block >> 17) & low) * 0x1B873593 & low
        value = value ^ block
        value = ((value << 13 | value >> 19) & low) * 5 + 0xE6546B64 & low
    value = value ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        value = ((value ^ value >> shift) * factor) & low
    return value ^ value >> 16


def serve():
    if "--enable-deterministic-inference" in sys.argv:
        lend_seeds()
    try:
        run_server(server_args.prepare_server_args(OPTIONS + sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    lend()
    import sglang.srt.server_args as server_args
    from sglang.launch_server import run_server
    from sglang.srt.utils import kill_process_tree

    importlib.import_module("sglang.srt.entrypoints.http_server")
    gc.freeze()  # on a CPU every flush collects garbage, which would look at all that was imported
    server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    host(serve) if "--hosted" in sys.argv else serve()
