"""Weights, gradients and state on CUDA are ordinary tensors to everybody else, in both placements of both engines."""

import copy

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_model
from tiny_vllm import CUDA, MARKS, config
from tiny_vllm import launch as launch_vllm
from torch.optim import AdamW

import colo
from colo.config import RuntimeConfig
from colo.memory.probe import free_device_bytes
from colo.units import MIB

pytestmark = MARKS


def embedded():
    return colo.launch(
        config(),
        engine="torch",
        optimizer=lambda params: AdamW(params, lr=1e-3, fused=True),
        device=CUDA,
        config=RuntimeConfig(kv_cache_bytes=64 * MIB, offload="always"),
    )


PLACEMENTS = {
    "embedded": embedded,
    "this process": lambda: launch_vllm(own_process=False, enforce_eager=True),
    "its own process": lambda: launch_vllm(own_process=True, enforce_eager=True),
}


@pytest.fixture(scope="module", params=PLACEMENTS)
def rt(request):
    """One for all tests of a placement, the last of which closes it."""
    runtime = PLACEMENTS[request.param]()
    yield runtime
    runtime.close()


def backward(rt, number=0):
    ids = torch.randint(1, 1000, (4, 64), generator=torch.Generator().manual_seed(number)).to(CUDA)
    rt.model(input_ids=ids, labels=ids).loss.backward()


def step(rt, number=0):
    with rt.train():
        backward(rt, number)
        rt.optimizer.step()
        rt.optimizer.zero_grad()


def assert_same(saved, expected):
    assert len(saved) >= len(expected) - 1  # the embedding is the output layer, and saved once
    for name, tensor in saved.items():
        assert torch.equal(tensor.cpu(), expected[name]), name


def test_state_that_is_away_is_read_and_loaded_where_it_is():
    rt = embedded()
    step(rt)
    state = rt.optimizer.state[rt.model.model.norm.weight]
    held, expected = state["exp_avg"], state["exp_avg"].clone()
    rt.generate([[1, 2]], max_tokens=2)
    assert held.device.type == "cpu" and torch.equal(held, expected.cpu())
    with rt.train():
        rt.optimizer.load_state_dict(copy.deepcopy(rt.optimizer.state_dict()))
        assert torch.equal(rt.optimizer.state[rt.model.model.norm.weight]["exp_avg"].cpu(), expected.cpu())
    rt.generate([[1, 2]], max_tokens=2)
    step(rt)
    rt.close()


def test_gradients_are_the_loops(rt):
    with rt.train():
        backward(rt, 1)
    expected = [p.grad.clone() for p in rt.model.parameters()]
    with rt.rollout():
        rt.generate([[1, 2, 3]], max_tokens=2)
        assert rt.scheduler.segments["trainer.gradients"].device_bytes == 0
    assert all(torch.equal(p.grad, g) for p, g in zip(rt.model.parameters(), expected, strict=True))
    with rt.rollout():
        rt.optimizer.zero_grad()
    assert all(p.grad is None for p in rt.model.parameters())
    step(rt)


@pytest.mark.parametrize("counted", [True, False])
def test_a_write_within_a_rollout_reaches_the_next_call(rt, counted):
    with rt.rollout():
        first, same = (rt.generate([[1, 2, 3]], max_tokens=8, temperature=0)[0] for _ in range(2))
        assert (same.token_ids, same.weights_version) == (first.token_ids, first.weights_version)
        with torch.no_grad():
            weight = rt.model.model.norm.weight
            (weight if counted else weight.data).mul_(-1)
        second = rt.generate([[1, 2, 3]], max_tokens=8, temperature=0)[0]
    assert second.weights_version == first.weights_version + 1
    assert second.logprobs != first.logprobs


def test_what_is_saved_and_kept_is_whole_in_every_phase_and_after_close(rt, tmp_path):
    step(rt)
    expected = {name: tensor.cpu() for name, tensor in rt.model.state_dict().items()}
    assert rt.transport.name == "shared"
    for number, verb in enumerate([rt.rollout, rt.train]):
        with verb():
            Accelerator().save_model(rt.model, tmp_path / f"accelerate{number}")
            save_model(rt.model, str(tmp_path / f"safetensors{number}"))
            assert_same(load_file(tmp_path / f"accelerate{number}" / "model.safetensors"), expected)
            assert_same(load_file(tmp_path / f"safetensors{number}"), expected)
            assert_same(copy.deepcopy(rt.model).state_dict(), expected)
    kept, rows = rt.model.state_dict(), rt.model.get_input_embeddings().weight[3:5]
    rt.close()
    torch.cuda.empty_cache()
    assert_same(kept, expected)
    assert torch.equal(rows.cpu(), expected["model.embed_tokens.weight"][3:5])
    free_bytes = free_device_bytes(CUDA)
    size_bytes = sum(t.nbytes for t in {t.data_ptr(): t for t in kept.values()}.values())
    del kept, rows
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert free_device_bytes(CUDA) - free_bytes >= 0.9 * size_bytes, "memory goes with what was kept of it"
