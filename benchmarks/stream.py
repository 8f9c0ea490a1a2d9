"""`stream`: a step of optimizer state that stays in host memory, beside what the bus takes for the same bytes.

The optimizer is AdamW with fp32 masters in two bytes beside bf16 weights and moments in fp32 or, with `--moment-dtype
bfloat16`, in bf16; gradients are random. The limit is every byte of the state in and out again, both ways at once, in
copies of 256 MiB; with `--resident-state` once more, without what is on the device. Then 8 sequences are trained, one
at a time with checkpoints, and one with gradients that are released: bytes as the driver counts them. Beside them on a
GPU, where torchao is installed, its `CPUOffloadOptimizer` trains as many: it steps on the CPU, with moments in bf16 and
without masters, and copies all gradients to the host in each of the 8 backward passes; with one it frees them there,
too.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import Record, Row, clear, shape, synchronize, timed
from colo.memory.offload import Mover
from colo.memory.probe import total_device_bytes
from colo.rl.logprob import model_logprobs
from colo.trainer.master_weights import MasterWeights
from colo.trainer.streamed import StreamedState
from colo.trainer.window import StateWindow
from colo.units import KIB, MIB

_COPY_BYTES = 256 * MIB
_STEPS = 5


def run(
    record: Record,
    *,
    shape: str,
    device: str,
    ranges: tuple[int, ...],
    resident_state: int | None = None,
    moment_dtype: str = "float32",
) -> None:
    """Measure steps with ranges of each size in MiB, then training; see the module's docstring."""
    target, moments = torch.device(device), getattr(torch, moment_dtype)
    unit = MIB if target.type == "cuda" else KIB
    for size in ranges:
        record.tell(f"ranges of {size} MiB")
        for staying in [0, *([resident_state] if resident_state else ())]:
            record.add(_steps(shape, size, size * unit, target, staying * unit // MIB, moments))
    for released in (False, True):
        record.tell("training" + released * " with released gradients")
        streamed = _streamed(shape, target, min(ranges) * unit, released=released, moment_dtype=moments)
        way = "training, gradients released" if released else "training"
        record.add(_training(way, streamed, target, sequences=1 if released else 8))
    for offloaded in (False, True) if target.type == "cuda" else ():
        way = "training, torchao's CPUOffloadOptimizer" + offloaded * ", gradients offloaded"
        if find_spec("torchao") is None:
            record.add({"way": way, "skipped": "pip install torchao"})
            continue
        record.tell(way)
        row = _training(way, _of_torchao(shape, target, offloaded), target, sequences=1 if offloaded else 8)
        record.add(row | {"cpu_threads": torch.get_num_threads()})


@contextmanager
def _streamed(
    name: str,
    device: torch.device,
    range_bytes: int,
    *,
    moment_dtype: torch.dtype,
    released: bool = False,
    resident_bytes: int = 0,
) -> Iterator[tuple[Any, Any, StreamedState]]:
    model, mover = _model(name, device), Mover(device)
    optimizer = MasterWeights(lambda params: torch.optim.AdamW(params, lr=1e-6, fused=True))(model.parameters())
    state = StreamedState(
        optimizer,
        mover,
        region_bytes=range_bytes,
        resident_bytes=resident_bytes,
        moment_dtype=moment_dtype,
        may_release=(lambda: True) if released else None,
    )
    yield model, optimizer, state
    state.close(torch.device("cpu"))
    mover.close()


@contextmanager
def _of_torchao(name: str, device: torch.device, offloaded: bool) -> Iterator[tuple[Any, Any]]:
    from torchao.optim import CPUOffloadOptimizer

    model, options = _model(name, device), {"lr": 1e-6, "fused": True, "offload_gradients": offloaded}
    yield model, CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, **options)


def _model(name: str, device: torch.device) -> Any:
    clear(device)  # of the part before, whose names held a model and its gradients until it returned
    with device:
        return AutoModelForCausalLM.from_config(shape(name, device), dtype=torch.bfloat16)


def _steps(
    shape: str, size: int, range_bytes: int, device: torch.device, resident_bytes: int, moment_dtype: torch.dtype
) -> Row:
    streamed = _streamed(shape, device, range_bytes, moment_dtype=moment_dtype, resident_bytes=resident_bytes)
    with streamed as (model, optimizer, state):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        with _driver_bytes(device) as used:
            seconds = [timed(optimizer.step, device) for _ in range(_STEPS + 1)]
        bus_s = statistics.median(_bus_seconds(state.window, device) for _ in range(3))
        step_s = statistics.median(seconds[1:])
        return {
            "way": f"step, ranges of {size} MiB" + ", some of the state on the device" * bool(resident_bytes),
            "step_s": step_s,
            "bus_s": bus_s,
            "of_bus": step_s / bus_s if bus_s else None,
            "first_s": seconds[0],
            "window_bytes": state.window.size_bytes,
            "driver_bytes": used[0],
            "state_bytes": state.window.total_bytes,
            "resident_bytes": state.resident_bytes,
        }


def _bus_seconds(window: StateWindow, device: torch.device) -> float:
    """Seconds in which all state comes in and goes out, both ways at once; on a CPU of one copy after another."""
    planes = window.host_memory()
    if not planes:
        return 0.0
    pieces = [plane[at : at + _COPY_BYTES] for plane in planes for at in range(0, plane.numel(), _COPY_BYTES)]
    largest = max(piece.numel() for piece in pieces)
    first, second = (torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(2))
    if device.type != "cuda":
        return timed(lambda: [first[: piece.numel()].copy_(piece) for piece in pieces], device)
    lanes = [torch.cuda.Stream(device) for _ in range(2)]

    def both_ways() -> None:
        for number, piece in enumerate(pieces):
            other = pieces[number - len(pieces) // 2]
            with torch.cuda.stream(lanes[0]):
                first[: piece.numel()].copy_(piece, non_blocking=True)
            with torch.cuda.stream(lanes[1]):
                other.copy_(second[: other.numel()], non_blocking=True)
        synchronize(device)

    return timed(both_ways, device)


def _training(way: str, trained: AbstractContextManager[Any], device: torch.device, *, sequences: int) -> Row:
    length = 4096 if device.type == "cuda" else 32
    with trained as (model, optimizer, *_):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        ids = torch.randint(1, model.config.vocab_size, (1, length), device=device)

        def step() -> None:
            for _ in range(sequences):
                (-model_logprobs(model, ids, torch.ones_like(ids)).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

        with _driver_bytes(device, of_all=True) as used:
            seconds = [timed(step, device) for _ in range(3)]
        return {
            "way": way,
            "step_s": min(seconds[1:]),
            "sequences": sequences,
            "tokens": length,
            "driver_bytes": used[0],
        }


@contextmanager
def _driver_bytes(device: torch.device, *, of_all: bool = False) -> Iterator[list[int]]:
    """Bytes of the device that were in use at most, as the driver counts: all, or more than at the beginning."""
    found, ended = [0], threading.Event()
    if device.type != "cuda":
        yield found
        return
    torch.cuda.empty_cache()
    synchronize(device)
    before = total_device_bytes(device) if of_all else torch.cuda.mem_get_info(device)[0]

    def watch() -> None:
        while not ended.wait(0.002):
            found[0] = max(found[0], before - torch.cuda.mem_get_info(device)[0])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
