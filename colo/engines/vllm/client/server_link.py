"""A link to a vLLM server of the user's own, over HTTP: `colo.connect`.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --load-format colo --logprobs-mode processed_logprobs
                                            --worker-extension-cls colo.engines.vllm.worker.ColoWorker

    rt = colo.share(colo.connect("http://localhost:8000"), model, optimizer)

Server and trainer share a machine and a device. Operations and requests travel as JSON, weights by memory that both map
(`colo.weights.transports.ipc`). A server elsewhere (`through=...`) has its own loader take them, out of versions that
both see (`colo.WeightsFolder`), or its workers receive what that would copy, over a process group (`colo.Broadcast`).

What HTTP does not carry: tensors, vLLM's own `SamplingParams`, and the answers of data-parallel replicas behind the
first, so a server with several of them is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import torch
from safetensors.torch import save_file

from colo.engine import Completion, SamplingParams
from colo.engines.base import EngineStatus
from colo.engines.elsewhere import Broadcast, Broadcaster, WeightsFolder
from colo.engines.http import Body, HttpClient, Refused, Silent, asking
from colo.engines.sampling import check_taken, completion_seed
from colo.engines.vllm.client import NamedAdapter, PauseMode, WorkerLink, answers_of, check_numbers
from colo.engines.vllm.processes import lives, pid_namespace
from colo.engines.vllm.wire import COLO, WORKER_EXTENSION, AdapterNumbers, Request, SliceStep, WorkerInfo
from colo.errors import EngineLost, PhaseError, TransferError, Unsupported
from colo.memory.probe import device_id
from colo.memory.share import SharedMemory
from colo.weights.mismatch import not_numbers

HOW_TO_START = (
    f"start it on this machine as `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --load-format {COLO} "
    f"--worker-extension-cls {WORKER_EXTENSION} --logprobs-mode processed_logprobs` (on a GPU with "
    "`--enable-sleep-mode`), with colo installed"
)

_MAX_REQUESTS = 32
"""Prompts travel in so many requests, and in more where they differ in more than their tokens; vLLM batches all."""

_NO_JSON = "Out of range float values are not JSON compliant"
"""Words of Python's `json`, and so of a server, about log-probabilities that are not numbers."""


