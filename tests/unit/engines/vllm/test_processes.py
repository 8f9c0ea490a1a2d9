"""Calls into another process: what an interrupt ends, and what it must not."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

from colo.engines.vllm import processes as module
from colo.engines.vllm.client.llm_link import OwnProcessLink
from colo.engines.vllm.processes import Caller, NoAnswer, start_apart_from_interrupts

PATIENCE_S = 60
"""Limit of a wait for what comes at once on a machine with nothing else to do."""


@contextmanager
def interrupt_after(seconds):
    interrupted = threading.Event()

    def interrupt(*_):
        interrupted.set()
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield interrupted
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def child():
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    return process


class TestStart:
    def test_returns_and_raises_what_was_started(self):
        assert start_apart_from_interrupts(lambda: 3, lambda result: None) == 3
        with pytest.raises(ValueError, match="no such model"):
            start_apart_from_interrupts(lambda: fail(ValueError("no such model")), lambda result: None)

    def test_ctrl_c_does_not_reach_what_was_started(self):
        process = start_apart_from_interrupts(child, lambda result: None)
        os.kill(process.pid, signal.SIGINT)
        process.join(1)
        assert process.is_alive()
        process.kill()
        process.join()

    @pytest.mark.parametrize("before_s", [0.0, 0.6], ids=["running", "not there yet"])
    def test_an_interrupt_ends_a_process_that_is_being_started(self, before_s):
        started = []

        def start():
            signal.setitimer(signal.ITIMER_REAL, 0.3)  # an interrupt before would have nothing to end
            time.sleep(before_s)
            started.append(child())
            started[0].join()
            raise RuntimeError("the process has ended")

        with interrupt_after(PATIENCE_S):
            start_apart_from_interrupts(start, lambda result: None)
        assert not started[0].is_alive()

    @pytest.mark.parametrize("method", ["spawn", "fork"])
    @pytest.mark.parametrize("before_s", [0.0, 0.5], ids=["before", "meanwhile"])
    def test_an_interrupt_spares_what_other_threads_start(self, method, before_s):
        others, begun = [], threading.Event()

        def start_other():
            begun.wait()
            time.sleep(before_s)
            context = multiprocessing.get_context(method)
            others.append(context.Process(target=time.sleep, args=(60,), daemon=True))
            others[0].start()

        thread = threading.Thread(target=start_other)
        thread.start()
        started = []

        def start():
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            begun.set()
            started.append(child())
            started[0].join()
            raise RuntimeError("the process has ended")

        with interrupt_after(PATIENCE_S):
            start_apart_from_interrupts(start, lambda result: None)
        thread.join()
        assert not started[0].is_alive()
        others[0].join(0.5)
        assert others[0].is_alive()
        others[0].kill()
        others[0].join()

    def test_what_has_started_all_the_same_is_discarded(self):
        discarded = []

        def start():
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            interrupted.wait(PATIENCE_S)
            time.sleep(0.4)
            return "an engine"

        with interrupt_after(PATIENCE_S) as interrupted:
            start_apart_from_interrupts(start, discarded.append)
        assert discarded == ["an engine"]

    def test_an_interrupt_as_the_thread_is_started_leaves_nothing_behind(self, monkeypatch):
        threads, started, discarded = [], [], []
        begin = threading.Thread.start

        def start_and_interrupt(thread):
            threads.append(thread)
            begin(thread)
            raise KeyboardInterrupt

        def start():
            started.append("an engine")
            return "an engine"

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(threading.Thread, "start", start_and_interrupt)
            start_apart_from_interrupts(start, discarded.append)
        threads[0].join(PATIENCE_S)
        assert not threads[0].is_alive()
        assert started == discarded


BUSY = "while True: pass"
IDLE = "import time; time.sleep(60)"


class TestDeadline:
    """A call lasts as long as something moves: what is seen of it, or else a processor's time."""

    @pytest.fixture
    def watching(self):
        processes = []

        def make(code, progress):
            processes.append(subprocess.Popen([sys.executable, "-c", code]))
            caller = Caller(progress)
            caller.watch([processes[-1].pid])
            return caller, processes[-1]

        yield make
        for process in processes:
            process.kill()
            process.wait()

    def test_of_unknown_progress_a_process_that_works_is_waited_for(self, watching, monkeypatch):
        caller, process = watching(BUSY, lambda: None)
        busy = psutil.Process(process.pid)

        def now_s():
            """A clock that stands still while others have the processor that the process works with."""
            used = busy.cpu_times()
            return 2 * (used.user + used.system)

        def sample():
            while now_s() < 8:
                time.sleep(0.05)
            return "sampled"

        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=now_s))
        assert caller.call(sample, deadline_s=4.0) == "sampled"
        caller.close()

    @pytest.mark.parametrize("code", [IDLE, BUSY], ids=["idle", "stopped"])
    def test_of_unknown_progress_a_process_that_does_nothing_is_given_up(self, watching, code):
        caller, process = watching(code, lambda: None)
        process.send_signal(signal.SIGSTOP if code == BUSY else signal.SIGCONT)
        go_on = threading.Event()
        with pytest.raises(NoAnswer):
            caller.call(go_on.wait, deadline_s=1.5)
        go_on.set()
        caller.close()

    def test_a_process_that_works_without_what_is_seen_moving_is_given_up(self, watching):
        caller, _ = watching(BUSY, lambda: [("request", 3)])
        go_on = threading.Event()
        with pytest.raises(NoAnswer):
            caller.call(go_on.wait, deadline_s=1.5)
        go_on.set()
        caller.close()


