"""The counts of `python -m benchmarks house`."""

import ast

from benchmarks import house
from benchmarks.common import Record


def test_every_row_of_the_table_stands_beside_its_aim(monkeypatch):
    monkeypatch.setattr(house, "_measured", lambda: (39_000, 39, 30, [0.040, 0.060], [0.04, 0.05]))
    record = Record("house", "python -m benchmarks house")
    house.run(record)
    assert {row["what"]: row["aim"] for row in record.rows} == house.AIMS
    first, second, third, fourth = record.rows[:4]
    assert [(row["now"], row["met"]) for row in (first, second, third, fourth)] == [
        (39_000, "yes"),
        (20, "no"),
        (39, "yes"),
        (30, "no"),
    ]
    modules, lines = (row["now"] for row in record.rows[-2:])
    assert modules > 50 and lines > 10_000


def test_comments_are_counted_without_rulers_and_directives():
    text = "# why\n# ---- part ----\nx = 1  # beside code\n    # noqa: E501\n" + '"""# in a string"""\n# ticket #3\n'
    assert house.num_comment_lines(text) == 2


def test_clauses_are_found_in_docstrings_of_every_kind():
    tree = ast.parse('"""What it is."""\nx = 1\n"""How many."""\ndef f():\n    """Whatever holds."""\n')
    openings = [words for _, words in house.docstrings(tree) if house.CLAUSE.match(words)]
    assert openings == ["What it is.", "How many."]


def test_a_small_module_of_one_importer_is_named_and_a_public_one_is_not(tmp_path, monkeypatch):
    root = tmp_path / "colo"
    root.mkdir()
    files = {
        "__init__": "from colo.a import a",
        "a": "from colo import once\nfrom colo.twice import x",
        "b": "import colo.twice\nfrom colo.large import y",
        "once": "",
        "twice": "x = 1",
        "large": "y = 1\n" * house.SMALL_LINES,
    }
    for name, text in files.items():
        (root / f"{name}.py").write_text(text)
    monkeypatch.setattr(house, "ROOT", root)
    assert house.small_modules_with_one_importer() == ["colo.a", "colo.once"]


def test_a_cycle_is_measured_and_only_functions_of_colo_count():
    calls, launched, cycled, on_clock, computed = house._measured()
    assert 1_000 < calls < 300_000
    assert launched > 0 < cycled
    assert all(seconds > 0 for seconds in (*on_clock, *computed))
