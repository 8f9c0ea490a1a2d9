"""The notebooks: what is stored in them is whole and clean, and their code still runs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
MACHINE_PATH = re.compile(r"(?<![\w.:/])/(home|root|tmp|opt|usr|work|mnt|Users|content|var)/[\w.]")
ADDRESS = re.compile(r"at 0x[0-9a-f]{6,}")

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return json.loads(path.read_text())


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def output_text(cell):
    """All text that a cell has put out, in any format."""
    parts = []
    for output in cell["outputs"]:
        parts += [output.get("text", ""), *output.get("data", {}).values()]
    return "\n".join("".join(part) for part in parts)


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["01_grpo_full", "02_grpo_lora"]


@every_notebook
def test_the_format_is_whole(path):
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) >= (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert {cell["cell_type"] for cell in notebook["cells"]} == {"markdown", "code"}
    assert notebook["cells"][0]["cell_type"] == "markdown"
    assert path.stat().st_size < 200_000


@every_notebook
def test_every_code_cell_has_been_executed_in_order_and_without_errors(path):
    cells = code_cells(read(path))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert not any(output.get("name") == "stderr" for output in outputs)


@every_notebook
def test_nothing_tells_where_it_was_executed(path):
    notebook = read(path)
    assert set(notebook["metadata"]) <= {"kernelspec", "language_info"}
    assert not any(cell["metadata"] for cell in notebook["cells"])
    for text in ("".join(cell["source"]) + output_text(cell) for cell in code_cells(notebook)):
        assert MACHINE_PATH.search(text) is None
        assert ADDRESS.search(text) is None


@every_notebook
def test_the_report_and_the_picture_are_shown(path):
    cells = code_cells(read(path))
    (report,) = [cell for cell in cells if "rt.report()" in "".join(cell["source"])]
    assert "0 B copied" in output_text(report)
    assert "engine.kv_cache" in output_text(report)
    (picture,) = [cell for cell in cells if "rt.plot(" in "".join(cell["source"])]
    (output,) = picture["outputs"]
    assert "srcdoc" in "".join(output["data"]["text/html"])


@pytest.mark.slow
@every_notebook
def test_the_code_runs(path, tmp_path):
    lines = [line for cell in code_cells(read(path)) for line in [*"".join(cell["source"]).splitlines(), ""]]
    code = "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!")))
    done = subprocess.run(
        [sys.executable, "-c", f"exec({code!r})"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    rewards = [float(value) for value in re.findall(r"^step +\d+  reward (\d\.\d\d)$", done.stdout, re.MULTILINE)]
    assert rewards[-1] >= rewards[0] + 0.1
    assert len(list(tmp_path.glob("*.html"))) == 1
