import dataclasses
import re
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from colo.config import Offload, RuntimeConfig


def test_the_defaults_take_what_the_device_has_and_check_at_every_rollout():
    config = RuntimeConfig()
    assert config.offload is Offload.AUTO
    assert (config.device_limit_bytes, config.host_limit_bytes, config.kv_cache_bytes) == (None, None, None)
    assert config.verify
    assert config.accumulation_steps == 1


@pytest.mark.parametrize("policy", list(Offload))
def test_the_policy_may_be_given_by_name(policy):
    assert RuntimeConfig(offload=policy.value).offload is policy


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="sometimes"):
        RuntimeConfig(offload="sometimes")


@pytest.mark.parametrize("name", ["device_limit_bytes", "host_limit_bytes", "kv_cache_bytes"])
@pytest.mark.parametrize("value", [0, -1])
def test_limits_are_positive(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a positive number of bytes or None, not {value}"):
        RuntimeConfig(**{name: value})
    assert getattr(RuntimeConfig(**{name: 1}), name) == 1


@pytest.mark.parametrize("name", ["device_reserve_bytes", "train_working_bytes"])
def test_shares_kept_free_are_not_negative(name):
    with pytest.raises(ValueError, match=f"{name} must not be negative, but is -1"):
        RuntimeConfig(**{name: -1})
    assert getattr(RuntimeConfig(**{name: 0}), name) == 0


@pytest.mark.parametrize(("name", "least"), [("region_bytes", 256), ("chunk_bytes", 4096), ("accumulation_steps", 1)])
def test_sizes_of_pieces_have_a_least_value(name, least):
    with pytest.raises(ValueError, match=f"{name} must be at least {least}, but is {least - 1}"):
        RuntimeConfig(**{name: least - 1})
    assert getattr(RuntimeConfig(**{name: least}), name) == least


def test_a_config_does_not_change_and_is_given_by_name():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RuntimeConfig().verify = False
    with pytest.raises(TypeError, match="positional"):
        RuntimeConfig("auto")


def test_a_policy_that_does_not_exist_is_answered_with_those_that_do():
    with pytest.raises(ValueError, match="offload must be one of auto, always, never, not 'sometimes'"):
        RuntimeConfig(offload="sometimes")


@pytest.mark.parametrize("value", ["0.5", True, b"1", {}, 1j, np.array([]), torch.ones(2)], ids=repr)
def test_the_largest_mismatch_is_a_number(value):
    shown = value.tolist() if hasattr(value, "tolist") else value
    with pytest.raises(TypeError, match=re.escape(f"max_mismatch must be a number or None, not {shown!r}")):
        RuntimeConfig(max_mismatch=value)
    assert type(RuntimeConfig(max_mismatch=torch.tensor(0.5)).max_mismatch) is float
    assert RuntimeConfig(max_mismatch=None).max_mismatch is None


def test_a_size_beyond_all_numbers_is_refused():
    with pytest.raises(ValueError, match="kv_cache_bytes: '9999.* is more than any size"):
        RuntimeConfig(kv_cache_bytes="9" * 400)
    for name in [name for name in NUMBERS if name.endswith("_bytes")]:
        with pytest.raises(ValueError, match=rf"{name} must be less than 2\*\*63, as sizes of memory are, not 1000"):
            RuntimeConfig(**{name: 10**400})
    for name in NUMBERS:
        with pytest.raises(ValueError, match=f"^{name} is a whole number of about 5000 digits: give one of 64 bits"):
            RuntimeConfig(**{name: -(10**5000)})


class Index:
    def __index__(self):
        return 100_000


NUMBERS = [f.name for f in fields(RuntimeConfig) if "int" in str(f.type)]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize(
    "number", [np.int64(100_000), np.array(100_000), torch.tensor(100_000), Index()], ids=lambda n: type(n).__name__
)
def test_whole_numbers_may_be_of_any_kind(name, number):
    found = getattr(RuntimeConfig(**{name: number}), name)
    assert found == 100_000 and type(found) is int


OTHERS = [np.True_, np.float64(3), np.array([3]), torch.tensor(True), torch.tensor(3.0)]


@pytest.mark.parametrize("value", OTHERS, ids=repr)
def test_other_numbers_of_numpy_and_torch_are_refused(value):
    for name in ("kv_cache_bytes", "accumulation_steps"):
        with pytest.raises(TypeError, match=f"{name} must be a whole number"):
            RuntimeConfig(**{name: value})


@pytest.mark.parametrize("value", [1.5, True])
def test_bytes_are_whole_numbers(value):
    with pytest.raises(TypeError, match=f"device_limit_bytes must be a whole number of bytes, .* not {value!r}"):
        RuntimeConfig(device_limit_bytes=value)


@pytest.mark.parametrize(("value", "what"), [("much", "cannot read 'much'"), (-1, "must not be negative")])
def test_a_share_of_the_state_is_read_before_it_is_compared(value, what):
    for none in (0, "0", None):
        assert not RuntimeConfig(resident_state_bytes=none, offload="always").resident_state_bytes
    with pytest.raises(ValueError, match=f"resident_state_bytes:? {what}"):
        RuntimeConfig(resident_state_bytes=value, offload="always")


SIZES = [f.name for f in fields(RuntimeConfig) if f.name.endswith("_bytes")]


@pytest.mark.parametrize("name", SIZES)
def test_every_size_may_be_a_text_as_in_plan(name):
    assert getattr(RuntimeConfig(**{name: "1.5 GiB"}), name) == 3 * 2**29
    assert getattr(replace(RuntimeConfig(), **{name: "2M"}), name) == 2**21
    with pytest.raises(ValueError, match=f"{name}: cannot read 'much' as a size: write for example 80GiB"):
        RuntimeConfig(**{name: "much"})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kv_cache_mib", 'pass kv_cache_bytes="512MiB"'),
        ("offlaod", "did you mean offload"),
        ("gpu_memory_utilization", 'kv_cache_bytes="4GiB"'),
        ("lr", "to launch"),
        ("colour", "it takes offload, weights, optimizer, "),
    ],
)
def test_a_setting_that_there_is_not_is_answered_with_what_there_is(name, words):
    with pytest.raises(TypeError, match=f"RuntimeConfig takes no '{name}': .*{words}"):
        RuntimeConfig(**{name: 1})


def test_only_what_may_be_left_open_is_none():
    with pytest.raises(TypeError, match="accumulation_steps must be a whole number, not None"):
        RuntimeConfig(accumulation_steps=None)
    assert RuntimeConfig(host_limit_bytes=None).host_limit_bytes is None


def test_whether_to_verify_is_yes_or_no():
    with pytest.raises(TypeError, match="verify must be True or False, not 'no'"):
        RuntimeConfig(verify="no")
