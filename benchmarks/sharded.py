"""`sharded`: weights that a trainer has spread over ranks to engines that are cut in another way, as slices and whole.

Trainers: FSDP2, and Megatron with tensor parallelism over all ranks. Engines: memory laid out as vLLM's, of which each
rank has a part (TP), filled by a loader that cuts as vLLM's does. Ours: slices, and whole weights where a loader would
compute with them. Others, written here as they do it: one gather for each tensor and the loader after it (as verl
does), and buckets of gathers, each loaded before the next begins (as slime does). Every way has to leave the same
bytes. Bytes of slices are counted as they come, those of gathers by what is gathered. Without a GPU ranks are processes
over gloo, and the model is small: that shows that it works and no more.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.common import Record, Row, own_processes, shape, timed
from colo.memory.load_plan import LoadPlan
from colo.units import MIB
from colo.weights.boxes import Box, slices_of
from colo.weights.sources.base import WeightSource
from colo.weights.sources.module import ModuleSource
from colo.weights.sources.spread import SpreadSource
from colo.weights.transports.local import LocalTransport
from colo.weights.transports.slices import SlicesTransport

TRAINERS = ("fsdp2", "megatron")
STAGES = ("look", "meet", "copy", "own", "pack", "wire", "unpack")
"""Stages of a transfer: the last four where slices travel through buffers."""

REPEATS = 5
BUCKET_BYTES = 512 * MIB
"""Size of a bucket of gathered tensors, as slime has it by default."""

CPU_BUCKET_BYTES = 2 * MIB
"""Size of buckets of either kind for a model that is as small as those on a CPU."""

_DEADLINE_S = 300.0
_LOOK_S = 1.0
"""Time between looks for rows."""

_ON_A_CPU = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 8192}
_ON_A_CPU |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
_BY_COLUMNS = ("o_proj", "down_proj")
_BY_ROWS = ("embed_tokens", "lm_head")

_MEGATRONS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
}
"""Options of Megatron's, and what transformers calls them."""

_PADDED_ROWS = 128
"""The vocabulary has a multiple of so many rows on each rank."""

Weights = Iterable[tuple[str, torch.Tensor]]


def run(record: Record, *, shape: str, device: str, ranks: int, trainer: str | None = None) -> None:
    """Measure every way on `ranks` processes of this machine, each with a GPU of its own unless `device` is the CPU.

    `trainer` is one of `TRAINERS`, or `None` for both, the second where Megatron is installed.
    """
    if device == "cuda" and torch.cuda.device_count() < ranks:
        count = torch.cuda.device_count()
        raise ValueError(f"each of --ranks {ranks} needs a GPU of its own, and torch sees {count}: pass fewer ranks")
    chosen = [trainer] if trainer else [t for t in TRAINERS if t != "megatron" or find_spec("megatron") is not None]
    for name in chosen:
        record.tell(f"{name} on {ranks} ranks")
        with tempfile.TemporaryDirectory() as folder:
            measure = partial(_measure, count=ranks, trainer=name, shape_name=shape, kind=device, folder=folder)
            _run_ranks(record, measure, ranks, folder)


def _run_ranks(record: Record, measure: Callable[[int], None], ranks: int, folder: str) -> None:
    """Run every rank in a process of its own, and add a row as soon as all of them have found it.

    Raises: the first error of a rank, at once; the others, which may wait for it, are killed.
    """
    before = list(record.rows)
    with own_processes(ranks) as processes:
        running: Collection[Future[None]] = [processes.submit(measure, rank) for rank in range(ranks)]
        while running:
            done, running = wait(running, timeout=_LOOK_S, return_when=FIRST_EXCEPTION)
            told = (_found(folder, rank) for rank in range(ranks))
            record.show([*before, *map(_of_all, zip(*told, strict=False))])
            for job in done:
                job.result()


