"""A mutation run: small faults put into the code one at a time, and whether the tests that mirror it notice.

    python -m tests.mutants [WORD ...] [--fraction 0.1] [--seed 0]

The tests run once without a fault, which shows how long each takes and which lines it runs. Every mutant runs in a
forked child, so that torch is imported once: of the mutated module, the tests that mirror it and those named in EXTRA.
Tests that run the mutated line come first, the quick ones before the slow, and then all others.
mutmut leaves out decorated functions, of which there are many (properties, context managers) and tables of a module;
cosmic-ray starts a process for each mutant. What no test could notice is not run: mutants.txt explains it, a line each,
`module :: mutation :: reason`, or `module :: @scope :: reason` for what runs on CUDA only.
Exits 1 when fewer than 95% of the others are killed, and at once when such a line names a module, a mutation or a scope
that there is no more.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import gc
import importlib.util
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from itertools import accumulate
from pathlib import Path
from types import CodeType

import pytest

from tests.mutations import marked, mutants_of

ROOT = Path(__file__).parent.parent
EXPLAINED = Path(__file__).with_name("mutants.txt")
WANTED = 0.95

ORDERING = "memory/test_ordering.py"
PARKING = "memory/test_parking.py"
STATE = "trainer/test_state.py"
STREAMED = "trainer/test_streamed.py"


def _runtimes(*names: str) -> tuple[str, ...]:
    return tuple(f"runtime/test_{name}.py" for name in names)


TURNS = (
    *_runtimes("turns", "undo", "faults", "accumulation", "staleness", "training", "parked_state", "publishing"),
    *_runtimes("lora", "mismatch", "room", "record", "sharing", "end", "sharded"),
    "runtime/test_generation.py::test_calls_of_several_threads_wait_for_each_other",
    "runtime/test_generation.py::test_texts_need_a_tokenizer",
)
EXTRA = {
    "phases/phase": ("phases/test_phase.py", "phases/test_transition.py", "phases/test_scheduler.py", ORDERING),
    "phases/transition": ("phases/test_scheduler.py", "runtime/test_turns.py"),
    "phases/scheduler": (ORDERING, "runtime/test_turns.py"),
    "memory/region": ("memory/test_offload.py", ORDERING),
    "memory/offload": (ORDERING,),
    "memory/copy_plan": ("memory/test_load_plan.py", "memory/test_digest.py"),
    "memory/cuda_driver": ("memory/test_share.py",),
    "memory/kernels": ("memory/test_copy_plan.py",),
    "memory/storage": (STATE, "trainer/test_gradients.py"),
    "memory/parking": (ORDERING, STATE),
    "trainer/gradients": (STATE, "trainer/test_master_weights.py", ORDERING, "runtime/test_accumulation.py"),
    "trainer/planes": (STREAMED, "runtime/test_streaming.py"),
    "trainer/window": (STREAMED, "runtime/test_streaming.py"),
    "trainer/state": (PARKING, ORDERING, "trainer/test_master_weights.py"),
    "trainer/streamed": ("runtime/test_streaming.py",),
    "trainer/session": _runtimes("turns", "accumulation", "parked_state", "end"),
    "weights/publish": ("weights/test_watch.py",),
    "weights/transports/receiver": ("weights/transports/test_ipc.py",),
    "weights/transports/slices": ("weights/transports/test_comparison.py",),
    "weights/ranks": ("weights/sources/test_base.py",),
    "weights/sources/module": ("weights/test_watch.py",),
    "weights/sources/peft": ("weights/sources/test_module.py", "rl/test_reference.py"),
    "rl/loop": ("rl/test_reference.py",),
    "rl/logit_tiles": ("rl/test_logprob.py",),
    "planning/model_shape": ("planning/test_architecture.py",),
    "trl/generation": ("trl/test_reference.py", "trl/test_phases.py"),
    "runtime/turns": (*TURNS, "runtime/test_states.py"),
    "runtime/versions": _runtimes("faults", "staleness", "publishing"),
    "runtime/lifetime": _runtimes("closing", "sharing", "end", "faults", "parked_state", "training"),
    "runtime/construction": _runtimes("room", "lora", "sharing"),
    "runtime/runtime": (*TURNS, "runtime/test_generation.py", "runtime/test_facts.py"),
}
"""Tests beside those that mirror a module, in tests/unit: files, or one test of a file."""


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: Path, code: CodeType) -> None:
        super().__init__(name, str(path))
        self._code = code

    def get_code(self, fullname: str) -> CodeType:
        return self._code

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self.name else None


def tests_of(module: str) -> list[str]:
    """Test files for a module such as `memory/arena`, the one that mirrors it first."""
    mirror = Path(module).with_name(f"test_{Path(module).name}.py")
    named = dict.fromkeys((str(mirror), *EXTRA.get(module, ())))
    return [str(ROOT / "tests/unit" / name) for name in named if (ROOT / "tests/unit" / name.split("::")[0]).exists()]


@dataclass(kw_only=True)
class Timing:
    """What is known of each test by its id, from a run without a fault."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    """Where statements of functions begin that it has run: `module:line`."""

    def order(self, test: str, line: str) -> tuple[bool, float]:
        """The place of a test among those that look for a fault in `line`."""
        return line not in self.lines.get(test, ()), self.seconds.get(test, 0.0)

    def deadline_s(self, test: str) -> float:
        """How long a test may take: what is mutated may well loop."""
        return 5 + 5 * self.seconds[test] if test in self.seconds else 0.0


class _Plugin:
    """Orders the tests for `line`, or has `timing` know them when there is none."""

    def __init__(self, timing: Timing, line: str | None) -> None:
        self.timing = timing
        self._line = line

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._line is not None:
            line = self._line
            items.sort(key=lambda item: self.timing.order(item.nodeid, line))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        lines: set[str] = set()
        vars(builtins)["__ran__"] = lines.add
        signal.setitimer(signal.ITIMER_REAL, self.timing.deadline_s(item.nodeid))  # which ends the process
        start_s = time.monotonic()
        result = yield
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._line is None:
            self.timing.seconds[item.nodeid] = time.monotonic() - start_s
            self.timing.lines[item.nodeid] = sorted(lines)
        return result


def run_tests(
    tests: Sequence[str],
    codes: Mapping[str, CodeType],
    *,
    deadline_s: float,
    timing: Timing,
    line: str | None = None,
) -> bool:
    """Whether tests succeed in time with `codes` in place of modules. Without a `line` they fill in `timing`."""
    with tempfile.NamedTemporaryFile() as file:
        child = os.fork()
        if child == 0:
            os.setsid()
            _run_tests(tests, codes, _Plugin(timing, line), Path(file.name))
        give_up_s = time.monotonic() + deadline_s
        done = status = 0
        while not done and time.monotonic() < give_up_s:
            time.sleep(0.01)
            done, status = os.waitpid(child, os.WNOHANG)
        with suppress(ProcessLookupError):  # what the tests have started and not ended
            os.killpg(child, signal.SIGKILL)
        if not done:
            os.waitpid(child, 0)
        if line is None and done and not status:
            vars(timing).update(json.load(file))
    return bool(done) and status == 0


def _run_tests(tests: Sequence[str], codes: Mapping[str, CodeType], plugin: _Plugin, file: Path) -> None:
    import hypothesis

    for module, code in codes.items():
        name = f"colo.{module}".replace("/", ".")
        sys.meta_path.insert(0, _Loader(name, ROOT / f"colo/{module}.py", code))  # type: ignore[arg-type]
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # without making examples smaller
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, phases=phases)
    hypothesis.settings.load_profile("mutants")
    vars(builtins)["__ran__"] = set().add  # for what modules run as they are imported, before the first test
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    options = ["-x", "-q", "-p", "no:cacheprovider", "--tb=no", "-Wignore::pytest.PytestAssertRewriteWarning"]
    status = 1
    try:
        status = int(pytest.main([*options, *tests], plugins=[plugin]))
        file.write_text(json.dumps(asdict(plugin.timing)))
    finally:
        os._exit(status)


def time_tests(modules: Sequence[str]) -> Timing:
    """Run the tests of all modules once, without a fault."""
    paths = {module: ROOT / f"colo/{module}.py" for module in modules}
    codes = {module: marked(ast.parse(path.read_text()), path, module) for module, path in paths.items()}
    tests = list(dict.fromkeys(test for module in modules for test in tests_of(module)))
    timing = Timing()
    if not run_tests(tests, codes, deadline_s=3600, timing=timing):
        raise SystemExit(f"tests fail as it is: {' '.join(tests)}")
    return timing


def examine(
    module: str, timing: Timing, fraction: float, seed: int, explained: dict[tuple[str, str], str]
) -> tuple[int, int, int]:
    """Print what became of the mutants of a module; how many there were, were killed, and are explained."""
    source = (ROOT / f"colo/{module}.py").read_text()
    mutants = list(mutants_of(ast.parse(source)))
    chosen = sorted(random.Random(seed).sample(range(len(mutants)), max(1, round(fraction * len(mutants)))))
    start_s = time.monotonic()
    labels = {i: (module, mutants[i].label) for i in chosen}
    tried = [i for i in chosen if labels[i] not in explained and not _of_scope(module, mutants[i].scope, explained)]
    survivors = [mutants[i] for i in tried if not _is_killed(module, source, i, timing)]
    counts = len(chosen), len(tried) - len(survivors), len(chosen) - len(tried)
    seconds = time.monotonic() - start_s
    print(f"{module}: {counts[0]} mutants, {counts[1]} killed, {counts[2]} explained, {seconds:.0f} s", flush=True)
    for mutant in survivors:
        print(f"    {mutant.statement.lineno} {mutant.label}", flush=True)
    return counts


def _is_killed(module: str, source: str, number: int, timing: Timing) -> bool:
    tree = ast.parse(source)  # of its own, which stays changed
    mutant = list(mutants_of(tree))[number]
    code = mutant.compiled(tree, ROOT / f"colo/{module}.py")
    deadline_s = 20 + 4 * sum(timing.seconds.values())
    line = f"{module}:{mutant.statement.lineno}"
    return not run_tests(tests_of(module), {module: code}, deadline_s=deadline_s, timing=timing, line=line)


def _of_scope(module: str, scope: str, explained: dict[tuple[str, str], str]) -> str | None:
    parts = scope.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((explained[module, f"@{name}"] for name in names if (module, f"@{name}") in explained), None)


def read_explained() -> dict[tuple[str, str], str]:
    """Reasons by module and mutation, or `@scope`."""
    rows = [line.split(" :: ") for line in EXPLAINED.read_text().splitlines() if line and not line.startswith("#")]
    return {(module, mutation): reason for module, mutation, reason in rows}


def find_outdated(explained: Iterable[tuple[str, str]], modules: Sequence[str]) -> Iterator[str]:
    """What is wrong with each explanation whose module, mutation or scope does not exist."""
    mutations: dict[str, set[str]] = {}
    for module, mutation in explained:
        if module not in modules:
            yield f"{module} :: {mutation}: no such module"
            continue
        if module not in mutations:
            mutants = list(mutants_of(ast.parse((ROOT / f"colo/{module}.py").read_text())))
            scopes = {f"@{scope}" for m in mutants for scope in accumulate(m.scope.split("."), "{}.{}".format)}
            mutations[module] = {m.label for m in mutants} | scopes
        if mutation not in mutations[module]:
            kind = "scope with mutants" if mutation.startswith("@") else "mutation"
            yield f"{module} :: {mutation}: no such {kind}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only modules whose path has one of these, such as memory/arena")
    parser.add_argument("--fraction", type=float, default=1.0, help="of each module's mutants")
    parser.add_argument("--seed", type=int, default=0, help="which ones, of a fraction")
    given = parser.parse_args(arguments)
    import hypothesis  # noqa: F401 - imported before the forks, as torch is
    import peft  # noqa: F401
    from transformers import Qwen3ForCausalLM  # noqa: F401

    gc.freeze()  # what is there is not looked at again by the children, whose pytest collects garbage
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    folders = ("phases", "memory", "planning", "trainer", "weights", "runtime")
    files = [p for folder in folders for p in sorted((ROOT / "colo" / folder).rglob("*.py"))]
    modules = [str(p.relative_to(ROOT / "colo").with_suffix("")) for p in files]
    explained = read_explained()
    outdated = list(find_outdated(explained, modules))
    if outdated:
        raise SystemExit("\n".join([f"{EXPLAINED.name} explains what is not there:", *outdated]))
    chosen = [m for m in modules if tests_of(m) and (not given.words or any(word in m for word in given.words))]
    timing = time_tests(chosen)
    totals = [examine(module, timing, given.fraction, given.seed, explained) for module in chosen]
    mutants, killed, num_explained = (sum(column) for column in zip(*totals, strict=True))
    share = killed / max(1, mutants - num_explained)
    print(f"{mutants} mutants, {killed} killed, {num_explained} explained: {share:.1%} of the others killed")
    return int(share < WANTED)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.mutants", *sys.argv[1:]], os.environ | {"PYTHONHASHSEED": "0"}
        )
    sys.exit(main())
