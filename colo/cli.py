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
from typing import Any, Literal

import click
from rich.console import Console
from rich.markup import escape

from colo.errors import ColoError
from colo.units import parse_bytes

out = Console()
err = Console(stderr=True)

json_option = click.option(
    "--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON."
)
device_option = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="By default cuda where there is one, else cpu."
)


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
        err.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="colo")
def app() -> None:
    """One GPU, two tenants: an inference engine and a trainer take turns on one copy of the weights."""


@app.command()
@click.option("--steps", type=click.IntRange(min=1), default=300, help="Optimizer steps.")
@click.option("--engine", type=click.Choice(["torch", "vllm"]), default="torch", help="The embedded engine, or vLLM.")
@click.option("--own-process/--same-process", default=True, help="Where vLLM runs.")
@device_option
@click.option("--mode", type=click.Choice(["full", "lora"]), default="full", help="Train every weight, or an adapter.")
@click.option("--seed", type=int, default=0, help="Makes model, problems and samples repeatable.")
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), default=Path("colo-demo.html"), help="Picture."
)
@click.option(
    "--png", type=click.Path(dir_okay=False, path_type=Path), help="The picture as PNG too; needs matplotlib."
)
@json_option
def demo(
    steps: int,
    engine: Literal["torch", "vllm"],
    own_process: bool,
    device: str | None,
    mode: str,
    seed: int,
    html: Path,
    png: Path | None,
    json_path: Path | None,
) -> None:
    """Let a small model learn addition by GRPO on a device too small for both tenants."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from colo.bench.common import machine, versions
    from colo.demo import run
    from colo.report.timeline import memory_timeline

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _one_thread(), Progress(*columns, console=out, transient=True) as progress:
        task = progress.add_task("warming up", total=steps)

        def on_step(metrics: dict[str, float]) -> None:
            progress.update(task, advance=1, description=f"reward {metrics['reward']:.2f}")

        result = run(
            steps=steps,
            engine=engine,
            own_process=own_process,
            device=device,
            mode=mode,
            seed=seed,
            tell=out.print,
            on_step=on_step,
        )
    rt = result.runtime
    try:
        out.print(rt.report())
        out.print("Memory, event by event, over the last three steps")
        out.print(memory_timeline(rt.trace, width=out.width))
        for path in filter(None, (html, png)):
            rt.plot(path, title=f"colo demo, {mode}, seed {seed}")
    finally:
        rt.close()
    first, last = (sum(part) / len(part) for part in (result.rewards[:5], result.rewards[-5:]))
    out.print(f"\nreward: {first:.2f} in the first five steps, {last:.2f} in the last five")
    if result.base_unchanged is not None:
        out.print(f"weights under the adapter: {'bit-identical' if result.base_unchanged else 'CHANGED'}")
    out.print(f"picture: {html}", highlight=False)
    where = "" if own_process else " --same-process"
    command = f"colo demo --steps {steps} --engine {engine}{where} --device {result.device} --mode {mode} --seed {seed}"
    _write_json(json_path, {"command": command, "machine": machine(), "versions": versions()} | result.to_json())


@app.command()
@click.argument("model")
@click.option("--gpu-memory", default="80GiB", help="Size of the GPU, such as 80GiB or 24GB.")
@click.option("--mode", type=click.Choice(["full", "lora", "qlora"]), default="full")
@click.option("--optimizer", type=click.Choice(["adamw", "sgd", "adafactor"]), default="adamw")
@click.option("--context", type=click.IntRange(min=1), default=4096, help="Tokens of prompt and completion together.")
@click.option("--generations", type=click.IntRange(min=1), default=8, help="Sequences generated at the same time.")
@click.option("--tp", type=click.IntRange(min=1), default=1, help="GPUs that share the model by tensor parallelism.")
@json_option
def plan(
    model: str,
    gpu_memory: str,
    mode: str,
    optimizer: str,
    context: int,
    generations: int,
    tp: int,
    json_path: Path | None,
) -> None:
    """Say what fits, before anything is allocated.

    MODEL is a hub id, or a folder with a config.json.
    """
    from colo.memory.estimate import plan as estimated
    from colo.report.plan_table import plan_tables

    found = estimated(
        model,
        gpu_memory=gpu_memory,
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
@json_option
def doctor(json_path: Path | None) -> int:
    """Examine this machine, and say what to do about what is found; exits with 1 when there is a problem."""
    from colo import doctor as examiner

    findings = examiner.examine()
    out.print(examiner.findings_table(findings))
    _write_json(json_path, examiner.to_json(findings))
    return int(any(finding.status == "problem" for finding in findings))


@app.group()
def bench() -> None:
    """Measure this machine: ours beside what people use today."""


@bench.command("offload")
@device_option
@click.option("--size", help="Bytes to move, such as 16GiB.")
@json_option
def bench_offload(device: str | None, size: str | None, json_path: Path | None) -> None:
    """How fast trainer state leaves the device and comes back, and what that costs those who work meanwhile."""
    from colo.bench import offload

    size_bytes = parse_bytes(size) if size else None
    _run_bench(lambda tell: offload.run(device=_default_device(device), size_bytes=size_bytes, tell=tell), json_path)


@bench.command("share")
@click.option("--shape", "shape_name", type=click.Choice(["0.6b", "30b-a3b"]), default="0.6b", help="Qwen3's shapes.")
@device_option
@json_option
def bench_share(shape_name: str, device: str | None, json_path: Path | None) -> None:
    """vLLM on the trainer's weights: publication, growth, a killed engine; recorded copies for 30B-A3B."""
    from colo.bench import share

    _run_bench(lambda tell: share.run(shape_name=shape_name, device=_default_device(device), tell=tell), json_path)


