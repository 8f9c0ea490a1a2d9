from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import colo
from colo.phases.phase import TRAINER_OPTIMIZER, Residency
from tests.models import tiny_qwen3
from tests.runtimes import adamw, make_engine

CONFIG = tiny_qwen3(num_hidden_layers=2)
IDS = torch.tensor([[1, 2, 3, 4]])


class WithValueHead(nn.Module):
    """A wrapper as TRL's `AutoModelForCausalLMWithValueHead` is one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = model
        self.v_head = nn.Linear(32, 1)

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.pretrained_model(input_ids=input_ids, output_hidden_states=True)
        return output.logits, self.v_head(output.hidden_states[-1])


def make(form: str) -> tuple[nn.Module, nn.Module, nn.Module, list[nn.Parameter]]:
    """What is shared, the language model in it, the head, and the parameters to train."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG))
    if form == "around":
        wrapper = WithValueHead(model)
        return wrapper, model, wrapper.v_head, list(wrapper.parameters())
    head = nn.Linear(32, 1)
    if form == "within":
        model.v_head = head
        return model, model, head, list(model.parameters())
    return model, model, head, [*model.parameters(), *head.parameters()]


def step(model: nn.Module, head: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    output = model(input_ids=IDS + number, output_hidden_states=True)
    (output.logits.logsumexp(-1).mean() + head(output.hidden_states[-1]).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("form", ["within", "around", "beside"])
def test_a_value_head_trains_along_and_the_engine_samples_from_the_language_model(form):
    shared, model, head, params = make(form)
    rt = colo.share(make_engine(config=CONFIG), shared, adamw(params), config=colo.RuntimeConfig(offload="always"))
    _, twin, twin_head, twin_params = make(form)
    twin_optimizer = adamw(twin_params)
    for number in range(3):
        (completion,) = rt.generate([[1, 2, 3]], max_tokens=4, temperature=0)
        assert rt.scheduler.segments[TRAINER_OPTIMIZER].residency is not Residency.RESIDENT
        with torch.no_grad():
            logits = twin(input_ids=torch.tensor([[1, 2, 3, *completion.token_ids]])).logits[0, 2:-1]
        assert logits.argmax(-1).tolist() == list(completion.token_ids)
        with rt.train():
            step(model, head, rt.optimizer, number)
        step(twin, twin_head, twin_optimizer, number)
    assert all(torch.equal(a, b) for a, b in zip(params, twin_params, strict=True))
    sizes = sum(2 * p.numel() * 4 for p in params)
    assert rt.scheduler.segments[TRAINER_OPTIMIZER].size_bytes >= sizes
    assert rt.model is model
    assert colo.Runtime.of(shared) is rt
    rt.close()
    assert rt.transport.name == "shared"
    assert all(torch.equal(a, b) for a, b in zip(params, twin_params, strict=True))


def test_a_head_that_is_added_later_is_refused():
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG))
    rt = colo.share(make_engine(config=CONFIG), model, adamw(model.parameters()))
    model.v_head = nn.Linear(32, 1)
    with pytest.raises(colo.StaleWeights, match="weights that it did not have when the runtime was built, v_head"):
        rt.generate([[1]], max_tokens=1)
    rt.close()


def test_a_child_that_the_models_own_forward_computes_with_is_not_left_out():
    class Gated(Qwen3ForCausalLM):
        def __init__(self, config: Qwen3Config) -> None:
            super().__init__(config)
            self.gate = nn.Linear(64, 64)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = self.gate(output.logits)
            return output

    model = Gated(CONFIG)
    with pytest.raises((ValueError, colo.ColoError), match=r"gate\.weight"):
        colo.share(make_engine(config=CONFIG), model, adamw(model.parameters()))


def test_weights_within_the_models_layers_are_never_left_out():
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG))
    model.model.layers[0].v_head = nn.Linear(32, 1)
    with pytest.raises((ValueError, colo.ColoError), match=r"v_head"):
        colo.share(make_engine(config=CONFIG), model, adamw(model.parameters()))


def test_a_wrapper_around_two_language_models_is_refused_by_their_names():
    class ActorCritic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = (AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG)) for _ in range(2))

    model = ActorCritic()
    with pytest.raises(colo.Unsupported, match=r"2 language models in it \(actor, critic\): pass the one"):
        colo.share(make_engine(config=CONFIG), model, adamw(model.parameters()))
    rt = colo.share(make_engine(config=CONFIG), model.actor, adamw(model.parameters()))
    rt.generate([[1]], max_tokens=1)
    rt.close()


def test_launch_refuses_a_model_with_a_head_that_it_would_leave_behind():
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG))
    for name in ("v_head", "q_head", "a_head", "z_head"):
        setattr(model, name, nn.Linear(32, 1))
    with pytest.raises(colo.Unsupported, match=r"without a_head, q_head, v_head, z_head: share this one"):
        colo.launch(model, device="cpu")


def test_a_parameter_that_the_model_had_before_is_not_taken_for_one_beside_it():
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIG))
    optimizer = adamw(model.parameters())
    model.lm_head.weight = nn.Parameter(torch.zeros(64, 32))
    with pytest.raises(colo.Unsupported, match=r"1 parameters of the optimizer are not the model's.*\(64, 32\)"):
        colo.share(make_engine(config=CONFIG), model, optimizer)
