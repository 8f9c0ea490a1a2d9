"""LoRA adapters of a vLLM server, whose requests name them where its workers go by numbers.

HTTP has no call that names an adapter which is in the workers' memory already. So the server is given a file with zeros
for one module (`POST /v1/load_lora_adapter`), numbers it and tells its workers; these say which number is new, and the
adapter itself is written there by that number. The file is gone by then: were the adapter ever forgotten, the server
would fail to read it again rather than sample from zeros.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from colo.engines.vllm.wire import WorkerInfo
from colo.errors import TransferError, Unsupported

HOW_TO_START = (
    "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, --enable-lora and --max-lora-rank, or merge "
    "the adapter and share the merged model"
)


class ServedAdapters:
    """Names by which a server knows adapters, by the numbers of its workers."""

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
            raise Unsupported(f"this vLLM server takes no adapters: {HOW_TO_START}")
        self._count += 1
        name = f"colo-{self._client}-{self._count}"
        before = self._numbers()
        with TemporaryDirectory(prefix="colo-") as folder:
            _save_zeros(Path(folder), dict(tensors))
            try:
                self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
            except TransferError as error:
                raise Unsupported(f"the server does not take the adapter: {error}") from error
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
            with suppress(TransferError):
                self._post("/v1/unload_lora_adapter", {"lora_name": name})

    def name(self, number: int) -> str:
        """The model name that requests give to have this adapter."""
        return self._names[number]


def _save_zeros(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write an adapter of PEFT's that adapts one of the modules, by nothing."""
    a = next(name for name in tensors if name.endswith(".lora_A.weight"))
    module = a.removesuffix(".lora_A.weight")
    pair = {name: torch.zeros(tensors[name].shape) for name in (a, f"{module}.lora_B.weight")}
    rank = tensors[a].shape[0]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [module.rpartition(".")[2]]}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "none"}))
    save_file(pair, folder / "adapter_model.safetensors")
