"""`colo bench offload`: how fast state leaves the device and comes back, ours beside what people use today.

Every way moves the same number of bytes in the same run. The limit is a copy between the device and pinned memory that
exists already, which is what the bus gives.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import psutil
import torch

from colo.bench import overlap
from colo.bench.common import Result, Row, Tell, clear, gigabytes_per_s, median_s, result, segment_of, timed
from colo.errors import Unsupported
from colo.memory.offload import Mover
from colo.memory.probe import free_device_bytes
from colo.memory.region import memory_saver
from colo.phases.phase import Residency
from colo.units import GIB, MIB, format_bytes

_CYCLES, _GROWTH_CYCLES = 5, 100


def run(*, device: str, size_bytes: int | None = None, tell: Tell = lambda part: None) -> Result:
    """Measure every way of moving `size_bytes` out and back; see the module's docstring.

    Raises: `Unsupported` when the device has not twice that many bytes free.
    """
    target = torch.device(device)
    size_bytes = size_bytes or (8 * GIB if target.type == "cuda" else 64 * MIB)
    if free_device_bytes(target) < 2 * size_bytes:
        raise Unsupported(f"the benchmark needs {format_bytes(2 * size_bytes)} free on {device}; pass a smaller --size")
    tell("the limit: pinned copies")
    limit = copy_limit(target, size_bytes)
    tell("colo")
    rows = _ours(target, size_bytes, _CYCLES, limit)
    for way, measure in _peers(target).items():
        tell(way)
        rows.append(_row(way, size_bytes, limit, *measure(target, size_bytes)))
    if target.type == "cuda":
        rows[1] |= _against(rows[1], rows[-1])
    tell(f"growth over {_GROWTH_CYCLES} cycles")
    rows.append(_growth(target, min(size_bytes, GIB), _GROWTH_CYCLES))
    tell("generation beside an offload")
    rows.append(overlap.beside_an_offload(target))
    tell("the exposed time of a step")
    rows.append(overlap.exposed_time(target))
    command = f"colo bench offload --device {device} --size {size_bytes // MIB}MiB"
    return result("offload", command, limit=limit, rows=rows)


def _peers(device: torch.device) -> dict[str, Callable[[torch.device, int], tuple[float, float]]]:
    ways: dict[str, Callable[[torch.device, int], tuple[float, float]]]
    ways = {"tensor.cpu(), then .to(device)": _plain, "fresh pinned copy each time": _fresh_pinned}
    return ways | ({"torch-memory-saver, own backup": _saver_backup} if device.type == "cuda" else {})


def _against(ours: Row, saver: Row) -> Row:
    """Speed relative to torch-memory-saver's own backup."""
    return {
        "times_saver_out": saver["out_s"] / ours["out_s"],
        "times_saver_back": saver["back_s"] / ours["back_s"],
        "times_saver_round_trip": (saver["out_s"] + saver["back_s"]) / (ours["out_s"] + ours["back_s"]),
    }


def copy_limit(device: torch.device, size_bytes: int = GIB) -> dict[str, float]:
    """Bandwidth of copies between the device and pinned host memory, each way."""
    out_s, back_s = _pinned_copies(device, size_bytes)
    clear(device)
    return {"out_gb_per_s": gigabytes_per_s(size_bytes, out_s), "back_gb_per_s": gigabytes_per_s(size_bytes, back_s)}


def _pinned_copies(device: torch.device, size_bytes: int) -> tuple[float, float]:
    on_device = torch.empty(size_bytes, dtype=torch.uint8, device=device).random_()
    on_host = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    out_s = median_s(lambda: on_host.copy_(on_device, non_blocking=True), device)
    return out_s, median_s(lambda: on_device.copy_(on_host, non_blocking=True), device)


def _row(way: str, size_bytes: int, limit: dict[str, float], out_s: float, back_s: float, **more: Any) -> Row:
    out, back = gigabytes_per_s(size_bytes, out_s), gigabytes_per_s(size_bytes, back_s)
    return {
        "way": way,
        "bytes": size_bytes,
        "out_s": out_s,
        "back_s": back_s,
        "out_gb_per_s": out,
        "back_gb_per_s": back,
        "out_of_limit": out / limit["out_gb_per_s"],
        "back_of_limit": back / limit["back_gb_per_s"],
        **more,
    }


