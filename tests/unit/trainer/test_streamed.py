"""Streaming the state through a step must not change a bit of training, whatever happens in between."""

import copy
import gc
import io
import itertools
import os
import signal
import warnings
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode

from colo.errors import BudgetError, PhaseError
from colo.memory.offload import Mover
from colo.phases.phase import Residency
from colo.testing import IllegalAccess
from colo.trainer import planes, window
from colo.trainer.master_weights import MasterWeights
from colo.trainer.optimizers import register_separable
from colo.trainer.planes import Planes, Range
from colo.trainer.remainders import MOMENTS
from colo.trainer.state import TrainerState
from colo.trainer.streamed import StreamedState
from colo.trainer.window import Bucket
from colo.units import MIB

R, O = Residency.RESIDENT, Residency.OFFLOADED  # noqa: E741


def model(dtype=torch.bfloat16, layers=6, size=32):
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(size, size) for _ in range(layers))).to(dtype)


@register_separable
class Fragile(torch.optim.AdamW):
    """Fails, or is interrupted, as it begins its step number `end.at`, counted from 1. It keeps steps of its own."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.end = SimpleNamespace(at=0, how=lambda: None)

    def step(self, closure=None):
        self.end.at -= 1
        if self.end.at == 0:
            self.end.how()
        return super().step(closure)


def adamw(params):
    """Steps element by element: its state lies in planes."""
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def fragile(params):
    """Steps whole parameters, as far as colo knows: its state is parked in buckets."""
    return Fragile(params, lr=1e-2, weight_decay=0.1)


MAKE = {
    "plain": adamw,
    "remainders": MasterWeights(adamw),
    "whole": MasterWeights(adamw, remainders=False),
    "bucket": fragile,
    "bucket-remainders": MasterWeights(fragile),
    "bucket-whole": MasterWeights(fragile, remainders=False),
}
kinds = pytest.mark.parametrize("kind", MAKE)
of_planes = pytest.mark.parametrize("kind", ["plain", "remainders", "whole"])
of_buckets = pytest.mark.parametrize("kind", ["bucket", "bucket-remainders", "bucket-whole"])


class Trained:
    """A model, its optimizer, and gradients that depend on a number alone."""

    def __init__(self, kind="remainders", **options):
        self.net = model(**options)
        self.optimizer = MAKE[kind](self.net.parameters())

    @property
    def inner(self):
        return getattr(self.optimizer, "inner", self.optimizer)

    @property
    def parameters(self):
        return list(self.net.parameters())

    def backward(self, number):
        generator = torch.Generator().manual_seed(number)
        for p in self.net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)

    def step(self, number):
        self.backward(number)
        self.optimizer.step()


def streamed(trained, mover, **options):
    return StreamedState(trained.optimizer, mover, **{"region_bytes": 16 * 1024} | options)


class LateStream(TorchDispatchMode):
    """A stream on a CPU: copies queued on it run when somebody waits for them, if their memory still lives."""

    def __init__(self):
        super().__init__()
        self.work, self.num_run = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self.work.append(partial(self.copy, *map(self.place, args[:2])))
        return args[0]

    @staticmethod
    def place(tensor):
        layout = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()
        return StorageWeakRef(tensor.untyped_storage()), layout

    @staticmethod
    def copy(*places):
        target, source = (
            torch.empty(0, dtype=dtype).set_(torch.UntypedStorage._new_with_weak_ptr(memory.cdata), *where)
            for memory, (dtype, *where) in places
            if not memory.expired() or illegal()
        )
        target.copy_(source)

    def run_to(self, number):
        while self.num_run < number:
            self.num_run += 1
            self.work[self.num_run - 1]()

    def synchronize(self):
        self.run_to(len(self.work))

    def record_event(self):
        return partial(self.run_to, len(self.work))

    def wait_event(self, event):
        self.work.append(event)


def illegal():
    raise IllegalAccess("a copy under way has met memory that was given back")


@pytest.fixture
def late(monkeypatch):
    """Lets a window's copies run late, beside kernels that run at once."""
    kernels = SimpleNamespace(record_event=lambda: lambda: None, wait_event=lambda event: event())
    current = [kernels]

    @contextmanager
    def on(stream):
        current.append(stream)
        with stream:
            yield
        current.pop()

    def run_late(state):
        state.window._streams = {"in": LateStream(), "out": LateStream()}

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])  # never of another GPU
    return run_late


def close_window(state):
    state.window.begin(O).wait()
    assert state.window.device_bytes == 0


def assert_same(one, other):
    for p, q in zip(one.net.parameters(), other.net.parameters(), strict=True):
        assert torch.equal(p, q)
    states = [t.optimizer.state_dict()["state"] for t in (one, other)]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        assert state.keys() == states[1][number].keys()
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(states[1][number][k])) for k, v in state.items())


@kinds
@pytest.mark.parametrize("region_bytes", [1, 9_000, 16 * 1024, 50_000, MIB])
def test_streamed_training_is_resident_training_and_holds_no_more_than_its_window(kind, region_bytes, mover):
    twin, ours = Trained(kind), Trained(kind)
    state, resident = streamed(ours, mover, region_bytes=region_bytes), TrainerState(twin.optimizer, mover)
    for number in range(4):
        for trained in (twin, ours):
            trained.step(number)
        assert state.window.device_bytes <= state.window.size_bytes
        assert_same(ours, twin)
        if number % 2:
            close_window(state)
        state.refresh()
    assert state.window.host_bytes >= state.window.total_bytes
    assert not state.kept.items or all(kept.name == "gradients" for kept in state.kept.items)
    resident.close()
    state.close()
    for trained in (twin, ours):
        trained.step(6)
    assert_same(ours, twin)
    del resident, state
    gc.collect()
    assert mover.arena.used_bytes == 0


def test_a_range_is_stepped_by_one_call_of_the_class(mover, monkeypatch):
    ours, calls = Trained("plain", layers=1, size=100), []
    state = streamed(ours, mover, region_bytes=MIB)
    step_flat = Planes._step_flat

    def counted(self, flat, pieces, mine):
        calls.append([stop - start for _, start, stop, _ in pieces])
        return step_flat(self, flat, pieces, mine)

    monkeypatch.setattr(Planes, "_step_flat", counted)
    ours.step(0)
    assert [type(work) for work in state.window.work()] == [Range]
    assert calls == [[10_000], [100]], "one a parameter on a CPU"
    calls.clear()
    monkeypatch.setattr(state.window._planes[0], "_is_on_cpu", False)
    ours.step(1)
    assert calls == [[10_000, 100]], "one a range on a GPU"
    state.close()


def test_parameters_with_equal_scalars_are_stepped_together_and_others_apart(mover, monkeypatch):
    """As a GPU steps them: this CPU's kernels agree where vectors of eight end with parameters."""
    twin, ours = (Trained("plain", dtype=torch.float32, layers=5, size=64) for _ in range(2))
    state = streamed(ours, mover, region_bytes=50_000)
    monkeypatch.setattr(state.window._planes[0], "_is_on_cpu", False)
    for number in range(5):
        for trained in (twin, ours):
            trained.backward(number)
            for p in trained.parameters[number::3]:
                p.grad = None
            trained.optimizer.step()
        assert_same(ours, twin)
    state.close()


@contextmanager
def full_device(monkeypatch, at, *, stepped):
    """Have the class's call number `at` end without memory, before or after it has stepped; so ends the block."""
    step_flat, calls = Planes._step_flat, itertools.count(1)

    def ends(*arguments):
        is_last = next(calls) == at
        if is_last and not stepped:
            out_of_memory()
        made = step_flat(*arguments)
        return made if not is_last else out_of_memory()

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(Planes, "_step_flat", ends)
        yield


