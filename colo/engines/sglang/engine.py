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

import math
import operator
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import httpx
import torch

from colo.engine import AdapterWeights, Completion, EngineState, SamplingParams
from colo.engines.base import TAGS, EngineBase, EngineStatus
from colo.engines.http import Body, HttpClient, Refused, Silent
from colo.engines.layout import empty_model
from colo.engines.sampling import check_seeds, completion_seed, distorting
from colo.engines.sglang.server import (
    WHY_IT_STAYS,
    Facts,
    ServerSegment,
    away_by,
    label_with,
    plain_label,
    shapes_of,
)
from colo.engines.sglang.weights import (
    BUCKET_BYTES,
    EngineLayout,
    Expected,
    Payloads,
    adapter_as_taken,
    adapter_payload,
    buckets,
)
from colo.engines.text import check_count, check_prompts
from colo.errors import EngineLost, PhaseError, StaleWeights, TransferError, Unsupported
from colo.memory.load_plan import LoadPlan
from colo.phases.phase import ENGINE_WEIGHTS, Residency, Segment
from colo.planning.kv_cache import layer_caches
from colo.weights.mismatch import not_numbers
from colo.weights.sources.module import ModuleSource

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

WHY_COPIED = "an SGLang server has a copy of its own"


# ---- the engine ----------------------------------------------------------------------------------------------------


