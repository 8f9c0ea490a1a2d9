"""State that streams through the step, through the public API."""

import copy
import gc
from functools import lru_cache

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.errors import BudgetError, PhaseError, TransferError, Unsupported
from colo.optim import MasterWeights
from colo.phases.phase import (
    ENGINE_KV_CACHE,
    ENGINE_WEIGHTS,
    TRAINER_GRADIENTS,
    TRAINER_OPTIMIZER,
    TRAINER_RESIDENT_STATE,
    Phase,
    Residency,
)
from colo.units import MIB
from colo.weights.publish import Publisher
from tests import runtimes
from tests.models import small_qwen3
from tests.runtimes import train_step

BUCKET_BYTES = 32 * 1024
KV_BYTES = MIB // 2


def masters(params):
    return MasterWeights(lambda given: torch.optim.AdamW(given, lr=1e-2, weight_decay=0.1))(params)


def launch(*, layers=4, **settings):
    torch.manual_seed(0)
    config = RuntimeConfig(**{"kv_cache_bytes": KV_BYTES, "region_bytes": BUCKET_BYTES} | settings)
    return runtimes.launch(
        small_qwen3(num_hidden_layers=layers), optimizer=masters, dtype=torch.bfloat16, config=config
    )


def smallest_limit(kv_bytes=KV_BYTES):
    """Weights, gradients and the window, and beside the weights the KV cache."""
    with launch(optimizer="streamed") as rt:
        weights_bytes = rt.scheduler.segments[ENGINE_WEIGHTS].size_bytes
        window_bytes = rt.scheduler.segments[TRAINER_OPTIMIZER].size_bytes
        assert window_bytes < rt.scheduler.segments[TRAINER_OPTIMIZER].total_bytes / 2
        return max(2 * weights_bytes + window_bytes, weights_bytes + kv_bytes)


def train(rt, steps, first=0):
    """Weights after `steps` steps with rollouts between."""
    for step in range(first, first + steps):
        with rt.rollout():
            rt.generate([[1, 2, 3]], max_tokens=2)
        with rt.train():
            train_step(rt, [[(7 * step + i) % 50 for i in range(6)]])
    return {name: p.detach().clone() for name, p in rt.model.named_parameters()}


def test_on_a_device_that_only_streaming_fits_a_hundred_steps_make_the_weights_of_resident_state():
    limit_bytes = smallest_limit()
    with launch(optimizer="resident") as rt:
        expected = train(rt, 100)
    with pytest.raises(BudgetError, match="phase train"):
        launch(optimizer="resident", device_limit_bytes=limit_bytes)
    with launch(device_limit_bytes=limit_bytes) as rt:
        assert rt.report().facts["optimizer"].startswith("streamed: with the whole of it on the device, ")
        assert all(torch.equal(p, expected[name]) for name, p in train(rt, 100).items())
        held = {phase: rt.trace.peak_bytes(phase) for phase in (Phase.ROLLOUT, Phase.TRAIN)}
        assert max(held.values()) <= limit_bytes
        state = rt.scheduler.segments[TRAINER_OPTIMIZER]
        assert state.residency is Residency.OFFLOADED and state.device_bytes == 0
        assert not rt.kept_state
    assert expected


@pytest.mark.parametrize(("share", "place"), [(1.05, "streamed: with the whole of it on"), (1.3, "resident: it fits")])
def test_state_that_leaves_no_room_for_a_pass_is_streamed(monkeypatch, share, place):
    with launch(optimizer="resident") as rt:
        held = [s for s in rt.scheduler.segments.values() if s.residency is not Residency.SHARED]
        whole_bytes = sum(segment.size_bytes for segment in held if segment.name != ENGINE_KV_CACHE)
    monkeypatch.setattr("colo.assembly.share.capacity", lambda *_, **__: int(share * whole_bytes))
    with launch() as rt:
        assert rt.report().facts["optimizer"].startswith(place)


def roomy_limit():
    """Room for half of the state beside either phase."""
    with launch(optimizer="streamed") as rt:
        return smallest_limit() + rt.scheduler.segments[TRAINER_OPTIMIZER].total_bytes // 2


