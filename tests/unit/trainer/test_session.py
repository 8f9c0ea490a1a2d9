"""The trainer's side of a runtime, with a listener that writes down what it is told."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from colo.errors import BudgetError, PhaseError
from colo.memory.offload import Mover
from colo.optim import register_separable
from colo.phases.phase import NEEDS, TRAINER_MASTER_WEIGHTS, Need, Phase, Residency
from colo.trainer.optimizers import MegatronOptimizers
from colo.trainer.session import TrainerSession

SIZE = 4096
BATCH = torch.ones(2, 8)


class Listener:
    """Writes down what it is told, and has everything on the device before a step."""

    def __init__(self):
        self.told = []
        self.session = None

    def on_backward(self, number):
        self.told.append(("backward", number))

    def on_gradient(self):
        self.told.append("gradient")

    def on_progress(self):
        self.told.append("progress")

    def before_step(self):
        self.told.append("before step")
        self.session.bring_back()

    def after_step(self):
        self.told.append("after step")

    def may_release(self):
        return False


def build(listener=None, *, model=None, **options):
    """A session of a small model, its model, and what its listener is told."""
    listener = listener or Listener()
    model = model or nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    session = TrainerSession(optimizer, Mover(torch.device("cpu")), region_bytes=SIZE, events=listener, **options)
    listener.session = session
    return session, model, listener


def backward(model):
    model(BATCH).sum().backward()


def park(session):
    for part in session.segments[:3]:
        if part.residency is Residency.RESIDENT:
            part.begin(Residency.OFFLOADED).wait()


def test_segments_are_the_states_the_masters_the_gradients_and_what_stays():
    session, _, _ = build()
    names = [part.name for part in session.segments]
    assert names == ["trainer.optimizer", "trainer.master_weights", "trainer.gradients", "trainer.kept"]
    assert list(session.kept) == []


def test_backward_passes_are_told_in_order_and_counted_anew_after_a_step():
    session, model, listener = build()
    for _ in range(2):
        backward(model)
    assert [word for word in listener.told if word[0] == "backward"] == [("backward", 1), ("backward", 2)]
    assert listener.told[0] == "gradient" and listener.told.count("gradient") == 8
    assert listener.told.count("progress") == 8
    assert not session.has_stepped
    listener.told.clear()
    session.optimizer.step()
    assert listener.told == ["before step", "after step"]
    session.note_step()
    assert session.has_stepped
    backward(model)
    assert ("backward", 1) in listener.told
    session.begin_training()
    assert not session.has_stepped
    assert session.end_training() is None, "a CPU's memory is not measured"


def test_parked_state_and_gradients_are_known_and_read_where_they_are_and_come_back():
    session, model, listener = build()
    backward(model)
    session.optimizer.step()
    assert not (session.has_state_on_host or session.has_parked_gradients)
    session.look_again()
    gradients = [p.grad.clone() for p in model.parameters()]
    park(session)
    assert session.has_state_on_host and session.has_parked_gradients
    listener.told.clear()
    assert torch.isfinite(next(iter(session.optimizer.state.values()))["exp_avg"] + 0).all()
    assert torch.equal(next(model.parameters()).grad + 0, gradients[0])
    assert listener.told == [] and session.has_state_on_host and session.has_parked_gradients
    session.bring_back()
    assert not session.has_parked_gradients
    assert session.segments[0].residency is Residency.RESIDENT
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_main_parameters_of_megatron_are_needed_before_the_hooks_of_a_step_run():
    session, model, _ = build()
    backward(model)
    session.look_again()
    park(session)
    assert session.needs is NEEDS and session.parked_early == ["trainer.gradients"]
    model = nn.Linear(8, 1).bfloat16()
    mains = [p.detach().clone().float() for p in model.parameters()]
    part = {"optimizer": AdamW(mains), "float16_groups": [list(model.parameters())], "fp32_from_fp32_groups": []}
    listener = Listener()
    optimizer = MegatronOptimizers(SimpleNamespace(**part))
    session = TrainerSession(optimizer, Mover(torch.device("cpu")), region_bytes=SIZE, events=listener)
    assert session.needs[Phase.TRAIN] == NEEDS[Phase.TRAIN] | {TRAINER_MASTER_WEIGHTS: Need.RESIDENT}
    assert {p: session.needs[p] for p in Phase if p is not Phase.TRAIN} == {
        p: NEEDS[p] for p in Phase if p is not Phase.TRAIN
    }
    assert session.parked_early == []
    park(session)
    assert session.parked_early == ["trainer.master_weights"]
    session.close()


def test_gradients_that_the_loop_has_dropped_are_not_parked_any_more():
    session, model, _ = build()
    backward(model)
    session.look_again()
    park(session)
    session.optimizer.zero_grad()
    session.look_again()
    assert not session.has_parked_gradients


def test_what_trains_by_now_is_watched_once_somebody_looks_at_parameters():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).requires_grad_(False)
    model[1].bias.requires_grad_(True)
    session, model, listener = build(model=model)
    backward(model)
    assert listener.told.count("gradient") == 1
    model.requires_grad_(True)
    for options, count in (({"parameters": False}, 1), ({}, 4)):
        session.look_again(**options)
        listener.told.clear()
        backward(model)
        assert listener.told.count("gradient") == count


def test_state_that_appears_is_taken_in():
    session, model, _ = build()
    backward(model)
    state = session.segments[0]
    session.optimizer.step()
    size_bytes = state.size_bytes
    parameter = next(model.parameters())
    session.optimizer.state[parameter]["more"] = torch.ones(SIZE)
    session.look_again(parameters=False)
    assert state.device_bytes >= size_bytes + SIZE * 4


def test_a_pass_through_sharded_modules_is_told_of_before_it_reaches_them():
    inner = nn.Linear(8, 8).requires_grad_(False)
    outer = nn.Linear(8, 1)
    model = nn.Sequential(nn.Linear(8, 8), inner, outer)
    session, model, listener = build(model=model, sharded_modules=[inner])
    backward(model)
    assert listener.told.count("gradient") == 5  # of four parameters, and of what `inner` returns
    session.stop_watching()
    listener.told.clear()
    backward(model)
    assert listener.told == []


def test_a_pass_that_a_listener_refuses_steps_nothing_and_keeps_its_gradients():
    class Refusing(Listener):
        def may_release(self):
            return True

        def on_backward(self, number):
            if number > 1:
                raise PhaseError("a second pass")

    session, model, _ = build(Refusing(), streamed=True, release_gradients=True)
    backward(model)
    assert all(p.grad is None for p in model.parameters())
    weights = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(PhaseError, match="a second pass"):
        backward(model)
    assert any(p.grad is not None for p in model.parameters())
    assert all(map(torch.equal, weights, model.parameters()))
    session.close()


def test_a_closed_session_leaves_an_optimizer_that_works_without_it():
    session, model, listener = build()
    twin = copy.deepcopy(model)
    other = AdamW(twin.parameters(), lr=1e-2)
    for number in range(3):
        if number == 1:
            park(session)
            listener.told.clear()
            session.close(torch.device("cpu"))
            session.close()
        for net, optimizer in ((model, session.optimizer), (twin, other)):
            backward(net)
            optimizer.step()
            optimizer.zero_grad()
    assert listener.told == []
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert session.segments[0].host_bytes == 0


@pytest.mark.parametrize("way", ["resident", "streamed", "second of two"])
@pytest.mark.parametrize(
    "step",
    [
        "register_step_pre_hook",
        "register_step_post_hook",
        "register_load_state_dict_pre_hook",
        "register_load_state_dict_post_hook",
    ],
)
def test_a_session_that_fails_at_a_hook_leaves_none(step, way):
    class Refusing(AdamW):
        pass

    def refuse(*_, **__):
        raise OSError("no hooks today")

    setattr(Refusing, step, refuse)
    register_separable(Refusing)
    model = nn.Linear(8, 1)
    optimizers = [Refusing(model.parameters())]
    if way == "second of two":
        optimizers.insert(0, AdamW(model.parameters()))
    given = optimizers if len(optimizers) > 1 else optimizers[0]
    mover = Mover(torch.device("cpu"))
    with pytest.raises(OSError, match="no hooks today"):
        TrainerSession(given, mover, region_bytes=SIZE, events=Listener(), streamed=way == "streamed")
    for optimizer in optimizers:
        assert not any(value for name, value in vars(optimizer).items() if name.endswith("_hooks"))
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
    backward(model)
    for optimizer in optimizers:
        optimizer.step()


def test_a_listener_is_not_called_by_an_optimizer_whose_session_could_not_begin():
    class Unwatched(nn.Linear):
        def register_forward_hook(self, *arguments, **options):
            raise BudgetError("no hooks today", needed_bytes=1, free_bytes=0)

    model, listener = nn.Linear(8, 1), Listener()
    optimizer = AdamW(model.parameters())
    with pytest.raises(BudgetError, match="no hooks today"):
        TrainerSession(
            optimizer,
            Mover(torch.device("cpu")),
            region_bytes=SIZE,
            events=listener,
            sharded_modules=[Unwatched(8, 1)],
        )
    model(BATCH).sum().backward()
    listener.told.clear()
    optimizer.step()
    assert listener.told == []
