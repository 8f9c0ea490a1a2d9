"""An optimizer's step that torch.compile has taken over."""

import copy

import pytest
import torch

from colo.phases.phase import Residency
from tests.runtimes import ALWAYS, adamw, launch


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # dynamo's own
@pytest.mark.parametrize("how", ["a method", "a function"])
def test_a_compiled_step_trains_as_without_colo(how):
    torch._dynamo.reset()

    def compiled(optimizer):
        step = optimizer.step if how == "a method" else (lambda: optimizer.step())
        return torch.compile(step, backend="eager")

    rt = launch(config=ALWAYS)
    twin = copy.deepcopy(rt.model)
    reference = adamw(twin.parameters())
    ours, others = compiled(rt.optimizer), compiled(reference)
    for number in range(3):
        ids = torch.tensor([[number, 2, 3, 4]])
        twin(input_ids=ids, labels=ids).loss.backward()
        others(), reference.zero_grad()
        with rt.train():
            rt.model(input_ids=ids, labels=ids).loss.backward()
            ours(), rt.optimizer.zero_grad()
        rt.generate([[1]], max_tokens=1)
        assert rt.scheduler.segments["trainer.optimizer"].residency is Residency.OFFLOADED
    assert rt.weights_version == 3
    assert all(torch.equal(a, b) for a, b in zip(rt.model.parameters(), twin.parameters(), strict=True))
    rt.close()
