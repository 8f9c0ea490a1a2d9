"""The design's invariants that no other file checks as a whole; the list says where each of the six is tested.

1. Never silently stale: test_runtime.py, "never silently stale"; weights/test_publish.py.
2. A defined state after an exception: phases/test_scheduler.py, any sequence of requests and faults.
3. Baseline after a cycle: test_runtime.py, a hundred cycles; gpu/test_runtime.py.
4. Nothing of another library is changed: here.
5. Peaks as promised: phases/test_transition.py, test_runtime.py, a phase never holds more than its plan promised.
6. Refusals say what, how many bytes, and what to change: here, for every `BudgetError` that a user can meet.
"""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch

import colo
from colo.memory.arena import PinnedArena
from colo.memory.ledger import Holding, Ledger
from colo.memory.offload import Mover
from colo.phases.phase import Phase, Residency
from colo.phases.transition import plan_transition
from colo.units import MIB


def test_a_run_changes_no_environment_setting_or_class_of_another_library():
    script = """
    import json, os, warnings
    import peft, torch, transformers

    def shape(cls):
        return {name: id(value) for name, value in vars(cls).items() if name not in ("__doc__", "__slotnames__")}

    def settings():
        return {
            "environment": dict(os.environ),
            "threads": torch.get_num_threads(),
            "dtype": str(torch.get_default_dtype()),
            "grad": torch.is_grad_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "filters": len(warnings.filters),
            "verbosity": transformers.logging.get_verbosity(),
            "classes": {cls.__name__: shape(cls) for cls in CLASSES},
        }

    CLASSES = [
        torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.nn.Linear, torch.optim.Optimizer, torch.optim.AdamW,
        transformers.PreTrainedModel, transformers.Qwen3ForCausalLM, transformers.cache_utils.Cache,
        peft.PeftModel, peft.LoraModel,
    ]
    import colo.demo
    colo.demo.run(steps=1, device="cpu", mode="lora").runtime.close()  # let libraries finish their own lazy set-up
    before = settings()
    for mode in ("full", "lora"):
        result = colo.demo.run(steps=2, device="cpu", mode=mode)
        result.runtime.close()
    after = settings()
    changed = {key: [before[key], after[key]] for key in before if before[key] != after[key]}
    print(json.dumps(changed, default=str))
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


def refusals():
    def ledger():
        kv = Holding(name="engine.kv_cache", size_bytes=90, residency=Residency.DISCARDED)
        weights = Holding(name="engine.weights", size_bytes=20, residency=Residency.RESIDENT)
        return Ledger.of([kv, weights], capacity_bytes=100, host_capacity_bytes=0)

    def arena():
        PinnedArena(torch.device("cpu"), limit_bytes=MIB).allocate(2 * MIB)

    def engine():
        from transformers import Qwen3Config

        from colo.engines.torch import TorchEngine

        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 16}
        config = Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=2)
        made = TorchEngine(
            config,
            device="cpu",
            dtype=torch.float32,
            kv_cache_bytes=64 * 1024,
            mover=Mover(torch.device("cpu")),
        )
        made.commit(0)
        made.generate([[1]], colo.SamplingParams(max_tokens=100_000))

    return {
        "phase": lambda: plan_transition(Phase.IDLE, Phase.ROLLOUT, ledger()),
        "arena": arena,
        "engine": engine,
    }


@pytest.mark.parametrize("name", refusals())
def test_every_refusal_says_what_how_many_bytes_and_what_to_change(name):
    with pytest.raises(colo.BudgetError) as caught:
        refusals()[name]()
    text = str(caught.value)
    assert caught.value.needed_bytes > caught.value.free_bytes
    assert any(unit in text for unit in (" B", "KiB", "MiB", "GiB")), text
    assert any(word in text.lower() for word in ("raise", "smaller", "pass", "make", "lower", "shorten")), text
