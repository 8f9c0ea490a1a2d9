"""The estimate of `colo plan` as tables for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from colo.phases.phase import ENGINE_KV_CACHE, TRAINER_BASE, TRAINER_GRADIENTS, TRAINER_PARAMETERS, Phase
from colo.planning.estimate import (
    ACTIVATIONS,
    BUS_BYTES_PER_S,
    LOGITS,
    MOVABLE,
    RESIDUAL,
    START,
    Estimate,
    FitRow,
    Mode,
    Workload,
    smallest_cards,
    what_fits,
)
from colo.units import format_bytes, format_seconds

CONTEXTS = (2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)

_TRAINED = {Mode.FULL: "full fine-tuning", Mode.LORA: "LoRA", Mode.QLORA: "QLoRA"}
_MARKS = {
    "shared": "the same bytes as engine.weights",
    "host": "parked in host memory during the phase",
    "dropped": "given up before the phase, made anew when needed",
}
_SEGMENTS = {
    ACTIVATIONS: "the engine's workspace, or the trainer's",
    LOGITS: "workspace of the chunked log-probabilities",
    RESIDUAL: "CUDA context, graphs and buffers that never leave",
    TRAINER_BASE: "weights beneath the adapter, of which the engine has those with it",
}


def plan_tables(estimate: Estimate, *, model: str | None = None, card: str = "") -> list[RenderableType]:
    """Render an estimate, from top to bottom.

    What was asked, of a GPU that `card` may name; bytes by segment and phase; the verdict with what would change it;
    generations that fit at contexts up to the longest the model was made for; the smallest GPU for each way to train.
    """
    return [
        _asked(estimate, model or estimate.shape.model_type, card),
        _segment_table(estimate),
        Padding(_verdict(estimate), (1, 0)),
        _fit_table(estimate, _rows(estimate)),
        _card_table(estimate),
    ]


def _asked(estimate: Estimate, model: str, card: str) -> Text:
    shape, asked = estimate.shape, estimate.workload
    rank = "" if asked.mode is Mode.FULL else f" of rank {asked.lora_rank}"
    gpus = "one GPU" if asked.tp == 1 else f"each of {asked.tp} GPUs"
    lines = [
        f"{model}: {shape.num_parameters / 1e9:.2f} billion parameters",
        f"{_TRAINED[asked.mode]}{rank} with {asked.optimizer}, on {gpus} of {format_bytes(asked.gpu_memory_bytes)}"
        + (f" ({card})" if card else ""),
        f"{asked.generations} x {asked.context} tokens in a rollout, "
        f"{asked.micro_batch} x {asked.context} in a training pass",
    ]
    return Text("\n".join([*lines, *estimate.remarks]) + "\n")


def _segment_table(estimate: Estimate) -> Table:
    table = Table(title="Device memory by phase", title_justify="left", box=SIMPLE_HEAD, show_footer=True)
    table.add_column("segment", footer="total")
    phases = {phase: held for phase, held in estimate.phases.items() if phase != START}  # for which there is no room
    for phase, held in phases.items():
        table.add_column(phase, footer=format_bytes(sum(held.values())), justify="right")
    shown = [name for name, size in estimate.segments.items() if size or name == TRAINER_PARAMETERS]
    cells = {name: [_cell(estimate, phase, name) for phase in phases] for name in shown}
    for name in shown:
        table.add_row(name, *cells[name])
    seen = {*shown, *chain.from_iterable(cells.values())}
    table.caption = "\n".join(f"{word}: {meaning}" for word, meaning in (_MARKS | _SEGMENTS).items() if word in seen)
    table.caption_justify = "left"
    return table


def _cell(estimate: Estimate, phase: str, segment: str) -> str:
    """Bytes, or why there are none."""
    held = estimate.phases[phase][segment]
    if held:
        return format_bytes(held)
    if segment == TRAINER_PARAMETERS:
        return "shared"
    if segment in estimate.offloaded[phase]:
        return "host"
    dropped = (phase == Phase.ROLLOUT and segment == TRAINER_GRADIENTS) or segment == ENGINE_KV_CACHE
    return "dropped" if dropped and estimate.segments[segment] else "-"


def _verdict(estimate: Estimate) -> Text:
    limit, peak = estimate.workload.gpu_memory_bytes, estimate.peak_bytes
    text = Text(f"Peak {format_bytes(peak)} of {format_bytes(limit)}: ")
    if estimate.fits:
        text.append(f"fits, {format_bytes(limit - peak)} to spare", style="bold green")
        if estimate.needed_bytes < peak:  # a smaller GPU runs it, too, and parks more
            text.append(f"; {format_bytes(estimate.needed_bytes)} would do, with more parked")
    else:
        text.append(f"does not fit, {format_bytes(peak - limit)} missing", style="bold red")
    text.append(f"\nWithout taking turns, a copy of the weights each: {format_bytes(estimate.naive_peak_bytes)}\n")
    start = estimate.phases[START]
    text.append(
        f"As the engine starts, {format_bytes(sum(start.values()))}: {format_bytes(start[ACTIVATIONS])} to warm up\n"
    )
    if estimate.streamed and not estimate.step_wait_s:
        state = format_bytes(estimate.state_bytes)
        text.append(f"The optimizer's state, {state}, stays on the device, stepped range by range\n")
    elif estimate.streamed:
        stays = estimate.resident_state_bytes
        text.append(
            f"The optimizer's state, {format_bytes(estimate.state_bytes)}, is streamed: in host memory, and on the "
            f"device a range at a time.\n{f'{format_bytes(stays)} of it stay on the device. ' if stays else ''}"
            f"A step waits {format_seconds(estimate.step_wait_s)} for {'the rest' if stays else 'it'} at "
            f"{BUS_BYTES_PER_S / 1e9:.1f} GB/s\n"
        )
    elif estimate.host_bytes:
        moved = ", ".join(name for name in MOVABLE if name in estimate.offloaded[Phase.ROLLOUT])
        text.append(f"Parked during rollouts, {format_bytes(estimate.host_bytes)} of host memory: {moved}\n")
    else:
        text.append("Nothing has to be parked on the host\n")
    if estimate.activation_host_bytes:
        text.append(f"Layers' inputs wait in {format_bytes(estimate.activation_host_bytes)} of host memory\n")
    caches = [(estimate.kv_bytes_per_token, "token"), (estimate.kv_bytes_per_sequence, "sequence")]
    text.append(f"KV cache: {' and '.join(f'{format_bytes(size)} a {of}' for size, of in caches if size)}. ")
    text.append(f"Logits, if they were held whole: {format_bytes(estimate.logits_bytes)}")
    if estimate.suggestions:
        text.append("\nAny one of these makes it fit:" + "".join(f"\n  {each.text}" for each in estimate.suggestions))
    elif not estimate.fits:
        text.append("\nNo single change makes it fit: combine some, or take a smaller model")
    return text


def _rows(estimate: Estimate) -> list[FitRow]:
    asked = {field.name: getattr(estimate.workload, field.name) for field in fields(Workload)}
    longest = estimate.shape.max_context or CONTEXTS[-1]
    usual = {asked["context"], *(context for context in CONTEXTS if context <= longest)}
    return what_fits(estimate.shape, sorted(usual), **asked)


def _fit_table(estimate: Estimate, rows: Sequence[FitRow]) -> Table:
    table = Table(title="Generations at once that fit, by context", title_justify="left", box=SIMPLE_HEAD)
    for heading in ("context", "nothing parked", "state parked", "train phase"):
        table.add_column(heading, justify="right")
    for row in rows:
        asked = row.context == estimate.workload.context
        context = f"asked: {row.context}" if asked else str(row.context)
        most = str(row.generations) if row.generations else "none"
        train = format_bytes(row.train_bytes)
        too_much = " (too much)" if row.train_bytes > estimate.workload.gpu_memory_bytes else ""
        resident = str(row.resident_generations) if row.resident_generations else "none"
        table.add_row(context, resident, most, train + too_much, style="bold" if asked else None)
    return table


def _card_table(estimate: Estimate) -> Table:
    table = Table(title="The smallest card for this work, by what is trained", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("trained")
    for heading in ("needs at least", "card", "which gives"):
        table.add_column(heading, justify="right")
    for way, (needed_bytes, card) in smallest_cards(estimate.shape, estimate.workload).items():
        given = (card.name, format_bytes(card.memory_bytes)) if card else ("none", "")
        table.add_row(way, format_bytes(needed_bytes), *given)
    return table
