"""Docstrings begin with a noun or a verb."""

import ast
import re
from pathlib import Path

import pytest

import colo

ROOT = Path(colo.__file__).parent
PARTS = ["bench", "memory", "planning", "report", "rl", "cli.py", "cli_options.py", "demo.py", "doctor.py"]
RIDDLES = re.compile(r"(Of|That of|Those|As|Whether)\b")


def docstrings(path):
    """Every string that stands alone: docstrings, and those of attributes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


@pytest.mark.parametrize("part", PARTS)
def test_docstrings_begin_with_what_they_are_about(part):
    files = [ROOT / part] if part.endswith(".py") else sorted((ROOT / part).rglob("*.py"))
    found = [
        f"{file.name}:{line}: {text[:60]}" for file in files for line, text in docstrings(file) if RIDDLES.match(text)
    ]
    assert files and found == []