def _ours(device: torch.device, size_bytes: int, cycles: int, limit: dict[str, float]) -> list[Row]:
    """The first cycle, with the arena set up beforehand in the background, and the median of the later ones."""
    mover = Mover(device)
    setup_s = timed(lambda: mover.arena.prepare(size_bytes).result(), device)
    segment = segment_of(size_bytes, mover)
    regions = segment.regions
    for region in regions:
        region.bytes.random_()
    samples = [region.bytes[::4099].clone() for region in regions]
    free_before = free_device_bytes(device)
    outs, backs, freed = [], [], []
    for _ in range(cycles + 1):
        outs.append(timed(lambda: segment.begin(Residency.OFFLOADED).wait(), device))
        freed.append(free_device_bytes(device) - free_before)
        backs.append(timed(lambda: segment.begin(Residency.RESIDENT).wait(), device))
    equal = all(torch.equal(old, region.bytes[::4099]) for old, region in zip(samples, regions, strict=True))
    more = {"equal": equal, "freed_bytes": min(freed) if device.type == "cuda" else segment.size_bytes}
    first = _row("colo, first cycle", size_bytes, limit, outs[0], backs[0], arena_setup_s=setup_s, **more)
    later = _row("colo", size_bytes, limit, statistics.median(outs[1:]), statistics.median(backs[1:]), **more)
    segment.close()
    mover.close()
    clear(device)
    return [first, later]


def _plain(device: torch.device, size_bytes: int) -> tuple[float, float]:
    tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device).random_()
    return _out_and_back(device, lambda: tensor.to("cpu", copy=True), lambda host: host.to(device, copy=True))


def _fresh_pinned(device: torch.device, size_bytes: int) -> tuple[float, float]:
    """Pin fresh memory with `torch.empty(pin_memory=True)`; it is kept, or torch would hand it out again."""
    tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device).random_()
    pinned: list[torch.Tensor] = []

    def out() -> torch.Tensor:
        pinned.append(torch.empty(size_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda"))
        return pinned[-1].copy_(tensor, non_blocking=True)

    return _out_and_back(device, out, lambda host: host.to(device, non_blocking=True, copy=True))


def _saver_backup(device: torch.device, size_bytes: int) -> tuple[float, float]:
    saver = memory_saver()
    with saver.region(tag="bench.backup", enable_cpu_backup=True):
        tensor = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    tensor.random_()
    taken = _out_and_back(device, lambda: saver.pause("bench.backup"), lambda _: saver.resume("bench.backup"))
    del tensor
    saver.pause("bench.backup")
    return taken


def _out_and_back(device: torch.device, out: Callable[[], Any], back: Callable[[Any], Any]) -> tuple[float, float]:
    """Medians of three rounds; `back` is given what `out` returned."""
    outs, backs = [], []
    for _ in range(3):
        clear(device)
        kept: list[Any] = []
        outs.append(timed(lambda: kept.append(out()), device))  # noqa: B023 - called at once
        backs.append(timed(lambda: back(kept[0]), device))  # noqa: B023
    return statistics.median(outs), statistics.median(backs)


def _growth(device: torch.device, size_bytes: int, cycles: int) -> Row:
    """Device, host and pinned bytes after many cycles against those after two."""
    mover = Mover(device)
    segment = segment_of(size_bytes, mover)
    process = psutil.Process()
    readings = []
    for cycle in range(cycles):
        segment.begin(Residency.OFFLOADED).wait()
        segment.begin(Residency.RESIDENT).wait()
        if cycle in (1, cycles - 1):
            clear(device)
            readings.append((free_device_bytes(device), process.memory_info().rss, mover.arena.pinned_bytes))
    segment.close()
    mover.close()
    (free_a, rss_a, pinned_a), (free_b, rss_b, pinned_b) = readings
    return {
        "way": f"colo, growth over {cycles} cycles",
        "bytes": size_bytes,
        "device_growth_bytes": free_a - free_b if device.type == "cuda" else 0,
        "host_growth_bytes": rss_b - rss_a,
        "pinned_growth_bytes": pinned_b - pinned_a,
    }
