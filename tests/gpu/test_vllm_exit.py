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


AGAIN = """
    import sys

    import torch
    from peft import LoraConfig

    import colo
    from colo.testing import tiny_checkpoint

    if __name__ == "__main__":
        model = tiny_checkpoint(sys.argv[1])
        for rank in (8, 4):  # of another rank, whose buffers have other strides
            free_bytes = torch.cuda.mem_get_info()[0]
            rt = colo.launch(
                str(model),
                engine="vllm",
                engine_options={"own_process": False, "enforce_eager": True, "max_model_len": 128},
                lora=LoraConfig(r=rank, target_modules="all-linear"),
                config=colo.RuntimeConfig(kv_cache_bytes="1GiB"),
            )
            for name, p in rt.model.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.normal_(p, std=0.5)
            check = colo.check(rt)
            assert check.mismatch < 0.1, check
            rt.close()
            print("free again", torch.cuda.mem_get_info()[0] > free_bytes - 2**30)
"""


def test_an_engine_with_an_adapter_gives_its_memory_back_and_another_follows(tmp_path):
    pytest.importorskip("vllm")
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(AGAIN))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "model")], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0 and done.stdout.split("\n").count("free again True") == 2, (
        done.stdout[-1000:] + done.stderr[-4000:]
    )
