"""Memory of NCCL's communicators, given back while an engine samples. Written by reading; not run on a GPU.

Torch has `suspend`, `resume` and `memory_stats` of a backend from 2.13 on, and NCCL what they call from 2.29.7 on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from colo.errors import Unsupported


class Communicators:
    """The NCCL communicators of some process groups. While they are suspended nothing can be sent through them."""

    def __init__(self, groups: Iterable[Any], device: torch.device) -> None:
        """Find those for `device`; a group of another backend, such as gloo, has none.

        Raises: `Unsupported` where torch or NCCL is too old.
        """
        self._backends = list(_nccl_backends(groups, device))
        self._suspended: list[Any] = []
        for backend in self._backends:
            try:
                # asked only to find out now, and not in the first rollout, if torch and NCCL can do this at all
                backend.memory_stats()
            except (AttributeError, RuntimeError) as error:
                raise Unsupported(
                    f"suspend_nccl=True needs torch 2.13 or later with NCCL 2.29.7 or later, and this is torch "
                    f"{torch.__version__} ({error}): leave it out"
                ) from error

    def suspend(self) -> None:
        """Give their memory back. Idempotent. Ordering: no operation of theirs is queued or running."""
        # the suspended ones are the first of the list, so that a call after one that failed goes on where that stopped
        for backend in self._backends[len(self._suspended) :]:
            backend.suspend()
            self._suspended.append(backend)

    def resume(self) -> None:
        """Take it again. Idempotent."""
        while self._suspended:
            # taken off only once it is awake: one that failed is tried again
            self._suspended[-1].resume()
            self._suspended.pop()


def megatron_groups() -> list[Any]:
    """The process groups of Megatron's parallelism, without importing it."""
    from torch import distributed

    module = sys.modules.get("megatron.core.parallel_state")
    return [value for value in vars(module).values() if isinstance(value, distributed.ProcessGroup)] if module else []


def _nccl_backends(groups: Iterable[Any], device: torch.device) -> Iterator[Any]:
    # groups may share a backend, which is suspended once
    seen: set[int] = set()
    for group in groups:
        with suppress(RuntimeError):  # which has no backend for such a device
            backend = group._get_backend(device)
            if backend.name() == "nccl" and id(backend) not in seen:
                seen.add(id(backend))
                yield backend
