"""Long runs against a twin without colo, on demand: what interrupts, faults and chance leave must be defined.

    python -m tests.soak interrupts [--fraction 0.1] [--twice] [--faults]   an interrupt at every bytecode boundary
    python -m tests.soak walk [--operations 50000]                          random operations, with faults among them

Both print a table and exit with 1 when anything was found. A tiny model on the CPU; every byte is compared.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

import colo
from colo.engines.torch import TorchEngine
from colo.memory.arena import PinnedArena
from colo.memory.offload import Mover
from colo.memory.region import ResizedRegion
from colo.trainer.master_weights import MasterWeights
from colo.weights.transports.choice import SharedTransport
from tests.models import tiny_qwen3

KV_BYTES = 1 << 17
COLO = str(Path(colo.__file__).parent)
CONFIG = tiny_qwen3(hidden_size=16, intermediate_size=32, head_dim=8, vocab_size=32, tie_word_embeddings=True)
OPTIMIZERS = {
    "adamw": lambda ps: AdamW(ps, lr=1e-3),
    "momentum": lambda ps: SGD(ps, lr=1e-3, momentum=0.9),
    "masters": MasterWeights(lambda ps: AdamW(ps, lr=1e-3), bucket_bytes=2048),
}
RAISED = (KeyboardInterrupt, RuntimeError, colo.ColoError)


class Disagreement(Exception):
    """What the runtime left is not what the twin has."""


class World:
    """A runtime that parks everything for each rollout, and the same model and optimizer without colo."""

    def __init__(self, kind: str) -> None:
        dtype = torch.bfloat16 if kind == "masters" else torch.float32
        torch.manual_seed(0)
        settings = colo.RuntimeConfig(kv_cache_bytes=KV_BYTES, offload="always", region_bytes=4096)
        self.rt = colo.launch(CONFIG, optimizer=OPTIMIZERS[kind], dtype=dtype, device="cpu", config=settings)
        self.twin = copy.deepcopy(self.rt.model)
        self.optimizer = OPTIMIZERS[kind](self.twin.parameters())

    @property
    def both(self) -> tuple[tuple[torch.nn.Module, torch.optim.Optimizer], ...]:
        return (self.rt.model, self.rt.optimizer), (self.twin, self.optimizer)

    def check_weights(self) -> None:
        pairs = zip(self.rt.model.named_parameters(), self.twin.parameters(), strict=True)
        for (name, mine), other in pairs:
            _agree(f"weight {name}", mine, other)

    def check_all(self) -> None:
        """Weights, gradients and state, bit for bit. Outside a rollout."""
        self.check_weights()
        pairs = zip(self.rt.model.named_parameters(), self.twin.parameters(), strict=True)
        for (name, mine), other in pairs:
            if (mine.grad is None) is not (other.grad is None):
                raise Disagreement(f"the gradient of {name} is {mine.grad}, the twin's {other.grad}")
            if other.grad is not None:
                _agree(f"gradient of {name}", mine.grad, other.grad)
        mine, other = self.rt.optimizer.state_dict()["state"], self.optimizer.state_dict()["state"]
        if mine.keys() != other.keys():
            raise Disagreement(f"state of {mine.keys()}, the twin's of {other.keys()}")
        for key, state in other.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    _agree(f"state {name} of {key}", mine[key][name], value)

    def backward(self, number: int) -> None:
        for model, _ in self.both:
            ids = torch.tensor([[number % 32, 2, 3, 4]])
            model(input_ids=ids, labels=ids).loss.backward()


def _agree(what: str, mine: torch.Tensor, other: torch.Tensor) -> None:
    if not torch.equal(mine, other):
        raise Disagreement(
            f"{what} differs by {float((mine.detach().float() - other.detach().float()).abs().max()):.3g}"
        )


def step(world: World, attempt: Callable[[Callable[[], object]], bool]) -> None:
    """A step of both. One that was interrupted or failed has been made, or is made again: never half, never twice."""
    before = [parameter.detach().clone() for parameter in world.twin.parameters()]
    world.optimizer.step()
    while not attempt(world.rt.optimizer.step):
        mine = list(world.rt.model.parameters())
        if all(map(torch.equal, mine, world.twin.parameters())):
            return
        if not hasattr(world.optimizer, "inner"):  # masters are stepped in buckets, and go on where they were
            for parameter, other in zip(mine, before, strict=True):
                _agree("a weight after a step that was not made", parameter, other)


# ---- interrupts at every boundary ------------------------------------------------------------------------------------


@dataclass
class Boundary:
    """Raises an interrupt the first time that the bytecode at one place in colo is about to run."""

    place: tuple[str, str, int] | None
    seen: set[tuple[str, str, int]] = field(default_factory=set)
    fired: bool = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(None)

    def _call(self, frame, event, arg):
        if self.fired or not frame.f_code.co_filename.startswith(COLO):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame, event, arg):
        if event == "opcode" and not self.fired:
            place = (frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lasti)
            self.seen.add(place)
            if place == self.place:
                self.fired = True
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._opcode


class Fault:
    """Makes one call of a method of colo's raise, the `when`-th of those made while it is armed."""

    def __init__(self, owner: type, name: str, when: int) -> None:
        self.owner, self.name, self.when = owner, name, when

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name} failing"

    @contextmanager
    def armed(self) -> Iterator[None]:
        original = getattr(self.owner, self.name)

        def failing(*args, **kwargs):
            self.when -= 1
            if self.when == 0:
                raise RuntimeError(f"{self} as it was told to")
            return original(*args, **kwargs)

        setattr(self.owner, self.name, failing)
        try:
            yield
        finally:
            setattr(self.owner, self.name, original)


