"""`colo grpo` on the command line: every option of TRL's configs, lines of progress or of JSON."""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from typing import Any, TextIO

import click
from rich.console import Console

from colo.cli_options import require_vllm

_NOW = {"engine": "colo_engine", "kv_cache_bytes": "colo_kv_cache_bytes"}
"""Options that were `colo grpo`'s own, and the flag's names for them."""

_REQUIRED = ("model_name_or_path", "dataset_name", "output_dir")
_SHOWN = ("reward", "rewards/*/mean", "kl", "loss", "completions/mean_length", "colo/mismatch", "step_time")
"""Metrics in a line of progress; `--json` has all that are logged."""


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, add_help_option=False
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def grpo(words: tuple[str, ...]) -> None:
    """Train by GRPO: TRL's trainer, on one copy of the weights.

    Takes every option of TRL's GRPOConfig and ModelConfig: colo grpo --help.
    """
    if find_spec("trl") is None or find_spec("datasets") is None:
        raise click.UsageError("colo grpo needs TRL: pip install 'colo-rl[trl]'.")
    err = Console(stderr=True)
    given, as_json = _translated(list(words), err)
    if "--colo_engine=vllm" in given:
        require_vllm("--colo_engine vllm")
    run, args, model = _parsed(given)
    from colo.grpo import train

    with _own_stdout(as_json) as stdout:
        train(
            run,
            args,
            model,
            tell=lambda text: err.print(text, highlight=False, soft_wrap=True),
            on_log=_JSONLines(stdout) if as_json else _Lines(stdout),
        )


def _translated(words: list[str], err: Console) -> tuple[list[str], bool]:
    """The words as TRL's parser takes them, and whether JSON is wanted.

    Names get underscores, what `colo grpo` called otherwise its name of now, and lists that are given word by word, as
    in `--reward_funcs a --reward_funcs b`, are put together.
    """
    given: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in _NOW:
                err.print(f"--{name} is --{_NOW[name]} now, as in ColoGRPOConfig", highlight=False)
                name = _NOW[name]
            given.setdefault(name, []).extend([value] if equals else [])
        elif word == "-h":
            given["help"] = []
        elif not name:
            raise click.UsageError(f"Got unexpected extra argument ({word}).")
        else:
            given[name].append(word)
    if size := given.pop("kv_cache_mib", None):
        err.print("--kv_cache_mib is --colo_kv_cache_bytes now, as in ColoGRPOConfig", highlight=False)
        given["colo_kv_cache_bytes"] = [f"{size[-1]}MiB"]
    as_json = given.pop("json", None) is not None
    if (device := given.pop("device", None)) is not None:
        if device[-1:] not in (["cpu"], ["cuda"]):
            raise click.UsageError(f"--device {device[-1:] or ''} is not one of cpu and cuda.")
        given |= {"use_cpu": [str(device[-1] == "cpu")]}
        err.print("--device cpu is --use_cpu now, as in GRPOConfig", highlight=False)
    lists = _lists()
    found = []
    for name, values in given.items():
        if name in lists or not values:
            found += [f"--{name}", *values]
        else:
            found.append(f"--{name}={values[-1]}")  # the last one counts, as ever
    return found, as_json


def _parser() -> Any:
    """TRL's parser, whose errors are click's."""
    from trl import TrlParser

    from colo.grpo import GRPOModelConfig, GRPORunConfig, RunArguments

    parser = TrlParser(
        (RunArguments, GRPORunConfig, GRPOModelConfig),
        prog="colo grpo",
        allow_abbrev=False,
        description="Train a checkpoint by GRPO. Rows have a `prompt`, a text or a list of messages; the other columns "
        "go to the rewards, functions f(prompts, completions, **columns) that return one number for each completion. "
        "Options are those of TRL's GRPOConfig and ModelConfig; --config takes them from a YAML file. --json prints "
        "what is logged as lines of JSON, and nothing else, on standard output. Model and tokenizer are saved at the "
        "end, on Ctrl-C, and when an error ends the run.",
    )

    def error(message: str) -> None:
        raise click.UsageError(f"{message}.")

    parser.error = error
    for action in parser._actions:
        action.required = action.required or action.dest in _REQUIRED
    return parser


def _lists() -> set[str]:
    return {action.dest for action in _parser()._actions if action.nargs in ("+", "*")}


def _parsed(given: Sequence[str]) -> tuple[Any, Any, Any]:
    """The three configs. Raises: `click.UsageError` for options that there are not, or that exclude each other."""
    parser = _parser()
    known = {name.lstrip("-") for action in parser._actions for name in action.option_strings} | {"config"}
    for word in given:
        name = word[2:].partition("=")[0]
        if word.startswith("--") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise click.UsageError(f"No such option: --{name}." + (f" Did you mean --{near[0]}?" if near else ""))
    words = [part for word in given for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    try:
        run, args, model = parser.parse_args_and_config(args=words)
    except (ValueError, TypeError) as error:
        raise click.UsageError(f"{str(error).rstrip('.')}.") from None
    if not run.reward_funcs and not run.reward_model_name_or_path:
        raise click.UsageError("Missing option --reward_funcs, or --reward_model_name_or_path.")
    return run, args, model


class _JSONLines:
    """Writes what is logged as a line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __call__(self, metrics: dict[str, float]) -> None:
        self._file.write(json.dumps({k: v if math.isfinite(v) else None for k, v in metrics.items()}) + "\n")
        self._file.flush()


class _Lines:
    """Prints a few metrics of each step on one line."""

    def __init__(self, file: TextIO) -> None:
        self._console = Console(file=file)

    def __call__(self, metrics: dict[str, float]) -> None:
        names = [name for of in ("", "eval_") for shown in _SHOWN for name in _matching(of + shown, metrics)]
        words = "  ".join(f"{name} {metrics[name]:.4g}" for name in names)
        self._console.print(
            f"step {metrics['step']:.0f}/{metrics['max_steps']:.0f}  {words}", highlight=False, soft_wrap=True
        )


def _matching(shown: str, metrics: dict[str, float]) -> list[str]:
    before, star, after = shown.partition("*")
    if not star:
        return [shown] if shown in metrics else []
    return [name for name in metrics if name.startswith(before) and name.endswith(after)]


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
        # at the level of file descriptors, which vLLM's processes inherit
        os.dup2(other, descriptor)
        try:
            yield kept
        finally:
            kept.flush()
            os.dup2(kept.fileno(), descriptor)
