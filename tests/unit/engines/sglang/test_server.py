"""Labels, dtypes and memory of SGLang's servers, without one."""

import pytest
import torch

from colo.engines.server import ServerSegment
from colo.engines.sglang.server import away_by, engine_dtype, label_with, plain_label, refusals
from colo.errors import PhaseError
from colo.phases.phase import Residency
from tests.models import tiny_qwen3


def test_a_label_says_what_is_away_and_stays_the_label():
    label = label_with("colo-1", ["weights", "kv_cache"])
    assert label == "colo-1 asleep:kv_cache,weights"
    assert (plain_label(label), away_by(label)) == ("colo-1", ["weights", "kv_cache"])
    assert label_with(label, ["kv_cache"]) == "colo-1 asleep:kv_cache"
    assert label_with(label, []) == "colo-1" and away_by("default") == []


@pytest.mark.parametrize(
    ("said", "own", "found"),
    [
        ("auto", "float32", torch.float16),
        ("auto", "bfloat16", torch.bfloat16),
        ("bfloat16", "float32", torch.bfloat16),
        ("half", "float32", torch.float16),
        ("float", "bfloat16", torch.float32),
    ],
)
def test_the_dtype_is_the_one_that_sglang_chooses(said, own, found):
    assert engine_dtype(said, tiny_qwen3(dtype=own)) is found


def segment(away):
    asked = []

    def move(_, target):
        asked.append(target)

    return ServerSegment("weights", 100, away, move, refusals(away)), asked


def test_memory_that_can_leave_is_counted_where_it_is():
    weights, asked = segment(Residency.OFFLOADED)
    assert (weights.name, weights.device_bytes, weights.host_bytes) == ("engine.weights", 100, 0)
    weights.begin(Residency.OFFLOADED).wait()
    weights.begin(Residency.OFFLOADED).wait()
    assert (weights.device_bytes, weights.host_bytes) == (0, 100)
    weights.begin(Residency.RESIDENT).wait()
    assert asked == [Residency.OFFLOADED, Residency.RESIDENT]


def test_memory_that_stays_or_has_no_copy_is_refused_with_the_flag():
    weights, asked = segment(None)
    with pytest.raises(PhaseError, match="start the server with --enable-memory-saver"):
        weights.begin(Residency.DISCARDED)
    weights, asked = segment(Residency.DISCARDED)
    with pytest.raises(PhaseError, match="start it with --enable-weights-cpu-backup, or take level 2"):
        weights.begin(Residency.OFFLOADED)
    assert asked == [] and weights.residency is Residency.RESIDENT
