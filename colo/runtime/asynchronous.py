"""Rollouts beside training, on engines elsewhere: they sample on while the trainer works and while weights change.

    with rt.async_rollout(max_age=4) as rollout:
        rollout.put(prompts, n=8, max_tokens=512)
        for _ in range(steps):
            done = rollout.take(8)            # the present weights are published first
            rollout.put(more, n=8, max_tokens=512)
            with rt.train():
                ...

A thread asks the engine for rounds of tokens (colo/runtime/carried.py). A publication comes between two rounds: each
token is of one version, completions go on from the next one, and `Completion.spans` says which is which.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from colo.engine import Completion, Engine, check_number, plain
from colo.engines.text import Prompts, encode_prompts
from colo.errors import PhaseError, StaleWeights, Unsupported
from colo.log import logger
from colo.runtime.carried import Carried, check_until, listed_keys, options_of
from colo.runtime.turns import Turns
from colo.units import format_bytes
from colo.weights.publish import Publisher


class AsyncRollout:
    """Sampling in the background: a block, which `rt.async_rollout` makes. One thread may call it.

    What is under way when the block ends is in `rt.carried`, and goes on in the next block, or in a call with `until`.
    """

    def __init__(
        self,
        engine: Engine,
        turns: Turns,
        publisher: Publisher,
        carried: Carried,
        *,
        max_age: int | None,
        tokenizer: Any,
        finish: Callable[[list[Completion], Any], list[Completion]],
    ) -> None:
        """`finish(completions, options)` makes of what has ended what the loop gets.

        Raises: `Unsupported` for an engine that has memory of the trainer's device; `ValueError` for a `max_age`.
        """
        max_age = plain(max_age)
        check_until(1, max_age, None)
        here = [segment for segment in engine.segments if segment.size_bytes]
        if here:
            raise Unsupported(
                f"the {engine.name} engine has {format_bytes(sum(s.size_bytes for s in here))} of the trainer's device "
                f"({', '.join(s.name for s in here)}), and the two take turns: use rt.rollout(), or connect to servers "
                "elsewhere with through=..."
            )
        self._engine, self._turns, self._publisher, self._carried = engine, turns, publisher, carried
        self._max_age, self._tokenizer, self._finish = max_age, tokenizer, finish
        self._changed = threading.Condition()
        self.is_over = False
        self._is_sampling = False
        self._has_weights = True
        self._is_held = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    # ---- what a loop calls -------------------------------------------------------------------------------------------

    def put(self, prompts: Prompts, *, keys: Iterable[Any] | None = None, **sampling: Any) -> None:
        """Add prompts to sample completions for; see `Runtime.generate` with `until` for prompts and options.

        Waits for the end of the round that is under way. Raises: as that; `PhaseError` outside the block.
        """
        self._turns.require_beside(self)
        options, listed = options_of(self._engine, None, sampling), listed_keys(keys)
        with self._held():
            self._carried.add(encode_prompts(prompts, self._tokenizer), options, engine=self._engine, keys=listed)

    def take(self, count: int = 1) -> list[Completion]:
        """Wait until so many prompts have all of their completions, and return those, in the order of prompts.

        The present weights are published first, unless the engine has them: a collective of a trainer's ranks.
        Raises: `ValueError` for less than one, or when fewer prompts are under way; `PhaseError` inside `train()` or
        outside the block; what a publication raises, and what sampling has raised since the last call (`StaleWeights`
        only where another publication does not heal it): completions are under way still, and sampling goes on.
        """
        self._turns.require_beside(self)
        count = plain(count)
        check_number("count", count, int, "a whole number of prompts")
        if count < 1:
            raise ValueError(f"count must be at least 1, but is {count}")
        if count > self._carried.num_groups:
            raise ValueError(
                f"take({count}) with {self._carried.num_groups} prompts under way would wait for ever: put() more first"
            )
        # other ranks, who publish together, would not publish again
        for _ in range(2 if self._turns.is_alone else 1):
            error = self._publish()
            # which the publication has healed, such as of a fleet that has taken an engine in
            if error is None or isinstance(error, StaleWeights):
                error = self._wait_for(count)
            if not isinstance(error, StaleWeights):
                break
            logger.warning("sampling has stopped: %s", error)
        if error is not None:
            raise error
        with self._held():
            completions = self._carried.take(count)
        return self._finish(completions, self._engine.sampling_params(**self._carried.options_last_taken))

    @property
    def num_under_way(self) -> int:
        """Number of prompts that have been put and not been taken."""
        return self._carried.num_groups

    def __enter__(self) -> AsyncRollout:
        if self.is_over or self._thread is not None:
            raise PhaseError("this async_rollout() has begun before: call rt.async_rollout() again")
        try:
            self._turns.begin_beside(self)
            self._thread = threading.Thread(target=self._run, name="colo-rollout", daemon=True)
            self._thread.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End sampling after the present round. Idempotent."""
        if self._turns.is_elsewhere:  # a forked child, which has no thread
            return
        with self._changed:
            self.is_over = True  # first: what is interrupted below is ended by the next verb
            self._changed.notify_all()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._thread = None
        self._turns.end_beside(self)
        error, self._error = self._error, None
        if error is not None:
            logger.warning(
                "what was sampled last in an async_rollout() has failed: %s: %s", type(error).__name__, error
            )

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _publish(self) -> BaseException | None:
        """Publish between two rounds; returns what sampling has raised before."""
        with self._held():
            self._has_weights = False  # where this fails nothing is sampled until it has succeeded
            self._turns.publish_beside()
            self._has_weights = True
            self._carried.begin_anew(self._engine.weights_version, self._max_age)
            return self._told()

    def _wait_for(self, count: int) -> BaseException | None:
        """Wait for so many groups to end; returns what sampling has raised meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or self.is_over or self._carried.num_ended >= count)
            self._changed.notify_all()  # of an error that is told the thread need not wait any more
            return self._told()

    def _told(self) -> BaseException | None:
        error, self._error = self._error, None
        return error

    @contextmanager
    def _held(self) -> Iterator[None]:
        """A block between two rounds."""
        is_held = False
        try:
            with self._changed:
                is_held, self._is_held = True, True
                self._changed.wait_for(lambda: not self._is_sampling)
            yield
        finally:
            if is_held:
                with self._changed:
                    self._is_held = False
                    self._changed.notify_all()

    @property
    def _waits(self) -> bool:
        return self._is_held or self._error is not None

    def _run(self) -> None:
        if self._engine.device.type == "cuda":
            torch.cuda.set_device(self._engine.device)  # a thread begins with the first GPU
        while True:
            with self._changed:
                # an error waits to be told: what has failed would fail again
                self._changed.wait_for(
                    lambda: self.is_over or (self._has_weights and self._carried.is_running and not self._waits)
                )
                if self.is_over:
                    return
                self._is_sampling = True
            error: BaseException | None = None
            try:
                self._carried.begin_anew(self._engine.weights_version, self._max_age)
                self._carried.sample(self._engine, self._publisher.adapter_name)
            except BaseException as raised:  # noqa: BLE001 - told by the next `take`
                error = raised
            with self._changed:
                self._is_sampling, self._error = False, error
                self._changed.notify_all()
