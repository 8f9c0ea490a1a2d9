"""The design's invariants that no other file checks as a whole; the list says where each of the six is tested.

1. Never silently stale: runtime/test_staleness.py, runtime/test_publishing.py; weights/test_publish.py.
2. A defined state after an exception: phases/test_scheduler.py, any sequence of requests and faults.
3. Baseline after a cycle: runtime/test_room.py, a hundred cycles; gpu/test_runtime.py.
4. Nothing of another library is changed: integration/test_unchanged.py, with what sees a change tested here.
5. Peaks as promised: phases/test_transition.py, a phase never holds more than its plan promised.
6. Refusals say what, how many bytes, and what to change: here, for every `BudgetError` that a user can meet.
"""

import ast
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch

import colo
from colo.config import RuntimeConfig
from colo.engines import elsewhere
from colo.engines.sglang.server import Facts
from colo.engines.text import check_count
from colo.memory import arena, cuda_driver, region
from colo.memory.arena import PinnedArena
from colo.memory.offload import Mover
from colo.phases.phase import Phase, Residency
from colo.phases.scheduler import Budget, Scheduler
from colo.phases.transition import Holding, Ledger, plan_transition
from colo.rl import loop
from colo.testing import FakeDevice, FakeSegment
from colo.trainer import planes
from colo.trainer.streamed import StreamedState
from colo.units import GIB, MIB
from tests import unchanged
from tests.frozen import freeze, thaw
from tests.models import small_qwen3

ROOT = Path(colo.__file__).parent.parent
CUDA = torch.device("cuda", 0)


def test_a_changed_class_function_or_setting_is_seen(monkeypatch):
    short_lived = [[]]
    freeze()
    before = unchanged.settings(), unchanged.attributes()
    short_lived.clear()  # what was frozen may still die
    assert unchanged.differences(before, (unchanged.settings(), unchanged.attributes())) == {}
    thaw()
    assert unchanged.differences(before, (unchanged.settings(), before[1])).keys() == {"garbage"}
    freeze()
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: x)
    monkeypatch.setattr(torch.Tensor, "by_colo", property(lambda tensor: 1), raising=False)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *arguments: None)
    monkeypatch.setenv("COLO_WAS_HERE", "1")
    found = unchanged.differences(before, (unchanged.settings(), unchanged.attributes()))
    assert found.keys() == {
        "torch.nn.modules.linear.Linear.forward",
        "torch.Tensor.by_colo",
        "torch.nn.functional.linear",
        "environment",
    }


# ---- refusals ------------------------------------------------------------------------------------------------------


def plan(monkeypatch, host_bytes=0):
    kv = Holding(name="engine.kv_cache", size_bytes=90, residency=Residency.DISCARDED)
    state = Holding(name="state", size_bytes=20, residency=Residency.RESIDENT, away=Residency.OFFLOADED)
    ledger = Ledger.of([kv, state], capacity_bytes=100 if host_bytes else 80, host_capacity_bytes=host_bytes)
    plan_transition(Phase.IDLE, Phase.ROLLOUT, ledger)


def bring_back(monkeypatch):
    device = FakeDevice(100)
    segments = [
        FakeSegment("engine.kv_cache", 60, device),
        FakeSegment("state", 60, device, residency=Residency.OFFLOADED),
    ]
    Scheduler(segments, Budget(capacity_bytes=100, host_capacity_bytes=100)).require("state")


def start(monkeypatch):
    config = RuntimeConfig(kv_cache_bytes=MIB, device_limit_bytes=MIB)
    colo.launch(unchanged.tiny(), device="cpu", config=config)


def start_with_state_that_stays(monkeypatch):
    state = {"optimizer": "streamed", "region_bytes": 4096, "resident_state_bytes": MIB}
    config = RuntimeConfig(kv_cache_bytes=MIB // 4, device_limit_bytes="1.6MiB", **state)
    colo.launch(small_qwen3(num_hidden_layers=4), device="cpu", config=config)


def step_state_that_stays(monkeypatch):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2000))])
    state = StreamedState(optimizer, Mover(torch.device("cpu")), resident_bytes=MIB)

    def full(*size, **options):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(planes, "free_device_bytes", lambda device: 100)
    monkeypatch.setattr(torch, "empty", full)
    state.window.prepare()


def generate(monkeypatch):
    from colo.engines.torch import TorchEngine

    mover = Mover(torch.device("cpu"))
    engine = TorchEngine(unchanged.tiny(), device="cpu", dtype=torch.float32, kv_cache_bytes=4096, mover=mover)
    engine.commit(0)
    engine.generate([[1]], colo.SamplingParams(max_tokens=100))