def test_as_much_of_streamed_state_stays_as_both_phases_leave_room_for():
    limit_bytes = roomy_limit()
    with launch(optimizer="resident") as rt:
        expected = train(rt, 20)
    with launch(device_limit_bytes=limit_bytes) as rt:
        assert rt.report().facts["optimizer"].startswith("streamed: with the whole of it on the device, ")
        assert all(torch.equal(p, expected[name]) for name, p in train(rt, 20).items())
        window, stays = (rt.scheduler.segments[name] for name in (TRAINER_OPTIMIZER, TRAINER_RESIDENT_STATE))
        assert 0.4 < stays.device_bytes / window.total_bytes < 0.7 and not stays.host_bytes
        assert window.host_bytes < 0.7 * window.total_bytes, "what stays takes no host memory"
        for phase in (Phase.ROLLOUT, Phase.TRAIN):
            assert 0.85 * limit_bytes < rt.trace.peak_bytes(phase) <= limit_bytes, "the room is used, and no more"
        assert not rt.kept_state and TRAINER_RESIDENT_STATE in str(rt.report())


@pytest.mark.parametrize("kv_bytes", [KV_BYTES, KV_BYTES // 8])
def test_wherever_state_may_be_streamed_a_part_of_it_may_stay(kv_bytes):
    least_bytes = smallest_limit(kv_bytes)
    for more_bytes in range(0, KV_BYTES, 20_000):
        with launch(device_limit_bytes=least_bytes + more_bytes, kv_cache_bytes=kv_bytes) as rt:
            assert rt.report().facts["optimizer"].startswith("streamed: with the whole of it on the device, ")


def test_a_host_without_room_for_all_of_the_state_has_room_for_what_does_not_stay():
    with launch(layers=48, optimizer="streamed") as rt:
        state_bytes = rt.scheduler.segments[TRAINER_OPTIMIZER].total_bytes
        weights_bytes = rt.scheduler.segments[ENGINE_WEIGHTS].size_bytes
    limits = {"device_limit_bytes": 2 * weights_bytes + state_bytes // 2, "host_limit_bytes": state_bytes * 4 // 5}
    with launch(layers=48, **limits) as rt:
        train(rt, 3)
        assert rt.scheduler.segments[TRAINER_RESIDENT_STATE].device_bytes > state_bytes // 3
    with pytest.raises(BudgetError, match="the host arena"):
        launch(layers=48, **limits, resident_state_bytes=0)


@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.ROLLOUT])
def test_state_that_stays_leaves_for_good_once_a_phase_needs_its_room(phase):
    with launch(optimizer="resident") as rt:
        expected = train(rt, 6)
    with launch(device_limit_bytes=roomy_limit()) as rt:
        train(rt, 3)
        stays = rt.scheduler.segments[TRAINER_RESIDENT_STATE]
        assert stays.device_bytes
        rt.scheduler.working_bytes[phase] = stays.device_bytes
        assert all(torch.equal(p, expected[name]) for name, p in train(rt, 3, first=3).items())
        assert (stays.size_bytes, stays.device_bytes, stays.host_bytes) == (0, 0, 0)
        window = rt.scheduler.segments[TRAINER_OPTIMIZER]
        assert window.host_bytes >= window.total_bytes
        assert rt.scheduler.ledger().host_bytes >= window.total_bytes
    assert expected


def test_how_much_state_stays_can_be_said():
    with launch(optimizer="streamed", resident_state_bytes="64KiB") as rt:
        train(rt, 2)
        assert 32 * 1024 < rt.scheduler.segments[TRAINER_RESIDENT_STATE].device_bytes <= 64 * 1024
    for none in ({"optimizer": "streamed"}, {"resident_state_bytes": 0, "device_limit_bytes": roomy_limit()}):
        with launch(**none) as rt:
            assert rt.report().facts["optimizer"].startswith("streamed: ")
            assert TRAINER_RESIDENT_STATE not in rt.scheduler.segments
    wanted = {"optimizer": "streamed", "resident_state_bytes": "1MiB"}
    with pytest.raises(BudgetError, match="with resident_state_bytes needs .*Make those, or the KV cache, smaller"):
        launch(**wanted, device_limit_bytes=smallest_limit())
    with pytest.raises(BudgetError, match="phase train ") as refused:
        launch(**wanted, device_limit_bytes="1.5MiB", kv_cache_bytes="64KiB")
    assert "A smaller resident_state_bytes makes" in "".join(refused.value.__notes__)
    for contrary in ({"offload": "always"}, {"offload": "never"}, {"optimizer": "resident"}):
        with pytest.raises(ValueError, match='resident_state_bytes keeps .*: leave out (offload="(always|never)"|opt)'):
            RuntimeConfig(resident_state_bytes=MIB, **contrary)


@pytest.mark.parametrize("settings", [{"release_gradients": True}, {}], ids=str)
def test_state_that_stays_is_saved_and_loaded_like_any(settings):
    settings = {"optimizer": "streamed", "resident_state_bytes": "64KiB"} | settings
    with launch(optimizer="resident") as rt:
        expected = train(rt, 4)
    with launch(**settings) as rt:
        train(rt, 2)
        saved = copy.deepcopy((rt.model.state_dict(), rt.optimizer.state_dict()))
    with launch(**settings) as rt:
        train(rt, 1)
        with rt.train():
            rt.model.load_state_dict(saved[0])
            rt.optimizer.load_state_dict(saved[1])
        assert all(torch.equal(p, expected[name]) for name, p in train(rt, 2, first=2).items())
        assert rt.scheduler.segments[TRAINER_RESIDENT_STATE].device_bytes


# ---- moments in bf16 -------------------------------------------------------------------------------------------------

IN_BF16 = {"moment_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("make", "ends"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), ", without moments that bfloat16 would halve"),
        (lambda p: torch.optim.RMSprop(p, centered=True), ", without moments that bfloat16 would halve"),
        (lambda p: torch.optim.Rprop(p), ", without moments that bfloat16 would halve"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ", moments in bfloat16"),
        (lambda p: torch.optim.RMSprop(p), ", moments in bfloat16"),
    ],
    ids=["SGD", "centered RMSprop", "Rprop", "SGD with momentum", "RMSprop"],
)
def test_a_report_says_where_there_are_no_moments_to_keep(make, ends):
    with runtimes.launch(small_qwen3(), optimizer=make, config=RuntimeConfig(**IN_BF16)) as rt:
        assert rt.report().facts["optimizer"].endswith(ends)
        train_step(rt)
        stored = rt.optimizer.state_dict()["state"].values()
        in_bf16 = {key for state in stored for key, t in state.items() if getattr(t, "dtype", None) is torch.bfloat16}
        assert bool(in_bf16) == (ends == ", moments in bfloat16")


