"""Gradients belong to the loop: what it keeps, drops, zeroes, clips or assigns is bit for bit as without colo."""

import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.phases.phase import Residency
from colo.trainer.gradients import ParameterGradients
from colo.trainer.master_weights import MasterWeights
from colo.units import MIB
from tests.models import tiny_qwen3
from tests.runtimes import ALWAYS, adamw, assert_same_weights, launch, qwen3, segment, train_step


def config():
    return tiny_qwen3(tie_word_embeddings=True)


OPTIMIZERS = {
    "sgd": lambda ps: SGD(ps, lr=0.1),
    "adamw": lambda ps: AdamW(ps, lr=1e-2),
    "masters": MasterWeights(lambda ps: AdamW(ps, lr=1e-2)),
}


class Twins:
    """A runtime that parks everything for each rollout, and the same model and optimizer without colo."""

    def __init__(self, kind="sgd", **options):
        dtype = torch.bfloat16 if kind == "masters" else torch.float32
        settings = colo.RuntimeConfig(kv_cache_bytes=MIB, offload="always", **options)
        self.rt = colo.launch(config(), optimizer=OPTIMIZERS[kind], dtype=dtype, device="cpu", config=settings)
        self.twin = copy.deepcopy(self.rt.model)
        self.optimizer = OPTIMIZERS[kind](self.twin.parameters())

    @property
    def both(self):
        return ((self.rt.model, self.rt.optimizer), (self.twin, self.optimizer))

    def assert_same(self):
        for (name, mine), other in zip(self.rt.model.named_parameters(), self.twin.parameters(), strict=True):
            assert torch.equal(mine, other), name
            assert (mine.grad is None) is (other.grad is None), name
            assert mine.grad is None or torch.equal(mine.grad, other.grad), name


@pytest.fixture
def twins():
    made = Twins()
    yield made
    made.rt.close()


def backward(model, optimizer, number=1):
    ids = torch.tensor([[number % 64, 2, 3, 4]])
    model(input_ids=ids, labels=ids).loss.backward()


def step(model, optimizer):
    optimizer.step()


def zero(model, optimizer):
    optimizer.zero_grad()


def zero_in_place(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def zero_model(model, optimizer):
    model.zero_grad()


def assign(model, optimizer):
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.25)


def drop_one(model, optimizer):
    next(model.parameters()).grad = None


def clip(model, optimizer):
    clip_grad_norm_(model.parameters(), 0.1)


def halve(model, optimizer):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


ZEROS = [zero, zero_in_place, zero_model]


@pytest.mark.parametrize("where", ["before", "within", "after", "in train"])
@pytest.mark.parametrize("how", ZEROS)
def test_zeroing_has_its_effect_wherever_it_is_done(twins, how, where):
    rt = twins.rt
    with rt.train():
        for pair in twins.both:
            backward(*pair, 1)
            step(*pair)
            zero(*pair)
            backward(*pair, 2)  # a KL limit has been reached, say: this minibatch is not used
    if where == "before":
        how(rt.model, rt.optimizer)
    with rt.rollout():
        rt.generate([[1, 2]], max_tokens=2)
        assert rt.scheduler.segments["trainer.gradients"].device_bytes == 0
        if where == "within":
            how(rt.model, rt.optimizer)
    if where == "after":
        how(rt.model, rt.optimizer)
    with rt.train():
        if where == "in train":
            how(rt.model, rt.optimizer)
        how(twins.twin, twins.optimizer)
        twins.assert_same()
        for pair in twins.both:
            backward(*pair, 3)
            step(*pair)
    twins.assert_same()


@pytest.mark.parametrize("number_of_rollouts", [0, 1, 2])
def test_an_extra_backward_pass_is_trained_on_as_it_is_without_colo(twins, number_of_rollouts):
    with twins.rt.train():
        for pair in twins.both:
            backward(*pair, 1)
            step(*pair)
            backward(*pair, 2)
    twins.assert_same()
    for _ in range(number_of_rollouts):
        twins.rt.generate([[1, 2]], max_tokens=2)
        twins.assert_same()
    with twins.rt.train():
        for pair in twins.both:
            backward(*pair, 3)
            step(*pair)
    twins.assert_same()


@pytest.mark.parametrize("where", ["in train", "before", "within", "after"])
def test_gradients_assigned_by_hand_survive(twins, where):
    rt = twins.rt
    with rt.train():
        for pair in twins.both:
            backward(*pair, 1)
            step(*pair)
        if where == "in train":
            assign(rt.model, rt.optimizer)
    if where == "before":
        assign(rt.model, rt.optimizer)
    with rt.rollout():
        rt.generate([[1, 2]], max_tokens=2)
        if where == "within":
            assign(rt.model, rt.optimizer)
    if where == "after":
        assign(rt.model, rt.optimizer)
    assign(twins.twin, twins.optimizer)
    twins.assert_same()
    with rt.train():
        for pair in twins.both:
            step(*pair)
    twins.assert_same()


