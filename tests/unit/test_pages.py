"""The pages of docs/: every Python block runs, with a tiny model on a CPU for the one it names, and the site builds."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import colo
from colo import errors
from colo.rl.loop import Problem
from colo.testing import tiny_checkpoint, tiny_config
from colo.units import MIB
from tests.trainers import digits, options, sums

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

NEEDS_MORE = {
    "import vllm\n": "tests/integration/test_vllm_pages.py runs it",
    'packed = {"quantization"': "bitsandbytes and vLLM in this process: tests/integration/test_vllm_packed.py",
    'colo.connect("http://localhost:8000': "a server: tests/integration/test_vllm_server.py",
    'colo.connect("http://localhost:30000': "a server: tests/integration/test_sglang.py",
    'colo.connect("http://localhost:23333': "a server: tests/integration/test_lmdeploy.py",
    "colo.connect(url, through=": "servers: tests/integration/test_sglang.py",
    "colo.connect(url) for url": "servers: tests/integration/test_fleet.py",
    "from unsloth import": "Unsloth: tests/integration/test_unsloth.py",
    "# generates on the model's own vLLM": "Unsloth: tests/integration/test_unsloth.py",
    "sharded by `fully_shard`": "several ranks: tests/integration/test_sharded.py",
}
"""What a block has that cannot run here, and who runs such code."""

CHANGES = {
    r'"Qwen/Qwen3-[\w.]+"': "CHECKPOINT",
    r'engine="vllm"(?=.*config=)': 'engine="torch"',
    r'engine="vllm"': 'engine="torch", config=SMALL',
    r'share\("vllm", model, optimizer\)': 'share("torch", model, optimizer, config=SMALL)',
    r'ColoGRPOConfig\("out", ([^)]*)\)': r'ColoGRPOConfig("out", **(ON_A_CPU | dict(\1)))',
    r"tools=\[double\]": "tools=[double], processing_class=CALLING",
    r"range\(20\)|\]\] \* 100": lambda found: {"r": "range(2)", "]": "]]"}[found[0][0]],
    r"max_tokens=(32|64|256|512)": "max_tokens=4",
}
"""What is another for a tiny model on a CPU: patterns, and what takes their place."""
if importlib.util.find_spec("wandb") is None:
    CHANGES['report_to="wandb", run_name="first"'] = 'report_to="none"'


def blocks(page):
    return BLOCK.findall((DOCS / page).read_text())


def runnable(page):
    return [block for block in blocks(page) if not any(mark in block for mark in NEEDS_MORE)]


class Reader:
    """Somebody who types the blocks of a page, one after the other, with a model, a reward and rows at hand."""

    def __init__(self, folder):
        checkpoint = str(tiny_checkpoint(folder / "tiny"))
        self.names = {
            "__name__": "__main__",
            "CHECKPOINT": checkpoint,
            "SMALL": colo.RuntimeConfig(kv_cache_bytes=MIB),
            "ON_A_CPU": {key: value for key, value in options(folder, max_steps=1).items() if key != "output_dir"},
            "colo": colo,
            "torch": torch,
            "reward": digits,
            "dataset": sums(),
            "held_out": sums(4),
            "loss": lambda model, completions: model(torch.tensor([completions[0].prompt_token_ids])).logits.mean(),
        }

    def type(self, block):
        for pattern, other in CHANGES.items():
            block = re.sub(pattern, other, block)
        self.close()
        if re.search(r"\brt\b", block) and not re.search(r"\brt = ", block):
            self.names["rt"] = colo.launch(self.names["CHECKPOINT"], device="cpu", config=self.names["SMALL"])
        model = AutoModelForCausalLM.from_pretrained(self.names["CHECKPOINT"])
        self.names |= {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}
        exec(compile(block, "block", "exec"), self.names)

    def close(self):
        for rt in (self.names.pop("rt", None), getattr(self.names.get("trainer"), "colo", None)):
            if rt is not None:
                with suppress(errors.PhaseError):
                    rt.close()


@pytest.fixture
def reader(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = Reader(tmp_path)
    yield found
    found.close()


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page) and page != "recipes.md"])
def test_every_block_of_a_page_runs(page, reader):
    for block in runnable(page):
        reader.type(block)
    if page == "loop.md":
        assert Path("run.html").stat().st_size > 1000
        assert {"facts", "num_steps", "median_step_s", "peak_bytes", "phases", "steps", "segment_peaks", "metrics"} <= (
            set(reader.names["figures"])
        )


class Runs(ModuleType):
    """wandb, as far as the recipe calls it, where it is not installed."""

    def init(self, **settings):
        self.settings, self.logged, self.ended = settings, [], False
        return self

    def log(self, figures):
        self.logged.append(figures)

    def finish(self):
        self.ended = True


def test_every_recipe_runs(reader, monkeypatch):
    folder = tiny_checkpoint("judge")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = tiny_config(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    runs = None if importlib.util.find_spec("wandb") else Runs("wandb")
    calling = AutoTokenizer.from_pretrained(folder)
    calling.response_template, calling.parse_response = {}, lambda ids, **_: {"role": "assistant", "content": ""}
    reader.names |= {"CALLING": calling, "judge_folder": str(folder), "judge_tokenizer": tokenizer, "step": 3}
    reader.names["batches"] = [[Problem(prompt="1+2=")]]
    recipes = blocks("recipes.md")
    for block in recipes:
        with monkeypatch.context() as patch:
            if runs is not None and "import wandb" in block:
                patch.setitem(sys.modules, "wandb", runs)
            reader.type(block)
        if runs is not None and "import wandb" in block:
            assert runs.ended and "rewards/digits" in runs.logged[0] and "peak_gib/engine.weights" in runs.logged[1]
        if "judged]" in block:
            assert 0 < reader.names["metrics"][0]["completion_tokens"] <= 4
            assert next(reader.names["judge"].parameters()).device.type == "cpu"
        if "talks = " in block:
            first, second = reader.names["turns"]
            assert second[0].prompt_token_ids[: len(first[0].prompt_token_ids)] == first[0].prompt_token_ids
    assert len(recipes) >= 14 and max(len(block.splitlines()) for block in recipes) <= 15
    assert Path("out/checkpoint-1/trainer_state.json").exists()
    for name in ("trained", "merged"):
        AutoModelForCausalLM.from_pretrained(name)


@pytest.mark.parametrize("mark", NEEDS_MORE)
def test_what_runs_elsewhere_is_on_one_page_and_names_what_there_is(mark):
    found = [block for page in PAGES for block in blocks(page) if mark in block]
    assert len(found) == 1
    for node in ast.walk(ast.parse(found[0])):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("colo."):
            function = getattr(colo, ast.unparse(node.func).removeprefix("colo."))
            inspect.signature(function).bind(*node.args, **{keyword.arg: keyword.value for keyword in node.keywords})


# ---- troubleshooting -------------------------------------------------------------------------------------------------


def messages_of_the_code():
    """Every text in colo/, with `...` where it has a value."""
    found = []
    for path in (ROOT / "colo").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


PAGE = (DOCS / "troubleshooting.md").read_text()


def sections(page):
    return dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))


def test_every_public_error_has_a_section_with_messages():
    kinds = [getattr(colo, name) for name in colo.__all__]
    kinds = {kind.__name__ for kind in kinds if inspect.isclass(kind) and issubclass(kind, Exception)}
    found = sections(PAGE)
    assert kinds == found.keys() - {"Other errors", "Logs, and Ctrl-C", "It is slow", "It hangs"}
    assert {name for name in kinds if name != "ColoError" and found[name].count("\n| `") < 2} == set()


def test_every_message_is_one_of_the_code():
    text = messages_of_the_code()
    rows = [
        re.match(r"\| `([^`]*)`", line)[1]
        for title, section in sections(PAGE).items()
        for line in section.splitlines()
        if line.startswith("| `") and title != "Other errors"
    ]
    assert len(rows) > 25
    assert [row for row in rows if row.removesuffix(": ...").removesuffix("...").strip() not in text] == []


# ---- API and site ----------------------------------------------------------------------------------------------------


def test_the_api_page_has_every_public_name_and_no_other():
    named = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    for name in named:
        module, _, member = name.rpartition(".")
        assert inspect.getdoc(getattr(importlib.import_module(module), member)), name
    assert {name.removeprefix("colo.") for name in named if name.count(".") == 1} == set(colo.__all__)


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in PAGES if f": {page}\n" not in text] == []


@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install 'colo-rl[docs]'"
)
def test_the_site_builds_without_a_warning_and_asks_nothing_of_the_network(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    page = (tmp_path / "api.html").read_text()
    assert all(f'id="colo.{name}"' in page for name in colo.__all__)
    fetched = [
        address
        for path in tmp_path.rglob("*.html")
        for address in re.findall(r'<(?:script|link|img)\b[^>]*?(?:src|href)="(https?:[^"]+)"', path.read_text())
    ]
    assert fetched == []
