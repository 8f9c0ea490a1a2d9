import gc

import pytest
import torch

from benchmarks import trl
from benchmarks.__main__ import app

pytest.importorskip("trl", reason="TRL is not installed: pip install 'colo-rl[trl]'")
FLAG = next(iter(trl.SIDES))


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "longest"), [(10**6, 256), (100, 91), (1, 0)])
def test_the_longest_completion_is_the_last_that_a_whole_step_took(tmp_path, monkeypatch, limit, longest):
    def fails(completions, completion_ids, **_):
        if len(completion_ids[0]) > limit:
            raise torch.OutOfMemoryError("no memory\nand where it went")
        return [float(len(ids)) for ids in completion_ids]

    monkeypatch.setattr(trl, "low_tokens", fails)
    words = ["--device", "cpu", "--engine", "torch", "--batch", "1", "--accumulation", "2", "--kv-cache", "64MiB"]
    options = app.commands["trl"].make_context("trl", [*words, "--context", "256"]).params
    row = trl._measured(FLAG, str(trl._checkpoint("tiny", tmp_path / "model", 512)), options)
    trl._to_close.pop().close()
    gc.collect()
    assert (row["context"], row["ended"]) == (longest, None if limit > 256 else "no memory")
