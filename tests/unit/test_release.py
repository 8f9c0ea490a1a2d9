"""What a release, the workflows and the forms for issues say is there."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FILES = sorted([*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml"])


def read(name):
    return yaml.safe_load((ROOT / name).read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_is_yaml_and_the_scripts_that_it_runs_are_there(path):
    text = path.read_text()
    assert isinstance(yaml.safe_load(text), dict)
    named = re.findall(r"(?<![\w./])(?:\.ci|tests|docs)/[\w./]+", text)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_a_release_tries_what_it_publishes():
    jobs = read(".github/workflows/release.yml")["jobs"]
    assert ".ci/smoke dist" in [step.get("run") for step in jobs["build"]["steps"]]
    assert jobs["publish"]["needs"] == "build"


def test_every_night_asks_for_the_contract():
    workflow = read(".github/workflows/contract.yml")
    assert "schedule" in workflow[True]  # YAML's `on`
    assert workflow["jobs"]["newest"]["steps"][-1]["run"] == "colo doctor --contract"


def test_the_workflow_of_the_site_installs_what_the_extra_has():
    steps = read(".github/workflows/docs.yml")["jobs"]["build"]["steps"]
    (install,) = [step["run"] for step in steps if step.get("run", "").startswith("pip install")]
    assert re.findall(r'"([^"]+)"', install) == EXTRAS["docs"]


def test_the_form_for_errors_asks_for_the_doctor_and_the_report():
    fields = {field.get("id"): field for field in read(".github/ISSUE_TEMPLATE/bug.yml")["body"]}
    assert "colo doctor --json" in fields["doctor"]["attributes"]["label"]
    assert "to_json" in fields["report"]["attributes"]["description"]


def test_the_changelog_has_the_version_and_a_place_for_what_comes():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", PROJECT["version"]]


def required(*stated):
    """Names of the packages that requirements bring, extras of the project among them."""
    found = set()
    for each in stated:
        name, extras = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", each).groups()
        own = name == PROJECT["name"]
        found |= required(*(r for e in extras.split(",") for r in EXTRAS[e])) if own else {name}
    return found


def test_the_memory_runtime_brings_no_library_of_models():
    assert required(*PROJECT["dependencies"]) == {"nvidia-ml-py", "psutil", "torch", "torch-memory-saver"}


def test_full_fine_tuning_needs_neither_peft_nor_a_documentation_tool():
    assert required(*EXTRAS["launch"]).isdisjoint({"peft", "trl", "vllm", "bitsandbytes", "matplotlib"})
    assert all("peft" in required(*EXTRAS[name]) for name in ("lora", "trl", "qlora", "dev"))
    runs = ("vllm", "vllm-cpu", "lora", "trl", "qlora", "megatron", "dev")
    assert all("transformers" in required(*EXTRAS[name]) for name in runs)
