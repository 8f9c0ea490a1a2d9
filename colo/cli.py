"""The command line: `colo demo`, `colo plan`, `colo doctor`, `colo bench`.

Every command has `--json PATH`. Ctrl-C releases what was taken and ends with exit code 130; an error that colo raises
on purpose is printed without a traceback and ends with 1, wrong usage with 2. Modules that import torch are imported
by the commands that need them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console

from colo.errors import ColoError
from colo.units import parse_bytes

app = typer.Typer(
    name="colo",
    help="One GPU, two tenants: an inference engine and a trainer take turns on one copy of the weights.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
bench = typer.Typer(help="Measure this machine, ours beside what people use today.", no_args_is_help=True)
app.add_typer(bench, name="bench")
out = Console()
err = Console(stderr=True)

JsonPath = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the figures as JSON.")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")]


def main() -> None:
    """Run the command line and exit."""
    try:
        code = app(standalone_mode=False)
    except (KeyboardInterrupt, click.exceptions.Abort):
        err.print("interrupted: everything is released")
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (ColoError, ValueError, OSError) as error:
        err.print(f"[bold red]error:[/] {_escape(str(error))}", highlight=False)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 200,
    device: Device = None,
    mode: Annotated[str, typer.Option(help="full: train every weight; lora: train an adapter.")] = "full",
    seed: Annotated[int, typer.Option(help="Makes model, problems and samples repeatable.")] = 0,
    html: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("colo-demo.html"),
    json_path: JsonPath = None,
) -> None:
    """Let a small model learn addition by GRPO on a device too small for both tenants."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from colo.demo import run
    from colo.report.timeline import memory_timeline

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _one_thread(), Progress(*columns, console=out, transient=True) as progress:
        task = progress.add_task("warming up", total=steps)

        def on_step(metrics: dict[str, float]) -> None:
            progress.update(task, advance=1, description=f"reward {metrics['reward']:.2f}")

        result = run(steps=steps, device=device, mode=mode, seed=seed, tell=out.print, on_step=on_step)
    rt = result.runtime
    try:
        out.print(rt.report())
        out.print("Memory, event by event, over the last three steps")
        out.print(memory_timeline(rt.trace, width=out.width))
        rt.plot(html, title=f"colo demo, {mode}, seed {seed}")
    finally:
        rt.close()
    first, last = (sum(part) / len(part) for part in (result.rewards[:5], result.rewards[-5:]))
    out.print(f"\nreward: {first:.2f} in the first five steps, {last:.2f} in the last five")
    out.print(f"picture: {html}")
    _write_json(json_path, result.to_json())


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help="A hub id, or a folder with a config.json.")],
    gpu_memory: Annotated[str, typer.Option(help="Size of the GPU, such as 80GiB or 24GB.")] = "80GiB",
    mode: Annotated[str, typer.Option(help="full, lora or qlora.")] = "full",
    optimizer: Annotated[str, typer.Option(help="adamw, sgd or adafactor.")] = "adamw",
    context: Annotated[int, typer.Option(min=1, help="Tokens of a sequence, prompt and completion.")] = 4096,
    generations: Annotated[int, typer.Option(min=1, help="Sequences generated at the same time.")] = 8,
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share the model by tensor parallelism.")] = 1,
    json_path: JsonPath = None,
) -> None:
    """Say what fits, before anything is allocated."""
    from colo.memory.estimate import estimate
    from colo.memory.model_config import ModelShape, load_model_config
    from colo.report.plan_table import plan_tables

    shape = ModelShape.from_config(load_model_config(model))
    found = estimate(
        shape,
        gpu_memory_bytes=parse_bytes(gpu_memory),
        mode=mode,
        optimizer=optimizer,
        context=context,
        generations=generations,
        tp=tp,
    )
    for table in plan_tables(found, model=model):
        out.print(table)
    _write_json(json_path, found.to_json())


@app.command()
def doctor(json_path: JsonPath = None) -> None:
    """Examine this machine, and say what to do about what is found."""
    from colo import doctor as examiner

    findings = examiner.examine()
    out.print(examiner.findings_table(findings))
    _write_json(json_path, examiner.to_json(findings))
    if any(finding.status == "problem" for finding in findings):
        raise typer.Exit(1)


@bench.command("offload")
def bench_offload(
    device: Device = None,
    size: Annotated[str | None, typer.Option(help="Bytes to move, such as 16GiB.")] = None,
    json_path: JsonPath = None,
) -> None:
    """How fast trainer state leaves the device and comes back, against the bus and against other ways."""
    from colo.bench import offload

    size_bytes = parse_bytes(size) if size else None
    _run_bench(lambda tell: offload.run(device=_default_device(device), size_bytes=size_bytes, tell=tell), json_path)


@bench.command("logprob")
def bench_logprob(
    device: Device = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens in the chunked case.")] = 65536,
    json_path: JsonPath = None,
) -> None:
    """Memory and time of chunked log-probabilities, against full logits."""
    from colo.bench import logprob
    from colo.bench.common import result

    def run(tell: Callable[[str], None]) -> Any:
        tell("chunked and full log-probabilities")
        target = _default_device(device)
        rows = logprob.run(device=target, tokens=tokens)
        return result("logprob", f"colo bench logprob --device {target} --tokens {tokens}", limit={}, rows=rows)

    _run_bench(run, json_path)


def _run_bench(run: Callable[[Callable[[str], None]], Any], json_path: Path | None) -> None:
    from colo.bench.common import rows_tables

    with err.status("measuring") as status:
        measured = run(lambda part: status.update(f"measuring {part}"))
    for table in rows_tables(measured):
        out.print(table)
    _write_json(json_path, measured.to_json())


def _default_device(device: str | None) -> str:
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


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


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    main()
