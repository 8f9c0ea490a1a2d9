import sys

import pytest
from traces import PARTIAL, run

from colo.errors import Unsupported
from colo.report import write_png


@pytest.mark.parametrize("make", PARTIAL)
def test_partial_traces_are_drawn(tmp_path, make):
    write_png(make(), tmp_path / "run.png")
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_png_of_a_long_run_is_drawn(tmp_path):
    write_png(run(400), tmp_path / "run.png", title="long", dpi=50)
    width = int.from_bytes((tmp_path / "run.png").read_bytes()[16:20], "big")
    assert width == 500


def test_png_leaves_pyplot_alone(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    write_png(run(), tmp_path / "run.png")
    assert "matplotlib.pyplot" not in sys.modules


def test_png_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unsupported, match=r"pip install 'colo-rl\[plot\]'"):
        write_png(run(), tmp_path / "run.png")
    assert list(tmp_path.iterdir()) == []