class SGLangEngine(EngineBase):
    """An `Engine` (see `colo.engine`) over an SGLang server, which stays its owner's. One caller at a time.

    It starts awake and poisoned. Its other clients' requests are held back while it is paused. `recover` takes up the
    same address again: a server that was started anew, or one that did not answer for a while.
    """

    name = "sglang"
    called = "an SGLang server"
    or_else = "leave it out"

    def __init__(
        self,
        url: str,
        device: torch.device,
        *,
        deadline_s: float,
        api_key: str | None = None,
        admin_key: str | None = None,
        http: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Connect. Raises: see `colo.connect`."""
        self.url = url
        # operations want the admin's key where there is one, and these the other
        plain = ("/generate", "/model_info", "/server_info", "/v1/models", "/load_lora_adapter_from_tensors")
        keys = dict.fromkeys(plain, api_key)
        self._server = HttpClient(
            url,
            deadline_s=deadline_s,
            api_key=admin_key or api_key,
            keys=keys,
            health="/server_info",  # answered by the scheduler, also while it is paused
            transport=http,
        )
        self._client = secrets.token_hex(4)
        self._label: str | None = None  # of the last publication that has begun
        self._num_labels = 0
        self._attested: Mapping[str, str] = {}  # checksums of the server's parameters after it
        self._adapters: dict[str, str] = {}  # the server's name of each
        self._payloads = Payloads(device)
        status = EngineStatus(lambda: self.segments, on_loss=self._vanish, when_lost="call recover() once it answers")
        super().__init__(device, (), status=status)
        try:
            self._meet()
        except BaseException:
            self.close()
            raise

    # ---- what a runtime asks -----------------------------------------------------------------------------------------

    @property
    def facts(self) -> Facts:
        """The server's account of itself when it was last asked."""
        return self._facts

    @property
    def placement(self) -> str:
        """A phrase for reports: where it runs and its weights lie."""
        return f"an SGLang {self._facts.version} server at {self.url}, weights in memory of its own"

    @property
    def way_of_weights(self) -> str:
        """A phrase: how they reach it."""
        how = "within requests" if self.device.type == "cpu" else "by CUDA IPC, out of a slab in two halves"
        return f"copied, {how}; the checksums of all of its parameters are compared"

    @property
    def lacking_flags(self) -> Mapping[str, str]:
        """Options that the server was started without, and what it cannot do therefore."""
        return self._facts.lacking_flags

    @property
    def model_type(self) -> str | None:
        """`model_type` of the model's configuration."""
        kind: str | None = self._facts.config.model_type
        return kind

    @property
    def vocab_size(self) -> int:
        """Token ids are below it; the server ends at one that is not."""
        return int(self._facts.config.get_text_config().vocab_size)

    def why_it_stays(self, segment: Segment) -> str:
        """The reason why a segment never leaves, in words that follow `it is`."""
        return WHY_IT_STAYS

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

    def sampling_params(self, params: Any = None, **sampling: Any) -> Any:
        """`SamplingParams`; see `EngineBase`. Raises: `Unsupported` for seeds where the server ignores them."""
        made = super().sampling_params(params, **sampling)
        self._check_sampling(made)
        return made

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Any, *, adapter: str | None = None
    ) -> list[Completion]:
        """Sample `params.n` completions for each prompt; see `Engine.generate`.

        Raises: `Unsupported` for seeds or filters that the server would not heed, or would leave out of
        log-probabilities; `StaleWeights` when a completion is of other weights than were published, and the engine is
        poisoned then.
        """
        version = self.ready()
        params = self.sampling_params(params)
        token_ids = self._check_request(prompts, params)
        if adapter is not None and adapter not in self._adapters:
            raise ValueError(f"the engine has no adapter {adapter!r}, but {sorted(self._adapters)}")
        if params.seed is None and self._facts.started_with.get("enable_deterministic_inference"):
            # such a server gives all requests without a seed the same one
            params = replace(params, seed=secrets.randbits(62))
        rows = [(p, s) for p in range(len(token_ids)) for s in range(params.n)]
        answers = self._answers([self._row(token_ids[p], params, p, s) for p, s in rows], adapter)
        return [
            self._completion(row, token_ids[row[0]], answer, version, adapter)
            for row, answer in zip(rows, answers, strict=True)
        ]

    def check_request(self, prompts: Sequence[Sequence[int]], params: Any) -> None:
        """Raise what `generate` would raise for these prompts and parameters."""
        for prompt in self._check_request(prompts, params):
            self._row(prompt, params, 0, 0)

    @property
    def longest_prompt(self) -> int:  # type: ignore[override]
        """The most tokens of a prompt that the server takes."""
        return self._facts.max_prompt

    def record_plan(self, source: Mapping[str, torch.Tensor]) -> LoadPlan:
        """Compare names and shapes with the server's model; every weight goes through its loader. See `LoadPlans`.

        Raises: `TransferError` for weights of another model.
        """
        self._layout.check(source)
        return LoadPlan.of(source, fallbacks=dict.fromkeys(source, WHY_COPIED))

    def share_weights(self) -> bool:
        """Refuse. Raises: `Unsupported`."""
        raise Unsupported("the memory of a server's weights cannot be shared: they are copied")

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish all weights in a session of the server's, and have it attest them. Poisons until the next `commit`.

        The server is paused, or its other clients sample from half of them, which this engine does not return.
        Raises: `PhaseError` while the weights are away; `TransferError` for weights that are not the model's, and
        unless all of the server's are what was sent; `EngineLost`.
        """
        self.poison_for_load()
        self._check_same_server()
        expected = Expected(self._layout)
        self._begin_session()
        try:
            for bucket in buckets(self._checked(weights, expected), BUCKET_BYTES):
                payload = self._payloads.make(bucket, self._fence)
                body = {"serialized_named_tensors": [payload], "load_format": "flattened_bucket", "selector": "target"}
                # a refused flush would end the server: it is flushed below
                self._tell("/update_weights_from_tensor", **body, flush_cache=False)
        except Exception:
            with suppress(TransferError, EngineLost):  # the next publication ends it otherwise
                self._tell("/end_weight_update")
            raise
        self._tell("/end_weight_update")
        # whoever has let the server go on meanwhile has left keys and values of half written weights
        self.reset_prefix_cache()
        self._attested = self._checksums()
        expected.check(self._attested)
        self._check_label()

    def load_adapter(self, name: str, adapter: AdapterWeights) -> None:
        """Make a LoRA adapter available by name; see `Adapters`. The server compares every tensor's SHA-256."""
        self._status.require_weights("load an adapter")
        if name in self._adapters:
            raise ValueError(f"there is an adapter {name!r} already: give each version a name of its own")
        tensors, settings = adapter_as_taken(adapter, self._layout, self._facts.started_with)
        payload, sums = adapter_payload(tensors)
        self._num_labels += 1
        served = f"{name}-{self._client}-{self._num_labels}"  # the server's caches go by names
        self._tell(
            "/load_lora_adapter_from_tensors",
            lora_name=served,
            config_dict=settings,
            serialized_named_tensors=[payload],
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

    def recover(self) -> None:
        """Take up the server's address again; it is awake and poisoned then. `PhaseError` unless it is lost.

        Raises: `EngineLost` while nothing answers there; `Unsupported` as `colo.connect`.
        """
        lost = self._status.lost
        if lost is None:
            raise PhaseError("the engine is not lost: nothing to recover")
        left, self._adapters = list(self._adapters.values()), {}
        self._status.revive()
        try:
            self._meet()
            for served in left:
                with suppress(TransferError):  # a server that was started again has none of them
                    self._tell("/unload_lora_adapter", lora_name=served)
        except BaseException:
            self._status.lost = self._status.lost or lost
            raise
        self.poison("it has been taken up again: publish to it")

    def _move(self, segment: ServerSegment, target: Residency) -> None:
        """Make the server release a segment, or resume it where it has been released."""
        source = segment.residency
        if target is Residency.RESIDENT:
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

    def _release(self) -> None:
        """Leave the server awake and running, with the last weights, and without the adapters."""
        with suppress(EngineLost, TransferError, PhaseError):
            if self._status.lost is None and self._segments:
                self._leave_as_found()
        self._payloads.close()
        self._server.close()

    # ---- asking ------------------------------------------------------------------------------------------------------

    def _ask(self, method: str, path: str, body: Body | None = None, **how: Any) -> Any:
        """The server's answer. Raises: `EngineLost` without one, `TransferError` for a refusal."""
        self._status.require_present()
        try:
            return self._server.ask(method, path, body, **how)
        except Silent as error:
            raise self._status.lose(str(error)) from error
        except Refused as error:
            raise TransferError(f"the server refuses {path}: {error}") from error

    def _tell(self, path: str, **body: Any) -> Any:
        """Tell the server to do something. Raises: as `_ask`, also for an answer that says that it did not."""
        answer = self._ask("POST", path, body)
        if isinstance(answer, dict) and answer.get("success") is False:
            why = answer.get("message") or answer.get("error_message")
            raise TransferError(f"the server refuses {path}: {why}")
        return answer

    def _pause(self) -> None:
        if not self._status.paused:
            self._status.paused = True  # also after an interrupt: to resume what is not paused does nothing
            self._tell("/pause_generation", mode="retract")

    def _meet(self) -> None:
        """Ask the server what it is, and bring back what a client that has gone put to sleep."""
        self._facts = self._learn()
        outline = ModuleSource(empty_model(self._facts.config, dtype=self._facts.dtype, attn_implementation=None))
        specs = outline.specs()
        self._layout = EngineLayout.of(specs, self._checksums())
        self._resume_memory(self._facts.label, away_by(self._facts.label))
        options = self._facts.started_with
        dropped = Residency.DISCARDED if options.get("enable_memory_saver") else None
        kept = Residency.OFFLOADED if dropped and options.get("enable_weights_cpu_backup") else dropped
        tokens, size = self._facts.num_cached_tokens, self._facts.dtype.itemsize
        kv_bytes = tokens * sum(layer.token_bytes(dtype_bytes=size) or 0 for layer in layer_caches(outline.model))
        sizes = {"weights": sum(spec.size_bytes for spec in specs), "kv_cache": kv_bytes}
        if not self._segments:
            away = {"weights": kept, "kv_cache": dropped}
            self._segments = tuple(ServerSegment(tag, sizes[tag], away=away[tag], move=self._move) for tag in TAGS)
        for segment in self._segments:
            segment.residency = Residency.RESIDENT  # type: ignore[misc]

    def _learn(self) -> Facts:
        try:
            info, server = self._ask("GET", "/model_info"), self._ask("GET", "/server_info")
            positions = int(self._ask("GET", "/v1/models")["data"][0]["max_model_len"])
        except EngineLost as error:
            raise EngineLost(f"no server answers at {self.url}: {self._status.lost}") from error
        facts = Facts.of(self.url, info, server, positions)
        if facts.device != self.device.type:
            raise Unsupported(
                f"the server at {self.url} runs on {facts.device} and the trainer on {self.device}: start both on the "
                "same GPU"
            )
        return facts

    def _check_same_server(self) -> None:
        """Raise `TransferError` when there is another model at the address by now, before anything is sent."""
        facts = self._learn()
        parameters = self._checksums()
        same_shapes = shapes_of(facts.config) == shapes_of(self._facts.config) and facts.dtype == self._facts.dtype
        if not same_shapes or parameters.keys() != self._layout.parts.keys():
            raise TransferError(
                f"the server at {self.url} has another model than when it was connected to, {facts.model_path}: "
                "connect to it again, or start it as it was"
            )
        self._facts = facts

    def _vanish(self) -> None:
        for segment in self._segments:
            segment.residency = Residency.DISCARDED  # type: ignore[misc]

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

    def _check_label(self) -> None:
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

    def _checked(
        self, weights: Iterable[tuple[str, torch.Tensor]], expected: Expected
    ) -> Iterable[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self._layout.check_one(name, tensor)
            sent = tensor.detach().to(self._facts.dtype)
            expected.add(name, sent)
            yield name, sent

    def _checksums(self, **body: Any) -> Mapping[str, str]:
        """Checksums of the server's parameters, by its own names."""
        (rank,) = self._tell("/weights_checker", action="checksum", **body)["ranks"]
        found: Mapping[str, str] = rank["checksums"]
        return found

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
        if params.seed is not None and not self._facts.started_with.get("enable_deterministic_inference"):
            raise Unsupported("this SGLang server ignores seeds: start it with --enable-deterministic-inference")

    def _check_request(self, prompts: Sequence[Sequence[int]], params: Any) -> list[tuple[int, ...]]:
        token_ids = [tuple(map(operator.index, prompt)) for prompt in prompts]
        check_count(len(token_ids), params.n)
        check_seeds(params.seed, len(token_ids))
        # one position at least is left for what is sampled
        positions = self._facts.max_prompt + 1
        check_prompts(token_ids, self.vocab_size, positions, or_else=", or start it with more --context-length")
        return token_ids

    def _row(self, prompt: tuple[int, ...], params: SamplingParams, index: int, sample: int) -> Body:
        limit = min(params.max_tokens, self._facts.num_positions - len(prompt))
        kv_cache = next(segment for segment in self._segments if segment.name == "kv_cache")
        self._facts.check_room(len(prompt), limit, kv_cache.size_bytes)
        settings: Body = {
            "max_new_tokens": limit,
            "temperature": params.temperature,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
        }
        settings |= _NEUTRAL
        if params.seed is not None:
            settings["sampling_seed"] = completion_seed(params.seed, index, sample)
        return {"input_ids": list(prompt), "sampling_params": settings}

    def _answers(self, rows: Sequence[Body], adapter: str | None) -> list[Mapping[str, Any]]:
        size = -(-len(rows) // _MAX_REQUESTS) or 1
        common: Body = {"return_logprob": True}
        if adapter is not None:
            common["lora_path"] = self._adapters[adapter]
        bodies = [
            {key: [row[key] for row in rows[start : start + size]] for key in ("input_ids", "sampling_params")} | common
            for start in range(0, len(rows), size)
        ]
        try:
            return [answer for part in self._server.ask_all("/generate", bodies) for answer in part]
        except Silent as error:
            raise self._status.lose(str(error)) from error
        except Refused as error:
            self._check_label()  # first: another server may be there, which knows no adapter of ours
            if adapter is not None and "LoRA" in str(error):
                self.poison(f"the server has forgotten its adapter: {error}")
                raise StaleWeights(f"the server has forgotten the adapter {adapter!r}: {error}") from error
            raise (ValueError if error.status < httpx.codes.INTERNAL_SERVER_ERROR else TransferError)(
                f"the server does not generate: {error}"
            ) from error

    def _completion(
        self,
        row: tuple[int, int],
        prompt: tuple[int, ...],
        answer: Mapping[str, Any],
        version: int,
        adapter: str | None,
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
        tokens = tuple(answer["output_ids"])
        if tokens != tuple(token for _, token, *_ in meta["output_token_logprobs"]):
            raise TransferError("the server's log-probabilities are of other tokens than those that it has sampled")
        logprobs = tuple(math.nan if value is None else value for value, *_ in meta["output_token_logprobs"])
        if not math.isfinite(sum(logprobs)):
            raise FloatingPointError(not_numbers(None))
        return Completion(
            prompt_index=row[0],
            sample_index=row[1],
            prompt_token_ids=prompt,
            token_ids=tokens,
            logprobs=logprobs,
            finish_reason=reason["type"],
            weights_version=version,
            adapter=adapter,
            text=answer.get("text"),
            output=answer,
        )

    def _leave_as_found(self) -> None:
        for segment in self._segments:
            segment.begin(Residency.RESIDENT)
        for served in self._adapters.values():
            with suppress(TransferError):
                self._tell("/unload_lora_adapter", lora_name=served)
        self._tell("/continue_generation")
