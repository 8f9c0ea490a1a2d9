"""Packages built for another torch are recognized, and the line that mends it is printed."""

import sys

import pytest

import colo
from colo import errors
from tests.models import tiny_qwen3

BROKEN = "raise RuntimeError('operator torchvision::nms does not exist\\nand more')\n"


def load(name):
    if name == "torchvision":
        raise RuntimeError("operator torchvision::nms does not exist\nand more")


@pytest.fixture
def broken_torchvision(tmp_path, monkeypatch):
    """A torchvision of another torch, installed."""
    (tmp_path / "torchvision.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)


def test_only_what_is_installed_and_cannot_be_imported_is_a_misfit():
    assert errors.misfits(load, lambda name: True) == {
        "torchvision": "RuntimeError: operator torchvision::nms does not exist"
    }
    assert errors.misfits(load, lambda name: name == "torchaudio") == {}


def test_an_error_that_torchvision_has_caused_names_what_mends_it(broken_torchvision):
    with pytest.raises(ImportError, match="Could not import module") as caught, errors.named_misfits():
        try:
            import torchvision  # noqa: F401
        except RuntimeError as error:
            raise ImportError("Could not import module 'Qwen3ForCausalLM'") from error
    (note,) = caught.value.__notes__
    assert note.startswith("torchvision does not fit the installed torch")
    assert note.endswith("pip uninstall -y torchvision torchaudio torchcodec")


def test_it_is_said_once(broken_torchvision):
    with pytest.raises(RuntimeError) as caught, errors.named_misfits(), errors.named_misfits():
        import torchvision  # noqa: F401
    assert len(caught.value.__notes__) == 1


def test_other_errors_are_left_as_they_are(broken_torchvision):
    with pytest.raises(KeyError) as caught, errors.named_misfits():
        raise KeyError("no model")
    assert not hasattr(caught.value, "__notes__")


def test_an_error_that_only_mentions_a_package_that_fits_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(errors, "misfits", dict)
    with pytest.raises(ValueError) as caught, errors.named_misfits():
        raise ValueError("torchvision is fine")
    assert not hasattr(caught.value, "__notes__")


def test_launch_names_what_mends_it(broken_torchvision, monkeypatch):
    from colo.assembly import launch

    def start(request, undo):
        import torchvision  # noqa: F401

    monkeypatch.setattr(launch, "start_torch", start)
    with pytest.raises(RuntimeError, match="nms does not exist") as caught:
        colo.launch(tiny_qwen3(), device="cpu")
    assert errors.MENDING in caught.value.__notes__[0]