@kinds
@pytest.mark.parametrize("make", [streamed, lambda trained, mover: TrainerState(trained.optimizer, mover)])
def test_a_hyperparameter_that_made_a_step_fail_is_set_back(kind, make, mover):
    twin, ours = Trained(kind), Trained(kind)
    state = make(ours, mover)
    for number in range(2):
        for trained in (twin, ours):
            trained.step(number)
        group = ours.optimizer.param_groups[0]
        before = dict(group)
        group.update(amsgrad=True, lr=0.5)  # for which torch's state lacks a moment
        ours.backward(number)
        with pytest.raises(KeyError, match="max_exp_avg_sq"):
            ours.optimizer.step()
        group.update(amsgrad=before["amsgrad"], lr=before["lr"])
    for trained in (twin, ours):
        trained.step(2)
    assert_same(ours, twin)
    state.close()


SOME, ALL = 20_000, MIB  # of the state, that stays on the device


@of_planes
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("resident_bytes", [0, SOME, ALL])
@pytest.mark.parametrize("leaves", [True, False])
def test_of_a_range_that_has_gone_wrong_within_only_the_rest_is_stepped(
    kind, stepped, resident_bytes, leaves, mover, monkeypatch
):
    """Parameters of one range are several calls of the class on a CPU, and where counts of steps differ."""
    twin, ours = Trained(kind), Trained(kind)
    state = streamed(ours, mover, resident_bytes=resident_bytes, **({} if resident_bytes else {"region_bytes": MIB}))
    for number, ends_at in enumerate((1, 2, 7, 12)):
        ours.backward(number)
        twin.step(number)
        with full_device(monkeypatch, ends_at, stepped=stepped):
            ours.optimizer.step()
        if leaves and number == 1:
            state.window.resident.begin(O).wait()
        if leaves or not resident_bytes:
            close_window(state)
        ours.optimizer.step()
        assert_same(ours, twin)
    state.close()


@kinds
@pytest.mark.parametrize(
    ("region_bytes", "resident_bytes"), [(1, 0), (9_000, 0), (MIB, 0), (9_000, SOME), (16 * 1024, SOME), (MIB, ALL)]
)
def test_a_step_waits_for_its_copies_and_they_for_it(kind, region_bytes, resident_bytes, mover, late):
    twin, ours = Trained(kind), Trained(kind)
    state = streamed(ours, mover, region_bytes=region_bytes, resident_bytes=resident_bytes)
    late(state)
    for number in range(4):
        for trained in (twin, ours):
            trained.step(number)
        assert_same(ours, twin)
        if number == 2:
            state.window.resident.begin(O)
    close_window(state)
    state.close()


@pytest.mark.parametrize("region_bytes", [1, 9_000, MIB])
def test_copies_under_way_keep_the_memory_of_state_that_a_class_begins_late(region_bytes, mover, late):
    twin, ours = Trained("plain"), Trained("plain")
    for trained in (twin, ours):
        trained.optimizer = torch.optim.SGD(trained.net.parameters(), lr=1e-2)
    state = streamed(ours, mover, region_bytes=region_bytes)
    late(state)
    for number in range(4):
        for trained in (twin, ours):
            trained.optimizer.param_groups[0]["momentum"] = 0.9 * (number > 0)
            trained.step(number)
        if number:
            assert_same(ours, twin)
    close_window(state)
    state.close()


@of_planes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("resident_bytes", [0, 20_000])
def test_host_memory_that_is_set_up_beforehand_is_all_that_state_takes(kind, dtype, resident_bytes, mover):
    trained = Trained(kind, size=300)  # planes of about a block each
    state = streamed(trained, mover, moment_dtype=dtype, resident_bytes=resident_bytes)
    mover.arena.prepare(state.window.home_bytes - mover.arena.used_bytes).result()
    before = mover.arena.pinned_bytes
    for number in range(3):
        trained.step(number)
        state.refresh()
        assert mover.arena.pinned_bytes == before
    assert 0 < mover.arena.used_bytes <= state.window.home_bytes + 3 * 4096 * len(trained.parameters)
    state.close()


def test_nothing_grows_over_a_hundred_steps(mover):
    trained = Trained()
    state = streamed(trained, mover)

    def held():
        gc.collect()
        tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
        return mover.arena.pinned_bytes, mover.arena.used_bytes, tensors

    for number in range(3):
        trained.step(number)
    before = held()
    for number in range(100):
        trained.step(number)
        close_window(state)
        state.refresh()
    assert held() == before
    state.close()


# ---- moments in bf16 ------------------------------------------------------------------------------------------------

in_bf16 = partial(streamed, moment_dtype=torch.bfloat16)

MOMENTS_OF = {
    "adamw": adamw,
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.9),
    "adamax": lambda params: torch.optim.Adamax(params, lr=1e-2),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=1e-2),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
}


def made_by(kind, make):
    """A bf16 model with masters, or an fp32 one."""
    trained = Trained("plain", dtype=torch.float32 if kind == "plain" else torch.bfloat16)
    masters = {"plain": lambda m: m, "remainders": MasterWeights, "whole": partial(MasterWeights, remainders=False)}
    trained.optimizer = masters[kind](make)(trained.net.parameters())
    return trained


WINDOWS = [(1, 0), (9_000, 0), (MIB, 20_000), (16 * 1024, MIB)]  # bytes of a range, and of what stays
OF_EACH = [("remainders", make, WINDOWS[2]) for make in MOMENTS_OF]
OF_ADAMW = [(kind, "adamw", window) for kind in ("plain", "remainders", "whole") for window in WINDOWS]


