"""Tables of tiles, and the kernels that read them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colo.memory import tiles, triton_kernels

CPU = torch.device("cpu")


@given(
    ranges=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=6),
    width=st.integers(1, 17),
)
def test_tiles_are_the_ranges_cut_at_the_multiples_of_the_width(ranges, width):
    starts, lengths = [start for start, _ in ranges], [length for _, length in ranges]
    cuts = list(zip(*(column.tolist() for column in tiles.cut(starts, lengths, width)), strict=True))
    covered = [(index, offset + i) for index, offset, length in cuts for i in range(length)]
    assert covered == [(index, i) for index, length in enumerate(lengths) for i in range(length)]
    for index, offset, length in cuts:
        assert length > 0 or lengths[index] == length == 0
        start = starts[index] + offset
        assert start // width == (start + max(length, 1) - 1) // width


def test_a_column_grows_by_its_step(monkeypatch):
    monkeypatch.setattr(tiles, "WORDS", 4)
    table = tiles.table([0, 2], [5, 3], ([100, 200], 4), ([7, 8], 0), device=CPU)
    assert table.tolist() == [[100, 7, 4], [116, 7, 1], [200, 8, 2], [208, 8, 1]]


def test_words_are_whole_and_in_a_row():
    base = torch.arange(12, dtype=torch.bfloat16)
    assert torch.equal(tiles.in_words(base).view(torch.bfloat16), base)
    assert tiles.in_words(base[2:8]).data_ptr() == base[2:].data_ptr()
    for other in (base[:3], base[1:5], base[::2], base.view(3, 4).T):
        assert tiles.in_words(other) is None


def test_a_cpu_has_no_kernels(recwarn):
    assert triton_kernels.kernels.__wrapped__(CPU) is None
    assert not recwarn.list


def test_kernels_that_do_not_work_are_warned_of_and_memory_that_is_missing_now_is_not_taken_for_that(monkeypatch):
    pytest.importorskip("triton", reason="Triton is missing, which torch for CUDA brings along")
    from colo.memory import kernels

    def fail(error):
        def try_out(device):
            raise error

        monkeypatch.setattr(kernels, "try_out", try_out)

    gpu = torch.device("cuda", 0)
    fail(RuntimeError("no compiler"))
    with pytest.warns(RuntimeWarning, match="without Triton, which is slower: no compiler"):
        assert triton_kernels.kernels.__wrapped__(gpu) is None
    fail(torch.OutOfMemoryError("not now"))
    with pytest.raises(torch.OutOfMemoryError):
        triton_kernels.kernels.__wrapped__(gpu)
    monkeypatch.setattr(kernels, "try_out", lambda device: None)
    assert triton_kernels.kernels.__wrapped__(gpu) is kernels


def test_kernels_do_what_torch_does():
    pytest.importorskip("triton", reason="Triton is missing, which torch for CUDA brings along")
    # In a process of its own, since Triton asks for the variable once, when it is imported.
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).with_name("interpreted.py")),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "5 passed" in done.stdout


COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from colo.memory import kernels

table = {"tiles": "*i64"}
weights = dict.fromkeys(("of_column", "of_row", "of_chunk", "sums"), "*i64")
sizes = {"COLUMNS": 1 << 10, "ROWS": 1 << 10, "CHUNKS": 1 << 14}
found = []
for function, signature, constants in (
    (kernels._weigh, table | weights, sizes),
    (kernels._compare, table | {"flags": "*i32"}, {"BLOCK": kernels._BLOCK}),
):
    source = ASTSource(function, signature | dict.fromkeys(constants, "constexpr"), constants)
    found.append(len(triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32)).asm["cubin"]))
print(json.dumps(found))
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus_that_are_not_here(tmp_path, capability):
    pytest.importorskip("triton", reason="Triton is missing, which torch for CUDA brings along")
    script = tmp_path / "script.py"  # Triton reads a kernel's source from its file
    script.write_text(COMPILE)
    done = subprocess.run(
        [sys.executable, str(script), str(capability)],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert min(json.loads(done.stdout.splitlines()[-1])) > 0
