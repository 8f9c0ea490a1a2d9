import pickle
from copy import deepcopy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torchao.optim import AdamW8bit
from transformers import Adafactor

from colo.errors import Unsupported
from colo.memory.offload import Mover
from colo.phases.phase import Residency
from colo.trainer.master_weights import MasterWeights
from colo.trainer.optimizers import register_separable
from colo.trainer.state import TrainerState
from colo.trainer.streamed import StreamedState
from colo.units import MIB


def parameters(dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(17, 5), (64,), (3, 3, 3), ()]
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def set_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


both_kinds = pytest.mark.parametrize("remainders", [False, True], ids=["whole", "remainders"])


def test_small_updates_add_up_where_bf16_swallows_them():
    plain, mastered = ([torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))] for _ in range(2))
    sgd = torch.optim.SGD(plain, lr=1e-4)
    optimizer = MasterWeights(lambda params: torch.optim.SGD(params, lr=1e-4))(mastered)
    for _ in range(100):
        for params, opt in ((plain, sgd), (mastered, optimizer)):
            params[0].grad = torch.ones_like(params[0])
            opt.step()
    assert plain[0].eq(1).all(), "every update of 1e-4 is under |w|/256"
    assert torch.allclose(mastered[0].float(), torch.tensor(0.99), atol=2**-9)


@both_kinds
@pytest.mark.parametrize("bucket_bytes", [None, 1, 300, 1 << 20])
def test_it_is_the_inner_optimizer_on_fp32_copies_rounded_after_each_step(bucket_bytes, remainders):
    params = parameters()
    copies = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer = MasterWeights(adamw, bucket_bytes=bucket_bytes, remainders=remainders)(params)
    reference = adamw(copies)
    for step in range(5):
        set_gradients(params, step)
        for p, copy in zip(params, copies, strict=True):
            copy.grad = p.grad.float()
        optimizer.step()
        reference.step()
        for p, copy in zip(params, copies, strict=True):
            assert torch.equal(p, copy.to(torch.bfloat16))
            assert torch.equal(optimizer.master_of(p), copy)
            assert torch.equal(optimizer.state[p]["exp_avg"], reference.state[copy]["exp_avg"])


def test_it_reports_the_fraction_of_elements_that_changed():
    params = [torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))]
    optimizer = MasterWeights(lambda ps: torch.optim.SGD(ps, lr=1.0))(params)
    assert optimizer.changed_fraction is None
    params[0].grad = torch.tensor([1.0, 0.0, 1e-4, 0.5], dtype=torch.bfloat16)
    optimizer.step()
    assert optimizer.changed_fraction == 0.5


def test_wide_parameters_have_no_master_and_step_once():
    wide = torch.nn.Parameter(torch.ones(3))
    narrow = [torch.nn.Parameter(torch.ones(100, dtype=torch.bfloat16)) for _ in range(3)]
    optimizer = MasterWeights(lambda ps: torch.optim.SGD(ps, lr=0.5), bucket_bytes=100)([wide, *narrow])
    for p in [wide, *narrow]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert wide.eq(0.5).all()
    assert all(p.eq(0.5).all() for p in narrow)
    assert wide.grad is not None
    assert "master_weight" not in optimizer.state[wide]


def test_parameters_without_a_gradient_are_left_alone():
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = MasterWeights(adamw)(params)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert not torch.equal(before[0], params[0])
    assert torch.equal(before[1], params[1])


def test_schedulers_and_groups_reach_the_inner_optimizer():
    a, b = parameters()[:2]
    optimizer = MasterWeights(lambda groups: torch.optim.SGD(groups, lr=1.0))([{"params": [a]}])
    optimizer.add_param_group({"params": [b], "lr": 0.0})
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    before = [a.detach().clone(), b.detach().clone()]
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    optimizer.step()
    scheduler.step()
    assert optimizer.inner.param_groups[0]["lr"] == 1.0
    assert torch.equal(b, before[1])
    optimizer.step()
    assert optimizer.inner.param_groups[0]["lr"] == 0.5
    assert torch.allclose(optimizer.master_of(a), before[0].float() - 1.5)


class WarmsUp(torch.optim.SGD):
    """Counts steps in its groups, and learns faster with each up to the tenth."""

    def __init__(self, params):
        super().__init__(params, lr=1e-2)
        for group in self.param_groups:
            group["count"] = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            group["lr"] = 1e-2 * min(1, group["count"] / 10)
        super().step(closure)