@pytest.mark.parametrize(("kind", "make", "window"), sorted({*OF_EACH, *OF_ADAMW}))
def test_moments_in_bf16_are_stepped_in_fp32_and_rounded_to_a_neighbour(kind, make, window, mover, late):
    twin, ours = (made_by(kind, MOMENTS_OF[make]) for _ in range(2))
    region_bytes, resident_bytes = window
    state = in_bf16(ours, mover, region_bytes=region_bytes, resident_bytes=resident_bytes)
    late(state)
    ups = []
    for number in range(4):
        state.window._settle()
        if number:
            twin.net.load_state_dict(ours.net.state_dict())
            twin.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))  # torch widens it
        for trained in (twin, ours):
            trained.step(number)
        assert state.window.device_bytes <= state.window.size_bytes
        assert all(torch.equal(p, q) for p, q in zip(ours.parameters, twin.parameters, strict=True))
        states = [trained.optimizer.state_dict()["state"] for trained in (ours, twin)]
        for key, of in states[0].items():
            assert of.keys() == states[1][key].keys()
            for name, value in of.items():
                exact = states[1][key][name]
                if name not in MOMENTS:
                    assert torch.equal(torch.as_tensor(value), torch.as_tensor(exact)), name
                    continue
                assert (value.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
                toward_zero = exact.view(torch.int32) & (-1 << 16)
                steps = (value.float().view(torch.int32) - toward_zero) >> 16
                assert torch.all((steps == 0) | ((steps == 1) & (exact.view(torch.int32) != toward_zero)))
                ups.append(steps.float().mean().item())
        if number == 2:
            state.window.resident.begin(O)
    assert 0.3 < sum(ups) / len(ups) < 0.7
    close_window(state)
    state.close()


@of_planes
@pytest.mark.parametrize("resident_bytes", [0, 20_000, MIB])
def test_moments_in_bf16_take_half_and_are_drawn_by_torchs_seed(kind, resident_bytes, mover):
    runs = []
    for seed in (3, 3, 4):
        ours = made_by(kind, adamw)
        state = in_bf16(ours, mover, resident_bytes=resident_bytes)
        torch.manual_seed(seed)
        for number in range(2):
            ours.step(number)
        saved = copy.deepcopy((ours.net.state_dict(), ours.optimizer.state_dict(), torch.get_rng_state()))
        ours.step(2)
        state.refresh()
        runs.append(ours)
        wide = made_by(kind, adamw)
        others = streamed(wide, mover, resident_bytes=resident_bytes)
        wide.step(0)
        num_parameters = sum(p.numel() for p in ours.parameters)
        saved_bytes = others.window.total_bytes - state.window.total_bytes
        assert 4 * num_parameters <= saved_bytes <= 4 * num_parameters + 6 * 2 * 2 * 1024 * 2, "but for padding"
        others.close()
        again = made_by(kind, adamw)
        resumed = in_bf16(again, mover, resident_bytes=resident_bytes)
        again.net.load_state_dict(saved[0])
        again.optimizer.load_state_dict(saved[1])
        torch.set_rng_state(saved[2])
        again.step(2)
        assert_same(again, ours)
        resumed.close()
        state.close()
    assert_same(runs[0], runs[1])
    with pytest.raises(AssertionError):
        assert_same(runs[0], runs[2])


@of_planes
@pytest.mark.parametrize("resident_bytes", [0, 20_000, MIB])
@pytest.mark.parametrize("stepped", [False, True])
def test_a_step_with_moments_in_bf16_that_failed_and_is_repeated_is_one_step(
    kind, resident_bytes, stepped, mover, monkeypatch
):
    pair = [made_by(kind, adamw) for _ in range(2)]
    states = [in_bf16(trained, mover, resident_bytes=resident_bytes) for trained in pair]
    for number, ends_at in enumerate((1, 2, 7, 12)):
        for trained in pair:
            torch.manual_seed(number)
            trained.backward(number)
            if trained is pair[1]:
                with full_device(monkeypatch, ends_at, stepped=stepped):
                    trained.optimizer.step()
            trained.optimizer.step()
        assert_same(*pair)
    for state in states:
        state.close()


@of_planes
@pytest.mark.parametrize("resident_bytes", [0, MIB])
@pytest.mark.parametrize("place", [None, "cpu"])
def test_moments_that_were_kept_in_bf16_step_on_when_colo_ends(kind, resident_bytes, place, device):
    mover, ours = Mover(device, host_limit_bytes=64 * MIB), made_by(kind, adamw)
    for number in range(2):
        ours.step(number)  # state that is there is taken in
    state = in_bf16(ours, mover, resident_bytes=resident_bytes)
    moment = next(iter(ours.inner.state.values()))["exp_avg"]
    assert moment.dtype is torch.bfloat16
    ours.step(2)
    twin = made_by(kind, adamw)
    twin.net.load_state_dict(ours.net.state_dict())
    twin.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
    state.close(torch.device(place) if place else None)
    mover.close()
    for number in (3, 4):
        for trained in (twin, ours):
            trained.step(number)
    assert_same(ours, twin)


@of_planes
@pytest.mark.parametrize("resident_bytes", [0, MIB])
def test_a_parameter_that_was_never_stepped_begins_its_moments_when_colo_has_ended(kind, resident_bytes, mover):
    ours = made_by(kind, adamw)
    state = in_bf16(ours, mover, resident_bytes=resident_bytes)
    ours.backward(0)
    ours.parameters[0].grad = None  # such as that of an expert that no token has reached
    ours.optimizer.step()
    before = ours.optimizer.state_dict()["state"]
    state.close()
    after = ours.optimizer.state_dict()["state"]
    assert {key: set(of) for key, of in after.items()} == {key: set(of) for key, of in before.items()}
    ours.step(1)
    assert all(p.isfinite().all() for p in ours.parameters)


def test_moments_that_a_class_begins_late_are_rounded_by_other_numbers_in_each_step(mover, monkeypatch):
    seeds, rounds = [], planes.round_stochastically
    monkeypatch.setattr(planes, "round_stochastically", lambda *told: seeds.append(told[-1]) or rounds(*told))
    ours = Trained("plain", dtype=torch.float32, layers=1)
    ours.optimizer = torch.optim.SGD(ours.net.parameters(), lr=1e-2)
    state = in_bf16(ours, mover)
    for number in range(4):
        ours.optimizer.param_groups[0]["momentum"] = 0.9 * (number > 0)
        ours.step(number)
    assert len(set(seeds)) == len(seeds) == 6
    state.close()


def test_a_step_draws_one_number_of_torchs_however_its_state_is_cut_and_often_it_is_begun(mover, monkeypatch):
    drawn = []
    for region_bytes, resident_bytes, fails in ((MIB, 0, False), (1, 20_000, False), (MIB, 20_000, True)):
        ours = made_by("remainders", adamw)
        ours.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))]})
        ours.optimizer.param_groups[1]["params"][0].grad = torch.ones(8, dtype=torch.bfloat16)
        state = in_bf16(ours, mover, region_bytes=region_bytes, resident_bytes=resident_bytes)
        torch.manual_seed(5)
        for number in range(2):
            ours.backward(number)
            if fails:
                with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                    patch.setattr(Planes, "begin_step", interrupted)
                    ours.optimizer.step()
            ours.optimizer.step()
        drawn.append(torch.rand(()))
        state.close()
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_moments_take_the_precision_of_the_run_that_loads_or_finds_them(dtypes, mover):
    def momentum(parameters, factor=0.9):
        return torch.optim.SGD(parameters, lr=1e-2, momentum=factor)

    first = made_by("plain", momentum)
    state = in_bf16(first, mover, moment_dtype=dtypes[0])
    first.step(0)
    saved = copy.deepcopy(first.optimizer.state_dict())
    state.close()
    for loads in (True, False):
        ours = made_by("plain", partial(momentum, factor=0) if loads else momentum)
        for number, p in enumerate(ours.parameters if not loads else ()):  # as a GPU that is full leaves them
            ours.optimizer.state[p] = dict(saved["state"][number])
        state = in_bf16(ours, mover, moment_dtype=dtypes[1])
        if loads:
            ours.optimizer.load_state_dict(saved)
        for number in (1, 2):
            ours.step(number)
        found = ours.optimizer.state_dict()["state"].values()
        assert {of["momentum_buffer"].dtype for of in found} == {dtypes[1]}
        state.close()


@of_planes
def test_resident_state_steps_moments_that_were_left_in_bf16(kind, mover):
    ours = made_by(kind, adamw)
    ours.step(0)
    for of in ours.inner.state.values():  # as a GPU that is full leaves them
        of.update({name: of[name].bfloat16() for name in MOMENTS & of.keys()})
    state = TrainerState(ours.optimizer, mover)
    ours.step(1)
    assert {of["exp_avg"].dtype for of in ours.optimizer.state_dict()["state"].values()} == {torch.float32}
    state.close()


@of_planes
@pytest.mark.parametrize("resident_bytes", [0, 20_000, MIB])
def test_moments_go_back_to_a_device_that_has_room_for_them_in_fp32(kind, resident_bytes, mover, monkeypatch):
    ours = made_by(kind, adamw)
    state = in_bf16(ours, mover, resident_bytes=resident_bytes)
    ours.step(0)
    free = [0]
    monkeypatch.setattr(window, "free_device_bytes", lambda _: free[0])
    monkeypatch.setattr(state.window, "_mover", SimpleNamespace(device=torch.device("cuda")))
    num_elements = sum(planes._num_elements for planes in state.window._planes)
    for free[0] in (8 * num_elements - 1, state.window.host_bytes):
        assert not state.window._has_room()
    free[0] = 8 * num_elements + state.window.host_bytes
    assert state.window._has_room()
    monkeypatch.setattr(state.window, "_mover", mover)
    left, let_go = [], Planes.let_go
    monkeypatch.setattr(state.window, "_has_room", lambda: False)
    monkeypatch.setattr(Planes, "let_go", lambda self, **on: left.append(self.host_bytes) or let_go(self, **on))
    total_bytes = state.window.total_bytes
    with pytest.warns(UserWarning, match="stay in host memory"):
        state.close()
    assert sum(left) >= total_bytes, "what was on the device has left it, too"


def test_a_variance_of_rmsprop_stays_above_zero_where_gradients_are_nearly_the_same(mover):
    ours = made_by("plain", lambda params: torch.optim.RMSprop(params, lr=1e-4, alpha=0.9, momentum=0.5, centered=True))
    state = in_bf16(ours, mover)
    for number in range(100):
        ours.backward(number)
        for p in ours.parameters:
            p.grad.mul_(0.05).add_(1)
        ours.optimizer.step()
    assert all(p.isfinite().all() for p in ours.parameters)
    found = ours.optimizer.state_dict()["state"][0]
    names = {name for name, value in found.items() if value.dtype is torch.bfloat16}
    assert names == {"momentum_buffer"}
    state.close()


