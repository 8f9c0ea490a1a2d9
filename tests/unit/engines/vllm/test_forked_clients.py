"""Children that are forked beside a vLLM in a process of its own."""

import os
import subprocess
import sys
import textwrap

SCRIPT = """
import os, sys, threading, time, weakref
from types import SimpleNamespace

from colo.engines.vllm.compat import leave_to_parent


class Client:
    '''As vLLM's, whose end waits for a thread of the process that has made it.'''

    def __init__(self):
        self.resources = SimpleNamespace(engine_manager=Manager(), coordinator=None)
        self._finalizer = weakref.finalize(self, wait_for_thread)


class Manager:
    def __init__(self):
        self._finalizer = weakref.finalize(self, wait_for_thread)


def wait_for_thread():
    if os.getpid() != parent:
        time.sleep(60)
    print("ended in the parent", flush=True)


parent = os.getpid()
client = Client()
leave_to_parent(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client)))
leave_to_parent(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=Client())))  # gone, which is no matter
child = os.fork()
if not child:
    sys.exit(7)
started_s = time.monotonic()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), time.monotonic() - started_s < 20, flush=True)
"""


def test_a_child_that_exits_leaves_the_end_of_vllms_client_to_its_parent():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], env=os.environ, capture_output=True, text=True, timeout=120
    )
    assert "7 True" in done.stdout.splitlines(), done.stderr
    assert done.stdout.splitlines()[-2:] == ["ended in the parent"] * 2
