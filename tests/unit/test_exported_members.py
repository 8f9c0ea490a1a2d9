"""The public names of the package: what `__all__` promises, and that nothing else got out."""

import importlib.metadata
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path
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


@pytest.fixture
def trl_module(tmp_path, monkeypatch):
    """Puts a file in the place of colo/trl.py."""

    def write(text):
        (tmp_path / "trl.py").write_text(text)
        monkeypatch.setattr(colo, "__path__", [str(tmp_path), *colo.__path__])
        monkeypatch.delitem(sys.modules, "colo.trl", raising=False)

    had = vars(colo).pop("trl", None)
    yield write
    vars(colo).pop("trl", None)
    sys.modules.pop("colo.trl", None)
    if had is not None:
        colo.trl = sys.modules["colo.trl"] = had


def test_modules_are_attributes_without_an_import_of_their_own():
    code = (
        "import colo\n"
        "assert colo.optim.MasterWeights.__module__.startswith('colo.')\n"
        "assert colo.rl.__name__ == 'colo.rl'\n"
        "assert {'optim', 'rl', 'trl', '__version__'} <= set(dir(colo))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_colo_trl_is_loaded_when_it_is_used(trl_module):
    trl_module("attach = 'yes'")
    assert colo.trl.attach == "yes"


def test_without_trl_colo_trl_says_what_to_install(trl_module, monkeypatch):
    trl_module("import trl")
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(colo.Unsupported, match=r"needs trl, which is not installed: pip install 'colo-rl\[trl\]'"):
        colo.trl  # noqa: B018 - the attribute access is the test


def test_what_else_colo_trl_lacks_is_named_as_it_is(trl_module):
    trl_module("import no_such_module")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        colo.trl  # noqa: B018 - the attribute access is the test


def test_the_version_is_that_of_the_distribution(monkeypatch):
    project = tomllib.loads((Path(colo.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["name"] == "colo-rl"
    assert colo.__version__ == project["version"]

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert colo.__version__ == "0+unknown"


def test_a_star_import_brings_what_all_names():
    namespace = {}
    exec("from colo import *", namespace)
    assert set(colo.__all__) == {name for name in namespace if not name.startswith("__")}


def test_importing_the_package_does_not_import_torch():
    code = "import sys, colo; sys.exit(', '.join({'torch', 'transformers', 'peft'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_package_of_the_name_is_noticed_at_import(tmp_path):
    info = tmp_path / "colo-1.1.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: colo\nVersion: 1.1.1\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import colo"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "another project, is installed beside colo-rl" in done.stderr
    assert "pip uninstall colo" in done.stderr


BLOCKED = """
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
import colo
"""


LIBRARIES = ("accelerate", "click", "httpx", "packaging", "peft", "rich", "safetensors", "transformers", "trl", "vllm")


def printed_without(*packages, code):
    """What code prints where some packages are not there."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(packages) + code], capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_the_memory_runtime_needs_torch_alone():
    code = """
import colo.optim
for package in ("colo.memory", "colo.phases", "colo.trainer"):
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        print(importlib.import_module(module.name).__name__)
"""
    root = Path(colo.__file__).parent
    paths = [path for folder in ("memory", "phases", "trainer") for path in (root / folder).glob("*.py")]
    modules = {f"colo.{path.parent.name}.{path.stem}" for path in paths if path.stem != "__init__"}
    assert set(printed_without(*LIBRARIES, code=code)) == modules


def test_an_engine_of_ones_own_is_shared_and_trained_with_torch_alone():
    code = """
import runpy
runpy.run_path("examples/extending/engine.py", run_name="__main__")
"""
    printed = printed_without(*LIBRARIES, code=code)
    assert float(printed[printed.index("end;") - 3]) > 0.8 and printed[-3:] == ["0", "bytes", "sent"]


@pytest.mark.parametrize(
    "code", ["colo.launch", "colo.connect", "importlib.import_module('colo.runtime').Runtime.report(None)"]
)
def test_what_needs_a_library_names_the_extra_that_has_it(code):
    printed = printed_without(*LIBRARIES, code=f"try:\n    {code}\nexcept colo.Unsupported as error:\n    print(error)")
    assert printed[-3:] == ["pip", "install", "'colo-rl[launch]'"]


def test_the_command_line_names_the_extra_that_it_needs():
    code = BLOCKED.format(LIBRARIES) + "from colo.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().endswith("which is not installed: pip install 'colo-rl[launch]'")


def test_a_runtime_needs_none_of_what_adapters_servers_and_the_command_line_do():
    code = """
from transformers import Qwen3Config
config = Qwen3Config(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=16, vocab_size=64, eos_token_id=None)
with colo.launch(config, engine="torch", device="cpu", config=colo.RuntimeConfig(kv_cache_bytes="1MiB")) as rt:
    print(len(rt.generate([[1, 2]], max_tokens=2)[0].token_ids), rt.transport.name)
"""
    assert printed_without("click", "httpx", "peft", "trl", "vllm", code=code) == ["2", "shared"]
