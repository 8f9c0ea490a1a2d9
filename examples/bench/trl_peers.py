"""TRL's GRPOTrainer on one GPU, in its own colocate mode and with colo's flag: same data, same seeds.

    python examples/bench/trl_peers.py --shape 0.6b --steps 6 --json trl_peers.json

Each side runs in a process of its own, in turns. It prints the most device memory that the driver saw in use, seconds a
step (median of all but the first two), seconds in which weights were sent or phases changed, and the last reward.
`--device cpu` runs the flag's side alone, with a tiny model, to see that the script works.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""Qwen3's, with random weights."""

SIDES = {
    "colo's flag, bf16 with fp32 masters": {"stock": False, "dtype": "bfloat16"},
    "TRL colocate, bf16": {"stock": True, "dtype": "bfloat16"},
    "TRL colocate, bf16, sleep mode": {"stock": True, "dtype": "bfloat16", "vllm_enable_sleep_mode": True},
    "TRL colocate, fp32 as it loads": {"stock": True, "dtype": None},
}


def checkpoint(shape: str, folder: Path) -> Path:
    """Write a checkpoint of random weights with a tokenizer of characters."""
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

    from colo.testing import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    vocabulary = 151936 if shape != "tiny" else len(tokenizer)
    heads = (
        {"num_key_value_heads": 8, "head_dim": 128} if shape != "tiny" else {"num_key_value_heads": 2, "head_dim": 32}
    )
    config = Qwen3Config(
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=shape != "8b",
        **SHAPES[shape],
        **heads,
        **ends,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def low_tokens(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
    """The share of tokens with an even id."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


class Peak(threading.Thread):
    """The most device memory in use, as the driver sees it, every 10 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.used_bytes = 0

    def run(self) -> None:
        while torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            self.used_bytes = max(self.used_bytes, total - free)
            time.sleep(0.01)


def run_side(name: str, folder: Path, options: argparse.Namespace) -> dict[str, object]:
    """Train by one side; what it took."""
    from datasets import Dataset
    from trl import GRPOTrainer

    from colo.trl import ColoGRPOConfig, ColoGRPOTrainer

    side, on_cpu = dict(SIDES[name]), options.device == "cpu"
    stock, dtype = side.pop("stock"), side.pop("dtype")
    if stock:
        side |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": options.utilization}
    else:
        side |= {"fast_inference": True, "colo_kv_cache_mib": options.kv_cache_mib, "colo_engine": options.engine}
    args = ColoGRPOConfig(
        str(folder / "out"),
        use_cpu=on_cpu,
        bf16=not on_cpu,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=options.tokens,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        model_init_kwargs={"dtype": dtype} if dtype and not on_cpu else None,
        vllm_max_model_length=64 + options.tokens,
        **side,
    )
    prompts = [f"{a}+{b}=" for a in range(10) for b in range(10)]
    peak = Peak()
    peak.start()
    began_s = time.perf_counter()
    kind = GRPOTrainer if stock else ColoGRPOTrainer
    trainer = kind(str(folder), [low_tokens], args, train_dataset=Dataset.from_dict({"prompt": prompts}))
    ready_s = time.perf_counter() - began_s
    synced_s = _time_syncs(trainer) if stock else []
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    steps = [entry["step_time"] for entry in history][2:] or [history[-1]["step_time"]]
    between = synced_s or [entry["colo/switch_s"] + entry.get("colo/sync_s", 0.0) for entry in history]
    if not stock:
        trainer.colo.close()
    return {
        "side": name,
        "start_s": round(ready_s, 1),
        "step_s": round(statistics.median(steps), 3),
        "step_s_range": [round(min(steps), 3), round(max(steps), 3)],
        "between_s": round(statistics.median(between[2:] or between), 4),
        "peak_gib": round(peak.used_bytes / 2**30, 2),
        "reward": round(history[-1]["reward"], 3),
        "mismatch": history[-1].get("sampling/sampling_logp_difference/mean"),
    }


def _time_syncs(trainer: object) -> list[float]:
    """Seconds of every update of vLLM's weights, filled while the trainer runs."""
    generation, seconds = trainer.vllm_generation, []
    sync = generation.sync_weights

    def timed() -> None:
        began_s = time.perf_counter()
        sync()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)

    generation.sync_weights = timed
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--utilization", type=float, default=0.3, help="TRL's default for its vLLM")
    parser.add_argument("--kv-cache-mib", type=int, default=8192)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sides", default="", help="only those whose name contains this")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print("RESULT " + json.dumps(run_side(options.side, options.folder, options)), flush=True)
        return
    sides = [n for n in SIDES if options.sides in n and (options.device == "cuda" or not SIDES[n]["stock"])]
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = checkpoint(options.shape, Path(place) / "model")
        torch.cuda.empty_cache()
        for name in sides * options.rounds:
            command = [sys.executable, *sys.argv, "--side", name, "--folder", str(folder)]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            found = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")]
            last = (ran.stderr.strip().splitlines() or ["no output"])[-1]
            rows.append(json.loads(found[-1][7:]) if found else {"side": name, "failed": last})
            print(rows[-1], flush=True)
            if not found:
                print(ran.stderr[-1500:], file=sys.stderr)
    if options.json:
        machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        shown = {key: str(value) for key, value in vars(options).items() if key not in ("json", "side", "folder")}
        options.json.write_text(json.dumps({"device": machine, "options": shown, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