def no_detokenizer():
    return SimpleNamespace(detokenizer=None)


def detokenizer(count):
    return SimpleNamespace(detokenizer=SimpleNamespace(num_output_tokens=count))


@pytest.mark.parametrize(
    ("llm", "is_known"),
    [
        (None, False),
        (SimpleNamespace(llm_engine=SimpleNamespace()), False),
        (SimpleNamespace(llm_engine=SimpleNamespace(output_processor=SimpleNamespace(request_states=None))), False),
        ({"a": no_detokenizer()}, False),
        ({"a": detokenizer(lambda: 2), "b": no_detokenizer()}, False),
        ({"a": detokenizer(lambda: None)}, False),
        ({"a": SimpleNamespace(detokenizer=SimpleNamespace())}, False),
        ({}, True),
        ({"a": detokenizer(lambda: 2)}, True),
    ],
)
def test_progress_is_known_where_the_tokens_of_every_request_are_counted(llm, is_known):
    link = OwnProcessLink.__new__(OwnProcessLink)
    if isinstance(llm, dict):
        llm = SimpleNamespace(llm_engine=SimpleNamespace(output_processor=SimpleNamespace(request_states=llm)))
    link.llm = llm
    assert (link._progress() is not None) is is_known


class TestEndCalls:
    def test_a_call_returns_for_which_nothing_is_left(self):
        caller, work, order = Caller(), {"requests": 5}, []

        def generate():
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            while work["requests"]:
                time.sleep(0.01)
            order.append("generate")

        with interrupt_after(60):
            caller.call(generate, deadline_s=None)
        caller.end_calls(lambda: work.update(requests=0), lambda: order.append("abort"), within_s=PATIENCE_S)
        assert order == ["generate", "abort"]
        assert caller.call(lambda: 7, deadline_s=PATIENCE_S) == 7
        caller.close()

    def test_one_that_does_not_end_is_left_behind_and_told_later(self):
        caller, go_on, told = Caller(), threading.Event(), threading.Event()

        def generate():
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            go_on.wait()

        with interrupt_after(60):
            caller.call(generate, deadline_s=None)
        start_s = time.monotonic()
        caller.end_calls(lambda: None, told.set, within_s=0.5)
        assert time.monotonic() - start_s < 2 and not told.is_set()
        with pytest.raises(NoAnswer):
            caller.call(lambda: None, deadline_s=0.3)
        go_on.set()
        assert told.wait(PATIENCE_S)
        caller.close()

    def test_a_failure_to_tell_leaves_calls_possible(self):
        caller = Caller()
        caller.end_calls(lambda: None, lambda: fail(RuntimeError("the engine is dead")), within_s=1)
        assert caller.call(lambda: 1, deadline_s=PATIENCE_S) == 1
        caller.close()


def fail(error):
    raise error
