"""`colo.connect`: a vLLM server of the user's own as an engine.

VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --load-format colo --logprobs-mode processed_logprobs
                                        --worker-extension-cls colo.engines.vllm.worker.ColoWorker

rt = colo.share(colo.connect("http://localhost:8000"), model, optimizer)
"""

from __future__ import annotations

from functools import partial

import httpx
import torch

from colo.engines.vllm.client.engine import VLLMEngine
from colo.engines.vllm.client.options import device_of
from colo.engines.vllm.client.server_link import ServerLink

DEADLINE_S = 300.0
"""Silence after which a server counts as lost: no answer, nor a healthy one while it generates."""


def connect(
    url: str,
    *,
    model_name: str | None = None,
    device: torch.device | str | None = None,
    deadline_s: float = DEADLINE_S,
    api_key: str | None = None,
    http: httpx.AsyncBaseTransport | None = None,
) -> VLLMEngine:
    """A vLLM server of yours as an engine for `colo.share`, on the same machine and device as the trainer.

    `model_name` is the name it serves, by default the first one; `http` replaces the network. The server stays yours:
    closing leaves it awake, and its other clients may generate while weights change. The engine starts poisoned, and
    awake unless the server is paused. Raises: `EngineLost` when nothing answers; `Unsupported`, with the flags to start
    it with, for a server that cannot take weights from here; `PhaseError` for one that is asleep.
    """
    found = device_of(device)
    link = partial(
        ServerLink,
        base_url(url),
        found,
        model_name=model_name,
        deadline_s=deadline_s,
        api_key=api_key,
        http=http,
    )
    return VLLMEngine.over(
        link, found, when_lost="close this runtime, start the server again if it has ended, and connect again"
    )


def base_url(url: str) -> str:
    """The address of a server, as clients of its `/v1` and people write it: with a scheme, and without that path."""
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1")
