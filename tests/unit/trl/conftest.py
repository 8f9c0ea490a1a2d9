"""A tiny checkpoint, and trainers of it that are closed after each test."""

import pytest

import colo.trl
from colo.testing import tiny_checkpoint
from tests.trainers import ALPHABET, SMALL_CACHE, trainer_of


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), alphabet=ALPHABET))


@pytest.fixture
def make(checkpoint, tmp_path):
    """Makes trainers of the tiny checkpoint, without colo."""
    made = []

    def build(model=None, **changes):
        made.append(trainer_of(model or checkpoint, tmp_path, **changes))
        return made[-1]

    yield build
    for trainer in made:
        colo.trl.detach(trainer)


@pytest.fixture
def attach():
    def to(trainer, **changes):
        return colo.trl.attach(trainer, **({"engine": "torch", "config": SMALL_CACHE} | changes))

    return to
