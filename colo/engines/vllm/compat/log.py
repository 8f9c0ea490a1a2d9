"""vLLM's own log, which goes to a file: hundreds of lines a run, in which a user's own would be lost."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from colo import log
from colo.engines.vllm.compat.process import variable

CONFIG = "VLLM_LOGGING_CONFIG_PATH"
FORMAT = "%(levelname)s %(asctime)s [%(processName)s %(process)d] [%(fileinfo)s:%(lineno)d] %(message)s"
ERROR = re.compile(r"(?:ERROR|CRITICAL) \S+ \S+ \[.*?\] \[.*?\] ?(.*\S)")

EXCEPTION = re.compile(r"[\w.]+(?:Error|Exception|Exit|Interrupt|Unsupported): ")
"""How the last line of a traceback begins; what follows it, such as that other processes end, says less."""


@contextmanager
def logs_to_file() -> Iterator[None]:
    """Have vLLM, where it is imported meanwhile, in this process or in one that is started, log to the file.

    By its documented variable, which is as before afterwards. Where the user has set vLLM's logging up, or COLO_LOG is
    `debug`, nothing changes; a vLLM that this process has imported before goes on as it did.

    vLLM: Every version. Stays.
    """
    if not _is_ours():
        yield
        return
    with variable(CONFIG, str(_write_config())):
        yield


@contextmanager
def told_start(*, own_process: bool) -> Iterator[None]:
    """Say that vLLM is being started, where its log is, and how long it has taken; an error names both of the log's.

    vLLM: Every version. Stays.
    """
    path = log_file() if _is_ours() and (own_process or _logs_here()) else None
    begins_at = path.stat().st_size if path is not None and path.exists() else 0
    log.logger.info("starting vLLM (about a minute)%s", f"; its log: {path}" if path is not None else "")
    start_s = time.monotonic()
    try:
        with log.waiting("starting vLLM (about a minute)"), logs_to_file():
            yield
    except Exception as error:
        if path is not None and path.exists():
            last = last_error(path, begins_at)
            error.add_note(f"vLLM's log is {path}" + (f"; its last error: {last}" if last else ""))
        raise
    log.logger.info("vLLM has started, in %.0f s", time.monotonic() - start_s)


@cache
def log_file() -> Path:
    """The file that vLLM's log goes to, the same for all engines of this process.

    vLLM: Every version. Stays.
    """
    return Path(tempfile.mkdtemp(prefix="colo-log-")) / "vllm.log"


def last_error(path: Path, begins_at: int = 0) -> str | None:
    """The last exception in the log, from a byte on, or else the last line of an error.

    vLLM: Every version. Stays.
    """
    with path.open("rb") as file:
        file.seek(begins_at)
        lines = file.read().decode(errors="replace").splitlines()
    errors = [match[1] for line in reversed(lines) if (match := ERROR.match(line))]
    return next(filter(EXCEPTION.match, errors), errors[0] if errors else None)


def _is_ours() -> bool:
    """Whether nobody else has said where vLLM's log goes."""
    others = os.environ.get(CONFIG) or os.environ.get("VLLM_CONFIGURE_LOGGING") == "0"
    return not others and not log.shows_engines()


def _logs_here() -> bool:
    """Whether vLLM in this process logs to the file, or will when it is imported."""
    handlers = logging.getLogger("vllm").handlers
    to_file = any(getattr(handler, "baseFilename", None) == str(log_file()) for handler in handlers)
    return to_file or "vllm.logger" not in sys.modules


def _write_config() -> Path:
    level = os.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    handler = {"class": "logging.FileHandler", "filename": str(log_file()), "formatter": "vllm", "level": level}
    formatter = {"class": "vllm.logging_utils.NewLineFormatter", "datefmt": "%m-%d %H:%M:%S", "format": FORMAT}
    config: dict[str, Any] = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"vllm": formatter},
        "handlers": {"vllm": handler | {"encoding": "utf-8"}},
        "loggers": {"vllm": {"handlers": ["vllm"], "level": level, "propagate": False}},
    }
    path = log_file().with_name("logging.json")
    path.write_text(json.dumps(config, indent=1))
    return path