def _found(folder: str, rank: int) -> list[Row]:
    """Rows that a rank has written; the last line may not be whole yet."""
    path = Path(folder, f"rows-{rank}")
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _of_all(told: Sequence[Row]) -> Row:
    """One row of what every rank has found: the slowest rank's, with the bytes that have come to all."""
    slowest = max(told, key=lambda row: float(row["median_s"]))
    return slowest | {"to_all_ranks_bytes": sum(row["received_bytes"] for row in told)}


def _measure(rank: int, *, count: int, trainer: str, shape_name: str, kind: str, folder: str) -> None:
    """Write one rank's rows: every way that weights of one trainer can take to its part of an engine."""
    from torch import distributed

    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    if kind == "cpu":
        torch.set_num_threads(1)
        torch.cuda.current_device = lambda: device  # type: ignore[assignment,return-value]  # Megatron asks anywhere
    else:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{Path(folder, 'ranks')}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=_DEADLINE_S),
    )
    config: Any = shape(shape_name, device)
    if kind == "cpu":
        config.update(_ON_A_CPU)
    source = _of_fsdp(config, device) if trainer == "fsdp2" else _of_megatron(config, device)
    for tp in (size for size in (1, 2, 4) if count % size == 0):
        memory, load = _engine(config, rank % tp, tp, device)
        plan = LoadPlan.record(load, source.tensors(), memory)
        facts = {"trainer": trainer, "tp": tp, "ranks": count}
        for way, row in _ways(source, plan, load):
            with Path(folder, f"rows-{rank}").open("a") as rows:
                rows.write(json.dumps({"way": way, **facts, **row}) + "\n")
    distributed.destroy_process_group()  # not after an error, which it would keep back until others come


# ---- ways ------------------------------------------------------------------------------------------------------------


