"""One process of `test_megatron.py`: unsharded Megatron models beside transformers' with the same weights.

python megatron_alone.py RESULTS
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

import megatron_ranks as ranks
import megatron_tiny as tiny
import torch
from megatron_twins import CONFIGS, of_transformers
from safetensors.torch import load_file
from torch import distributed


def names_of(model):
    """Names and shapes of the checkpoint that transformers writes of a model."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: list(tensor.shape) for name, tensor in load_file(Path(folder, "model.safetensors")).items()}


@torch.no_grad()
def compare(name):
    """How far logits of both are apart, how large they are, and the names and shapes that only one of them has."""
    stages = tiny.build(name, tiny.use_layout("tp1"), dtype=torch.float32)
    wholes, _ = ranks.joined(ranks.source_of(name, stages))
    model, told = of_transformers(name, wholes)
    ids = torch.randint(0, tiny.VOCAB, (2, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)[None, None]
    positions = torch.arange(16)[None].expand(2, -1)
    theirs = stages[0].eval()(ids, positions, mask)[..., : tiny.VOCAB]
    mine = model.eval()(ids).logits
    ours = {name: list(tensor.shape) for name, tensor in wholes.items()}.items()
    return {
        "difference": float((mine - theirs).abs().max()),
        "largest": float(mine.abs().max()),
        "spread": float(mine.std()),
        "told": [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in told[kind]],
        "others": [name for name, shape in names_of(model).items() if (name, shape) not in ours],
    }


def main(results):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    layout = tiny.use_layout("tp1")
    found = {"sums": {name: ranks.look(name, layout) for name in tiny.MODELS}}
    found["transformers"] = {name: compare(name) for name in CONFIGS}
    Path(results, "0.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