def test_what_the_inner_optimizer_keeps_in_its_groups_stays_and_is_saved():
    params = parameters()
    copies = [torch.nn.Parameter(p.detach().float()) for p in params]
    mastered, plain = MasterWeights(WarmsUp, bucket_bytes=None)(params), WarmsUp(copies)
    for seed in range(5):
        for each in (params, copies):
            set_gradients(each, seed)
        for p, copy in zip(params, copies, strict=True):
            copy.grad = p.grad.float()
        mastered.step()
        plain.step()
    assert all(torch.equal(mastered.master_of(p), copy) for p, copy in zip(params, copies, strict=True))
    saved = mastered.state_dict()
    assert [group["count"] for group in saved["param_groups"]] == [5]
    again = MasterWeights(WarmsUp, bucket_bytes=None)(parameters())
    again.load_state_dict(saved)
    assert again.inner.param_groups[0]["count"] == 5


def test_what_is_written_to_the_groups_of_either_optimizer_holds():
    params = parameters()
    optimizer = MasterWeights(WarmsUp, bucket_bytes=None)(params)
    (outer,), (inner,) = optimizer.param_groups, optimizer.inner.param_groups
    inner["mode"], outer["momentum"] = "train", 0.5
    for mode, momentum in (("train", 0.5), ("eval", 0.25), ("eval", 0.25)):
        inner["mode"] = mode
        if momentum != outer["momentum"]:
            outer["momentum"] = momentum
        set_gradients(params, 0)
        optimizer.step()
        assert (inner["mode"], outer["mode"], inner["momentum"], outer["momentum"]) == (mode, mode, momentum, momentum)
    assert inner["count"] == outer["count"] == 3


@pytest.mark.parametrize(("of_saved", "of_resumed"), [(False, False), (True, True), (False, True), (True, False)])
@pytest.mark.parametrize("inner", [adamw, lambda ps: Adafactor(ps, lr=1e-3, relative_step=False)])
def test_checkpoints_keep_fp32_state_and_resume_bit_for_bit(inner, of_saved, of_resumed):
    params, resumed = parameters(), parameters(seed=1)
    optimizer = MasterWeights(inner, remainders=of_saved)(params)
    other = MasterWeights(inner, remainders=of_resumed)(resumed)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    for p, q in zip(params, resumed, strict=True):
        q.data.copy_(p.data)
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    for q in resumed:
        assert {key: value.dtype for key, value in other.state[q].items() if key.startswith("master")} == (
            {"master_remainder": torch.int16, "master_digests": torch.int64}
            if of_resumed
            else {"master_weight": torch.float32}
        )
    for ps, opt in ((params, optimizer), (resumed, other)):
        set_gradients(ps, 5)
        opt.step()
    for p, q in zip(params, resumed, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.master_of(p), other.master_of(q))


def test_a_checkpoint_without_masters_is_refused_before_anything_is_lost():
    params = parameters()
    optimizer, plain = MasterWeights(adamw)(params), adamw(parameters())
    set_gradients(plain.param_groups[0]["params"], 0)
    plain.step()
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match="without master weights; begin anew from the weights of that .* float32"):
        optimizer.load_state_dict(plain.state_dict())
    assert before["state"].keys() == optimizer.state_dict()["state"].keys()


def test_masters_of_a_checkpoint_are_refused_where_parameters_have_none_before_anything_is_lost():
    params, wide = parameters(), parameters(torch.float32)
    optimizer, other = MasterWeights(adamw)(params), MasterWeights(adamw)(wide)
    for ps, opt in ((params, optimizer), (wide, other)):
        set_gradients(ps, 0)
        opt.step()
    before = deepcopy(other.state_dict()["state"])
    with pytest.raises(
        ValueError, match=r"4 parameters, number 0 for one, has masters .* torch\.float32, which has none"
    ):
        other.load_state_dict(optimizer.state_dict())
    after = other.state_dict()["state"]
    assert all(torch.equal(after[i][name], value) for i, state in before.items() for name, value in state.items())


