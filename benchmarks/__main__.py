"""Measure this machine: ours beside what people use today.

    python -m benchmarks NAME [options]

lists all without a name. Rows are written to the file that `--json` names as they come, so that a benchmark that Ctrl-C
or SIGTERM interrupts keeps those that it has; so does one that its limit of eight minutes ends. With `--rounds 3` all
is measured three times, the sides in turns, and a row has the median of each figure. On a CPU the models are tiny,
which shows that it works and no more. house, offload, stream, logprob, sharded and, on a CPU, trl need no vLLM.
"""

from __future__ import annotations

import faulthandler
import importlib
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from colo.cli import device_option, json_option, require_vllm
from colo.errors import ColoError
from colo.log import waiting
from colo.units import MIB, parse_bytes

MOST_MINUTES = 8.0
GRACE_S = 45.0
"""Longest time for a benchmark to end once its time is up; then its process ends, with each thread's stack."""

out, err = Console(), Console(stderr=True)


def main() -> None:
    """Run the command line and exit."""
    try:
        code = app(prog_name="python -m benchmarks", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (ColoError, ValueError, OSError) as error:
        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


@click.group(
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.pass_context
def app(ctx: click.Context) -> None:
    """Measure this machine: ours beside what people use today.

    On a CPU the models are tiny, which shows that it works and no more.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def size_option(*names: str, **options: Any) -> Callable[[Any], Any]:
    """An option for a size in bytes. Less than a MiB is refused: the unit was left out."""
    return click.option(*names, metavar="SIZE", callback=_read_size, **options)


def _read_size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text, least_bytes=MIB)
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None


moment_option = click.option(
    "--moment-dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", help="Of streamed moments."
)


class Stopped(BaseException):
    """Ends a benchmark from a signal handler: a reason, and the exit code."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.reason, self.code = reason, code


def benchmark(name: str, *options: Callable[[Any], Any], needs_vllm: bool = True) -> Callable[[Any], click.Command]:
    """Register the `run` of the module of that name; the decorated function has the help, and is not called."""

    def register(described: Callable[..., None]) -> click.Command:
        @click.pass_context
        def command(ctx: click.Context, /, rounds: int, minutes: float, json_path: Any, **given: Any) -> int:
            if needs_vllm:
                require_vllm(f"python -m benchmarks {name}")
            return _run(name, _written(ctx), given, rounds=rounds, minutes=minutes, json_path=json_path)

        command.__doc__ = described.__doc__
        minutes = click.option(
            "--minutes", type=click.FloatRange(min=0), default=MOST_MINUTES, help="End after so many."
        )
        rounds = click.option(
            "--rounds", type=click.IntRange(min=1), default=1, help="Measure all so often, in turns, and show medians."
        )
        for option in (json_option, minutes, rounds, *reversed(options)):
            command = option(command)
        return app.command(name)(command)

    return register


def _run(name: str, command: str, given: dict[str, Any], *, rounds: int, minutes: float, json_path: Any) -> int:
    """Run one benchmark, print what it has measured, and return the exit code."""
    from benchmarks.common import Record, rows_tables

    shape, is_small = given.get("shape"), given.get("device") == "cpu" and not given.get("layers")
    title = f"{name} {f'of a tiny stand-in for {shape}' if is_small else shape}" if shape else name
    code = 0
    with waiting("measuring", err) as update:
        record = Record(title, command, path=json_path, tell=lambda part: update(f"measuring {part}"))
        try:
            with _stopped_by_signals(minutes):
                module = importlib.import_module(f"benchmarks.{name}")
                for number in range(rounds):
                    if number:
                        record.begin_round()
                    module.run(record, **given)
            record.ended = "complete"
        except (Stopped, KeyboardInterrupt) as stop:
            record.ended = getattr(stop, "reason", "interrupted by Ctrl-C")
            code = getattr(stop, "code", 130)
        except BaseException as error:
            record.ended = f"failed: {type(error).__name__}: {error}"
            raise
        finally:
            record.write()
    for table in rows_tables(record, width=out.width):
        out.print(table)
    if code:
        err.print(f"{record.ended}: {len(record.to_json()['rows'])} rows are kept")
    if json_path is not None:
        err.print(f"figures: {json_path}", highlight=False)
    return code


@contextmanager
def _stopped_by_signals(minutes: float) -> Iterator[None]:
    """Raise `Stopped` in the block on SIGTERM and when time is up."""

    def on_term(number: int, frame: FrameType | None) -> None:
        raise Stopped("interrupted by SIGTERM", 143)

    def on_alarm(number: int, frame: FrameType | None) -> None:
        raise Stopped(f"ended after {minutes:g} minutes", 124)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, on_term)}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, minutes * 60)
    if minutes:
        # Python's handlers run in no process that hangs with the GIL held; this thread needs none
        faulthandler.dump_traceback_later(minutes * 60 + GRACE_S, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _written(ctx: click.Context) -> str:
    """Spell the command that runs the benchmark again."""
    words: list[str] = []
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        is_about_output = parameter.name in ("json_path", "minutes")
        if value is None or is_about_output or (value == parameter.default and parameter.name != "shape"):
            continue
        if isinstance(value, bool):
            words += parameter.opts[:1] * value
            continue
        for each in value if isinstance(value, tuple) else (value,):
            words += [parameter.opts[0], f"{each >> 20}MiB" if parameter.metavar == "SIZE" else str(each)]
    return " ".join([ctx.command_path, shlex.join(words)]).strip()


def _shapes(*names: str) -> Callable[[Any], Any]:
    return click.option("--shape", type=click.Choice(names), default=names[0], help="Qwen3's shapes.")


@benchmark("house", needs_vllm=False)
def house() -> None:
    """Sizes and costs of colo itself, each beside its aim."""


@benchmark("offload", size_option("--size", help="How much to move, such as 16GiB."), device_option, needs_vllm=False)
def offload() -> None:
    """Trainer state to the host and back, and work beside that."""


@benchmark(
    "stream",
    _shapes("8b", "0.6b"),
    click.option(
        "--range", "ranges", type=click.IntRange(min=1), multiple=True, default=(64, 128), help="MiB; may be repeated."
    ),
    size_option("--resident-state", help="Measure steps with so much of the state on the device, too."),
    moment_option,
    device_option,
    needs_vllm=False,
)
def stream() -> None:
    """Optimizer state through the step, beside what the bus takes."""


@benchmark("logprob", device_option, needs_vllm=False)
def logprob() -> None:
    """Memory and time of chunked log-probabilities and full logits."""


@benchmark("share", _shapes("0.6b", "30b-a3b"), device_option)
def share() -> None:
    """vLLM on the trainer's weights: publication, growth, restart.

    For 30B-A3B, recorded copies beside `load_weights`.
    """


@benchmark(
    "generation",
    _shapes("0.6b", "8b"),
    click.option("--prompts", type=click.IntRange(min=1), help="How many prompts; 256 on a GPU."),
    click.option("--tokens", "new_tokens", type=click.IntRange(min=1), help="Tokens for each; 256 on a GPU."),
    device_option,
)
def generation() -> None:
    """Tokens a second on the trainer's weights, beside stock vLLM."""


@benchmark(
    "rollouts",
    _shapes("0.6b", "8b"),
    click.option("--prompts", type=click.IntRange(min=1), help="Groups of 8 in a step; 256 on a GPU."),
    click.option("--train", type=click.IntRange(min=0), default=0, help="Steps of training on each, for the rewards."),
    device_option,
)
def rollouts() -> None:
    """Uneven lengths: whole batches, and groups that end first."""


@benchmark("sync", _shapes("8b", "0.6b", "30b-a3b"), device_option)
def sync() -> None:
    """All weights to vLLM in another process, beside what others do."""


@benchmark(
    "publish",
    _shapes("0.6b", "8b"),
    click.option("--layers", type=click.IntRange(min=1), help="So many layers of the shape, on a CPU too."),
    click.option("--density", type=click.FloatRange(0, 1), default=0.01, help="Share of entries that a step changes."),
    click.option("--server", metavar="URL", help="A server of yours, instead."),
    click.option("--model", "model_name", metavar="MODEL", help="Its model, a folder or hub id."),
    device_option,
)
def publish() -> None:
    """Weights to a server, by each transport, beside its link."""


@benchmark(
    "sharded",
    _shapes("0.6b", "8b"),
    click.option("--ranks", type=click.IntRange(1, 8), default=2, help="Processes, each with a GPU of its own."),
    click.option("--trainer", type=click.Choice(["fsdp2", "megatron"]), help="One of them alone."),
    device_option,
    needs_vllm=False,
)
def sharded() -> None:
    """Weights of FSDP2 and Megatron to engines, as slices and whole."""


@benchmark("lora", _shapes("8b", "0.6b", "30b-a3b"), device_option)
def lora() -> None:
    """The next version of an adapter to vLLM, and through files."""


@benchmark("sleep", device_option)
def sleep() -> None:
    """Memory that vLLM, 8B, frees and takes again, and how fast."""


@benchmark(
    "step",
    _shapes("0.6b", "8b"),
    click.option(
        "--placement",
        type=click.Choice(["in-process", "own-process"]),
        default="own-process",
        help="Where vLLM runs.",
    ),
    device_option,
)
def step() -> None:
    """Steps of rollout and training, against two copies of weights.

    Time for 0.6B, memory for 8B.
    """


@benchmark(
    "trl",
    _shapes("0.6b", "1.7b", "4b", "8b", "14b", "32b"),
    click.option("--steps", type=click.IntRange(min=1), default=6),
    click.option("--batch", type=click.IntRange(min=1), default=32, help="Completions of a pass."),
    click.option("--tokens", type=click.IntRange(min=1), default=256, help="Of a completion, at the most."),
    click.option("--context", type=click.IntRange(min=256), help="Find the longest completion up to so many tokens."),
    click.option("--from", "first", type=click.IntRange(min=0), default=0, help="Begin with so many, with --context."),
    click.option("--lora", is_flag=True, help="Train an adapter, r = 16, all linear layers."),
    click.option("--utilization", type=float, default=0.3, help="Share of the GPU that TRL's own modes sample with."),
    size_option("--kv-cache", default="8GiB", help="KV cache under the flag."),
    click.option("--engine", type=click.Choice(["vllm", "torch"]), default="vllm", help="Engine under the flag."),
    size_option("--card", help="Leave so much of the GPU: another process holds the rest."),
    click.option("--offload", type=click.Choice(["auto", "always"]), default="auto", help="Of the flag."),
    click.option("--optimizer", type=click.Choice(["auto", "streamed"]), default="auto", help="Of the flag."),
    size_option("--resident-state", help="Streamed state that stays on the GPU, under the flag."),
    moment_option,
    click.option("--released", is_flag=True, help="Step and drop gradients within the backward pass, under the flag."),
    click.option("--offload-activations", is_flag=True, help="Keep them in host memory until the backward pass."),
    click.option(
        "--accumulation", type=click.IntRange(1), default=2, show_default=True, help="Backward passes before a step."
    ),
    click.option("--eager", is_flag=True, help="Without CUDA graphs, under the flag and Unsloth."),
    click.option("--cold", is_flag=True, help="Each side starts without what was compiled before, as on a new host."),
    click.option("--sides", default="", help="Only the one of this name, or those whose name contains it."),
    device_option,
    needs_vllm=False,
)
def trl() -> None:
    """TRL's own colocate mode beside colo's flag.

    With `--lora --sides Unsloth` Unsloth's trainer, in an environment with its releases.
    """


if __name__ == "__main__":
    main()
