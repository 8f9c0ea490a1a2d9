"""The examples of docs/extending: what somebody writes who adds an engine, a source, a transport or a model."""

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
KINDS = ("engine", "model", "source", "transport")


def run(kind):
    """What the example's `main` returns."""
    return runpy.run_path(str(ROOT / "examples" / "extending" / f"{kind}.py"))["main"]()


def test_a_transport_of_ones_own_carries_every_version():
    sample, publications = run("transport")
    assert [one.version for one in publications] == [0, 1]
    assert {one.transport for one in publications} == {"numpy"}
    assert all(one.num_bytes > 40_000 for one in publications)
    assert sample.weights_version == 1


def test_a_transport_that_loses_a_byte_is_noticed(monkeypatch):
    example = runpy.run_path(str(ROOT / "examples" / "extending" / "transport.py"))
    copy = example["torch"].from_numpy

    def lossy(array):
        array.flat[0] += 1
        return copy(array)

    monkeypatch.setattr(torch, "from_numpy", lossy)
    with pytest.raises(example["TransferError"], match=r"\d+ weights differ after the transfer"):
        example["main"]()


def test_a_source_of_ones_own_brings_weights_of_other_names():
    sample, own = run("source")
    assert sample.weights_version == 2
    assert torch.allclose(torch.tensor(sample.logprobs), own, atol=1e-5)


def test_an_architecture_of_ones_own_shares_its_weights_with_the_embedded_engine():
    sample, own, transport, scale = run("model")
    assert transport == "shared"
    assert scale != 1  # trained along
    assert torch.allclose(torch.tensor(sample.logprobs), own, atol=1e-5)


def test_an_engine_of_ones_own_learns_on_one_copy_of_the_weights():
    rewards, bytes_sent, transport = run("engine")
    assert (bytes_sent, transport) == (0, "shared")
    assert rewards[-1] > rewards[0] + 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_shows_the_example_as_it_is(kind):
    page = (ROOT / "docs" / "extending" / f"{kind}.md").read_text()
    shown = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    code = (ROOT / "examples" / "extending" / f"{kind}.py").read_text()
    assert shown in code
    assert len(shown.splitlines()) >= 20
