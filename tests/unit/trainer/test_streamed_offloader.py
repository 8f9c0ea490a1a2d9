"""Streaming the state through a step must not change a bit of training, whatever happens in between."""

import copy
import gc
import os
import signal

import pytest
import torch
from colo.trainer.optimizer_state import StateOffloader
from colo.trainer.streamed_offloader import StreamedOffloader
from torch.optim.lr_scheduler import StepLR

from colo.errors import BudgetError
from colo.memory.offload import Mover
from colo.phases.phase import Residency
from colo.testing import LateMover
from colo.trainer.master_weights import MasterWeights
from colo.trainer.separable import register_separable
from colo.units import MIB

R, O = Residency.RESIDENT, Residency.OFFLOADED  # noqa: E741


def model(dtype=torch.bfloat16, layers=6):
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(layers))).to(dtype)


@register_separable
class Fragile(torch.optim.AdamW):
    """Fails, or is interrupted, as it begins its step number `ends_at`, counted from 1."""

    ends_at = 0
    ending = staticmethod(lambda: None)

    def step(self, closure=None):
        self.ends_at -= 1
        if self.ends_at == 0:
            self.ending()
        return super().step(closure)


def adamw(params):
    return Fragile(params, lr=1e-2, weight_decay=0.1)


MAKE = {"plain": adamw, "remainders": MasterWeights(adamw), "whole": MasterWeights(adamw, remainders=False)}
kinds = pytest.mark.parametrize("kind", MAKE)


class Trained:
    """A model, its optimizer, and gradients that depend on a number alone."""

    def __init__(self, kind="remainders", **options):
        self.net = model(**options)
        self.optimizer = MAKE[kind](self.net.parameters())

    @property
    def inner(self):
        return getattr(self.optimizer, "inner", self.optimizer)

    def backward(self, number):
        generator = torch.Generator().manual_seed(number)
        for p in self.net.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)

    def step(self, number):
        self.backward(number)
        self.optimizer.step()


def streamed(trained, mover, **options):
    return StreamedOffloader(trained.optimizer, mover, **{"bucket_bytes": 8 * 1024} | options)


def watch(offloader):
    """Every number of device bytes that the state has held when it was gathered, with what was made there twice."""
    held, gather = [], offloader.state.gather

    def watched(bucket):
        kept = gather(bucket)
        held.append(offloader.state.device_bytes)
        return kept

    offloader.state.gather = watched
    return held


def assert_same(one, other):
    for p, q in zip(one.net.parameters(), other.net.parameters(), strict=True):
        assert torch.equal(p, q)
    states = [t.optimizer.state_dict()["state"] for t in (one, other)]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        assert state.keys() == states[1][number].keys()
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(states[1][number][k])) for k, v in state.items())


@kinds
def test_streamed_training_is_resident_training_and_holds_no_more_than_its_window(kind, mover):
    twin, ours = Trained(kind), Trained(kind)
    offloader = streamed(ours, mover)
    held = watch(offloader)
    resident = StateOffloader(twin.optimizer, mover)
    assert len(offloader.state.buckets) >= 3 and offloader.state.device_bytes == 0
    for number in range(5):
        window_bytes = offloader.state.size_bytes
        for trained in (twin, ours):
            trained.step(number)
        assert 0 < max(held) <= window_bytes < offloader.state.total_bytes
        assert offloader.state.residency is O and offloader.state.device_bytes == 0
        assert_same(ours, twin)
        held.clear()
    assert offloader.state.host_bytes >= offloader.state.total_bytes
    resident.close()
    offloader.close()
    for trained in (twin, ours):
        trained.step(6)
    assert_same(ours, twin)
    assert mover.arena.used_bytes == 0


@kinds
def test_copies_that_run_late_meet_no_memory_that_was_given_back(kind):
    late = LateMover(host_limit_bytes=64 * MIB, progress=lambda: 1)
    twin, ours = Trained(kind), Trained(kind)
    offloader = streamed(ours, late)
    for number in range(3):
        for trained in (twin, ours):
            trained.step(number)
    assert_same(ours, twin)
    offloader.close()
    late.close()


def test_state_leaves_room_in_the_window_for_what_stepping_a_bucket_takes():
    late = LateMover(host_limit_bytes=64 * MIB)  # whose departures end only when they are waited for
    ours, held = Trained(), []
    ours.net = torch.nn.Sequential(torch.nn.Linear(96, 96), *ours.net).bfloat16()
    ours.optimizer = MAKE["remainders"](ours.net.parameters())
    offloader = streamed(ours, late)
    ours.inner.register_step_pre_hook(
        lambda *_: held.append(offloader.state.device_bytes + offloader.state._stepping.transient_bytes)
    )
    for number in range(4):
        ours.step(number)
    assert 0 < max(held) <= offloader.state.size_bytes
    offloader.close()
    late.close()


