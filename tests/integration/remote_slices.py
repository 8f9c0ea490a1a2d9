"""One rank of `test_remote_slices.py`: a trainer that FSDP2 has sharded, whose slices go to servers elsewhere.

torchrun --nproc-per-node 2 remote_slices.py CHECKPOINT URL_OF_TWO_WORKERS URL_OF_ONE URL_OF_A_SPARE PID RESULTS

The PID is that of the server of one worker, which ends in the middle of a transfer. The spare takes its place.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from tensor_parallel import GREEDY, PROMPTS, mismatch
from torch import distributed
from torch.optim import SGD

import colo
from colo.engines.vllm.client.elsewhere import WorkersTakeSlices
from tests.integration.sharded_vllm import failure, kill, sharded, train
from tests.transfers import spoil


def connected(url):
    return colo.connect(url, device="cpu", deadline_s=60, through=colo.Broadcast("127.0.0.1"))


def dying(pid, url):
    """`WorkersTakeSlices.take`, with which the server at `url` ends."""
    take = WorkersTakeSlices.take

    def die(taker):
        if taker._link.url == url:
            kill(pid)
        take(taker)

    return die


def main(checkpoint, of_two, of_one, spare, pid, results):
    distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    model, twin = sharded(checkpoint)
    fleet = colo.Fleet(map(connected, (of_two, of_one))) if rank == 0 else None
    rt = colo.share(colo.MainRankEngine(fleet), model, SGD(model.parameters(), lr=0.1))
    optimizer = SGD(twin.parameters(), lr=0.1)
    found = {"transport": rt.transport.name, "reason": rt.transport.reason, "mismatches": [], "bytes": [], "out": []}

    def cycle():
        found["mismatches"].append(mismatch(twin, rt.generate(PROMPTS[rank:], **GREEDY)))
        found["bytes"].append(rt.publications[-1].num_bytes)
        found["out"].append(len(fleet.out) if rank == 0 else 0)
        train(rt, twin, optimizer)

    for _ in range(2):
        cycle()
    if rank == 0:
        WorkersTakeSlices.take = dying(int(pid), of_one)
    cycle()
    cycle()
    if rank == 0:
        fleet.remove(next(iter(fleet.out)))
        fleet.add(connected(spare))
    cycle()
    found["same"] = all(
        torch.equal(p.full_tensor(), other) for p, other in zip(model.parameters(), twin.parameters(), strict=True)
    )
    # a version that is spoilt on its way is named on every rank
    train(rt, twin, optimizer)
    if rank == 1:
        spoil(rt)
    found["failure"] = failure(lambda: rt.generate(PROMPTS[rank:], **GREEDY))
    cycle()
    rt.close()
    found["four calls"] = by_four_calls(model, of_two, rank)
    Path(results, f"{rank}.json").write_text(json.dumps(found))


def by_four_calls(model, url, rank):
    """Tell if a server of two workers holds weights that vLLM's own trainer engine has sent from both ranks."""
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    from colo.engines.vllm import plugin
    from colo.engines.vllm.trainer import ColoTrainerInitInfo

    plugin.register()
    info = ColoTrainerInitInfo(rank=rank, address="127.0.0.1", num_workers=2, deadline_s=60)
    client = HTTPVLLMWeightSyncClient(url)
    sender = WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    sender.send_weights("5")
    sender.shutdown()
    engine = colo.MainRankEngine(connected(url) if rank == 0 else None)
    with colo.share(engine, model, SGD(model.parameters(), lr=0.1)) as rt:
        return rt.transport.name, rt.transport.is_current()


if __name__ == "__main__":
    main(*sys.argv[1:])
