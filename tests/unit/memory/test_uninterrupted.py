"""Blocks that Ctrl-C does not split."""

import os
import signal
import threading

import pytest

from colo.memory.uninterrupted import uninterrupted

pytestmark = pytest.mark.usefixtures("interrupts_raise")


def test_an_interrupt_comes_once_the_block_has_ended():
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
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
    with pytest.raises(KeyboardInterrupt):
        with uninterrupted():
            with uninterrupted():
                os.kill(os.getpid(), signal.SIGINT)
            reached = True
    assert reached


def test_other_threads_are_never_interrupted_anyway():
    ran = []

    def run():
        with uninterrupted():
            ran.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ran == [signal.default_int_handler]


def test_where_nobody_handles_interrupts_nothing_is_done():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
