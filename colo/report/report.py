"""What `rt.report()` returns and `rt.plot()` writes: the tables, the picture, and the runtime's reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from colo.phases.phase import Phase
from colo.report.plot import write_html, write_png
from colo.report.table import report_tables, summary
from colo.report.trace import Trace
from colo.units import format_bytes

if TYPE_CHECKING:
    from colo.memory.inventory import Kept
    from colo.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Report:
    """A run so far: printable, showable in a notebook, and plain data through `to_json`."""

    facts: Mapping[str, str]
    """What the runtime is and chose, name to sentence."""

    trace: Trace

    @classmethod
    def of(cls, runtime: Runtime) -> Report:
        """The report of a runtime as it stands."""
        return cls(facts=_facts(runtime), trace=runtime.trace)

    def to_json(self) -> dict[str, object]:
        """Facts and figures as plain data."""
        return {"facts": dict(self.facts), **summary(self.trace)}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(map(len, self.facts))
        for name, sentence in self.facts.items():
            yield Text.assemble((f"{name:<{width}}  ", "bold"), sentence)
        yield from report_tables(self.trace)

    def _repr_html_(self) -> str:
        """The report in a notebook: the terminal's tables, in a fixed-width font."""
        return f"<pre style='line-height:1.2'>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        console = Console(width=100, no_color=True, force_terminal=False, force_jupyter=False)
        with console.capture() as capture:
            console.print(self)
        return capture.get()


def write_picture(runtime: Runtime, path: Path, *, title: str) -> Path:
    """Write the run as a static HTML file or, for `.png`, as a picture. Raises: `ValueError` for another suffix."""
    if path.suffix == ".png":
        write_png(runtime.trace, path, title=title)
    elif path.suffix == ".html":
        write_html(runtime.trace, path, title=title, facts=_facts(runtime))
    else:
        raise ValueError(f"cannot plot to {path}: name a file that ends in .html or .png")
    return path


def _facts(runtime: Runtime) -> dict[str, str]:
    rollout, train = (runtime.trace.peak_bytes(phase) for phase in (Phase.ROLLOUT, Phase.TRAIN))
    facts = {
        "engine": f"{runtime.engine.name} on {runtime.device}: {runtime.engine.placement}",
        "weights": f"{runtime.transport.name}: {runtime.transport.reason}",
        "version": f"{runtime.weights_version}, {len(runtime.publications)} publications, "
        f"{format_bytes(runtime.bytes_synced)} copied",
        "peak": f"rollout {format_bytes(rollout)}, train {format_bytes(train)}, "
        f"ever {format_bytes(runtime.trace.peak_bytes())}",
        "offload": f"{runtime.config.offload}: {_why_offload(runtime)}",
    }
    residual = runtime.engine.residual_bytes
    if residual:
        parts = ", ".join(f"{kind} {format_bytes(num_bytes)}" for kind, num_bytes in residual.items())
        facts["asleep"] = f"{format_bytes(sum(residual.values()))} stay with the engine: {parts}"
    if runtime.kept_state:
        facts["kept"] = _what_is_kept(runtime.kept_state)
    changed = runtime.trace.metrics.get("changed_fraction")
    if changed:
        facts["changed"] = f"{changed[-1]:.1%} of the 16-bit weights in the last step"
    mismatch = runtime.trace.metrics.get("mismatch") or runtime.trace.metrics.get("mismatch_sampled")
    if mismatch:
        facts["mismatch"] = f"{mismatch[-1]:.2g} mean |log p(engine) - log p(trainer)| in the last step"
    return facts


def _what_is_kept(kept: Sequence[Kept]) -> str:
    """State that stays on the device: how much, and by reason one name for all."""
    by_reason: dict[str, list[Kept]] = {}
    for item in kept:
        by_reason.setdefault(item.reason, []).append(item)
    parts = [
        f"{items[0].name}" + (f" and {len(items) - 1} others" if len(items) > 1 else "") + f": {reason}"
        for reason, items in by_reason.items()
    ]
    size = format_bytes(sum(item.size_bytes for item in kept))
    return f"{size} of the optimizer's state stay on the device: {'; '.join(parts)}"


def _why_offload(runtime: Runtime) -> str:
    moved = sorted({s.name.removeprefix("out ") for s in runtime.trace.spans if s.name.startswith("out ")})
    if moved:
        return f"{', '.join(moved)} left the device for rollouts"
    return "no state of the trainer had to leave the device"
