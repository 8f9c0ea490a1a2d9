"""One rank of `test_fleet_ranks.py`: a trainer that FSDP2 has sharded, with a server of its own elsewhere.

torchrun --nproc-per-node 2 fleet_ranks.py CHECKPOINT WAY URL_OF_RANK_0 URL_OF_RANK_1 URL_OF_A_SPARE PID FOLDER RESULTS

WAY is how weights reach a server: memory, files, broadcast, or changes of both kinds. With a PID, of the server of rank
0, it is killed, and the spare takes its place.
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
from tests.integration.sharded_vllm import failure, kill, sharded, train


def through(way, folder):
    rank = os.environ["RANK"]
    delta = way.startswith("changed") and rank == "1"  # SGLang's loader takes whole weights
    if way.endswith("files"):
        return colo.WeightsFolder(Path(folder, way, rank), delta=delta)
    return colo.Broadcast("127.0.0.1", delta=delta) if way.endswith("broadcast") else None


def of_the_main_rank(model, twin, urls):
    """The largest gap of both ranks' samples where the first rank alone has both servers."""
    rank, engine = int(os.environ["RANK"]), None
    if rank == 0:
        engine = colo.Fleet(
            colo.connect(url, device="cpu", deadline_s=60, through=colo.Broadcast("127.0.0.1")) for url in urls
        )
    rt = colo.share(colo.MainRankEngine(engine), model, SGD(model.parameters(), lr=0.1))
    optimizer, gaps = SGD(twin.parameters(), lr=0.1), []
    for _ in range(2):
        gaps.append(mismatch(twin, rt.generate(PROMPTS[rank:], **GREEDY)))
        train(rt, twin, optimizer)
    rt.close()
    return max(gaps)


def main(checkpoint, ways, sglang, vllm, spare, pid, folder, results):
    distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    model, twin = sharded(checkpoint)
    found = {}
    for way in ways.split(","):
        engine = colo.connect((sglang, vllm)[rank], device="cpu", deadline_s=60, through=through(way, folder))
        rt = colo.share([engine], model, SGD(model.parameters(), lr=0.1))
        optimizer = SGD(twin.parameters(), lr=0.1)
        here = found[way] = {"transport": rt.transport.name, "mismatches": [], "bytes": []}
        for _ in range(2):
            here["mismatches"].append(mismatch(twin, rt.generate(PROMPTS[rank::2], **GREEDY)))
            here["bytes"].append(rt.publications[-1].num_bytes)
            train(rt, twin, optimizer)
        if way == ways.split(",")[-1]:
            if rank == 0:
                kill(int(pid))
            here["failure"] = failure(lambda rt=rt: rt.generate(PROMPTS[rank::2], **GREEDY))
            if rank == 0:
                rt.engine.add(colo.connect(spare, device="cpu", deadline_s=60, through=through(way, folder)))
            for _ in range(2):
                here["mismatches"].append(mismatch(twin, rt.generate(PROMPTS[rank::2], **GREEDY)))
                train(rt, twin, optimizer)
        here["same"] = all(
            torch.equal(p.full_tensor(), other) for p, other in zip(model.parameters(), twin.parameters(), strict=True)
        )
        rt.close()
    found["main rank"] = of_the_main_rank(model, twin, [spare, vllm])
    Path(results, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