def _ways(source: WeightSource, plan: LoadPlan, load: Callable[[Weights], None]) -> Iterator[tuple[str, Row]]:
    targets = [copy.target for copy in plan.copies]
    device = targets[0].device
    bucket_bytes = CPU_BUCKET_BYTES if device.type == "cpu" else None
    slices = SlicesTransport(source, plan, device=device, why_not_shared="measured", bucket_bytes=bucket_bytes)
    seconds = _median_s(slices.transfer, device)
    stages_s, in_all_s = dict(slices.seconds), sum(slices.seconds.values())
    row: Row = {"median_s": seconds, "received_bytes": slices.received_bytes // (REPEATS + 1)}
    row |= {"planned_bytes": slices.bytes_to_receive, "buffers_bytes": slices.working_bytes}
    row |= {"verified_s": _median_s(partial(_verified, slices), device)}
    expected = [target.clone() for target in targets]
    yield "slices", row | {f"{stage}_share": stages_s.get(stage, 0.0) / in_all_s for stage in STAGES}
    gather = _Gather(source, device)
    whole = LocalTransport(source, None, plan, why_not_shared="measured")  # type: ignore[arg-type]  # it has no loader
    own_bytes = sum(part.tensor.nbytes for part in source.parts() if part.tensor is not None)
    lacking_bytes = sum(spec.size_bytes for spec in source.specs()) - own_bytes
    others: dict[str, Callable[[], Any]] = {
        "whole": whole.transfer,
        "as verl": partial(_one_by_one, gather, load),
        "as slime": partial(_in_buckets, gather, load, bucket_bytes or BUCKET_BYTES),
    }
    for way, transfer in others.items():
        for target in targets:
            target.zero_()
        seconds = _median_s(transfer, device)
        if not all(map(torch.equal, targets, expected)):
            raise AssertionError(f"{way} has left other weights than slices")
        row = {"median_s": seconds, "received_bytes": lacking_bytes if way == "whole" else gather.received_bytes}
        yield (
            way,
            row
            | dict.fromkeys(("planned_bytes", "buffers_bytes", "verified_s", *(f"{stage}_share" for stage in STAGES))),
        )


def _verified(slices: SlicesTransport) -> None:
    slices.transfer()
    slices.verify()


def _median_s(transfer: Callable[[], Any], device: torch.device) -> float:
    """Median seconds of transfers that all ranks begin together, after one that is not measured."""
    from torch import distributed

    found = []
    for _ in range(REPEATS + 1):
        distributed.barrier()
        found.append(timed(transfer, device))
    return statistics.median(found[1:])


class _Gather:
    """Whole weights by `all_gather`: every rank gives what it holds in a row, padded to the largest."""

    def __init__(self, source: WeightSource, device: torch.device) -> None:
        self.specs = source.specs()
        self._ranks = source.ranks
        self._device = device
        self._parts: dict[str, list[torch.Tensor]] = {}
        for part in source.parts():
            if part.tensor is not None:
                self._parts.setdefault(part.name, []).append(part.tensor)
        told = self._ranks.gather([(one.name, one.box) for one in slices_of(source.parts())])
        self._held: dict[str, dict[int, list[Box]]] = {spec.name: {rank: [] for rank in told} for spec in self.specs}
        for rank, boxes in told.items():
            for name, box in boxes:
                self._held[name][rank].append(box)
        self.received_bytes = sum(
            (len(told) - 1) * self._size(spec.name) * getattr(torch, spec.dtype).itemsize
            for spec in self.specs
            if not self._is_everywhere(spec.name, spec.shape)
        )
        """Bytes that come to this rank when every weight is gathered once."""

    @torch.no_grad()
    def begin(self, index: int) -> tuple[torch.Tensor, Any]:
        """Begin to gather a weight: what will be there, and what to wait for."""
        from torch import distributed

        spec = self.specs[index]
        dtype, size = getattr(torch, spec.dtype), self._size(spec.name)
        row = torch.zeros(size, dtype=dtype, device=self._device)
        start = 0
        for part in self._parts.get(spec.name, ()):
            row[start : start + part.numel()].copy_(part.reshape(-1))
            start += part.numel()
        if self._is_everywhere(spec.name, spec.shape):
            return row, None
        rows = torch.empty(len(self._held[spec.name]) * size, dtype=dtype, device=self._device)
        of_ranks = list(rows.chunk(len(self._held[spec.name])))
        return rows, distributed.all_gather(of_ranks, row, group=self._ranks.wire, async_op=True)

    @torch.no_grad()
    def end(self, index: int, rows: torch.Tensor, work: Any) -> tuple[str, torch.Tensor]:
        """Wait for a weight and put it together: its name, and the whole."""
        spec = self.specs[index]
        held = self._held[spec.name]
        if work is None:
            return spec.name, rows.view(spec.shape)
        work.wait()
        whole = torch.empty(spec.shape, dtype=rows.dtype, device=self._device)
        for row, boxes in zip(rows.chunk(len(held)), held.values(), strict=True):
            start = 0
            for box in boxes:
                region = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
                whole[region] = row[start : start + box.num_elements].view(box.shape)
                start += box.num_elements
        return spec.name, whole

    def _size(self, name: str) -> int:
        """Elements of a rank's row, which all ranks' rows have."""
        return max(sum(box.num_elements for box in boxes) for boxes in self._held[name].values())

    def _is_everywhere(self, name: str, dims: tuple[int, ...]) -> bool:
        whole = Box((0,) * len(dims), tuple(dims))
        return all(boxes == [whole] for boxes in self._held[name].values())


def _one_by_one(gather: _Gather, load: Callable[[Weights], None]) -> None:
    """Gather a tensor, give it to the loader, and go on with the next."""
    for index in range(len(gather.specs)):
        load([gather.end(index, *gather.begin(index))])


def _in_buckets(gather: _Gather, load: Callable[[Weights], None], limit_bytes: int) -> None:
    """Gather tensors of a bucket beside each other, put them together, load all of them, and begin the next bucket."""
    bucket: list[int] = []
    for index, spec in enumerate(gather.specs):
        if bucket and sum(gather.specs[one].size_bytes for one in bucket) + spec.size_bytes > limit_bytes:
            _load_bucket(gather, bucket, load)
            bucket = []
        bucket.append(index)
    _load_bucket(gather, bucket, load)


def _load_bucket(gather: _Gather, bucket: Sequence[int], load: Callable[[Weights], None]) -> None:
    begun = [gather.begin(index) for index in bucket]
    load([gather.end(index, *one) for index, one in zip(bucket, begun, strict=True)])


# ---- trainers and engines --------------------------------------------------------------------------------------------


def _of_fsdp(config: Any, device: torch.device) -> WeightSource:
    """A model that FSDP2 has sharded over all ranks, layer by layer."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return ModuleSource(model)


def _of_megatron(config: Any, device: torch.device) -> WeightSource:
    """A model of Megatron's whose layers are cut over all ranks."""
    from torch import distributed

    from colo.weights.sources.megatron import MegatronSource

    stage = _tensor_parallel_stage(config, distributed.get_world_size(), device)
    placed = MegatronSource([stage], family=config.model_type, vocab_size=config.vocab_size)
    return SpreadSource(placed, device=device)


def _tensor_parallel_stage(config: Any, ranks: int, device: torch.device) -> Any:
    """Build this rank's stage, with random weights, of the Qwen3 that a transformers config describes.

    Ordering: the process group is there. Layers are Megatron's own, which need no Transformer Engine.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks, create_gloo_process_groups=False)
    fusions = ("bias_activation", "masked_softmax", "apply_rope", "bias_dropout", "gradient_accumulation")
    options = TransformerConfig(
        **{name: getattr(config, other) for name, other in _MEGATRONS.items()},
        **{f"{name}_fusion": False for name in fusions},
        tensor_model_parallel_size=ranks,
        normalization="RMSNorm",
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
        perform_initialization=False,  # on the CPU it takes minutes
        params_dtype=config.dtype,
        bf16=config.dtype is torch.bfloat16,
    )
    rows = _PADDED_ROWS * ranks
    stage = GPTModel(
        options,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        vocab_size=-(-config.vocab_size // rows) * rows,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    )
    stage.to(device)
    torch.manual_seed(torch.distributed.get_rank())
    with torch.no_grad():
        for parameter in stage.parameters():
            if parameter.dim() > 1:  # a rank's own; norms, which are ones, every rank has
                parameter.normal_(std=0.02)
    return stage


def _engine(
    config: Any, rank: int, tp: int, device: torch.device
) -> tuple[Mapping[str, torch.Tensor], Callable[[Weights], None]]:
    """Part `rank` of `tp` of an engine's memory, and the loader that fills it as vLLM's does."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    memory: dict[str, torch.Tensor] = {}
    places: dict[str, tuple[str, int, int]] = {}  # name to memory, its first row there, and the dimension that is cut
    fused: dict[str, list[torch.Size]] = {}
    for name, parameter in ModuleSource(model):
        prefix, _, leaf = name.removesuffix(".weight").rpartition(".")
        dim = 1 if leaf in _BY_COLUMNS else 0 if leaf in _FUSED or leaf in _BY_ROWS else -1
        dims = list(parameter.shape)
        if dim >= 0:
            dims[dim] //= tp
        target = f"{prefix}.{_FUSED[leaf]}" if leaf in _FUSED else name
        shapes = fused.setdefault(target, [])
        places[name] = target, sum(one[0] for one in shapes), dim
        shapes.append(torch.Size(dims))
    for target, shapes in fused.items():
        rows = sum(one[0] for one in shapes)
        memory[target] = torch.zeros(rows, *shapes[0][1:], dtype=config.dtype, device=device)

    @torch.no_grad()
    def load(weights: Weights) -> None:
        for name, tensor in weights:
            target, first, dim = places[name]
            part = tensor.chunk(tp, dim)[rank] if dim >= 0 else tensor
            memory[target][first : first + part.shape[0]].copy_(part)

    return memory, load