FAULTS = [
    (ResizedRegion, "_release"),
    (ResizedRegion, "_restore"),
    (PinnedArena, "allocate"),
    (PinnedArena, "view"),
    (Mover, "_copy"),
    (TorchEngine, "pause"),
    (TorchEngine, "resume"),
    (TorchEngine, "commit"),
    (TorchEngine, "reset_prefix_cache"),
    (SharedTransport, "verify"),
    (SharedTransport, "transfer"),
]


class Cycle:
    """What a loop does in a cycle, each part repeated until it has worked: interrupts and faults are met once."""

    def __init__(self, world: World, boundaries: list[Boundary], fault: Fault | None = None) -> None:
        self._world = world
        self._boundaries = boundaries
        self._fault = fault

    def attempt(self, call: Callable[[], object]) -> bool:
        """Whether `call` has ended; false when an interrupt or a fault has ended it."""
        boundary = next((b for b in self._boundaries if not b.fired), None)
        try:
            with self._fault.armed() if self._fault else nullcontext(), boundary.armed() if boundary else nullcontext():
                call()
        except RAISED:
            sys.settrace(None)
            return False
        return True

    def until_done(self, call: Callable[[], object]) -> None:
        for _ in range(6):
            if self.attempt(call):
                return
            if self._world.rt._turns.phase is not None:  # a block whose end was cut off
                self._world.rt.enter(None)
        raise Disagreement("a verb does not work any more")

    def run(self) -> None:
        world, rt = self._world, self._world.rt

        def rollout() -> None:
            with rt.rollout():
                rt.generate([[1, 2]], max_tokens=2)

        def train(number: int) -> None:
            with rt.train():
                pass
            world.check_all()
            rt.enter(colo.Phase.TRAIN)
            world.backward(number)

        for number in range(2):
            self.until_done(rollout)
            self.until_done(lambda: rt.enter(colo.Phase.TRAIN))
            world.backward(number)
            step(world, self.attempt)
            self.until_done(lambda: rt.enter(None))
            world.check_all()
            if number == 0:
                for _, optimizer in world.both:
                    optimizer.zero_grad()
        self.until_done(rollout)
        world.check_all()
        self.until_done(rt.close)
        self.until_done(rt.close)
        world.check_all()
        if rt.engine.mover.arena.pinned_bytes:
            raise Disagreement(f"close() kept {rt.engine.mover.arena.pinned_bytes} bytes of the arena")


