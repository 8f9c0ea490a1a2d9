"""Names by which vLLM knows what `colo` registers with it, and the keys of the loader's extra options."""

COLO = "colo"
"""The model loader (`--load-format colo`), the sleep-mode backend and the weight-transfer backend."""

WORKER_EXTENSION = "colo.engines.vllm.worker.ColoWorker"

STORE_KEY = "colo_store"
"""Address of the `WeightStore` whose memory the weights lie in; without, the worker takes memory of its own."""

FORMAT_KEY = "colo_load_format"
"""vLLM's load format for what is read into that memory, such as `auto` or `dummy`."""
