"""Parked tensors: the same objects over host memory, whole in any order of moves, writes, views and drops."""

import copy
import gc
import io
import os
import random
import signal
from contextlib import suppress

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from colo.errors import BudgetError
from colo.memory import parking
from colo.memory.offload import Mover
from colo.memory.parking import Parking
from colo.phases.phase import Residency
from colo.testing import FakeDevice, ForgetfulRegion, LateMover
from colo.units import KIB, MIB
from tests.zoo.trained import is_at_host

R, O, D = Residency.RESIDENT, Residency.OFFLOADED, Residency.DISCARDED  # noqa: E741


@pytest.fixture
def late():
    mover = LateMover(host_limit_bytes=64 * MIB)
    yield mover
    mover.close()


def tensors(*sizes):
    return [torch.randn(size) for size in sizes or (300, 5, 1000)]


def parked(mover, given, **options):
    """A parking of `given`, away."""
    segment = Parking("s", mover, **options)
    segment.look(given)
    segment.begin(O).wait()
    return segment


def cycle(segment, given):
    segment.look(given)
    segment.begin(O).wait()
    segment.begin(R).wait()


# ---- what a parked tensor is ----------------------------------------------------------------------------------------


def test_a_parked_tensor_is_the_same_object_and_an_ordinary_one(mover):
    given = tensors()
    expected = [tensor.clone() for tensor in given]
    segment = parked(mover, given)
    assert (segment.residency, segment.device_bytes) == (O, 0) and segment.host_bytes > 0
    for tensor, before in zip(given, expected, strict=True):
        assert type(tensor) is torch.Tensor and is_at_host(mover, tensor) and torch.equal(tensor, before)
    given[0].mul_(2)
    given[1].data = torch.full((5,), 7.0)
    torch._foreach_zero_([given[2]])
    assert segment.residency is O, "nothing moves"
    segment.begin(R).wait()
    assert torch.equal(given[0], 2 * expected[0]) and given[1].eq(7).all() and given[2].eq(0).all()
    assert not is_at_host(mover, given[0]) and not is_at_host(mover, given[2])


def test_saving_a_parked_tensor_writes_its_bytes_alone(mover):
    given = tensors(100, 100_000)
    parked(mover, given)
    file = io.BytesIO()
    torch.save(given[0], file)
    assert file.tell() < 4000
    assert given[0].untyped_storage().nbytes() == 400
    assert torch.equal(copy.deepcopy(given[1]), given[1])


@pytest.mark.parametrize(
    "make",
    [
        lambda: list(torch.randn(2, 40).unbind()),
        lambda: [(base := torch.randn(8, 6)), base.t(), base[2], base.view(torch.int32)],
        lambda: [torch.randn(6, 8).t(), torch.randn(3, 4, 5).permute(2, 0, 1)],
        lambda: [torch.ones(1).expand(7)],
        lambda: [torch.randn(4).bfloat16(), torch.arange(3), torch.tensor([True]), torch.randn(2, dtype=torch.cfloat)],
        lambda: [torch.tensor(3.0), torch.randn(5)],
        lambda: [torch.zeros(0), torch.randn(5), torch.zeros(3, 0)],
    ],
    ids=["one-buffer", "views", "strided", "expanded", "dtypes", "scalar", "empty"],
)
def test_shapes_strides_dtypes_and_shared_memory_stay(make, late):
    given = make()
    expected = [tensor.clone() for tensor in given]
    layouts = [(t.stride(), t.dtype, t.storage_offset()) for t in given]
    segment = Parking("s", late)
    for _ in range(2):
        segment.look(given)
        segment.begin(O).wait()
        assert all(map(torch.equal, given, expected)) and not segment.kept and segment.device_bytes == 0
        segment.begin(R).wait()
        assert all(map(torch.equal, given, expected))
        assert [(t.stride(), t.dtype) for t in given] == [layout[:2] for layout in layouts]


def test_tensors_of_one_storage_still_share_it(mover):
    first, second = torch.zeros(2, 40).unbind()
    segment = parked(mover, [first, second])
    for _ in range(2):
        assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
        assert second.data_ptr() - first.data_ptr() == 160
        segment.begin(R).wait()