def test_ranks_that_agree_on_a_seed_round_alike(mover):
    pair = []
    for seed in (1, 2):
        ours = made_by("remainders", adamw)
        state = in_bf16(ours, mover, agree=lambda seed: seed and 7)
        torch.manual_seed(seed)
        for number in range(3):
            ours.step(number)
        pair.append(ours)
        state.close()
    assert_same(*pair)


def test_moments_beyond_bf16s_largest_number_stay_finite_where_they_are_found_stepped_and_loaded(mover):
    largest = torch.finfo(torch.float32).max

    def momentum():
        ours = made_by("plain", lambda params: torch.optim.SGD(params, lr=0.0, momentum=1.0))
        for p in ours.parameters:
            p.grad = torch.zeros_like(p)
        return ours

    for loads in (False, True):
        ours = momentum()
        other = momentum() if loads else ours
        for p in other.parameters:
            other.optimizer.state[p]["momentum_buffer"] = torch.full_like(p, largest)
            other.optimizer.state[p]["momentum_buffer"].view(-1)[:2] = torch.tensor([-largest, torch.inf])
        state = in_bf16(ours, mover)
        if loads:
            ours.optimizer.load_state_dict(other.optimizer.state_dict())
        for number in range(2):
            for p in ours.parameters:
                found = ours.optimizer.state[p]["momentum_buffer"].view(-1)
                assert found[0].isfinite() and found[0] < 0 and found[1] == torch.inf
                assert found[2:].isfinite().all() and (found[2:] > 3e38).all()
                p.grad.fill_(2.0**119 if number == 0 else 0.0)
            ours.optimizer.step()
        state.close()


def interrupted(*_):
    raise KeyboardInterrupt


def test_moments_in_bf16_learn_what_fp32_ones_do(mover):
    def loss_after(**options):
        torch.manual_seed(0)
        target, inputs = torch.randn(64, 32), torch.randn(512, 32)
        net = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64)).bfloat16()
        optimizer = MasterWeights(lambda params: torch.optim.AdamW(params, lr=3e-3))(net.parameters())
        state = StreamedState(optimizer, mover, **options)
        for number in range(400):
            batch = inputs[torch.randint(512, (64,), generator=torch.Generator().manual_seed(number))]
            loss = (net(batch.bfloat16()).float() - batch @ target.T).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        state.close()
        with torch.no_grad():
            return (net(inputs.bfloat16()).float() - inputs @ target.T).square().mean().item()

    exact, rounded = loss_after(), loss_after(moment_dtype=torch.bfloat16)
    assert 0.9 < rounded / exact < 1.1


# ---- state that stays on the device ---------------------------------------------------------------------------------

stays = pytest.mark.parametrize("resident_bytes", [SOME, ALL])


def assert_stays(state, resident_bytes):
    """Tell that planes are on the device, as much as they may, and the others in host memory."""
    resident, window = state.window.resident, state.window
    assert resident.residency is R and 0 < resident.device_bytes <= resident_bytes
    assert not resident.kept and not resident.host_bytes
    left_bytes = window.total_bytes - resident.device_bytes
    assert window.host_bytes >= left_bytes and (window.host_bytes > 0) == (resident_bytes == SOME)


@of_planes
@stays
@pytest.mark.parametrize("waits", [True, False])
def test_state_that_stays_is_stepped_like_the_rest_until_it_has_left_and_afterwards(kind, resident_bytes, waits, mover):
    twin, ours = Trained(kind), Trained(kind)
    state = streamed(ours, mover, resident_bytes=resident_bytes)
    resident = state.window.resident
    assert 0 < resident.size_bytes <= resident_bytes, "it is planned with"
    if kind != "whole":  # whose masters are there
        assert resident.residency is Residency.DISCARDED and not resident.device_bytes
    for number in range(6):
        for trained in (twin, ours):
            trained.step(number)
        assert_same(ours, twin)
        state.refresh()
        if number < 3:
            assert_stays(state, resident_bytes)
        if number == 2:
            objects = [tensor for of in ours.inner.state.values() for tensor in of.values()]
            move = resident.begin(O)
            assert not waits or move.wait() is None
        if number % 2:
            close_window(state)
    assert resident.residency is Residency.DISCARDED and resident.size_bytes == resident.host_bytes == 0
    assert state.window.host_bytes >= state.window.total_bytes and not state.window.resident.kept
    assert all(a is b for a, b in zip(objects, (t for o in ours.inner.state.values() for t in o.values()), strict=True))
    state.close()
    del state, objects, resident, move
    gc.collect()
    assert mover.arena.used_bytes == 0


@of_planes
@stays
@pytest.mark.parametrize("closes", [True, False])
def test_state_that_has_left_takes_the_slot_with_it_that_it_passed_through(kind, resident_bytes, closes, mover):
    twin, ours = Trained(kind), Trained(kind)
    state = streamed(ours, mover, resident_bytes=resident_bytes)
    for number in range(4):
        for trained in (twin, ours):
            trained.step(number)
        assert_same(ours, twin)
        if number < 2:
            wide_bytes = state.window.size_bytes
        else:
            assert state.window.size_bytes == wide_bytes - state.window.slot_bytes
            state.window.begin(R).wait()
            assert state.window.device_bytes <= state.window.size_bytes
        if number == 1:
            state.window.resident.begin(O).wait()
        if closes:
            close_window(state)
    state.close()


@of_planes
def test_a_window_that_no_state_stays_beside_has_no_slot_for_it(kind, mover):
    ours, others = Trained(kind), Trained(kind)
    state, without = streamed(ours, mover, resident_bytes=1), streamed(others, mover)
    assert state.window.size_bytes == without.window.size_bytes
    state.close()
    without.close()


@of_planes
@stays
@pytest.mark.parametrize("leaves", [True, False])
def test_a_checkpoint_is_loaded_into_state_that_stays(kind, resident_bytes, leaves, mover):
    twin, ours = Trained(kind), Trained(kind)
    state = streamed(ours, mover, resident_bytes=resident_bytes)
    for number in range(2):
        twin.step(number)
    ours.step(7)
    if leaves:
        state.window.resident.begin(O)
    ours.net.load_state_dict(twin.net.state_dict())
    ours.optimizer.load_state_dict(copy.deepcopy(twin.optimizer.state_dict()))
    assert_same(ours, twin)
    assert leaves or assert_stays(state, resident_bytes) is None
    for number in range(2, 4):
        for trained in (twin, ours):
            trained.step(number)
    assert_same(ours, twin)
    state.close()


@of_planes
@stays
@pytest.mark.parametrize("place", ["device", "cpu", "left"])
def test_state_that_has_stayed_steps_on_when_colo_ends(kind, resident_bytes, place, device):
    mover, twin, ours = Mover(device, host_limit_bytes=64 * MIB), Trained(kind), Trained(kind)
    for trained in (twin, ours):
        trained.step(0)
    state = streamed(ours, mover, resident_bytes=resident_bytes)
    assert_stays(state, resident_bytes)
    for trained in (twin, ours):
        trained.step(1)
    if place == "left":
        state.window.resident.begin(O)
    state.close(torch.device("cpu") if place == "cpu" else None)
    mover.close()
    del state
    for number in (2, 3):
        for trained in (twin, ours):
            trained.step(number)
    assert_same(ours, twin)


@pytest.mark.parametrize("kind", ["plain", "remainders"])
def test_state_that_finds_no_room_to_stay_is_refused_before_a_weight_is_stepped(kind, mover, monkeypatch):
    twin, ours = Trained(kind), Trained(kind)
    start = copy.deepcopy(ours.net.state_dict())
    state = streamed(ours, mover, resident_bytes=MIB)
    empty = torch.empty

    def full(size, *arguments, **options):
        return empty(size, *arguments, **options) if not isinstance(size, int) or size < 1000 else out_of_memory()

    ours.backward(0)
    with (
        monkeypatch.context() as patch,
        pytest.raises(BudgetError, match=r"KiB of the optimizer's state \(.*\) find no"),
    ):
        patch.setattr(torch, "empty", full)
        ours.optimizer.step()
    assert all(torch.equal(p, start[name]) for name, p in ours.net.state_dict().items())
    for trained in (twin, ours):
        trained.step(0)
    assert_same(ours, twin)
    state.close()


