"""Every optimizer that we know trains with parked state as without colo, or is refused by name in one line.

How many of how many is printed by `pytest tests/unit/trainer/test_zoo.py -rP`.
"""

import copy
import io
import shutil
import warnings
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from colo.errors import Unsupported
from colo.memory.offload import Mover
from colo.phases.phase import Residency
from colo.trainer.optimizer_state import StateOffloader
from colo.trainer.subclasses import is_wrapper
from colo.units import MIB

with warnings.catch_warnings(), redirect_stdout(io.StringIO()):  # the packages have something to say when imported
    warnings.simplefilter("ignore")
    from optimizer_zoo import cases

    ZOO = cases()

pytestmark = pytest.mark.filterwarnings("ignore")  # of the optimizers
OUTCOMES: dict[str, str] = {}
STEPS = 3


class Trained:
    """A small network, its optimizer, and the way in which that one steps."""

    def __init__(self, make):
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        self.optimizer = make(self.net)

    def step(self, number, way):
        torch.manual_seed(number)
        np.random.seed(number)  # Kron of pytorch_optimizer draws from it
        if way == "closure":
            self.optimizer.step(lambda: self.backward(number))
        elif way == "loss":
            self.backward(number)
            self.optimizer.step(lambda: float(self.loss(number)))
        elif way == "loop":
            self.backward(number)
            self.optimizer.step()
        else:
            self.backward(number, create_graph=True)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, number, *, create_graph=False):
        with torch.enable_grad():
            self.optimizer.zero_grad()
            loss = self.loss(number)
            loss.backward(create_graph=create_graph)
        return loss

    def loss(self, number):
        generator = torch.Generator().manual_seed(number)
        return self.net(torch.randn(5, 12, generator=generator)).square().mean()

    def values(self):
        saved = pytree.tree_leaves([self.optimizer.state_dict()["state"], list(self.net.parameters())])
        return [_plain(leaf) for leaf in saved if isinstance(leaf, (torch.Tensor, int, float, bool, str))]


def _plain(leaf):
    if isinstance(leaf, torch.Tensor):
        return (leaf.dequantize() if is_wrapper(leaf) and hasattr(leaf, "block_size") else leaf).detach().cpu()
    return torch.tensor(leaf) if isinstance(leaf, (int, float)) else leaf


def assert_same(left, right):
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) if isinstance(a, torch.Tensor) else a == b


def way_of(make):
    """How an optimizer wants to be stepped, or why it cannot be, without colo."""
    refusals = []
    for way in ("loop", "closure", "loss", "graph"):
        try:
            trained = Trained(make)
            trained.step(0, way)
            trained.step(1, way)
        except Exception as error:  # noqa: BLE001 - whatever it raises, this is not its way
            refusals.append(f"{way}: {type(error).__name__}: {error}")
        else:
            return way, ""
    return None, refusals[0]


@pytest.fixture(autouse=True)
def steps_are_not_compiled():
    torch.compiler.set_stance("force_eager")  # torchao's, twenty seconds each
    yield
    torch.compiler.set_stance("default")


@pytest.fixture
def mover(device):
    mover = Mover(device, host_limit_bytes=64 * MIB)
    yield mover
    mover.close()


def park(offloader):
    offloader.refresh()
    for segment in offloader.segments:
        if segment.residency is Residency.RESIDENT:
            segment.begin(Residency.OFFLOADED).wait()


@pytest.mark.parametrize("name", ZOO)
def test_training_with_parked_state_is_training_without_colo(name, mover):
    way, refusal = way_of(ZOO[name])
    if way is None:
        OUTCOMES[name] = "does not run here without colo"
        pytest.skip(refusal)
    twin, ours = Trained(ZOO[name]), Trained(ZOO[name])
    try:
        offloader = StateOffloader(ours.optimizer, mover, region_bytes=1024)
    except Unsupported as error:
        OUTCOMES[name] = "is refused"
        assert type(ours.optimizer).__name__ in str(error) and "\n" not in str(error)
        return
    for number in range(STEPS):
        for trained in (twin, ours):
            trained.step(number, way)
        park(offloader)
        assert offloader.state.residency is not Residency.RESIDENT and offloader.state.device_bytes == 0
        assert_same(twin.values(), ours.values())
    expected = copy.deepcopy(dict(enumerate(twin.optimizer.state.values())))
    found = copy.deepcopy(dict(enumerate(ours.optimizer.state.values())))
    assert len(pytree.tree_leaves(expected)) == len(pytree.tree_leaves(found))
    offloader.close()
    for trained in (twin, ours):
        trained.step(STEPS, way)
    assert_same(twin.values(), ours.values())
    OUTCOMES[name] = "keeps some of its state on the device" if offloader.kept.loose else "works"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="torch.compile needs a compiler")
def test_a_step_that_torchao_compiles_finds_its_state(mover):
    name = "torchao-AdamW8bit"
    if name not in ZOO:
        pytest.skip("torchao is not installed")
    torch.compiler.set_stance("default")
    twin, ours = Trained(ZOO[name]), Trained(ZOO[name])
    offloader = StateOffloader(ours.optimizer, mover, region_bytes=1024)
    for number in range(STEPS):
        for trained in (twin, ours):
            trained.step(number, "loop")
        park(offloader)
        assert offloader.state.device_bytes == 0 and not offloader.kept.items
        assert_same(twin.values(), ours.values())
    offloader.close()


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
    offloader = StateOffloader(ours.optimizer, mover, region_bytes=1024)
    for number in range(STEPS):
        for trained in (twin, ours):
            trained.step(number, "loop")
        if parked_before_use:
            park(offloader)
        for trained in (twin, ours):
            USES[use](trained, number)
        park(offloader)
        assert offloader.state.residency is not Residency.RESIDENT
        assert_same(twin.values(), ours.values())
    offloader.close()
    for trained in (twin, ours):
        trained.step(STEPS, "loop")
    assert_same(twin.values(), ours.values())


def test_how_many_of_the_zoo_work():
    counts = {outcome: sum(o == outcome for o in OUTCOMES.values()) for outcome in sorted(set(OUTCOMES.values()))}
    print(f"of {len(ZOO)} optimizers: {counts}")  # noqa: T201 - the figure that this test is run for
    refused = {name for name, outcome in OUTCOMES.items() if outcome == "is refused"}
    assert all(name.startswith("pytorch_optimizer-") for name in refused), "they leave out Optimizer.__init__"