@lru_cache
def trained_in_fp32():
    """Bytes of the state, and weights before and after ten steps."""
    with launch(optimizer="streamed") as rt:
        before = {name: p.detach().clone() for name, p in rt.model.named_parameters()}
        return rt.scheduler.segments[TRAINER_OPTIMIZER].total_bytes, before, train(rt, 10)


@pytest.mark.parametrize(
    "settings",
    [
        {"device_limit_bytes": "least"},
        {"device_limit_bytes": "some"},
        {},
        {"offload": "always"},
        {"optimizer": "streamed"},
        {"release_gradients": True},
        {"optimizer": "streamed", "resident_state_bytes": "64KiB"},
    ],
    ids=str,
)
def test_moments_in_bf16_take_half_and_train(settings):
    wide_bytes, before, expected = trained_in_fp32()
    limits = {"least": smallest_limit(), "some": smallest_limit() + wide_bytes // 4}
    if limit := settings.get("device_limit_bytes"):
        settings = settings | {"device_limit_bytes": limits[limit]}
    with launch(**IN_BF16, **settings) as rt:
        trained = train(rt, 10)
        why, window = rt.report().facts["optimizer"], rt.scheduler.segments[TRAINER_OPTIMIZER]
        assert why.startswith("streamed: ") and why.endswith(", moments in bfloat16")
        assert window.total_bytes == pytest.approx(0.6 * wide_bytes, rel=0.01), "6 bytes a parameter, not 10"
        stays = rt.scheduler.segments.get(TRAINER_RESIDENT_STATE)
        if limit == "some":
            assert 0 < stays.device_bytes < window.total_bytes
        if not settings:
            assert stays.device_bytes == pytest.approx(window.total_bytes, rel=0.1) and not window.host_bytes
        if limit:
            assert max(rt.trace.peak_bytes(p) for p in (Phase.ROLLOUT, Phase.TRAIN)) <= limits[limit]
        assert rt.optimizer.state_dict()["state"][0]["exp_avg"].dtype is torch.bfloat16
        moved = torch.cat([(expected[name] - p).flatten() for name, p in before.items()]).float()
        apart = torch.cat([(expected[name] - p).flatten() for name, p in trained.items()]).float()
        assert 0 < apart.norm() < 0.2 * moved.norm(), "other weights, and near them"


@pytest.mark.parametrize("settings", [{}, {"optimizer": "streamed"}, {"release_gradients": True}], ids=str)
def test_a_resumed_run_with_moments_in_bf16_makes_the_same_weights(settings):
    settings = IN_BF16 | settings
    with launch(**settings) as rt:
        train(rt, 2)
        saved = copy.deepcopy((rt.model.state_dict(), rt.optimizer.state_dict(), torch.get_rng_state()))
        expected = train(rt, 2, first=2)
    with launch(**settings) as rt:
        train(rt, 1)
        with rt.train():
            rt.model.load_state_dict(saved[0])
            rt.optimizer.load_state_dict(saved[1])
        torch.set_rng_state(saved[2])
        assert all(torch.equal(p, expected[name]) for name, p in train(rt, 2, first=2).items())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda params: torch.optim.Adafactor(params, lr=1e-2), "Adafactor is none of torch's classes that step elem"),
        (lambda params: MasterWeights(lambda p: torch.optim.Muon(p, lr=1e-2))(params), "Muon is none of torch's"),
        (torch.optim.LBFGS, "LBFGS.step asks for a closure"),
    ],
    ids=["Adafactor", "Muon", "LBFGS"],
)
def test_moments_that_a_class_keeps_itself_are_refused_before_anything_is_hooked(make, why):
    optimizer = None

    def made(params):
        nonlocal optimizer
        optimizer = make([p for p in params if p.dim() == 2])
        return optimizer

    with pytest.raises(Unsupported, match=f'moment_dtype="bfloat16" is of streamed state: {why}'):
        runtimes.launch(small_qwen3(), optimizer=made, config=RuntimeConfig(**IN_BF16, kv_cache_bytes=KV_BYTES))
    assert not optimizer._optimizer_step_pre_hooks


