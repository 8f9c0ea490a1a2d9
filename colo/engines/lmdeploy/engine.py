"""An LMDeploy server of the user's own as an engine, over HTTP: `colo.connect`.

    lmdeploy serve api_server MODEL --backend pytorch --logprobs-mode raw_logprobs --server-name 127.0.0.1

    rt = colo.share(colo.connect("http://localhost:23333"), model, optimizer)

Server and trainer share a machine and a device, and each has a copy of the weights. LMDeploy cannot be paused, names no
version of its weights and sums none of them. So a publication puts it to sleep, in which it refuses everybody's
requests and drops what it has computed, wakes its weights, sends all of them, and only then wakes its KV cache. What it
holds afterwards is not attested: each request is answered, or the engine is poisoned, and a server that was started
again since is told by its process's time of start, after every generation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx
import torch

from colo.engine import Completion, SamplingParams
from colo.engines.base import TAGS
from colo.engines.buckets import BUCKET_BYTES, Slab, buckets
from colo.engines.checkpoint_engine import send_weights
from colo.engines.http import Body, HttpClient, Refused
from colo.engines.lmdeploy.server import FINISHED, LOGPROBS_FLAG, LMDeployFacts, Payloads, started_in
from colo.engines.sampling import completion_seed, distorting
from colo.engines.server import Outline, ServerEngine, ServerSegment
from colo.errors import StaleWeights, TransferError, Unsupported
from colo.memory.region import make_room
from colo.phases.phase import ENGINE_WEIGHTS, Residency
from colo.weights.mismatch import not_numbers

_NEUTRAL: Mapping[str, float] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Options that change nothing, said so that those of the checkpoint's generation config do not hold."""

_ROUNDING = 1e-3
"""Excess over 0 of a log-probability that rounding may have made."""


