"""What travels between processes checks itself, and comes back as it was through JSON."""

import json

import pytest

from colo.engines.vllm.wire import WorkerError, WorkerInfo, error_in_words
from colo.errors import BudgetError, TransferError, Unsupported
from tests.workers import worker_info

INFO = worker_info(model_type=None, has_tokenizer=False, max_adapters=2)


def through_json(wire):
    return json.loads(json.dumps(wire))


def test_a_workers_account_of_itself_comes_back_as_it_was():
    assert WorkerInfo.from_wire(through_json(INFO.to_wire())) == INFO


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pid": "7"}, "pid is '7'"),
        ({"pid": True}, "pid is True"),
        ({"has_tokenizer": 1}, "has_tokenizer is 1"),
        ({"model_type": 3}, "model_type is 3"),
        ({"residual_bytes": {"CUDA graphs": "7"}}, "residual_bytes is {'CUDA graphs': '7'}"),
        ({"placing_s": "fast"}, "placing_s is 'fast'"),
        ({"colour": "red"}, "unexpected keyword argument 'colour'"),
    ],
)
def test_an_account_that_is_wrong_is_refused_with_what_is_wrong(change, words):
    with pytest.raises(TransferError, match=f"what arrived is no WorkerInfo: .*{words}"):
        WorkerInfo.from_wire(INFO.to_wire() | change)


def test_an_account_that_lacks_something_is_refused():
    wire = INFO.to_wire()
    del wire["rank"]
    with pytest.raises(TransferError, match="missing 1 required keyword-only argument: 'rank'"):
        WorkerInfo.from_wire(wire)


@pytest.mark.parametrize(
    "error",
    [Unsupported("not here"), ValueError("n"), TransferError("t"), BudgetError("b", needed_bytes=5, free_bytes=3)],
    ids=lambda error: type(error).__name__,
)
def test_errors_come_back_as_what_they_were(error):
    back = WorkerError.from_wire(through_json(WorkerError.of(error).to_wire())).error()
    assert type(back) is type(error) and str(back) == str(error)
    assert getattr(back, "missing_bytes", None) == getattr(error, "missing_bytes", None)


def test_other_errors_are_transfer_errors_that_name_them():
    back = WorkerError.of(ZeroDivisionError("by zero")).error()
    assert type(back) is TransferError and str(back) == "ZeroDivisionError: by zero"
    assert type(WorkerError.of(UnicodeError("text")).error()) is ValueError
    assert error_in_words(AssertionError()) == "AssertionError: without a message"


@pytest.mark.parametrize(
    ("wire", "words"),
    [
        ({"kind": "SystemExit", "message": ""}, "kind is 'SystemExit', none of PhaseError"),
        ({"kind": "PhaseError", "message": 3}, "message is 3"),
        ({"kind": "PhaseError"}, "missing 1 required"),
    ],
)
def test_an_error_that_is_none_is_refused(wire, words):
    with pytest.raises(TransferError, match=f"what arrived is no WorkerError: .*{words}"):
        WorkerError.from_wire(wire)
