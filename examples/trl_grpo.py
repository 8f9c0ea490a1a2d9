"""GRPO with TRL on one copy of the weights: python examples/trl_grpo.py --fast_inference --output_dir out"""

from datasets import Dataset
from trl import ModelConfig, TrlParser, get_peft_config

from colo.testing import tiny_checkpoint
from colo.trl import ColoGRPOConfig, ColoGRPOTrainer


def digits(completions: list[str], **columns: object) -> list[float]:
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def short(completions: list[str], **columns: object) -> list[float]:
    return [1 / (1 + len(text)) for text in completions]


if __name__ == "__main__":
    args, model = TrlParser((ColoGRPOConfig, ModelConfig)).parse_args_and_config()
    trainer = ColoGRPOTrainer(
        model.model_name_or_path or str(tiny_checkpoint(f"{args.output_dir}/tiny")),
        [digits, short],
        args,
        train_dataset=Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(10) for b in range(10)]}),
        peft_config=get_peft_config(model),
    )
    trainer.train()
    trainer.save_model()
    print("reward", *(f"{entry['reward']:.2f}" for entry in trainer.state.log_history if "reward" in entry))
    if args.fast_inference:
        print(trainer.colo.report())
        trainer.colo.close()
