"""The table of a run that grows while it trains, in a terminal, in a notebook and in a file."""

import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from colo.report.live import LiveTable
from colo.units import GIB, MIB, format_bytes

STEP = {
    "reward": 0.25,
    "rewards/format": 0.5,
    "loss": 3.0,
    "completion_tokens": 2.5,
    "mismatch": 1.2e-7,
    "tokens_per_s": 12345.6,
    "device_bytes": 1.5 * GIB,
}
LINE = "step 1/3  reward 0.25  format 0.50  length 2.5  mismatch 1.2e-07  tokens/s 12,346  memory 1.50 GiB"


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def shown(table):
    console = Console(file=io.StringIO(), width=120)
    console.print(table.table())
    return [line.split() for line in console.file.getvalue().splitlines()]


def test_plain_lines_come_now_and_then_and_the_last_step_always(clock):
    console = Console(file=io.StringIO(), width=200)
    with LiveTable(3, console=console, clock=clock) as table:
        clock.now_s = 30
        table.update(STEP)
        clock.now_s = 31
        table.update(STEP | {"reward": 0.5})
        clock.now_s = 32
        table.update(STEP | {"reward": 0.75})
    lines = console.file.getvalue().splitlines()
    assert lines[0] == LINE
    assert [line.split()[1] for line in lines] == ["1/3", "3/3"]
    assert lines[1].endswith("left 0:00")


def test_a_reward_whose_name_looks_like_markup_is_named(clock):
    console = Console(file=io.StringIO(), width=200)
    with LiveTable(1, console=console, clock=clock) as table:
        table.update({"reward": 0.25, "rewards/of[bold]": 0.5, "rewards/[/b]:heart:": 0.75})
    assert console.file.getvalue() == "step 1/1  reward 0.25  of[bold] 0.50  [/b]:heart: 0.75\n"
    assert shown(table) == [["step", "reward", "of[bold]", "[/b]:heart:"], ["1/1", "0.25", "0.50", "0.75"]]


def test_a_large_reward_takes_no_more_room(clock):
    console = Console(file=io.StringIO(), width=200)
    with LiveTable(1, console=console, clock=clock) as table:
        table.update({"reward": 1e300, "rewards/a": -123456.0, "rewards/b": 1e6})
    assert console.file.getvalue() == "step 1/1  reward 1e+300  a -123456.00  b 1e+06\n"


@pytest.mark.parametrize("device_bytes", [4.56 * MIB, 1.5 * GIB, 1000.0])
def test_a_line_fits_80_columns_and_shows_memory_in_a_unit_that_fits_it(clock, device_bytes):
    console = Console(file=io.StringIO(), width=80)
    with LiveTable(300, console=console, clock=clock) as table:
        for step in range(300):
            clock.now_s = 20.0 * step
            table.update({k: v for k, v in STEP.items() if k != "rewards/format"} | {"device_bytes": device_bytes})
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 300 and max(map(len, lines)) <= 80
    assert all(f"memory {format_bytes(int(device_bytes))}" in line and "reward 0.25" in line for line in lines)
    assert lines[-1].endswith("left 0:00")


def test_a_line_that_was_written_is_not_written_again(clock):
    console = Console(file=io.StringIO(), width=200)
    with LiveTable(console=console, clock=clock) as table:
        table.update({"reward": 1.0})
    assert console.file.getvalue() == "step 1  reward 1.00\n"
    with LiveTable(console=console, clock=clock):
        pass
    assert console.file.getvalue() == "step 1  reward 1.00\n"


def test_a_terminal_shows_the_last_steps_and_keeps_them():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with LiveTable(20, console=console, num_rows=2) as table:
        for _ in range(3):
            table.update(STEP)
    text = console.file.getvalue()
    assert "tokens/s" in text and "12,346" in text
    assert text.rindex("3/20") > text.rindex("2/20")
    assert [row[0] for row in shown(table)] == ["step", "2/20", "3/20"]


def test_an_error_leaves_the_terminal_as_it_was():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with pytest.raises(KeyError), LiveTable(console=console) as table:
        table.update(STEP)
        raise KeyError
    assert console.file.getvalue().count("\x1b[?25l") == console.file.getvalue().count("\x1b[?25h") == 1


def test_what_is_missing_has_no_column_and_what_comes_later_has_one(clock):
    table = LiveTable(2, console=Console(file=io.StringIO()), clock=clock)
    table.update({"reward": 1.0})
    assert shown(table)[0] == ["step", "reward"]
    table.update({"reward": 1.0, "completions/mean_length": 7.0})
    assert shown(table)[0] == ["step", "reward", "length", "left"]


@pytest.mark.parametrize(("each_s", "left"), [(0.4, "0:03"), (10, "1:20"), (600, "1:20:00")])
def test_the_time_left_is_that_of_the_steps_after_the_first_which_has_a_start_in_it(clock, each_s, left):
    table = LiveTable(10, console=Console(file=io.StringIO()), clock=clock)
    clock.now_s = 1000
    table.update({})
    assert shown(table)[1] == ["1/10"]
    clock.now_s += each_s
    table.update({})
    assert shown(table)[2][-1] == left


def test_a_notebook_shows_one_table_and_changes_it(monkeypatch):
    updates = []
    handle = SimpleNamespace(update=updates.append)
    displayed = []

    def display(shown, display_id):
        displayed.append(shown)
        return handle

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(HTML=str, display=display))
    console = Console(file=io.StringIO(), force_jupyter=True)
    with LiveTable(2, console=console) as table:
        table.update(STEP)
        table.update(STEP | {"rewards/<b>": 1.0})
    assert len(displayed) == len(updates) == 1
    assert "<th>step</th><th>reward</th><th>format</th>" in displayed[0]
    assert "<td>2/2</td>" in updates[0] and "<th>&lt;b&gt;</th>" in updates[0]
    assert console.file.getvalue() == ""