def refuse(_):
    raise TransferError("the engine cannot take these weights")


@pytest.mark.parametrize("make", [masters, lambda params: torch.optim.AdamW(params, lr=1e-2)])
@pytest.mark.parametrize("settings", [{}, {"optimizer": "streamed"}, {"release_gradients": True}], ids=str)
@pytest.mark.parametrize("fails", ["planning", "publishing"])
def test_a_share_that_is_refused_rounds_no_moment(make, settings, fails, monkeypatch):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_qwen3(), dtype=torch.bfloat16 if make is masters else torch.float32)
    optimizer = make(model.parameters())
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    limit = {"device_limit_bytes": MIB} if fails == "planning" else {}
    config = RuntimeConfig(**IN_BF16, **settings, **limit, kv_cache_bytes=KV_BYTES)
    if fails == "publishing":
        monkeypatch.setattr(Publisher, "publish", refuse)
    with pytest.raises(BudgetError if limit else TransferError):
        colo.share("torch", model, optimizer, config=config)
    after = optimizer.state_dict()
    for key, state in before["state"].items():
        assert state.keys() == after["state"][key].keys()
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(after["state"][key][name])), name
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def test_moments_that_are_not_streamed_are_not_rounded():
    for contrary in ({"offload": "never"}, {"optimizer": "resident"}):
        with pytest.raises(
            ValueError, match=f'moment_dtype="bfloat16" is of streamed state: .* {next(iter(contrary))}='
        ):
            RuntimeConfig(**IN_BF16, **contrary)
    with pytest.raises(ValueError, match="moment_dtype must be one of float32, bfloat16, not 'float16'"):
        RuntimeConfig(moment_dtype="float16")


def test_nothing_grows_over_a_hundred_cycles():
    with launch(optimizer="streamed", device_limit_bytes=smallest_limit()) as rt:
        train(rt, 3)

        def held():
            gc.collect()
            arena = rt.engine.mover.arena
            tensors = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
            return rt.scheduler.ledger().device_bytes, arena.pinned_bytes, arena.used_bytes, tensors

        before = held()
        train(rt, 100)
        assert all(now <= then for now, then in zip(held(), before, strict=True)), "what others left may have gone"


