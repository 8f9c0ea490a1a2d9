"""The command line: `colo demo`, `colo grpo`, `colo plan`, `colo doctor`.

Every command has `--json PATH`, but `grpo`, whose `--json` prints a line a step. Ctrl-C releases what was taken and
ends with exit code 130; an error that colo raises on purpose is printed without a traceback and ends with 1, as does a
plan that does not fit; wrong usage, and what is not installed, with 2. Modules that import torch are imported by the
commands that need them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.markup import escape

from colo.cli_grpo import grpo
from colo.cli_options import device_option, file_option, json_option, require_vllm
from colo.errors import ColoError

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
        err.print(f"[bold red]error:[/] {escape(words)}", highlight=False, soft_wrap=True)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="colo-rl")
def app() -> None:
    """One GPU, two tenants: an inference engine and a trainer take turns on one copy of the weights."""


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
def demo(
    steps: int,
    engine: Literal["torch", "vllm"] | None,
    own_process: bool,
    device: str,
    mode: str,
    seed: int,
    html: Path,
    png: Path | None,
    json_path: Path | None,
) -> None:
    """Teach a small model addition by GRPO, on a small device.

    It is too small for both tenants at once: engine and trainer take turns on it.
    """
    if engine == "vllm":
        require_vllm("--engine vllm")
    from colo.demo import run
    from colo.doctor import circumstances
    from colo.report.live import LiveTable
    from colo.report.report import memory_timeline
    from colo.report.table import memory_headline

    with _one_thread(), LiveTable(steps, console=out) as table:
        result = run(
            steps=steps,
            engine=engine,
            own_process=own_process,
            device=device,
            mode=mode,
            seed=seed,
            tell=out.print,
            on_step=table.update,
        )
    rt = result.runtime
    try:
        out.print(rt.report())
        out.print("Memory, event by event, over the last three steps")
        out.print(memory_timeline(rt.trace, width=out.width))
        for path in filter(None, (html, png)):
            path.parent.mkdir(parents=True, exist_ok=True)
            rt.plot(path, title=f"colo demo, {mode}, seed {seed}")
        headline = memory_headline(rt.trace)
    finally:
        rt.close()
    first, last = (sum(part) / len(part) for part in (result.rewards[:5], result.rewards[-5:]))
    out.print(f"\n{headline}", highlight=False)
    out.print(f"reward: {first:.2f} in the first five steps, {last:.2f} in the last five")
    if result.base_unchanged is not None:
        out.print(f"weights under the adapter: {'bit-identical' if result.base_unchanged else 'CHANGED'}")
    out.print(f"picture: {html}", highlight=False)
    where = "" if own_process else " --same-process"
    command = f"colo demo --steps {steps} --engine {result.engine}{where} --device {result.device}"
    command += f" --mode {mode} --seed {seed}"
    _write_json(json_path, {"command": command} | circumstances() | result.to_json())


@app.command()
@click.argument("model")
@click.option(
    "--gpu-memory",
    metavar="SIZE|CARD",
    help="Of one GPU: 24GiB (24GB is decimal), or a card such as L4; by default the GPU that is here, or an H100.",
)
@click.option("--mode", type=click.Choice(["full", "lora", "qlora"]), default="full", help="What is trained.")
@click.option("--optimizer", type=click.Choice(["adamw", "sgd-momentum", "adafactor"]), default="adamw")
@click.option(
    "--state",
    type=click.Choice(["auto", "resident", "streamed"]),
    default="auto",
    help="Where the optimizer's state is while it steps: on the GPU as a whole, or streamed through it.",
)
@click.option("--release-gradients", is_flag=True, help="Step and drop each gradient within the backward pass.")
@click.option("--context", type=click.IntRange(min=1), default=4096, help="Tokens of prompt and completion together.")
@click.option("--generations", type=click.IntRange(min=1), default=8, help="Sequences generated at the same time.")
@json_option
def plan(
    model: str,
    gpu_memory: str | None,
    mode: str,
    optimizer: str,
    state: str,
    release_gradients: bool,
    context: int,
    generations: int,
    json_path: Path | None,
) -> int:
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
    found = estimated(
        model,
        gpu_memory=card.memory_bytes,
        mode=mode,
        optimizer=optimizer,
        state=state,
        release_gradients=release_gradients,
        context=context,
        generations=generations,
    )
    for table in plan_tables(found, model=model, card=card.name):
        out.print(table)
    _write_json(json_path, found.to_json())
    return int(not found.fits)


@app.command()
@json_option
def doctor(json_path: Path | None) -> int:
    """Examine this machine, and say what to do about what is found.

    Exits with 1 when there is a problem.
    """
    from colo import doctor as examiner

    findings = examiner.examine()
    out.print(examiner.findings_table(findings))
    _write_json(json_path, examiner.to_json(findings))
    return int(any(finding.status == "problem" for finding in findings))


app.add_command(grpo)


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
        err.print(f"figures: {path}", highlight=False)


if __name__ == "__main__":
    main()
