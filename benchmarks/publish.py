"""`publish`: all weights of a model to a `vllm serve`, through every transport, beside what the link itself takes.

Each way is measured by what a publication of the runtime does, with its checks. Over a process group weights travel as
slices, and changes of them as broadcasts. The limit beside it is the same bytes over the same link without colo or
vLLM: a copy of the memory, a file written and read, a broadcast to another process. Where changes alone are sent,
`density` of the entries change before each publication; the bandwidth is the one below which that is faster than
sending everything. The server runs on this machine: its links are fast, and what colo itself takes shows.

With `server` it is one of yours, of vLLM, SGLang or LMDeploy, on the trainer's device, which gets what `model` makes of
random weights: a publication, and how long a whole turn to the rollout (with it) and to training takes.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import SGD
from transformers import AutoConfig, AutoModelForCausalLM

import colo
from benchmarks.common import Record, Row, clear, median_s, timed
from benchmarks.common import shape as shape_of
from benchmarks.workload import device_copy_bytes_per_s
from colo.engines.elsewhere import Broadcaster
from colo.engines.vllm.client.start import save_config
from colo.engines.vllm.compat import smallest_utilization
from colo.errors import EngineLost
from colo.units import GIB, MIB

START_S = 180.0
DEADLINE_S = 120.0
REPEATS = 5


def run(
    record: Record,
    *,
    shape: str,
    layers: int | None,
    density: float,
    device: str,
    server: str | None = None,
    model_name: str | None = None,
) -> None:
    """Measure one shape, or some of its layers; or a `server` of that model, a folder or hub id."""
    target = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    if (server is None) is not (model_name is None):
        raise ValueError("--server and --model go together: the URL of a server, and the model that it serves")
    if server is not None:
        record.benchmark = "publish to a server of yours"
        record.add(_turns(record, server, AutoConfig.from_pretrained(model_name), target))
        return
    config = shape_of(shape, target, layers=layers)
    with target:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    record.limit["weights_mib"] = num_bytes / MIB
    with tempfile.TemporaryDirectory(prefix="colo-") as folder:
        save_config(config, folder)
        with ExitStack() as servers:
            url = servers.enter_context(_server(folder, target))
            record.tell("mapped memory")
            memory_bytes_per_s = device_copy_bytes_per_s(target)
            record.limit["memory_gb_per_s"] = memory_bytes_per_s / 1e9
            record.add(_row("mapped memory", model, url, None, density, memory_bytes_per_s))
            if device == "cuda" and torch.cuda.device_count() > 1:
                servers.close()
                url = servers.enter_context(_server(folder, target, elsewhere=True))
            for link, measured in _links(min(num_bytes, GIB), target, Path(folder)).items():
                record.tell(f"{link}, the link")
                bytes_per_s = measured()
                record.limit[f"{link.replace(' ', '_')}_gb_per_s"] = bytes_per_s / 1e9
                rows = []
                for delta in (False, True):
                    way = f"{link}, changes alone" if delta else link
                    record.tell(way)
                    through: colo.Broadcast | colo.WeightsFolder = colo.Broadcast("127.0.0.1", delta=delta)
                    if link == "files":
                        through = colo.WeightsFolder(Path(folder) / f"versions-{delta}", delta=delta)
                    rows.append(_row(way, model, url, through, density, bytes_per_s))
                record.add(rows[0], rows[1] | {"faster_below_gb_per_s": _break_even(*rows)})


def _row(way: str, model: nn.Module, url: str, through: Any, density: float, bytes_per_s: float) -> Row:
    """Publications of a runtime: seconds and bytes, beside what the link takes for those bytes."""
    device = next(model.parameters()).device
    with (
        closing(colo.connect(url, device=device, deadline_s=DEADLINE_S, through=through)) as engine,
        colo.share(engine, model, SGD(model.parameters(), lr=0.0)) as rt,
    ):
        seconds = []
        with rt.rollout():  # the first version is always whole
            pass
        for number in range(REPEATS):
            change(model, density, seed=number)
            with rt.rollout():
                pass
            seconds.append(rt.publications[-1].seconds)
        sent_bytes, median = rt.publications[-1].num_bytes, statistics.median(seconds)
    clear(device)
    link_s = sent_bytes / bytes_per_s
    return {"way": way, "bytes": sent_bytes, "median_s": median, "link_s": link_s, "of_link": median / link_s}


def _turns(record: Record, url: str, config: Any, device: torch.device) -> Row:
    """Turns of a server and a trainer of random weights on one device: medians, in seconds."""
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.bfloat16)
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    record.limit |= {"weights_mib": weights_bytes / MIB, "memory_gb_per_s": device_copy_bytes_per_s(device) / 1e9}
    seconds: dict[str, list[float]] = {"publication_s": [], "to_rollout_s": [], "to_train_s": []}
    with (
        closing(colo.connect(url, device=device, deadline_s=DEADLINE_S)) as engine,
        colo.share(engine, model, SGD(model.parameters(), lr=0.0)) as rt,
    ):
        for number in range(REPEATS + 1):  # the first is not measured
            record.tell(f"turn {number + 1} of {REPEATS + 1}")
            began_s = time.perf_counter()
            with rt.train():
                seconds["to_train_s"].append(time.perf_counter() - began_s)
                with torch.no_grad():
                    next(model.parameters()).mul_(1)  # another version of the same weights
            began_s = time.perf_counter()
            with rt.rollout():
                seconds["to_rollout_s"].append(time.perf_counter() - began_s)
            seconds["publication_s"].append(rt.publications[-1].seconds)
        row: Row = {"way": engine.name, "bytes": rt.publications[-1].num_bytes}
    return row | {name: statistics.median(of[1:]) for name, of in seconds.items()}


def change(model: nn.Module, density: float, *, seed: int) -> None:
    """Write another last bit to about `density` of the entries of every weight, as a step of training does."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator(parameter.device).manual_seed(seed * 10_007 + number)
            here = torch.rand(parameter.shape, generator=generator, device=parameter.device) < density
            parameter.copy_((parameter.view(torch.int16) ^ here.to(torch.int16)).view(parameter.dtype))