def test_tensors_made_in_inference_mode_move_too(mover):
    with torch.inference_mode():
        made = torch.randn(50)
    expected = made.clone()
    segment = parked(mover, [made])
    assert is_at_host(mover, made) and torch.equal(made, expected)
    segment.begin(R).wait()
    assert torch.equal(made, expected)


def test_addresses_on_the_device_stay_from_the_first_return_on(late):
    given = tensors()
    segment = Parking("s", late)
    cycle(segment, given)
    regions = segment.regions
    for _ in range(3):
        cycle(segment, given)
        assert segment.regions == regions
    assert [tensor.data_ptr() - regions[0].region.bytes.data_ptr() for tensor in given] == [0, 1280, 1536]


def test_packs_hold_what_fits_and_no_more(mover):
    segment = parked(mover, tensors(64, 64, 64, 64, 64), pack_bytes=512)
    assert [pack.size_bytes for pack in segment.regions] == [512, 512, 256]
    segment = parked(mover, tensors(64, 128, 64, 200), pack_bytes=512)
    assert [pack.size_bytes for pack in segment.regions] == [256, 512, 256, 1024]


def test_without_addresses_to_keep_tensors_come_back_by_themselves(mover):
    given = tensors()
    expected = [tensor.clone() for tensor in given]
    segment = parked(mover, given, keeps_addresses=False)
    segment.begin(R).wait()
    assert all(map(torch.equal, given, expected)) and segment.host_bytes == 0
    assert [t.untyped_storage().nbytes() for t in given] == [t.nbytes for t in given]
    assert segment.residency is R and segment.size_bytes == 1280 + 256 + 4096


def test_an_empty_segment_expects_what_it_is_told_and_moves_nothing(mover):
    segment = Parking("s", mover)
    segment.expected_bytes = 100
    assert (segment.residency, segment.size_bytes, segment.device_bytes) == (D, 100, 0)
    for target in (O, R):
        assert segment.begin(target).poll()
    segment.look(tensors(64))
    assert (segment.residency, segment.size_bytes, segment.device_bytes) == (R, 256, 256)
    segment.look([])
    assert (segment.residency, segment.size_bytes) == (D, 100)


# ---- what is held by others -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_dropped", [False, True], ids=["kept", "dropped"])
def test_a_pack_whose_last_view_goes_while_others_are_away_leaves_with_them_the_next_time(is_dropped, mover):
    first, second = given = tensors(64, 64)
    expected = [tensor.clone() for tensor in given]
    segment = Parking("s", mover, pack_bytes=256)
    cycle(segment, given)
    view = first[:3]
    segment.look(given)
    segment.begin(O).wait()
    if is_dropped:
        del given[0], expected[0]
    first = None
    del view
    segment.look(given)
    assert not segment.kept and is_at_host(mover, second)
    segment.begin(R).wait()
    segment.look(given)
    segment.begin(O).wait()
    assert all(is_at_host(mover, tensor) for tensor in given)
    assert all(map(torch.equal, given, expected))
    segment.begin(R).wait()
    assert segment.device_bytes == 256 * len(given) and all(map(torch.equal, given, expected))


def test_a_pack_that_somebody_has_a_view_of_stays_and_others_leave(mover):
    first, second = tensors(64, 64)
    segment = Parking("s", mover, pack_bytes=256, name_of=lambda t: "first" if t is first else "second")
    cycle(segment, [first, second])
    view = first[:3]
    segment.look([first, second])
    (kept,) = segment.kept
    assert (kept.name, kept.size_bytes) == ("first", 256) and "more refer to its memory" in kept.reason
    segment.begin(O).wait()
    assert not is_at_host(mover, first) and is_at_host(mover, second)
    view.fill_(5)
    assert first[:3].eq(5).all()
    del view
    segment.begin(R).wait()
    segment.look([first, second])
    assert not segment.kept and segment.size_bytes == 512
    segment.begin(O).wait()
    assert is_at_host(mover, first) and first[:3].eq(5).all()