def generate_on_a_server(monkeypatch):
    facts = Facts(
        version="0.5.21",
        model_path="model",
        config=SimpleNamespace(),
        dtype=torch.bfloat16,
        device="cpu",
        num_positions=100,
        max_prompt=90,
        num_cached_tokens=50,
        label="",
        started_with={},
    )
    facts.check_room(10, 60, cache_bytes=50 * MIB)


def restore_a_region(monkeypatch):
    monkeypatch.setattr(region, "free_device_bytes", lambda device: GIB)
    region.require_free("trainer.optimizer", 2 * GIB, CUDA)


def take_memory_of_the_driver(monkeypatch):
    full = SimpleNamespace(cuMemAlloc_v2=lambda address, size: 2)
    for name, value in (
        ("_driver", lambda: full),
        ("_ensure_context", lambda: None),
        ("free_device_bytes", lambda device: GIB),
    ):
        monkeypatch.setattr(cuda_driver, name, value)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    cuda_driver.allocate(2 * GIB, CUDA)


def pin_memory_that_the_driver_refuses(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *arguments: 2))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(arena, "local_cpus", lambda device: {0})
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)  # takes the runtime's error
    PinnedArena(CUDA, limit_bytes=16 * MIB).allocate(1)


def keep_a_reference(monkeypatch):
    monkeypatch.setattr(loop, "available_host_bytes", lambda: 100)
    loop.Reference(torch.nn.Linear(8, 8))


def compute_with_a_reference(monkeypatch):
    monkeypatch.setattr(loop, "free_device_bytes", lambda device: 100)
    model = torch.nn.Linear(8, 8)
    kept = loop.Reference(model)
    model.to("meta")  # a device that is not the host
    kept.run(lambda frozen: frozen)


def write_to_a_full_disk(monkeypatch):
    monkeypatch.setattr(elsewhere.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with TemporaryDirectory() as path:
        colo.WeightsFolder(path).write([("a.weight", torch.zeros(100))])


REFUSALS = {
    "phases/transition.py _require": plan,
    "phases/transition.py plan_transition": lambda monkeypatch: plan(monkeypatch, host_bytes=10),
    "phases/scheduler.py _plan_arrival": bring_back,
    "assembly/share.py _admit": start,
    "runtime/construction.py _planned_beside_state": start_with_state_that_stays,
    "trainer/planes.py _made_on_device": step_state_that_stays,
    "engines/text.py check_count": lambda monkeypatch: check_count(1, 10**12),
    "engines/caches.py check_room": generate,
    "engines/server.py check_room": generate_on_a_server,
    "engines/elsewhere.py _write": write_to_a_full_disk,
    "memory/arena.py _grow": lambda monkeypatch: PinnedArena(torch.device("cpu"), limit_bytes=MIB).allocate(2 * MIB),
    "memory/arena.py _register": pin_memory_that_the_driver_refuses,
    "memory/region.py require_free": restore_a_region,
    "memory/cuda_driver.py allocate": take_memory_of_the_driver,
    "rl/loop.py _copied": keep_a_reference,
    "rl/loop.py _run_frozen": compute_with_a_reference,
}
"""By the function that refuses."""

PASSED_ON = {"phases/transition.py refuse"}
"""A function that makes an error for others to raise. `colo.testing` is for tests."""


def refusing_functions():
    for file in sorted((ROOT / "colo").rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
                names = {getattr(call, "id", getattr(call, "attr", None)) for call in calls}
                if names & {"BudgetError", "refuse"}:
                    yield f"{file.relative_to(ROOT / 'colo')} {function.name}"


def test_every_place_that_refuses_for_want_of_memory_is_visited_here():
    found = {name for name in refusing_functions() if not name.startswith("testing.py")}
    assert found - PASSED_ON == REFUSALS.keys()


@pytest.mark.parametrize("name", REFUSALS)
def test_every_refusal_says_what_how_many_bytes_and_what_to_change(name, monkeypatch):
    with pytest.raises(colo.BudgetError) as caught:
        REFUSALS[name](monkeypatch)
    text = str(caught.value)
    assert caught.value.needed_bytes > caught.value.free_bytes
    assert any(unit in text for unit in (" B", "KiB", "MiB", "GiB")), text
    first, words = text.partition("\n")[0], ("raise", "smaller", "pass", "make", "lower", "shorten", "release", "free")
    advice = max(first.rfind(". "), first.rfind(": "), first.rfind("; "))
    assert any(word in first[advice:].lower().split() for word in words), text
