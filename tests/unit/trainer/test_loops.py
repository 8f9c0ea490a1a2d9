"""What loops do with an optimizer besides its steps, while its state is parked."""

import copy

import pytest
import torch

from colo.phases.phase import Residency
from colo.trainer.state import TrainerState
from tests.zoo.trained import STEPS, Trained, assert_same, park

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # a test calls it before a step


def _averaged(trained, number):
    """An exponential average of what is in the state, kept by the loop in the state itself."""
    for state in trained.optimizer.state.values():
        if "exp_avg" in state:
            average = state.setdefault("average", torch.zeros_like(state["exp_avg"]))
            average.lerp_(state["exp_avg"], 0.1)


def _replaced(trained, number):
    for state in trained.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5


def _perturbed(trained, number):
    """A step in two, as sharpness-aware ones are: weights in other memory for a while, and back."""
    olds = [parameter.data for parameter in trained.net.parameters()]
    for parameter in trained.net.parameters():
        parameter.data = parameter.data + 0.01
    trained.backward(number)
    for parameter, old in zip(trained.net.parameters(), olds, strict=True):
        parameter.data = old
    trained.optimizer.step()


def _remembered(trained, number):
    """What the parameters were, as `.data` of theirs that the state refers to and they take back."""
    for parameter in trained.net.parameters():
        state = trained.optimizer.state[parameter]
        state["old"] = parameter.detach().clone()
        parameter.data = state["old"]


def _grown(trained, number):
    extra = torch.nn.Parameter(torch.full((4,), float(number)))
    trained.optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones(4)
    trained.optimizer.step()


USES = {
    "averages": _averaged,
    "new-tensors": _replaced,
    "perturbed-weights": _perturbed,
    "weights-in-state": _remembered,
    "new-groups": _grown,
    "loaded": lambda trained, number: trained.optimizer.load_state_dict(trained.optimizer.state_dict()),
    "copied": lambda trained, number: trained.optimizer.load_state_dict(copy.deepcopy(trained.optimizer).state_dict()),
    "cleared": lambda trained, number: trained.optimizer.state.clear() if number == 1 else None,
    "scaled": lambda trained, number: torch._foreach_mul_(
        [s["exp_avg"] for s in trained.optimizer.state.values()], 0.5
    ),
    "cast": lambda trained, number: [s.update(exp_avg=s["exp_avg"].clone()) for s in trained.optimizer.state.values()],
    "clipped": lambda trained, number: trained.optimizer.register_step_pre_hook(
        lambda optimizer, *_: torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1) and None
    ),
    "scheduled": lambda trained, number: torch.optim.lr_scheduler.ExponentialLR(trained.optimizer, 0.5).step(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("parked_before_use", [True, False])
def test_what_loops_do_with_an_optimizer_does_the_same_to_one_whose_state_is_parked(use, parked_before_use, mover):
    def make(net):
        return torch.optim.Adam(net.parameters(), lr=1e-2)

    twin, ours = Trained(make), Trained(make)
    state = TrainerState(ours.optimizer, mover, region_bytes=1024)
    for number in range(STEPS):
        for trained in (twin, ours):
            trained.step(number, "loop")
        if parked_before_use:
            park(state)
        for trained in (twin, ours):
            USES[use](trained, number)
        park(state)
        assert state.parkings[0].residency is not Residency.RESIDENT
        assert_same(twin.values(), ours.values())
    state.close()
    for trained in (twin, ours):
        trained.step(STEPS, "loop")
    assert_same(twin.values(), ours.values())
