"""What LMDeploy's servers take and say, without one."""

import base64
import pickle
from contextlib import nullcontext

import pytest
import torch

from colo.engines import buckets
from colo.engines.buckets import Slab
from colo.engines.lmdeploy.server import FINISHED, LMDeployFacts, Payloads, started_in
from colo.errors import Unsupported
from tests.models import small_qwen3

SAID = {"backend": "pytorch", "device_type": "cpu", "sleeping_tags": [], "device_uuids": []}
SAID |= {"checkpoint_engine_version": None}
INFO = {"tp_size": 1, "dp_size": 1, "ep_size": 1, "num_gpu_blocks": 2, "block_size": 64}


def read(request):
    return pickle.loads(base64.b64decode(request["serialized_named_tensors"]))


def test_a_bucket_of_the_host_is_rebuilt_by_a_function_whose_seventh_argument_the_server_sets():
    tensors = [("a", torch.randn(3, 5).half()), ("b", torch.randn(7).half())]
    request = Payloads(Slab(torch.device("cpu"))).make(tensors)
    assert (request["load_format"], request["finished"]) == ("flattened_bucket", False)
    payload = read(request)
    function, arguments = payload["flattened_tensor"]
    whole = function(*arguments[:6], 0, *arguments[7:])
    assert whole.dtype is torch.float16
    for entry, (name, tensor) in zip(payload["metadata"], tensors, strict=True):
        assert (entry.name, entry.numel, entry.dtype) == (name, tensor.numel(), torch.float16)
        assert torch.equal(whole[entry.start_idx : entry.end_idx].reshape(entry.shape), tensor)
    assert read(FINISHED)["metadata"] == [] and FINISHED["finished"]


DONE = []


class Event:
    def __init__(self, interprocess):
        assert interprocess

    def record(self, stream):
        DONE.append(f"record on {stream}")

    def synchronize(self):
        DONE.append("synchronize")

    def ipc_handle(self):
        return b"event"


def test_the_handle_of_a_gpus_slab_is_sent_once_and_its_event_orders_both_processes(monkeypatch):
    """A GPU's slab in host memory: the device alone says that it is one."""

    class OnGpu(Slab):
        def fill(self, bucket, fence=lambda: None):
            return FakeMemory(super().fill(bucket, fence)[0]), [(n, t, 0) for n, t in bucket]

    class FakeMemory:
        device = torch.device("cuda")

        def __init__(self, memory):
            self.memory = memory

    DONE.clear()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {device}")
    monkeypatch.setattr("colo.engines.lmdeploy.server.exported", lambda tensor: (tuple, tuple(range(15))))
    kept = torch.empty
    monkeypatch.setattr(buckets.torch, "empty", lambda *a, device=None, **k: kept(*a, **k))
    payloads = Payloads(OnGpu(torch.device("cuda"), size_bytes=64))
    small, large = [("a", torch.ones(8).half())], [("b", torch.ones(64).half())]
    first, second, third = (read(payloads.make(bucket)) for bucket in (small, small, large))
    assert first["flattened_tensor"] == (tuple, tuple(range(15)))
    assert (first["require_clone"], first["event_ipc_handle"]) == (False, b"event")
    assert second.keys() == {"metadata"}
    assert third["flattened_tensor"], "a slab that has grown is another one"
    assert DONE[::2] == ["record on that of cuda"] * 3 and DONE[1::2] == ["synchronize"] * 2
    payloads.forget()
    assert "flattened_tensor" in read(payloads.make(small)), "the server forgets it with each update"


@pytest.mark.parametrize(
    ("status", "info", "started", "words"),
    [
        (
            {"backend": "turbomind"},
            {},
            1,
            "runs turbomind, which takes no weights: start it with --backend pytorch",
        ),
        ({}, {"dp_size": 2}, "1", "was started with --dp 2: colo trains beside an engine on one GPU"),
        ({}, {}, None, "was started with --disable-metrics: they have its time of start"),
        (
            {},
            {},
            1,
            "the config of /nowhere/at/all, which the LMDeploy server at http://here",
        ),
    ],
)
def test_a_server_that_cannot_take_weights_is_refused_with_what_to_change(status, info, started, words):
    with pytest.raises(Unsupported, match=words):
        LMDeployFacts.of(
            "http://here",
            status=SAID | status,
            info=INFO | info,
            model_name="/nowhere/at/all",
            checkpoint=None,
            started=started,
            has_logprobs=True,
            device=torch.device("cpu"),
        )


@pytest.mark.parametrize(("tied", "pad"), [(True, 3), (True, None), (False, 3)])
def test_a_logit_that_lmdeploy_sets_to_zero_is_refused(tmp_path, tied, pad):
    small_qwen3(tie_word_embeddings=tied, pad_token_id=pad).save_pretrained(tmp_path)
    asked = {"status": SAID, "info": INFO, "model_name": str(tmp_path), "checkpoint": None, "started": "1"}
    refused = pytest.raises(Unsupported, match="pad_token_id 3: LMDeploy sets") if tied and pad else nullcontext()
    with refused:
        LMDeployFacts.of("http://here", has_logprobs=True, device=torch.device("cpu"), **asked)


def test_the_time_of_start_is_read_from_metrics():
    assert started_in("# HELP\nprocess_start_time_seconds 1.5e+09\nother 2\n") == "1.5e+09"
    assert started_in("other 2\n") is None
