"""Servers on Ray's nodes, as far as they need no Ray."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from colo.integrations import ray as nodes

ROOT = Path(__file__).parents[3]
WORKER = """
import subprocess, sys, time
from colo.integrations.ray import end_with_this_process

server = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
lifeline = end_with_this_process(server.pid)
print(server.pid, flush=True)
time.sleep(600)
"""
SERVER = "import subprocess; subprocess.run(['sleep', '600'])"


def group(pid):
    """Processes of a group that live."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            pass
    return found


def ends(pid, seconds=60):
    give_up_s = time.monotonic() + seconds
    while group(pid) and time.monotonic() < give_up_s:
        time.sleep(0.1)
    return not group(pid)


@pytest.fixture
def worker():
    """A process with a server, which has started another: its process id, and the server's."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, SERVER], env=environment, stdout=subprocess.PIPE, text=True
    )
    server = int(process.stdout.readline())
    while len(group(server)) < 2:
        time.sleep(0.05)
    yield process, server
    process.kill()
    process.communicate()
    for left in group(server):
        left.kill()


@pytest.mark.parametrize("is_killed_first", [False, True])
def test_what_a_server_has_started_ends_with_the_worker_that_is_killed(worker, is_killed_first):
    process, server = worker
    if is_killed_first:  # as Ray does, which knows the worker's own children alone
        os.kill(server, signal.SIGKILL)
    process.kill()
    process.wait()
    assert ends(server)


def test_a_guard_that_is_told_so_ends_nobody():
    server = subprocess.Popen([sys.executable, "-c", SERVER], start_new_session=True)
    lifeline = nodes.end_with_this_process(server.pid)
    lifeline.write(b"ended")
    lifeline.close()
    time.sleep(1)
    assert group(server.pid)
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