def test_clipping_while_idle_sees_the_norm(twins):
    with twins.rt.train():
        for pair in twins.both:
            backward(*pair)
    twins.rt.generate([[1, 2]], max_tokens=2)
    norms = [clip_grad_norm_(model.parameters(), 0.1) for model, _ in twins.both]
    assert torch.equal(*norms)
    assert float(norms[0]) > 0
    twins.assert_same()


def test_parked_gradients_are_ordinary_host_tensors_within_a_rollout(twins):
    with twins.rt.train():
        for pair in twins.both:
            backward(*pair)
    with twins.rt.rollout():
        parameter, other = next(twins.rt.model.parameters()), next(twins.twin.parameters())
        held = parameter.grad
        assert (held.shape, held.dtype, held.requires_grad) == (other.grad.shape, other.grad.dtype, False)
        for touch in (torch.norm, lambda g: g + 1, copy.deepcopy):
            assert torch.equal(touch(held), touch(other.grad))
        assert twins.rt.scheduler.segments["trainer.gradients"].residency is Residency.OFFLOADED
        for model, _ in twins.both:
            first, second, third = list(model.parameters())[:3]
            first.grad.mul_(2)
            second.grad.data = torch.ones_like(second)
            third.grad.zero_()
    assert parameter.grad is held
    twins.assert_same()


def test_gradients_that_a_view_refers_to_stay_on_the_device_and_all_are_the_same_objects(twins):
    with twins.rt.train():
        for pair in twins.both:
            backward(*pair)
    first, second = list(twins.rt.model.parameters())[:2]
    held, rows = first.grad, second.grad.view(-1)[:5]
    expected = held.clone()
    with twins.rt.rollout():
        assert first.grad is held
        assert torch.equal(held, expected)
        assert torch.equal(rows, second.grad.view(-1)[:5])
        assert twins.rt.scheduler.segments["trainer.gradients"].device_bytes == 0
        assert twins.rt.scheduler.segments["trainer.kept"].device_bytes == second.grad.nbytes
        assert "gradients" in twins.rt.report().facts["kept"]
    assert first.grad is held
    twins.assert_same()


def test_a_backward_pass_while_idle_adds_to_gradients_that_had_no_room_to_come_back():
    parameters = sum(p.numel() * 4 for p in Twins().rt.model.parameters())
    twins = Twins(device_limit_bytes=MIB + int(1.5 * parameters))
    rt = twins.rt
    for pair in twins.both:
        backward(*pair, 1)
    rt.generate([[1, 2]], max_tokens=2)
    for pair in twins.both:
        backward(*pair, 2)
    twins.assert_same()
    rt.close()


def test_gradients_that_have_no_room_at_the_end_of_a_rollout_are_clipped_where_they_are(monkeypatch):
    parameters = sum(p.numel() * 4 for p in Twins().rt.model.parameters())
    twins = Twins(device_limit_bytes=MIB + int(1.5 * parameters))
    rt = twins.rt
    for pair in twins.both:
        backward(*pair)

    def full(segment):
        raise colo.BudgetError("the device is full", needed_bytes=1, free_bytes=0)

    with monkeypatch.context() as patch:
        patch.setattr(ParameterGradients, "_arrive", full)
        rt.generate([[1, 2]], max_tokens=1)
    assert rt.scheduler.segments["trainer.gradients"].residency is Residency.OFFLOADED
    assert rt.phase is colo.Phase.IDLE
    for pair in twins.both:
        clip(*pair)
    assert rt.phase is colo.Phase.IDLE
    for pair in twins.both:
        backward(*pair)
    twins.assert_same()
    rt.close()


# ---- of a small model, with other optimizers -------------------------------------------------------------------------


def test_gradients_of_a_skipped_step_are_zeroed_for_good_after_a_rollout():
    rt = launch(config=colo.RuntimeConfig(kv_cache_bytes=MIB, offload="always"))
    ids = torch.tensor([[1, 2, 3]])
    with rt.train():
        (rt.model(input_ids=ids, labels=ids).loss * float("nan")).backward()
    with rt.rollout():
        assert segment(rt, "trainer.gradients").residency is Residency.OFFLOADED
    assert all(p.grad.isnan().any() for p in rt.model.parameters())
    rt.optimizer.zero_grad()
    with rt.train():
        train_step(rt)
    assert all(p.isfinite().all() for p in rt.model.parameters())
    rt.close()


