"""The public names of the package: what `__all__` promises, and that nothing else got out."""

import inspect
import subprocess
import sys
from types import ModuleType

import pytest

import colo
from colo import errors


def own_docstring(member):
    """The docstring that was written for this member: none inherited, none generated."""
    text = inspect.cleandoc(vars(member).get("__doc__") or "") if inspect.isclass(member) else inspect.getdoc(member)
    return "" if text is None or text.startswith(f"{member.__name__}(") else text


def test_all_is_sorted_and_holds_each_name_once():
    assert colo.__all__ == sorted(set(colo.__all__))


@pytest.mark.parametrize("name", colo.__all__)
def test_every_exported_name_is_documented_code_of_this_package(name):
    member = getattr(colo, name)
    assert member.__name__ == name
    assert member.__module__.split(".")[0] == "colo"
    assert len(own_docstring(member)) > 20


@pytest.mark.parametrize("name", colo.__all__)
def test_every_public_method_of_an_exported_class_is_documented(name):
    member = getattr(colo, name)
    if not inspect.isclass(member):
        return
    public = {key: value for key, value in vars(member).items() if not key.startswith("_")}
    functions = {k: v for k, v in public.items() if inspect.isfunction(v) or isinstance(v, property)}
    assert [key for key, value in functions.items() if not inspect.getdoc(value)] == []


def test_nothing_public_is_left_out_of_all():
    ours = {
        name
        for name, member in vars(colo).items()
        if not name.startswith("_")
        and not isinstance(member, ModuleType)
        and str(getattr(member, "__module__", "")).startswith("colo")
    }
    assert ours - set(colo.__all__) == set()


def test_every_error_is_exported():
    raised = {
        name for name, member in vars(errors).items() if inspect.isclass(member) and issubclass(member, Exception)
    }
    assert raised <= set(colo.__all__)


def test_names_that_are_loaded_late_are_listed_before_they_are():
    assert set(colo.__all__) <= set(dir(colo))
    with pytest.raises(AttributeError, match="module 'colo' has no attribute 'lanch'"):
        colo.lanch  # noqa: B018 - the attribute access is the test


def test_a_star_import_brings_what_all_names():
    namespace = {}
    exec("from colo import *", namespace)
    assert set(colo.__all__) == {name for name in namespace if not name.startswith("__")}


def test_importing_the_package_does_not_import_torch():
    code = "import sys, colo; sys.exit(', '.join({'torch', 'transformers', 'peft'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