@both_kinds
def test_a_checkpoint_of_no_step_makes_every_weight_its_master(remainders):
    params = parameters()
    optimizer = MasterWeights(lambda ps: torch.optim.AdamW(ps, lr=1e-5), remainders=remainders)(params)
    empty = MasterWeights(adamw, remainders=True)(parameters()).state_dict()
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    assert not all(torch.equal(optimizer.master_of(p), p.float()) for p in params)
    optimizer.load_state_dict(empty)
    assert all(torch.equal(optimizer.master_of(p), p.float()) for p in params)
    assert not any("exp_avg" in optimizer.state[p] for p in params)


def test_state_stays_fp32_whatever_the_default_dtype_is():
    params = parameters()
    optimizer = MasterWeights(adamw)(params)
    set_gradients(params, 0)
    optimizer.step()
    torch.set_default_dtype(torch.bfloat16)
    try:
        other = MasterWeights(adamw)(parameters())
        other.load_state_dict(optimizer.state_dict())
    finally:
        torch.set_default_dtype(torch.float32)
    loaded = other.state_dict()["state"]
    for i, state in optimizer.state_dict()["state"].items():
        assert torch.equal(loaded[i]["exp_avg"], state["exp_avg"])


def test_named_parameters_keep_their_names():
    net = torch.nn.Linear(3, 2).bfloat16()
    for given in (net.named_parameters(), [{"params": net.named_parameters()}]):
        optimizer = MasterWeights(adamw)(given)
        assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
        optimizer.add_param_group({"params": [("more", torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)))]})
        assert optimizer.inner.param_groups[1]["param_names"] == ["more"]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")  # torch's own
def test_a_parameter_that_is_listed_twice_is_refused_before_anything_changes():
    more, (first, *_) = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), parameters()
    for given in ([first, first], [{"params": [first, first]}]):
        with pytest.raises(ValueError, match=r"is twice in a group of the optimizer, and has one master: list it once"):
            MasterWeights(adamw)(given)
    optimizer = MasterWeights(adamw)([first])
    with pytest.raises(ValueError, match=r"of shape \(2,\) is twice in a group"):
        optimizer.add_param_group({"params": [more, more]})
    optimizer.add_param_group({"params": [more]})
    assert [len(group["params"]) for group in optimizer.inner.param_groups] == [1, 1]


@pytest.mark.parametrize("kind", [set, frozenset])
def test_a_set_of_parameters_is_refused_as_torch_does(kind):
    given = kind(parameters())
    for groups in (given, [{"params": given}]):
        with pytest.raises(TypeError, match="a set of parameters, whose order is another in each run: pass a list"):
            MasterWeights(adamw)(groups)
    optimizer = MasterWeights(adamw)(parameters())
    with pytest.raises(TypeError, match="a set of parameters"):
        optimizer.add_param_group({"params": given})
    with pytest.raises(TypeError, match="must be a dict"):
        optimizer.add_param_group(list(given))
    assert len(optimizer.param_groups) == len(optimizer.inner.param_groups) == 1