def test_gradients_are_kept_as_without_colo_until_the_loop_drops_them(rt):
    ids = torch.tensor([[1, 2, 3]])
    with rt.train():
        rt.model(input_ids=ids, labels=ids).loss.backward()
    kept = [p.grad.clone() for p in rt.model.parameters()]
    with rt.rollout():
        rt.generate([[1]], max_tokens=1)
    with rt.train():
        assert all(torch.equal(a, p.grad) for a, p in zip(kept, rt.model.parameters(), strict=True))
        rt.optimizer.step()
    assert all(torch.equal(a, p.grad) for a, p in zip(kept, rt.model.parameters(), strict=True))


def test_gradients_that_came_after_the_last_step_are_kept(rt):
    ids = torch.tensor([[1, 2, 3]])
    with rt.train():
        train_step(rt)
        rt.model(input_ids=ids, labels=ids).loss.backward()
        kept = [p.grad.clone() for p in rt.model.parameters()]
    assert all(torch.equal(a, p.grad) for a, p in zip(kept, rt.model.parameters(), strict=True))


def test_unfinished_gradients_leave_a_full_device_and_the_step_sees_them():
    model_bytes = sum(p.numel() * 4 for p in AutoModelForCausalLM.from_config(qwen3()).parameters())
    config = colo.RuntimeConfig(kv_cache_bytes=3 * model_bytes, device_limit_bytes=int(4.2 * model_bytes))
    rt, twin = launch(config=config), AutoModelForCausalLM.from_config(qwen3())
    twin.load_state_dict({name: p.detach().clone() for name, p in rt.model.state_dict().items()})
    optimizer = adamw(twin.parameters())
    first, second = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])
    with rt.train():
        rt.model(input_ids=first, labels=first).loss.backward()
    with rt.rollout():
        assert segment(rt, "trainer.gradients").device_bytes == 0
    with rt.train():
        rt.model(input_ids=second, labels=second).loss.backward()
        rt.optimizer.step()
    for ids in (first, second):
        twin(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    for mine, other in zip(rt.model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)
    rt.close()


def parked_gradients():
    """A runtime whose gradients of one block were parked by a rollout, its plain twin, and a batch for each block."""
    rt = launch(optimizer=lambda ps: torch.optim.SGD(ps, lr=1.0), config=ALWAYS)
    twin = AutoModelForCausalLM.from_config(qwen3())
    twin.load_state_dict({name: p.detach().clone() for name, p in rt.model.state_dict().items()})
    first, second = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5, 6]])
    with rt.train():
        rt.model(input_ids=first, labels=first).loss.backward()
    with rt.rollout():
        assert segment(rt, "trainer.gradients").residency is Residency.OFFLOADED
    return rt, twin, first, second


def test_zero_grad_clears_gradients_that_a_rollout_had_parked():
    rt, twin, _, second = parked_gradients()
    with rt.train():
        rt.optimizer.zero_grad()
        rt.model(input_ids=second, labels=second).loss.backward()
        rt.optimizer.step()
    twin(input_ids=second, labels=second).loss.backward()
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert_same_weights(rt.model, twin)
    rt.close()


def test_clipping_sees_gradients_that_a_rollout_had_parked():
    rt, twin, first, second = parked_gradients()
    with rt.train():
        rt.model(input_ids=second, labels=second).loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(rt.model.parameters(), 0.1)
        rt.optimizer.step()
    for ids in (first, second):
        twin(input_ids=ids, labels=ids).loss.backward()
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    assert torch.allclose(norm, expected)
    assert_same_weights(rt.model, twin)
    rt.close()


# ---- anything a loop may do ---------------------------------------------------------------------------------------

OPERATIONS = [step, zero, zero_in_place, zero_model, assign, drop_one, clip, halve]
WITHIN_A_ROLLOUT = [zero, zero_in_place, zero_model, assign, drop_one, clip, halve]

walks = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.lists(st.sampled_from([backward, *OPERATIONS]), max_size=5)),
        st.tuples(st.just("rollout"), st.lists(st.sampled_from(WITHIN_A_ROLLOUT), max_size=2)),
        st.tuples(st.just("idle"), st.lists(st.sampled_from([backward, *OPERATIONS]), max_size=3)),
    ),
    max_size=6,
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(kind=st.sampled_from(sorted(OPTIMIZERS)), walk=walks)
def test_whatever_a_loop_does_is_as_without_colo(kind, walk):
    torch.manual_seed(0)
    twins = Twins(kind)
    for number, (where, operations) in enumerate(walk):
        if where != "idle":
            twins.rt.enter(colo.Phase(where))
        if where == "rollout":
            twins.rt.generate([[1, 2]], max_tokens=1)
        for operation in operations:
            for pair in twins.both:
                operation(*pair, number) if operation is backward else operation(*pair)
        twins.rt.enter(None)
        twins.assert_same()
    twins.rt.close()
    twins.assert_same()
