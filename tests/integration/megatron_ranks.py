"""One rank of `test_megatron.py`: parts of Megatron models in several layouts, joined.

torchrun --nproc-per-node N megatron_ranks.py LAYOUT=MODEL,MODEL ... RESULTS
"""

import hashlib
import json
import sys
from pathlib import Path

import megatron_tiny as tiny
import torch
from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron_twins import config_of
from torch import distributed

from colo.engines.layout import FusedWeights, Layout, empty_model
from colo.errors import ColoError
from colo.memory.load_plan import LoadPlan
from colo.weights.sources.megatron import MegatronSource
from colo.weights.sources.names import FAMILIES
from colo.weights.sources.spread import SpreadSource
from colo.weights.transports.slices import SlicesTransport

CPU = torch.device("cpu")


def source_of(name, stages, **options):
    return MegatronSource(stages, **{"family": tiny.MODELS[name][0], "vocab_size": tiny.VOCAB} | options)


def joined(source):
    """Every weight, whole, from the parts of all ranks; the names of those whose replicas differ, or lack elements."""
    told = [None] * distributed.get_world_size()
    distributed.all_gather_object(told, [(p.name, p.offset, p.tensor.contiguous()) for p in source.parts()])
    wholes = {spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in source.specs}
    written = {spec.name: torch.zeros(spec.shape, dtype=torch.bool) for spec in source.specs}
    wrong = set()
    for name, offset, part in (one for theirs in told for one in theirs):
        place = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
        seen = written[name][place]
        if seen.any() and not (seen.all() and torch.equal(wholes[name][place], part)):
            wrong.add(name)
        wholes[name][place], written[name][place] = part, True
    return wholes, sorted(wrong | {name for name, seen in written.items() if not seen.all()})


def sums(wholes):
    """SHA-256 of every weight's bytes, in order."""
    return {name: hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest() for name, t in wholes.items()}


@torch.no_grad()
def flipped(source, parameter):
    """What changes when one bit of a parameter does, on the last rank: its fingerprint, which weights, and replicas."""
    before, prints = sums(joined(source)[0]), source.fingerprint()
    if parameter is not None:
        parameter.view(-1)[:1].view(torch.int16 if parameter.dtype == torch.bfloat16 else torch.int32).bitwise_xor_(1)
    wholes, wrong = joined(source)
    after = sums(wholes)
    return [prints != source.fingerprint(), [name for name in after if after[name] != before[name]], wrong]


def failure(call):
    try:
        call()
    except ColoError as error:
        return f"{type(error).__name__}: {error}"
    return None


def refused(name, stages):
    """What is said of a key in no table, of a wrong vocabulary, and of one rank that fails alone."""
    is_last = distributed.get_rank() == distributed.get_world_size() - 1
    renamed = {**FAMILIES[tiny.MODELS[name][0]]}
    del renamed["self_attention.linear_proj.weight"]
    return [
        failure(lambda: source_of(name, stages, family="qwen1")),
        failure(lambda: source_of(name, stages, family=renamed)),
        failure(lambda: source_of(name, stages, vocab_size=1000)),
        failure(lambda: source_of(name, [torch.nn.Linear(2, 2)] if is_last else stages)),
        *(failure(lambda wrapper=wrapper: source_of(name, [wrapper])) for wrapper in wrappers_of(stages[0])),
        failure(lambda: source_of(name, [])),
        with_option(stages, "layernorm_zero_centered_gamma", lambda: source_of(name, stages)),
        failure(lambda: source_of(name, stages)),
    ]


def wrappers_of(stage):
    """The stage within the two wrappers of Megatron's that cut weights over data-parallel ranks, which want CUDA."""
    for kind in (FullyShardedDataParallel, TorchFullyShardedDataParallel):
        wrapper = kind.__new__(kind)
        torch.nn.Module.__init__(wrapper)
        wrapper.module = stage
        yield wrapper


def with_option(stages, option, call):
    setattr(stages[0].config, option, True)
    try:
        return failure(call)
    finally:
        setattr(stages[0].config, option, False)


def into_engine(name, placed, wholes):
    """Whether slices fill the embedded engine's memory as its loader does with whole weights, and bytes that came."""
    model = empty_model(config_of(name), dtype=torch.bfloat16, attn_implementation=None)
    engine, source = FusedWeights(Layout.of(model), device=CPU), SpreadSource(placed, device=CPU)
    memory = engine.unpadded()
    engine.load((spec.name, wholes[spec.name]) for spec in source.specs())
    expected = {parameter: tensor.clone() for parameter, tensor in memory.items()}
    for tensor in memory.values():
        tensor.fill_(float("nan"))
    plan = LoadPlan.record(engine.load, source.tensors(), memory)
    transport = SlicesTransport(source, plan, device=CPU, why_not_shared="tested")
    transport.transfer()
    transport.verify()
    same = all(torch.equal(tensor, expected[parameter]) for parameter, tensor in memory.items())
    return [same, transport.received_bytes, transport.bytes_to_receive]


def look(name, layout):
    """What this rank has found of one model in one layout."""
    stages = tiny.build(name, layout)
    source = source_of(name, stages)
    wholes, wrong = joined(source)
    found = {
        "sums": sums(wholes),
        "wrong": wrong,
        "specs": [spec.to_wire() for spec in source.specs],
        "groups": source.groups,
        "held": sum(part.tensor.nbytes for part in source.parts()),
        "whole": sum(spec.size_bytes for spec in source.specs),
        "are_live": are_live(source, stages),
        "engine": into_engine(name, source, wholes),
    }
    if name == "qwen3":
        found |= {"moved": moved(source, stages), "refused": refused(name, stages)}
        is_last = distributed.get_rank() == distributed.get_world_size() - 1
        *_, norm, last = stages[-1].parameters()
        found["flipped"] = [flipped(source, parameter if is_last else None) for parameter in (last, norm)]
    return found


def are_live(source, stages):
    """Whether parts are the stages' own memory."""
    memory = {t.untyped_storage().data_ptr() for stage in stages for t in (*stage.parameters(), *stage.buffers())}
    return all(part.tensor.untyped_storage().data_ptr() in memory for part in source.parts())


def moved(source, stages):
    """Whether parts are still live where Megatron has given parameters other memory, as its buffers do."""
    for stage in stages:
        for parameter in stage.parameters():
            parameter.data = parameter.data.clone()
    return are_live(source, stages) and not joined(source)[1]


def main(*arguments):
    *jobs, results = arguments
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    found = {}
    for job in jobs:
        text, names = job.split("=")
        layout = tiny.use_layout(text)
        found[text] = {name: look(name, layout) for name in names.split(",")}
    Path(results, f"{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