@pytest.mark.parametrize("has_moved", [False, True])
@pytest.mark.parametrize(
    "hold", [lambda t: t[1:], lambda t: t.detach(), torch.utils.dlpack.to_dlpack, lambda t: t.numpy()]
)
def test_every_look_finds_who_has_begun_and_who_has_ceased_to_hold_memory(hold, has_moved, mover):
    held = tensors(64, 64)
    segment = Parking("s", mover, pack_bytes=256)
    if has_moved:
        cycle(segment, held)
    for _ in range(2):
        segment.look(held)
        assert not segment.kept and segment.size_bytes == 512
    taken = hold(held[0])
    for _ in range(2):
        segment.look(held)
        assert [kept.size_bytes for kept in segment.kept] == [256] and segment.size_bytes == 256
    del taken
    if hold(held[0]).__class__.__module__ != "numpy":  # torch notes for ever that NumPy has seen a storage
        segment.look(held)
        assert not segment.kept and segment.size_bytes == 512


def test_every_look_finds_memory_that_was_assigned_or_resized(mover):
    first, second = tensors(64, 64)
    segment = Parking("s", mover)
    for change in (lambda: None, lambda: setattr(first, "data", torch.full((128,), 7.0)), lambda: second.resize_(256)):
        change()
        segment.look([first, second])
        assert segment.size_bytes == first.nbytes + second.nbytes and not segment.kept
    segment.begin(O).wait()
    assert is_at_host(mover, first) and is_at_host(mover, second) and first.eq(7).all()


@pytest.mark.parametrize("is_away", [True, False])
@pytest.mark.parametrize("take", [lambda t: t[8:], lambda t: t.view(torch.int32)[:2], lambda t: t.detach().view(4, 16)])
def test_a_view_that_the_segment_is_told_of_later_moves_with_its_tensor(take, is_away, mover):
    first, second = tensors(64, 64)
    segment = Parking("s", mover)
    cycle(segment, [first, second])
    if is_away:
        segment.begin(O).wait()
    view, *more = take(first), *take(second).split(1)
    for _ in range(2):
        segment.look([first, second, view, *more])
        assert not segment.kept and segment.size_bytes == 512
        segment.begin(O).wait()
        assert segment.device_bytes == 0 and is_at_host(mover, view) and is_at_host(mover, first)
        segment.begin(R).wait()
        first.fill_(3)
        assert torch.equal(view, take(first)) and not is_at_host(mover, view)
    outsider = first[1:]
    segment.look([first, second, view, *more])
    assert [kept.size_bytes for kept in segment.kept] == [512], "counted once"
    segment.look([first, second, view, *more, outsider])
    assert not segment.kept


def test_a_tensor_whose_data_is_that_of_another_by_now_moves_with_it(mover):
    first, second = tensors(64, 64)
    segment = Parking("s", mover, pack_bytes=256)
    cycle(segment, [first, second])
    first.data = second
    segment.look([first, second])
    assert not segment.kept
    segment.begin(O).wait()
    segment.begin(R).wait()
    second.fill_(3)
    assert first.eq(3).all()


@pytest.mark.parametrize("is_first", [True, False], ids=["torch's", "a region's"])
def test_a_view_that_is_taken_while_a_tensor_leaves_keeps_it(is_first, late):
    (tensor,) = given = tensors(1000)
    segment = Parking("s", late)
    segment.look(given)
    if not is_first:
        cycle(segment, given)
    departure = segment.begin(O)
    view = tensor[5:]
    view.fill_(3)
    departure.wait()
    assert not is_at_host(late, tensor) and len(segment.kept) == 1 and segment.device_bytes == 0
    view.add_(1)
    assert tensor[5:].eq(4).all()
    segment.begin(R).wait()
    segment.look(given)
    assert [kept.size_bytes for kept in segment.kept] == [4096 if not is_first else 4000]
    del view
    segment.look(given)
    segment.begin(O).wait()
    assert is_at_host(late, tensor) and tensor[5:].eq(4).all() and not segment.kept


@pytest.mark.parametrize("hold", [lambda t: t[2:], lambda t: t.numpy(), lambda t: t.detach(), lambda t: t.view(-1)])
def test_host_memory_that_somebody_still_has_is_not_lent_again(hold, late):
    (tensor,) = given = tensors(1000)
    segment = parked(late, given)
    held = hold(tensor)
    expected = copy.deepcopy(torch.as_tensor(held))
    segment.begin(R).wait()
    scribble(late)
    assert torch.equal(torch.as_tensor(held), expected)
    segment.begin(O).wait()
    tensor.fill_(1)
    assert torch.equal(torch.as_tensor(held), expected), "a copy of its own by now"