def interrupts(kind: str, fraction: float, seed: int, *, twice: bool, with_faults: bool) -> tuple[int, list[str]]:
    """Interrupt a cycle at each of its boundaries, or at a sample of them; returns the trials and what was found."""
    probe = Boundary(None)
    Cycle(World(kind), [probe]).run()
    places, chance = sorted(probe.seen), random.Random(seed)
    chosen = [place for place in places if chance.random() < fraction]
    found = []
    for number, place in enumerate(chosen):
        boundaries = [Boundary(place)] + ([Boundary(chance.choice(places))] if twice else [])
        fault = Fault(*chance.choice(FAULTS), chance.randrange(1, 6)) if with_faults else None
        try:
            Cycle(World(kind), boundaries, fault).run()
        except Exception as error:  # noqa: BLE001 - all that is found is told at the end
            at = ", ".join(f"{Path(b.place[0]).name}:{b.place[1]}+{b.place[2]}" for b in boundaries if b.place)
            found.append(f"{kind} at {at}, {fault}: {type(error).__name__}: {str(error)[:300]}")
            print("found:", found[-1], flush=True)
        if number % 200 == 199:
            print(f"  {number + 1} of {len(chosen)}, {len(found)} found", flush=True)
            gc.collect()
    return len(chosen), found


# ---- a random walk ---------------------------------------------------------------------------------------------------


class Walk:
    """Random operations on a runtime and its twin, some of them with a fault."""

    def __init__(self, kind: str, seed: int) -> None:
        self.world = World(kind)
        self.random = random.Random(seed)
        self.faults = self.steps = self.samples = 0
        self.number = 0
        self.first = {name: tensor.clone() for name, tensor in self.world.twin.state_dict().items()}

    def run(self, operations: int) -> None:
        choices = [
            (self._rollout, 6),
            (self._train, 6),
            (self._idle, 4),
            (self._generate, 4),
            (self._backward, 8),
            (self._step, 8),
            (self._gradients, 6),
            (self._write, 2),
            (self._reset, 1),
            (self._load, 1),
            (self._read_state, 2),
        ]
        functions, weights = zip(*choices, strict=True)
        for self.number in range(operations):
            (operation,) = self.random.choices(functions, weights)
            operation()
            if self.number % 10 == 0 and self.world.rt._turns.phase is not colo.Phase.ROLLOUT:
                self.world.check_all()
            else:
                self.world.check_weights()

    def close(self) -> None:
        self.world.rt.close()
        self.world.check_all()

    def _attempt(self, call: Callable[[], object]) -> bool:
        """Call, one time in three with a fault on the way."""
        if self.random.random() > 0.33:
            call()
            return True
        with Fault(*self.random.choice(FAULTS), self.random.randrange(1, 4)).armed():
            try:
                call()
            except RuntimeError:
                self.faults += 1
                return False
            except colo.ColoError:
                return False
        return True

    def _until_done(self, call: Callable[[], object]) -> None:
        while not self._attempt(call):
            pass

    def _rollout(self) -> None:
        self._until_done(lambda: self.world.rt.enter(colo.Phase.ROLLOUT))

    def _train(self) -> None:
        self._until_done(lambda: self.world.rt.enter(colo.Phase.TRAIN))

    def _idle(self) -> None:
        self._until_done(lambda: self.world.rt.enter(None))

    def _generate(self) -> None:
        rt = self.world.rt
        if rt._turns.phase is colo.Phase.TRAIN:
            self._idle()
        found: list[colo.Completion] = []
        self._until_done(lambda: found.extend(rt.generate([[1, self.number % 32]], max_tokens=2)))
        self.samples += 1
        sample = found[-1]
        if sample.weights_version != rt.weights_version:
            raise Disagreement(f"sampled from version {sample.weights_version} of {rt.weights_version}")
        ids = torch.tensor([[*sample.prompt_token_ids, *sample.token_ids]])
        with torch.no_grad():
            logits = self.world.twin(input_ids=ids).logits[0, 1:-1].float()
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        gap = float((expected - torch.tensor(sample.logprobs)).abs().max())
        if gap > (1e-4 if logits.dtype == self.world.twin.dtype else 0.2):
            raise Disagreement(f"log-probabilities differ from the twin's by {gap:.3g}")

    def _backward(self) -> None:
        if self.world.rt._turns.phase is colo.Phase.ROLLOUT:
            self._train()
        self.world.backward(self.number)

    def _step(self) -> None:
        if self.world.rt._turns.phase is colo.Phase.ROLLOUT:
            self._idle()
        self.steps += 1
        step(self.world, self._attempt)

    def _gradients(self) -> None:
        what = self.random.choice(["none", "zero", "one", "assign", "clip"])
        if what == "clip" and self.world.rt._turns.phase is colo.Phase.ROLLOUT:
            what = "zero"
        for model, optimizer in self.world.both:
            if what in ("none", "zero"):
                optimizer.zero_grad(set_to_none=what == "none")
            elif what == "one":
                next(model.parameters()).grad = None
            elif what == "assign":
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 0.125)
            else:
                clip_grad_norm_(model.parameters(), 0.5)

    @torch.no_grad()
    def _write(self) -> None:
        counted = self.random.random() < 0.5
        for model, _ in self.world.both:
            weight = model.get_parameter("model.norm.weight")
            (weight if counted else weight.data).mul_(0.5 if self.number % 2 else 2.0)

    def _reset(self) -> None:
        for model, _ in self.world.both:
            model.load_state_dict(self.first)

    def _load(self) -> None:
        for _, optimizer in self.world.both:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)

    def _read_state(self) -> None:
        mine, other = self.world.rt.optimizer.state, self.world.optimizer.state
        for parameter, twin in zip(self.world.rt.model.parameters(), self.world.twin.parameters(), strict=True):
            for name, value in other.get(twin, {}).items():
                if isinstance(value, torch.Tensor):
                    _agree(f"state {name}", mine[parameter][name], value)