def test_the_window_is_there_while_the_optimizer_steps_and_not_beside_a_backward_pass():
    with launch(optimizer="streamed") as rt:
        train(rt, 2)
        state, opened = rt.scheduler.segments[TRAINER_OPTIMIZER], []
        with rt.rollout():
            rt.generate([[1, 2, 3]], max_tokens=2)
            assert state.residency is Residency.OFFLOADED
        with rt.train():
            rt.model(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
            assert state.residency is Residency.OFFLOADED and state.device_bytes == 0
            begin = state.begin
            state.begin = lambda target: (begin(target), opened.append(state.device_bytes))[0]
            rt.optimizer.step()
            rt.optimizer.zero_grad()
        assert max(opened) == state.size_bytes > 0 and state.device_bytes == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_joins_within_a_training_phase_is_stepped(dtype):
    late, twin = (torch.nn.Parameter(torch.ones(4 * BUCKET_BYTES, dtype=dtype)) for _ in range(2))
    plain = masters([twin])
    with launch(optimizer="streamed") as rt:
        train(rt, 1)
        for _ in range(2):
            with rt.train():
                if len(rt.optimizer.param_groups) == 1:
                    rt.optimizer.add_param_group({"params": [late]})
                late.float().square().sum().backward()
                train_step(rt)
            twin.float().square().sum().backward()
            plain.step()
            plain.zero_grad()
        assert torch.equal(late, twin)


def test_state_that_is_touched_within_a_rollout_is_brought_or_named():
    with launch(optimizer="streamed") as rt:
        train(rt, 1)
        parameter = next(rt.model.parameters())
        with rt.rollout():
            assert rt.optimizer.state[parameter]["exp_avg"].abs().sum() > 0
        assert rt.optimizer.master_of(parameter).dtype is torch.float32


def test_what_cannot_be_streamed_says_so():
    for setting in ({"optimizer": "streamed"}, {"release_gradients": True}):
        (name, value), config = *setting.items(), RuntimeConfig(kv_cache_bytes=KV_BYTES, **setting)
        with pytest.raises(Unsupported, match=rf"{name}={value!r}: LBFGS.step asks for a closure"):
            runtimes.launch(optimizer=torch.optim.LBFGS, config=config)
    with pytest.raises(ValueError, match='offload="never" rules out'):
        RuntimeConfig(optimizer="streamed", offload="never")
    with pytest.raises(ValueError, match="optimizer must be one of auto, resident, streamed, not 'host'"):
        RuntimeConfig(optimizer="host")


def test_where_only_streaming_would_fit_an_optimizer_that_cannot_is_told_so():
    limit_bytes = smallest_limit()
    model = small_qwen3(num_hidden_layers=4)
    with pytest.raises(BudgetError) as refused:
        colo.launch(
            model,
            dtype=torch.bfloat16,
            device="cpu",
            optimizer=lambda params: MasterWeights(torch.optim.AdamW, bucket_bytes=None)(params),
            config=RuntimeConfig(kv_cache_bytes=KV_BYTES, device_limit_bytes=limit_bytes),
        )
    assert "cannot be streamed either: MasterWeights(bucket_bytes=None)" in "".join(refused.value.__notes__)


def test_too_little_host_memory_is_said_before_anything_is_trained():
    with pytest.raises(BudgetError, match="the host arena in phase"):
        launch(optimizer="streamed", host_limit_bytes=64 * 1024)


def test_a_trainer_of_your_own_goes_on_alone_after_close():
    with launch(optimizer="streamed") as rt:
        train(rt, 2)
        optimizer, model = rt.optimizer, rt.model
    ids = torch.tensor([[1, 2, 3]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert optimizer.changed_fraction > 0


def released(rt, steps):
    """Weights after `steps` steps, and the most bytes of gradients that were there at once."""
    gradients = rt.scheduler.segments[TRAINER_GRADIENTS]
    held = []
    for p in rt.model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: held.append(gradients.device_bytes))
    return train(rt, steps), max(held)


def test_gradients_that_are_released_are_those_of_two_buckets_and_train_the_same_weights():
    with launch(optimizer="streamed") as rt:
        expected, all_bytes = released(rt, 6)
    with launch(release_gradients=True) as rt:
        planned_bytes = rt.scheduler.segments[TRAINER_GRADIENTS].size_bytes
        found, most_bytes = released(rt, 6)
        assert all(torch.equal(p, expected[name]) for name, p in found.items())
        assert most_bytes <= planned_bytes < all_bytes / 2
        assert rt.weights_version == 6 and rt.trace.metrics["changed_fraction"][-1] > 0
        assert rt.report().facts["optimizer"] == "streamed: asked for"


def test_gradients_are_released_once_between_steps_and_only_in_training():
    with launch(release_gradients=True) as rt:
        ids = torch.tensor([[1, 2, 3]])

        def backward():
            rt.model(input_ids=ids, labels=ids).loss.backward()

        backward()
        assert all(p.grad is not None for p in rt.model.parameters()), "nothing steps outside of train()"
        rt.optimizer.step()
        rt.optimizer.zero_grad()
        with rt.train():
            backward()
            assert all(p.grad is None for p in rt.model.parameters())
            with pytest.raises(PhaseError, match="the second one since optimizer.step"):
                backward()
            rt.optimizer.step()
            rt.optimizer.zero_grad()
            backward()
            rt.optimizer.step()


def interrupted_backward(rt, after):
    """A backward pass that is interrupted as it has brought so many gradients, or at its end."""
    brought = []

    def interrupt(parameter):
        brought.append(parameter)
        if len(brought) == after:
            raise KeyboardInterrupt

    hooks = [p.register_post_accumulate_grad_hook(interrupt) for p in rt.model.parameters()]
    ids = torch.tensor([[1, 2, 3, 4]])
    try:
        rt.model(input_ids=ids, labels=ids).loss.backward()
        raise KeyboardInterrupt
    finally:
        for hook in hooks:
            hook.remove()


def cut_backward(rt, after):
    with pytest.raises(KeyboardInterrupt), rt.train():
        interrupted_backward(rt, after)


@pytest.mark.parametrize("after", [1, 2, 17, 30, 46, 47, None])
def test_training_goes_on_after_a_backward_pass_that_was_interrupted_while_it_stepped(after):
    def cut(end):
        with launch(release_gradients=True) as rt:
            train(rt, 2)
            cut_backward(rt, after)
            end(rt)
            rt.optimizer.zero_grad()
            before = rt.weights_version
            weights = train(rt, 2)
            assert rt.weights_version - before >= 2
            return weights, {name: float(rt.optimizer.state[p]["step"]) for name, p in rt.model.named_parameters()}

    def step(rt):
        rt.optimizer.zero_grad()
        rt.optimizer.step()

    # the same as ending the step by hand
    (expected, steps), (found, own_steps) = cut(step), cut(lambda rt: None)
    assert all(torch.equal(p, expected[name]) for name, p in found.items()) and own_steps == steps
    assert set(steps.values()) <= {4.0, 5.0} and (after in range(47) or set(steps.values()) == {5.0})


def test_gradients_of_an_interrupted_pass_are_dropped_or_used_before_another():
    with launch(release_gradients=True) as rt:
        train(rt, 1)
        cut_backward(rt, 30)
        assert any(p.grad is not None for p in rt.model.parameters())
        before = [p.detach().clone() for p in rt.model.parameters()]
        for _ in range(2):
            with (
                pytest.raises(PhaseError, match=r"has left gradients.* optimizer\.zero_grad\(\) drops .*step\(\) uses"),
                rt.train(),
            ):
                train_step(rt)
        assert all(torch.equal(p, q) for p, q in zip(rt.model.parameters(), before, strict=True))
        rt.optimizer.step()
        rt.optimizer.zero_grad()
        train(rt, 1)
        cut_backward(rt, 30)
        with rt.train():
            rt.optimizer.zero_grad()
            train_step(rt)
        train(rt, 1)


def pairs(rt, steps, use_reentrant):
    """Weights after steps on two passes forward and one back, as of a preference loss, over checkpointed layers."""
    rt.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    rt.model.enable_input_require_grads()
    for step in range(steps):
        with rt.train():
            better, worse = (torch.tensor([[7 * step + i + k for i in range(6)]]) for k in (1, 9))
            losses = [rt.model(input_ids=ids, labels=ids).loss for ids in (better, worse)]
            torch.nn.functional.softplus(losses[0] - losses[1]).backward()
            rt.optimizer.step()
            rt.optimizer.zero_grad()
    return [p.detach().clone() for p in rt.model.parameters()]


@pytest.mark.parametrize("region_bytes", [4096, BUCKET_BYTES])
def test_gradients_that_come_in_parts_stay_for_the_step_and_a_warning_says_why(region_bytes):
    with launch(optimizer="resident") as rt:
        expected = pairs(rt, 3, use_reentrant=True)
    with launch(release_gradients=True, region_bytes=region_bytes) as rt:
        with pytest.warns(UserWarning, match=r"reentrant .* KiB of them stay .*use_reentrant=False") as told:
            found = pairs(rt, 3, use_reentrant=True)
        assert sum("reentrant" in str(warning.message) for warning in told) == 1
        assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))
        planned_bytes = rt.scheduler.segments[TRAINER_GRADIENTS].size_bytes
        assert planned_bytes == sum(p.nbytes for p in rt.model.parameters()), "later phases are planned with all"
    with launch(optimizer="resident") as rt:
        expected = pairs(rt, 3, use_reentrant=False)
    with launch(release_gradients=True, region_bytes=region_bytes) as rt:
        found = pairs(rt, 3, use_reentrant=False)
        assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))
        assert rt.scheduler.segments[TRAINER_GRADIENTS].size_bytes < planned_bytes / 2