def scribble(mover):
    """Borrow and write to all host memory that is free, and give it back."""
    extents = []
    limit_bytes, mover.arena.limit_bytes = mover.arena.limit_bytes, 0
    for size_bytes in (MIB, 64 * KIB, 4 * KIB):
        with suppress(BudgetError):
            while True:
                extents.append(mover.arena.allocate(size_bytes))
                mover.arena.view(extents[-1]).fill_(0x5A)
    for extent in extents:
        mover.arena.release(extent)
    mover.arena.limit_bytes = limit_bytes


@pytest.mark.parametrize("is_dropped", [True, False])
def test_host_memory_goes_back_with_the_last_that_refers_to_it(is_dropped, mover):
    given = tensors(1000)
    segment = parked(mover, given)
    held = given[0][2:]
    if is_dropped:
        segment.look([])
        given.clear()
    else:
        segment.begin(R).wait()
        segment.look(given)
        given.clear()
        segment.look([])
    gc.collect()
    assert mover.arena.used_bytes == 4096
    del held
    gc.collect()
    assert mover.arena.used_bytes == 0


def test_views_of_parked_tensors_in_every_cycle_grow_nothing(mover):
    given = tensors()
    segment = Parking("s", mover)
    segment.look(given)
    held = None
    for number in range(100):
        segment.begin(O).wait()
        held = given[number % 3][1:]
        segment.begin(R).wait()
        segment.look(given)
        if number == 3:
            before = mover.arena.used_bytes, mover.arena.pinned_bytes
    assert (mover.arena.used_bytes, mover.arena.pinned_bytes) == before
    assert held is not None


def test_a_tensor_dropped_while_it_is_parked_leaves_its_memory_to_whoever_has_it(mover):
    kept, dropped = given = tensors(1000, 1000)
    expected = dropped.clone()
    segment = parked(mover, given)
    segment.look([kept])
    segment.begin(R).wait()
    scribble(mover)
    assert torch.equal(dropped, expected) and is_at_host(mover, dropped)
    segment.look([kept])
    segment.begin(O).wait()
    kept.zero_()
    assert torch.equal(dropped, expected)


def test_dropped_tensors_are_not_held(mover):
    given = tensors(1000, 1000)
    segment = Parking("s", mover)
    cycle(segment, given)
    given.pop()
    segment.look(given)
    assert sum(len(pack.blocks) for pack in segment.regions) == 1
    given.pop()
    segment.look(given)
    assert segment.residency is D and segment.device_bytes == segment.host_bytes == mover.arena.used_bytes == 0


# ---- what happens meanwhile -----------------------------------------------------------------------------------------


def test_what_is_written_while_a_copy_is_under_way_is_kept(late):
    first, second = given = tensors(1000, 1000)
    segment = Parking("s", late)
    segment.look(given)
    for _ in range(2):
        departure = segment.begin(O)
        first.add_(1)
        expected = [tensor.clone() for tensor in given]
        departure.wait()
        assert all(map(torch.equal, given, expected)) and is_at_host(late, first)
        arrival = segment.begin(R)
        second.sub_(1)
        expected = [tensor.clone() for tensor in given]
        arrival.wait()
        assert all(map(torch.equal, given, expected)) and not is_at_host(late, first)


@pytest.mark.parametrize("stage", ["seen", "departing", "away", "arriving", "back"])
@pytest.mark.parametrize("size", [1000, 30, 5000])
def test_data_that_is_assigned_at_any_stage_stays_and_moves_next_time(stage, size, late):
    first, second = given = tensors(1000, 1000)
    expected, new = second.clone(), torch.randn(size)
    segment = Parking("s", late)
    segment.look(given)
    moves = {"departing": lambda: segment.begin(O), "away": lambda: segment.begin(O).wait()}
    if stage in moves:
        moves[stage]()
    elif stage != "seen":
        segment.begin(O).wait()
        (segment.begin(R).wait if stage == "back" else segment.begin(R).poll)()
    first.data = new.clone()
    for _ in range(2):
        segment.begin(O).wait()
        segment.begin(R).wait()
        assert torch.equal(first, new) and first.shape == (size,) and torch.equal(second, expected)
        segment.look(given)
    segment.begin(O).wait()
    assert is_at_host(late, first) and torch.equal(first, new)


