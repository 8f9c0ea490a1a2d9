import io
import json
import os
import subprocess
import time
from contextlib import suppress
from datetime import UTC, date, datetime
from textwrap import dedent

import psutil
import pytest
import torch
from rich.console import Console

from benchmarks import common
from benchmarks.common import Record, clear, gigabytes_per_s, median_s, of_rounds, own_processes, rows_tables, timed

CPU = torch.device("cpu")


def measured(rows, limit=None, gpu=None):
    record = Record("offload", "python -m benchmarks offload")
    record._circumstances = {"machine": {"gpu": gpu, "cores": 2}, "versions": {}}
    record.limit |= limit or {}
    record.add(*rows)
    return record


def rendered(tables):
    console = Console(file=io.StringIO(), width=160)
    for table in tables:
        console.print(table)
    return console.file.getvalue()


def test_every_row_is_in_the_file_as_soon_as_it_is_there_with_its_circumstances(tmp_path):
    path = tmp_path / "new" / "figures.json"
    record = Record("offload", "python -m benchmarks offload", path=path)
    record.limit["out"] = 1.5
    for rows in ([{"way": "colo", "bytes": 8}], [{"way": "colo", "bytes": 8}, {"way": "other", "bytes": 9}]):
        record.add(rows[-1])
        found = json.loads(path.read_text())
        about = {"benchmark", "command", "commit", "date", "machine", "versions"}
        assert set(found) == about | {"ended", "limit", "rows"}
        assert (found["benchmark"], found["command"]) == ("offload", "python -m benchmarks offload")
        assert (found["limit"], found["rows"]) == ({"out": 1.5}, rows)
        assert found["ended"] == "killed", "as long as nobody has said how it ended"
    record.show([{"way": "all anew"}])
    assert json.loads(path.read_text())["rows"] == [{"way": "all anew"}]
    assert [file.name for file in path.parent.iterdir()] == ["figures.json"]


def test_figures_name_the_commit_and_the_day_that_they_are_of(monkeypatch, tmp_path):
    before, found, after = datetime.now(UTC).date(), Record("offload", "").to_json(), datetime.now(UTC).date()
    assert before <= date.fromisoformat(found["date"]) <= after
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr("benchmarks.common.__file__", str(tmp_path / "benchmarks" / "common.py"))
    assert Record("offload", "").to_json()["commit"] is None, "outside of a checkout there is none"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert Record("offload", "").to_json()["commit"] == head[:12]
    (tmp_path / "new").touch()
    subprocess.run([*git, "add", "new"], check=True)
    assert Record("offload", "").to_json()["commit"] == f"{head[:12]}-dirty"


def of_three_rounds(path=None):
    record = Record("offload", "python -m benchmarks offload", path=path)
    record._circumstances = {"machine": {"gpu": None}, "versions": {}}
    for seconds, count, equal in ((3.0, 2, True), (1.0, 4, True), (2.0, 9, False)):
        if seconds < 3:
            record.begin_round()
        record.limit["out"] = 10 * seconds
        record.add({"way": "colo", "out_s": seconds, "bytes": 8, "note": None})
        record.add({"way": "other", "out_s": 4.0, "bytes": 8, "note": None}, {"count": count, "equal": equal})
    return record


def test_rows_of_several_rounds_are_medians_and_the_file_has_each_round(tmp_path):
    path = tmp_path / "figures.json"
    of_three_rounds(path)
    found = json.loads(path.read_text())
    colo, other, equal, unequal = found["rows"]
    assert colo == {"way": "colo", "out_s": 2.0, "bytes": 8, "note": None}
    assert other == {"way": "other", "out_s": 4.0, "bytes": 8, "note": None}
    assert (equal, unequal) == ({"count": 2, "equal": True}, {"count": 9, "equal": False}), (
        "no median hides what failed"
    )
    assert found["limit"] == {"out": 20.0}
    assert [[row.get("out_s") for row in rows] for rows in found["rounds"]] == [
        [3.0, 4.0, None],
        [1.0, 4.0, None],
        [2.0, 4.0, None],
    ]


def test_rows_are_of_the_same_thing_by_their_words_and_their_place_among_equals():
    rounds = [
        [{"way": "a", "out_s": 1.0}, {"way": "b", "failed": "no memory"}, {"way": "a", "out_s": 5.0}],
        [{"way": "a", "out_s": 2.0}, {"way": "b", "out_s": 3.0}],
        [{"way": "a", "out_s": None}],
    ]
    assert of_rounds(rounds) == [
        ({"way": "a", "out_s": 1.5}, {"out_s": (1.0, 2.0)}),
        ({"way": "b", "failed": "no memory"}, {}),
        ({"way": "a", "out_s": 5.0}, {}),
        ({"way": "b", "out_s": 3.0}, {}),
        ({"way": "a", "out_s": None}, {}),
    ]


def test_a_figure_that_differs_is_shown_with_its_least_and_its_most():
    first, _ = rows_tables(of_three_rounds())
    assert [column.header for column in first.columns] == ["way", "out s"]
    assert list(first.columns[1].cells) == ["2.00 s (1.00 s to 3.00 s)", "4.00 s"]
    assert (first.title, first.caption) == ("offload on the CPU; limit: out 20", "all: bytes 8 B")