@of_planes
def test_state_that_stays_and_has_a_view_is_counted_once(kind, mover):
    ours = Trained(kind)
    state = streamed(ours, mover, resident_bytes=ALL)
    ours.step(0)
    state.refresh()
    whole_bytes = state.window.resident.device_bytes
    views = [tensor.detach() for planes in state.window._planes for tensor in planes.slabs.values()]
    state.refresh()
    assert 0.9 * whole_bytes < state.kept.size_bytes <= whole_bytes and not state.window.resident.size_bytes
    del views
    state.refresh()
    assert state.window.resident.device_bytes == state.window.resident.size_bytes == whole_bytes
    state.close()


def test_state_that_a_class_begins_late_stays_on_the_device_no_more_than_it_may(mover):
    net = model(torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    state = StreamedState(optimizer, mover, region_bytes=16 * 1024, resident_bytes=1000)
    for momentum in (0, 0.9, 0.9):
        optimizer.param_groups[0]["momentum"] = momentum
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        state.refresh()
        assert state.window.resident.size_bytes <= 1000
    assert state.window.host_bytes
    state.close()


# ---- what may go wrong ----------------------------------------------------------------------------------------------


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory")


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@of_planes
def test_an_interrupt_as_state_that_stayed_has_left_lets_it_be_streamed(kind, mover, monkeypatch):
    twin, ours = Trained(kind), Trained(kind)
    state = streamed(ours, mover, resident_bytes=ALL)
    for trained in (twin, ours):
        trained.step(0)
    state.refresh()
    resident = state.window.resident
    resident.begin(O).wait()
    hand_over = resident.hand_over
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(resident, "hand_over", lambda: (hand_over(), press_ctrl_c()))
        ours.step(1)
    for trained in (twin, ours):
        trained.step(1)
    state.refresh()
    assert_same(ours, twin)
    assert resident.size_bytes == 0 and state.window.host_bytes >= state.window.total_bytes
    state.close()


@of_buckets
@pytest.mark.parametrize("ends_at", [1, 2, 4])
@pytest.mark.parametrize("is_parked", [False, True])
def test_a_step_that_failed_in_a_bucket_and_is_repeated_is_one_step(kind, ends_at, is_parked, mover):
    twin, ours = Trained(kind), Trained(kind)
    state = streamed(ours, mover, region_bytes=1)
    assert all(isinstance(work, Bucket) for work in state.window.work())
    for number in range(3):
        twin.step(number)
        ours.backward(number)
        gradients = [p.grad for p in ours.net.parameters()]
        ours.inner.end.at, ours.inner.end.how = ends_at, out_of_memory
        with pytest.raises(torch.OutOfMemoryError):
            ours.optimizer.step()
        assert all(p.grad is g for p, g in zip(ours.net.parameters(), gradients, strict=True))
        del gradients
        if is_parked:  # a rollout in between
            state.refresh()
            for segment in state.segments:
                segment.begin(O).wait() if segment.residency is R else None
            assert sum(segment.device_bytes for segment in state.segments) == 0
            state.gradients.begin(R).wait()
        ours.optimizer.step()
        assert_same(ours, twin)
    state.close()


@of_buckets
@pytest.mark.parametrize("ends_at", [1, 3])
def test_an_interrupt_in_a_bucket_waits_for_its_end(kind, ends_at, mover, interrupts_raise):
    twin, ours = Trained(kind), Trained(kind)
    state = streamed(ours, mover, region_bytes=1)
    for number in range(3):
        twin.step(number)
        ours.backward(number)
        ours.inner.end.at, ours.inner.end.how = ends_at, press_ctrl_c
        with pytest.raises(KeyboardInterrupt):
            ours.optimizer.step()
        assert all(p.grad is not None for p in ours.net.parameters())
        ours.optimizer.step()
        assert_same(ours, twin)
    state.close()


STAGES = [(Planes, name) for name in ("copy_in", "step", "_fill", "_step_flat", "_empty", "intervals")]
STAGES += [(window.StateWindow, name) for name in ("step", "prepare", "end_step", "take_in")]


@pytest.mark.parametrize("kind", ["plain", "remainders", "whole"])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage[1])
@pytest.mark.parametrize("ending", [out_of_memory, press_ctrl_c])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_step_goes_on_where_a_stage_of_a_range_ended_it(
    kind, stage, ending, at, mover, interrupts_raise, monkeypatch
):
    twin, ours = Trained(kind), Trained(kind)
    state = streamed(ours, mover)
    for trained in (twin, ours):
        trained.step(0)
    owner, name = stage
    original, calls = getattr(owner, name), []

    def ends(*arguments, **options):
        calls.append(arguments)
        if len(calls) == at:
            ending()
        return original(*arguments, **options)

    ours.backward(1)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, ends)
            ours.optimizer.step()
    except (torch.OutOfMemoryError, KeyboardInterrupt):
        assert all(p.grad is not None for p in ours.net.parameters())
        if not all(int(moments["step"]) == 2 for moments in ours.inner.state.values()):
            close_window(state)
            ours.optimizer.step()
    twin.step(1)
    assert_same(ours, twin)
    for trained in (twin, ours):
        trained.step(2)
    assert_same(ours, twin)
    state.close()


class RaisesWithin(torch.optim.AdamW):
    """A class whose own body fails, after torch's hook before a step has run."""

    fails = False

    def step(self, closure=None):
        if self.fails:
            out_of_memory()
        return super().step(closure)


def test_a_step_whose_own_body_raises_between_the_hooks_loses_no_gradient(mover):
    register_separable(RaisesWithin)
    twin, ours = Trained("plain"), Trained("plain")
    for trained in (twin, ours):
        trained.optimizer = RaisesWithin(trained.net.parameters(), lr=1e-2)
    state = streamed(ours, mover)
    for number in range(3):
        ours.backward(number)
        gradients = [p.grad for p in ours.parameters]
        copies = [g.clone() for g in gradients]
        ours.optimizer.fails = True
        with pytest.raises(torch.OutOfMemoryError):
            ours.optimizer.step()
        ours.optimizer.fails = False
        assert all(p.grad is g for p, g in zip(ours.parameters, gradients, strict=True))
        assert all(map(torch.equal, gradients, copies))
        del gradients
        ours.optimizer.step()
        twin.step(number)
        assert_same(ours, twin)
    state.close()


class RaisesAfter(torch.optim.AdamW):
    """Fails as torch calls it once all has been stepped, with no parameters left."""

    fails = False

    def _init_group(self, group, *lists):
        if self.fails and not group["params"]:
            out_of_memory()
        return super()._init_group(group, *lists)


def test_a_body_that_raises_once_all_has_been_stepped_has_made_a_step(mover):
    twin, ours = Trained("plain"), Trained("plain")
    for trained in (twin, ours):
        trained.optimizer = RaisesAfter(trained.net.parameters(), lr=1e-2)
    state = streamed(ours, mover)
    for number in range(4):
        ours.backward(number)
        if number % 2:
            ours.optimizer.fails = True
            with pytest.raises(torch.OutOfMemoryError):
                ours.optimizer.step()
            ours.optimizer.fails = False
        else:
            ours.optimizer.step()
        twin.step(number)
        assert all(torch.equal(p, q) for p, q in zip(ours.parameters, twin.parameters, strict=True))
    ours.step(9), twin.step(9)
    assert_same(ours, twin)
    state.close()


