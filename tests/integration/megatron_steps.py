"""One rank of `test_megatron_steps.py`: Megatron's optimizers with their state parked between steps, and as they are.

torchrun --nproc-per-node 2 megatron_steps.py RESULTS
"""

import copy
import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import megatron_tiny as tiny
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron_ranks import failure, joined, source_of
from torch import distributed, nn
from torch.optim import AdamW
from torch.utils import _pytree as pytree

from colo.assembly.arguments import check_optimizer
from colo.memory.offload import Mover
from colo.phases.phase import Residency
from colo.trainer.session import TrainerSession


def on_cpu(make):
    """A function that makes tensors, which takes "cuda" for the CPU."""

    def made(*args, **options):
        return make(*args, **options | ({"device": None} if options.get("device") == "cuda" else {}))

    return made


def kind_of(tensor, *kinds):
    """What `Tensor.type` answers, of a tensor on the CPU as of one on a GPU: Megatron's optimizers take no others."""
    return TYPE(tensor, *kinds) if kinds else TYPE(tensor).replace("torch.", "torch.cuda.")


TYPE = torch.Tensor.type
torch.tensor, torch.zeros, torch.Tensor.type = on_cpu(torch.tensor), on_cpu(torch.zeros), kind_of

IDS = torch.randint(0, tiny.VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
MASK = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)[None, None]
POSITIONS = torch.arange(16)[None].expand(2, -1)

CASES = {  # layout, model, optimizer, dtype
    "distributed": ("tp1", "qwen3", "distributed", torch.bfloat16),
    "overlapped": ("tp1", "qwen3", "overlapped", torch.bfloat16),
    "distributed, fp32": ("tp1", "qwen3", "distributed", torch.float32),
    "experts": ("ep2", "qwen3_moe", "distributed", torch.bfloat16),
    "virtual stages": ("pp2vp2", "qwen3", "distributed", torch.bfloat16),
    "main parameters": ("tp2", "qwen3", "plain", torch.bfloat16),
    "fp32": ("tp2", "qwen3", "plain", torch.float32),
    "torch's": ("tp2", "qwen3", "torch", torch.bfloat16),
}


class Listener:
    """Brings back what steps need, and counts what it is told."""

    def __init__(self):
        self.steps, self.passes = 0, []

    def on_backward(self, number):
        self.passes.append(number)

    def on_gradient(self):
        pass

    def on_progress(self):
        pass

    def before_step(self):
        self.session.bring_back()

    def after_step(self):
        self.steps += 1
        self.session.note_step()


def make(layout, name, kind, dtype, **changes):
    """Stages and an optimizer over them."""
    stages = tiny.build(name, layout, dtype=dtype, **changes)
    if kind == "torch":
        return stages, AdamW([p for stage in stages for p in stage.parameters()], lr=1e-2)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=kind != "plain",
        overlap_grad_reduce=kind == "overlapped",
        overlap_param_gather=kind == "overlapped",
    )
    stages = [DistributedDataParallel(stage.config, config, stage) for stage in stages]
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=kind != "plain",
        overlap_param_gather=kind == "overlapped",
        clip_grad=1.0,
    )
    return stages, get_megatron_optimizer(options, stages, use_gloo_process_groups=False)


def backward(stages, optimizer, number, *, is_first=True, is_last=True):
    """Gradients of a loss where one process has a whole model, else made up, added to those of passes before."""
    ids = (IDS + 3 * number + distributed.get_rank()) % tiny.VOCAB
    is_wrapped = not isinstance(optimizer, AdamW)
    if is_first:
        optimizer.zero_grad()
        for stage in stages if is_wrapped else ():
            stage.zero_grad_buffer()
    if len(stages) == 1:
        with nullcontext() if is_last or not is_wrapped else stages[0].no_sync():
            stages[0](ids, POSITIONS, MASK, labels=ids.roll(-1, 1)).float().mean().backward()
    else:
        generator = torch.Generator().manual_seed(number)
        for stage in stages:
            for parameter in stage.parameters():
                parameter.main_grad.add_(torch.randn(parameter.shape, generator=generator))
    if is_wrapped and is_last:
        finalize_model_grads(stages)


def torchs(optimizer):
    """Torch's optimizers within."""
    if isinstance(optimizer, AdamW):
        return [optimizer]
    return [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]


def tensors_of(stages, optimizer):
    """Every parameter, main parameter and state tensor."""
    inner = torchs(optimizer)
    mains = [p for one in inner for group in one.param_groups for p in group["params"]]
    state = [one.state[p] for one in inner for group in one.param_groups for p in group["params"]]
    model = [p for stage in stages for p in stage.parameters()]
    return [t for t in pytree.tree_leaves([model, mains, state]) if isinstance(t, torch.Tensor)]


def gradients_of(stages, optimizer):
    """The gradients of all parameters, in Megatron's buffers where it has any."""
    return [getattr(p, "main_grad", p.grad) for stage in stages for p in stage.parameters()]


