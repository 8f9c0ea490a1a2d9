"""The kernels without a GPU: in Triton's interpreter beside torch, and compiled for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


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
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from colo.memory import kernels

halves, digested = {"weights": "*i16", "remainders": "*i16"}, {"digests": "*i64", "numbers": "*i32"}
walked = {"tiles": "*i64", "found": "*i64", "count": "i32"}
found = []
for function, signature, constants in (
    *(
        (kernels._walk, walked, {"COPY": c, "DIGEST": d, "COMPARE": o, "BLOCK": kernels._WORDS_AT_ONCE})
        for c, d, o in ((True, False, False), (False, True, False), (True, True, False), (False, False, True))
    ),
    (kernels._open, halves | digested | {"masters": "*i32", "count": "i64"}, {"BLOCK": 1024}),
    (kernels._close, {"masters": "*i32"} | halves | digested | {"changed": "*i64", "count": "i64"}, {"BLOCK": 1024}),
    (kernels._split, {"masters": "*i32"} | halves | {"count": "i64"}, {"BLOCK": kernels._BLOCK}),
    (kernels._round, {"values": "*i32", "rounded": "*i16", "seed": "i64", "count": "i64"}, {"BLOCK": kernels._BLOCK}),
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
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert min(json.loads(done.stdout.splitlines()[-1])) > 0
