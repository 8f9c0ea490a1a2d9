"""Slices of weights from ranks that hold parts to ranks whose engines take others; each rank is a process."""

import gc
import multiprocessing
import os
import signal
import sys
import weakref
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colo.errors import TransferError, Unsupported
from colo.memory.copy_plan import CopyPlan, Strided, runs
from colo.memory.load_plan import AS_IT_WAS, LoadPlan
from colo.memory.region import carve, carved_bytes
from colo.memory.share import SharedMemory
from colo.weights import exchange
from colo.weights.boxes import Box
from colo.weights.ranks import RankGroup
from colo.weights.sources.module import ModuleSource
from colo.weights.transports import peers
from colo.weights.transports import slices as transport_module
from colo.weights.transports.slices import SlicesTransport, why_not_sliced

CPU = torch.device("cpu")
ROWS, COLUMNS = 9, 6
"""Neither divides evenly among four ranks."""


class Net(nn.Module):
    """A matrix that engines fuse with another, one that they cut by columns, a stack of them, and one that is tied."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.q = nn.Linear(COLUMNS, ROWS, dtype=dtype)
        self.k = nn.Linear(COLUMNS, ROWS, dtype=dtype)
        self.down = nn.Linear(ROWS, COLUMNS, bias=False, dtype=dtype)
        self.head = nn.Linear(COLUMNS, ROWS, bias=False, dtype=dtype)
        self.head.weight = self.q.weight
        self.experts = nn.Parameter(torch.randn(3, 8, 4, dtype=dtype))
        self.register_buffer("bias", torch.randn(5).to(dtype))


def loaded(weights, rank, size, memory):
    """What a tensor-parallel engine's loader does on one of `size` ranks: rows and columns are cut, experts fused."""
    rows, columns = (torch.arange(n).chunk(size)[rank] for n in (ROWS, ROWS))
    for name, tensor in weights:
        module, _, _ = name.partition(".")
        if module in ("q", "k"):
            target = memory["qk" if name.endswith("weight") else "qk_bias"]
            target = target[len(rows) * (module == "k") :][: len(rows)]
            target.copy_(tensor.narrow(0, int(rows[0]), len(rows)))
        elif module == "down":
            memory["down"].copy_(tensor.narrow(1, int(columns[0]), len(columns)))
        elif module == "experts":
            for index, expert in enumerate(tensor.unbind()):
                for part, half in enumerate(expert.chunk(2)):
                    memory["experts"][index, :, 4 * part : 4 * part + 4].copy_(half.t())
        else:
            memory[name].copy_(tensor)


def engine_memory(rank, size, dtype, is_mapped=False):
    """A rank's engine, in ordinary memory or in a file that other ranks map."""
    rows = len(torch.arange(ROWS).chunk(size)[rank])
    shapes = {"qk": (2 * rows, COLUMNS), "qk_bias": (2 * rows,), "down": (COLUMNS, rows), "experts": (3, 4, 8)}
    shapes |= {"bias": (5,)}
    if not is_mapped:
        return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
    specs = [(shape, dtype) for shape in shapes.values()]
    slab = SharedMemory(carved_bytes(specs), CPU)
    FILES.append(slab)
    return dict(zip(shapes, carve(slab.bytes, specs), strict=True))


FILES = []


def world(rank, size, shard, *, tp=1, dtype=torch.float32, engines=torch.float32, bucket_bytes=200, is_mapped=False):
    """The same model whole and sharded, a rank's engine memory, and the transport between."""
    torch.manual_seed(0)
    whole = Net(dtype)
    torch.manual_seed(0)
    model = Net(dtype)
    shard(model, size)
    source, memory = ModuleSource(model), engine_memory(rank % tp, tp, engines, is_mapped)

    def load(weights):
        loaded(weights, rank % tp, tp, memory)

    plan = LoadPlan.record(load, source.tensors(), memory)
    assert why_not_sliced(plan) is None
    transport = SlicesTransport(source, plan, device=CPU, why_not_shared="tested", bucket_bytes=bucket_bytes)
    expected = {name: tensor.clone() for name, tensor in memory.items()}
    loaded(ModuleSource(whole), rank % tp, tp, expected)
    return model, memory, expected, transport


def is_same(memory, expected):
    return all(torch.equal(memory[name], tensor) for name, tensor in expected.items())


def flat(model, size):
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))


def hybrid(model, size):
    fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicas", "shards")))


def partly(model, size):
    mesh = init_device_mesh("cpu", (size,))
    for module in (model.k, model.down):
        fully_shard(module, mesh=mesh)


