"""One rank of `test_sharded.py`: a trainer whose weights FSDP2 has sharded, and an engine that has all of them.

torchrun --nproc-per-node 2 sharded.py RESULTS
"""

import copy
import json
import sys
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, Qwen3Config

import colo
from colo.config import Offload
from colo.engines.torch import TorchEngine
from colo.memory.offload import Mover
from colo.memory.storage import local_shard
from colo.phases.phase import Phase
from colo.units import MIB
from colo.weights import exchange
from colo.weights.transports import slices

IDS = torch.arange(24).view(2, 12)
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
CPU = torch.device("cpu")
BUCKET_BYTES = 16 << 10


def make(mesh):
    """A model on both ranks, the same one as it is, and a runtime over the first."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=62,  # 31 of them on each rank; of 101 rows, 51 and 50
        intermediate_size=97,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=101,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    twin = copy.deepcopy(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    slices.BUCKET_BYTES = BUCKET_BYTES  # so that there are several
    engine = TorchEngine(config, device="cpu", dtype=torch.float32, kv_cache_bytes=MIB, mover=Mover(CPU))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with torch.no_grad():
        model(input_ids=IDS)  # after which FSDP2 leaves some weights whole
    rt = colo.share(engine, model, optimizer)
    rt.scheduler.offload = Offload.ALWAYS
    return rt, twin, AdamW(twin.parameters(), lr=1e-2)


def backward(*models):
    for model in models:
        model(input_ids=IDS, labels=IDS).loss.backward()


def step(rt, twin, optimizer):
    with rt.train():
        if rt.optimizer.state:
            assert get_optimizer_state_dict(rt.model, rt.optimizer)  # whose parameters the model has, at the start too
        backward(rt.model, twin)
        rt.optimizer.step()
        rt.optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()


def is_same(tensors, others):
    """Whether every bit of sharded tensors is that of the others."""
    return all(torch.equal(t.full_tensor(), other) for t, other in zip(tensors, others, strict=True))


@torch.no_grad()
def gap(twin, completions):
    """The largest |log p(engine) - log p(twin)|."""
    found = 0.0
    for c in completions:
        logits = twin(input_ids=torch.tensor([c.prompt_token_ids + c.token_ids])).logits[0]
        logprobs = logits[len(c.prompt_token_ids) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(-1, torch.tensor(c.token_ids)[:, None])[:, 0]
        found = max(found, float((expected - torch.tensor(c.logprobs)).abs().max()))
    return found


def failure(call):
    try:
        call()
    except (ValueError, colo.ColoError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def steps(rt, twin, optimizer, rank):
    """Three steps; the second one's gradients are those of two passes, with a rollout between them."""
    found = {"gaps": [], "same": [], "away": [], "mismatches": 0}
    for number in range(3):
        with rt.rollout():
            prompts = [[1, 2, 3], [4, 5, 6, 7]][: 2 - rank]  # ranks have different numbers of completions
            found["gaps"].append(gap(twin, rt.generate(prompts, **GREEDY)))
            segments = rt.scheduler.segments
            found["away"].append([segments["trainer.optimizer"].residency, segments["trainer.optimizer"].host_bytes])
        if number == 1:
            with rt.train():
                backward(rt.model, twin)
            with rt.rollout():
                rt.generate([[1, 2]], **GREEDY)
                found["gradients_away"] = rt.scheduler.segments["trainer.gradients"].device_bytes == 0
                found["refused"] = failure(lambda: backward(rt.model))
        step(rt, twin, optimizer)
        found["same"].append(is_same(rt.model.parameters(), twin.parameters()))
    found["mismatches"] = len(rt.trace.metrics["mismatch_sampled"])
    return found


def snapshot(rt, optimizer):
    """The state dict taken while the state is away is the twin's, and can be loaded."""
    with rt.rollout():
        taken = rt.optimizer.state_dict()
    expected = optimizer.state_dict()
    kinds = ("exp_avg", "exp_avg_sq")
    same = all(
        is_same([taken["state"][i][kind] for kind in kinds], [expected["state"][i][kind] for kind in kinds])
        for i in expected["state"]
    )
    rt.optimizer.load_state_dict(taken)
    return same