def _break_even(whole: Row, changes: Row) -> float | None:
    """GB/s of a link below which changes are faster than everything; `None` if they are over any."""
    own = {row["way"]: row["median_s"] - row["link_s"] for row in (whole, changes)}
    more_s = own[changes["way"]] - own[whole["way"]]
    return (whole["bytes"] - changes["bytes"]) / more_s / 1e9 if more_s > 0 else None


@contextmanager
def _server(folder: str, device: torch.device, *, elsewhere: bool = False) -> Iterator[str]:
    """A `vllm serve` of random weights on the trainer's device or, `elsewhere`, on the next GPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--skip-tokenizer-init"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "256"]
    command += ["--load-format", "colo", "--model-loader-extra-config", '{"colo_load_format": "dummy"}']
    command += ["--worker-extension-cls", "colo.engines.vllm.worker.ColoWorker"]
    command += ["--logprobs-mode", "processed_logprobs", "--kv-cache-memory-bytes", str(64 * MIB)]
    environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if device.type == "cpu":
        command += ["--dtype", "float32", "--block-size", "32"]  # some CPUs have no instructions of 16 bits
    else:
        command += ["--gpu-memory-utilization", str(smallest_utilization())]
    if elsewhere:
        count = torch.cuda.device_count()
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        environment["CUDA_VISIBLE_DEVICES"] = seen.split(",")[((device.index or 0) + 1) % count]
    log = Path(folder) / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    url, give_up_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/health", trust_env=False).is_success:
                    break
            if server.poll() is not None or time.monotonic() > give_up_s:
                raise EngineLost(f"the server did not start: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


# ---- links -----------------------------------------------------------------------------------------------------------


def _links(num_bytes: int, device: torch.device, folder: Path) -> dict[str, Callable[[], float]]:
    """Measurements of the links but memory: bytes a second, with so many bytes."""
    links: dict[str, Callable[[], float]] = {"files": partial(_files_bytes_per_s, num_bytes, device, folder)}
    if device.type == "cpu" or torch.cuda.device_count() > 1:  # NCCL has no two ranks on one GPU
        links["process group"] = partial(_group_bytes_per_s, num_bytes, device)
    return links


def _files_bytes_per_s(num_bytes: int, device: torch.device, folder: Path) -> float:
    whole = torch.ones(num_bytes, dtype=torch.uint8, device=device)

    def through_files() -> None:
        save_file({"w": whole.cpu()}, folder / "w.safetensors")
        load_file(folder / "w.safetensors")["w"].to(device, copy=True)

    seconds = median_s(through_files, device, repeats=3)
    (folder / "w.safetensors").unlink()
    return num_bytes / seconds


_RECEIVE = """
import os, sys, torch
from colo.weights.meeting import Meeting, join
address, port, name, backend, device, num_bytes, times = sys.argv[1:]
end = join(Meeting(address, int(port), name, 2, backend), 1, 120.0)
whole = torch.empty(int(num_bytes), dtype=torch.uint8, device=device)
for _ in range(int(times)):
    end.broadcast(whole)
    end.settle(torch.device(device))
os._exit(0)  # with the group's threads, which torch ends the process for
"""


def _group_bytes_per_s(num_bytes: int, device: torch.device) -> float:
    whole = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    broadcaster, times = Broadcaster("127.0.0.1", device, 1, DEADLINE_S), 4
    other = "cpu" if device.type == "cpu" else f"cuda:{(device.index or 0) + 1}"
    with broadcaster.meeting() as where:
        arguments = (where.address, where.port, where.name, where.backend, other, whole.nbytes, times)
        receiver = subprocess.Popen([sys.executable, "-c", _RECEIVE, *map(str, arguments)])
    end = broadcaster.end
    assert end is not None

    def send() -> None:
        end.broadcast(whole)
        end.settle(device)

    with closing(broadcaster):
        seconds = sorted(timed(send, device) for _ in range(times))
        receiver.wait(DEADLINE_S)
    return num_bytes / seconds[(times - 1) // 2]