def with_tensor_parallelism(model, size):
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"k": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])


def offloaded(model, size):
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)), offload_policy=CPUOffloadPolicy(pin_memory=False))


LAYOUTS = {
    "1-D": (2, flat),
    "offloaded": (2, offloaded),
    "replicas": (2, hybrid),
    "partly": (2, partly),
    "tensor parallelism": (2, with_tensor_parallelism),
    "1-D over 4": (4, flat),
    "replicas over 4": (4, hybrid),
    "tensor parallelism over 4": (4, with_tensor_parallelism),
}


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_of_every_engine_is_the_whole_models(ranks, layout, tp, is_mapped):
    size, shard = LAYOUTS[layout]

    def body(rank):
        _, memory, expected, transport = world(rank, size, shard, tp=tp, is_mapped=is_mapped)
        way = "written straight into every rank's engine" if is_mapped else "ordinary host memory cannot be mapped"
        if transport.reason.endswith("copied within each rank"):
            way = f"rank {rank} receives 0 B"
        assert way in transport.reason
        before = transport.is_current()
        num_bytes = transport.transfer()
        transport.verify()
        received, planned = transport.received_bytes, transport.bytes_to_receive
        return before, is_same(memory, expected), num_bytes, transport.is_current(), received == planned

    for rank, found in enumerate(ranks(body, size)):
        whole_bytes = sum(t.nbytes for t in engine_memory(rank % tp, tp, torch.float32).values())
        assert found == (False, True, whole_bytes, True, True)


def test_what_goes_through_a_buffer_is_digested_in_whole_rows():
    """By its elements a digest takes ten times as long, and nothing else tells."""
    weight = torch.zeros(64, 128, dtype=torch.bfloat16)
    sent = exchange.Delivery(0, 1, 0, 0, Box((0, 0), (64, 128)), "bfloat16", "bfloat16")
    (row,) = runs(Strided.of(weight), transport_module._nowhere(sent))
    assert (row.rows, row.row_bytes, row.kind) == (1, weight.nbytes, 16)


def test_a_rank_receives_what_it_lacks_and_no_more(both):
    def body(rank):
        model, _, _, transport = world(rank, 2, flat)
        whole = sum(p.numel() * 4 for p in model.parameters())
        return transport.bytes_to_receive, whole - sum(p.to_local().nbytes for p in model.parameters())

    for planned, lacking in both(body):
        assert planned == lacking > 0


def test_an_engine_that_is_cut_like_the_trainer_receives_next_to_nothing(both):
    def body(rank):
        torch.manual_seed(0)
        model = nn.Linear(4, 8, bias=False)
        flat(model, 2)
        memory, source = torch.zeros(4, 4), ModuleSource(model)

        def load(weights):
            for _, tensor in weights:
                memory.copy_(tensor.chunk(2)[rank])

        plan = LoadPlan.record(load, source.tensors(), {"weight": memory})
        transport = SlicesTransport(source, plan, device=CPU, why_not_shared="tested")
        transport.transfer()
        return transport.received_bytes, torch.equal(memory, model.weight.to_local()), transport.reason

    for received, same, reason in both(body):
        assert (received, same) == (0, True)
        assert reason == (
            "tested; of 1 recorded copies 64 bytes are this rank's own and 0 come from other ranks, as slices (rank 0 "
            "receives 0 B, rank 1 receives 0 B), copied within each rank"
        )


def test_of_many_ranks_the_reason_says_what_comes_to_each_at_least_and_at_most(both, monkeypatch):
    monkeypatch.setattr(transport_module, "_NAMED_RANKS", 1)

    def body(rank):
        *_, transport = world(rank, 2, flat)
        bytes_of = sorted(transport.source.ranks.gather(transport.bytes_to_receive).values())
        return f"(2 ranks receive {bytes_of[0]} B to {bytes_of[1]} B each), through buffers: " in transport.reason

    assert both(body) == [True, True]


@pytest.mark.parametrize("is_mapped", [False, True])
@pytest.mark.parametrize(
    ("trainers", "engines", "width"),
    [(torch.float32, torch.bfloat16, 2), (torch.bfloat16, torch.float32, 2), (torch.bfloat16, torch.float16, 2)],
)
def test_what_travels_is_as_narrow_as_trainer_and_engine_allow(both, trainers, engines, width, is_mapped):
    def body(rank):
        model, memory, expected, transport = world(rank, 2, flat, dtype=trainers, engines=engines, is_mapped=is_mapped)
        transport.transfer()
        transport.verify()
        lacking = sum(p.numel() - p.to_local().numel() for p in model.parameters())
        return is_same(memory, expected), transport.received_bytes, lacking * width

    for same, received, expected in both(body):
        assert same and received == expected