def test_nothing_grows_over_a_hundred_steps(mover):
    trained = Trained()
    offloader = streamed(trained, mover)

    def held():
        gc.collect()
        tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
        return mover.arena.pinned_bytes, mover.arena.used_bytes, tensors

    for number in range(3):
        trained.step(number)
    before = held()
    for number in range(100):
        trained.step(number)
        offloader.refresh()
    assert held() == before
    offloader.close()


# ---- what may go wrong ----------------------------------------------------------------------------------------------


def out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory")


def press_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@kinds
@pytest.mark.parametrize("ends_at", [1, 2, 4])
@pytest.mark.parametrize("is_parked", [False, True])
def test_a_step_that_failed_in_a_bucket_and_is_repeated_is_one_step(kind, ends_at, is_parked, mover):
    twin, ours = Trained(kind), Trained(kind)
    offloader = streamed(ours, mover)
    for number in range(3):
        twin.step(number)
        ours.backward(number)
        gradients = [p.grad for p in ours.net.parameters()]
        ours.inner.ends_at, ours.inner.ending = ends_at, out_of_memory
        with pytest.raises(torch.OutOfMemoryError):
            ours.optimizer.step()
        assert all(p.grad is g for p, g in zip(ours.net.parameters(), gradients, strict=True))
        del gradients
        if is_parked:  # a rollout in between
            offloader.refresh()
            for segment in offloader.segments:
                segment.begin(O).wait() if segment.residency is R else None
            assert sum(segment.device_bytes for segment in offloader.segments) == 0
        ours.optimizer.step()
        assert_same(ours, twin)
    offloader.close()


@kinds
@pytest.mark.parametrize("ends_at", [1, 3])
def test_an_interrupt_in_a_bucket_waits_for_its_end(kind, ends_at, mover, interrupts_raise):
    twin, ours = Trained(kind), Trained(kind)
    offloader = streamed(ours, mover)
    for number in range(3):
        twin.step(number)
        ours.backward(number)
        ours.inner.ends_at, ours.inner.ending = ends_at, press_ctrl_c
        with pytest.raises(KeyboardInterrupt):
            ours.optimizer.step()
        assert all(p.grad is not None for p in ours.net.parameters())
        ours.optimizer.step()
        assert_same(ours, twin)
    offloader.close()


@pytest.mark.parametrize("stage", ["lift", "hold", "lower", "lower_all", "gather", "settle"])
@pytest.mark.parametrize("ending", [out_of_memory, press_ctrl_c])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_step_goes_on_where_a_stage_of_a_bucket_ended_it(stage, ending, at, mover, interrupts_raise, monkeypatch):
    twin, ours = Trained(), Trained()
    offloader = streamed(ours, mover)
    for trained in (twin, ours):
        trained.step(0)
    original, calls = getattr(offloader.state, stage), []

    def ends(*arguments):
        calls.append(arguments)
        if len(calls) == at:
            ending()
        return original(*arguments)

    ours.backward(1)
    with monkeypatch.context() as patch:
        patch.setattr(offloader.state, stage, ends)
        try:
            ours.optimizer.step()
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            offloader.refresh()
            assert all(p.grad is not None for p in ours.net.parameters())
            has_ended = bool(offloader._step.consumed()) or stage in ("lift", "hold")
            if has_ended:
                ours.optimizer.step()
    twin.step(1)
    for trained in (twin, ours):
        trained.step(2)
    assert_same(ours, twin)
    offloader.close()


def test_without_host_memory_nothing_is_stepped(device):
    mover = Mover(device, host_limit_bytes=1)
    twin, ours = Trained(), Trained()
    offloader = streamed(ours, mover)
    ours.backward(0)
    with pytest.raises(BudgetError, match="arena holds 0 B and would have to grow by .*Raise host_limit_bytes"):
        ours.optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(ours.net.parameters(), twin.net.parameters(), strict=True))
    mover.arena.limit_bytes = 64 * MIB
    ours.optimizer.step()
    twin.step(0)
    assert_same(ours, twin)
    offloader.close()
    mover.close()


# ---- what a loop does -----------------------------------------------------------------------------------------------


def test_hooks_of_others_see_every_gradient_and_a_closure_is_called_once(mover):
    twin, ours = Trained(), Trained()
    offloader = streamed(ours, mover)
    seen, calls = [], []
    ours.optimizer.register_step_pre_hook(lambda *_: seen.append([p.grad is not None for p in ours.net.parameters()]))
    offloader.refresh()  # as at the beginning of every phase

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
    offloader.close()


