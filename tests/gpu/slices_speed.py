"""Milliseconds that a publication by slices takes, comparison included, beside what the machine allows.

    torchrun --nproc-per-node 2 tests/gpu/slices_speed.py [--tp 2,1] [--trainer megatron] [--masters]
    torchrun --nproc-per-node 2 tests/gpu/slices_speed.py --device cpu       tiny, which shows that it works

The model has the shape of a Qwen3-8B, sharded by FSDP2 or cut by Megatron; every rank has an engine laid out as vLLM's.
Limits are measured here, one rank after another being idle or not as in a publication: memory copied and read on a GPU
by the same kernel, and bytes written to the other GPU by itself. `copied` is the limit of a transfer: what is copied in
a GPU's memory, or what goes over NVLink beside it, whichever takes longer; `verified` adds what of the engine is read
after that, all of it or the last of four stages.
"""

import argparse
import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

sys.path.insert(0, str(Path(__file__).parents[2]))  # torchrun starts this file by itself

from benchmarks import sharded
from benchmarks.common import shape
from colo.memory.copy_plan import CopyPlan
from colo.memory.load_plan import LoadPlan
from colo.memory.region import carve, carved_bytes
from colo.memory.share import SharedMemory
from colo.units import MIB
from colo.weights.transports.slices import SlicesTransport

REPEATS = 20
FILES = []
"""Memory files of engines on a CPU."""


def median_ms(action, device, repeats=REPEATS):
    """Median of calls that all ranks begin together, the slowest rank's."""
    found = []
    for _ in range(repeats + 2):
        distributed.barrier()
        settle(device)
        start_s = time.perf_counter()
        action()
        settle(device)
        found.append((time.perf_counter() - start_s) * 1e3)
    slowest = torch.tensor(statistics.median(found[2:]))
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return float(slowest)


def say(line):
    if distributed.get_rank() == 0:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def settle(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mapped(memory, device):
    """An engine's memory where others can map it: on a CPU a file."""
    if device.type == "cuda":
        return memory
    specs = [(tuple(tensor.shape), tensor.dtype) for tensor in memory.values()]
    FILES.append(SharedMemory(carved_bytes(specs), device))
    return dict(zip(memory, carve(FILES[-1].bytes, specs), strict=True))


def engine(config, rank, tp, device):
    """Memory of an engine of the dtype of checkpoints, and its loader."""
    memory, load = sharded._engine(config, rank, tp, device)
    places = mapped(memory, device)
    memory.update(places)  # the loader's own dictionary
    return memory, load


def rates(device):
    """Gigabytes a second: copied within a GPU's memory, counted once, read there, and written to the next GPU."""
    size = (1024 if device.type == "cuda" else 4) * MIB
    one, two = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    copied = median_ms(CopyPlan([(one, two)]).replay, device, 5)
    read = median_ms(CopyPlan([(one, one)]).digests, device, 5)
    found = {"copied": size / copied / 1e6, "read": size / read / 1e6}
    ranks = distributed.get_world_size()
    if device.type == "cuda" and torch.cuda.device_count() >= ranks > 1:
        there = torch.zeros(size, dtype=torch.uint8, device=torch.device("cuda", (device.index + 1) % ranks))
        found["written to the next"] = size / median_ms(lambda: there.copy_(one), device, 5) / 1e6
    return found


def measure(source, config, tp, device, rate):
    rank = distributed.get_rank()
    memory, load = engine(config, rank % tp, tp, device)
    plan = LoadPlan.record(load, source.tensors(), memory)
    start_s = time.perf_counter()
    slices = SlicesTransport(source, plan, device=device, why_not_shared="measured")
    planned_s = time.perf_counter() - start_s

    def publish():
        slices.transfer()
        slices.verify()

    publish()
    slices.seconds.clear()
    transfer_ms = median_ms(slices.transfer, device)
    stages = {stage: round(seconds * 1e3 / (REPEATS + 2), 3) for stage, seconds in slices.seconds.items()}
    verified_ms = median_ms(publish, device)
    check_ms = median_ms(slices.is_current, device, 5)
    assert slices.is_current()
    next(iter(memory.values())).view(torch.int16).view(-1)[0] ^= 1 if rank == 0 else 0
    assert not slices.is_current(), "a changed bit was not seen"
    publish()
    own = sum(d.num_bytes for d in slices._route.plan.local if d.receiver == rank)
    buckets = slices._route.plan.buckets
    sent = sum(d.num_bytes for bucket in buckets for d in bucket if d.sender == rank)
    received = slices.bytes_to_receive
    copied = max(own / rate["copied"], sent / rate.get("written to the next", rate["copied"])) / 1e6
    last = (own + received) / len(slices._route.stages)  # what is read back when all has been written
    verified = copied + last / rate["read"] / 1e6
    limits = {"copied": round(copied, 2), "verified": round(verified, 2)}
    say(f"tp {tp}: {verified_ms:.2f} ms a publication, of them {transfer_ms:.2f} the transfer {stages}")
    say(f"  limits of this machine {limits} ms; own {own} bytes, sent {sent}, received {received}")
    say(f"  a comparison by itself {check_ms:.2f} ms; planned in {planned_s:.1f} s; {slices.reason[-160:]}")
    slices.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tp", default="2,1")
    parser.add_argument("--trainer", choices=sharded.TRAINERS, default="fsdp2")
    parser.add_argument("--masters", action="store_true", help="weights in fp32, which engines take as bf16")
    of = parser.parse_args()
    device = torch.device("cpu") if of.device == "cpu" else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        torch.cuda.current_device = lambda: device  # Megatron asks anywhere
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=timedelta(seconds=120))
    config = shape("8b", device)
    engines = shape("8b", device)
    for one in (config, engines):
        one.dtype = torch.bfloat16
        if device.type == "cpu":
            one.update(sharded._ON_A_CPU | {"vocab_size": 512})
    if of.masters:
        config.dtype = torch.float32
    source = sharded._of_fsdp(config, device) if of.trainer == "fsdp2" else sharded._of_megatron(config, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    rate = rates(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    rounded = {kind: round(value, 1) for kind, value in rate.items()}
    say(f"{name}, torch {torch.__version__}, {of.trainer}, {config.dtype}: {rounded} GB/s")
    for tp in map(int, of.tp.split(",")):
        measure(source, engines, tp, device, rate)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