def test_what_is_new_while_others_are_away_joins_when_they_leave_next(mover):
    given = tensors(64)
    segment = parked(mover, given)
    given.append(torch.ones(64))
    segment.look(given)
    assert (segment.residency, segment.device_bytes, segment.size_bytes) == (O, 256, 512)
    segment.begin(R).wait()
    segment.begin(O).wait()
    assert segment.device_bytes == 0 and is_at_host(mover, given[1])


def test_a_departure_that_is_called_back_moves_nothing(late):
    given = tensors()
    addresses = [tensor.data_ptr() for tensor in given]
    segment = Parking("s", late, pack_bytes=1)
    segment.look(given)
    segment.begin(O)
    segment.begin(R).wait()
    assert segment.residency is R and [tensor.data_ptr() for tensor in given] == addresses
    given[0].fill_(1)
    segment.begin(O).wait()
    assert given[0].eq(1).all()


def test_without_room_on_the_host_nothing_has_changed(device):
    mover, given = Mover(device, host_limit_bytes=MIB), tensors(10, MIB)
    expected = [tensor.clone() for tensor in given]
    segment = Parking("s", mover, pack_bytes=1)
    segment.look(given)
    for _ in range(2):
        with pytest.raises(BudgetError, match="the host arena holds"):
            segment.begin(O)
        assert segment.residency is R and all(map(torch.equal, given, expected)) and mover.arena.used_bytes == 0
    mover.arena.limit_bytes = 64 * MIB
    segment.begin(O).wait()
    assert all(map(torch.equal, given, expected)) and segment.device_bytes == 0
    mover.close()


def test_without_room_on_the_device_tensors_stay_at_the_host_whole(late, monkeypatch):
    device = FakeDevice(4 * KIB)
    monkeypatch.setattr(parking, "allocate_region", forgetful(device))
    given = tensors(300, 300, 300)
    expected = [tensor.clone() for tensor in given]
    segment = parked(late, given, pack_bytes=1)
    for _ in range(2):
        device.take(KIB)
        with pytest.raises(BudgetError):
            segment.begin(R)
        assert (segment.residency, device.used_bytes) == (O, KIB)
        assert all(map(torch.equal, given, expected)) and all(is_at_host(late, tensor) for tensor in given)
        device.free(KIB)
        segment.begin(R).wait()
        assert all(map(torch.equal, given, expected)) and device.used_bytes == 3 * 1280
        segment.begin(O).wait()