@kinds
@pytest.mark.parametrize("num_made", [2, 3])
def test_a_step_that_failed_and_was_given_up_counts_where_it_was_made(kind, num_made, mover, monkeypatch, late):
    """Parameters that it has stepped have made a step each; the others have not."""
    twin, ours = Trained(kind), Trained(kind)
    state = streamed(ours, mover, region_bytes=1)  # whose ranges are of one parameter each
    late(state)
    original, calls = window.StateWindow.step, []

    def ends(self, work, *arguments):
        calls.append(work)
        if len(calls) > num_made:
            out_of_memory()
        return original(self, work, *arguments)

    for trained in (twin, ours):
        trained.step(0)
    ours.backward(1)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(window.StateWindow, "step", ends)
        ours.optimizer.step()
    twin.backward(1)
    made = {id(p) for work in calls[:num_made] for p in work.parameters}
    for p, q in zip(ours.parameters, twin.parameters, strict=True):
        if id(p) not in made:
            q.grad = None
    twin.optimizer.step()
    for number in (2, 3):
        for trained in (twin, ours):
            trained.step(number)
    assert_same(ours, twin)
    state.close()


@kinds
def test_without_host_memory_nothing_is_stepped(kind, device):
    mover = Mover(device, host_limit_bytes=1)
    twin, ours = Trained(kind), Trained(kind)
    mover.arena.limit_bytes = 64 * MIB if kind == "whole" or kind == "bucket-whole" else 1  # masters that are there
    state = streamed(ours, mover)
    if mover.arena.limit_bytes == 1 and not kind.startswith("bucket"):
        ours.backward(0)
        with pytest.raises(BudgetError, match="arena holds 0 B and would have to grow by .*Raise host_limit_bytes"):
            ours.optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(ours.net.parameters(), twin.net.parameters(), strict=True))
    mover.arena.limit_bytes = 64 * MIB
    ours.step(0)
    twin.step(0)
    assert_same(ours, twin)
    state.close()
    mover.close()


@of_buckets
@pytest.mark.parametrize("room_bytes", [0, MIB])
def test_a_bucket_whose_state_finds_no_room_on_the_host_has_been_stepped(kind, room_bytes, device):
    mover = Mover(device, host_limit_bytes=64 * MIB)
    twin, ours = Trained(kind, size=256), Trained(kind, size=256)
    state = streamed(ours, mover, region_bytes=1)
    ours.backward(0)
    state.window.prepare()
    mover.arena.limit_bytes = mover.arena.pinned_bytes + room_bytes
    failures = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "state of the optimizer stays on the device")
        while True:
            try:
                ours.optimizer.step()
                break
            except BudgetError:
                failures += 1
            if failures == 3:
                mover.arena.limit_bytes = 64 * MIB
    assert failures
    twin.step(0)
    assert_same(ours, twin)
    mover.arena.limit_bytes = 64 * MIB
    for trained in (ours, twin):
        trained.step(1)
    assert_same(ours, twin)
    state.close()
    mover.close()


# ---- what a loop does -----------------------------------------------------------------------------------------------


def test_hooks_of_others_see_every_gradient_and_a_closure_is_called_once(mover):
    twin, ours = Trained(), Trained()
    state = streamed(ours, mover)
    seen, calls = [], []
    ours.optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad is not None for p in ours.net.parameters()]))
    state.refresh()  # as at the beginning of every phase

    def closure():
        calls.append(torch.is_grad_enabled())
        ours.backward(0)
        return torch.tensor(3.0)

    assert ours.optimizer.step(closure) == 3.0
    twin.step(0)
    assert calls == [True] and len(seen) == 1
    assert_same(ours, twin)
    ours.backward(1)
    ours.optimizer.step()
    assert seen[1:] == [[True] * 12]
    state.close()


def test_a_hook_that_joins_between_two_phases_clips_what_is_stepped_or_the_step_is_refused(mover):
    twin, ours = Trained(), Trained()
    state = streamed(ours, mover)
    state._before_step = state.refresh  # as in a step outside of `train()`

    def clip(optimizer, *_):
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    for trained in (twin, ours):
        trained.optimizer.register_step_pre_hook(clip)
    ours.backward(0)
    state.before_gradient()
    ours.optimizer.step()
    twin.step(0)
    assert_same(ours, twin)
    for trained in (twin, ours):
        trained.optimizer.register_step_pre_hook(clip)
        trained.backward(1)
    before = [p.detach().clone() for p in ours.parameters]
    with pytest.raises(PhaseError, match="nothing has been stepped yet, and step"):
        ours.optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters, before, strict=True))
    twin.step(1)
    ours.step(1)
    assert_same(ours, twin)
    state.close()


@kinds
def test_state_that_is_cleared_or_loaded_from_before_the_first_step_begins_anew(kind, mover):
    twin, ours = Trained(kind), Trained(kind)
    state = streamed(ours, mover)
    empty = [copy.deepcopy(trained.optimizer.state_dict()) for trained in (twin, ours)]
    for number in range(3):
        twin.step(number)
        ours.step(number)
    for trained, saved in zip((twin, ours), empty, strict=True):
        trained.optimizer.load_state_dict(saved)
        trained.step(3)
    assert_same(ours, twin)
    for trained in (twin, ours):
        trained.optimizer.state.clear()
        trained.step(4)
        assert {int(kept["step"]) for kept in trained.optimizer.state.values()} == {1}
    assert_same(ours, twin)
    state.close()


@kinds
def test_groups_schedulers_and_clipping_are_those_of_resident_state(kind, mover):
    runs = []
    for make in (lambda optimizer: TrainerState(optimizer, mover), lambda optimizer: None):
        ours = Trained(kind, layers=3)
        state = make(ours.optimizer) or streamed(ours, mover)
        scheduler = StepLR(ours.optimizer, 1, gamma=0.5)
        for number in range(5):
            if number == 2:
                torch.manual_seed(5)
                late = torch.nn.Parameter(torch.randn(8, 8).bfloat16())
                ours.optimizer.add_param_group({"params": [late], "lr": 1e-3})
                ours.net.register_parameter("late", late)
            ours.backward(number)
            torch.nn.utils.clip_grad_norm_(ours.net.parameters(), 1.0)
            ours.optimizer.step()
            scheduler.step()
            ours.optimizer.zero_grad()
        runs.append((ours, state))
    assert_same(runs[0][0], runs[1][0])
    fractions = [getattr(ours.optimizer, "changed_fraction", None) for ours, _ in runs]
    assert fractions[0] == fractions[1]
    for _, state in runs:
        state.close()


def test_several_groups_have_their_own_settings(mover):
    twin, ours = Trained("plain", dtype=torch.float32), Trained("plain", dtype=torch.float32)
    for trained in (twin, ours):
        some, others = trained.parameters[::2], trained.parameters[1::2]
        groups = [{"params": some, "lr": 1e-1}, {"params": others, "weight_decay": 0.0, "betas": (0.5, 0.9)}]
        trained.optimizer = torch.optim.AdamW(groups, lr=torch.tensor(1e-2), amsgrad=True)
    state = streamed(ours, mover)
    for number in range(4):
        for trained in (twin, ours):
            if number == 2:
                trained.optimizer.param_groups[1]["lr"] = 1e-4
            trained.step(number)
        assert_same(ours, twin)
    state.close()


def test_a_grad_scaler_skips_a_step_with_infinities(mover):
    ours = Trained("plain", dtype=torch.float32)
    state = streamed(ours, mover)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in ours.net.parameters()]
    for value, moves in ((float("inf"), False), (1.0, True)):
        for p in ours.net.parameters():
            p.grad = torch.full_like(p, value)
        scaler.scale(torch.ones(()))
        scaler.step(ours.optimizer)
        scaler.update()
        assert torch.equal(before[0], next(ours.net.parameters())) is not moves
    state.close()


@kinds
@pytest.mark.parametrize("region_bytes", [1, 30_000, MIB])
def test_parameters_without_gradients_are_left_alone(kind, region_bytes, mover):
    twin, ours = Trained(kind), Trained(kind)
    state = streamed(ours, mover, region_bytes=region_bytes)
    for number in range(4):
        for trained in (twin, ours):
            trained.backward(number)
            for p in trained.parameters[number::3]:
                p.grad = None
            trained.optimizer.step()
        assert_same(ours, twin)
    state.close()


