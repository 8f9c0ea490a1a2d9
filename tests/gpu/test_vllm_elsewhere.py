"""vLLM's servers on other GPUs than the trainer's: whole weights, changes, and slices of two ranks, over NCCL."""

import json
import os
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))  # torchrun starts this file by itself
sys.path.insert(0, str(Path(__file__).parent))

from tiny_vllm import CUDA, MARKS, PROMPTS, config, difference, torchrun, train_step

import colo
from colo.config import RuntimeConfig
from colo.engines.vllm.client.elsewhere import WorkersTakeSlices
from tests.integration.vllm_server import FLAGS, Server
from tests.transfers import spoil

pytestmark = MARKS

ON_CUDA = ("--dtype", "bfloat16", "--kv-cache-memory-bytes", "500000000", "--gpu-memory-utilization", "0.1")
DEADLINE_S = 40.0
GREEDY = {"max_tokens": 16, "temperature": 0}


def connected(url, device, *, delta=False):
    return colo.connect(url, device=device, deadline_s=DEADLINE_S, through=colo.Broadcast("127.0.0.1", delta=delta))


def cycle(rt, found):
    """A rollout of what a training step has left, and a step; which fails for other weights than the trainer's."""
    with rt.rollout():
        completions = rt.generate(PROMPTS, **GREEDY)
        assert rt.transport.is_current()
    found["mismatches"].append(difference(rt.model, completions))
    found["tokens"].append([c.token_ids for c in completions])
    train_step(rt, len(found["tokens"]))


def dying(server_pid, url):
    """`WorkersTakeSlices.take`, with which the server at `url` is killed."""
    take = WorkersTakeSlices.take

    def die(taker):
        if taker._link.url == url:
            os.killpg(server_pid, 9)
        take(taker)

    return die


def failure(call):
    began_s = time.monotonic()
    try:
        call()
    except colo.ColoError as error:
        return [type(error).__name__, str(error), time.monotonic() - began_s]
    return None


@pytest.fixture
def serve(tmp_path):
    """Starts servers of a small model on GPUs, by their numbers, and waits for all of them."""
    pytest.importorskip("vllm")
    AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).save_pretrained(tmp_path)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    with ExitStack() as started:

        def start(*places):
            servers = []
            for place in places:
                more = ("--tensor-parallel-size", str(len(place)))
                here = ",".join(visible.split(",")[number] for number in place)
                server = Server(tmp_path, *FLAGS, *ON_CUDA, *more, VLLM_SERVER_DEV_MODE="1", CUDA_VISIBLE_DEVICES=here)
                servers.append(started.enter_context(closing(server)))
            return [server.wait() for server in servers]

        yield start


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_server_on_another_gpu_takes_every_version_and_its_death_in_a_transfer_is_named(serve, tmp_path):
    first, spare = serve([1], [1])
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).to(CUDA)
    whole_bytes = sum(p.nbytes for p in model.parameters())
    for delta in (False, True):
        found = {"mismatches": [], "tokens": []}
        engine = connected(first.url, CUDA, delta=delta)
        optimizer = AdamW(model.parameters(), lr=1e-5 if delta else 1e-3, fused=True)
        with colo.share(engine, model, optimizer, config=RuntimeConfig(offload="always")) as rt:
            for _ in range(3):
                cycle(rt, found)
            sent = [publication.num_bytes for publication in rt.publications]
        assert max(found["mismatches"]) < 0.02
        assert delta or found["tokens"][0] != found["tokens"][2]
        assert sent[0] == whole_bytes and (max(sent[1:]) < whole_bytes if delta else sent[1:] == sent[:1] * 2)
        engine.close()
    engine = connected(first.url, CUDA)
    rt = colo.share(engine, model, AdamW(model.parameters(), lr=1e-3, fused=True))
    cycle(rt, found)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(WorkersTakeSlices, "take", dying(first.process.pid, first.url))
        what = failure(lambda: rt.generate(PROMPTS, **GREEDY))
    assert what is not None and what[0] == "EngineLost" and what[2] < DEADLINE_S, what
    rt.close()
    engine.close()
    found = {"mismatches": [], "tokens": []}
    with colo.share(connected(spare.url, CUDA), model, AdamW(model.parameters(), lr=1e-3, fused=True)) as rt:
        for _ in range(2):
            cycle(rt, found)
    assert max(found["mismatches"]) < 0.02


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs, two of them for servers")
def test_slices_of_two_ranks_go_to_servers_on_other_gpus_of_which_one_dies_in_a_transfer(serve, tmp_path):
    servers = serve([2], [3], [3], [2, 3])
    urls = [server.url for server in servers]
    found = torchrun(__file__, tmp_path, tmp_path, servers[1].process.pid, *urls)
    assert found[0]["out"] == [0, 0, 1, 1, 0, 0]
    for rank in found:
        assert all("slices go from 2 of the trainer's ranks to 2 of engines" in why for why in rank["reasons"])
        assert len(rank["mismatches"]) == 8 and max(rank["mismatches"]) < 0.02
        assert rank["spoilt"][0] == "TransferError" and rank["spoilt"][2] < DEADLINE_S
        assert "differ after the transfer" in rank["spoilt"][1]
        assert rank["took_s"][2] < DEADLINE_S


def one_rank(folder, pid, first, second, spare, of_two):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    mesh, computing = init_device_mesh("cuda", (2,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=computing)
    fully_shard(model, mesh=mesh, mp_policy=computing)
    found = {"mismatches": [], "tokens": [], "out": [], "took_s": [], "reasons": []}
    fleet = colo.Fleet([connected(first, device), connected(second, device)]) if rank == 0 else None

    def shared(engine):
        rt = colo.share(colo.MainRankEngine(engine), model, AdamW(model.parameters(), lr=1e-3, fused=True))
        found["reasons"].append(rt.transport.reason)
        return rt

    def timed_cycle(rt):
        began_s = time.monotonic()
        cycle(rt, found)
        found["took_s"].append(time.monotonic() - began_s)
        found["out"].append(len(fleet.out) if rank == 0 else 0)

    rt = shared(fleet)
    timed_cycle(rt)
    timed_cycle(rt)
    if rank == 0:
        WorkersTakeSlices.take = dying(int(pid), second)
    timed_cycle(rt)
    timed_cycle(rt)
    if rank == 0:
        fleet.remove(next(iter(fleet.out)))
        fleet.add(connected(spare, device))
    timed_cycle(rt)
    if rank == 1:
        spoil(rt)
    found["spoilt"] = failure(lambda: rt.generate(PROMPTS, **GREEDY))
    timed_cycle(rt)
    rt.close()
    rt = shared(connected(of_two, device) if rank == 0 else None)
    cycle(rt, found)
    cycle(rt, found)
    rt.close()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    one_rank(*sys.argv[1:])
