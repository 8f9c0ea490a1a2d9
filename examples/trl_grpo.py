"""GRPO with TRL, and vLLM on the trainer's own weights: python examples/trl_grpo.py --fast_inference

Every option of TRL's GRPOConfig works, also from a file: --config run.yaml. `--colo_engine torch` needs no vLLM, and
`--use_cpu --bf16 false` no GPU.
"""

from dataclasses import dataclass, field

from datasets import Dataset
from trl import TrlParser

from colo.testing import tiny_checkpoint
from colo.trl import ColoGRPOConfig, ColoGRPOTrainer


@dataclass
class Script:
    model: str | None = field(default=None, metadata={"help": "Folder or hub id; by default a tiny model is made."})


def digits(completions: list[str], **columns: object) -> list[float]:
    """How much of a completion is digits."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def short(completions: list[str], **columns: object) -> list[float]:
    """More for shorter completions."""
    return [1 / (1 + len(text)) for text in completions]


def main() -> None:
    script, args = TrlParser((Script, ColoGRPOConfig)).parse_args_and_config()
    model = script.model or str(tiny_checkpoint(f"{args.output_dir}/tiny"))
    prompts = [f"{a}+{b}=" for a in range(10) for b in range(10)]
    trainer = ColoGRPOTrainer(model, [digits, short], args, train_dataset=Dataset.from_dict({"prompt": prompts}))
    trainer.train()
    trainer.save_model()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print("reward", " ".join(f"{reward:.2f}" for reward in rewards))
    if args.fast_inference:
        print(trainer.colo.report())
        trainer.colo.close()


if __name__ == "__main__":  # vLLM in a process of its own imports this file
    main()