def walk(operations: int, seed: int) -> list[str]:
    """Walk with each optimizer in turn; returns what was found."""
    found = []
    for number, kind in enumerate(OPTIMIZERS):
        start_s, made = time.perf_counter(), Walk(kind, seed + number)
        try:
            made.run(operations // len(OPTIMIZERS))
            made.close()
        except Exception as error:  # noqa: BLE001 - told at the end
            traceback.print_exc()
            found.append(f"{kind}, operation {made.number}: {type(error).__name__}: {str(error)[:300]}")
        print(
            f"{kind}: {made.number + 1} operations, {made.steps} steps, {made.samples} samples, {made.faults} faults, "
            f"{time.perf_counter() - start_s:.0f} s",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["interrupts", "walk"])
    parser.add_argument("--fraction", type=float, default=1.0, help="share of the boundaries that are tried")
    parser.add_argument("--operations", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--twice", action="store_true", help="interrupt what follows the first interrupt as well")
    parser.add_argument("--faults", action="store_true", help="let a call of colo's fail as well")
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if args.what == "walk":
        found = walk(args.operations, args.seed)
        print(f"walk: {args.operations} operations, {len(found)} found")
    else:
        found, trials = [], 0
        for kind in args.optimizers:
            count, of_kind = interrupts(kind, args.fraction, args.seed, twice=args.twice, with_faults=args.faults)
            trials, found = trials + count, found + of_kind
            print(f"{kind}: {count} boundaries, {len(of_kind)} found", flush=True)
        how = " twice" * args.twice + " with faults" * args.faults
        print(f"interrupts{how}: {trials} trials, {len(found)} found")
    print("\n".join(found))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
