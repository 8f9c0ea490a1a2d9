"""What `rt.report()` and `rt.plot()` give for a real runtime, small enough to start for each test."""

import json

import pytest
import torch
from rich.console import Console

import colo
from colo.config import Offload, RuntimeConfig
from colo.phases.trace import Trace
from colo.report import Report
from colo.trainer.master_weights import MasterWeights
from colo.units import MIB
from tests.models import tiny_qwen3


@pytest.fixture
def launch():
    runtimes = []

    def start(**options):
        settings = {"kv_cache_bytes": MIB} | options.pop("config", {})
        options = {"optimizer": torch.optim.AdamW} | options
        runtimes.append(colo.launch(tiny_qwen3(), device="cpu", config=RuntimeConfig(**settings), **options))
        return runtimes[-1]

    yield start
    for rt in runtimes:
        rt.close()


def step(rt, num_steps=1):
    for _ in range(num_steps):
        with rt.rollout():
            rt.generate([[1, 2, 3]], max_tokens=2)
        with rt.train():
            ids = torch.tensor([[1, 2, 3, 4]])
            rt.model(input_ids=ids, labels=ids).loss.backward()
            rt.optimizer.step()
            rt.optimizer.zero_grad()


def test_the_facts_say_what_was_chosen_and_why(launch):
    rt = launch()
    step(rt, 2)
    facts = rt.report().facts
    assert facts["engine"] == "torch on cpu: transformers in this process"
    assert facts["weights"] == f"shared: {rt.transport.reason}"
    assert facts["version"].startswith("2, 2 publications") and facts["version"].endswith("0 B copied")
    assert facts["offload"] == "auto: no state of the trainer had to leave the device"
    assert "rollout" in facts["peak"] and "train" in facts["peak"]


def test_what_left_the_device_is_named(launch):
    rt = launch(config={"offload": Offload.ALWAYS})
    step(rt, 2)
    assert rt.report().facts["offload"] == "always: trainer.optimizer left the device for rollouts"


def test_figures_that_only_some_runs_have_appear_with_them(launch):
    rt = launch(dtype=torch.bfloat16, optimizer=MasterWeights(torch.optim.AdamW))
    assert not {"changed", "mismatch"} & set(rt.report().facts)
    step(rt)
    rt.log(mismatch=0.01)
    facts = rt.report().facts
    assert facts["changed"].endswith("of the 16-bit weights in the last step")
    assert facts["mismatch"].startswith("0.01 mean |log p(engine) - log p(trainer)|")


def test_a_printed_report_has_facts_phases_memory_and_metrics(launch):
    rt = launch()
    step(rt)
    rt.log(reward=0.5)
    text = str(rt.report())
    for part in ("torch on cpu: transformers in this process", "rollout", "train", "engine.kv_cache", "reward"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(rt.report())
    assert capture.get() == text


def test_a_report_is_plain_data_too(launch):
    rt = launch()
    step(rt)
    rt.log(reward=0.5)
    data = json.loads(json.dumps(rt.report().to_json()))
    assert data["facts"] == dict(rt.report().facts)
    assert data["metrics"]["reward"]["last"] == 0.5


def test_switching_and_evaluations_have_the_peak_that_was_measured_in_them(launch):
    rt = launch()
    step(rt)
    with rt.rollout():
        rt.generate([[1, 2, 3]], max_tokens=2)
    with rt.train(), torch.no_grad():
        rt.model(input_ids=torch.tensor([[1, 2, 3, 4]]))
    data = rt.report().to_json()
    (held,) = {sample.total_bytes for sample in rt.trace.samples[-3:]}  # which have no gradients
    assert data["phases"]["evaluation"]["peak_bytes"] == held
    assert held <= data["phases"]["switch"]["peak_bytes"] < data["peak_bytes"] == data["phases"]["train"]["peak_bytes"]


def test_a_report_before_the_first_step_and_after_close_is_no_error(launch):
    rt = launch()
    assert "torch on cpu: transformers in this process" in str(rt.report())
    step(rt)
    before = rt.report().facts["version"]
    rt.close()
    assert rt.report().facts["version"] == before


def test_a_report_of_an_empty_trace_prints_its_facts():
    assert "engine  torch" in str(Report(facts={"engine": "torch"}, trace=Trace()))


def test_facts_are_printed_as_they_are_and_not_as_markup():
    assert "[bold]not markup[/bold]" in str(Report(facts={"weights": "[bold]not markup[/bold]"}, trace=Trace()))


def test_the_picture_is_one_html_file_with_the_facts(launch, tmp_path):
    rt = launch()
    step(rt)
    path = rt.plot(tmp_path / "run.html", title="one & only")
    text = path.read_text()
    assert text.lower().startswith("<!doctype html>")
    assert "one &amp; only" in text and "torch on cpu: transformers in this process" in text
    assert "http://" not in text.replace("http://www.w3.org/", "") and "<script src" not in text


def test_the_picture_can_be_a_png(launch, tmp_path):
    rt = launch()
    step(rt)
    assert rt.plot(tmp_path / "run.png").read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize("name", ["run.pdf", "run", "run.htm"])
def test_another_kind_of_picture_is_refused(launch, tmp_path, name):
    path = tmp_path / name
    with pytest.raises(ValueError, match=r"\.html or \.png"):
        launch().plot(path)
    assert not path.exists()


def test_a_notebook_shows_the_tables_of_the_terminal_with_their_signs_escaped():
    report = Report(facts={"engine": "torch <here>"}, trace=Trace())
    shown = report._repr_html_()
    assert shown.startswith("<pre ") and "torch &lt;here&gt;" in shown
