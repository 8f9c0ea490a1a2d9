"""What scripts hear that vLLM's process would run again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALL = "from colo.engines.vllm.client.start import check_main_guard\n"


def run(tmp_path, script, method="spawn"):
    (tmp_path / "train.py").write_text(script)
    env = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_WORKER_MULTIPROC_METHOD": method}
    return subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=1200
    )


@pytest.mark.parametrize(
    "script",
    [
        CALL + "check_main_guard()",
        CALL + "def main():\n    check_main_guard()\n\nmain()",
        CALL + "if __name__ == '__main__':\n    print()\n\ncheck_main_guard()",
    ],
)
def test_a_script_without_a_guard_hears_one_line_that_says_what_to_do(tmp_path, script):
    done = run(tmp_path, script)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    line = len(script.splitlines())
    assert last.startswith(f"RuntimeError: train.py, line {line}, starts vLLM in a process of its own")
    assert 'if __name__ == "__main__":' in last


@pytest.mark.parametrize(
    ("script", "method"),
    [
        (CALL + "def main():\n    check_main_guard()\n\nif __name__ == '__main__':\n    main()", "spawn"),
        (CALL + "import threading\nt = threading.Thread(target=check_main_guard)\nt.start()\nt.join()", "spawn"),
    ],
)
def test_scripts_with_a_guard_go_on(tmp_path, script, method):
    done = run(tmp_path, script, method)
    assert done.returncode == 0, done.stderr
