"""Which optimizers are stepped in parts; tests/zoo/test_streamed.py trains with each of them."""

import pytest
import torch
from transformers import Adafactor

from colo.optim import MasterWeights, register_separable
from colo.trainer.separable import why_not_separable

PARAMETERS = [torch.nn.Parameter(torch.ones(4, 4))]


class Inherits(torch.optim.AdamW):
    """Steps as AdamW does."""


class Overrides(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def test_optimizers_of_torch_and_those_that_step_as_they_do_are_known():
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Muon, Inherits):
        for _ in range(2):  # torch puts hooks around the step of a class when the first is made
            assert why_not_separable(kind(PARAMETERS, lr=0.1)) is None
    assert why_not_separable(Adafactor(PARAMETERS, lr=0.1, relative_step=False)) is None
    assert why_not_separable(MasterWeights(torch.optim.AdamW)(PARAMETERS)) is None


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam, Overrides])
def test_others_are_named_with_what_to_declare(kind):
    for optimizer in (kind(PARAMETERS), MasterWeights(kind)(PARAMETERS)):
        assert f"declare it: colo.optim.register_separable({kind.__name__})" in why_not_separable(optimizer)


def test_masters_of_one_step_of_all_parameters_are_not_stepped_in_parts():
    optimizer = MasterWeights(torch.optim.AdamW, bucket_bytes=None)(PARAMETERS)
    assert "bucket_bytes=None" in why_not_separable(optimizer)


def test_what_is_declared_is_known_with_what_inherits_its_step():
    @register_separable
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    class Heir(Own):
        pass

    assert why_not_separable(Own(PARAMETERS, lr=0.1)) is None
    assert why_not_separable(Heir(PARAMETERS, lr=0.1)) is None
    for wrong in (Own(PARAMETERS, lr=0.1), int, "AdamW"):
        with pytest.raises(TypeError, match="register_separable takes a class of optimizers"):
            register_separable(wrong)
