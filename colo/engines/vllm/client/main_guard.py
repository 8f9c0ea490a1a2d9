"""Scripts without a `__main__` guard, named before vLLM's process would run them a second time."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from types import FrameType

import torch


def check_main_guard() -> None:
    """Raise `RuntimeError` when vLLM's process would import a main script that starts vLLM as it is imported.

    Such processes are spawned once CUDA is in use, and forked before; a fork imports nothing.
    """
    is_spawned = torch.cuda.is_initialized() or os.environ.get("VLLM_WORKER_MULTIPROCESSING_METHOD") == "spawn"
    line = _line_of_main() if is_spawned else None
    if line is None:
        return
    path = Path(str(sys.modules["__main__"].__file__))
    try:
        statements = ast.parse(path.read_text()).body
    except (OSError, SyntaxError, UnicodeDecodeError):  # a zip file or the like
        return
    if not any(
        _is_guard(statement) and statement.lineno <= line <= (statement.end_lineno or 0) for statement in statements
    ):
        raise RuntimeError(
            f"{path.name}, line {line}, starts vLLM in a process of its own, which imports {path.name} again and would "
            'start another: put what starts it under `if __name__ == "__main__":`, or pass '
            'engine_options={"own_process": False}'
        )


def _line_of_main() -> int | None:
    """The line of the main script that is being run; `None` in a notebook, a shell, a thread or a console script."""
    main = sys.modules["__main__"]
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is main.__dict__:
            return frame.f_lineno if getattr(main, "__file__", None) else None
        frame = frame.f_back
    return None


def _is_guard(statement: ast.stmt) -> bool:
    """Whether a statement is `if __name__ == ...`."""
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
    )
