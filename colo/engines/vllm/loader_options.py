"""Keys of `model_loader_extra_config` that the loader named `colo` reads, apart from it since they need no vLLM."""

STORE_KEY = "colo_store"
"""Address of the `WeightStore` whose memory the weights lie in; without, the worker takes memory of its own."""

FORMAT_KEY = "colo_load_format"
"""vLLM's load format for what is read into that memory, such as `auto` or `dummy`."""
