"""Every optimizer that we know trains with parked state as without colo, or is refused by name in one line.

How many of how many is printed by `pytest tests/zoo/test_optimizers.py -rP`.
"""

import copy
import io
import shutil
import warnings
from contextlib import redirect_stdout

import pytest
import torch
from torch.utils import _pytree as pytree

from colo.errors import Unsupported
from colo.phases.phase import Residency
from colo.trainer.state import TrainerState
from tests.zoo.trained import STEPS, Trained, assert_same, park

with warnings.catch_warnings(), redirect_stdout(io.StringIO()):  # the packages have something to say when imported
    warnings.simplefilter("ignore")
    from tests.zoo.optimizers import cases

    ZOO = cases()

pytestmark = pytest.mark.filterwarnings("ignore")  # of the optimizers
OUTCOMES: dict[str, str] = {}


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


@pytest.mark.parametrize("name", ZOO)
def test_training_with_parked_state_is_training_without_colo(name, mover):
    way, refusal = way_of(ZOO[name])
    if way is None:
        OUTCOMES[name] = "does not run here without colo"
        pytest.skip(refusal)
    twin, ours = Trained(ZOO[name]), Trained(ZOO[name])
    try:
        state = TrainerState(ours.optimizer, mover, region_bytes=1024)
    except Unsupported as error:
        OUTCOMES[name] = "is refused"
        assert type(ours.optimizer).__name__ in str(error) and "\n" not in str(error)
        return
    for number in range(STEPS):
        for trained in (twin, ours):
            trained.step(number, way)
        park(state)
        assert state.parkings[0].residency is not Residency.RESIDENT and state.parkings[0].device_bytes == 0
        assert_same(twin.values(), ours.values())
    expected = copy.deepcopy(dict(enumerate(twin.optimizer.state.values())))
    found = copy.deepcopy(dict(enumerate(ours.optimizer.state.values())))
    assert len(pytree.tree_leaves(expected)) == len(pytree.tree_leaves(found))
    state.close()
    for trained in (twin, ours):
        trained.step(STEPS, way)
    assert_same(twin.values(), ours.values())
    OUTCOMES[name] = "keeps some of its state on the device" if state.kept.items else "works"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="torch.compile needs a compiler")
def test_a_step_that_torchao_compiles_finds_its_state(mover):
    name = "torchao-AdamW8bit"
    if name not in ZOO:
        pytest.skip("torchao is not installed")
    torch.compiler.set_stance("default")
    twin, ours = Trained(ZOO[name]), Trained(ZOO[name])
    state = TrainerState(ours.optimizer, mover, region_bytes=1024)
    for number in range(STEPS):
        for trained in (twin, ours):
            trained.step(number, "loop")
        park(state)
        assert state.parkings[0].device_bytes == 0 and not state.kept.items
        assert_same(twin.values(), ours.values())
    state.close()


def test_how_many_of_the_zoo_work():
    counts = {outcome: sum(o == outcome for o in OUTCOMES.values()) for outcome in sorted(set(OUTCOMES.values()))}
    print(f"of {len(ZOO)} optimizers: {counts}")  # noqa: T201 - the figure that this test is run for
    refused = {name for name, outcome in OUTCOMES.items() if outcome == "is refused"}
    assert all(name.startswith("pytorch_optimizer-") for name in refused), "they leave out Optimizer.__init__"
