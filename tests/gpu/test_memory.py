"""Regions, arena and offloading on CUDA."""

import subprocess
import sys
import textwrap

import pytest
import torch

from colo.errors import BudgetError, PhaseError
from colo.memory.offload import Mover, RegionSegment
from colo.memory.probe import free_device_bytes
from colo.memory.region import allocate_region
from colo.phases.phase import Residency
from colo.trainer.master_weights import MasterWeights
from colo.trainer.state import TrainerState
from colo.units import GIB, MIB
from colo.weights.sources.module import ModuleSource
from colo.weights.transports import choice
from colo.weights.transports.choice import SharedTransport

pytestmark = pytest.mark.gpu
R, O, D = Residency.RESIDENT, Residency.OFFLOADED, Residency.DISCARDED  # noqa: E741
CUDA = torch.device("cuda", 0)


def run(script):
    code = "import torch\nfrom colo.memory.region import allocate_region\nD = torch.device('cuda', 0)\n"
    return subprocess.run(
        [sys.executable, "-c", code + textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "script",
    [
        "r = allocate_region(1 << 20, D, name='r'); print('end')",
        "r = allocate_region(1 << 20, D, name='r'); r.release(); print('end')",
        "r = allocate_region(1 << 20, D, name='r'); t = r.bytes[:8]; r.close(); print('end')",
        "r = allocate_region(1 << 20, D, name='r'); r.close(); s = allocate_region(1 << 20, D, name='s'); print('end')",
        "r = allocate_region(1 << 20, D, name='r'); del r; torch.cuda.empty_cache(); print('end')",
    ],
    ids=["resident", "released", "closed-with-a-view", "reused", "dropped"],
)
def test_the_interpreter_ends_without_an_error_whatever_is_left(script):
    done = run(script)
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr


def test_pages_go_back_to_the_driver_and_addresses_stay():
    region = allocate_region(2 * GIB, CUDA, name="r")
    address, free = region.bytes.data_ptr(), free_device_bytes(CUDA)
    region.release()
    assert free_device_bytes(CUDA) - free >= 2 * GIB
    with pytest.raises(PhaseError):
        region.release()
    region.restore()
    assert region.bytes.data_ptr() == address
    region.bytes.fill_(3)
    assert int(region.bytes[-1]) == 3
    region.close()


def test_closed_regions_hold_nothing_and_their_range_is_taken_again():
    first = allocate_region(GIB, CUDA, name="a")
    address, free = first.bytes.data_ptr(), free_device_bytes(CUDA)
    first.close()
    assert free_device_bytes(CUDA) - free >= GIB
    second = allocate_region(GIB, CUDA, name="b")
    assert second.bytes.data_ptr() == address
    second.bytes.zero_()
    second.close()


def test_a_range_that_is_still_referred_to_is_not_reused():
    first = allocate_region(64 * MIB, CUDA, name="a")
    view = first.bytes[:16]
    first.close()
    second = allocate_region(64 * MIB, CUDA, name="b")
    assert second.bytes.data_ptr() != view.data_ptr()
    second.bytes.zero_()
    torch.cuda.synchronize()
    second.close()


def test_a_restore_that_cannot_succeed_raises_and_the_region_stays_released():
    region = allocate_region(2 * GIB, CUDA, name="r")
    region.release()
    torch.cuda.empty_cache()
    hog = torch.empty(free_device_bytes(CUDA) - GIB, dtype=torch.uint8, device=CUDA)
    with pytest.raises(BudgetError, match="region r needs 2.00 GiB of cuda:0"):
        region.restore()
    assert not region.resident
    del hog
    region.restore()
    region.close()


def test_memory_that_torch_only_caches_is_given_up_for_a_restore():
    region = allocate_region(2 * GIB, CUDA, name="r")
    region.release()
    hog = torch.empty(free_device_bytes(CUDA) - GIB, dtype=torch.uint8, device=CUDA)
    del hog
    region.restore()
    assert region.resident
    region.close()


def test_cycles_keep_every_bit_and_a_cuda_graph_stays_valid():
    mover = Mover(CUDA, host_limit_bytes=4 * GIB)
    regions = [allocate_region(256 * MIB, CUDA, name=f"r{i}") for i in range(3)]
    for region in regions:
        region.bytes.random_()
    before = [region.bytes.cpu() for region in regions]
    segment = RegionSegment("s", regions=regions, away=O, mover=mover)
    view = regions[0].bytes[:4096]
    total = torch.zeros((), dtype=torch.int64, device=CUDA)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.copy_(view.sum(dtype=torch.int64))
    graph.replay()
    expected = total.clone()
    for _ in range(3):
        free = free_device_bytes(CUDA)
        segment.begin(O).wait()
        assert free_device_bytes(CUDA) - free >= segment.size_bytes - 4 * MIB  # torch may take a small block meanwhile
        segment.begin(R).wait()
        total.zero_()
        graph.replay()
        assert torch.equal(total, expected)
    assert all(torch.equal(old, region.bytes.cpu()) for old, region in zip(before, regions, strict=True))
    segment.close()
    mover.close()


def test_a_departure_can_be_called_back():
    mover = Mover(CUDA, host_limit_bytes=4 * GIB)
    regions = [allocate_region(512 * MIB, CUDA, name=f"r{i}") for i in range(4)]
    for index, region in enumerate(regions):
        region.bytes.fill_(index + 1)
    segment = RegionSegment("s", regions=regions, away=O, mover=mover)
    for wait_for in (0, 2):
        departure = segment.begin(O)
        for _ in range(wait_for):
            departure._pending[0][1].wait()
            departure.poll()
        segment.begin(R).wait()
        assert segment.device_bytes == segment.size_bytes
        assert all(bool((region.bytes == index + 1).all()) for index, region in enumerate(regions))
    segment.close()
    mover.close()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("masters", [True, False])
def test_training_on_cuda_is_bit_equal_with_the_state_parked_between_steps(fused, masters):
    mover = Mover(CUDA, host_limit_bytes=2 * GIB)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if masters else torch.float32
    plain = torch.nn.Linear(2048, 1024, device=CUDA, dtype=dtype)
    parked = torch.nn.Linear(2048, 1024, device=CUDA, dtype=dtype)
    parked.load_state_dict(plain.state_dict())

    def make(params):
        return torch.optim.AdamW(params, lr=1e-2, fused=fused)

    build = MasterWeights(make) if masters else make
    reference, optimizer = build(plain.parameters()), build(parked.parameters())
    state = TrainerState(optimizer, mover, region_bytes=4 * MIB)
    for step in range(4):
        x = torch.randn(8, 2048, device=CUDA, dtype=dtype, generator=torch.Generator(CUDA).manual_seed(step))
        for net, opt in ((plain, reference), (parked, optimizer)):
            net(x).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
        for segment in state.segments:
            segment.begin(O).wait() if segment.residency is R else None
        assert state.parkings[0].device_bytes == 0
    assert torch.equal(plain.weight, parked.weight)
    for key in ("exp_avg", "exp_avg_sq"):
        parked_state = optimizer.state_dict()["state"][0][key]
        assert torch.equal(reference.state[plain.weight][key].cpu(), parked_state)
    state.close()
    mover.close()


def test_gradients_of_an_unfinished_accumulation_are_parked_and_come_back():
    mover = Mover(CUDA, host_limit_bytes=GIB)
    net = torch.nn.Linear(2048, 2048, device=CUDA)
    state = TrainerState(torch.optim.AdamW(net.parameters(), fused=True), mover)
    x = torch.randn(64, 2048, device=CUDA)
    net(x).square().mean().backward()
    expected = [2 * p.grad for p in net.parameters()]
    state.gradients.begin(O).wait()
    assert state.gradients.device_bytes == 0 and all(p.grad.device.type == "cpu" for p in net.parameters())
    state.gradients.begin(R).wait()
    net(x).square().mean().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, net.parameters(), strict=True))
    state.close()
    mover.close()


