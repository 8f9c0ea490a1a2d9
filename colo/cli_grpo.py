"""`colo grpo` on the command line: options with TRL's names, lines of progress or of JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console

from colo.cli_options import Command, device_option, require_vllm

_POSITIVE = click.IntRange(min=1)
_OF_TRAINING = ("step", "max_steps", "epoch", "learning_rate", "seconds")


def _option(name: str, **options: Any) -> Callable[[Command], Command]:
    """An option that may be written with underscores, as TRL has it, or with dashes."""
    names = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
    return click.option(*names, name, **options)


@click.command()
@_option("model_name_or_path", required=True, help="A folder or hub id with a checkpoint.")
@_option("dataset_name", required=True, help="A file of JSON lines, or a dataset of Hugging Face.")
@_option("dataset_config", help="Configuration of that dataset.")
@_option("dataset_train_split", default="train", help="Split of that dataset.")
@_option("reward_funcs", required=True, multiple=True, help="module:function or path.py:function; may be repeated.")
@_option("reward_weights", multiple=True, type=float, help="One for each reward.")
@_option("output_dir", required=True, type=click.Path(file_okay=False, path_type=Path), help="Where to save.")
@_option("overwrite_output_dir", is_flag=True, help="Also over another run's checkpoint.")
@_option("max_steps", type=int, default=-1, help="Optimizer steps; -1 for num_train_epochs.")
@_option("num_train_epochs", type=float, default=3.0)
@_option("learning_rate", type=float, default=1e-6, help="Constant.")
@_option("per_device_train_batch_size", type=_POSITIVE, default=8, help="Completions of one pass.")
@_option("gradient_accumulation_steps", type=_POSITIVE, default=1, help="Passes for each optimizer step.")
@_option("num_generations", type=int, default=8, help="Completions of each prompt.")
@_option("max_completion_length", type=_POSITIVE, default=512, help="Tokens.")
@_option("temperature", type=float, default=1.0)
@_option("beta", type=float, default=0.0, help="Weight of the KL term.")
@_option("use_peft", is_flag=True, help="Train a LoRA adapter.")
@_option("lora_r", type=_POSITIVE, default=16)
@_option("lora_alpha", type=_POSITIVE, default=32)
@_option("lora_target_modules", multiple=True, default=["all-linear"], help="May be repeated.")
@_option("logging_steps", type=_POSITIVE, default=1, help="Steps of which the means are printed.")
@_option("seed", type=click.IntRange(0, 2**31 - 1), default=42)
@_option(
    "dtype", type=click.Choice(["auto", "bfloat16", "float16", "float32"]), help="By default what suits the device."
)
@_option("engine", type=click.Choice(["torch", "vllm"]), default="torch", help="The embedded engine, or vLLM.")
@_option("kv_cache_mib", type=_POSITIVE, help="Size of the KV cache; by default what fits.")
@device_option
@click.option("--json", "as_json", is_flag=True, help="One JSON line a step, and nothing else on standard output.")
def grpo(logging_steps: int, as_json: bool, **options: Any) -> None:
    """Train a checkpoint by GRPO.

    Rows have a `prompt`, a text or a list of messages; the other columns go to the rewards, functions
    f(prompts, completions, **columns) that return one number for each completion. Options are named as in `trl grpo`.

    Model and tokenizer are saved at the end, on Ctrl-C, and when an error ends the run.
    """
    if options["engine"] == "vllm":
        require_vllm("--engine vllm")
    from colo.rl.output import OutputFolder

    try:
        OutputFolder(options["output_dir"], overwrite=options["overwrite_output_dir"])
    except OSError as error:
        raise click.BadParameter(f"{error}.", param_hint="--output_dir") from None
    from colo.grpo import GRPORun, train

    try:
        run = GRPORun(**options)
    except ValueError as error:
        raise click.UsageError(f"{error}.") from None
    err = Console(stderr=True)
    with _own_stdout(as_json) as stdout:
        train(
            run,
            tell=lambda text: err.print(text, highlight=False, soft_wrap=True),
            on_step=_JSONLines(stdout) if as_json else _Table(stdout, logging_steps),
        )


class _JSONLines:
    """Writes the metrics of each step as a line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __call__(self, metrics: dict[str, float]) -> None:
        self._file.write(json.dumps({k: v if math.isfinite(v) else None for k, v in metrics.items()}) + "\n")
        self._file.flush()


class _Table:
    """Prints the means of so many steps in a line."""

    def __init__(self, file: TextIO, every: int) -> None:
        self._console = Console(file=file)
        self._every = every
        self._steps: list[dict[str, float]] = []

    def __call__(self, metrics: dict[str, float]) -> None:
        self._steps.append(metrics)
        step, last = int(metrics["step"]), int(metrics["max_steps"])
        if step % self._every and step != last:
            return
        names = [name for name in metrics if name not in _OF_TRAINING]
        means = {name: sum(each[name] for each in self._steps) / len(self._steps) for name in (*names, "seconds")}
        words = "  ".join(f"{name} {value:.4g}" for name, value in means.items())
        self._console.print(f"step {step}/{last}  {words}", highlight=False, soft_wrap=True)
        self._steps.clear()


@contextmanager
def _own_stdout(alone: bool) -> Iterator[TextIO]:
    """Standard output; `alone` whatever else writes to it, in this process or in vLLM's, writes to standard error."""
    out = sys.stdout
    if not alone:
        yield out
        return
    try:
        descriptor, other = out.fileno(), sys.stderr.fileno()
    except (OSError, ValueError):  # a notebook's or a test's, which no other process has
        with redirect_stdout(sys.stderr):
            yield out
        return
    out.flush()
    with os.fdopen(os.dup(descriptor), "w") as kept, redirect_stdout(sys.stderr):
        os.dup2(other, descriptor)
        try:
            yield kept
        finally:
            kept.flush()
            os.dup2(kept.fileno(), descriptor)
