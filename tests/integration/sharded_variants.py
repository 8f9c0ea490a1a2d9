"""One rank of `test_sharded_variants.py`: a trainer that FSDP2 has sharded, as people write it in other ways.

torchrun --nproc-per-node 2 sharded_variants.py RESULTS
"""

import copy
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model
from sharded import CPU, GREEDY, IDS, backward, failure, gap, is_same
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, Qwen3Config

import colo
from colo.config import Offload, RuntimeConfig
from colo.engines.torch import TorchEngine
from colo.memory.offload import Mover
from colo.units import MIB

CONFIG = Qwen3Config(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=101,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    eos_token_id=None,
)


def make(dtype=torch.float32, wrap=lambda model: model):
    """The same model twice; on every rank alike."""
    torch.manual_seed(0)
    model = wrap(AutoModelForCausalLM.from_config(CONFIG, dtype=dtype))
    return model, copy.deepcopy(model)


def layers_of(model):
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).model.layers


def shard(model, **options):
    mesh = init_device_mesh("cpu", (2,))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def share(model, optimizer, dtype=torch.float32, **options):
    engine = TorchEngine(CONFIG, device="cpu", dtype=dtype, kv_cache_bytes=MIB, mover=Mover(CPU), **options)
    rt = colo.share(engine, model, optimizer)
    rt.scheduler.offload = Offload.ALWAYS
    return rt


def masters():
    """Weights in 16 bits with fp32 masters: bit for bit the unsharded run, and half the bytes travel."""
    model, twin = make(torch.bfloat16)
    shard(model)
    make_optimizer = colo.optim.MasterWeights(lambda params: AdamW(params, lr=1e-3), remainders=False)
    rt, optimizer = share(model, make_optimizer(model.parameters()), torch.bfloat16), make_optimizer(twin.parameters())
    away, same = [], []
    for _ in range(3):
        with rt.rollout():
            rt.generate([[1, 2, 3]], **GREEDY)
            away.append(rt.scheduler.segments["trainer.master_weights"].device_bytes)
        with rt.train():
            backward(rt.model, twin)
            rt.optimizer.step()
            rt.optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        same.append(is_same(model.parameters(), twin.parameters()))
    taken = rt.optimizer.state_dict()
    masters = [taken["state"][i]["master_weight"] for i in taken["state"]]
    expected = [optimizer.state_dict()["state"][i]["master_weight"] for i in taken["state"]]
    found = {"same": same, "away": away, "masters": is_same(masters, expected)}
    elements = sum(p.numel() - p.to_local().numel() for p in model.parameters())
    found["received"] = [rt.transport.bytes_to_receive, 2 * elements]
    rt.close()
    return found


def adapters():
    """A sharded adapter over sharded weights: bit for bit the unsharded run, and what engines sample from."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model, twin = make(wrap=lambda model: get_peft_model(model, config))
    shard(model)
    trained, others = ([p for p in m.parameters() if p.requires_grad] for m in (model, twin))
    rt, optimizer = share(model, AdamW(trained, lr=1e-2)), AdamW(others, lr=1e-2)
    same, gaps = [], []
    for _ in range(3):
        gaps.append(gap(twin, rt.generate([[1, 2, 3]], **GREEDY)))
        with rt.train():
            backward(rt.model, twin)
            rt.optimizer.step()
            rt.optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        same.append(is_same(model.parameters(), twin.parameters()))
    found = {"same": same, "gaps": gaps, "adapter": [sum(p.nbytes for p in trained)]}
    found["adapter"] += [publication.num_bytes for publication in rt.publications]
    with torch.no_grad():
        if distributed.get_rank():  # which torch does not count, and one rank alone can see
            trained[0].to_local().data.add_(1)
        others[0].copy_(trained[0].full_tensor())
    found["gaps"].append(gap(twin, rt.generate([[1, 2, 3]], **GREEDY)))
    rt.close()
    return found


def unreduced():
    """Whole gradients between two passes are counted, parked and brought back: bit for bit as without a rollout."""
    found = {}
    policies = {"plain": {}, "mixed": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}}
    for name, policy in policies.items():
        ends, whole, away, host = [], 0, 0, 0
        for parks in (False, True):
            model, _ = make()
            shard(model, mp_policy=MixedPrecisionPolicy(**policy))
            rt = share(model, AdamW(model.parameters(), lr=1e-2))
            for _ in range(2):
                with rt.train():
                    model.set_requires_gradient_sync(False)
                    backward(model)
                    backward(model)
                    whole = rt.scheduler.segments["trainer.gradients"].device_bytes
                if parks:
                    with rt.rollout():
                        rt.generate([[1, 2, 3]], **GREEDY)
                        segment = rt.scheduler.segments["trainer.gradients"]
                        away, host = segment.device_bytes, segment.host_bytes
                with rt.train():
                    model.set_requires_gradient_sync(True)
                    backward(model)
                    rt.optimizer.step()
                    rt.optimizer.zero_grad()
            ends.append([p.to_local().clone() for p in model.parameters()])
            rt.close()
        same = all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
        expected = sum(p.nbytes for p in model.parameters())
        found[name] = {"same": same, "whole": whole, "expected": expected, "away": away, "host": host}
    return found


def accelerated():
    """Model and optimizer as accelerate's FSDP2 plugin prepares them; on a CPU its state has to be told to use that."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    model, twin = make()
    model, prepared = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-2))
    rt, optimizer = share(model, prepared), AdamW(twin.parameters(), lr=1e-2)
    found = {"kinds": [type(model).__name__, type(rt.optimizer).__name__, rt.transport.name], "gaps": [], "same": []}
    for _ in range(3):
        with rt.rollout():
            found["gaps"].append(gap(twin, rt.generate([[1, 2, 3]], **GREEDY)))
            found["away"] = rt.scheduler.segments["trainer.optimizer"].device_bytes
        with rt.train():
            accelerator.backward(rt.model(input_ids=IDS, labels=IDS).loss)
            backward(twin)
            rt.optimizer.step()
            rt.optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        found["same"].append(is_same(model.parameters(), twin.parameters()))
    rt.close()
    return found


def admission():
    """What both ranks say when a runtime does not fit on one."""
    model, _ = make()
    shard(model)
    engine = TorchEngine(CONFIG, device="cpu", dtype=torch.float32, kv_cache_bytes=MIB, mover=Mover(CPU))
    limit = MIB + 100_000 if distributed.get_rank() else 64 * MIB
    config = RuntimeConfig(device_limit_bytes=limit)
    return failure(lambda: colo.share(engine, model, AdamW(model.parameters()), config=config))


def out_of_step():
    """What both ranks say when one alone catches an exception within a rollout and skips a phase, and a gap after."""
    model, twin = make()
    shard(model)
    rt = share(model, AdamW(model.parameters()))
    rank, said = distributed.get_rank(), []
    with rt.rollout():
        try:
            rt.generate([[1, 2, 3] if rank == 0 else [10_000]], **GREEDY)  # no token of the vocabulary
        except ValueError as error:
            said.append(type(error).__name__)

    def go_on():
        with rt.rollout() if said else rt.train():
            pass

    said.append(failure(go_on))
    found = gap(twin, rt.generate([[1, 2, 3]], **GREEDY))
    rt.close()
    return said, found


def main(results):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    found = {case.__name__: case() for case in (masters, adapters, unreduced, accelerated, admission, out_of_step)}
    Path(results, f"{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