def failures(rt, twin, rank):
    """What both ranks say of what has failed in the second one, and that the next rollout mends it."""
    found, phases = [], []
    pack, names_of = exchange._pack, slices.SlicesTransport._names_of
    plan, require = rt.scheduler.plan, rt.scheduler.enter
    left = 2

    def stumble(*arguments):
        nonlocal left
        left -= 1
        if left == 0:
            raise ValueError("rank 1 stumbles")
        pack(*arguments)

    def refuse(phase):
        raise colo.PhaseError("rank 1 refuses")

    def train():
        with rt.train():
            pass

    rt.optimizer.step()  # without gradients: a new version of the same weights
    if rank:
        exchange._pack = stumble
    found.append(failure(lambda: rt.generate([[1, 2]], **GREEDY)))
    exchange._pack = pack
    found.append(gap(twin, rt.generate([[1, 2]], **GREEDY)))
    if rank:
        rt.scheduler.plan = refuse
    found.append(failure(lambda: rt.generate([[1, 2]], **GREEDY)))
    rt.scheduler.plan = plan
    phases.append(rt.phase)
    found.append(gap(twin, rt.generate([[1, 2]], **GREEDY)))
    rt.optimizer.step()
    if rank:
        slices.SlicesTransport._names_of = lambda transport, found: iter(["a weight"])
    found.append(failure(lambda: rt.generate([[1, 2]], **GREEDY)))
    slices.SlicesTransport._names_of = names_of
    found.append(gap(twin, rt.generate([[1, 2]], **GREEDY)))
    if rank:
        rt.scheduler.enter = refuse
    found.append(failure(train))
    rt.scheduler.enter = require
    phases.append(rt.phase)
    train()
    if rank:
        rt.engine.poison("rank 1 has lost it")
    found.append(gap(twin, rt.generate([[1, 2]], **GREEDY)))
    return found, phases


@torch.no_grad()
def writes(rt, twin, rank):
    """How many versions writes are that torch does not count, whether both ranks have them, and what is refused."""
    rt.generate([[1, 2]], **GREEDY)
    before = rt.weights_version
    if rank:
        local_shard(next(rt.model.parameters())).data.mul_(1.5)
    else:
        torch._foreach_mul_(list(rt.model.parameters()), 1.25)
    for theirs, mine in zip(twin.parameters(), rt.model.parameters(), strict=True):
        theirs.copy_(mine.full_tensor())
    rt.model(input_ids=IDS)  # a pass without a backward one, after which FSDP2 leaves some weights whole
    found = gap(twin, rt.generate([[1, 2], [3, 4, 5]], **GREEDY))
    with rt.rollout():
        rt.generate([[1, 2]], **GREEDY)
        parts = [local_shard(p) for p in rt.model.parameters()]
        torch._foreach_mul_(parts, 1.25)
        stale = [failure(lambda: rt.generate([[1, 2]], **GREEDY))]
        torch._foreach_mul_(parts, 0.75)
        stale.append(failure(lambda: rt.generate([[1, 2]], **GREEDY)))
    for theirs, mine in zip(twin.parameters(), rt.model.parameters(), strict=True):
        theirs.copy_(mine.full_tensor())
    found = max(found, gap(twin, rt.generate([[1, 2]], **GREEDY)))
    return [rt.weights_version - before, found, stale]


def main(results):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    rt, twin, optimizer = make(init_device_mesh("cpu", (2,)))
    found = {"transport": rt.transport.name, "reason": rt.transport.reason}
    found |= steps(rt, twin, optimizer, rank)
    segments = rt.scheduler.segments
    names = ("trainer.parameters", "trainer.optimizer")
    found["bytes"] = [segments[name].size_bytes for name in names]
    found["parts"] = sum(local_shard(p).nbytes for p in rt.model.parameters())
    found["whole"] = sum(p.nbytes for p in twin.parameters())
    found["working"] = rt.scheduler.working_bytes[Phase.SYNC]
    found["synced"] = [rt.bytes_synced, len(rt.publications)]
    found["received"] = [rt.transport.received_bytes, rt.transport.bytes_to_receive]
    found["snapshot"] = snapshot(rt, optimizer)
    step(rt, twin, optimizer)
    found["same"].append(is_same(rt.model.parameters(), twin.parameters()))
    found["failures"], found["phases"] = failures(rt, twin, rank)
    found["writes"] = writes(rt, twin, rank)
    rt.close()
    Path(results, f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
