"""`colo.connect`: a server of yours as an engine, whichever it is."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import torch

from colo.engines.elsewhere import Broadcast, WeightsBucket, WeightsFolder
from colo.engines.http import DEADLINE_S, HttpClient, Refused, Silent, base_url
from colo.errors import EngineLost, Unsupported
from colo.memory.probe import device_of

if TYPE_CHECKING:
    from colo.engines.lmdeploy.engine import LMDeployEngine
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
    through: WeightsFolder | Broadcast | None = None,
) -> VLLMEngine | SGLangEngine | LMDeployEngine:
    """A vLLM, SGLang or LMDeploy server of yours as an engine for `colo.share`, on the trainer's machine and device.

    The server is asked which it is. `model_name` is the name that vLLM serves, by default the first one, or the path of
    LMDeploy's checkpoint, by default the name that it serves; `admin_key` is for SGLang's operations where it was
    started with `--admin-api-key`; `http` replaces the network. `through` is the way of weights to a server of SGLang's
    or vLLM's elsewhere: it has a device of its own, whose memory is not the trainer's to count. The server stays yours:
    closing leaves it awake where it has weights, and its other clients may generate while weights change, but for
    LMDeploy's. The engine starts poisoned, and awake unless the server is paused or, of LMDeploy, asleep. Raises:
    `EngineLost` when nothing answers; `Unsupported`, with the flags to start it with, for a server that cannot take
    weights from here; `PhaseError` for one of vLLM's that is asleep.
    """
    url, found = base_url(url), device_of(device)
    for name, key in (("api_key", api_key), ("admin_key", admin_key)):
        if not isinstance(key, str | None):
            raise TypeError(f"{name} must be a text, not {key!r}")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ValueError(f"{name} has a character that no header of HTTP takes: give letters and digits of ASCII")
    if not isinstance(through, WeightsFolder | Broadcast | None):
        raise TypeError(f"through is a colo.WeightsFolder(path), WeightsBucket(url) or Broadcast(), not {through!r}")
    kind = _kind_of(url, api_key, http)
    common: dict[str, Any] = {"deadline_s": deadline_s, "api_key": api_key, "http": http}
    if kind == "sglang":
        if isinstance(through, WeightsBucket):
            raise Unsupported(
                f"the server at {url} is SGLang's, which reads files of its own machine: take WeightsFolder(path)"
            )
        if through is not None and through.delta:
            raise Unsupported(
                f"the server at {url} is SGLang's, whose loader takes whole weights alone: leave delta=True out"
            )
        from colo.engines.sglang.engine import SGLangEngine

        return SGLangEngine(url, found, admin_key=admin_key, through=through, **common)
    if kind == "lmdeploy":
        if through is not None:
            raise Unsupported(
                f"the server at {url} is LMDeploy's, and takes weights on the trainer's device alone: leave through out"
            )
        from colo.engines.lmdeploy.engine import LMDeployEngine

        return LMDeployEngine(url, found, checkpoint=model_name, **common)
    from colo.engines.vllm.client.engine import VLLMEngine
    from colo.engines.vllm.client.server_link import ServerLink

    return VLLMEngine.over(
        partial(ServerLink, url, found, model_name=model_name, through=through, **common),
        found,
        when_lost="close this runtime, start the server again if it has ended, and connect again",
    )


_TOLD_BY = {"sglang": ("/model_info", "weight_version"), "lmdeploy": ("/update_weights_from_ipc", "sleeping_tags")}
"""A question that each kind of server answers, with this in the answer; vLLM's are the rest."""


def _kind_of(url: str, api_key: str | None, http: httpx.AsyncBaseTransport | None) -> str:
    server = HttpClient(url, deadline_s=30, api_key=api_key, transport=http)
    try:
        for kind, (path, field) in _TOLD_BY.items():
            try:
                if field in (server.ask("GET", path) or {}):
                    return kind
            except Refused as error:
                if error.status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                    how = f"the server at {url} wants a key: pass api_key=..., of SGLang also admin_key"
                    raise Unsupported(how) from error
        return "vllm"
    except Silent as error:
        raise EngineLost(f"no server answers at {url}: {error}") from error
    finally:
        server.close()
