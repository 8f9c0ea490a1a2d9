import os
import signal
import sys
import threading
from contextlib import suppress

import pytest
import torch

from tests.frozen import freeze, thaw

with suppress(ImportError):  # tests of a GPU do without
    from hypothesis import settings

    # a busy machine is no fault of what is tested
    settings.register_profile("colo", deadline=None)
    settings.load_profile("colo")

# Tiny models gain nothing from more threads, and on busy cores OpenMP's threads wait for one another for seconds.
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# torch looks up the name of whoever connects to a store: a name server that does not answer costs 1 s rather than 10
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# a shell without job control starts what runs beside it with Ctrl-C ignored: tests that interrupt would wait in vain
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `pytest -m gpu -n 2 --dist loadfile` gives each of its workers a GPU of its own; files that need two are skipped then.
NUM_GPUS = torch.cuda.device_count()
if "PYTEST_XDIST_WORKER" in os.environ and NUM_GPUS > 1:
    number = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(NUM_GPUS)))
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number % NUM_GPUS]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node, ids):
    """Tells before the first test if workers would share a GPU, of whose memory tests ask how much is free."""
    num_workers = node.workerinput["workercount"]
    if 0 < NUM_GPUS < num_workers and any("tests/gpu/" in name for name in ids):
        pytest.exit(
            f"{num_workers} workers would share {NUM_GPUS} GPU(s), and tests of memory fail then: take "
            f"-n {NUM_GPUS}, or leave them out by -m 'not gpu'",
            returncode=pytest.ExitCode.USAGE_ERROR,
        )


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_unconfigure():
    thaw()  # libraries complain of what is there when Python ends


@pytest.fixture(scope="module", autouse=True)
def frozen_heap():
    freeze()


@pytest.fixture
def device():
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def groups_are_let_go():
    """No thread of this process listens for the ranks of a group when a test is over."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("colo-signals"):
            thread.join(60)
            assert not thread.is_alive(), f"{thread.name}: a group that the test has not closed"


@pytest.fixture
def interrupts_raise():
    """SIGINT raises KeyboardInterrupt, also where whoever started the tests ignores it, as shells do in background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def mover(device):
    from colo.memory.offload import Mover
    from colo.units import MIB

    mover = Mover(device, host_limit_bytes=256 * MIB)
    yield mover
    mover.close()


@pytest.fixture
def colo(monkeypatch, capsys):
    """Runs `colo ARGUMENTS` in this process and returns its exit code, standard output and standard error."""
    from rich.console import Console

    from colo import cli

    monkeypatch.setattr(cli, "out", Console(width=200))
    monkeypatch.setattr(cli, "err", Console(width=200, stderr=True))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["colo", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def run_demo():
    """Runs the demo on the CPU and closes its runtime after the test."""
    from colo import demo

    results = []

    def run(**options):
        results.append(demo.run(**({"steps": 2, "device": "cpu"} | options)))
        return results[-1]

    yield run
    for result in results:
        result.runtime.close()
