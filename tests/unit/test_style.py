"""What keeps the source readable and no linter checks: sizes of files and functions, and how docstrings begin."""

import ast
import re
from pathlib import Path

import colo

ROOT = Path(colo.__file__).parent
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 500, 60
WITHOUT_A_SUBJECT = re.compile(r"(Of|That of|Those|As|With|None|And|Or|But)\b")


def trees():
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        yield path.relative_to(ROOT.parent), text, ast.parse(text)


def test_files_and_functions_are_short():
    long = []
    for path, text, tree in trees():
        if text.count("\n") > MOST_LINES_OF_A_FILE:
            long.append(f"{path}: {text.count(chr(10))} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION:
                    long.append(f"{path}:{node.lineno}: {node.name} has {lines} lines")
    assert long == []


def docstrings(tree):
    """Every string that stands alone, those of attributes too, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_docstrings_begin_with_a_subject_or_a_verb():
    found = [
        f"{path}:{line}: {words.splitlines()[0]}"
        for path, _, tree in trees()
        for line, words in docstrings(tree)
        if WITHOUT_A_SUBJECT.match(words)
    ]
    assert found == []


def test_no_two_public_classes_share_a_name():
    classes = {}
    for path, _, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, []).append(str(path))
    assert {name: paths for name, paths in classes.items() if len(paths) > 1} == {}
