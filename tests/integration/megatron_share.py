"""One rank of `test_megatron_share.py`: runtimes over Megatron's stages, in training by Megatron's own schedules.

torchrun --nproc-per-node 2 megatron_share.py RESULTS
"""

import json
import sys
from pathlib import Path

import megatron_steps as steps
import megatron_tiny as tiny
import torch
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron_ranks import failure, joined, source_of
from megatron_twins import config_of, filled
from torch import distributed
from torch.optim import AdamW

import colo
from colo.units import MIB
from colo.weights.sources.names import FAMILIES

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
MICROBATCHES = 2
PARKED = ("trainer.optimizer", "trainer.master_weights", "trainer.gradients")
CASES = {  # layout, model, optimizer, dtype
    "replicas": ("tp1", "qwen3_tied", "overlapped", torch.bfloat16),
    "virtual stages": ("pp2vp2", "qwen3", "distributed", torch.bfloat16),
    "experts": ("ep2", "deepseek_v3", "distributed", torch.bfloat16),
    "further tokens": ("pp2", "glm4_moe_mtp", "distributed", torch.float32),
    "torch's": ("tp2", "qwen2", "torch", torch.float32),
}


def train(stages, optimizer, number, before_step=lambda: None):
    """A step of Megatron's schedule for its layout, on microbatches that depend on the number."""
    is_wrapped = not isinstance(optimizer, AdamW)
    for stage in stages:
        stage.config.finalize_model_grads_func = finalize_model_grads if is_wrapped else None
        if is_wrapped:
            stage.zero_grad_buffer()
    optimizer.zero_grad()
    batches = [(steps.IDS + 5 * number + index) % tiny.VOCAB for index in range(MICROBATCHES)]

    def forward(batch, stage):
        ids = next(batch)
        losses = stage(ids, steps.POSITIONS, steps.MASK, labels=ids.roll(-1, 1))
        return losses, lambda out: (out.float().mean(), {})

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(batches) for _ in stages],
        model=stages,
        num_microbatches=MICROBATCHES,
        seq_length=steps.IDS.shape[1],
        micro_batch_size=steps.IDS.shape[0],
        forward_only=False,
    )
    before_step()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def gap(name, stages, completions, **changes):
    """The largest |log p(engine) - log p(transformers' model with the stages' weights)|."""
    twin, found = filled(name, joined(source_of(name, stages))[0], **changes), 0.0
    for c in completions:
        ids = torch.tensor([c.prompt_token_ids + c.token_ids])
        start = len(c.prompt_token_ids)
        logprobs = twin(input_ids=ids).logits[0, start - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(-1, ids[0, start:, None])[:, 0]
        found = max(found, float((expected - torch.tensor(c.logprobs)).abs().max()))
    return found


def engine_of(name):
    engine, _ = colo.start(config_of(name), dtype=torch.float32, config=colo.RuntimeConfig(kv_cache_bytes=MIB))
    return engine


def run(layout, name, kind, dtype):
    """Two cycles and two steps more, beside a twin without colo."""
    layout = tiny.use_layout(layout)
    ours, twins = steps.make(layout, name, kind, dtype), steps.make(layout, name, kind, dtype)
    rt = colo.share(engine_of(name), *ours, config=colo.RuntimeConfig(offload="always"))
    found = {"transport": rt.transport.name, "gaps": [], "away": [], "same": [], "versions": []}
    found |= {"kept": [], "ready": []}
    segments = rt.scheduler.segments

    def note():
        found["ready"].append(segments[PARKED[1]].residency)

    found["owner"] = [colo.Runtime.of(part) is rt for part in (ours[0], ours[0][0], ours[1], rt.model)]
    found["taken"] = failure(lambda: colo.share(engine_of(name), *ours))
    for number in range(2):
        with rt.rollout():
            completions = rt.generate([[1, 2, 3], [4, 5, 6, 7]], **GREEDY)
            found["away"].append([segments[segment].device_bytes for segment in PARKED])
            found["kept"].append(segments["trainer.kept"].size_bytes)
        found["versions"] += [c.weights_version for c in completions]
        found["gaps"].append(gap(name, ours[0], completions))
        with rt.train():
            note()
            train(*ours, number)
        train(*twins, number)
        for stage in twins[0] if kind == "overlapped" else ():  # as leaving `train()` has had it done for the others
            stage.start_param_sync(force_sync=True)
        found["same"].append(steps.is_same(ours, twins))
    found["gaps"].append(gap(name, ours[0], rt.generate([[1, 2]], **GREEDY)))
    found["away"].append([segments[segment].device_bytes for segment in PARKED[:2]])
    train(*ours, 2, note)  # without `train()`
    train(*twins, 2)
    found["received"] = [rt.transport.received_bytes, rt.transport.bytes_to_receive]
    found["publications"] = len(rt.publications)
    parameters = [p for stage in ours[0] for p in stage.parameters()]
    found["parameters"] = [segments["trainer.parameters"].size_bytes, sum(p.nbytes for p in parameters)]
    found["sizes"] = [segments[segment].size_bytes for segment in PARKED]
    found["facts"] = rt.report().facts
    rt.close()
    for stages, optimizer in (ours, twins):
        train(stages, optimizer, 3)
    found["same"].append(steps.is_same(ours, twins))
    return found


def refused():
    """What is said of stages that cannot be shared, on every rank alike, and that they can be after all."""
    layout, is_last = tiny.use_layout("tp2"), distributed.get_rank() == 1
    stages, optimizer = steps.make(layout, "qwen3", "torch", torch.float32)
    others, _ = steps.make(layout, "qwen3", "torch", torch.float32)
    foreign = AdamW(others[0].parameters())
    renamed = {**FAMILIES["qwen3"]}
    del renamed["self_attention.linear_proj.weight"]
    engine = engine_of("qwen3")

    def share(*parts):
        try:
            return failure(lambda: colo.share(*parts).close())
        except ValueError as error:
            return str(error)

    said = [
        share("torch", stages, optimizer),
        share(engine, [torch.nn.Linear(2, 2)], optimizer),
        share(engine, [], optimizer),
        share(engine, stages, foreign if is_last else optimizer),
        share(engine_of("qwen2"), stages, optimizer),
    ]
    with colo.share(engine, stages, optimizer) as rt:
        said.append(failure(lambda: colo.check(rt)))
    said.append(failure(lambda: source_of("qwen3", stages, family=renamed)))
    table = {**renamed, "self_attention.linear_proj.weight": "self_attn.o_proj.weight"}
    said.append(share(engine_of("qwen3"), source_of("qwen3", stages, family=table), optimizer))
    return said


def main(results):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    found = {case: run(*options) for case, options in CASES.items()} | {"refused": refused()}
    Path(results, f"{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
