"""Weights that are sharded over ranks: of this process alone, and of two processes forked from it."""

import os
import pickle
from datetime import timedelta

import pytest
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh


@pytest.fixture
def mesh(tmp_path):
    """Of this process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/alone", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture
def both(tmp_path):
    """Runs a function of the rank in two processes; what each returned or, as a string, raised."""

    def run(function):
        children = [_forked(function, rank, tmp_path) for rank in range(2)]
        found = []
        for child, reader in children:
            with os.fdopen(reader, "rb") as pipe:
                found.append(pickle.load(pipe))
            os.waitpid(child, 0)
        return found

    return run


def _forked(function, rank, folder):
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        return child, reader
    try:
        rendezvous, limit = f"file://{folder}/two", timedelta(seconds=30)
        distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2, timeout=limit)
        try:
            found = function(rank)
        except Exception as error:  # noqa: BLE001 - which the test compares
            found = f"{type(error).__name__}: {error}"
        with os.fdopen(writer, "wb") as pipe:
            pickle.dump(found, pipe)
        distributed.destroy_process_group()
    finally:
        os._exit(0)
