"""Weights that are sharded over ranks: of this process alone, and of several processes forked from it."""

import itertools
from datetime import timedelta
from functools import partial

import pytest
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests import forked


@pytest.fixture
def mesh(tmp_path):
    """Of this process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/alone", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    if distributed.is_initialized():
        distributed.destroy_process_group()
    # which keeps groups, and a process that a thread forks would end them without their threads
    _clear_sharding_prop_cache()


@pytest.fixture
def ranks(tmp_path):
    """Runs a function of the rank in several processes at once; what each returned or, as a string, raised."""
    calls = itertools.count()

    def run(function, count=2, limit_s=30):
        rendezvous = f"file://{tmp_path}/{next(calls)}"

        def of_rank(rank):
            limit = timedelta(seconds=limit_s)
            distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=count, timeout=limit)
            try:
                return function(rank)
            finally:
                distributed.destroy_process_group()

        return [result() for result in [forked.start(partial(of_rank, rank)) for rank in range(count)]]

    return run


@pytest.fixture
def both(ranks):
    """Runs a function of the rank in two processes; what each returned or, as a string, raised."""
    return ranks
