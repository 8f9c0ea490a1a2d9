"""Blocks that Ctrl-C does not split."""

import os
import signal
import threading

import pytest

from colo.memory.uninterrupted import end_wait, uninterrupted

pytestmark = pytest.mark.usefixtures("interrupts_raise")


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_comes_once_the_block_has_ended():
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            interrupt()
            steps.append("done")
            steps.append("noted")
        steps.append("not reached")
    assert steps == ["done", "noted"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_of_the_block_is_raised_and_interrupts_are_handled_again():
    with pytest.raises(ValueError, match="mine"), uninterrupted():
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_blocks_may_be_nested():
    reached = False
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            with uninterrupted():
                interrupt()
                interrupt()
            reached = True
    assert reached


def test_the_second_interrupt_ends_a_wait_and_every_later_one_of_the_block(caplog):
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            interrupt()
            with uninterrupted():
                end_wait("the engine")
            steps.append("waits")
            interrupt()
            interrupt()
            steps.append("not split")
            try:
                end_wait("the engine")
                steps.append("not reached")
            finally:
                with pytest.raises(KeyboardInterrupt):
                    end_wait("the engine")
        steps.append("not reached either")
    assert steps == ["waits", "not split"]
    assert [record.getMessage() for record in caplog.records] == [
        "Ctrl-C is noted, and waits for the engine: press it again to end the wait"
    ]
    end_wait("nobody")  # outside of a block an interrupt needs no help
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_goes_on_is_told_of_every_interrupt():
    told = []
    signal.signal(signal.SIGINT, lambda *_: told.append(len(told)))
    with uninterrupted():
        interrupt()
        interrupt()
        end_wait("the engine")
        end_wait("the engine")
        assert told == [0]
    assert told == [0, 1]


def test_other_threads_are_never_interrupted_anyway():
    ran = []

    def run():
        with uninterrupted():
            end_wait("the engine")
            ran.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ran == [signal.default_int_handler]


def test_where_nobody_handles_interrupts_nothing_is_done():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.fixture
def handled():
    """Sets handlers of signals, and puts the ones before back."""
    before = {}

    def handle(number, handler):
        before.setdefault(number, signal.signal(number, handler))

    yield handle
    for number, handler in before.items():
        signal.signal(number, handler)


def time_is_up(*_):
    raise TimeoutError("time is up")


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1])
def test_what_a_handler_of_another_signal_raises_comes_once_the_block_has_ended(handled, number):
    handled(number, time_is_up)
    steps = []
    with pytest.raises(TimeoutError), uninterrupted():
        os.kill(os.getpid(), number)
        steps.append("not split")
    assert steps == ["not split"] and signal.getsignal(number) is time_is_up
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_signal_ends_a_wait_at_once_and_is_told_once(handled):
    handled(signal.SIGALRM, time_is_up)
    handled(signal.SIGUSR1, lambda *_: told.append("saved"))
    told = []
    with pytest.raises(TimeoutError), uninterrupted():
        os.kill(os.getpid(), signal.SIGUSR1)
        end_wait("the engine")
        assert told == ["saved"], "a handler that goes on ends no wait"
        os.kill(os.getpid(), signal.SIGALRM)
        try:
            end_wait("the engine")
        finally:
            with pytest.raises(TimeoutError):
                end_wait("the engine")
    assert told == ["saved"] and signal.getsignal(signal.SIGALRM) is time_is_up


def test_a_signal_that_comes_as_handlers_are_put_back_leaves_none_that_only_notes(handled, monkeypatch):
    handled(signal.SIGALRM, time_is_up)
    set_handler = signal.signal

    def put_back(number, handler):
        set_handler(number, handler)
        if number == signal.SIGINT and handler is signal.default_int_handler:
            interrupt()

    monkeypatch.setattr(signal, "signal", put_back)
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        pass
    monkeypatch.undo()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            os.kill(os.getpid(), signal.SIGALRM)
        with pytest.raises(TimeoutError), uninterrupted():
            os.kill(os.getpid(), signal.SIGALRM)
