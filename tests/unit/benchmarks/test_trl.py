import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks import trl
from benchmarks.__main__ import app
from benchmarks.common import Record

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


def test_a_side_that_lacks_memory_is_a_row_and_the_others_go_on(tmp_path, monkeypatch):
    def measured(name, folder, options):
        if name == FLAG:
            raise torch.OutOfMemoryError("no memory\nand where it went")
        return {"way": name, "peak_bytes": 8}

    monkeypatch.setattr(trl, "SIDES", {FLAG: {"stock": False}, "other": {"stock": False}})
    monkeypatch.setattr(trl, "_measured", measured)
    monkeypatch.setattr(trl, "_checkpoint", lambda *_: tmp_path)
    monkeypatch.setattr(trl, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(workers))
    record = Record("trl", "command")
    trl.run(record, shape="8b", device="cpu", sides="", card=None, context=None, tokens=8)
    assert record.rows == [{"way": FLAG, "failed": "no memory"}, {"way": "other", "peak_bytes": 8}]
