"""What is no Megatron model, and that nothing of Megatron is imported to know it; tests/integration has real ones."""

import ast
from pathlib import Path

import pytest
from torch import nn

import colo
from colo.errors import Unsupported
from colo.weights.sources.megatron.stages import bare, is_megatron


def test_what_is_no_stage_is_refused_by_the_name_of_its_class():
    assert not any(map(is_megatron, [nn.Linear(2, 2), [nn.Linear(2, 2)], [], None]))
    with pytest.raises(Unsupported, match="a Linear is no stage of a Megatron model"):
        bare([nn.Linear(2, 2)])
    with pytest.raises(Unsupported, match="no stages"):
        bare([])


def test_no_module_imports_megatron_when_it_is_imported():
    found = []
    for path in Path(colo.__file__).parent.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{path}:{node.lineno}" for name in names if name.split(".")[0] == "megatron"]
    assert found == []
