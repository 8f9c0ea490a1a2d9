"""What no linter checks: how docstrings begin, how modules are cut, and where tensors are made."""

import ast
import re

from benchmarks.house import CLAUSE, ROOT, clauses_by_folder, docstrings, small_modules_with_one_importer

WITHOUT_A_SUBJECT = re.compile(r"(Of|As|With|None|And|Or|But|Also|Know|Have)\b")

MOST_SMALL_MODULES = 2
"""Modules with one importer and under 120 lines: this number may only fall."""


def test_docstrings_begin_with_a_subject_or_a_verb():
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for line, words in docstrings(ast.parse(path.read_text())):
            if WITHOUT_A_SUBJECT.match(words):
                found.append(f"{path.relative_to(ROOT.parent)}:{line}: {words.splitlines()[0]}")
    assert found == []


def test_no_docstring_opens_with_a_clause():
    assert clauses_by_folder() == {}, f"docstrings that match {CLAUSE.pattern}"


def test_small_modules_with_one_importer_become_no_more():
    found = small_modules_with_one_importer()
    assert len(found) <= MOST_SMALL_MODULES, found


def test_a_tensor_that_is_made_names_its_device():
    """Another would be on the loop's default device, `torch.set_default_device`, also what belongs on the host."""
    makers = {"empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "rand", "randn", "randint", "randperm"}
    found = [
        f"{path.relative_to(ROOT.parent)}:{node.lineno}"
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{maker}" for maker in makers}
        if not {"device", "out", None} & {keyword.arg for keyword in node.keywords}
    ]
    assert found == []


def test_no_two_public_classes_share_a_name():
    classes = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in classes.items() if len(paths) > 1} == {}
