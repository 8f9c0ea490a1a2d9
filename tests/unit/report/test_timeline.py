from rich.text import Text

from colo.phases.phase import Phase
from colo.phases.trace import MemorySample, Trace
from colo.report import memory_timeline
from colo.report.table import BLOCKS
from colo.units import GIB

WEIGHTS, KV, NEVER = "engine.weights", "engine.kv_cache", "trainer.adapter"


def sample(trace, time_s, phase, **segments):
    held = {WEIGHTS: 2 * GIB, KV: 0, NEVER: 0} | {name.replace("__", "."): size for name, size in segments.items()}
    trace.samples.append(MemorySample(time_s=time_s, phase=phase, segments=held))


def phase(trace, kind, start_s, end_s):
    trace.add(kind, start_s, end_s=end_s, category="phase", phase=kind)


def run(num_steps=4, capacity_bytes=8 * GIB):
    """Steps of ten seconds: four samples each, of which one in the rollout holds a KV cache."""
    trace = Trace(capacity_bytes=capacity_bytes)
    for step in range(num_steps):
        t = 10.0 * step
        phase(trace, Phase.ROLLOUT, t, t + 5)
        phase(trace, Phase.TRAIN, t + 6, t + 10)
        sample(trace, t, Phase.SYNC)
        sample(trace, t + 1, Phase.ROLLOUT, engine__kv_cache=(step + 1) * GIB)
        sample(trace, t + 5.5, Phase.IDLE)
        sample(trace, t + 6, Phase.TRAIN)
    return trace


def rows(text):
    """What stands behind each row's label, cells first: the first row, of phases, has no gaps and shows where."""
    assert isinstance(text, Text)
    lines = text.plain.splitlines()
    start = len(lines[0]) - len(lines[0].removeprefix("phase").lstrip())
    return {line[:start].strip(): line[start:] for line in lines}


def cells(row, count):
    return row[:count]


def test_nothing_recorded_is_said():
    assert memory_timeline(Trace()).plain == "no memory has been recorded yet"


def test_each_event_is_one_column_and_each_segment_one_row():
    found = rows(memory_timeline(run(2), num_cycles=2))
    assert list(found)[:4] == ["phase", WEIGHTS, KV, "all segments"]
    assert found["phase"] == "sr.t" * 2
    assert cells(found[WEIGHTS], 8) == BLOCKS[2] * 8  # 2 of 8 GiB, in eighths
    assert cells(found[KV], 8) == "".join([" ", BLOCKS[1], " ", " ", " ", BLOCKS[2], " ", " "])
    assert cells(found["all segments"], 8) == "".join(BLOCKS[n] for n in (2, 3, 2, 2, 2, 4, 2, 2))


def test_rows_end_with_the_most_that_was_held_and_the_last_says_the_scale():
    text = memory_timeline(run(2), num_cycles=2).plain
    assert rows(Text(text))[KV].endswith("  2.00 GiB")
    assert rows(Text(text))["all segments"].endswith("  4.00 GiB")
    assert "full height 8.00 GiB" in text.splitlines()[-1]


def test_segments_that_never_held_a_byte_have_no_row():
    assert NEVER not in memory_timeline(run()).plain


def test_only_the_last_steps_are_drawn():
    found = rows(memory_timeline(run(4), num_cycles=1))
    assert found["phase"] == "sr.t"
    assert found[KV].endswith("4.00 GiB")


def test_fewer_steps_than_asked_for_are_all_drawn():
    assert rows(memory_timeline(run(2), num_cycles=5))["phase"] == "sr.t" * 2


def test_without_a_capacity_the_peak_is_full_height():
    found = rows(memory_timeline(run(2, capacity_bytes=None), num_cycles=2))
    assert max(cells(found["all segments"], 8)) == BLOCKS[-1]
    assert "full height 4.00 GiB" in list(found.values())[-1]


def test_a_byte_is_seen_and_more_than_the_capacity_is_full():
    trace = Trace(capacity_bytes=8 * GIB)
    sample(trace, 0, Phase.ROLLOUT, engine__kv_cache=1)
    sample(trace, 1, Phase.ROLLOUT, engine__kv_cache=80 * GIB)
    assert cells(rows(memory_timeline(trace))[KV], 2) == BLOCKS[1] + BLOCKS[-1]


def test_a_narrow_timeline_keeps_its_peaks_and_its_width():
    trace = run(40)
    text = memory_timeline(trace, width=60, num_cycles=40)
    assert max(len(line) for line in text.plain.splitlines()[:-1]) <= 60
    assert rows(text)[KV].endswith("40.00 GiB")
    assert BLOCKS[-1] in rows(text)[KV]


def test_memory_of_nothing_but_zeros_is_drawn_flat():
    trace = Trace()
    trace.samples.append(MemorySample(time_s=0, phase=Phase.IDLE, segments={WEIGHTS: 0}))
    assert cells(rows(memory_timeline(trace))["all segments"], 1) == " "