def test_groups_schedulers_and_clipping_are_those_of_resident_state(mover):
    runs = []
    for make in (lambda optimizer: StateOffloader(optimizer, mover), lambda optimizer: None):
        ours = Trained(layers=3)
        offloader = make(ours.optimizer) or streamed(ours, mover)
        scheduler = StepLR(ours.optimizer, 1, gamma=0.5)
        for number in range(4):
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
        runs.append((ours, offloader))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][0].optimizer.changed_fraction == runs[1][0].optimizer.changed_fraction
    for _, offloader in runs:
        offloader.close()


def test_a_grad_scaler_skips_a_step_with_infinities(mover):
    ours = Trained("plain", dtype=torch.float32)
    offloader = streamed(ours, mover)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in ours.net.parameters()]
    for value, moves in ((float("inf"), False), (1.0, True)):
        for p in ours.net.parameters():
            p.grad = torch.full_like(p, value)
        scaler.scale(torch.ones(()))
        scaler.step(ours.optimizer)
        scaler.update()
        assert torch.equal(before[0], next(ours.net.parameters())) is not moves
    offloader.close()


def test_parameters_without_gradients_are_left_alone(mover):
    twin, ours = Trained(), Trained()
    offloader = streamed(ours, mover)
    for number in range(3):
        for trained in (twin, ours):
            trained.backward(number)
            for p in list(trained.net.parameters())[number::3]:
                p.grad = None
            trained.optimizer.step()
    assert_same(ours, twin)
    offloader.close()


def test_touching_state_brings_its_bucket_and_others_give_way(mover):
    ours = Trained()
    offloader = streamed(ours, mover)
    ours.step(0)
    expected = ours.optimizer.state_dict()["state"]
    for number, p in enumerate(ours.net.parameters()):
        moment = ours.optimizer.state[p]["exp_avg"]
        assert torch.equal(moment, expected[number]["exp_avg"])
        assert 0 < offloader.state.device_bytes <= offloader.state.size_bytes
        assert offloader.state.residency is R
    offloader.state.begin(O).wait()
    assert offloader.state.device_bytes == 0
    ours.step(1)
    offloader.close()


def test_state_that_somebody_has_a_view_of_stays_and_is_named(mover):
    twin, ours = Trained(), Trained()
    offloader = streamed(ours, mover)
    for trained in (twin, ours):
        trained.step(0)
    view = ours.optimizer.state[next(ours.net.parameters())]["exp_avg"][0]
    for trained in (twin, ours):
        trained.step(1)
    (kept,) = offloader.kept.items
    assert "state[0]" in kept.name and "more refer" in kept.reason
    assert torch.equal(view, twin.optimizer.state[next(twin.net.parameters())]["exp_avg"][0])
    del view
    for trained in (twin, ours):
        trained.step(2)
    assert not offloader.kept.items and offloader.state.device_bytes == 0
    assert_same(ours, twin)
    offloader.close()


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
    offloader = streamed(ours, mover)
    for number in range(3):
        for trained in (twin, ours):
            trained.step(number)
    offloader.refresh()
    assert {(kept.reason, kept.size_bytes) for kept in offloader.kept.items} == {("several parameters share it", 1024)}
    assert_same(ours, twin)
    offloader.close()


# ---- saving and loading ---------------------------------------------------------------------------------------------


@kinds
def test_a_checkpoint_is_that_of_resident_state_and_is_loaded_a_bucket_at_a_time(kind, mover):
    twin, ours = Trained(kind), Trained(kind)
    offloader = streamed(ours, mover)
    for number in range(2):
        twin.step(number)
    saved = copy.deepcopy(twin.optimizer.state_dict())
    ours.step(7)
    ours.net.load_state_dict(twin.net.state_dict())
    held = watch(offloader)
    ours.optimizer.load_state_dict(saved)
    assert 0 < max(held) <= offloader.state.size_bytes and offloader.state.device_bytes == 0
    assert_same(ours, twin)
    for number in range(2, 4):
        for trained in (twin, ours):
            trained.step(number)
    assert_same(ours, twin)
    offloader.close()


@kinds
def test_a_checkpoint_that_does_not_fit_changes_nothing(kind, mover):
    twin, ours, other = Trained(kind), Trained(kind), Trained(kind, layers=2)
    offloader = streamed(ours, mover)
    for trained in (twin, ours, other):
        trained.step(0)
    with pytest.raises(ValueError, match="doesn't match the size"):
        ours.optimizer.load_state_dict(other.optimizer.state_dict())
    assert_same(ours, twin)
    for trained in (twin, ours):
        trained.step(1)
    assert_same(ours, twin)
    offloader.close()


def test_state_that_is_there_already_is_taken_in(mover):
    twin, ours = Trained(), Trained()
    for trained in (twin, ours):
        trained.step(0)
    offloader = streamed(ours, mover)
    assert offloader.state.device_bytes == 0
    for trained in (twin, ours):
        trained.step(1)
    assert_same(ours, twin)
    offloader.close(torch.device("cpu"))
    assert_same(ours, twin)