def is_same(ours, twins, *, of_gradients=False):
    ours, twins = ((gradients_of if of_gradients else tensors_of)(*one) for one in (ours, twins))
    return len(ours) == len(twins) and all(map(torch.equal, ours, twins))


def park(session):
    """Bytes of state and masters, in host memory and on the device, after both have left."""
    session.look_again()
    for segment in session.segments[:3]:
        if segment.residency is Residency.RESIDENT:
            segment.begin(Residency.OFFLOADED).wait()
    return {segment.name: [segment.size_bytes, segment.device_bytes] for segment in session.segments[:3]}


def enter(session):
    """Bring back what a loop uses before the hooks of a step run, as entering `train()` does."""
    for segment in session.segments:
        if segment.name in session.parked_early:
            segment.begin(Residency.RESIDENT).wait()


def kept_of(session):
    """Bytes that stay on the device, by the first words of what is said of them."""
    found = {}
    for item in session.kept:
        name = item.name.split(";")[0]
        found[name] = found.get(name, 0) + item.size_bytes
    return found


def same_leaves(one, other):
    """Whether nested containers have the same tensors, in place or parked, and the same numbers."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def checked(ours, twins):
    """What `colo.share` says of an optimizer of these stages, and of one of others."""
    return [failure(partial(check_optimizer, ours[1], nn.ModuleList(stages))) for stages, _ in (ours, twins)]


def run(layout, name, kind, dtype):
    layout = tiny.use_layout(layout)
    ours, twins = make(layout, name, kind, dtype), make(layout, name, kind, dtype)
    found = {"checked": checked(ours, twins), "same": [], "parked": [], "passes": []}
    found |= {"kept": [], "late": [], "changed": [], "replicas": [], "at the end": []}
    source = source_of(name, ours[0])
    listener = Listener()
    session = TrainerSession(ours[1], Mover(torch.device("cpu")), region_bytes=1 << 16, events=listener)
    listener.session = session
    found["expected"] = {segment.name: segment.size_bytes for segment in session.segments[:3]}
    for number in range(3):
        found["parked"].append(park(session))
        found["kept"].append(kept_of(session))
        listener.passes.clear()
        before = joined(source)[0]
        enter(session)
        for stages, optimizer in (ours, twins):
            backward(stages, optimizer, number)
        found["passes"].append(len(listener.passes))
        found["late"].append([segment.device_bytes for segment in session.segments[:2]])
        for _, optimizer in (ours, twins):
            assert kind == "torch" or optimizer.step()[0]
            if kind == "torch":
                optimizer.step()
        found["same"].append(is_same(ours, twins))
        session.look_again()  # as a rollout does first, while the other optimizer may still have to gather weights
        after, wrong = joined(source)
        found["replicas"].append(wrong)
        found["changed"].append(sum(not torch.equal(before[name], after[name]) for name in before) / len(after))
    found["steps"] = listener.steps
    for _, optimizer in (ours, twins):
        optimizer.zero_grad()
    found["zeroed"] = [park(session), kept_of(session)]
    for number in range(2):  # gradients of two passes, parked between them
        enter(session)
        for stages, optimizer in (ours, twins):
            backward(stages, optimizer, number, is_first=number == 0, is_last=number == 1)
        if number == 0:
            found["between"] = park(session)["trainer.gradients"]
    found["at the end"].append(is_same(ours, twins, of_gradients=True))
    for _, optimizer in (ours, twins):
        optimizer.step()
    found["at the end"].append(is_same(ours, twins))
    park(session)
    for stage in twins[0] if kind == "overlapped" else ():  # as the session has had it done for the others
        stage.start_param_sync(force_sync=True)
    found["at the end"].append(same_leaves(ours[1].state_dict(), twins[1].state_dict()))
    if kind in ("plain", "torch"):  # the distributed optimizer reads its state from files
        park(session)
        ours[1].load_state_dict(copy.deepcopy(twins[1].state_dict()))
        found["at the end"].append(is_same(ours, twins))
    session.close()
    found["at the end"].append(is_same(ours, twins))
    for stages, optimizer in (ours, twins):
        backward(stages, optimizer, 3)
        optimizer.step()
    found["at the end"].append(is_same(ours, twins))
    model = {p.untyped_storage().data_ptr() for stage in ours[0] for p in stage.parameters()}
    mains = [p for one in torchs(ours[1]) for group in one.param_groups for p in group["params"]]
    found["mains"] = sum(p.numel() for p in mains)
    found["moments"] = sum(2 * p.nbytes for p in mains)
    found["copies"] = sum(p.nbytes for p in mains if p.untyped_storage().data_ptr() not in model)
    found["gradients"] = sum(p.nbytes for stage in ours[0] for p in stage.parameters())
    found["model"] = sum(p.numel() for stage in ours[0] for p in stage.parameters())
    found["optimizers"] = len(torchs(ours[1]))
    return found


def main(results):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    found = {case: run(*options) for case, options in CASES.items()}
    Path(results, f"{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
