"""The GRPO loss against the formulas written out in plain Python, one token at a time."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.rl.loss import Aggregation, GRPOLossConfig, ImportanceLevel, group_advantages, grpo_loss

# two completions of three positions; the second has two tokens
LOGPROBS = [[-1.0, -0.5, -2.0], [-0.3, -1.2, -0.7]]
OLD = [[-1.3, -0.5, -1.4], [-0.9, -1.1, -0.1]]
ENGINE = [[-1.2, -0.6, -3.4], [-0.8, -1.3, -0.2]]
REFERENCE = [[-1.1, -0.7, -1.9], [-0.4, -1.0, -0.6]]
MASK = [[1, 1, 1], [1, 1, 0]]
ADVANTAGES = [1.5, -0.5]


def matrix(values, *, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def arguments(**changes):
    values = {
        "logprobs_BT": matrix(LOGPROBS, grad=True),
        "old_logprobs_BT": matrix(OLD),
        "advantages_B": matrix(ADVANTAGES),
        "mask_BT": torch.tensor(MASK),
    }
    return values | changes


def everything(**changes):
    return arguments(engine_logprobs_BT=matrix(ENGINE), reference_logprobs_BT=matrix(REFERENCE), **changes)


def weights_by_hand(config):
    """Importance weights, a list of rows."""
    ratios = [[math.exp(o - e) for o, e in zip(*rows, strict=True)] for rows in zip(OLD, ENGINE, strict=True)]
    if config.importance_level is ImportanceLevel.NONE:
        return [[1.0] * 3 for _ in ratios]
    if config.importance_level is ImportanceLevel.SEQUENCE:
        products = [math.prod(r for r, m in zip(*rows, strict=True) if m) for rows in zip(ratios, MASK, strict=True)]
        return [[min(p, config.importance_clip_max)] * 3 for p in products]
    return [[min(r, config.importance_clip_max) for r in row] for row in ratios]


def token_loss_by_hand(config, row, column, weight):
    ratio = math.exp(LOGPROBS[row][column] - OLD[row][column])
    clipped = min(max(ratio, 1 - config.epsilon_low), 1 + config.epsilon_high)
    policy = min(ratio * ADVANTAGES[row], clipped * ADVANTAGES[row])
    log_ratio = REFERENCE[row][column] - LOGPROBS[row][column]
    return -weight * policy + config.kl_coefficient * (math.exp(log_ratio) - log_ratio - 1)


def loss_by_hand(config):
    weights = weights_by_hand(config)
    rows = [
        [token_loss_by_hand(config, i, j, weights[i][j]) for j in range(3) if MASK[i][j]] for i in range(len(LOGPROBS))
    ]
    if config.aggregation is Aggregation.TOKEN:
        return sum(map(sum, rows)) / sum(map(len, rows))
    if config.aggregation is Aggregation.SEQUENCE:
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(map(sum, rows)) / (len(rows) * config.max_length)


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("level", list(ImportanceLevel))
@pytest.mark.parametrize("epsilons", [(0.2, 0.2), (0.2, 0.28), (0.05, 0.9)])
def test_the_loss_is_the_formula(aggregation, level, epsilons):
    config = GRPOLossConfig(
        epsilon_low=epsilons[0],
        epsilon_high=epsilons[1],
        kl_coefficient=0.1,
        importance_level=level,
        importance_clip_max=1.4,
        aggregation=aggregation,
        max_length=7 if aggregation is Aggregation.CONSTANT else None,
    )
    output = grpo_loss(**everything(), config=config)
    assert output.loss.shape == ()
    assert float(output.loss.detach()) == pytest.approx(loss_by_hand(config), rel=1e-12)


def test_numbers_worked_out_on_paper():
    output = grpo_loss(
        torch.tensor([[math.log(1.1), math.log(1.5)], [math.log(0.5), math.log(0.9)]], dtype=torch.float64),
        torch.zeros(2, 2, dtype=torch.float64),
        matrix([1.0, -1.0]),
        torch.ones(2, 2),
    )
    # 1.1 and 1.5 clipped to 1.2 are wanted; 0.5 clipped to 0.8 and 0.9 are not
    assert float(output.loss) == pytest.approx((-1.1 - 1.2 + 0.8 + 0.9) / 4)
    assert float(output.metrics["ratio_mean"]) == pytest.approx((1.1 + 1.5 + 0.5 + 0.9) / 4)
    assert float(output.metrics["clip_fraction"]) == pytest.approx(2 / 4)


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("level", list(ImportanceLevel))
def test_the_gradient_is_that_of_finite_differences(aggregation, level):
    config = GRPOLossConfig(
        kl_coefficient=0.3,
        importance_level=level,
        aggregation=aggregation,
        max_length=5 if aggregation is Aggregation.CONSTANT else None,
    )

    def loss(logprobs):
        return grpo_loss(**everything(logprobs_BT=logprobs), config=config).loss

    assert torch.autograd.gradcheck(loss, matrix(LOGPROBS, grad=True))


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "flows"),
    [
        (1.0, 0.0, True),
        (1.0, 0.5, False),  # already much more likely, and wanted: stop
        (1.0, -0.5, True),  # less likely than it was, and wanted: go on
        (-1.0, -0.5, False),  # already much less likely, and not wanted: stop
        (-1.0, 0.5, True),  # more likely than it was, and not wanted: go on
    ],
)
def test_clipping_stops_the_gradient_only_in_the_direction_of_the_advantage(advantage, log_ratio, flows):
    logprobs_BT = matrix([[log_ratio]], grad=True)
    output = grpo_loss(logprobs_BT, matrix([[0.0]]), matrix([advantage]), torch.ones(1, 1))
    output.loss.backward()
    expected = -advantage * math.exp(log_ratio) if flows else 0.0
    assert float(logprobs_BT.grad) == pytest.approx(expected)
    assert float(output.metrics["clip_fraction"]) == (0.0 if flows else 1.0)


def test_a_step_down_the_gradient_makes_good_completions_likelier_and_bad_ones_less_so():
    logprobs_BT = matrix(LOGPROBS, grad=True)
    grpo_loss(logprobs_BT, None, matrix([1.0, -1.0]), torch.tensor(MASK)).loss.backward()
    assert (logprobs_BT.grad[0] < 0).all()
    assert (logprobs_BT.grad[1, :2] > 0).all()
    assert logprobs_BT.grad[1, 2] == 0


def test_without_old_logprobs_the_policy_is_its_own_reference():
    own = matrix(LOGPROBS, grad=True)
    alone = grpo_loss(**arguments(logprobs_BT=own, old_logprobs_BT=None))
    alone.loss.backward()
    given = matrix(LOGPROBS, grad=True)
    grpo_loss(**arguments(logprobs_BT=given, old_logprobs_BT=matrix(LOGPROBS))).loss.backward()
    assert float(alone.metrics["ratio_mean"]) == 1.0
    assert torch.equal(own.grad, given.grad)
    assert own.grad.any()


def test_nothing_but_the_logprobs_is_differentiated():
    others = {
        "old_logprobs_BT": matrix(OLD, grad=True),
        "advantages_B": matrix(ADVANTAGES, grad=True),
        "engine_logprobs_BT": matrix(ENGINE, grad=True),
        "reference_logprobs_BT": matrix(REFERENCE, grad=True),
    }
    output = grpo_loss(**arguments(**others), config=GRPOLossConfig(kl_coefficient=0.1))
    output.loss.backward()
    assert all(tensor.grad is None for tensor in others.values())
    assert not any(metric.requires_grad for metric in output.metrics.values())


def assert_same_loss(clean, dirty, config):
    outputs = [grpo_loss(**values, config=config) for values in (clean, dirty)]
    for output in outputs:
        output.loss.backward()
    assert torch.equal(outputs[0].loss, outputs[1].loss)
    assert outputs[0].metrics == outputs[1].metrics
    assert torch.equal(clean["logprobs_BT"].grad, dirty["logprobs_BT"].grad)


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_what_is_outside_the_mask_has_no_effect(aggregation, poison):
    config = GRPOLossConfig(
        kl_coefficient=0.1, aggregation=aggregation, max_length=4 if aggregation is Aggregation.CONSTANT else None
    )
    clean, dirty = everything(), everything()
    for name in ("logprobs_BT", "old_logprobs_BT", "engine_logprobs_BT", "reference_logprobs_BT"):
        with torch.no_grad():
            dirty[name][1, 2] = poison
    assert_same_loss(clean, dirty, config)


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("level", list(ImportanceLevel))
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_the_advantage_of_a_completion_without_tokens_has_no_effect(aggregation, level, poison):
    config = GRPOLossConfig(
        kl_coefficient=0.1,
        aggregation=aggregation,
        importance_level=level,
        max_length=4 if aggregation is Aggregation.CONSTANT else None,
    )
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    clean, dirty = everything(mask_BT=mask), everything(mask_BT=mask)
    dirty["advantages_B"] = dirty["advantages_B"].clone()
    dirty["advantages_B"][1] = poison
    assert_same_loss(clean, dirty, config)


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_an_empty_mask_gives_zero(aggregation):
    config = GRPOLossConfig(
        kl_coefficient=0.1, aggregation=aggregation, max_length=4 if aggregation is Aggregation.CONSTANT else None
    )
    values = everything(mask_BT=torch.zeros(2, 3))
    output = grpo_loss(**values, config=config)
    output.loss.backward()
    assert float(output.loss.detach()) == 0.0
    assert torch.equal(values["logprobs_BT"].grad, torch.zeros(2, 3, dtype=torch.float64))
    assert all(math.isfinite(float(metric)) for metric in output.metrics.values())


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_positions_at_all_give_zero(shape):
    empty = torch.zeros(shape, requires_grad=True)
    output = grpo_loss(empty, None, torch.zeros(shape[0]), torch.zeros(shape), engine_logprobs_BT=torch.zeros(shape))
    assert float(output.loss.detach()) == 0.0
    assert float(output.metrics["mismatch_max"]) == 0.0


def padded(values, rows, columns):
    return torch.nn.functional.pad(values.detach(), (0, columns, 0, rows))


@pytest.mark.parametrize("aggregation", [Aggregation.TOKEN, Aggregation.SEQUENCE])
def test_padding_positions_and_completions_changes_nothing(aggregation):
    config = GRPOLossConfig(aggregation=aggregation)
    plain = grpo_loss(**arguments(), config=config)
    longer = {n: padded(t, 2, 3) for n, t in arguments().items() if n != "advantages_B"}
    more = grpo_loss(**longer, advantages_B=matrix([*ADVANTAGES, 3.0, -4.0]), config=config)
    torch.testing.assert_close(plain.loss, more.loss)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.sampled_from(list(Aggregation)))
def test_what_a_token_weighs_under_each_aggregation(lengths, aggregation):
    max_length = 9 if aggregation is Aggregation.CONSTANT else None
    config = GRPOLossConfig(aggregation=aggregation, max_length=max_length)
    mask_BT = torch.tensor([[1] * n + [0] * (6 - n) for n in lengths])
    logprobs_BT = torch.zeros(mask_BT.shape, dtype=torch.float64, requires_grad=True)
    grpo_loss(logprobs_BT, None, -torch.ones(len(lengths), dtype=torch.float64), mask_BT, config=config).loss.backward()
    for row_T, length in zip(logprobs_BT.grad, lengths, strict=True):
        share = {
            Aggregation.TOKEN: 1 / sum(lengths),
            Aggregation.SEQUENCE: 1 / (length * len(lengths)),
            Aggregation.CONSTANT: 1 / (9 * len(lengths)),
        }[aggregation]
        torch.testing.assert_close(row_T[:length], torch.full((length,), share, dtype=torch.float64))


def test_micro_batches_weighed_by_tokens_give_the_whole_batch():
    values = everything()
    whole = grpo_loss(**values)
    parts = [grpo_loss(**{n: t[i : i + 1] for n, t in values.items()}) for i in range(2)]
    weighed = sum(p.loss * p.metrics["num_tokens"] for p in parts) / whole.metrics["num_tokens"]
    torch.testing.assert_close(weighed, whole.loss)


def test_metrics_are_those_of_the_masked_tokens():
    metrics = {n: float(v) for n, v in grpo_loss(**everything()).metrics.items()}
    cells = [(i, j) for i in range(2) for j in range(3) if MASK[i][j]]
    mismatches = [abs(OLD[i][j] - ENGINE[i][j]) for i, j in cells]
    ratios = [math.exp(LOGPROBS[i][j] - OLD[i][j]) for i, j in cells]
    log_ratios = [REFERENCE[i][j] - LOGPROBS[i][j] for i, j in cells]
    clipped = [(r > 1.2 and i == 0) or (r < 0.8 and i == 1) for r, (i, _) in zip(ratios, cells, strict=True)]
    weights = [min(math.exp(OLD[i][j] - ENGINE[i][j]), 2.0) for i, j in cells]
    assert metrics == pytest.approx(
        {
            "num_tokens": 5,
            "ratio_mean": sum(ratios) / 5,
            "clip_fraction": sum(clipped) / 5,
            "kl": sum(math.exp(x) - x - 1 for x in log_ratios) / 5,
            "mismatch_mean": sum(mismatches) / 5,
            "mismatch_max": max(mismatches),
            "importance_weight_mean": sum(weights) / 5,
        }
    )
    assert sum(clipped) > 0
    assert max(weights) == 2.0


def test_metrics_of_what_was_not_given_are_absent():
    assert grpo_loss(**arguments()).metrics.keys() == {"num_tokens", "ratio_mean", "clip_fraction"}


def test_a_reference_without_a_coefficient_is_only_measured():
    with_reference = grpo_loss(**arguments(reference_logprobs_BT=matrix(REFERENCE)))
    assert torch.equal(with_reference.loss, grpo_loss(**arguments()).loss)
    assert float(with_reference.metrics["kl"]) > 0


def test_kl_pulls_towards_the_reference():
    logprobs_BT = matrix(LOGPROBS, grad=True)
    values = arguments(
        logprobs_BT=logprobs_BT,
        old_logprobs_BT=None,
        advantages_B=matrix([0.0, 0.0]),
        reference_logprobs_BT=matrix(REFERENCE),
    )
    grpo_loss(**values, config=GRPOLossConfig(kl_coefficient=1.0)).loss.backward()
    step = -logprobs_BT.grad[matrix(MASK).bool()]
    wanted = (matrix(REFERENCE) - matrix(LOGPROBS))[matrix(MASK).bool()]
    assert torch.equal(step.sign(), wanted.sign())


@pytest.mark.parametrize("level", [ImportanceLevel.TOKEN, ImportanceLevel.SEQUENCE])
def test_an_enormous_mismatch_is_truncated_and_a_tiny_one_vanishes(level):
    config = GRPOLossConfig(importance_level=level, importance_clip_max=3.0)
    for engine, weight in ((-1e4, 3.0), (1e4, 0.0)):
        output = grpo_loss(
            torch.zeros(1, 4),
            None,
            torch.ones(1),
            torch.ones(1, 4),
            config=config,
            engine_logprobs_BT=torch.full((1, 4), engine),
        )
        assert float(output.metrics["importance_weight_mean"]) == pytest.approx(weight)
        assert float(output.loss) == pytest.approx(-weight)


def test_sampling_from_the_trainers_own_probabilities_needs_no_correction():
    corrected = grpo_loss(**arguments(engine_logprobs_BT=matrix(OLD)))
    assert torch.equal(corrected.loss, grpo_loss(**arguments()).loss)
    assert float(corrected.metrics["mismatch_max"]) == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs_BT": torch.zeros(3)}, r"must be \(batch, time\), but are \(3,\)"),
        ({"advantages_B": torch.zeros(3)}, r"advantages must be \(2,\), but are \(3,\)"),
        ({"advantages_B": torch.zeros(2, 3)}, r"advantages must be \(2,\), but are \(2, 3\)"),
        ({"mask_BT": torch.ones(2, 4)}, r"mask must be \(2, 3\), but is \(2, 4\)"),
        ({"old_logprobs_BT": torch.zeros(2)}, r"old log-probabilities must be \(2, 3\), but is \(2,\)"),
        ({"engine_logprobs_BT": torch.zeros(1, 3)}, r"engine log-probabilities must be \(2, 3\), but is \(1, 3\)"),
        (
            {"reference_logprobs_BT": torch.zeros(2, 1)},
            r"reference log-probabilities must be \(2, 3\), but is \(2, 1\)",
        ),
    ],
)
def test_wrong_shapes_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        grpo_loss(**arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logprobs_BT": [[-1.0]]}, TypeError, r"log-probabilities must be a tensor, not \[\[-1\.0\]\]"),
        ({"logprobs_BT": torch.zeros(2, 3, dtype=torch.long)}, TypeError, "must be floating point, but are"),
        ({"old_logprobs_BT": [[-1.0]]}, TypeError, "old log-probabilities must be a tensor"),
        ({"engine_logprobs_BT": np.zeros((2, 3))}, TypeError, "engine log-probabilities must be a tensor"),
        ({"advantages_B": [1.0, -1.0]}, TypeError, r"advantages must be a tensor, not \[1\.0, -1\.0\]"),
        ({"mask_BT": None}, TypeError, "mask must be a tensor, not None"),
        (
            {"mask_BT": torch.ones(2, 3, device="meta")},
            ValueError,
            r"tensors are not on one device, but .* mask on meta: move them with \.to\(device\)",
        ),
    ],
    ids=str,
)
def test_what_is_no_tensor_or_elsewhere_is_named(changes, error, message):
    with pytest.raises(error, match=message):
        grpo_loss(**arguments(**changes))


def test_a_kl_coefficient_needs_a_reference():
    with pytest.raises(ValueError, match=r"kl_coefficient 0\.1 needs reference_logprobs_BT"):
        grpo_loss(**arguments(), config=GRPOLossConfig(kl_coefficient=0.1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epsilon_low": 1.0}, r"epsilon_low must be in \[0, 1\), but is 1\.0"),
        ({"epsilon_low": -0.1}, "epsilon_low must be"),
        ({"epsilon_high": -0.1}, "epsilon_high must be at least 0"),
        ({"epsilon_high": math.nan}, "epsilon_high must be at least 0"),
        ({"kl_coefficient": -1.0}, "kl_coefficient must be at least 0"),
        ({"importance_clip_max": 0.0}, "importance_clip_max must be positive"),
        ({"aggregation": "constant", "max_length": 0}, "max_length must be at least 1, but is 0"),
        ({"aggregation": "constant"}, "max_length goes with aggregation 'constant'"),
        ({"max_length": 5}, "max_length goes with aggregation 'constant'"),
        ({"aggregation": "median"}, "'median' is not a valid Aggregation"),
        ({"importance_level": "word"}, "'word' is not a valid ImportanceLevel"),
        ({"epsilon_low": "0.2"}, "epsilon_low must be a number, not '0.2'"),
        ({"kl_coefficient": None}, "kl_coefficient must be a number, not None"),
        ({"aggregation": "constant", "max_length": 256.0}, r"max_length must be a whole number, not 256\.0"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        GRPOLossConfig(**settings)


def test_settings_may_be_written_as_words():
    config = GRPOLossConfig(aggregation="sequence", importance_level="sequence")
    assert config.aggregation is Aggregation.SEQUENCE
    assert config.importance_level is ImportanceLevel.SEQUENCE


def test_advantages_are_standard_scores_within_the_group():
    advantages_B = group_advantages(matrix([1.0, 2.0, 6.0, 0.0, 0.0, 3.0]), 3)
    # means 3 and 1, sums of squares 14 and 6, over two
    stds = [math.sqrt(7.0) + 1e-4, math.sqrt(3.0) + 1e-4]
    expected = [-2 / stds[0], -1 / stds[0], 3 / stds[0], -1 / stds[1], -1 / stds[1], 2 / stds[1]]
    torch.testing.assert_close(advantages_B, matrix(expected))


def test_advantages_without_a_scale_are_centred_rewards():
    advantages_B = group_advantages(torch.tensor([1, 2, 6, 0, 0, 3]), 3, scale="none")
    assert torch.equal(advantages_B, torch.tensor([-2.0, -1.0, 3.0, -1.0, -1.0, 2.0]))


@pytest.mark.parametrize("scale", ["group", "none"])
def test_equal_rewards_teach_nothing(scale):
    assert torch.equal(group_advantages(torch.full((8,), 0.7), 4, scale=scale), torch.zeros(8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reward", [0.1, -3.3, 33333.3, 1234567.9])
def test_equal_rewards_teach_nothing_where_their_mean_is_rounded(reward, dtype):
    for size in (3, 5, 6, 7, 12):
        advantages_B = group_advantages(torch.full((size,), reward, dtype=dtype), size)
        assert torch.equal(advantages_B, torch.zeros(size, dtype=dtype))


@pytest.mark.parametrize(
    "rewards",
    [
        [1, 0.5, 0, 0.5],
        (1.0, 0.5, 0.0, 0.5),
        iter([1, 0.5, 0, 0.5]),
        np.array([1, 0.5, 0, 0.5]),
        [torch.tensor(1.0), np.float32(0.5), False, 0.5],
    ],
    ids=["list", "tuple", "iterator", "array", "mixed"],
)
def test_rewards_of_any_kind_give_the_advantages_of_a_tensor(rewards):
    found = group_advantages(rewards, 2)
    assert found.dtype == torch.float32
    assert torch.equal(found, group_advantages(torch.tensor([1, 0.5, 0, 0.5]), 2))


def test_large_numbers_are_told_apart():
    for rewards in (torch.tensor([6e4, -6e4], dtype=torch.float16), [2**40, 2**40 - 1], torch.tensor([3e38, -3e38])):
        assert group_advantages(rewards, 2).tolist() == pytest.approx([0.7071, -0.7071], abs=1e-3)


@pytest.mark.parametrize("large", [1e100, 1e155, 1e300, 1.7976931348623157e308])
def test_the_largest_rewards_have_the_advantages_of_small_ones(large):
    rewards = [large, -large, 0.0, large / 2]
    found = group_advantages([*rewards, 1.0, 0.0, 0.5, 0.5, *[large] * 4], 4)
    torch.testing.assert_close(found[:4], group_advantages([1.0, -1.0, 0.0, 0.5], 4, epsilon=1e-9))
    assert torch.equal(found[4:8], group_advantages([1.0, 0.0, 0.5, 0.5], 4))
    assert not found[8:].any()
    words = f"rewards hold {re.escape(f'{large:g}')} for completion 2 of 4, whose advantage is beyond torch.float32"
    with pytest.raises(ValueError, match=words):
        group_advantages([1.0, 0.0, large, -large], 2, scale="none")
    wide = torch.tensor([1e300, -1e300], dtype=torch.float64)
    torch.testing.assert_close(group_advantages(wide, 2, scale="none"), wide)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (torch.tensor([1.0, math.nan]), "rewards hold nan for completion 1 of 2: give a finite number, such as 0.0"),
        (torch.tensor([-math.inf, 1.0]), "rewards hold -inf for completion 0 of 2"),
        ([1.0, None], "rewards hold None for completion 1 of 2"),
        ([1.0, "1"], "rewards hold '1' for completion 1 of 2"),
        ([1.0, 10**400], "rewards hold 1000000"),
        (torch.tensor([1j, 0]), "rewards hold 1j for completion 0 of 2"),
        (torch.tensor(1.0), r"rewards hold 1\.0: give a list of numbers, one for each completion"),
        ("10", "rewards hold '10': give a list of numbers"),
        ([[1.0, 0.0]], r"rewards hold \[1\.0, 0\.0\] for completion 0 of 1"),
    ],
    ids=str,
)
def test_a_reward_that_is_no_finite_number_is_refused(rewards, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 2.0}, r"group_size must be a whole number, not 2\.0"),
        ({"group_size": "2"}, "group_size must be a whole number, not '2'"),
        ({"group_size": 2, "epsilon": 0}, "epsilon must be positive and finite, for groups of equal rewards, but is 0"),
        ({"group_size": 2, "epsilon": math.nan}, "epsilon must be positive and finite"),
        ({"group_size": 2, "epsilon": None}, "epsilon must be a number, not None"),
    ],
)
def test_settings_of_advantages_are_checked(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        group_advantages(torch.zeros(4), **settings)


@settings(max_examples=100)
@given(
    st.lists(st.floats(-100, 100), min_size=8, max_size=8),
    st.floats(-50, 50),
    st.sampled_from([2, 4, 8]),
)
def test_advantages_of_a_group_add_up_to_zero_and_ignore_an_offset(rewards, offset, group_size):
    rewards_B = matrix(rewards)
    advantages_B = group_advantages(rewards_B, group_size, scale="none")
    torch.testing.assert_close(
        advantages_B.view(-1, group_size).sum(1), matrix([0.0] * (8 // group_size)), rtol=0, atol=1e-9
    )
    torch.testing.assert_close(
        group_advantages(rewards_B + offset, group_size, scale="none"), advantages_B, rtol=0, atol=1e-9
    )


@pytest.mark.parametrize(
    ("rewards", "group_size", "message"),
    [
        (torch.zeros(4), 1, "group_size must be at least 2, since advantages compare within a group, but is 1"),
        (torch.zeros(5), 2, r"rewards \(5,\) must be one row of whole groups of 2"),
        (torch.zeros(2, 2), 2, r"rewards \(2, 2\) must be one row"),
        ([], 2, r"rewards \(0,\) must be one row of whole groups of 2, and of one at least"),
    ],
)
def test_incomplete_groups_are_refused(rewards, group_size, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, group_size)


def test_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match="'batch' is not a valid AdvantageScale"):
        group_advantages(torch.zeros(4), 2, scale="batch")
