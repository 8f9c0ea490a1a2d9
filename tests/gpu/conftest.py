"""What torch reads once in a process and tests on CUDA need, and a limit to how long one of them takes."""

import faulthandler
import os

import pytest
import torch

# read at the first call of cuBLAS: without it `use_deterministic_algorithms` refuses every product of matrices
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

LIMIT_S = 600
"""Seconds for what a test sets up, for its body and for what it tears down, each.

More than the deadlines of tests themselves, which say what was waited for: 240 for a server and 420 for ranks,
each of which may be a whole body.
"""

STDERR = pytest.StashKey[int]()


@pytest.fixture
def deterministic():
    """Algorithms that give the same bits again, for one test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_configure(config):
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # nobody sees what is captured of a process that ends at once
        config.stash[STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def limited(item):
    """Ends this process at the limit with a traceback of every thread, also while a call that hangs holds the GIL.

    Not around all three: pytest cancels as one fails, and what is torn down then is the likelier to hang.
    """
    faulthandler.dump_traceback_later(LIMIT_S, file=item.config.stash[STDERR], exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = limited