def forgetful(device):
    """What makes regions on a device that counts, and that forgets what was in memory given back."""

    def allocate(size_bytes, _, *, name):
        size_bytes = -(-size_bytes // 256) * 256
        if device.used_bytes + size_bytes > device.capacity_bytes:
            free_bytes = device.capacity_bytes - device.used_bytes
            raise BudgetError(f"region {name}", needed_bytes=size_bytes, free_bytes=free_bytes)
        return ForgetfulRegion(name, size_bytes, device)

    return allocate


@pytest.mark.usefixtures("interrupts_raise")
@pytest.mark.parametrize("way", ["out", "back"])
@pytest.mark.parametrize("stage", ["copy", "point_to_host", "point_to_device", "_restore", "release"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_move_that_was_interrupted_or_failed_has_lost_nothing(way, stage, at, late, monkeypatch):
    given = tensors()
    expected = [tensor.clone() for tensor in given]
    segment = Parking("s", late, pack_bytes=1)
    cycle(segment, given)
    if way == "back":
        segment.begin(O).wait()
    owner, name = (late, "_copy") if stage == "copy" else (parking.Pack, stage)
    original = getattr(owner, name)
    for ending in (press_ctrl_c, out_of_memory):
        if ending is out_of_memory and stage in ("point_to_host", "point_to_device", "release"):
            continue  # they allocate nothing
        calls = []

        def ends(*arguments, ending=ending, calls=calls, **options):
            calls.append(1)
            if len(calls) == at:
                ending()
            return original(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, ends)
            try:
                segment.begin(O if way == "out" else R).wait()
            except (KeyboardInterrupt, torch.OutOfMemoryError):
                assert len(calls) >= at
        assert all(map(torch.equal, given, expected))
        segment.begin(R).wait()
        segment.begin(O).wait()
        assert all(map(torch.equal, given, expected)) and segment.device_bytes == 0
        if way == "out":
            segment.begin(R).wait()
            assert all(map(torch.equal, given, expected))


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_memory_for_a_part_of_what_comes_back_is_not_kept(mover, monkeypatch):
    """A return that memory does not suffice for leaves on the device what it was counted with: nothing."""
    given = tensors(4096, 4096, 4096)
    segment = parked(mover, given, keeps_addresses=False)
    empty, room = torch.empty, iter(range(2))

    def with_room_for_two(*size, **options):
        if next(room, None) is None:
            out_of_memory()
        return empty(*size, **options)

    segment.begin(O).wait()
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(torch, "empty", with_room_for_two)
        segment.begin(R)
    (pack,) = segment.regions
    assert segment.residency is O and segment.device_bytes == 0
    assert [block.device for block in pack.blocks] == [None] * 3
    segment.begin(R).wait()
    assert all(tensor.numel() == 4096 for tensor in given)


# ---- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_away", [True, False])
@pytest.mark.parametrize("has_moved", [True, False])
def test_what_is_handed_over_belongs_to_whoever_has_it(is_away, has_moved, device):
    mover, given = Mover(device, host_limit_bytes=64 * MIB), tensors()
    expected = [tensor.clone() for tensor in given]
    segment = Parking("s", mover)
    segment.look(given)
    if has_moved:
        cycle(segment, given)
    if is_away:
        segment.begin(O).wait()
    segment.hand_over()
    segment.hand_over()
    assert segment.residency is D and segment.size_bytes == segment.device_bytes == segment.host_bytes == 0
    scribble(mover)
    assert all(map(torch.equal, given, expected)) and is_at_host(mover, given[0]) is is_away
    mover.close()
    gc.collect()
    assert all(map(torch.equal, given, expected))
    assert [t.untyped_storage().nbytes() for t in given] == [t.nbytes for t in given]


def test_a_view_stays_one_after_all_is_handed_over(mover):
    given = tensors(64, 64)
    segment = Parking("s", mover)
    cycle(segment, given)
    view = given[0][:3]
    segment.look(given)
    segment.hand_over()
    given[0].fill_(9)
    assert view.eq(9).all()


# ---- any order ------------------------------------------------------------------------------------------------------

ACTIONS = "look out back poll wait write assign view drop-view drop drop-held add full failed scribble".split()  # noqa: SIM905


@settings(max_examples=80)
@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=5),
    actions=st.lists(st.sampled_from(ACTIONS), max_size=40),
    seed=st.integers(0, 1 << 16),
    speed=st.integers(0, 4),
    pack_bytes=st.sampled_from([1, 2000, MIB]),
    keeps_addresses=st.booleans(),
)
@example(  # all that was on its way back has been assigned to
    sizes=[1], actions=["out", "look", "back", "assign", "out"], seed=0, speed=1, pack_bytes=1, keeps_addresses=False
)
@example(  # a view outlives the pack whose memory it keeps
    sizes=[1],
    actions=["out", "back", "drop", "drop-held", "look"],
    seed=162,
    speed=2,
    pack_bytes=1,
    keeps_addresses=True,
)
def test_any_order_of_moves_writes_views_and_drops_keeps_every_byte(
    sizes, actions, seed, speed, pack_bytes, keeps_addresses
):
    with pytest.MonkeyPatch.context() as patch:
        world = World(sizes, seed, speed, patch, pack_bytes=pack_bytes, keeps_addresses=keeps_addresses)
        for action in actions:
            getattr(world, action.replace("-", "_"))()
            world.check()
        world.end()


class World:
    """Tensors that are parked, twins that never move, and what others hold: views, and tensors that were dropped."""

    def __init__(self, sizes, seed, speed, patch, **options):
        self.random = random.Random(seed)
        self.device = FakeDevice(MIB)
        patch.setattr(parking, "allocate_region", forgetful(self.device))
        progress = lambda: self.random.randint(0, speed)  # noqa: E731
        self.mover = LateMover(chunk_bytes=700, progress=progress, host_limit_bytes=8 * MIB)
        self.segment = Parking("s", self.mover, **options)
        self.counter = 0.0
        self.pairs = []
        self.held = []
        self.moves = []
        for size in sizes:
            self.make(size)
        self.look()

    def make(self, size):
        whole = torch.randn(2, size)
        made, twins = (
            (list(whole.unbind()), list(whole.clone().unbind()))
            if self.random.random() < 0.3
            else ([whole[0].clone()], [whole[0].clone()])
        )
        self.pairs += zip(made, twins, strict=True)

    def look(self):
        self.segment.look([tensor for tensor, _ in self.pairs])

    def out(self):
        self.moves.append(self.segment.begin(O))

    def back(self):
        self.moves.append(self.segment.begin(R))

    def full(self):
        """A return without room on the device."""
        capacity_bytes, self.device.capacity_bytes = self.device.capacity_bytes, self.device.used_bytes
        try:
            self.back()
        except BudgetError:
            assert self.segment.residency is O
        self.device.capacity_bytes = capacity_bytes

    def failed(self):
        """A move whose copies cannot be queued."""
        copy_of = self.mover._copy
        self.mover._copy = lambda *_, **__: out_of_memory()
        try:
            self.random.choice([self.out, self.back])()
        except torch.OutOfMemoryError:
            pass
        finally:
            self.mover._copy = copy_of

    def poll(self):
        if self.moves:
            self.random.choice(self.moves).poll()

    def wait(self):
        if self.moves:
            self.random.choice(self.moves).wait()

    def write(self):
        if self.pairs:
            self.counter += 1
            for each in self.random.choice(self.pairs):
                each.fill_(self.counter)

    def assign(self):
        if whole := [pair for pair in self.pairs if pair[0]._base is None]:
            self.counter += 1
            new = torch.full((self.random.randint(1, 700),), self.counter)
            tensor, twin = self.random.choice(whole)
            tensor.data, twin.data = new, new.clone()

    def view(self):
        if self.pairs:
            tensor, twin = self.random.choice(self.pairs)
            start = self.random.randrange(len(tensor))
            self.held.append(Held(tensor[start:], twin[start:], tensor if is_at_host(self.mover, tensor) else None))

    def drop_view(self):
        if self.held:
            self.held.pop(self.random.randrange(len(self.held)))

    def drop(self):
        if self.pairs:
            self.pairs.pop(self.random.randrange(len(self.pairs)))

    def drop_held(self):
        """Drop a tensor that somebody else still has."""
        if self.pairs:
            self.held.append(Held(*self.pairs.pop(self.random.randrange(len(self.pairs)))))

    def add(self):
        self.make(self.random.randint(1, 700))

    def scribble(self):
        scribble(self.mover)

    def check(self):
        for tensor, twin in self.pairs:
            assert torch.equal(tensor, twin)
        for held in self.held:
            held.check()

    def end(self):
        self.back()
        self.moves[-1].wait()
        self.check()
        self.held.clear()
        self.moves.clear()
        self.look()
        self.out()
        self.moves[-1].wait()
        self.check()
        assert (self.segment.device_bytes, self.segment.kept) == (0, [])
        assert all(is_at_host(self.mover, tensor) for tensor, _ in self.pairs)
        self.pairs.clear()
        self.look()
        assert (self.segment.residency, self.segment.size_bytes, self.mover.arena.used_bytes) == (D, 0, 0)
        assert self.device.used_bytes == 0
        self.mover.close()


class Held:
    """A view, or a dropped tensor, and its twin. A view of a tensor at the host is one until that goes back."""

    def __init__(self, tensor, twin, of=None):
        self.tensor, self.twin, self.of = tensor, twin, of
        self.last = tensor.clone()

    def check(self):
        if self.of is not None and self.of.untyped_storage()._cdata != self.tensor.untyped_storage()._cdata:
            self.twin, self.of = self.last, None
        assert torch.equal(self.tensor, self.twin)
        self.last = self.tensor.clone()
