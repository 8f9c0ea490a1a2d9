"""Buckets of weights and the slab that they lie in."""

import torch

from colo.engines.buckets import Slab, buckets


def test_buckets_hold_as_much_as_they_may_and_larger_tensors_alone():
    sizes = {"a": 10, "b": 16, "c": 100, "d": 1, "e": 15}
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    assert [[name for name, _ in part] for part in buckets(tensors.items(), 32)] == [["a", "b"], ["c"], ["d", "e"]]


def test_memory_of_a_device_is_written_again_once_the_server_has_read_it():
    slab, fences = Slab(torch.device("meta"), size_bytes=64), []

    def filled(*sizes):
        bucket = [("w", torch.zeros(size, dtype=torch.uint8, device="meta")) for size in sizes]
        memory, places = slab.fill(bucket, lambda: fences.append(1))
        return memory.nbytes, [start for _, _, start in places], slab.whole.nbytes, len(fences)

    assert filled(12, 32) == (48, [0, 16], 64, 0)
    assert filled(64) == (64, [0], 64, 1)
    assert filled(80) == (80, [0], 80, 2), "a larger tensor has memory of its size"
    assert filled(4) == (16, [0], 80, 3)
    slab.close()
    assert slab.whole is None
    assert filled(4) == (16, [0], 64, 3), "the server has read all that was there before"


def test_every_bucket_of_a_cpu_has_memory_of_its_own():
    slab = Slab(torch.device("cpu"))
    first, _ = slab.fill([("w", torch.ones(4))])
    second, _ = slab.fill([("w", torch.zeros(4))])
    assert first.view(torch.float32).tolist() == [1] * 4 and not second.any()
