"""A vLLM server of the user's own as an engine: driven over HTTP, its weights written through the backend `colo`.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --load-format colo --logprobs-mode processed_logprobs
                                            --weight-transfer-config '{"backend": "colo"}'

    rt = colo.share(colo.connect("http://localhost:8000"), model, optimizer)

Server and trainer share a machine and a device. Requests and steps of an update travel as JSON, weights by memory that
both map (`colo.weights.transports.ipc.sender`), and the workers' answers by memory too (`colo.engines.vllm.answers`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

import httpx
import psutil
import torch

from colo.engine import AdapterWeights, Completion, EngineState, SamplingParams, SleepLevel
from colo.engines.common import ADVICE, WEIGHTS_AT, check_count, check_prompts, is_deeper, wake_segments
from colo.engines.sampling import row_seed
from colo.engines.vllm.calls import lives, pid_namespace
from colo.engines.vllm.options import device_of
from colo.engines.vllm.requests import PauseMode
from colo.engines.vllm.sampling import check_logprobs, check_numbers, sampling_temperature
from colo.engines.vllm.segment import WorkerSegment, residual_bytes
from colo.engines.vllm.server import Body, Refused, Server, Silent
from colo.engines.vllm.workers import FIRST_STEPS, Workers
from colo.errors import BudgetError, EngineLost, PhaseError, StaleWeights, TransferError, Unsupported
from colo.memory.load_plan import LoadPlan
from colo.memory.offload import Mover
from colo.memory.probe import device_id, free_device_bytes
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, Residency
from colo.phases.segment import Segment
from colo.units import format_bytes
from colo.weights.finite import not_numbers

DEADLINE_S = 300.0
"""How long the server may take to answer, or to say that it is healthy while it generates, before it counts as lost."""

HOW_TO_START = (
    "start it on this machine as `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --load-format colo "
    '--weight-transfer-config \'{"backend": "colo"}\' --logprobs-mode processed_logprobs` (on a GPU with '
    "`--enable-sleep-mode`), with colo installed"
)

_MAX_REQUESTS = 32
"""Prompts travel in so many requests, but with a seed in one each; vLLM batches all of them together."""

_UNCOMMITTED = "an update of its weights has begun: call commit(version) once it is complete"

_NO_ADAPTERS = (
    "adapters cannot be given to a vLLM server: merge them and share the merged model, or let colo start vLLM "
    "(colo.launch(..., engine='vllm'))"
)

_NO_JSON = "Out of range float values are not JSON compliant"
"""What Python's `json`, and so a server, says of log-probabilities that are not numbers."""


def connect(
    url: str,
    *,
    model_name: str | None = None,
    device: torch.device | str | None = None,
    deadline_s: float = DEADLINE_S,
    api_key: str | None = None,
) -> RemoteEngine:
    """A vLLM server of yours as an engine for `colo.share`, on the same machine and device as the trainer.

    `model_name` is the name it serves, by default the first one. The server stays yours: closing leaves it running.
    Raises: `EngineLost` when nothing answers; `Unsupported`, with the flags to start it with, for a server that cannot
    take weights from here; `PhaseError` for one that is asleep.
    """
    return RemoteEngine(url, model_name=model_name, device=device, deadline_s=deadline_s, api_key=api_key)


def base_url(url: str) -> str:
    """The address of a server, as clients of its `/v1` and people write it: with a scheme, and without that path."""
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1")