class LMDeployEngine(ServerEngine[LMDeployFacts]):
    """An `Engine` over an LMDeploy server; see `ServerEngine`.

    It starts awake unless the server sleeps. Weights and KV cache leave the device together and come back together:
    one that is away alone is so by the ledger, which keeps room for the other, until both are needed or weights sent.
    """

    name = "lmdeploy"
    called = "an LMDeploy server"
    longer = "--session-len"

    def __init__(
        self,
        url: str,
        device: torch.device,
        *,
        deadline_s: float,
        checkpoint: str | None = None,
        api_key: str | None = None,
        http: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Connect. `checkpoint` is the server's, by default the name that it serves. Raises: see `colo.connect`."""
        self._checkpoint = checkpoint
        slab = Slab(device)
        self._payloads = Payloads(slab)
        self._asleep: frozenset[str] = frozenset()  # tags, as this engine has left them
        self._dropped = False  # whether the server's weights are gone, or unknown
        super().__init__(url, device, HttpClient(url, deadline_s=deadline_s, api_key=api_key, transport=http), slab)

    # ---- what a runtime asks -----------------------------------------------------------------------------------------

    @property
    def placement(self) -> str:
        """A phrase for reports: where it runs and its weights lie, and what of them is not known."""
        return (
            f"an LMDeploy server at {self.url}, weights in memory of its own; it attests neither their bytes nor their "
            "version, so that another trainer's publication to it would not be noticed"
        )

    @property
    def way_of_weights(self) -> str:
        """A phrase: how they reach it."""
        how = "within requests" if self.device.type == "cpu" else "by CUDA IPC, out of a slab whose handle is sent once"
        if self._facts.checkpoint_engine is not None:
            how = f"by checkpoint-engine {self._facts.checkpoint_engine}, out of memory of two halves"
        return f"copied, {how}, while it sleeps; it has no checksums to compare"

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publish all weights to the server while it sleeps, and wake it. Poisons until the next `commit`.

        Where it fails, the server stays asleep, and refuses everybody's requests, until a publication succeeds.
        Raises: `PhaseError` while the weights are away; `TransferError` for weights that are not the model's;
        `StaleWeights` when the server was started again meanwhile; `EngineLost`.
        """
        self.poison_for_load()
        self._check_same_model()
        self._sleep(2)  # also where it sleeps already: whoever has put it to sleep, the slab's handle is forgotten
        self._wake(["weights"])
        missing = dict.fromkeys(self._layout.specs)
        checked = self._checked(weights, lambda name, _: missing.pop(name, None))
        if self._facts.checkpoint_engine is not None:
            sent = dict(checked)
            self._check_all(missing)
            try:
                send_weights(sent, self._load_by_ipc, device=self.device, bucket_bytes=BUCKET_BYTES)
            except TransferError:
                self._status.require_present()  # a server that has ended answers its request for them first
                raise
        else:
            try:
                for bucket in buckets(checked, self._slab.size_bytes):
                    self._update(**self._payloads.make(bucket))
                self._check_all(missing)
                self._update(**FINISHED)
            finally:  # the server has forgotten the handle, and the trainer's turn comes next
                self._payloads.forget()
                self._slab.close()
        self._check_server()
        self._dropped = False
        self._wake_up()

    def _check_all(self, missing: Mapping[str, Any]) -> None:
        if missing:
            raise TransferError(f"nothing was sent for {next(iter(missing))}, {len(missing)} in all")

    def _load_by_ipc(self, handles: dict[str, str]) -> None:
        self._tell("/update_weights_from_ipc", zmq_handles=handles)

    def _update(self, **bucket: Any) -> None:
        try:
            self._tell("/update_weights", **bucket)
        except TransferError as error:
            if self.device.type == "cuda":  # 0.18.0 has no words for it
                error.add_note(
                    "LMDeploy takes these requests with --distributed-executor-backend ray alone: start it so, or "
                    "pip install checkpoint-engine==0.4.2 in its environment and start it again"
                )
            raise

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _move(self, segment: ServerSegment, target: Residency) -> None:
        """Put the server to sleep, or wake it when nothing is to be away."""
        if target is Residency.RESIDENT:
            self._wake_up(segment)
            return
        drop = segment.name == ENGINE_WEIGHTS and target is Residency.DISCARDED
        if drop:
            self.poison("its weights have been dropped: wake it and publish weights to it")
        self._status.paused = True
        if (drop and not self._dropped) or segment.tag not in self._asleep:
            self._sleep(2 if drop or self._dropped else 1)

    def _sleep(self, level: int) -> None:
        """Put all of it to sleep, which ends requests in flight. Level 2 drops weights, 1 keeps them in host memory."""
        self._dropped = self._dropped or level == 2
        self._ask("POST", "/sleep", {}, query={"level": str(level)})
        self._asleep = frozenset(TAGS)

    def _wake(self, tags: Iterable[str]) -> None:
        """Wake what sleeps of `tags`: a request for anything else wakes nothing, and its answer does not say so."""
        asleep, tags = self._asleep_now(), set(tags)
        for tag in [tag for tag in TAGS if tag in tags & asleep]:
            make_room(self._segment(tag).size_bytes, self.device)
            self._ask("POST", "/wakeup", {}, query={"tags": tag})
        if left := self._asleep_now() & tags:
            raise TransferError(f"the server has been told to wake {', '.join(sorted(left))}, and sleeps")
        self._asleep -= tags

    def _wake_up(self, coming: ServerSegment | None = None) -> None:
        """Wake all of it if it has weights, and nothing is to be away once `coming` is here."""
        if self._dropped or any(s is not coming and s.residency is not Residency.RESIDENT for s in self._segments):
            return
        if (asleep := self._asleep_now()) == self._asleep:
            self._wake(TAGS)
            return
        self._asleep, self._dropped = asleep, True
        self.poison("another client has woken it or put it to sleep, or it has been started again: publish to it")

    def _asleep_now(self) -> frozenset[str]:
        return frozenset(self._ask("GET", "/update_weights_from_ipc")["sleeping_tags"])

    def _leave_as_found(self) -> None:
        """Wake it if it has weights. Without any it is left asleep, so that nobody samples from none."""
        for segment in self._segments:
            segment.begin(Residency.RESIDENT)

    # ---- asking ------------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """Ask the server what it is. What sleeps is left so: its weights may be anybody's, or none (--empty-init)."""
        self._facts = self._learn()
        specs, sizes = self._outline()
        self._layout = Outline({spec.name: spec for spec in specs})
        self._asleep, self._dropped = self._facts.asleep, bool(self._facts.asleep)
        if not self._segments:
            self._segments = tuple(ServerSegment(t, sizes[t], Residency.DISCARDED, self._move) for t in TAGS)
        for segment in self._segments:
            segment.residency = Residency.DISCARDED if segment.tag in self._asleep else Residency.RESIDENT

    def _read_facts(self) -> LMDeployFacts:
        status = self._ask("GET", "/update_weights_from_ipc")
        info = self._ask("GET", "/distserve/engine_info") if status["backend"] == "pytorch" else "{}"
        started = None
        with suppress(TransferError):  # there is nothing under this path with --disable-metrics
            started = self._started()
        return LMDeployFacts.of(
            self.url,
            status=status,
            info=json.loads(info),
            model_name=self._ask("GET", "/v1/models")["data"][0]["id"],
            checkpoint=self._checkpoint,
            started=started,
            has_logprobs=bool(status["sleeping_tags"]) or self._gives_logprobs(),
            device=self.device,
        )

    def _started(self) -> str | None:
        return started_in(self._ask("GET", "/metrics", as_text=True) or "")

    def _gives_logprobs(self) -> bool:
        try:
            self._tell("/generate", input_ids=[], return_logprob=True)  # an empty prompt, which is refused next
        except TransferError as error:
            return "logprobs_mode" not in str(error)
        return True

    def _check_server(self) -> None:
        """Raise `StaleWeights`, and poison, unless the server is the process that the last publication began with."""
        if self._started() != self._facts.started:
            cause = "the server has been started again since weights were published to it"
            self.poison(cause)
            raise StaleWeights(cause)

    # ---- generation --------------------------------------------------------------------------------------------------

    def _check_sampling(self, params: SamplingParams) -> None:
        left_out = [*distorting(params), *(["temperature"] if params.temperature not in (0, 1) else [])]
        if left_out:
            raise Unsupported(
                f"LMDeploy's log-probabilities leave {', '.join(left_out)} out, and would not be those of what is "
                "sampled: sample at temperature 1 without filters"
            )
        if params.ignore_eos:
            raise Unsupported("LMDeploy never samples what ends a sequence when it is to ignore it: stop there")
        if params.seed is not None and params.stop_token_ids:
            raise Unsupported("LMDeploy takes seeds and stop_token_ids by different requests: leave one of them out")

    def _answers(
        self, prompts: Sequence[tuple[int, ...]], rows: Sequence[tuple[int, int]], params: SamplingParams, adapter: Any
    ) -> list[Mapping[str, Any]]:
        # one request takes stop tokens and no seed, the other a seed and no stop tokens
        path = "/generate" if params.seed is None else "/v1/chat/completions"
        bodies = [self._body(prompts[p], params, p, s) for p, s in rows]
        answers = self._ask_all(path, bodies, self._on_refusal)
        self._check_server()
        return answers

    def _body(self, prompt: tuple[int, ...], params: SamplingParams, index: int, sample: int) -> Body:
        body: Body = {
            **_NEUTRAL,
            "input_ids": list(prompt),
            "temperature": params.temperature,
            "include_stop_str_in_output": True,  # or the token is left out, too
            "return_logprob": True,
        }
        limit = self._limit(prompt, params)
        if params.seed is None:
            return body | {"max_tokens": limit, "stop_token_ids": list(params.stop_token_ids)}
        chat = {"model": self._facts.model_name, "messages": [], "return_token_ids": True, "tool_choice": "none"}
        seed = completion_seed(params.seed, index, sample)
        return body | chat | {"max_completion_tokens": limit, "seed": seed, "min_new_tokens": 0}

    def _on_refusal(self, error: Refused) -> None:
        self._check_server()  # first: another server may be there
        if "logprobs_mode" in str(error):
            raise Unsupported(f"this LMDeploy server gives no log-probabilities: start it with {LOGPROBS_FLAG}")
        if str(error) == httpx.codes.get_reason_phrase(
            httpx.codes.INTERNAL_SERVER_ERROR
        ):  # nothing of LMDeploy's: JSON has no NaN
            raise FloatingPointError(f"{not_numbers(None)} (the server's answer: {error})") from error
        if error.status == httpx.codes.SERVICE_UNAVAILABLE:
            cause = f"another client has put the server to sleep: {error}"
            self.poison(cause)
            raise StaleWeights(cause)

    def _completion(
        self, row: tuple[int, int], prompt: tuple[int, ...], answer: Mapping[str, Any], version: int, adapter: Any
    ) -> Completion:
        if "choices" in answer:
            found = answer["choices"][0]
            pairs, reason = found["output_token_logprobs"], found["finish_reason"]
        else:
            found = answer
            pairs, reason = found["meta_info"]["output_token_logprobs"], found["meta_info"]["finish_reason"]["type"]
        if reason not in ("stop", "length"):
            raise TransferError(f"the server has ended a request ({reason}): another client asked it to, or it failed")
        if any(value is not None and value > _ROUNDING for value, _ in pairs or ()):
            raise Unsupported(f"the server gives logits in place of log-probabilities: start it with {LOGPROBS_FLAG}")
        known = {"finish_reason": reason, "weights_version": version, "adapter": adapter}
        return self._made(row, prompt, found["output_ids"], pairs or (), answer, **known)