class ServerLink(WorkerLink):
    """A link to a vLLM server, which stays its owner's. Its other clients may generate while weights change."""

    why_not_shared = "the engine is a server of its own"
    how_to_free: Mapping[str, str] = {
        "pool": "on a GPU, start the server with --enable-sleep-mode to let it go",
        "weights": "on a GPU, start the server with --enable-sleep-mode to let it go",
        "slabs": "start the server with --enable-sleep-mode and without --load-format colo to let it go",
    }
    name_of_vllm = "server"
    for_logprobs = "start it with --logprobs-mode processed_logprobs"
    for_positions = ", or start it with more --max-model-len"
    goes_by_number = True

    def __init__(
        self,
        url: str,
        device: torch.device,
        status: EngineStatus,
        *,
        model_name: str | None,
        deadline_s: float,
        api_key: str | None,
        http: httpx.AsyncBaseTransport | None,
        through: WeightsFolder | Broadcast | None = None,
    ) -> None:
        """Connect. `http` replaces the network. Raises: see `colo.connect`."""
        super().__init__(device, status, deadline_s)
        self.url = url
        self.through = through
        if through is not None:
            self.why_not_shared = f"the server is elsewhere, and takes {through}"
        self._adapters = ServedAdapters(
            self.client,
            lambda path, body: self._ask("POST", path, dict(body), as_text=True),
            lambda: set(self.call(AdapterNumbers())[0]),
        )
        self._processes: list[psutil.Process] = []
        self._server = HttpClient(url, deadline_s=deadline_s, api_key=api_key, transport=http)
        try:
            self._connect(model_name)
        except BaseException:
            self.close()
            raise

    @property
    def placement(self) -> str:
        """A phrase for reports: which vLLM runs where."""
        return f"a vLLM {self._vllm_version} server at {self.url}"

    def ask(self, request: Request) -> list[Any]:
        """Run an operation in every worker: the answer of each, or its `WorkerError`."""
        body = {"method": "colo", "args": [self.envelope(request)]}
        # however long the weights take: ranks that send them wait for one another no longer than the deadline
        is_long = isinstance(request, SliceStep) and request.step == "take_slices"
        return answers_of(self._ask("POST", "/collective_rpc", body, patient=is_long)["results"], self.status)

    def sampling_params(self, params: Any, options: Mapping[str, Any]) -> SamplingParams:
        """`SamplingParams` from options by name, or as they are.

        Raises: `TypeError` for vLLM's own, `ValueError` for options that a server does not take.
        """
        if params is None:
            params = SamplingParams(**check_taken(options, "a server", "leave it out, or start vLLM from here"))
        if not isinstance(params, SamplingParams):
            raise TypeError(f"a server takes colo.SamplingParams or options by name, not {type(params).__name__}")
        return params

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Any, *, version: int, adapter: NamedAdapter | None
    ) -> list[Completion]:
        """Sample from weights of `version`, all prompts at once; see `Engine.generate`.

        Raises: `EngineLost` when the server is no longer healthy; `Unsupported` for sampling without log-probabilities;
        `ValueError` for what the server refuses.
        """
        params = self.sampling_params(params, {})
        token_ids = self.check_request(prompts, params)
        try:
            answers = self._server.ask_all("/v1/completions", self._requests(token_ids, params, adapter))
        except Silent as error:
            raise self.status.lose(str(error)) from error
        except Refused as error:
            if _NO_JSON in str(error):
                # the server's JSON refuses NaN in its own answer
                raise FloatingPointError(not_numbers(None)) from error
            raise (ValueError if error.status < httpx.codes.INTERNAL_SERVER_ERROR else TransferError)(
                f"the server does not generate: {error}"
            ) from error
        self.look()
        choices = [choice for answer in answers for choice in answer["choices"]]
        return [
            # the server keeps the order of prompts, then of samples
            _completion(
                index // params.n,
                index % params.n,
                token_ids[index // params.n],
                choice,
                version,
                adapter=adapter[0] if adapter is not None else None,
                has_text=self.infos[0].has_tokenizer,
            )
            for index, choice in enumerate(choices)
        ]

    def reset_prefix_cache(self) -> None:
        """Forget everything computed from earlier weights. Raises: `TransferError` when vLLM does not let go of it."""
        # first without running requests, which would be computed anew
        for running in ("false", "true"):
            if self._ask("POST", "/reset_prefix_cache", query={"reset_running_requests": running})["success"]:
                return
        raise TransferError("the server did not reset its prefix cache: requests still hold blocks of it")

    def stop_requests(self, mode: PauseMode) -> None:
        """Stop generating, for all clients; requests in flight are other clients'."""
        self._ask("POST", "/pause", query={"mode": mode}, patient=mode == "wait")

    def go_on(self) -> None:
        """Generate again."""
        self._ask("POST", "/resume")

    def reserve_adapter(self, number: int, tensors: Sequence[tuple[str, torch.Tensor]]) -> int:
        """The number that the server gives an adapter. Raises: `Unsupported` for a server that takes none."""
        if self.through is not None:
            raise Unsupported(
                "adapters reach a server on the trainer's machine alone: pass RuntimeConfig(fold_adapter=True), which "
                "publishes them folded into the weights"
            )
        return self._adapters.reserve(self.infos[0], tensors)

    def release_adapter(self, number: int) -> None:
        """Make the server forget an adapter's name. Idempotent."""
        self._adapters.release(number)

    def why_not_recovered(self, lost: str) -> str:
        """Advice about a server that is lost."""
        return f"the server is your own and is lost ({lost}): start it again, connect again and share that"

    def check_alive(self) -> None:
        """Raise `EngineLost` when a worker has ended."""
        if self.status.lost is None and not all(map(lives, self._processes)):
            # Another server may have taken its place, with weights that nobody here knows.
            raise self.status.lose("a process of its workers has ended")

    def look(self) -> None:
        """Ask the workers, where no process of theirs can be watched from here: those of another start know no client.

        Raises: `EngineLost`; `TransferError` for a server that has no such workers.
        """
        if not self._processes:
            self.call(AdapterNumbers())

    def close(self) -> None:
        """Let go of the server, which goes on. Idempotent."""
        self._processes = []
        if self.broadcaster is not None:
            self.broadcaster.close()
        self._server.close()

    def _connect(self, model_name: str | None) -> None:
        try:
            self._vllm_version = str(self._ask("GET", "/version")["version"])
        except EngineLost as error:
            raise EngineLost(f"no server answers at {self.url}: {self.status.lost}") from error
        try:
            # asked first: only a server in development mode has these paths
            self.status.paused = bool(self._ask("GET", "/is_paused")["is_paused"])
            num_workers = int(self._ask("GET", "/get_world_size")["world_size"])
        except TransferError as error:
            raise Unsupported(f"the server at {self.url} is not in vLLM's development mode: {HOW_TO_START}") from error
        try:
            self.infos = self.meet_workers() if self.through is not None else self._meet_at_home()
        except TransferError as error:
            raise Unsupported(
                f"the server at {self.url} takes no weights from here ({error}): {HOW_TO_START}"
            ) from error
        self._check_workers(num_workers)
        if self.through is not None:
            if isinstance(self.through, Broadcast):
                self.broadcaster = Broadcaster(self.through.address, self.device, num_workers, self.deadline_s)
            self._count_elsewhere()
        else:  # not elsewhere: other machines number their processes, and namespaces, in the same way
            own = pid_namespace()
            with suppress(psutil.NoSuchProcess):  # they have ended just now, which the next request will tell
                self._processes = [psutil.Process(info.pid) for info in self.infos if info.pid_namespace == own]
        self._model_name = model_name or str(self._ask("GET", "/v1/models")["data"][0]["id"])

    def _meet_at_home(self) -> Sequence[WorkerInfo]:
        """Meet workers of this machine: they find what lies in host memory here."""
        home = SharedMemory(len(self.client), torch.device("cpu"))
        home.bytes.copy_(torch.frombuffer(bytearray(self.client.encode()), dtype=torch.uint8))
        try:
            return self.meet_workers(home=home.describe(to_pid=0))
        finally:
            home.close()

    def _count_elsewhere(self) -> None:
        """Take from the workers' accounts what lies on another device than the trainer's."""
        self.cache_bytes = self.infos[0].kv_cache_bytes
        nothing = {"weights_bytes": 0, "weights_can_leave": False, "kv_cache_bytes": 0, "kv_cache_can_leave": False}
        self.infos = [
            replace(info, weights_in="elsewhere", residual_bytes={}, **nothing)  # type: ignore[arg-type]
            for info in self.infos
        ]

    def _check_workers(self, num_workers: int) -> None:
        if len(self.infos) != num_workers:
            raise Unsupported(
                f"{len(self.infos)} of the {num_workers} workers of the server at {self.url} answer: start it without "
                "data parallelism"
            )
        own = device_id(self.device)
        elsewhere = [info.device for info in self.infos if info.device != own]
        if elsewhere and self.through is None:
            raise Unsupported(
                f"the server at {self.url} runs on {', '.join(elsewhere)} and the trainer on {own}: start both with a "
                "CUDA_VISIBLE_DEVICES in which the same GPU is first, and the server on that one GPU, or "
                "send it weights with through=colo.WeightsFolder(path) or colo.Broadcast()"
            )
        if isinstance(self.through, Broadcast) and any((name == "cpu") is not (own == "cpu") for name in elsewhere):
            raise Unsupported(
                f"the server at {self.url} runs on {', '.join(elsewhere)} and the trainer on {own}: broadcasts go "
                "between GPUs, or between CPUs; take through=colo.WeightsFolder(path)"
            )
        if any(info.is_asleep for info in self.infos):
            raise PhaseError(f"the server at {self.url} is asleep: POST /wake_up to it first")

    def _ask(self, method: str, path: str, body: Body | None = None, **how: Any) -> Any:
        """The server's answer; `how` as in `HttpClient.ask`. Raises: `EngineLost` without one, `TransferError`."""
        with asking(self.status, path):
            return self._server.ask(method, path, body, **how)

    def _requests(
        self, prompts: Sequence[tuple[int, ...]], params: SamplingParams, adapter: NamedAdapter | None
    ) -> list[Body]:
        # the server gives all prompts of a request the same seed
        size = (-(-len(prompts) // _MAX_REQUESTS) or 1) if params.seed is None else 1
        # and refuses more tokens than there are positions, where vLLM itself ends a completion at the last one
        limits = [min(params.max_tokens, self.infos[0].max_length - len(prompt)) for prompt in prompts]
        changes = {index for index in range(1, len(prompts)) if limits[index] != limits[index - 1]}
        starts = sorted({*range(0, len(prompts), size), *changes})
        common: Body = asdict(params) | {
            "model": self._model_name if adapter is None else self._adapters.name(adapter[1]),
            "stop_token_ids": list(params.stop_token_ids),
            "repetition_penalty": 1.0,  # else that of the model's generation config
            "logprobs": 0,  # that of the sampled token
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        return [
            common
            | {"prompt": [list(prompt) for prompt in prompts[start:end]], "max_tokens": limits[start]}
            | ({} if params.seed is None else {"seed": completion_seed(params.seed, start, 0)})
            for start, end in pairwise([*starts, len(prompts)])
        ]


def _completion(
    prompt_index: int,
    sample_index: int,
    prompt: tuple[int, ...],
    choice: Mapping[str, Any],
    version: int,
    *,
    adapter: str | None,
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
        adapter=adapter,
        text=choice["text"] if has_text else None,
        output=choice,
    )


# ---- adapters --------------------------------------------------------------------------------------------------------

HOW_TO_TAKE_ADAPTERS = (
    "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, --enable-lora and --max-lora-rank, or merge "
    "the adapter and share the merged model"
)


class ServedAdapters:
    """Names by which a server knows adapters, by the numbers of its workers.

    HTTP has no call that names an adapter which is in the workers' memory already. So the server is given a file
    with zeros for one module (`POST /v1/load_lora_adapter`), numbers it and tells its workers; these say which
    number is new, and the adapter itself is written there by that number. The file is gone by then: were the
    adapter ever forgotten, the server would fail to read it again rather than sample from zeros.
    """

    def __init__(
        self, client: str, post: Callable[[str, Mapping[str, Any]], Any], numbers: Callable[[], set[int]]
    ) -> None:
        """`post` asks the server, `numbers` the workers for the adapters that they hold."""
        self._client = client
        self._post = post
        self._numbers = numbers
        self._names: dict[int, str] = {}
        self._count = 0

    def reserve(self, info: WorkerInfo, tensors: Sequence[tuple[str, torch.Tensor]]) -> int:
        """A number for an adapter of these tensors (PEFT's names). `Unsupported` where the server refuses it."""
        if not (info.max_adapters and info.takes_adapters_by_name):
            raise Unsupported(f"this vLLM server takes no adapters: {HOW_TO_TAKE_ADAPTERS}")
        self._count += 1
        name = f"colo-{self._client}-{self._count}"
        before = self._numbers()
        with TemporaryDirectory(prefix="colo-") as folder:
            _save_zeros(Path(folder), dict(tensors))
            try:
                self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
            except TransferError as error:
                raise Unsupported(f"the server does not take the adapter: {error}") from error
        # read after the call: another client's adapter would be taken for ours
        new = self._numbers() - before
        if len(new) != 1:
            raise TransferError(f"{len(new)} adapters have come to the server at once: let no other client load any")
        (number,) = new
        self._names[number] = name
        return number

    def release(self, number: int) -> None:
        """Let the server forget a name. Idempotent."""
        name = self._names.pop(number, None)
        if name is not None:
            # the server may have ended: its names have gone with it
            with suppress(TransferError):
                self._post("/v1/unload_lora_adapter", {"lora_name": name})

    def name(self, number: int) -> str:
        """The model name that requests give to have this adapter."""
        return self._names[number]


def _save_zeros(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write an adapter of PEFT's that adapts one of the modules, by nothing."""
    a = next(name for name in tensors if name.endswith(".lora_A.weight"))
    module = a.removesuffix(".lora_A.weight")
    pair = {name: torch.zeros(tensors[name].shape, device="cpu") for name in (a, f"{module}.lora_B.weight")}
    rank = tensors[a].shape[0]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [module.rpartition(".")[2]]}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "none"}))
    save_file(pair, folder / "adapter_model.safetensors")
