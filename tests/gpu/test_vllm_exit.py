"""A script that never closes its runtime ends as it should: vLLM's, colo's and torch-memory-saver's pools are alive."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny_vllm import MARKS

pytestmark = MARKS

SCRIPT = """
    import sys

    sys.path.insert(0, sys.argv[1])
    import torch
    from tiny_vllm import CUDA, PROMPTS, config, train_step
    from torch.optim import AdamW
    from transformers import AutoModelForCausalLM

    import colo
    from colo.config import RuntimeConfig
    from colo.units import GIB

    if __name__ == "__main__":
        AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).save_pretrained(sys.argv[2])
        rt = colo.launch(
            sys.argv[2],
            engine="vllm",
            engine_options={"own_process": sys.argv[3] == "own", "enforce_eager": True, "max_model_len": 256},
            optimizer=lambda params: AdamW(params, lr=1e-3, fused=True),
            device=CUDA,
            config=RuntimeConfig(kv_cache_bytes=GIB, offload="always"),
        )
        train_step(rt, 0)
        with rt.rollout():
            rt.generate(PROMPTS, max_tokens=4, temperature=0)
        print("end")
"""


@pytest.mark.parametrize("process", ["own", "this"])
def test_the_interpreter_ends_without_an_error(tmp_path, process):
    pytest.importorskip("vllm")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, str(script), str(Path(__file__).parent), str(tmp_path / "model"), process],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0 and "end" in done.stdout.splitlines(), done.stderr[-4000:]
