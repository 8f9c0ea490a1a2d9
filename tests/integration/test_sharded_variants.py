"""FSDP2 as people write it: 16-bit weights with masters, adapters, gradients that are not reduced yet; two ranks."""

from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "sharded_variants.py"
CLOSE = 1e-5


@pytest.fixture(scope="module")
def ranks(two_ranks):
    """What both ranks have found, in order."""
    return two_ranks(SCRIPT)


def test_16_bit_weights_with_masters_are_trained_as_unsharded_ones_and_half_the_bytes_travel(ranks):
    for found in ranks:
        assert found["masters"]["same"] == [True] * 3
        assert found["masters"]["masters"]
        assert found["masters"]["away"] == [0] * 3
        received, expected = found["masters"]["received"]
        assert received == expected


def test_a_sharded_adapter_is_trained_as_an_unsharded_one_and_reaches_every_engine(ranks):
    for found in ranks:
        assert found["adapters"]["same"] == [True] * 3
        assert len(found["adapters"]["gaps"]) == 4
        assert max(found["adapters"]["gaps"]) < CLOSE
        adapter_bytes, first, *others = found["adapters"]["adapter"]
        assert first > adapter_bytes and others == [adapter_bytes] * 2
