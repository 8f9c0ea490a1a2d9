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