class RemoteEngine:
    """An `Engine` (see `colo.engine`) over a vLLM server. Made by `colo.connect`.

    It starts awake, or paused if the server is, and poisoned, until `commit` names what it holds. Other clients of the
    server are not kept from generating while weights change.
    Not thread-safe: one caller at a time.
    """

    name = "vllm"

    def __init__(
        self,
        url: str,
        *,
        model_name: str | None = None,
        device: torch.device | str | None = None,
        deadline_s: float = DEADLINE_S,
        api_key: str | None = None,
        http: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Connect; see `colo.connect`. `http` replaces the network."""
        self.device = device_of(device)
        self.url = url = base_url(url)
        self._server = Server(url, deadline_s=deadline_s, api_key=api_key, transport=http)
        self._workers: Workers | None = None
        self._infos: list[dict[str, Any]] = []
        self._processes: list[psutil.Process] = []
        self._segments: dict[str, WorkerSegment] = {}
        self.before_generate: Callable[[], None] | None = None
        self._paused = self._closed = False
        self._lost: str | None = None
        self._version: int | None = None
        self._cause = "no weights have been committed yet"
        try:
            self._connect(model_name)
        except BaseException:
            self._let_go()
            raise
        self.mover = Mover(self.device)

    # ---- what a runtime asks -----------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """What the engine can do now."""
        if self._closed:
            return EngineState.CLOSED
        if self._lost is not None:
            return EngineState.LOST
        if any(segment.residency is not Residency.RESIDENT for segment in self._segments.values()):
            return EngineState.ASLEEP
        return EngineState.PAUSED if self._paused else EngineState.AWAKE

    @property
    def weights_version(self) -> int | None:
        """Version of the weights it holds; `None` while poisoned."""
        return self._version

    @property
    def segments(self) -> Sequence[Segment]:
        """`engine.weights` and `engine.kv_cache`, with the bytes that the server's workers have told."""
        return tuple(self._segments.values())

    @property
    def pids(self) -> Sequence[int]:
        """Process of every worker."""
        return tuple(info["pid"] for info in self._infos)

    @property
    def ipc_refusal(self) -> str | None:
        """Why a worker cannot map the trainer's memory; host memory is in between then."""
        return next((info["ipc_refusal"] for info in self._infos if info["ipc_refusal"]), None)

    @property
    def model_type(self) -> str | None:
        """Of the model's configuration."""
        kind: str | None = self._infos[0]["model_type"]
        return kind

    @property
    def placement(self) -> str:
        """Where the engine runs and its weights lie, in a phrase for reports."""
        return f"a vLLM {self._vllm_version} server at {self.url}, weights in memory of its own"

    @property
    def residual_bytes(self) -> Mapping[str, int]:
        """Device bytes that no sleep gives back, as far as the workers know them."""
        return residual_bytes(self._infos)

    def why_it_stays(self, name: str) -> str:
        """Why a segment never leaves, in words that follow `it is`."""
        if name == ENGINE_WEIGHTS:
            return "the server's, which keeps its weights"
        if not self._infos[0]["kv_cache_can_leave"]:
            return "not in vLLM's sleep pool (on a GPU, start the server with --enable-sleep-mode to let it go)"
        if self._infos[0]["weights_in"] == "pool":
            return "dropped by a server only with its weights (start it with --load-format colo to let it go alone)"
        return "of a size that the server does not tell"

    def sampling_params(self, params: Any = None, **sampling: Any) -> SamplingParams:
        """`SamplingParams` from options by name, or as they are. Raises: `TypeError` for vLLM's own."""
        if params is not None and sampling:
            raise TypeError(f"give {sorted(sampling)} within the sampling parameters, or all options by name")
        params = SamplingParams(**sampling) if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"a server takes colo.SamplingParams or options by name, not {type(params).__name__}")
        return params

    def sampling_temperature(self, params: Any) -> float | None:
        """The temperature at which softmax gives `logprobs`; `None` where filters change them too."""
        return sampling_temperature(params)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Any, *, adapter: str | None = None
    ) -> list[Completion]:
        """Sample `params.n` completions for each prompt, all prompts at once; see `Engine.generate`.

        Raises: `EngineLost` when the server ends or stops saying that it is healthy; `Unsupported` for sampling whose
        log-probabilities the server does not return; whatever it complains about as `ValueError`.
        """
        if self.before_generate is not None:
            self.before_generate()
        self._require("generate", EngineState.AWAKE)
        if self._version is None:
            raise StaleWeights(f"the engine does not generate: {self._cause}")
        if adapter is not None:
            raise Unsupported(_NO_ADAPTERS)
        params = self.sampling_params(params)
        check_logprobs(params, self._infos[0]["logprobs_mode"], "start it with --logprobs-mode processed_logprobs")
        check_count(len(prompts), params.n)
        token_ids = [tuple(map(operator.index, prompt)) for prompt in prompts]
        check_prompts(token_ids, self._infos[0]["vocab_size"], self._infos[0]["max_length"])
        try:
            answers = self._server.ask_all("/v1/completions", self._requests(token_ids, params))
        except Silent as error:
            self._lose(str(error), error)
        except Refused as error:
            if _NO_JSON in str(error):
                raise FloatingPointError(not_numbers(None)) from error
            raise (ValueError if error.status < httpx.codes.INTERNAL_SERVER_ERROR else TransferError)(
                f"the server does not generate: {error}"
            ) from error
        choices = [choice for answer in answers for choice in answer["choices"]]
        return [
            _completion(
                index // params.n,
                index % params.n,
                token_ids[index // params.n],
                choice,
                self._version,
                has_text=self._infos[0]["has_tokenizer"],
            )
            for index, choice in enumerate(choices)
        ]

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generating, for all clients, so that weights may change. Idempotent; `PhaseError` when asleep or closed.

        Requests in flight, which are other clients', are ended (`abort`), waited for (`wait`), or go on after `resume`
        (`keep`). A pause that is on stays as it was asked for.
        """
        self._require("pause", EngineState.AWAKE, EngineState.PAUSED)
        if not self._paused:
            self._paused = True  # also after an interrupt: it may be, and to resume what is not does nothing
            try:
                self._ask("POST", "/pause", query={"mode": mode}, patient=mode == "wait")
            except Exception:
                self._paused = False
                raise

    def resume(self) -> None:
        """Generate again. Idempotent; `PhaseError` unless every segment is resident."""
        self._require("resume", EngineState.AWAKE, EngineState.PAUSED)
        if self._paused:
            self._ask("POST", "/resume")
            self._paused = False

    def sleep(self, level: SleepLevel | int) -> None:
        """Give memory back, unless it is given back already; see `Engine.sleep`."""
        self._require_open("sleep")
        weights_at = WEIGHTS_AT[SleepLevel(str(level))]
        targets = ((ENGINE_WEIGHTS, weights_at), (ENGINE_KV_CACHE, Residency.DISCARDED))
        moving = [(self._segments[n], t) for n, t in targets if is_deeper(t, self._segments[n].residency)]
        stuck = next((segment for segment, _ in moving if segment.away is None), None)
        if stuck is not None:
            raise PhaseError(f"level {level} would move {stuck.name}, which is {self.why_it_stays(stuck.name)}")
        for segment, target in moving:
            segment.begin(target).wait()

    def wake(self, tags: Iterable[str] | None = None) -> None:
        """Bring back `weights`, `kv_cache`, or both (`None`); see `Engine.wake`. `ValueError` for another tag."""
        self._require_open("wake")
        wake_segments(self.segments, tags)

    def reset_prefix_cache(self) -> None:
        """Forget everything computed from earlier weights. Raises: `TransferError` when vLLM does not let go of it."""
        self._require_open("reset its prefix cache")
        for running in ("false", "true"):
            if self._ask("POST", "/reset_prefix_cache", query={"reset_running_requests": running})["success"]:
                return
        raise TransferError("the server did not reset its prefix cache: requests still hold blocks of it")

    def record_plan(self, source: Mapping[str, torch.Tensor]) -> LoadPlan:
        """A plan that says of every parameter that it is not copied from here: each worker records its own plan."""
        return LoadPlan(
            copies=(),
            sources={name: (t.dtype, tuple(t.shape)) for name, t in source.items()},
            strides={name: tuple(t.stride()) for name, t in source.items()},
            fallbacks=dict.fromkeys(source, "the engine is a server of its own"),
        )

    def share_weights(self) -> None:
        """Refuse: the memory is the server's. Raises: `Unsupported`."""
        raise Unsupported("the memory of a server's weights cannot be shared: they are copied")

    def receive(self, operation: str, **arguments: Any) -> list[Any]:
        """Run a step of `ColoWeightTransferEngine` in every worker and return what they answer, in their order.

        A step that begins an update poisons until the next `commit`. Raises: what a worker raised, by its kind.
        """
        self._require_weights(f"take weights ({operation})")
        if operation in FIRST_STEPS:
            self.poison(_UNCOMMITTED)
        return self._reached.receive(operation, arguments)

    def receive_all(self, operations: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
        """Several such steps, a request each, and what every worker answers to the last."""
        return [self.receive(name, **arguments) for name, arguments in operations][-1]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Run vLLM's layerwise reload in every worker, quantization included. Poisons until the next `commit`.

        Every tensor of the model has to be given. Until this returns the server's model cannot compute, and a request
        of another client's ends its engine. Raises: as `receive`, after which all of it has to be loaded again.
        """
        self._require_weights("load weights")
        self.poison(_UNCOMMITTED)
        device = self.device if self.ipc_refusal is None else torch.device("cpu")
        self._reached.reload(list(weights), self.model_type, device)

    def commit(self, version: int) -> None:
        """Declare that the engine now holds `version`; lifts a poisoning. `PhaseError` unless they are resident."""
        self._require_weights(f"hold version {version}")
        self._version = version

    def poison(self, cause: str) -> None:
        """Refuse to generate, with `cause`, until the next `commit`."""
        self._version, self._cause = None, cause

    def load_adapter(self, name: str, adapter: AdapterWeights) -> None:
        """Refuse. Raises: `Unsupported`."""
        raise Unsupported(_NO_ADAPTERS)

    def replace_adapter(self, old: str, new: str, adapter: AdapterWeights) -> None:
        """Refuse. Raises: `Unsupported`."""
        raise Unsupported(_NO_ADAPTERS)

    def remove_adapter(self, name: str) -> None:
        """Refuse: there is none. Raises: `ValueError`."""
        raise ValueError(f"there is no adapter {name}: {_NO_ADAPTERS}")

    def recover(self) -> NoReturn:
        """Refuse: the server is not ours to start. Raises: `PhaseError`."""
        if self._lost is None:
            raise PhaseError("the engine is not lost: nothing to recover")
        raise PhaseError(
            f"the server is your own and is lost ({self._lost}): start it again, connect again and share that"
        )

    def close(self) -> None:
        """Let go of the server, which is left awake and running. Idempotent."""
        if self._closed:
            return
        if self._lost is None:
            with suppress(EngineLost):
                self.wake()
                self.resume()
        self._closed = True
        self.poison("it is closed")
        self._let_go()
        self.mover.close()

    # ---- start and end -----------------------------------------------------------------------------------------------

    def _connect(self, model_name: str | None) -> None:
        try:
            self._vllm_version = str(self._ask("GET", "/version")["version"])
        except EngineLost as error:
            raise EngineLost(f"no server answers at {self.url}: {self._lost}") from error
        try:
            self._paused = bool(self._ask("GET", "/is_paused")["is_paused"])
            self._workers = Workers(self._ask, int(self._ask("GET", "/get_world_size")["world_size"]))
        except TransferError as error:
            raise Unsupported(f"the server at {self.url} is not in vLLM's development mode: {HOW_TO_START}") from error
        try:
            self._infos = self._reached.connect(self.device)
        except TransferError as error:
            raise Unsupported(
                f"the server at {self.url} takes no weights from here ({error}): {HOW_TO_START}"
            ) from error
        self._check_infos()
        own = pid_namespace()
        with suppress(psutil.NoSuchProcess):  # they have ended just now, which the next request will tell
            self._processes = [psutil.Process(i["pid"]) for i in self._infos if i.get("pid_namespace") == own]
        self._model_name = model_name or str(self._ask("GET", "/v1/models")["data"][0]["id"])
        self._make_segments()

    def _check_infos(self) -> None:
        own = device_id(self.device)
        elsewhere = [info["device"] for info in self._infos if info["device"] != own]
        if elsewhere:
            raise Unsupported(
                f"the server at {self.url} runs on {', '.join(elsewhere)} and the trainer on {own}: start both with a "
                "CUDA_VISIBLE_DEVICES in which the same GPU is first, and the server on that one GPU"
            )
        if any(info["is_asleep"] for info in self._infos):
            raise PhaseError(f"the server at {self.url} is asleep: POST /wake_up to it first")

    def _make_segments(self) -> None:
        kv_cache_bytes = sum(info["kv_cache_bytes"] for info in self._infos)
        leaves = all(info["kv_cache_can_leave"] and info["weights_in"] != "pool" for info in self._infos)
        for name, size_bytes, away in (
            (ENGINE_WEIGHTS, sum(info["weights_bytes"] for info in self._infos), None),
            (ENGINE_KV_CACHE, kv_cache_bytes, Residency.DISCARDED if leaves and kv_cache_bytes else None),
        ):
            self._segments[name] = WorkerSegment(self, name)
            self._segments[name].reset(size_bytes, away)

    def _let_go(self) -> None:
        self._server.close()
        if self._workers is not None:
            self._workers.close()

    @property
    def _reached(self) -> Workers:
        assert self._workers is not None, "connected before anything is asked of them"
        return self._workers

    # ---- what segments ask -------------------------------------------------------------------------------------------

    def before_move(self, name: str, target: Residency) -> None:
        """Make ready for the KV cache's move: room in the device, or nobody who uses it."""
        if target is not Residency.RESIDENT:
            self.pause()
            return
        needed_bytes = self._segments[name].size_bytes
        if self.device.type == "cuda" and free_device_bytes(self.device) < needed_bytes:
            torch.cuda.empty_cache()
            free_bytes = free_device_bytes(self.device)
            if free_bytes < needed_bytes:
                raise BudgetError(
                    f"{name} needs {format_bytes(needed_bytes)} and {format_bytes(free_bytes)} are free: release other "
                    "memory of the GPU first, or start the server with a smaller --gpu-memory-utilization",
                    needed_bytes=needed_bytes,
                    free_bytes=free_bytes,
                )

    def begin_move(self, name: str, source: Residency, target: Residency) -> None:
        """Let the server sleep, or wake it: the KV cache is all that moves then."""
        if target is not Residency.RESIDENT:
            self._ask("POST", "/sleep", query={"level": "1"})
            return
        self._ask("POST", "/wake_up")
        self._ask("POST", "/pause", query={"mode": "abort"})  # waking has resumed it

    def wait_for(self, name: str) -> int:
        """The device bytes that a segment holds now."""
        segment = self._segments[name]
        return segment.size_bytes if segment.residency is Residency.RESIDENT else 0

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _ask(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        *,
        query: Mapping[str, str] | None = None,
        patient: bool = False,
    ) -> Any:
        """The server's answer. Raises: `EngineLost` without one, `TransferError` for an error."""
        if self._lost is not None:
            raise EngineLost(f"the engine is lost: {self._lost}")
        try:
            return self._server.ask(method, path, body, query, patient=patient)
        except Silent as error:
            self._lose(str(error), error)
        except Refused as error:
            raise TransferError(f"the server refuses {path}: {error}") from error

    def _requests(self, prompts: Sequence[tuple[int, ...]], params: SamplingParams) -> list[Body]:
        # The server gives all prompts of a request the same seed.
        size = (-(-len(prompts) // _MAX_REQUESTS) or 1) if params.seed is None else 1
        common: Body = asdict(params) | {
            "model": self._model_name,
            "stop_token_ids": list(params.stop_token_ids),
            "repetition_penalty": 1.0,  # else that of the model's generation config
            "logprobs": 0,  # that of the sampled token
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        return [
            common
            | {"prompt": [list(prompt) for prompt in prompts[start : start + size]]}
            | ({} if params.seed is None else {"seed": row_seed(params.seed, start, 0)})
            for start in range(0, len(prompts), size)
        ]

    def _lose(self, cause: str, error: BaseException) -> NoReturn:
        self._lost = cause
        self.poison(f"it is lost: {cause}")
        for segment in self._segments.values():
            segment.vanish()
        raise EngineLost(
            f"the engine is lost: {cause}. The trainer's weights are intact; start the server again and connect again"
        ) from error

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _require(self, verb: str, *states: EngineState) -> None:
        if self._lost is not None:
            raise EngineLost(f"the engine is lost: {self._lost}. Start the server again and connect again")
        if not self._closed and not all(map(lives, self._processes)):
            # Another server may have taken its place, with weights that nobody here knows.
            self._lose("a process of its workers has ended", RuntimeError("its process id is gone, or is another's"))
        if self.state not in states:
            raise PhaseError(f"the engine is {self.state} and cannot {verb}: {ADVICE[self.state]}")

    def _require_open(self, verb: str) -> None:
        self._require(verb, EngineState.AWAKE, EngineState.PAUSED, EngineState.ASLEEP)

    def _require_weights(self, verb: str) -> None:
        self._require_open(verb)
        residency = self._segments[ENGINE_WEIGHTS].residency
        if residency is not Residency.RESIDENT:
            raise PhaseError(f"the engine's weights are {residency} and it cannot {verb}: wake them first")


def _completion(
    prompt_index: int,
    sample_index: int,
    prompt: tuple[int, ...],
    choice: Mapping[str, Any],
    version: int,
    *,
    has_text: bool,
) -> Completion:
    logprobs = tuple(math.nan if value is None else value for value in choice["logprobs"]["token_logprobs"])
    check_numbers(logprobs)
    return Completion(
        prompt_index=prompt_index,
        sample_index=sample_index,
        prompt_token_ids=prompt,
        token_ids=tuple(choice["token_ids"]),
        logprobs=logprobs,
        finish_reason=choice["finish_reason"] or "abort",
        weights_version=version,
        text=choice["text"] if has_text else None,
        output=choice,
    )