def test_a_weight_that_was_stepped_takes_no_further_part_of_its_gradient():
    with launch(release_gradients=True, region_bytes=4096) as rt, rt.train():
        hidden = rt.model.model(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state
        within = checkpoint(rt.model.lm_head, hidden, use_reentrant=True)
        with pytest.raises(PhaseError, match="another part .* use_reentrant=False"):
            (within.sum() + rt.model.lm_head(hidden).square().sum()).backward()


def zero_by_hand(rt):
    for p in rt.model.parameters():
        if p.grad is not None:
            p.grad.zero_()


@pytest.mark.parametrize("offload", ["auto", "always"])
@pytest.mark.parametrize("zero", [lambda rt: rt.optimizer.zero_grad(set_to_none=False), zero_by_hand])
def test_zeroing_released_gradients_is_refused_before_a_weight_is_stepped(zero, offload):
    with launch(release_gradients=True, offload=offload) as rt:
        ids = torch.tensor([[1, 2, 3]])

        def step():
            with rt.train():
                rt.model(input_ids=ids, labels=ids).loss.backward()
                rt.optimizer.step()

        for _ in range(2):  # without any, and with those dropped
            step()
            rt.generate([[1, 2]], max_tokens=2)
        rt.optimizer.zero_grad()
        step()
        zero(rt)
        rt.generate([[1, 2]], max_tokens=2)
        before = [p.detach().clone() for p in rt.model.parameters()]
        with pytest.raises(PhaseError, match=r"set_to_none=False.* call zero_grad\(\), or leave release_gradients out"):
            step()
        assert all(torch.equal(p, q) for p, q in zip(rt.model.parameters(), before, strict=True))
        step()
        assert not torch.equal(rt.model.lm_head.weight, before[-1])


@pytest.mark.parametrize("settings", [{"optimizer": "streamed"}, {"release_gradients": True}], ids=str)
def test_layers_that_are_frozen_later_are_stepped_as_with_resident_state(settings):
    def frozen(**settings):
        with launch(**settings) as rt:
            for layer in rt.model.model.layers:
                train(rt, 1)
                layer.requires_grad_(False)
            return train(rt, 2)

    expected = frozen(optimizer="resident")
    assert all(torch.equal(p, expected[name]) for name, p in frozen(**settings).items())


def test_settings_that_contradict_released_gradients_are_refused():
    with pytest.raises(ValueError, match='leave out optimizer="resident"'):
        RuntimeConfig(release_gradients=True, optimizer="resident")
    with pytest.raises(ValueError, match="accumulation_steps must be 1, not 2"):
        RuntimeConfig(release_gradients=True, accumulation_steps=2)
    with pytest.raises(TypeError, match="release_gradients must be True or False, not 1"):
        RuntimeConfig(release_gradients=1)


def test_gradients_that_ranks_have_yet_to_reduce_are_not_released(monkeypatch):
    monkeypatch.setattr("colo.trainer.session.has_other_ranks", lambda: True)
    with pytest.raises(Unsupported, match="before ranks have reduced theirs"):
        launch(release_gradients=True)


def test_passes_of_two_training_phases_are_not_stepped_apart():
    with launch(release_gradients=True) as rt:
        ids = torch.tensor([[1, 2, 3, 4]])
        with rt.train():
            rt.model(input_ids=ids, labels=ids).loss.backward()
        rt.generate([[1]])
        for _ in range(2):
            with pytest.raises(PhaseError, match=r"and this is the second one since optimizer\.step\(\)"), rt.train():
                rt.model(input_ids=ids, labels=ids).loss.backward()
        rt.optimizer.step()
        with rt.train():
            train_step(rt)


@pytest.mark.parametrize("between", [Phase.ROLLOUT, None])
def test_passes_of_two_phases_that_were_entered_are_not_stepped_apart(between):
    with launch(release_gradients=True) as rt:
        ids = torch.tensor([[1, 2, 3, 4]])

        def backward():
            rt.enter(between)
            rt.enter(Phase.TRAIN)
            rt.model(input_ids=ids, labels=ids).loss.backward()

        backward()
        before = [p.detach().clone() for p in rt.model.parameters()]
        for _ in range(2):
            with pytest.raises(PhaseError, match=r"and this is the second one since optimizer\.step\(\)"):
                backward()
        assert all(torch.equal(p, q) for p, q in zip(rt.model.parameters(), before, strict=True))
        rt.optimizer.step()
        for _ in range(2):
            backward()
            rt.optimizer.step()


@pytest.mark.parametrize("after", [1, 30, 46, None])
@pytest.mark.parametrize("is_left", ["while it is raised", "later"])
def test_training_that_was_entered_goes_on_after_a_pass_that_an_error_has_ended(after, is_left):
    with launch(release_gradients=True) as rt:
        train(rt, 1)
        rt.enter(Phase.TRAIN)
        try:
            interrupted_backward(rt, after)
        except KeyboardInterrupt:
            if is_left != "later":
                rt.enter(Phase.ROLLOUT)
        rt.enter(None)
        rt.optimizer.zero_grad()
        is_whole = after is None and is_left == "later"
        if is_whole:  # nothing tells it from one that is to be added to
            with pytest.raises(PhaseError, match=r"and this is the second one since optimizer\.step\(\)"):
                train(rt, 1)
            rt.optimizer.step()
        before, steps = {name: p.detach().clone() for name, p in rt.model.named_parameters()}, len(rt.trace.steps)
        after_it = train(rt, 1)
        assert all(not torch.equal(before[name], weight) for name, weight in after_it.items())
        # what the pass had stepped by then is a step that ends as the next pass begins
        assert len(rt.trace.steps) - steps == (1 if is_whole else 2)


REGROUPED = {
    "removed": lambda groups: groups.pop(),
    "in each other's place": lambda groups: groups.reverse(),
    "one less": lambda groups: groups[0].update(params=groups[0]["params"][1:]),
    "in one": lambda groups: groups[0].update(params=groups[0]["params"] + groups.pop()["params"]),
}


def halves(params):
    params = list(params)
    return [{"params": params[::2], "lr": 1e-2}, {"params": params[1::2], "lr": 1e-3}]


@pytest.mark.parametrize("regroup", REGROUPED.values(), ids=REGROUPED)
@pytest.mark.parametrize(("state", "of_masters"), [("streamed", False), ("streamed", True), ("resident", True)])
def test_a_step_is_not_taken_with_the_hyperparameters_of_another_group(regroup, state, of_masters):
    """It is refused before a weight has changed, and taken once the groups are back."""

    def make(params):
        return masters(halves(params)) if of_masters else torch.optim.AdamW(halves(params))

    def run(then):
        torch.manual_seed(0)
        config = RuntimeConfig(kv_cache_bytes=KV_BYTES, optimizer=state, region_bytes=BUCKET_BYTES)
        with runtimes.launch(small_qwen3(), optimizer=make, dtype=torch.bfloat16, config=config) as rt:
            train(rt, 1)
            then(rt)
            return train(rt, 2)

    def refused(rt):
        before, groups = train(rt, 0), rt.optimizer.param_groups
        kept = [dict(group) for group in groups]
        regroup(groups)
        with pytest.raises(Unsupported, match=r"are in other groups .*add new ones with add_param_group"), rt.train():
            train_step(rt)
        rt.model.zero_grad()
        assert all(torch.equal(p, before[name]) for name, p in rt.model.named_parameters())
        groups[:] = kept

    expected = run(lambda rt: None)
    assert all(torch.equal(p, expected[name]) for name, p in run(refused).items())
