"""Weights to checkpoint-engine's own receiver, in another process."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from colo.engines.checkpoint_engine import send_weights
from colo.errors import EngineLost, TransferError
from tests import forked

worker = pytest.importorskip(
    "checkpoint_engine.worker", reason="missing: pip install --no-deps checkpoint-engine==0.4.2 loguru"
)
zmq = pytest.importorskip("zmq")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch):
    """The receiver waits for a GPU's streams, of which there are none here."""
    nothing = SimpleNamespace(synchronize=lambda: None, ipc_collect=lambda: None, empty_cache=lambda: None)
    monkeypatch.setattr(worker, "DeviceManager", lambda: SimpleNamespace(device_module=nothing))


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3, 5), "b": (), "c": (1000,), "d": (7,), "e": (0, 4), "f": (33, 2)}
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
    return {
        name: (100 * torch.randn(shape, generator=generator)).to(dtypes[place % 4])
        for place, (name, shape) in enumerate(shapes.items())
    }


def receiving(handles, load, after=lambda: None):
    """Run the receiver until it ends, as an engine's worker does."""
    with zmq.Context() as context:
        worker.update_weights_from_ipc(context, handles["cpu"], 0, run=load, post_hook=after)


def receiver(load=None, after=lambda: None):
    """What starts the receiver in another process and waits for it: what it has loaded, by list of weights."""
    results = []

    def start(handles):
        loaded, ended = [], []

        def keep(parts):
            if load is not None:
                load(parts)
            loaded.append([(name, tensor.clone()) for name, tensor in parts])

        def run():
            receiving(handles, keep, lambda: ended.append(after()))
            return loaded, len(ended)

        results.append(forked.start(run)())
        if isinstance(results[-1], str):
            raise RuntimeError(results[-1])

    return start, results


@pytest.mark.parametrize("bucket_bytes", [256, 1024, 1 << 20])
def test_every_byte_arrives_in_lists_that_fit_a_half_and_the_engine_finishes(weights, bucket_bytes):
    start, results = receiver()
    assert send_weights(weights, start, device=CPU, bucket_bytes=bucket_bytes) == sum(
        tensor.nbytes for tensor in weights.values()
    )
    ((loaded, ended),) = results
    assert ended == 1
    assert (len(loaded) == 1) is (bucket_bytes == 1 << 20)
    arrived = [pair for part in loaded for pair in part]
    assert [name for name, _ in arrived] == list(weights)
    for name, tensor in arrived:
        assert tensor.dtype == weights[name].dtype and torch.equal(tensor, weights[name])


def test_a_weight_that_the_engine_does_not_take_is_named_and_the_next_publication_succeeds(weights):
    def refuse(parts):
        if any(name == "c" for name, _ in parts):
            raise KeyError("there is no weight c here")

    start, results = receiver(refuse)
    with pytest.raises(TransferError, match="receiver of weights has failed: KeyError: 'there is no weight c here'"):
        send_weights(weights, start, device=CPU, bucket_bytes=256)
    start, results = receiver()
    send_weights(weights, start, device=CPU)
    assert results[0][1] == 1


def test_an_engine_that_fails_before_it_asks_or_after_all_was_sent_is_told(weights):
    def start(handles):
        raise ConnectionError("nobody is there")

    with pytest.raises(TransferError, match="asks for no weights: ConnectionError: nobody is there"):
        send_weights(weights, start, device=CPU)
    with pytest.raises(TransferError, match="asks for no weights: it has returned"):
        send_weights(weights, lambda handles: None, device=CPU)

    def late(handles):
        receiver()[0](handles)
        raise RuntimeError("repacking has failed")

    with pytest.raises(TransferError, match="all weights are sent, and the engine refuses them: .*repacking"):
        send_weights(weights, late, device=CPU)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_killed_or_stands_still_is_lost_at_the_deadline(weights, number):
    pids = []

    def start(handles):
        def run():
            receiving(handles, lambda parts: os.kill(os.getpid(), number))

        child = os.fork()
        if not child:
            run()
            os._exit(0)
        pids.append(child)
        time.sleep(30)  # a server that does not notice

    began_s = time.monotonic()
    with pytest.raises(EngineLost, match="has said nothing for 1 s"):
        send_weights(weights, start, device=CPU, deadline_s=1)
    assert time.monotonic() - began_s < 20
    os.kill(pids[0], signal.SIGKILL)
    os.waitpid(pids[0], 0)


def test_an_interrupt_while_sending_ends_the_receiver(weights):
    class Stopped(dict):
        def items(self):
            yield from list(super().items())[:3]
            raise KeyboardInterrupt

    start, results = receiver()
    with pytest.raises(KeyboardInterrupt):
        send_weights(Stopped(weights), start, device=CPU, bucket_bytes=256)
    deadline_s = time.monotonic() + 60
    while not results and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert "the trainer has stopped sending weights" in results[0]
