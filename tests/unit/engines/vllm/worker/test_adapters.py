"""What is left to do of an activation once it has been recorded."""

import pytest
import torch

from colo.engines.vllm.worker.adapters import SlotPlan, _Matrices

NAME = "base_model.model.layers.0.q_proj"


@pytest.mark.parametrize(("rank", "zeroed"), [(4, 1), (3, 2)])
def test_a_slot_ends_as_activating_leaves_it_whatever_was_in_it(rank, zeroed):
    slots = torch.full((2, 1, 4, 6), 7.0)  # as vLLM stacks them: slot, 1, rank, inputs
    of_no_module = torch.full((2, 1, 6, 4), 7.0)
    matrix = torch.randn(rank, 6)
    plan = SlotPlan.of(1, [slots[1], of_no_module[1]], [(matrix, slots[1, 0, :rank, :6])])
    assert len(plan.zeroed) == zeroed  # what a copy covers is not written twice
    plan.replay()
    assert torch.equal(slots[1, 0, :rank], matrix)
    assert not slots[1, 0, rank:].any() and not of_no_module[1].any()
    assert (slots[0] == 7).all() and (of_no_module[0] == 7).all()


@pytest.mark.parametrize("scaling", [2.0, 0.3, -2.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scaling_rounds_once_and_leaves_what_was_given(dtype, scaling):
    given = {
        f"{NAME}.lora_A.weight": torch.randn(4, 6, dtype=dtype),
        f"{NAME}.lora_B.weight": torch.randn(8, 4).to(dtype),
    }
    before = {name: tensor.clone() for name, tensor in given.items()}
    matrices = _Matrices(given, torch.device("cpu"), torch.bfloat16)
    matrices.write(given, {NAME: scaling})
    a, b = matrices.by_name.values()
    assert torch.equal(a, given[f"{NAME}.lora_A.weight"].bfloat16())
    assert torch.equal(b, (given[f"{NAME}.lora_B.weight"] * scaling).bfloat16())
    assert all(torch.equal(before[name], tensor) for name, tensor in given.items())
