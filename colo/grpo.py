"""`colo grpo`: a checkpoint and a dataset in, a trained checkpoint out. The loop itself is `colo.rl.loop`.

Everything that can be wrong with what was given is found before the model is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoTokenizer

from colo.assembly.arguments import check_path
from colo.assembly.launch import launch
from colo.assembly.starting import refuse_adapted_head
from colo.config import RuntimeConfig
from colo.engines.embedded.waves import positions_of
from colo.engines.text import check_prompts, encode_prompts
from colo.errors import Unsupported
from colo.rl.dataset import Dataset, load_rows, shuffled
from colo.rl.loop import GRPOConfig, grpo
from colo.rl.loss import GRPOLossConfig
from colo.rl.output import OutputFolder
from colo.rl.problems import Problem
from colo.rl.rewards import RewardFunction, check_columns, named_rewards
from colo.runtime import Runtime
from colo.trainer.master_weights import MasterWeights
from colo.units import MIB

Tell = Callable[[str], None]
OnStep = Callable[[dict[str, float]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class GRPORun:
    """What `colo grpo` is given. Names are those of `trl grpo`, and so are defaults where not said otherwise."""

    model_name_or_path: str
    dataset_name: str
    """A file of JSON lines, a folder, or a dataset on the hub."""

    reward_funcs: tuple[str, ...]
    """`module:function` or `path.py:function` each."""

    output_dir: Path
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    reward_weights: tuple[float, ...] = ()
    """One for each reward, or none for 1 each."""

    overwrite_output_dir: bool = False
    max_steps: int = -1
    """Optimizer steps; -1 for `num_train_epochs`."""

    num_train_epochs: float = 3.0
    learning_rate: float = 1e-6
    """Constant: there is no schedule."""

    per_device_train_batch_size: int = 8
    """Completions of one forward and backward pass."""

    gradient_accumulation_steps: int = 1
    """Passes for each optimizer step."""

    num_generations: int = 8
    max_completion_length: int = 512
    temperature: float = 1.0
    beta: float = 0.0
    """Weight of the KL term."""

    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    seed: int = 42
    engine: Literal["torch", "vllm"] = "torch"
    kv_cache_mib: int | None = None
    """Size of the KV cache; by default what fits."""

    device: str | None = None
    dtype: str | None = None
    """The weights' own; by default bfloat16 on a GPU and float32 on a CPU."""

    def __post_init__(self) -> None:
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations must be at least 2, but is {self.num_generations}: advantages compare the "
                "completions of one prompt"
            )
        if self.num_completions % self.num_generations:
            raise ValueError(
                f"per_device_train_batch_size {self.per_device_train_batch_size} times gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps} is {self.num_completions} completions a step, which are not whole "
                f"groups of num_generations {self.num_generations}: change one of them"
            )
        if self.reward_weights and len(self.reward_weights) != len(self.reward_funcs):
            raise ValueError(
                f"there are {len(self.reward_weights)} reward_weights for {len(self.reward_funcs)} reward_funcs: give "
                "one for each, in their order"
            )
        for name in ("learning_rate", "temperature", "num_train_epochs"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be positive and finite, but is {getattr(self, name)}")
        if self.max_steps < 1 and self.max_steps != -1:
            raise ValueError(f"max_steps must be at least 1, or -1 for num_train_epochs, but is {self.max_steps}")
        self.loop_config()

    @property
    def num_completions(self) -> int:
        """Completions for each optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def prompts_per_step(self) -> int:
        """Prompts for each optimizer step."""
        return self.num_completions // self.num_generations

    def num_steps(self, num_rows: int) -> int:
        """Optimizer steps for a dataset of so many rows."""
        if self.max_steps > 0:
            return self.max_steps
        return max(1, math.ceil(self.num_train_epochs * num_rows / self.prompts_per_step))

    def loop_config(self) -> GRPOConfig:
        """Settings of the loop. Raises: `ValueError` for numbers that it does not take."""
        return GRPOConfig(
            group_size=self.num_generations,
            max_tokens=self.max_completion_length,
            temperature=self.temperature,
            micro_batch_size=self.per_device_train_batch_size,
            loss=GRPOLossConfig(kl_coefficient=self.beta),
            seed=self.seed,
        )


def train(run: GRPORun, *, tell: Tell = lambda text: None, on_step: OnStep = lambda metrics: None) -> Path:
    """Train, and save model (or adapter) and tokenizer: the folder that they are in.

    `on_step` gets the metrics of each step with `step`, `max_steps`, `epoch` and `seconds`. What was trained before an
    interrupt or an error is saved too, which `tell` says, and both are raised.

    Raises: `ValueError` and `OSError` for what was given, before the model is loaded; as `launch` and `grpo`.
    """
    output = OutputFolder(run.output_dir, overwrite=run.overwrite_output_dir)
    check_path(run.model_name_or_path)
    if run.use_peft:
        refuse_adapted_head(run.model_name_or_path, _lora(run))
    rewards = named_rewards([load_function(name) for name in run.reward_funcs])
    weights = dict(zip(rewards, run.reward_weights, strict=True)) if run.reward_weights else None
    dataset = load_rows(run.dataset_name, config=run.dataset_config, split=run.dataset_train_split)
    for name, function in rewards.items():
        check_columns(name, function, dataset.columns)
    plan = shuffled(len(dataset.rows), run.prompts_per_step, run.num_steps(len(dataset.rows)), run.seed)
    tokenizer = AutoTokenizer.from_pretrained(run.model_name_or_path)
    longest = check_rows(dataset, sorted({row for rows in plan for row in rows}), run, tokenizer)
    tell(f"loading {run.model_name_or_path}: {len(plan)} steps of {run.prompts_per_step} prompts")
    torch.manual_seed(run.seed)
    with _launch(run, tokenizer, longest) as rt:
        batches = ([dataset.problem(row) for row in rows] for rows in plan)
        try:
            _train(rt, batches, rewards, weights, run, len(dataset.rows), len(plan), on_step)
        except BaseException as error:
            if rt.weights_version and not isinstance(error, GeneratorExit):
                _save_what_there_is(output, rt, tokenizer, tell)
            raise
        path = output.save(rt.model, tokenizer)
    tell(f"saved to {path}")
    return path


def check_rows(dataset: Dataset, rows: list[int], run: GRPORun, tokenizer: Any) -> int:
    """Tokens of the longest prompt. Raises: `ValueError` for the first row that cannot be sampled for."""
    config = AutoConfig.from_pretrained(run.model_name_or_path)
    vocab_size, num_positions = config.get_text_config().vocab_size, positions_of(config).count
    longest = 0
    for row in rows:
        prompt = dataset.rows[row]["prompt"]
        try:
            if isinstance(prompt, Mapping):
                raise ValueError("prompt 0 is a single message: give a list of messages")
            (token_ids,) = encode_prompts([prompt], tokenizer)
            check_prompts([token_ids], vocab_size, num_positions)
        except (TypeError, ValueError, Unsupported) as error:
            words = str(error).replace("prompt 0", "its prompt")
            raise ValueError(f"row {row + 1} of {dataset.name}: {words}") from error
        longest = max(longest, len(token_ids))
    return longest


def load_function(name: str) -> RewardFunction:
    """A function by `module:function` or `path.py:function`. Raises: `ValueError` where there is none."""
    place, _, wanted = name.rpartition(":")
    if not place or not wanted:
        raise ValueError(f"{name!r} names no reward: give module:function, or path.py:function")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    except (Exception, SystemExit) as error:
        raise ValueError(f"reward {name!r} cannot be loaded ({type(error).__name__}: {error})") from error
    function = getattr(module, wanted, None)
    if not callable(function):
        there = ", ".join(
            n for n, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__
        )
        raise ValueError(f"{place} has no function {wanted!r}, but {there or 'none'}: name one of those")
    found: RewardFunction = function
    return found


def _load_module(name: str) -> Any:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it
    return importlib.import_module(name)


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"colo_rewards:{path.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _launch(run: GRPORun, tokenizer: Any, longest: int) -> Runtime:
    options: dict[str, Any] = {}
    if run.engine == "vllm":  # a whole context would ask for a KV cache as large
        config = AutoConfig.from_pretrained(run.model_name_or_path)
        needed, most = longest + run.max_completion_length, positions_of(config).count
        options["max_model_len"] = needed if most is None else min(needed, most)
    kv_cache_bytes = None if run.kv_cache_mib is None else run.kv_cache_mib * MIB
    return launch(
        run.model_name_or_path,
        engine=run.engine,
        engine_options=options,
        lora=_lora(run) if run.use_peft else None,
        optimizer=lambda params: _optimizer(list(params), run.learning_rate),
        device=run.device,
        dtype=run.dtype,
        tokenizer=tokenizer,
        config=RuntimeConfig(kv_cache_bytes=kv_cache_bytes),
    )


def _lora(run: GRPORun) -> Any:
    from peft import LoraConfig

    modules = list(run.lora_target_modules)
    return LoraConfig(
        r=run.lora_r,
        lora_alpha=run.lora_alpha,
        target_modules="all-linear" if modules == ["all-linear"] else modules,
        task_type="CAUSAL_LM",
    )


def _optimizer(params: list[torch.nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    def adamw(trained: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)

    return MasterWeights(adamw)(params) if any(p.element_size() < 4 for p in params) else adamw(params)


def _train(
    rt: Runtime,
    batches: Iterator[list[Problem]],
    rewards: Mapping[str, RewardFunction],
    weights: Mapping[str, float] | None,
    run: GRPORun,
    num_rows: int,
    num_steps: int,
    on_step: OnStep,
) -> None:
    start_s = time.perf_counter()
    steps = grpo(rt, batches, rewards, run.loop_config(), reward_weights=weights)
    for step, metrics in enumerate(steps, start=1):
        end_s = time.perf_counter()
        place = {"step": step, "max_steps": num_steps, "epoch": step * run.prompts_per_step / num_rows}
        on_step({**place, **metrics, "learning_rate": run.learning_rate, "seconds": end_s - start_s})
        start_s = end_s


def _save_what_there_is(output: OutputFolder, rt: Runtime, tokenizer: Any, tell: Tell) -> None:
    """Save after an error, which is raised whether that is possible or not."""
    try:
        with suppress(Exception):
            rt.enter(None)
        tell(f"saving what was trained in {rt.weights_version} steps")
        tell(f"saved to {output.save(rt.model, tokenizer)}")
    except Exception as error:  # noqa: BLE001 - the first error is the one to raise
        tell(f"nothing could be saved: {error}")
