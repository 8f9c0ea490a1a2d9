"""What a worker of vLLM tells about itself, for tests of whoever reads it."""

import os

from colo.engines.vllm.processes import pid_namespace
from colo.engines.vllm.wire import WorkerInfo


def worker_info(**changes):
    """A worker of a tiny model on a CPU, in this process; `changes` are fields that are otherwise."""
    told = {
        "pid": os.getpid(),
        "pid_namespace": pid_namespace(),
        "rank": 0,
        "device": "cpu",
        "model_type": "qwen3",
        "vocab_size": 100,
        "max_length": 50,
        "logprobs_mode": "processed_logprobs",
        "has_tokenizer": True,
        "weights_bytes": 1000,
        "weights_in": "slabs",
        "weights_can_leave": False,
        "kv_cache_bytes": 600,
        "kv_cache_can_leave": True,
        "is_asleep": False,
        "max_adapters": 0,
        "residual_bytes": {"CUDA graphs": 7},
    }
    return WorkerInfo(**(told | changes))