def test_weights_that_find_no_room_of_their_own_move_to_the_host(monkeypatch):
    net = torch.nn.Linear(8, 8, device=CUDA)
    values = [p.detach().cpu() for p in net.parameters()]
    aliases = {name: p.data for name, p in net.named_parameters()}
    transport = SharedTransport(ModuleSource(net), aliases)
    monkeypatch.setattr(choice, "has_room", lambda tensor, device: tensor.ndim == 1)
    transport.move_out(CUDA)
    assert (net.weight.device.type, net.bias.device) == ("cpu", CUDA)
    assert net.bias.data_ptr() != aliases["bias"].data_ptr()
    assert all(torch.equal(p.cpu(), value) for p, value in zip(net.parameters(), values, strict=True))


def test_parked_state_comes_back_at_its_address_and_views_keep_theirs():
    mover = Mover(CUDA, host_limit_bytes=GIB)
    net = torch.nn.Linear(1024, 1024, device=CUDA, bias=False)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    state = TrainerState(optimizer, mover, region_bytes=4 * MIB)
    net(torch.randn(8, 1024, device=CUDA)).square().mean().backward()
    optimizer.step()
    first, second = (optimizer.state[net.weight][key] for key in ("exp_avg", "exp_avg_sq"))
    expected = [first.clone(), second.clone()]
    parking = state.parkings[0]
    for target in (O, R):  # from the first return on addresses stay
        parking.begin(target).wait()
    address, view = second.data_ptr(), first.view(-1)
    free = free_device_bytes(CUDA)
    state.refresh()
    parking.begin(O).wait()
    assert free_device_bytes(CUDA) - free >= 4 * MIB
    assert second.device.type == "cpu" and second.is_pinned() and first.device == CUDA
    assert torch.equal(view, expected[0].view(-1)) and torch.equal(second, expected[1].cpu())
    assert [kept.size_bytes for kept in state.kept.items if kept.name != "gradients"] == [4 * MIB]
    parking.begin(R).wait()
    assert torch.equal(second, expected[1]) and second.data_ptr() == address
    del view
    state.refresh()
    parking.begin(O).wait()
    state.close(torch.device("cpu"))
    assert first.device == second.device == torch.device("cpu")
    assert torch.equal(first, expected[0].cpu()) and torch.equal(second, expected[1].cpu())
    mover.close()
