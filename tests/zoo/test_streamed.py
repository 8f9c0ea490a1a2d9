"""Every optimizer that is known to update each parameter by itself trains, streamed, as without colo, bit for bit.

How many there are is printed by `pytest tests/zoo/test_streamed.py -rP`.
"""

import io
import warnings
from contextlib import redirect_stdout

import pytest
import torch

from colo.phases.phase import Residency
from colo.trainer.optimizers import is_elementwise, why_not_separable
from colo.trainer.planes import Range
from colo.trainer.streamed import StreamedState
from colo.trainer.window import Bucket
from tests.zoo.trained import STEPS, Trained, assert_same

with warnings.catch_warnings(), redirect_stdout(io.StringIO()):  # the packages have something to say when imported
    warnings.simplefilter("ignore")
    from tests.zoo.optimizers import cases

    ZOO = cases()

pytestmark = pytest.mark.filterwarnings("ignore")  # of the optimizers
OUTCOMES: dict[str, str] = {}


class Wide(Trained):
    """The same, wide enough for a weight to be cut into several ranges."""

    SIZES = (67, 33)


@pytest.fixture(autouse=True)
def steps_are_not_compiled():
    torch.compiler.set_stance("force_eager")  # torchao's, twenty seconds each
    yield
    torch.compiler.set_stance("default")


@pytest.mark.parametrize("region_bytes", [1, 20_000])
@pytest.mark.parametrize("name", ZOO)
def test_streamed_training_is_training_without_colo(name, region_bytes, mover):
    try:
        reason = why_not_separable(Wide(ZOO[name]).optimizer)
        Wide(ZOO[name]).step(0, "loop")
    except Exception as error:  # noqa: BLE001 - whatever it raises, it does not run here
        pytest.skip(f"does not run here: {error}")
    if reason is not None:
        OUTCOMES[name] = "resident"
        pytest.skip(reason)
    OUTCOMES[name] = "streamed"
    twin, ours = Wide(ZOO[name]), Wide(ZOO[name])
    state = StreamedState(ours.optimizer, mover, region_bytes=region_bytes)
    work = list(state.window.work())
    assert len(work) > 1 or region_bytes > 1
    assert {type(each) for each in work} == {Range if is_elementwise(ours.optimizer) else Bucket}
    for number in range(STEPS):
        for trained in (twin, ours):
            trained.step(number, "closure" if number == 1 else "loop")
        state.window.begin(Residency.OFFLOADED).wait()
        assert state.window.device_bytes == 0
        assert {kept.reason for kept in state.window.kept} <= {"several parameters share it"}
        assert_same(twin.values(), ours.values())
    state.close()
    for trained in (twin, ours):
        trained.step(STEPS, "loop")
    assert_same(twin.values(), ours.values())


def test_optimizers_of_torch_bitsandbytes_and_torchao_are_streamed():
    streamed = {name for name, outcome in OUTCOMES.items() if outcome == "streamed"}
    print(f"of {len(ZOO)} optimizers {len(streamed)} are streamed")  # noqa: T201 - what this test is run for
    assert {name.partition("-")[0] for name in streamed} >= {"torch", "torchao", "bitsandbytes"}
