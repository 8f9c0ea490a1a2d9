"""An LMDeploy server as it tells of itself, and weights as it takes them.

Nothing here depends on a version of LMDeploy that a server says: it says none. `GET /update_weights_from_ipc`, which
0.18 has first, tells backend, device and what is asleep.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from colo.engines.buckets import Slab, described, exported, pack
from colo.engines.server import ServerFacts, config_of, own_dtype
from colo.errors import Unsupported
from colo.memory.probe import device_id

LOGPROBS_FLAG = "--logprobs-mode raw_logprobs"

_STARTED = re.compile(r"^process_start_time_seconds (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LMDeployFacts(ServerFacts):
    """An LMDeploy server's account of itself, and what follows from the config of its checkpoint."""

    more_cache = "--cache-max-entry-count for "
    model_name: str
    asleep: frozenset[str]  # tags
    started: str  # a process's time of start tells it from the next at its address
    has_logprobs: bool
    checkpoint_engine: str | None  # version of the receiver in its environment, which a server on a GPU tells of

    @property
    def lacking_flags(self) -> Mapping[str, str]:
        """Options that it was started without, and what it cannot do therefore."""
        return {} if self.has_logprobs else {LOGPROBS_FLAG: "it gives no log-probabilities, and does not sample"}

    @classmethod
    def of(
        cls,
        url: str,
        *,
        status: Mapping[str, Any],
        info: Mapping[str, Any],
        model_name: str,
        checkpoint: str | None,
        started: str | None,
        has_logprobs: bool,
        device: torch.device,
    ) -> LMDeployFacts:
        """Read what it answers. Raises: `Unsupported` for a server that cannot take weights here."""
        where = f"the LMDeploy server at {url}"
        if status["backend"] != "pytorch":
            raise Unsupported(
                f"{where} runs {status['backend']}, which takes no weights: start it with --backend pytorch"
            )
        for option in ("tp", "dp", "ep"):
            if info[f"{option}_size"] not in (1, None):
                raise Unsupported(
                    f"{where} was started with --{option} {info[f'{option}_size']}: colo trains beside an engine on "
                    "one GPU; start it without"
                )
        if device.type == "cuda" and status["device_uuids"]:
            own = f"GPU-{device_id(device)}"
            if own not in status["device_uuids"]:
                raise Unsupported(f"{where} runs on {status['device_uuids'][0]} and the trainer on {own}: share one")
        if started is None:
            raise Unsupported(
                f"{where} was started with --disable-metrics: they have its time of start, which alone tells whether "
                "it is the one that was published to; start it without"
            )
        advice = ". Where it serves another name (--model-name), pass model_name= with the checkpoint's path"
        config = config_of(checkpoint or model_name, where, advice)
        text = config.get_text_config()
        if config.tie_word_embeddings and (pad := text.pad_token_id) is not None:
            raise Unsupported(
                f"{where} has a model whose output layer is its embeddings, and pad_token_id {pad}: LMDeploy sets the "
                "row of that token to zero whenever it loads weights, and samples from other logits than the "
                "trainer's. Take pad_token_id out of the checkpoint's config.json, and start the server again"
            )
        own_type = own_dtype(config)
        positions = int(text.max_position_embeddings)
        return cls(
            model_path=checkpoint or model_name,
            config=config,
            dtype=torch.bfloat16 if own_type is torch.bfloat16 else torch.float16,  # as `--dtype auto` has it
            device=status["device_type"],
            num_positions=positions,
            max_prompt=positions - 1,
            num_cached_tokens=info["num_gpu_blocks"] * info["block_size"],
            model_name=model_name,
            asleep=frozenset(status["sleeping_tags"]),
            started=started,
            has_logprobs=has_logprobs,
            checkpoint_engine=status["checkpoint_engine_version"],
        )


def started_in(metrics: str) -> str | None:
    """The time at which a server's process was started, in its metrics."""
    found = _STARTED.search(metrics)
    return found[1] if found else None


FINISHED = {"serialized_named_tensors": pack({"metadata": []}), "load_format": "flattened_bucket", "finished": True}
"""The request that ends an update: the server prepares what it has loaded, waits for it, and forgets the slab."""


class Payloads:
    """Makes buckets of one dtype into requests, in elements of the slab; a GPU's IPC handle is sent once.

    On a GPU an event that both processes have orders their work: the server waits for it before it reads the slab, and
    records it after, which is waited for before the slab is written again.
    Ownership: the slab stays its owner's.
    """

    def __init__(self, slab: Slab) -> None:
        self._slab = slab
        self.forget()

    def forget(self) -> None:
        """Send the handle again: the server has none, or has forgotten it."""
        self._sent: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def make(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Any]:
        """The request for a bucket."""
        memory, places = self._slab.fill(bucket, self._wait)
        dtype, whole = bucket[0][1].dtype, self._slab.whole
        assert whole is not None
        metadata = [described(name, t, start // dtype.itemsize, t.numel()) for name, t, start in places]
        payload: dict[str, Any] = {"metadata": metadata}
        if whole is not self._sent:
            self._sent = whole
            rebuild, arguments = exported(whole.view(dtype))
            # the server puts the number of its GPU seventh, where a tensor of the host has metadata that are not read
            payload |= {"flattened_tensor": (rebuild, (*arguments, None)[: max(7, len(arguments))])}
            payload["require_clone"] = False
            if memory.device.type == "cuda":
                self._event = torch.cuda.Event(interprocess=True)
                self._event.record(torch.cuda.current_stream(memory.device))
                payload["event_ipc_handle"] = self._event.ipc_handle()
        elif self._event is not None:
            self._event.record(torch.cuda.current_stream(memory.device))
        return {"serialized_named_tensors": pack(payload), "load_format": "flattened_bucket", "finished": False}

    def _wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