@both_kinds
@pytest.mark.parametrize("copied", [deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"])
def test_a_copy_goes_on_as_the_optimizer_does_and_apart_from_it(copied, remainders):
    params = parameters()
    optimizer = MasterWeights(adamw, remainders=remainders)(params)
    set_gradients(params, 0)
    optimizer.step()
    others, other = copied((params, optimizer))
    for ps, opt in ((params, optimizer), (others, other)):
        set_gradients(ps, 1)
        opt.step()
    assert all(torch.equal(p, q) and p is not q for p, q in zip(params, others, strict=True))
    assert all(torch.equal(optimizer.master_of(p), other.master_of(q)) for p, q in zip(params, others, strict=True))
    saved = deepcopy(other.state_dict())
    set_gradients(others, 2)
    other.step()
    other.load_state_dict(saved)
    assert other.state[others[0]]["step"] == optimizer.state[params[0]]["step"] == 2


@both_kinds
@pytest.mark.parametrize("is_cleared", [True, False])
def test_state_that_is_replaced_or_cleared_is_what_the_next_step_finds(is_cleared, remainders):
    params, copies = parameters(), parameters()
    copies = [torch.nn.Parameter(p.detach().float()) for p in copies]
    optimizer, plain = MasterWeights(adamw, remainders=remainders)(params), adamw(copies)

    def step(number):
        set_gradients(params, number)
        for p, q in zip(params, copies, strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        plain.step()

    step(0)
    for p, q in zip(params, copies, strict=True):
        if is_cleared:
            optimizer.state.pop(p)
            plain.state.pop(q)
            q.data = p.detach().float()  # with the rest of the state the master is gone
        else:
            optimizer.state[p]["exp_avg"] = torch.zeros(p.shape)
            plain.state[q]["exp_avg"] = torch.zeros(p.shape)
    step(1)
    for p, q in zip(params, copies, strict=True):
        assert torch.equal(optimizer.master_of(p), q.detach())
        assert all(torch.equal(optimizer.state[p][name], value) for name, value in plain.state[q].items())


def test_a_master_in_two_bytes_has_no_memory_between_steps():
    (parameter,) = parameters = [torch.nn.Parameter(torch.randn(64, 32).bfloat16())]
    optimizer = MasterWeights(adamw)(parameters)
    (inner,) = optimizer.inner.param_groups[0]["params"]
    assert optimizer.expected_master_bytes(parameter) == 2 * 64 * 32 + 256
    for step in range(2):
        assert inner.untyped_storage().nbytes() == 4 and inner.shape == parameter.shape
        set_gradients(parameters, step)
        optimizer.step()
    assert optimizer.expected_master_bytes(parameter) == 0
    kept = [v.nbytes for k, v in optimizer.state[parameter].items() if k.startswith("master")]
    assert sum(kept) == 2 * 64 * 32 + 8 * 2


class LooksAtAll(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.first = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        return super().step(closure)


def test_an_inner_optimizer_that_colo_does_not_know_gets_whole_masters_from_the_start():
    params = parameters()
    optimizer = MasterWeights(LooksAtAll)(params)
    assert all(torch.equal(first, p.float()) for first, p in zip(optimizer.inner.first, params, strict=True))
    assert all(optimizer.state[p].keys() == {"master_weight"} for p in params)


def test_other_dtypes_have_whole_masters():
    half = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
    assert MasterWeights(adamw)([half]).state[half].keys() == {"master_weight"}


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="bucket_bytes must be positive or None, not 0"):
        MasterWeights(adamw, bucket_bytes=0)(parameters())
    layer = torch.nn.Linear(2, 2)
    for given, words in ((layer, "not a Linear"), ([5], "not 5"), ([{"params": [layer]}], "not Linear")):
        with pytest.raises(TypeError, match=f"the optimizer takes parameters, such as model.parameters.., {words}"):
            MasterWeights(lambda params: torch.optim.SGD(params, lr=1.0))(given)
    with pytest.raises(ValueError, match="empty parameter list"):
        MasterWeights(adamw)([])


@both_kinds
@pytest.mark.parametrize("bucket_bytes", [None, 64])
def test_what_is_loaded_into_a_parameter_is_what_the_next_step_starts_from(bucket_bytes, remainders):
    parameters = [torch.nn.Parameter(torch.randn(8, 1024).bfloat16()) for _ in range(2)]
    make = MasterWeights(lambda ps: torch.optim.SGD(ps, lr=1e-6), bucket_bytes=bucket_bytes, remainders=remainders)
    optimizer = make(parameters)

    def step():
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return [optimizer.master_of(parameter).clone() for parameter in parameters]

    exact = step()
    loaded = 2 * parameters[0][3].detach()
    with torch.no_grad():
        parameters[0][3] = loaded
    masters = step()
    assert torch.equal(parameters[0][3], loaded), "a step of 1e-6 rounds away"
    assert torch.equal(masters[0][3], loaded.float() - 1e-6)
    others = [row for row in range(8) if row != 3]
    assert torch.equal(masters[0][others], exact[0][others] - 1e-6), "no bit of the others' masters is lost"
    assert torch.equal(masters[1], exact[1] - 1e-6)


def test_a_write_that_torch_does_not_count_is_found_too():
    (parameter,) = parameters = [torch.nn.Parameter(torch.randn(8, 8).bfloat16())]
    optimizer = MasterWeights(lambda ps: torch.optim.SGD(ps, lr=1e-6))(parameters)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parameter.data[3, 2:4] = loaded = torch.randn(2).bfloat16()
    assert torch.equal(optimizer.master_of(parameter)[3, 2:4], loaded.float())


@register_separable
class FailsAt(torch.optim.AdamW):
    """Raises in its step number `fails_at`, counted from 1."""

    fails_at = 0

    def step(self, closure=None):
        self.fails_at -= 1
        if self.fails_at == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().step(closure)


def mixed_parameters():
    return [*parameters(), torch.nn.Parameter(torch.ones(40)), *parameters(seed=1), torch.nn.Parameter(torch.ones(9))]


@both_kinds
@pytest.mark.parametrize(("bucket_bytes", "fails_at"), [(None, 1), (1, 1), (1, 2), (1, 4), (1, 8), (300, 2)])
def test_a_step_that_failed_and_is_repeated_is_one_step(bucket_bytes, fails_at, remainders):
    params, others = mixed_parameters(), mixed_parameters()
    kind = {"bucket_bytes": bucket_bytes, "remainders": remainders}
    optimizer = MasterWeights(lambda ps: FailsAt(ps, lr=1e-2), **kind)(params)
    reference = MasterWeights(lambda ps: torch.optim.AdamW(ps, lr=1e-2), **kind)(others)
    for seed in range(2):
        set_gradients(params, seed)
        set_gradients(others, seed)
        gradients = [p.grad for p in params]
        optimizer.inner.fails_at = fails_at
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        assert all(p.grad is gradient for p, gradient in zip(params, gradients, strict=True))
        assert all(optimizer.master_of(p).grad is None for p in params if p in optimizer.masters)
        optimizer.step()
        reference.step()
    assert_equal(optimizer, params, reference, others)


def test_a_step_that_failed_is_one_step_although_its_gradients_were_parked_before_it_was_repeated():
    plain, parked = mixed_parameters(), mixed_parameters()
    optimizers = [MasterWeights(lambda ps: FailsAt(ps, lr=1e-2), bucket_bytes=1)(ps) for ps in (plain, parked)]
    state = TrainerState(optimizers[1], Mover(torch.device("cpu")))
    for turn in range(4):
        set_gradients(plain, turn)
        set_gradients(parked, turn)
        for optimizer in optimizers:
            optimizer.inner.fails_at = 1 + turn
            with pytest.raises(torch.OutOfMemoryError):
                optimizer.step()
        state.gradients.begin(Residency.OFFLOADED).wait()
        assert state.gradients.device_bytes == 0
        if turn == 3:  # gradients that are added to are a new step's, parked or not
            for p in (*plain, *parked):
                p.grad = p.grad + 1
        state.gradients.begin(Residency.RESIDENT).wait()
        for optimizer in optimizers:
            optimizer.step()
        assert all(torch.equal(p, other) for p, other in zip(plain, parked, strict=True))
    state.close()


def test_a_step_that_failed_and_was_given_up_takes_nothing_from_the_next():
    params, others = mixed_parameters(), mixed_parameters()
    optimizer = MasterWeights(lambda ps: FailsAt(ps, lr=1e-2), bucket_bytes=1)(params)
    reference = MasterWeights(lambda ps: torch.optim.AdamW(ps, lr=1e-2), bucket_bytes=1)(others)
    set_gradients(params, 0)
    optimizer.inner.fails_at = 2
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()
    set_gradients(others[:1], 0)
    reference.step()
    with torch.no_grad():
        for p in params:
            p.grad.mul_(2)  # the same tensor with other values, as after zero_grad(set_to_none=False)
    for p, other in zip(params, others, strict=True):
        other.grad = p.grad.clone()
    optimizer.step()
    reference.step()
    assert_equal(optimizer, params, reference, others)


@both_kinds
def test_weights_that_were_not_rounded_are_when_the_step_is_repeated(monkeypatch, remainders):
    params, others = parameters(), parameters()
    optimizer, reference = (MasterWeights(adamw, remainders=remainders)(each) for each in (params, others))
    set_gradients(params, 0)
    set_gradients(others, 0)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(optimizer, "_round", lambda master: raise_out_of_memory())
        optimizer.step()
    optimizer.step()
    reference.step()
    assert_equal(optimizer, params, reference, others)


def raise_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory")


def assert_equal(optimizer, params, reference, others):
    for p, other in zip(params, others, strict=True):
        assert torch.equal(p, other)
        assert optimizer.state[p].keys() == reference.state[other].keys()
        assert all(torch.equal(value, reference.state[other][key]) for key, value in optimizer.state[p].items())


def test_an_optimizer_that_is_made_already_has_no_masters():
    with pytest.raises(TypeError, match="such as lambda params: AdamW.* not an instance of SGD"):
        MasterWeights(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))


def test_what_makes_no_optimizer_or_one_that_asks_for_a_closure_is_refused():
    for made in (None, "adamw"):
        with pytest.raises(TypeError, match=f"returned a {type(made).__name__} in place of an optimizer"):
            MasterWeights(lambda params, made=made: made)(parameters())
    with pytest.raises(Unsupported, match="LBFGS.step asks for a closure"):
        MasterWeights(torch.optim.LBFGS)(parameters())


class Trained:
    """A module in bf16, sharded or not, and its optimizer."""

    def __init__(self, mesh, is_sharded, remainders):
        torch.manual_seed(0)
        self.module = torch.nn.Linear(8, 4).bfloat16()
        if is_sharded:
            fully_shard(self.module, mesh=mesh)
        self.optimizer = MasterWeights(adamw, remainders=remainders)(self.module.parameters())

    def step(self, number):
        outputs = self.module(torch.full((2, 8), number + 1, dtype=torch.bfloat16))
        outputs.square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def weights(self):
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in self.module.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.weights, other.weights, strict=True))