@kinds
def test_freezing_and_unfreezing_is_what_it_is_without_colo(kind, mover):
    twin, ours = Trained(kind), Trained(kind)
    for trained in (twin, ours):
        for p in trained.parameters[:4]:
            p.requires_grad_(False)
    state = streamed(ours, mover)
    for number in range(5):
        for trained in (twin, ours):
            if number == 2:
                for p in trained.parameters:
                    p.requires_grad_(True)
            if number == 3:
                trained.parameters[5].requires_grad_(False)
            trained.backward(number)
            for p in trained.parameters:
                p.grad = p.grad if p.requires_grad else None
            trained.optimizer.step()
        state.refresh()
        assert_same(ours, twin)
    state.close()


@kinds
@pytest.mark.parametrize("counted", [True, False])
def test_weights_that_are_written_between_steps_are_what_the_next_starts_from(kind, counted, mover):
    twin, ours = Trained(kind, size=48), Trained(kind, size=48)
    state = streamed(ours, mover)
    for number in range(4):
        for trained in (twin, ours):
            trained.step(number)
            weight = trained.parameters[2 * (number % 3)]
            with torch.no_grad():
                (weight if counted else weight.data)[7 * number, 3:9] = 0.125 * number
        assert all(map(torch.equal, ours.parameters, twin.parameters))
    if kind != "plain" and kind != "bucket":
        for p, q in zip(ours.parameters, twin.parameters, strict=True):
            assert torch.equal(ours.optimizer.master_of(p), twin.optimizer.master_of(q))
    state.close()


ODD = {
    "scalar": lambda: torch.nn.Parameter(torch.tensor(0.5)),
    "transposed": lambda: torch.nn.Parameter(torch.randn(9, 40).t()),
    "empty": lambda: torch.nn.Parameter(torch.zeros(0, 3)),
    "large": lambda: torch.nn.Parameter(torch.randn(70, 70)),
    "one": lambda: torch.nn.Parameter(torch.randn(1)),
    "fp16": lambda: torch.nn.Parameter(torch.randn(50).half()),
    "fp64": lambda: torch.nn.Parameter(torch.randn(50).double()),
}


@pytest.mark.parametrize("masters", [None, True, False])
@pytest.mark.parametrize("make", [adamw, lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), torch.optim.Adagrad])
def test_parameters_of_every_shape_and_dtype_train_as_without_colo(masters, make, mover):
    twin, ours = Trained("plain", layers=1), Trained("plain", layers=1)
    for trained in (twin, ours):
        torch.manual_seed(3)
        for name, odd in ODD.items():
            trained.net.register_parameter(name, odd())
        build = make if masters is None else MasterWeights(make, remainders=masters)
        trained.optimizer = build(trained.parameters)
    state = streamed(ours, mover, region_bytes=9_000)
    kinds = {name: state.window.has_planes(getattr(ours.net, name)) for name in ODD}
    assert kinds == {**dict.fromkeys(ODD, True), "scalar": False, "transposed": False, "empty": False}
    for number in range(3):
        for trained in (twin, ours):
            trained.step(number)
        assert_same(ours, twin)
        close_window(state)
    saved = copy.deepcopy(ours.optimizer.state_dict())
    for trained in (twin, ours):
        trained.optimizer.load_state_dict(copy.deepcopy(saved))
        trained.step(7)
    assert_same(ours, twin)
    state.close()
    for trained in (twin, ours):
        trained.step(8)
    assert_same(ours, twin)


def test_sparse_gradients_are_stepped_as_without_colo(mover):
    def made():
        torch.manual_seed(2)
        net = torch.nn.Embedding(50, 8, sparse=True)
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    (twin, other), (net, optimizer) = made(), made()
    state = StreamedState(optimizer, mover, region_bytes=1024)
    for number in range(3):
        for each, steps in ((twin, other), (net, optimizer)):
            each(torch.tensor([11, number, 7])).sum().backward()
            steps.step()
            steps.zero_grad()
        assert torch.equal(net.weight, twin.weight)
    state.close()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # Adagrad's own
@pytest.mark.parametrize("name", ["AdamW", "RMSprop", "Adagrad"])
@pytest.mark.parametrize("has_masters", [False, True])
def test_sparse_gradients_are_refused_by_classes_that_refuse_them(mover, name, has_masters):
    """Also where the first one comes after planes were made for the parameter."""

    def made():
        torch.manual_seed(2)
        net = torch.nn.Embedding(50, 8, dtype=torch.bfloat16 if has_masters else None)
        make = partial(getattr(torch.optim, name), lr=0.1)
        return net, (MasterWeights(make) if has_masters else make)(net.parameters())

    (twin, other), (net, optimizer) = made(), made()
    state = StreamedState(optimizer, mover, region_bytes=1024)
    ends = []
    for each, steps in ((twin, other), (net, optimizer)):
        each(torch.tensor([11, 7])).sum().backward()
        steps.step()
        steps.zero_grad()
        each.sparse = True
        each(torch.tensor([11, 3])).sum().backward()
        try:
            ends.append(steps.step())
        except RuntimeError as error:
            ends.append(str(error))
    assert ends[0] == ends[1] and (name == "Adagrad" or "not support sparse gradients" in ends[0])
    assert torch.equal(net.weight, twin.weight)
    state.close()


# ---- what a loop does to state --------------------------------------------------------------------------------------


@kinds
def test_state_is_ordinary_host_tensors_that_reading_and_writing_moves_nowhere(kind, mover):
    twin, ours = Trained(kind), Trained(kind)
    state = streamed(ours, mover)
    for trained in (twin, ours):
        trained.step(0)
    close_window(state)
    for p, q in zip(ours.parameters, twin.parameters, strict=True):
        mine, other = ours.inner_state(p), twin.inner_state(q)
        assert torch.equal(mine["exp_avg"], other["exp_avg"]) and type(mine["exp_avg"]) is torch.Tensor
        for moments in (mine, other):
            moments["exp_avg"].mul_(0.5)
            moments["exp_avg_sq"].data = moments["exp_avg_sq"] * 2
    assert state.window.residency is O and state.window.device_bytes == 0
    state.refresh()
    for trained in (twin, ours):
        trained.step(1)
    assert_same(ours, twin)
    close_window(state)
    for trained in (twin, ours):
        for p in trained.parameters:
            moments = trained.inner_state(p)
            moments["exp_avg"] = moments["exp_avg"] * 0.25
    for trained in (twin, ours):
        trained.step(2)
    assert_same(ours, twin)
    state.close()


def inner_state(self, parameter):
    """The state that the stepping class keeps, of a parameter or its master."""
    if self.inner is self.optimizer:
        return self.optimizer.state[parameter]
    return self.inner.state[self.optimizer.masters[parameter].tensor]


Trained.inner_state = inner_state


@of_planes
def test_saving_state_of_one_parameter_writes_its_bytes_alone(kind, mover):
    ours = Trained(kind)
    state = streamed(ours, mover)
    ours.step(0)
    file = io.BytesIO()
    torch.save(ours.optimizer.state_dict()["state"][1], file)
    assert file.tell() < 8_000
    state.close()


def test_a_view_of_streamed_state_stays_one(mover):
    twin, ours = Trained(), Trained()
    state = streamed(ours, mover)
    for trained in (twin, ours):
        trained.step(0)
    view = ours.inner_state(ours.parameters[0])["exp_avg"][0]
    for trained in (twin, ours):
        trained.step(1)
    assert torch.equal(view, ours.inner_state(ours.parameters[0])["exp_avg"][0]) and not state.window.kept
    assert_same(ours, twin)
    state.close()


@pytest.mark.parametrize("on_host", [False, True])
@kinds
def test_a_view_in_a_bucket_or_a_plane_outlives_the_end(kind, on_host, device):
    mover, ours = Mover(device, host_limit_bytes=64 * MIB), Trained(kind)
    state = streamed(ours, mover)
    ours.step(0)
    view = ours.inner_state(ours.parameters[0])["exp_avg"][0]
    expected = view.clone()
    state.close(torch.device("cpu") if on_host else None)
    mover.close()
    gc.collect()
    assert torch.equal(view, expected)
    ours.step(1)


