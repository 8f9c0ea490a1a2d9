"""Each part of the library imports only from those before it."""

import ast
from pathlib import Path

import colo

ROOT = Path(colo.__file__).parent
LAYERS = [
    ["errors", "log", "units"],
    ["config", "unsloth"],
    ["phases"],
    ["memory"],
    ["engine"],
    ["trainer", "weights", "planning", "report"],
    ["optim"],
    ["engines"],
    ["runtime"],
    ["assembly"],
    ["integrations", "rl", "testing"],
    ["trl"],
    ["doctor"],
    ["demo", "grpo"],
    ["cli"],
    ["__main__"],
]
"""From the bottom up. Parts of one layer know nothing of each other."""

LEVELS = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def imports_of(path):
    """Modules of colo that a file imports anywhere in it, also for its types alone, and the lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "colo":
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("colo."):
            yield node.module.removeprefix("colo."), node.lineno
        elif isinstance(node, ast.Import):
            yield from ((a.name.removeprefix("colo."), node.lineno) for a in node.names if a.name.startswith("colo."))


def part_of(module):
    return module.split(".")[0]


def test_every_part_has_a_place_in_the_order():
    there = {p.stem for p in ROOT.glob("*.py")} | {p.parent.name for p in ROOT.glob("*/__init__.py")}
    assert there - {"__init__"} == LEVELS.keys()


def test_parts_import_only_from_those_below():
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        own = part_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if own == "__init__":  # the public names
            continue
        for module, line in imports_of(path):
            other = part_of(module)
            if other != own and LEVELS[other] >= LEVELS[own]:
                wrong.append(f"{path.relative_to(ROOT.parent)}:{line}: {own} imports {module}")
    assert wrong == []


def test_no_circle_of_modules():
    """Also within a part: modules can be read in some order in which each knows only those before it."""
    graph = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("colo"):
                base = node.module.removeprefix("colo").removeprefix(".")
                for alias in node.names:
                    inner = f"{base}.{alias.name}".lstrip(".")
                    is_module = (ROOT / inner.replace(".", "/")).with_suffix(".py").exists()
                    graph[name].add(inner if is_module else base)
    graph.pop("__init__")
    done = set()
    while ready := [n for n, others in graph.items() if n not in done and others & graph.keys() - {n} <= done]:
        done.update(ready)
    left = {n: sorted(graph[n] & graph.keys() - done) for n in graph.keys() - done}
    cycle = {n: others for n, others in left.items() if any(n in left[o] for o in others if o in left)}
    assert left == {}, cycle


def test_the_two_processes_of_vllm_share_what_lies_beside_their_folders_only():
    """What client/ and worker/ both need is in colo/engines/vllm itself: neither imports the other, but for `call`."""
    found = set()
    for own, other in (("client", "worker"), ("worker", "client")):
        for path in sorted((ROOT / "engines" / "vllm" / own).glob("*.py")):
            imported = {module for module, _ in imports_of(path)}
            found |= {(path.name, module) for module in imported if module.startswith(f"engines.vllm.{other}")}
    assert found == {("llm_link.py", "engines.vllm.worker.agent")}  # what an engine in this process is given to run
