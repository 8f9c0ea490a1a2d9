"""`colo.connect`: a server of yours as an engine, whichever it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from colo.engines.http import DEADLINE_S, HttpClient, Refused, Silent, base_url
from colo.errors import EngineLost, Unsupported
from colo.memory.probe import device_of

if TYPE_CHECKING:
    import httpx

    from colo.engines.sglang.engine import SGLangEngine
    from colo.engines.vllm.client.engine import VLLMEngine


def connect(
    url: str,
    *,
    model_name: str | None = None,
    device: torch.device | str | None = None,
    deadline_s: float = DEADLINE_S,
    api_key: str | None = None,
    admin_key: str | None = None,
    http: httpx.AsyncBaseTransport | None = None,
) -> VLLMEngine | SGLangEngine:
    """A vLLM or SGLang server of yours as an engine for `colo.share`, on the same machine and device as the trainer.

    The server is asked which it is. `model_name` is the name that vLLM serves, by default the first one; `admin_key` is
    for SGLang's operations where it was started with `--admin-api-key`; `http` replaces the network. The server stays
    yours: closing leaves it awake, and its other clients may generate while weights change. The engine starts poisoned,
    and awake unless the server is paused. Raises: `EngineLost` when nothing answers; `Unsupported`, with the flags to
    start it with, for a server that cannot take weights from here; `PhaseError` for one that is asleep.
    """
    url, found = base_url(url), device_of(device)
    if _is_sglang(url, api_key, http):
        from colo.engines.sglang.engine import SGLangEngine

        return SGLangEngine(url, found, deadline_s=deadline_s, api_key=api_key, admin_key=admin_key, http=http)
    from colo.engines.vllm.client.server_link import connect as connect_vllm

    return connect_vllm(url, model_name=model_name, device=found, deadline_s=deadline_s, api_key=api_key, http=http)


def _is_sglang(url: str, api_key: str | None, http: httpx.AsyncBaseTransport | None) -> bool:
    server = HttpClient(url, deadline_s=30, api_key=api_key, transport=http)
    try:
        return "weight_version" in (server.ask("GET", "/model_info") or {})
    except Refused as error:
        if error.status in (401, 403):
            raise Unsupported(f"the server at {url} wants a key: pass api_key=..., of SGLang also admin_key") from error
        return False
    except Silent as error:
        raise EngineLost(f"no server answers at {url}: {error}") from error
    finally:
        server.close()
