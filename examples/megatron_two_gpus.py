"""GRPO on a Megatron model that tensor parallelism cuts in two, each rank of which samples from an engine of its own.

    torchrun --nproc-per-node 2 examples/megatron_two_gpus.py                             # a tiny model, CPUs or GPUs
    torchrun --nproc-per-node 2 examples/megatron_two_gpus.py --model Qwen/Qwen3-0.6B     # a folder or a hub id

A rank holds half of every layer, and its engine takes the other half from the other rank, in slices. Ranks sample
different sums, and train on all of them together. The reward is 1 for the right sum of two digits. Without `--model` a
small model is first shown sums until it answers about a fifth of them. It wants `pip install -e ".[megatron]"`.
"""

from __future__ import annotations

import argparse
import os
import random
import re
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed
from transformers import AutoModelForCausalLM, AutoTokenizer

import colo
from colo.demo import ALPHABET, warm_up
from colo.rl.loop import Batch
from colo.rl.loss import group_advantages, grpo_loss
from colo.testing import tiny_tokenizer
from colo.weights.sources.megatron import MegatronSource
from colo.weights.sources.module import ModuleSource

PROBLEMS, GROUP = 25, 8  # problems a step on each rank, completions for each
EVERY_SUM = [(a, b) for a in range(10) for b in range(10)]
# Options of Megatron's and what transformers calls them.
SAME = {"num_layers": "num_hidden_layers", "ffn_hidden_size": "intermediate_size", "hidden_size": "hidden_size"}
SAME |= {"num_attention_heads": "num_attention_heads", "num_query_groups": "num_key_value_heads"}
SAME |= {"kv_channels": "head_dim", "layernorm_epsilon": "rms_norm_eps"}
FUSIONS = ["bias_activation", "masked_softmax", "apply_rope", "bias_dropout", "gradient_accumulation"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="folder or hub id of a Qwen3 checkpoint; by default a tiny model is made")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", help="cpu or cuda; by default cuda where there is one")
    return parser.parse_args()


def join(device: str | None) -> torch.device:
    """Join the other rank, and return this rank's device."""
    own = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if own.type == "cpu":
        torch.set_num_threads(1)  # a model this small gains nothing from more
        torch.cuda.current_device = lambda: own  # Megatron asks for it wherever it runs
    else:
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
    distributed.init_process_group("gloo" if own.type == "cpu" else "cpu:gloo,cuda:nccl")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
    tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)  # nothing is drawn: there is no dropout
    return own


def build(model: Any, device: torch.device) -> GPTModel:
    """This rank's stage of a model like that of transformers, with its weights."""
    hf = model.config
    options = {name: getattr(hf, other) for name, other in SAME.items()} | {f"{name}_fusion": False for name in FUSIONS}
    options |= {"normalization": "RMSNorm", "qk_layernorm": True, "gated_linear_unit": True, "activation_func": F.silu}
    options |= {"hidden_dropout": 0.0, "attention_dropout": 0.0, "add_bias_linear": False, "persist_layer_norm": False}
    stage = GPTModel(
        TransformerConfig(tensor_model_parallel_size=2, use_cpu_initialization=True, **options),
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=-(-hf.vocab_size // 128) * 128,  # Megatron pads it, and colo cuts the padding
        max_sequence_length=hf.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=hf.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        parallel_output=False,  # every rank gets the logits of the whole vocabulary
    )
    weights = ModuleSource(model).tensors()
    for part in MegatronSource([stage], family="qwen3", vocab_size=hf.vocab_size).parts():
        region = tuple(slice(start, start + size) for start, size in zip(part.offset, part.shape, strict=True))
        part.tensor.copy_(weights[part.name].detach()[region])
    return stage.to(device)


def share(args: argparse.Namespace, device: torch.device) -> colo.Runtime:
    """A runtime over this rank's stage and an engine of this rank's."""
    if args.model is not None:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
    else:
        torch.manual_seed(0)
        model, tokenizer = warm_up(torch.device("cpu"), seed=0, tell=lambda words: None), tiny_tokenizer(ALPHABET)
    stage = build(model, device)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-6 if args.model else 5e-4, weight_decay=0.0)
    config = colo.RuntimeConfig(offload=colo.Offload.ALWAYS)
    engine, _ = colo.start(model.config, device=device, dtype=torch.float32, config=config)
    return colo.share(engine, [stage], optimizer, tokenizer=tokenizer, config=config)


def train_step(rt: colo.Runtime, completions: list[colo.Completion], rewards: list[float]) -> None:
    """One optimizer step on what both ranks have sampled, of which each computes its part."""
    batch = Batch.of(completions, rt.device)  # padded on the right, where causal attention does not look
    ids, mask = batch.input_ids_BT, batch.completion_mask_BT[:, 1:]
    above = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=rt.device).triu(1)[None, None]
    logits = rt.model[0](ids, torch.arange(ids.shape[1], device=rt.device).expand_as(ids), above)
    logits = logits[:, :-1, : rt.engine.vocab_size].float()  # without the padding
    logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    advantages = group_advantages(torch.tensor(rewards, device=rt.device), GROUP)
    found = grpo_loss(logprobs, None, advantages, mask, engine_logprobs_BT=batch.engine_logprobs_BT)
    found.loss.backward()
    for name, parameter in rt.model.named_parameters():
        if "q_layernorm" in name or "k_layernorm" in name:  # whole on each rank, with gradients of its own heads only
            distributed.all_reduce(parameter.grad)  # as Megatron's finalize_model_grads does with its own optimizer
    rt.optimizer.step()  # the engines sample from the new weights from here on
    rt.optimizer.zero_grad()
    rt.log(mismatch=float(found.metrics["mismatch_mean"]))  # colo does not run Megatron's passes itself


def main() -> None:
    args = arguments()
    device = join(args.device)
    rank, generator = distributed.get_rank(), random.Random(distributed.get_rank())  # each draws sums of its own
    with share(args, device) as rt:
        for step in range(args.steps):
            sums, told = generator.sample(EVERY_SUM, PROBLEMS), [None, None]
            with rt.rollout():
                completions = rt.generate([f"{a}+{b}=" for a, b in sums], n=GROUP, max_tokens=4, seed=step)
            answers = [sum(sums[completion.prompt_index]) for completion in completions]
            right = [re.match(rf"\s*{a}(?!\d)", c.text or "") for a, c in zip(answers, completions, strict=True)]
            distributed.all_gather_object(told, [(c, float(bool(r))) for c, r in zip(completions, right, strict=True)])
            completions, rewards = map(list, zip(*told[0], *told[1], strict=True))
            with rt.train():
                train_step(rt, completions, rewards)
            rt.log(reward=(mean := sum(rewards) / len(rewards)))
            if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
                print(f"step {step:3}  reward {mean:.2f}")
        if rank == 0:
            print(rt.report(), f"how weights reach the engine: {rt.transport.reason}", sep="\n")
            print(f"bytes that a publication brings from other ranks: {rt.transport.bytes_to_receive}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