sharded_or_not = pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])


@sharded_or_not
@both_kinds
def test_a_state_dict_before_the_first_step_changes_nothing(is_sharded, remainders, mesh):
    saved, twin = (Trained(mesh, is_sharded, remainders) for _ in range(2))
    found = saved.optimizer.state_dict()["state"]
    # where masters are state already, a checkpoint's loader asks for these keys alone
    assert bool(found) is (is_sharded or not remainders)
    assert all(entry["step"] == 0 and not entry["exp_avg"].any() for entry in found.values())
    for number in range(3):
        saved.step(number)
        twin.step(number)
    assert same(saved, twin)
    assert all(entry["step"] == 3 for entry in saved.optimizer.state_dict()["state"].values())


def test_a_state_dict_before_the_first_step_is_not_counted_in_the_groups():
    class Counting(torch.optim.Adam):
        def step(self, closure=None):
            self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
            return super().step(closure)

    optimizer = MasterWeights(Counting, remainders=False)(params := parameters())
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (17, 5)
    set_gradients(params, 0)
    optimizer.step()
    assert optimizer.param_groups[0]["count"] == 1


@sharded_or_not
@both_kinds
def test_a_distributed_checkpoint_is_resumed_with_all_of_its_state(is_sharded, remainders, mesh, tmp_path):
    saved = Trained(mesh, is_sharded, remainders)
    for number in range(3):
        saved.step(number)
    folder, resumed = tmp_path / "checkpoint", Trained(mesh, is_sharded, remainders)
    weights, state = get_state_dict(saved.module, saved.optimizer)
    dcp.save({"weights": weights, "state": state}, checkpoint_id=folder)
    weights, state = get_state_dict(resumed.module, resumed.optimizer)
    dcp.load(found := {"weights": weights, "state": state}, checkpoint_id=folder)
    set_state_dict(
        resumed.module,
        resumed.optimizer,
        model_state_dict=found["weights"],
        optim_state_dict=found["state"],
    )
    assert same(saved, resumed)
    for each in (saved, resumed):
        each.step(3)
    assert same(saved, resumed)