def test_no_more_than_two_buckets_are_taken_beyond_what_is_there(both, monkeypatch):
    taken, empty = [], torch.empty

    def counted(*size, **options):
        if options.get("dtype") == torch.uint8:
            taken.append(size[0])
        return empty(*size, **options)

    def body(rank):
        *_, transport = world(rank, 2, flat, bucket_bytes=160)
        monkeypatch.setattr(exchange.torch, "empty", counted)
        transport.transfer()
        return taken, transport.working_bytes

    for sizes, working_bytes in both(body):
        assert len(sizes) == 2 and sum(sizes) == working_bytes
        assert 0 < working_bytes <= 2 * (160 + 2 * 16)  # what aligning two messages takes


class Allocated(TorchDispatchMode):
    """Counts bytes of storages that are made within it, as long as they live, and the most at a time."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in (t for t in tree_leaves(result) if isinstance(t, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given | self.known and storage.nbytes():
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return result

    def gone(self, key, num_bytes):
        self.known.discard(key)
        self.live -= num_bytes


BUCKET = 1 << 16


@pytest.mark.parametrize("engines", [torch.float32, torch.bfloat16])
def test_the_peak_beyond_the_shards_is_two_buckets_also_where_weights_are_cast_and_compared(both, engines):
    def body(rank):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(160, 200, bias=False) for _ in range(8)))
        flat(model, 2)
        source, memory = ModuleSource(model), {str(n): torch.zeros(200, 160, dtype=engines) for n in range(8)}
        names = [name for name, _ in source]

        def load(weights):
            for name, tensor in weights:
                memory[str(names.index(name))].copy_(tensor)

        plan = LoadPlan.record(load, source.tensors(), memory)
        transport = SlicesTransport(source, plan, device=CPU, why_not_shared="tested", bucket_bytes=BUCKET)
        transport.transfer()
        transport.verify()  # tables of weights of positions are made once
        with Allocated() as sending:
            transport.transfer()
        with Allocated() as comparing:
            transport.verify()
        return sending.peak, comparing.peak, transport.working_bytes

    for sending, comparing, working_bytes in both(body):
        assert BUCKET < working_bytes <= sending <= 2 * BUCKET + 1024
        assert 0 < comparing <= 3 * BUCKET  # a bucket of words and, on a CPU, their products in 64 bits


@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_changed_byte_of_any_engine_is_seen_on_every_rank_and_named_where_it_is(both, is_mapped):
    def body(rank):
        _, memory, _, transport = world(rank, 2, flat, is_mapped=is_mapped)
        transport.transfer()
        said = []
        for name in ("qk", "bias", "experts"):
            if rank:
                memory[name].view(-1)[-1] += 1
            current = transport.is_current()
            try:
                transport.verify()
            except TransferError as error:
                said.append((current, str(error)))
            else:
                said.append((current, ""))
            transport.transfer()
        return said

    here, there = both(body)
    assert [words for _, words in here] == [""] * 3
    names = ["k.weight", "bias", "experts"]
    assert [words for _, words in there] == [f"1 tensors differ after the transfer, {n} for one" for n in names]
    assert [current for current, _ in (*here, *there)] == [False] * 6


def test_replicas_that_have_come_apart_are_named_on_every_rank(both):
    def body(rank):
        model, *_, transport = world(rank, 2, partly)
        transport.transfer()
        transport.verify()
        if rank:  # whole on both ranks, whose engines would now differ
            with torch.no_grad():
                model.q.bias.add_(1)
        transport.transfer()
        return outcome(transport.verify)

    said = "TransferError: ranks that hold the same parts of weights have different values of 1, q.bias on ranks 0, 1 "
    assert [found[: len(said)] for found in both(body)] == [said] * 2


def test_an_elements_low_bits_are_compared_too_where_the_engine_is_wider_than_the_trainer(both):
    def body(rank):
        _, memory, _, transport = world(rank, 2, flat, dtype=torch.bfloat16)
        transport.transfer()
        memory["qk"].view(torch.int32).view(-1)[0 if rank else -1] ^= 1  # of what has come from the other rank
        return transport.is_current()

    assert both(body) == [False, False]


@pytest.mark.parametrize("is_mapped", [False, True])
def test_replaced_parameters_are_sent_and_other_parts_planned_for_anew(both, is_mapped):
    def body(rank):
        model, memory, _, transport = world(rank, 2, flat, is_mapped=is_mapped)
        transport.transfer()
        mesh = init_device_mesh("cpu", (2,))
        value = torch.arange(float(COLUMNS * ROWS)).view(COLUMNS, ROWS)
        columns = distributed.tensor.distribute_tensor(value, mesh, [distributed.tensor.Shard(1)])
        model.down.weight = nn.Parameter(columns)
        transport.transfer()
        transport.verify()
        return torch.equal(memory["down"], value)

    assert both(body) == [True, True]


def test_a_parameter_whose_memory_is_another_is_sent_from_there(both):
    def body(rank):
        model, memory, expected, transport = world(rank, 2, flat, is_mapped=True)
        transport.transfer()
        shard = model.q.weight._local_tensor
        shard.data = shard.clone().mul_(2)
        transport.transfer()
        transport.verify()
        return torch.equal(memory["qk"][:ROWS], 2 * expected["qk"][:ROWS])

    assert both(body) == [True, True]


def test_an_engine_whose_memory_is_another_on_one_rank_is_written_to_there(both):
    def body(rank):
        *_, expected, transport = world(rank, 2, flat, is_mapped=True)
        transport.transfer()
        if rank:  # as where an engine's memory has been released and is back
            for copy in transport._plan.copies:
                copy.target.set_(copy.target.clone().zero_())
        transport.transfer()
        transport.verify()
        copied = {copy.name: copy.target for copy in transport._plan.copies}
        return torch.equal(copied["bias"], expected["bias"]), transport.reason.partition("), ")[2]

    (here, way), (there, _) = both(body)
    assert here and there
    assert way == "through buffers: of rank 1: ordinary host memory cannot be mapped by another process"


def test_verifying_again_reads_the_weights_again(both):
    def body(rank):
        model, *_, transport = world(rank, 2, flat, is_mapped=True)
        transport.transfer()
        transport.verify()
        transport.verify()
        with torch.no_grad():
            model.down.weight._local_tensor.add_(1 - rank)
        return outcome(transport.verify)

    here, there = both(body)
    said = "TransferError: 1 tensors differ after the transfer, down.weight for one"
    assert (here, there) == (said, said)


def test_of_a_transfer_after_the_first_nothing_is_done_tensor_by_tensor(both):
    """In Python, that is: 24 more layers make two calls a tensor, which look where it is."""

    def body(rank):
        counts = []
        for num_layers in (8, 32):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(num_layers)))
            flat(model, 2)
            FILES.append(SharedMemory(num_layers * 512, CPU))
            memory = carve(FILES[-1].bytes, [((8, 8), torch.float32)] * num_layers)
            source = ModuleSource(model)
            names = [name for name, _ in source]

            def load(weights, names=names, memory=memory):
                for name, tensor in weights:
                    memory[names.index(name)].copy_(tensor)

            plan = LoadPlan.record(load, source.tensors(), dict(zip(names, memory, strict=True)))
            transport = SlicesTransport(source, plan, device=CPU, why_not_shared="tested")
            transport.transfer()
            calls = 0

            def count(frame, event, argument):
                nonlocal calls
                calls += event == "call" and "/colo/weights/" in frame.f_code.co_filename

            sys.setprofile(count)
            transport.transfer()
            sys.setprofile(None)
            counts.append(calls)
        return counts

    for few, many in both(body):
        assert many - few <= 24 * 3


def test_a_rank_that_cannot_map_another_is_named_and_slices_take_the_other_way(both, monkeypatch):
    def body(rank):
        if rank:
            monkeypatch.setattr(peers, "open_shared_memory", fail)
        _, memory, expected, transport = world(rank, 2, flat, is_mapped=True)
        transport.transfer()
        transport.verify()
        return transport.reason.partition("), ")[2], is_same(memory, expected)

    def fail(*_):
        raise TransferError("tested")

    assert both(body) == [("through buffers: on rank 1: tested", True)] * 2


def test_ranks_of_several_hosts_send_through_buffers(both, monkeypatch, tmp_path):
    def body(rank):
        host = tmp_path / f"{rank}"
        host.write_text(f"boot {rank}")
        monkeypatch.setattr(peers, "_BOOT", host)
        _, memory, expected, transport = world(rank, 2, flat, is_mapped=True)
        transport.transfer()
        transport.verify()
        return transport.reason.partition("), ")[2], is_same(memory, expected)

    assert both(body) == [("through buffers: ranks are on 2 hosts", True)] * 2


@pytest.mark.parametrize(("tp", "expected"), [(1, 4), (2, 1)])
def test_where_many_bytes_go_to_others_a_stage_reads_back_what_the_one_before_has_brought(both, tp, expected):
    def body(rank):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(8)))
        flat(model, 2)
        FILES.append(SharedMemory(8 * 512, CPU))
        memory = carve(FILES[-1].bytes, [((8 // tp, 8), torch.float32)] * 8)
        source = ModuleSource(model)
        names = [name for name, _ in source]

        def load(weights):
            for name, tensor in weights:
                memory[names.index(name)].copy_(tensor.chunk(tp)[rank % tp])

        plan = LoadPlan.record(load, source.tensors(), dict(zip(names, memory, strict=True)))
        transport = SlicesTransport(source, plan, device=CPU, why_not_shared="tested")
        transport.transfer()
        memory[0][0, 0] += 1  # once its stage is over
        seen = transport.is_current()
        transport.transfer()
        transport.verify()
        return len(transport._route.stages), seen

    assert both(body) == [(expected, False)] * 2


def test_a_closed_transport_keeps_no_weights(both):
    def body(rank):
        model, *_, transport = world(rank, 2, flat, is_mapped=True)
        transport.transfer()
        seen = weakref.ref(model.q.weight._local_tensor.untyped_storage())
        transport.close()
        transport.source = None
        del model
        gc.collect()
        return seen() is None

    assert both(body) == [True, True]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def outcome(call):
    try:
        call()
    except (ArithmeticError, ValueError, RuntimeError, TransferError, Unsupported) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def test_a_rank_that_raises_within_a_bucket_is_named_on_all_and_the_next_transfer_succeeds(both, monkeypatch):
    def body(rank):
        _, memory, expected, transport = world(rank, 2, flat)
        pack, count = exchange._pack, 0

        def stumble(*arguments):
            nonlocal count
            count += 1
            if count == 2:
                raise ValueError("tested")
            pack(*arguments)

        if rank:
            monkeypatch.setattr(exchange, "_pack", stumble)
        said = outcome(transport.transfer)
        monkeypatch.setattr(exchange, "_pack", pack)
        transport.transfer()
        transport.verify()
        return said, is_same(memory, expected)

    here, there = both(body)
    assert here == ("TransferError: sending slices of the weights failed on rank 1: ValueError: tested", True)
    assert there == ("ValueError: tested", True)


@pytest.mark.parametrize("fault", ["truncated", "reordered"])
def test_a_bucket_that_is_not_what_it_should_be_is_found_by_its_contents(both, monkeypatch, fault):
    def body(rank):
        *_, transport = world(rank, 2, flat, bucket_bytes=1 << 20)
        pack = exchange._pack

        def fail(parcel, buffer, held):
            pack(parcel, buffer, held)
            sent = parcel.within(buffer)
            if fault == "truncated":
                sent[-8:] = 0
            else:
                sent.copy_(sent.roll(4))

        if rank:
            monkeypatch.setattr(exchange, "_pack", fail)
        transport.transfer()
        return outcome(transport.verify)

    here, there = both(body)
    assert there == "done"
    assert "tensors differ after the transfer" in here


def test_a_rank_whose_writing_fails_is_named_on_all_and_the_next_transfer_succeeds(both, monkeypatch):
    def body(rank):
        _, memory, expected, transport = world(rank, 2, flat, is_mapped=True)
        with monkeypatch.context() as patch:
            if rank:
                patch.setattr(CopyPlan, "replay_digested", lambda plan: 1 / 0)
            said = outcome(transport.transfer)
        transport.transfer()
        transport.verify()
        return said, is_same(memory, expected)

    here, there = both(body)
    assert there == ("ZeroDivisionError: division by zero", True)
    assert here[0].startswith("TransferError: sending slices of the weights failed on rank 1: ZeroDivisionError")
    assert here[1]


def test_a_rank_that_cannot_compare_is_named_on_all(both, monkeypatch):
    def body(rank):
        *_, transport = world(rank, 2, flat, is_mapped=True)
        transport.transfer()
        with monkeypatch.context() as patch:
            if rank:
                patch.setattr(CopyPlan, "digests", lambda plan: 1 / 0)
            said = outcome(transport.verify)
        return said, outcome(transport.verify)

    here, there = both(body)
    assert there == ("ZeroDivisionError: division by zero", "done")
    assert here[0].startswith("TransferError: comparing slices of the weights failed on rank 1: ZeroDivisionError")
    assert here[1] == "done"


def test_a_rank_that_is_killed_within_a_bucket_ends_the_transfer_of_the_others_with_its_bucket_named(both, monkeypatch):
    def body(rank):
        *_, transport = world(rank, 2, flat)
        if rank:
            monkeypatch.setattr(exchange, "_pack", lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
        return outcome(transport.transfer)

    here, there = both(body)
    assert there is None
    assert here.startswith("TransferError: the ranks' exchange of weights broke off at bucket 1 of ")


def test_a_rank_that_is_too_late_is_not_waited_for(ranks, monkeypatch):
    def body(rank):
        *_, transport = world(rank, 2, flat)
        pack, send = exchange._pack, RankGroup.send_and_receive

        def be_late(*arguments):
            is_over.wait(60)
            pack(*arguments)

        def limited(*arguments):
            return [SimpleNamespace(wait=partial(work.wait, timedelta(seconds=1))) for work in send(*arguments)]

        if rank:
            monkeypatch.setattr(exchange, "_pack", be_late)
        else:
            monkeypatch.setattr(RankGroup, "send_and_receive", limited)
        said = outcome(transport.transfer)
        is_over.set()
        return said

    is_over = multiprocessing.get_context("fork").Event()
    for said in ranks(body):
        assert "TransferError: the ranks' exchange of weights broke off at bucket" in said
        assert "is too late" in said


def reshaped(model, rank):
    model.down = nn.Linear(ROWS, COLUMNS + rank, bias=False)


def retyped(model, rank):
    model.down = nn.Linear(ROWS, COLUMNS, bias=False, dtype=torch.bfloat16 if rank else torch.float32)


def missing(model, rank):
    if rank:
        del model.down


def unknown(model, rank):
    if rank:
        model.more = nn.Linear(1, 1, bias=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (reshaped, "down.weight is (7, 9) in float32, not (6, 9) in float32"),
        (retyped, "down.weight is (6, 9) in bfloat16, not (6, 9) in float32"),
        (missing, "down.weight is missing"),
        (unknown, "more.weight is one more"),
    ],
)
def test_a_rank_with_other_weights_is_named_on_all(both, change, words):
    def body(rank):
        model = Net()
        change(model, rank)
        fully_shard(model.q, mesh=init_device_mesh("cpu", (2,)))
        source = ModuleSource(model)
        plan = LoadPlan.of(source.tensors(), fallbacks={})
        return outcome(lambda: SlicesTransport(source, plan, device=CPU, why_not_shared="tested"))

    assert both(body) == [f"TransferError: rank 1 has other weights than rank 0: {words}"] * 2


def test_a_weight_that_has_changed_its_shape_on_one_rank_is_named_on_all(both):
    def body(rank):
        model, *_, transport = world(rank, 2, partly)
        transport.transfer()
        if rank:
            model.experts = nn.Parameter(torch.ones(3, 8, 5))
        return outcome(transport.transfer)

    here, there = both(body)
    said = f"TransferError: experts has shape (3, 8, 5), but (3, 8, 4) was recorded: {AS_IT_WAS}"
    assert there == said
    assert here == f"TransferError: planning slices of the weights failed on rank 1: {said}"


def test_a_part_that_cannot_travel_on_one_rank_is_named_on_all(both):
    def body(rank):
        model = nn.Linear(2, 4, bias=False)
        flat(model, 2)
        if rank:
            model.weight._local_tensor = torch.ones(3, 2)
        source, memory = ModuleSource(model), torch.zeros(4, 2)
        plan = LoadPlan.record(lambda weights: [memory.copy_(t) for _, t in weights], source.tensors(), {"m": memory})
        return outcome(lambda: SlicesTransport(source, plan, device=CPU, why_not_shared="tested"))

    here, there = both(body)
    assert there.startswith("Unsupported: weight has a part of shape (3, 2) here")
    assert here == f"TransferError: planning slices of the weights failed on rank 1: {there}"


def test_what_the_loader_computes_is_the_reason_why_weights_travel_whole():
    plan = LoadPlan.of({"w": torch.ones(2)}, fallbacks={"w": "the loader computes with it"})
    assert why_not_sliced(plan) == "w: the loader computes with it"
    assert why_not_sliced(LoadPlan.of({"w": torch.ones(2)}, fallbacks={})) is None