@register_separable
class Counting(torch.optim.Optimizer):
    """Adam that counts its steps in its groups, as many optimizers of other packages do."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    moment = self.state[p].setdefault("moment", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    p.sub_(group["lr"] * moment / (1 - 0.9 ** group["step"]))


@pytest.mark.parametrize("has_masters", [False, True])
@pytest.mark.parametrize("ends_at", [None, 3])
def test_an_optimizer_that_counts_in_its_groups_counts_a_step_once(has_masters, ends_at, mover, monkeypatch):
    def made(bucket_bytes):
        trained = Trained("plain", dtype=torch.bfloat16 if has_masters else torch.float32)
        parameters = trained.net.parameters()
        kind = MasterWeights(Counting, bucket_bytes=bucket_bytes, remainders=True) if has_masters else Counting
        trained.optimizer = kind(parameters)
        return trained

    twin, resident, ours = made(None), made(1), made(1)
    state = streamed(ours, mover, region_bytes=1)
    assert len(list(state.window.work())) > 3
    schedules = [StepLR(each.optimizer, 1, 0.5) for each in (twin, resident, ours)]
    for number in range(3):
        for trained in (twin, resident):
            trained.step(number)
        ours.backward(number)
        if ends_at is not None:
            calls, step = itertools.count(), type(state.window)._step_bucket

            def fail_once(window, *given, calls=calls, step=step):
                if next(calls) == ends_at:
                    out_of_memory()
                step(window, *given)

            with monkeypatch.context() as patched, pytest.raises(torch.OutOfMemoryError):
                patched.setattr(type(state.window), "_step_bucket", fail_once)
                ours.optimizer.step()
        ours.optimizer.step()
        for schedule in schedules:
            schedule.step()
        for trained in (resident, ours):
            assert trained.optimizer.param_groups[0]["step"] == number + 1
            assert_same(trained, twin)
    state.close()


@register_separable
class OneTable(torch.optim.Optimizer):
    """As 8-bit optimizers do, one tensor in the state of every parameter, beside a state of their own."""

    def __init__(self, params):
        super().__init__(params, {})
        self.table = torch.linspace(-1.0, 1.0, 256)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                if not state:
                    state |= {"moment": torch.zeros_like(p), "table": self.table}
                state["moment"].mul_(0.9).add_(p.grad)
                p.sub_(0.1 * state["table"][torch.bucketize(state["moment"], state["table"]).clamp_(max=255)])


def test_a_table_that_parameters_share_stays_on_the_device(mover):
    twin, ours = Trained("plain", dtype=torch.float32), Trained("plain", dtype=torch.float32)
    for trained in (twin, ours):
        trained.optimizer = OneTable(trained.net.parameters())
    state = streamed(ours, mover, region_bytes=1)
    for number in range(3):
        for trained in (twin, ours):
            trained.step(number)
    state.refresh()
    kept = {(kept.reason, kept.size_bytes) for kept in state.window.kept}
    assert kept == {("several parameters share it", 1024)}
    assert_same(ours, twin)
    close_window(state)
    state.close()


# ---- saving and loading ---------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_checkpoint_is_that_of_resident_state_and_is_loaded_into_host_memory(kind, is_fresh, mover):
    twin, ours = Trained(kind), Trained(kind)
    state = streamed(ours, mover)
    for number in range(2):
        twin.step(number)
    saved = copy.deepcopy(twin.optimizer.state_dict())
    kept = copy.deepcopy(saved)
    if not is_fresh:
        ours.step(7)
        close_window(state)
    ours.net.load_state_dict(twin.net.state_dict())
    ours.optimizer.load_state_dict(saved)
    assert_same(ours, twin)
    if not is_fresh:
        close_window(state)
    for number in range(2, 4):
        for trained in (twin, ours):
            trained.step(number)
    assert_same(ours, twin)
    for number, of in kept["state"].items() if not kind.startswith("bucket") else ():  # torch takes tensors as they are
        kept_of = {key: value for key, value in of.items() if key != "step"}  # which torch itself takes as it is
        assert all(torch.equal(value, saved["state"][number][key]) for key, value in kept_of.items())
    state.close()


@pytest.mark.parametrize("kinds_of", [("remainders", "whole"), ("whole", "remainders")])
def test_masters_of_either_kind_are_loaded_from_the_other(kinds_of, mover):
    twin, ours, other = Trained(kinds_of[0]), Trained(kinds_of[1]), Trained(kinds_of[1])
    state = streamed(ours, mover)
    twin.step(0)
    saved = copy.deepcopy(twin.optimizer.state_dict())
    for trained in (ours, other):
        trained.net.load_state_dict(twin.net.state_dict())
        trained.optimizer.load_state_dict(copy.deepcopy(saved))
        trained.step(1)
    assert_same(ours, other)
    state.close()


@kinds
def test_a_checkpoint_that_does_not_fit_changes_nothing(kind, mover):
    twin, ours, other = Trained(kind), Trained(kind), Trained(kind, layers=2)
    state = streamed(ours, mover)
    for trained in (twin, ours, other):
        trained.step(0)
    with pytest.raises(ValueError, match="doesn't match the size"):
        ours.optimizer.load_state_dict(other.optimizer.state_dict())
    assert_same(ours, twin)
    for trained in (twin, ours):
        trained.step(1)
    assert_same(ours, twin)
    state.close()


@kinds
@pytest.mark.parametrize("on_host", [True, False])
def test_state_that_is_there_already_is_taken_in_and_stays_when_colo_ends(kind, on_host, device):
    mover, twin, ours = Mover(device, host_limit_bytes=64 * MIB), Trained(kind), Trained(kind)
    for trained in (twin, ours):
        trained.step(0)
    state = streamed(ours, mover)
    assert state.window.device_bytes == 0
    for trained in (twin, ours):
        trained.step(1)
    assert_same(ours, twin)
    state.close(torch.device("cpu") if on_host else None)
    mover.close()
    gc.collect()
    for trained in (twin, ours):
        trained.step(2)
    assert_same(ours, twin)


@kinds
def test_an_optimizer_whose_runtime_has_ended_streams_in_another(kind, device):
    twin, ours = Trained(kind), Trained(kind)
    for number in range(3):
        mover = Mover(device, host_limit_bytes=64 * MIB)
        state = streamed(ours, mover, region_bytes=[1, 20_000, MIB][number])
        for trained in (twin, ours):
            trained.step(number)
        assert_same(ours, twin)
        state.close()
        mover.close()


# ---- released gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("region_bytes", [1, 20_000, MIB])
@kinds
def test_gradients_that_are_dropped_as_they_are_used_make_the_same_weights(kind, region_bytes, mover):
    twin, ours = (Trained(kind, dtype=torch.bfloat16, layers=4) for _ in range(2))
    state = StreamedState(ours.optimizer, mover, region_bytes=region_bytes, may_release=lambda: True)
    for number in range(3):
        x = torch.randn(3, 32, generator=torch.Generator().manual_seed(number)).bfloat16()
        for trained in (twin, ours):
            trained.net(x).float().square().mean().backward()
        assert any(p.grad is None for p in ours.parameters) or region_bytes == MIB
        for trained in (twin, ours):
            trained.optimizer.step()
            trained.optimizer.zero_grad()
        assert_same(ours, twin)
        state.refresh()
    state.close()


def test_a_learning_rate_that_is_set_before_the_step_of_released_gradients_is_kept(mover):
    ours = Trained("plain", dtype=torch.float32)
    ours.optimizer = Counting(ours.net.parameters())
    state = StreamedState(ours.optimizer, mover, region_bytes=1, may_release=lambda: True)
    for number in range(2):
        ours.net(torch.ones(3, 32)).square().mean().backward()
        assert all(p.grad is None for p in ours.parameters), "stepped within the pass"
        ours.optimizer.param_groups[0]["lr"] = 0.25 / (number + 1)
        ours.optimizer.step()
        assert ours.optimizer.param_groups[0]["lr"] == 0.25 / (number + 1)
        assert ours.optimizer.param_groups[0]["step"] == number + 1
    state.close()