def test_an_optimizer_that_keeps_its_learning_rate_in_a_tensor_follows_a_schedule():
    params, copies = parameters(), [torch.nn.Parameter(p.detach().float()) for p in parameters()]
    optimizer, reference = MasterWeights(AdamW8bit)(params), AdamW8bit(copies)
    schedules = [LambdaLR(each, lambda step: 0.5**step) for each in (optimizer, reference)]
    for step in range(3):
        set_gradients(params, step)
        for p, copy in zip(params, copies, strict=True):
            copy.grad = p.grad.float()
        optimizer.step()
        reference.step()
        for schedule in schedules:
            schedule.step()
        for p, copy in zip(params, copies, strict=True):
            assert torch.equal(p, copy.to(torch.bfloat16))


@both_kinds
def test_streamed_masters_of_sharded_weights_may_stay_on_the_device(remainders, mesh, device):
    twin, ours = (Trained(mesh, True, remainders) for _ in range(2))
    mover = Mover(device, host_limit_bytes=4 * MIB)
    state = StreamedState(ours.optimizer, mover, region_bytes=4096, resident_bytes=MIB)
    for number in range(4):
        for trained in (twin, ours):
            trained.step(number)
        assert same(ours, twin) and not state.kept.items
        assert bool(state.resident_bytes) is (number < 2)
        if number == 1:
            state.window.resident.begin(Residency.OFFLOADED)
    state.close()
    mover.close()