@bench.command("generation")
@click.option("--shape", "shape_name", type=click.Choice(["0.6b", "8b"]), default="0.6b", help="Qwen3's shapes.")
@device_option
@json_option
def bench_generation(shape_name: str, device: str | None, json_path: Path | None) -> None:
    """Tokens a second of vLLM on the trainer's weights, beside stock vLLM on its own."""
    from colo.bench import generation

    _run_bench(lambda tell: generation.run(shape_name=shape_name, device=_default_device(device), tell=tell), json_path)


@bench.command("sync")
@click.option(
    "--shape", "shape_name", type=click.Choice(["0.6b", "8b", "30b-a3b"]), default="8b", help="Qwen3's shapes."
)
@device_option
@json_option
def bench_sync(shape_name: str, device: str | None, json_path: Path | None) -> None:
    """All weights to vLLM in another process: direct and staged, beside what others do."""
    from colo.bench import sync

    _run_bench(lambda tell: sync.run(shape_name=shape_name, device=_default_device(device), tell=tell), json_path)


@bench.command("lora")
@click.option(
    "--shape", "shape_name", type=click.Choice(["0.6b", "8b", "30b-a3b"]), default="8b", help="Qwen3's shapes."
)
@device_option
@json_option
def bench_lora(shape_name: str, device: str | None, json_path: Path | None) -> None:
    """The next version of an adapter to vLLM, from memory and through files."""
    from colo.bench import lora

    _run_bench(lambda tell: lora.run(shape_name=shape_name, device=_default_device(device), tell=tell), json_path)


@bench.command("sleep")
@device_option
@json_option
def bench_sleep(device: str | None, json_path: Path | None) -> None:
    """How fast vLLM, 8B, gives memory back and takes it again, driven by colo and by itself."""
    from colo.bench import sleep

    _run_bench(lambda tell: sleep.run(device=_default_device(device), tell=tell), json_path)


@bench.command("step")
@click.option("--shape", "shape_name", type=click.Choice(["0.6b", "8b"]), default="0.6b", help="Qwen3's shapes.")
@device_option
@json_option
def bench_step(shape_name: str, device: str | None, json_path: Path | None) -> None:
    """Whole steps of rollout and full fine-tuning: time against two copies of the weights, memory for 8B."""
    from colo.bench import step

    _run_bench(lambda tell: step.run(shape_name=shape_name, device=_default_device(device), tell=tell), json_path)


@bench.command("logprob")
@device_option
@json_option
def bench_logprob(device: str | None, json_path: Path | None) -> None:
    """Memory and time of chunked log-probabilities, against full logits: 65,536 tokens on a GPU, small on a CPU."""
    from colo.bench import logprob
    from colo.bench.common import result

    def run(tell: Callable[[str], None]) -> Any:
        tell("chunked and full log-probabilities")
        target = _default_device(device)
        small = {"tokens": 512, "vocab": 4096, "hidden": 128, "full_tokens": 128}
        rows = logprob.run(device=target, **({} if target == "cuda" else small))
        return result("logprob", f"colo bench logprob --device {target}", limit={}, rows=rows)

    _run_bench(run, json_path)


def _run_bench(run: Callable[[Callable[[str], None]], Any], json_path: Path | None) -> None:
    from colo.bench.common import rows_tables

    with err.status("measuring") as status:
        measured = run(lambda part: status.update(f"measuring {part}"))
    for table in rows_tables(measured, width=out.width):
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


if __name__ == "__main__":
    main()
