"""An SGLang server of the user's own as an engine, over HTTP: `colo.connect`.

    python -m sglang.launch_server --model-path MODEL --host 127.0.0.1 --enable-memory-saver

    rt = colo.share(colo.connect("http://localhost:30000"), model, optimizer)

Server and trainer share a machine and a device, and each has a copy of the weights. A publication is one session of the
server's (`begin_weight_update` to `end_weight_update`), and is believed when the checksums of all of the server's
parameters are the trainer's.

Every publication has a label of its own, which the server keeps as its `weight_version` and puts into every completion.
It is set when the session has begun and before a byte is sent, so that a completion of half written weights, of another
trainer's, or of a server that was started again bears another one than the engine waits for, and is refused.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import httpx
import torch

from colo.engine import AdapterWeights, Completion, EngineState, SamplingParams
from colo.engines.base import TAGS
from colo.engines.buckets import Slab
from colo.engines.elsewhere import Broadcast, WeightsFolder
from colo.engines.http import Body, HttpClient, Refused
from colo.engines.sampling import completion_seed, distorting
from colo.engines.server import ServerEngine, ServerSegment
from colo.engines.sglang.server import WHY_IT_STAYS, Facts, away_by, label_with, plain_label, refusals
from colo.engines.sglang.ways import way_of
from colo.engines.sglang.weights import EngineLayout, Expected, adapter_as_taken, adapter_payloads
from colo.errors import EngineLost, StaleWeights, TransferError, Unsupported
from colo.memory.region import make_room
from colo.phases.phase import ENGINE_WEIGHTS, Residency, Segment

_MAX_REQUESTS = 32
"""Completions travel in so many requests; SGLang batches all of them together."""

_FLUSH_S = 10
"""Seconds that the server may wait for requests to end before it refuses to flush its cache."""

_NEUTRAL: Mapping[str, float] = {
    **dict.fromkeys(("top_p", "repetition_penalty"), 1.0),
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty", "min_new_tokens"), 0),
    "top_k": -1,
}
"""Options that change nothing, said so that those with which the server was started do not hold."""


# ---- the engine ----------------------------------------------------------------------------------------------------


class SGLangEngine(ServerEngine[Facts]):
    """An `Engine` over an SGLang server; see `ServerEngine`.

    It starts awake. Its other clients' requests are held back while it is paused.
    """

    name = "sglang"
    called = "an SGLang server"
    longer = "--context-length"
    _layout: EngineLayout

    def __init__(
        self,
        url: str,
        device: torch.device,
        *,
        deadline_s: float,
        api_key: str | None = None,
        admin_key: str | None = None,
        http: httpx.AsyncBaseTransport | None = None,
        through: WeightsFolder | Broadcast | None = None,
    ) -> None:
        """Connect. Raises: see `colo.connect`."""
        # operations want the admin's key where there is one, and these the other
        plain = ("/generate", "/model_info", "/server_info", "/v1/models", "/load_lora_adapter_from_tensors")
        server = HttpClient(
            url,
            deadline_s=deadline_s,
            api_key=admin_key or api_key,
            keys=dict.fromkeys(plain, api_key),
            health="/server_info",  # answered by the scheduler, also while it is paused
            transport=http,
        )
        self._client = secrets.token_hex(4)
        self._label: str | None = None  # of the last publication that has begun
        self._num_labels = 0
        self._attested: Sequence[Mapping[str, str]] = ()  # checksums of the server's parameters after it
        self._through, self._deadline_s = through, deadline_s
        self._ways = ExitStack()  # closes the present one
        super().__init__(url, device, server, Slab(device))

    # ---- what a runtime asks -----------------------------------------------------------------------------------------

    @property
    def placement(self) -> str:
        """A phrase for reports: where it runs and its weights lie."""
        where = "on a device of its own" if self._through is not None else "in memory of its own"
        count = self._layout.ranks.tp_size
        ranks = f", shared by {count} ranks" if count > 1 else ""
        return f"an SGLang {self._facts.version} server at {self.url}, weights {where}{ranks}"

    @property
    def way_of_weights(self) -> str:
        """A phrase: how they reach it."""
        return f"copied, {self._way.words}; the checksums of all of its parameters are compared"

    def why_it_stays(self, segment: Segment) -> str:
        """The reason why a segment never leaves, in words that follow `it is`."""
        return "memory of another device" if self._through is not None else WHY_IT_STAYS

    def pause(self) -> None:
        """Hold back all clients' requests; those in flight are computed again afterwards. Idempotent."""
        self._status.require("pause", EngineState.AWAKE, EngineState.PAUSED)
        self._pause()

    def resume(self) -> None:
        """Let all clients' requests go on. Idempotent; `PhaseError` unless every segment is resident."""
        was_paused = self._status.paused
        super().resume()
        if was_paused:
            self._status.paused = True  # until the server has said so
            self._tell("/continue_generation")
            self._status.paused = False

    def reset_prefix_cache(self) -> None:
        """Forget everything computed from earlier weights. Raises: `TransferError` while requests run."""
        self._status.require_open("reset its prefix cache")
        query = {"timeout": str(_FLUSH_S)}
        if self._status.paused:
            self._tell("/pause_generation", mode="retract")  # again: another client may have let it go on
            query = {}  # at once: requests that wait hold nothing, and with a time it would wait for them
        self._ask("POST", "/flush_cache", query=query, as_text=True)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish all weights in a session of the server's, and have it attest them. Poisons until the next `commit`.

        The server is paused, or its other clients sample from half of them, which this engine does not return.
        Raises: `PhaseError` while the weights are away; `TransferError` for weights that are not the model's, and
        unless all of the server's are what was sent; `EngineLost`.
        """
        self.poison_for_load()
        self._check_same_model()
        expected = Expected(self._layout)
        try:
            checked = self._checked(weights, expected.add)
            with closing(self._way.publication(checked, self._facts.config)) as requests:
                first = next(requests, None)  # before the session: a disk that is full is no matter of the server
                self._begin_session()
                try:
                    self._tell_all(chain([first] if first is not None else [], requests))
                except Exception:
                    with suppress(TransferError, EngineLost):  # the next publication ends it otherwise
                        self._tell("/end_weight_update")
                    raise
            self._tell("/end_weight_update")
            # whoever has let the server go on meanwhile has left keys and values of half written weights
            self.reset_prefix_cache()
            self._attested = self._checksums()
        finally:
            self._slab.close()  # the trainer's turn comes next, and a slab that is exported for ever cannot be freed
        expected.check(self._attested)
        self._check_server()

    def _tell_all(self, requests: Iterable[tuple[str, Body]]) -> None:
        for path, body in requests:
            self._tell(path, **body)

    def load_adapter(self, name: str, adapter: AdapterWeights) -> None:
        """Make a LoRA adapter available by name; see `Adapters`. The server compares every tensor's SHA-256."""
        self._status.require_weights("load an adapter")
        if name in self._adapters:
            raise ValueError(f"there is an adapter {name!r} already: give each version a name of its own")
        tensors, settings = adapter_as_taken(adapter, self._layout, self._facts.started_with)
        packed, sums = adapter_payloads(tensors, self._layout.ranks.tp_size)
        self._num_labels += 1
        served = f"{name}-{self._client}-{self._num_labels}"  # the server's caches go by names
        self._tell(
            "/load_lora_adapter_from_tensors",
            lora_name=served,
            config_dict=settings,
            serialized_named_tensors=packed,
            load_format="flattened_bucket",
            expected_checksums=sums,
        )
        self._adapters[name] = served

    def replace_adapter(self, old: str, new: str, adapter: AdapterWeights) -> None:
        """Remove `old` and load `adapter` as `new`; see `Adapters`."""
        if old not in self._adapters:
            raise ValueError(f"there is no adapter {old!r}")
        if new != old and new in self._adapters:
            raise ValueError(f"there is an adapter {new!r} already: give each version a name of its own")
        self.remove_adapter(old)
        self.load_adapter(new, adapter)

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter. `ValueError` when there is none of that name."""
        self._status.require_open("remove an adapter")
        if name not in self._adapters:
            raise ValueError(f"there is no adapter {name!r}")
        served = self._adapters.pop(name)
        with suppress(TransferError):  # a server that was started again has forgotten it
            self._tell("/unload_lora_adapter", lora_name=served)

    def _move(self, segment: ServerSegment, target: Residency) -> None:
        """Make the server release a segment, or resume it where it has been released."""
        source = segment.residency
        if target is Residency.RESIDENT:
            make_room(segment.size_bytes, self.device)  # without it the server ends
            label = self._label_now()
            # a server that was started again has everything: it knows no label of ours
            self._resume_memory(label, [segment.tag])
            if not self._is_ours(label):
                self.poison(self._not_ours(label))
            elif source is Residency.OFFLOADED and self._attested != self._checksums():
                self.poison("its weights have not come back from host memory as they were: publish to it")
            return
        if segment.name == ENGINE_WEIGHTS and target is Residency.DISCARDED:
            self.poison("its weights have been dropped: wake it and publish weights to it")
        if source is Residency.RESIDENT:
            self._pause()
            self.reset_prefix_cache()
            self._tell("/release_memory_occupation", tags=[segment.tag])
            label = self._label_now()
            self._name(label_with(label, {*away_by(label), segment.tag}))

    def _pause(self) -> None:
        if not self._status.paused:
            self._status.paused = True  # also after an interrupt: to resume what is not paused does nothing
            self._tell("/pause_generation", mode="retract")

    def _meet(self) -> None:
        """Ask the server what it is, and bring back what a client that has gone put to sleep."""
        self._facts = self._learn()
        specs, sizes = self._outline()
        ranks, sums = self._facts.ranks, self._checksums()
        self._layout = EngineLayout.of(specs, sums[0], ranks, self.model_type)
        if ranks.tp_size > 1:  # what its first rank has, which is on the trainer's device
            cache_bytes = sizes["kv_cache"] // min(ranks.tp_size, ranks.num_kv_heads)
            sizes = {"weights": self._layout.rank_bytes, "kv_cache": cache_bytes}
        self._ways.close()
        self._way = way_of(self._through, self._slab, self._fence, num_ranks=ranks.tp_size, deadline_s=self._deadline_s)
        self._ways.callback(self._way.close)
        self._resume_memory(self._facts.label, away_by(self._facts.label))
        away = self._facts.leaves
        if self._through is not None:  # it has nothing of the trainer's device
            away, sizes = dict.fromkeys(TAGS), dict.fromkeys(TAGS, 0)
        if not self._segments:
            self._segments = tuple(ServerSegment(t, sizes[t], away[t], self._move, refusals(away[t])) for t in TAGS)
        self._tell_all(self._way.meeting())
        for segment in self._segments:
            segment.residency, segment.size_bytes = Residency.RESIDENT, sizes[segment.tag]
        left, self._adapters = list(self._adapters.values()), {}
        for served in left:
            with suppress(TransferError):  # a server that was started again has none of them
                self._tell("/unload_lora_adapter", lora_name=served)

    def _read_facts(self) -> Facts:
        info, server = self._ask("GET", "/model_info"), self._ask("GET", "/server_info")
        positions = int(self._ask("GET", "/v1/models")["data"][0]["max_model_len"])
        return Facts.of(self.url, info, server, positions)

    def _check_same_model(self) -> None:
        super()._check_same_model()
        layout = self._layout
        if self._facts.ranks != layout.ranks or any(sums.keys() != layout.parts.keys() for sums in self._checksums()):
            raise self._another_model(self._facts)

    # ---- labels ------------------------------------------------------------------------------------------------------

    def _name(self, label: str) -> None:
        self._tell("/update_weight_version", new_version=label, abort_all_requests=False)

    def _label_now(self) -> str:
        return str(self._ask("GET", "/model_info")["weight_version"])

    def _is_ours(self, label: str) -> bool:
        return self._label is not None and plain_label(label) == self._label

    def _not_ours(self, label: str) -> str:
        return (
            f"the server holds weights of {label!r} and not of {self._label!r}, which was published: it has been "
            "started again, or another trainer has published to it"
        )

    def _check_server(self) -> None:
        """Raise `StaleWeights`, and poison, unless the server still has the label of the last publication."""
        if not self._is_ours(label := self._label_now()):
            self.poison(self._not_ours(label))
            raise StaleWeights(self._not_ours(label))

    def _resume_memory(self, label: str, tags: Sequence[str]) -> None:
        """Bring back what a label says is away: to resume anything else ends the server."""
        away = away_by(label)
        if found := [tag for tag in tags if tag in away]:
            self._tell("/resume_memory_occupation", tags=found)
            self._name(label_with(label, set(away) - set(found)))

    # ---- a publication -----------------------------------------------------------------------------------------------

    def _begin_session(self) -> None:
        """Open a session, after ending one that somebody has left open, and label it."""
        try:
            self._tell("/begin_weight_update", selector="target")
        except TransferError as error:
            if "already open" not in str(error):
                raise
            # whoever has begun it has ended, or loses it now: every weight is replaced
            self._tell("/end_weight_update")
            self._tell("/begin_weight_update", selector="target")
        self._num_labels += 1
        self._label = f"colo-{self._client}-{self._num_labels}"
        self._name(label_with(self._label, set(away_by(self._facts.label))))

    def _checksums(self, **body: Any) -> Sequence[Mapping[str, str]]:
        """Checksums of the parameters of each of the server's ranks, by its own names."""
        ranks = self._tell("/weights_checker", action="checksum", **body)["ranks"]
        return [rank["checksums"] for rank in ranks]

    def _fence(self) -> None:
        """Wait for what the server has queued on its GPU, which it does before it sums; every name is left out."""
        self._checksums(skip_tensor_list=[""])

    # ---- generation --------------------------------------------------------------------------------------------------

    def _check_sampling(self, params: SamplingParams) -> None:
        if filters := distorting(params):
            raise Unsupported(
                f"SGLang's log-probabilities leave {', '.join(filters)} out, and would not be those of what is "
                "sampled: sample without filters"
            )
        if params.ignore_eos and params.stop_token_ids:
            raise Unsupported(
                "SGLang ignores stop_token_ids where it ignores the model's own end: leave ignore_eos or "
                "stop_token_ids out"
            )
        if params.seed is not None and not self._facts.started_with.get("enable_deterministic_inference"):
            raise Unsupported("this SGLang server ignores seeds: start it with --enable-deterministic-inference")

    def _answers(
        self, prompts: Sequence[tuple[int, ...]], rows: Sequence[tuple[int, int]], params: SamplingParams, adapter: Any
    ) -> list[Mapping[str, Any]]:
        if params.seed is None and self._facts.started_with.get("enable_deterministic_inference"):
            # such a server gives all requests without a seed the same one
            params = replace(params, seed=secrets.randbits(62))
        settings = [self._settings(prompts[p], params, p, s) for p, s in rows]
        size = -(-len(rows) // _MAX_REQUESTS) or 1
        common: Body = {"return_logprob": True}
        if self._facts.started_with.get("enable_return_routed_experts"):
            common["return_routed_experts"] = True
        if adapter is not None:
            common["lora_path"] = self._adapters[adapter]
        bodies = []
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            ids = [list(prompts[p]) for p, _ in rows[part]]
            bodies.append({"input_ids": ids, "sampling_params": settings[part]} | common)

        def on_refusal(error: Refused) -> None:
            self._check_server()  # first: another server may be there, which knows no adapter of ours
            if adapter is not None and "LoRA" in str(error):
                self.poison(f"the server has forgotten its adapter: {error}")
                raise StaleWeights(f"the server has forgotten the adapter {adapter!r}: {error}") from error

        return [answer for part in self._ask_all("/generate", bodies, on_refusal) for answer in part]

    def _settings(self, prompt: tuple[int, ...], params: SamplingParams, index: int, sample: int) -> Body:
        settings: Body = {
            **_NEUTRAL,
            "max_new_tokens": self._limit(prompt, params),
            "temperature": params.temperature,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
        }
        if params.seed is not None:
            settings["sampling_seed"] = completion_seed(params.seed, index, sample)
        return settings

    def _completion(
        self, row: tuple[int, int], prompt: tuple[int, ...], answer: Mapping[str, Any], version: int, adapter: Any
    ) -> Completion:
        meta = answer["meta_info"]
        for span in meta.get("weight_versions") or [{"version": meta["weight_version"]}]:
            if not self._is_ours(span["version"]):
                self.poison(self._not_ours(span["version"]))
                raise StaleWeights(self._not_ours(span["version"]))
        reason = meta["finish_reason"]
        if reason["type"] == "abort":
            raise TransferError(
                f"the server has ended a request: {reason.get('message') or 'another client asked it to'}"
            )
        known = {"finish_reason": reason["type"], "weights_version": version, "adapter": adapter}
        if meta.get("routed_experts") is not None:
            import numpy as np

            config = self._facts.config.get_text_config()
            experts = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
            known["routed_experts"] = experts.reshape(-1, config.num_hidden_layers, config.num_experts_per_tok)
        pairs = meta["output_token_logprobs"]
        return self._made(row, prompt, answer["output_ids"], pairs, answer, text=answer.get("text"), **known)

    def _release(self) -> None:
        """Leave the server as it was found, if it answers."""
        with self._ways:
            super()._release()

    def _leave_as_found(self) -> None:
        with suppress(TransferError):
            self._tell_all(self._way.parting())
        for segment in self._segments:
            segment.begin(Residency.RESIDENT)
        for served in self._adapters.values():
            with suppress(TransferError):
                self._tell("/unload_lora_adapter", lora_name=served)
        self._tell("/continue_generation")
