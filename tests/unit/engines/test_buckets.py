"""Buckets of weights and the slab that they lie in."""

import torch

from colo.engines.buckets import buckets


def test_buckets_hold_as_much_as_they_may_and_larger_tensors_alone():
    sizes = {"a": 10, "b": 16, "c": 100, "d": 1, "e": 15}
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    assert [[name for name, _ in part] for part in buckets(tensors.items(), 32)] == [["a", "b"], ["c"], ["d", "e"]]