def test_time_is_measured_around_the_call():
    moments = []
    assert timed(lambda: moments.append(1), CPU) >= 0
    assert moments == [1]


def test_the_median_leaves_out_warm_up_and_outliers(monkeypatch):
    durations = iter([50.0, 3.0, 1.0, 100.0])
    monkeypatch.setattr(common, "timed", lambda function, device: next(durations))
    assert median_s(lambda: None, CPU, repeats=3, warmup=1) == 3.0


def test_the_function_runs_once_for_each_repeat_and_warm_up():
    calls = []
    median_s(lambda: calls.append(1), CPU, repeats=4, warmup=2)
    assert len(calls) == 6


def test_clearing_empties_the_cache_of_pinned_memory_too_once_the_device_is_done(monkeypatch):
    """What is pinned next is pinned anew, and not handed out again."""
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("device"))
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: calls.append("host"), raising=False)
    clear(torch.device("cuda"))
    assert calls == ["wait", "device", "host"]
    clear(CPU)
    assert len(calls) == 3


def test_rates_are_decimal():
    assert gigabytes_per_s(5_000_000_000, 2.5) == pytest.approx(2.0)


def test_rows_with_the_same_columns_share_a_table():
    rows = [{"way": "a", "bytes": 1}, {"way": "growth", "device_growth_bytes": 0}, {"way": "b", "bytes": 2}]
    tables = rows_tables(measured(rows))
    assert [table.row_count for table in tables] == [2, 1]
    assert [[column.header for column in table.columns] for table in tables] == [
        ["way", "bytes"],
        ["way", "device growth bytes"],
    ]


def test_cells_are_written_in_the_units_of_their_columns():
    row = {"way": "colo", "bytes": 8 << 20, "out_s": 0.25, "out_gb_per_s": 12.3456, "equal": True, "note": None}
    text = rendered(rows_tables(measured([row])))
    for cell in ("colo", "8.00 MiB", "250.0 ms", "12.3", "True"):
        assert cell in text
    assert "None" not in text.replace("limit: none", "")


def test_the_first_table_names_benchmark_machine_and_limit():
    row = {"way": "colo"}
    first, second = rows_tables(measured([row, {"way": "x", "more": 1}], limit={"out_gb_per_s": 53.21}))
    assert first.title == "offload on the CPU; limit: out_gb_per_s 53.2"
    assert second.title is None
    assert rows_tables(measured([row], gpu="NVIDIA H200"))[0].title == "offload on NVIDIA H200; limit: none"


def test_what_is_the_same_in_every_row_stands_in_the_caption():
    rows = [{"way": way, "bytes": 8 << 20, "note": None, "out_s": seconds} for way, seconds in (("a", 1.0), ("b", 2.0))]
    (table,) = rows_tables(measured(rows))
    assert [column.header for column in table.columns] == ["way", "out s"]
    assert table.caption == "all: bytes 8.00 MiB"


def test_a_table_that_is_too_wide_is_turned():
    rows = [{"way": "a", **{f"column_{i}": i for i in range(9)}, "out_s": 2.0}]
    (lying,), (table,) = rows_tables(measured(rows)), rows_tables(measured(rows), width=80)
    assert len(lying.columns) == 11
    assert [column.header for column in table.columns] == ["way", "a"]
    assert list(table.columns[0].cells) == [*(f"column {i}" for i in range(9)), "out s"]
    assert list(table.columns[1].cells) == [*map(str, range(9)), "2.00 s"]


def test_no_rows_no_table():
    assert rows_tables(measured([])) == []


def sleep_for_ever():
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)


class Stopped(BaseException):
    pass


def commands_below():
    """Processes that this one has started, and those that they have, by what they run."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # of one that has ended meanwhile
            found[process] = " ".join(process.cmdline())
    return found


def test_a_call_that_hangs_holds_up_no_limit_of_time_and_leaves_no_process():
    before = commands_below()
    with pytest.raises(Stopped), own_processes() as process:
        process.submit(sleep_for_ever)
        while "sleep 600" not in commands_below().values():
            time.sleep(0.05)
        raise Stopped
    left = {process: command for process, command in commands_below().items() if process not in before}
    assert not [command for command in left.values() if "resource_tracker" not in command]


def test_a_process_of_its_own_ends_by_itself_once_its_calls_are_made():
    with own_processes() as process:
        pid = process.submit(os.getpid).result()
        assert pid != os.getpid()
    assert not psutil.pid_exists(pid)


def test_a_process_of_its_own_imports_a_module_before_all_that_it_patches(tmp_path, monkeypatch):
    code = """
        import os, sys
        found = [name in sys.modules for name in ("torch", "transformers", "trl", "peft")], os.environ.get("EARLY")
        def seen():
            return found
    """
    (tmp_path / "early.py").write_text(dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    import early

    with own_processes(first="early", environment={"EARLY": "yes"}) as process:
        assert process.submit(early.seen).result() == ([True, False, False, False], "yes")
