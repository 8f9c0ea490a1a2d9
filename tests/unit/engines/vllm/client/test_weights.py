"""Which memory of a vLLM worker a trainer's process maps, and which it leaves alone."""

from types import SimpleNamespace

import pytest
import torch

import colo
from colo.engines.vllm.client.elsewhere import WeightsElsewhere
from colo.engines.vllm.client.memory import WorkerWeights
from colo.memory.share import SharedMemory
from colo.memory.specs import CopySpec, Place, TensorSpec

CPU = torch.device("cpu")
SOURCE = {"a.weight": torch.zeros(2, 3)}


@pytest.fixture
def slab():
    slab = SharedMemory(64, CPU)
    slab.bytes.view(torch.float32).copy_(torch.arange(16))
    yield slab
    slab.close()


def weights_of(descriptions, *, device="cpu", is_own=False):
    """A link to one worker that keeps `a.weight` 16 bytes into its memory."""
    place = Place(TensorSpec("a.weight", "float32", (2, 3), (3, 1)), 0, 16)
    copy = CopySpec((2, 3), (3, 1), 0, place).to_wire()
    answer = {"copies": [copy], "fallbacks": {}, "memory": descriptions, "unused": []}
    link = SimpleNamespace(
        infos=[SimpleNamespace(device=device, weights_in="memory")],
        device=CPU,
        same_process=False,
        why_not_shared=None,
        through=None,
        is_own=is_own,
        call=lambda request: [answer],
    )
    return WorkerWeights(link, store=None, staging=None)


def test_memory_of_a_worker_is_mapped_once_and_is_the_weight(slab):
    weights = weights_of([slab.describe(to_pid=0)])
    first, second = (weights.record_plan(SOURCE).aliases["a.weight"] for _ in range(2))
    assert torch.equal(first, torch.arange(4, 10).view(2, 3).float())
    assert first.data_ptr() == second.data_ptr()
    first.zero_()
    assert slab.bytes.view(torch.float32)[4:10].eq(0).all()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"device": "GPU-1"}, "on another GPU"),
        ({"is_own": True}, "ends with its process: start it with share_memory=True"),
    ],
)
def test_memory_that_may_not_be_shared_is_a_fallback(slab, options, why):
    plan = weights_of([slab.describe(to_pid=0)], **options).record_plan(SOURCE)
    assert plan.copies == () and why in plan.fallbacks["a.weight"]


def test_memory_that_cannot_be_mapped_is_a_fallback(slab):
    description = slab.describe(to_pid=0)
    slab.close()
    plan = weights_of([description]).record_plan(SOURCE)
    assert plan.copies == () and "cannot map" in plan.fallbacks["a.weight"]


@pytest.mark.parametrize(("server", "sums"), [("cpu", True), ("GPU-1234", False)])
def test_changes_are_sent_where_checksums_are_of_one_kind(server, sums, caplog):
    link = SimpleNamespace(
        through=colo.WeightsFolder("weights", delta=True),
        device=CPU,
        infos=[SimpleNamespace(device=server)],
        placement="a vLLM server",
    )
    assert (WeightsElsewhere(link)._refusal is None) is sums
    assert ("is sent all weights each time: checksums of a CPU" in caplog.text) is not sums
