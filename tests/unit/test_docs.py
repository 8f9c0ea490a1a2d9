"""What the documents say of the code: the files, tests and names that they mention are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PATH = re.compile(r"(?:colo|tests|docs|examples|notebooks)/[\w./-]*\w/?|\b[A-Z]+\.md\b")
LINK = re.compile(r"\]\(([^)#]+)\)")
HISTORY = "CHANGELOG.md"
"""Names what is no more, too."""

COMING = {
    "colo/engines/vllm/linked_engine.py",
    "colo/engines/vllm/llm_link.py",
    "colo/engines/vllm/wire.py",
    "colo/weights/place.py",
}
"""Files of the one worker endpoint, which ARCHITECTURE.md describes already."""


def read(name):
    return (ROOT / name).read_text()


def section(text, heading):
    """The lines below a heading that begins so, up to the next one of its kind."""
    return re.search(rf"^## {heading}.*?$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_are_there(document):
    text = document.read_text()
    links = {
        str((document.parent / link).resolve().relative_to(ROOT)) for link in LINK.findall(text) if "://" not in link
    }
    named = set(PATH.findall(LINK.sub("", text))) if document.name != HISTORY else set()
    missing = {name for name in links | named if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()}
    assert missing - COMING == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_that_are_named_are_there(document):
    there = {
        name for path in ROOT.glob("tests/**/*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    files = {path.stem for path in ROOT.glob("tests/**/*.py")}
    named = set(re.findall(r"\btest_[a-z]\w+", document.read_text()))
    assert named - there - files == set()


@pytest.mark.parametrize("heading", ["Flow 1", "Flow 2"])
def test_a_flow_names_as_many_files_as_it_says_and_fewer_than_twenty(heading):
    found = section(read("ARCHITECTURE.md"), heading)
    said = int(re.search(r"\((\d+) files\)", found[0])[1])
    assert len(set(re.findall(r"colo/[\w/]+\.py", found[1]))) == said < 20


def test_what_is_set_of_other_libraries_objects_is_set_in_the_code():
    rows = [
        line for line in section(read("ARCHITECTURE.md"), "Other libraries").group(1).splitlines() if line[:1] == "|"
    ]
    code = "".join(path.read_text() for path in ROOT.glob("colo/**/*.py"))
    names = {name for row in rows for name in re.findall(r"`([\w.]+)`", row) if not name.endswith(".py")}
    names -= {"compat", "vllm.general_plugins"}  # in pyproject.toml
    assert len(names) > 30
    assert {name for name in names if name.strip(".") not in code} == set()


def test_the_layers_are_those_of_the_test():
    from tests.unit.test_layers import LAYERS

    line = section(read("ARCHITECTURE.md"), "Layers").group(1)
    listed = re.search(r"`(errors.*?)`", line, re.DOTALL)[1].split("<")
    assert [[part.strip() for part in layer.split(",")] for layer in listed] == LAYERS[:-1]  # `__main__` runs `cli`
