"""Weights from one side's memory into another's by recorded copies, direct and by a buffer, and every way to fail."""

import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from colo.errors import EngineLost, TransferError, Unsupported
from colo.memory.load_plan import LoadPlan
from colo.memory.share import Exported, Opened
from colo.memory.specs import NOWHERE, Place, TensorSpec
from colo.weights.sources.module import ModuleSource
from colo.weights.transports.ipc import IpcTransport
from colo.weights.transports.receiver import Receiver

CPU = torch.device("cpu")
WHY = "they are apart"


class Trainer(nn.Module):
    """Parameters as a trainer has them, of several dtypes, one without elements."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"q": (8, 6), "k": (4, 6), "down": (6, 8), "norm": (6,), "scale": ()}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))
        self.head = nn.Parameter(torch.randn(5, 3, generator=generator).bfloat16())
        self.codes = nn.Parameter(torch.arange(7, dtype=torch.uint8), requires_grad=False)
        self.none = nn.Parameter(torch.empty(0, 4))


class Engine:
    """Memory as an engine lays it out: q and k fused, rows of `down` cut into slices, fp32 kept as bf16 in `norm`."""

    def __init__(self):
        self.memory = {
            "qk": torch.full((12, 6), -1.0),
            "down": torch.full((6, 4), -1.0),
            "rest": torch.full((6, 4), -1.0),
            "norm": torch.full((6,), -1.0, dtype=torch.bfloat16),
            "scale": torch.full((), -1.0),
            "head": torch.full((5, 3), -1.0, dtype=torch.bfloat16),
            "codes": torch.full((7,), 99, dtype=torch.uint8),
            "none": torch.empty(0, 4),
        }

    def load_weights(self, weights):
        for name, tensor in weights:
            if name in ("q", "k"):
                rows = slice(0, 8) if name == "q" else slice(8, 12)
                self.memory["qk"][rows].copy_(tensor)
            elif name == "down":
                self.memory["down"].copy_(tensor[:, 2:6])
                self.memory["rest"][:, :2].copy_(tensor[:, :2])
                self.memory["rest"][:, 2:].copy_(tensor[:, 6:])
            elif name in self.memory:
                self.memory[name].copy_(tensor)
            else:
                raise KeyError(name)

    def expected(self, model):
        other = Engine()
        other.load_weights((name, p.detach()) for name, p in model.named_parameters())
        return other.memory


class Workers:
    """As many workers as one, reached by calls; `take` changes how groups are taken."""

    device = CPU
    pids = (0,)
    ipc_refusal = None

    def __init__(self, engine):
        self.receiver = Receiver(CPU, self._record)
        self.engine = engine
        self.asked = []

    def take(self, how=lambda take, index: take(index)):
        """Let `how(take, index)` stand between the sender and the receiver's own copying of a group."""
        self.receiver._copy = lambda index, verify: how(
            lambda index: Receiver._copy(self.receiver, index, verify=verify), index
        )

    def _record(self, source):
        destinations = {n: t for n, t in self.engine.memory.items() if t.numel()}
        return LoadPlan.record(self.engine.load_weights, source, destinations)

    def receive(self, step, **arguments):
        self.asked.append(step)
        return [getattr(self.receiver, step)(**arguments)]

    def receive_all(self, operations):
        return [self.receive(name, **arguments) for name, arguments in operations][-1]


@pytest.fixture
def model():
    return Trainer()


@pytest.fixture
def workers():
    return Workers(Engine())


WAYS = {
    "direct": {},
    "one group": {"staged": True},
    "groups smaller than tensors": {"staged": True, "bucket_bytes": 256},
    "groups that are copied from host memory": {"ipc_refusal": "it cannot map this", "bucket_bytes": 256},
}


def connect(model, workers, ipc_refusal=None, **options):
    workers.ipc_refusal = ipc_refusal
    return IpcTransport(ModuleSource(model), workers, why_not_shared=WHY, **options)


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_every_byte_arrives_again_and_again(model, workers, way, verify):
    parameters = list(model.parameters())
    transport = connect(model, workers, verify=verify, **WAYS[way])
    for _ in range(5):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        num_bytes = transport.transfer()
        assert same(workers.engine.memory, workers.engine.expected(model))
        assert num_bytes == sum(p.nbytes for p in model.parameters())
        assert transport.is_current()
    assert workers.asked.count("bind") == 1
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert WHY in transport.reason
    assert transport.working_bytes == 0
    transport.close()
    transport.close()
    assert workers.asked.count("release") == 1


@pytest.mark.parametrize("bucket_bytes", [256, 1 << 20])
def test_sharded_weights_are_gathered_into_groups(workers, bucket_bytes, mesh):
    model, whole = Trainer(), Trainer()
    for name, parameter in list(model.named_parameters())[:-3]:  # the others are as they are
        placements = [Shard(0)] if parameter.dim() else [Replicate()]
        model.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))
    transport = connect(model, workers, bucket_bytes=bucket_bytes)
    assert transport.reason.endswith("staged through a buffer in two halves, since q is sharded over ranks")
    assert transport.working_bytes == 2 * 8 * 6 * 4
    for _ in range(3):
        with torch.no_grad():
            for parameter in (*model.parameters(), *whole.parameters()):
                parameter.add_(1)
        assert not transport.is_current()
        transport.transfer()
        assert same(workers.engine.memory, workers.engine.expected(whole))
        assert transport.is_current()
    workers.take(lambda take, index: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        transport.transfer()
    workers.take()
    transport.transfer()
    assert same(workers.engine.memory, workers.engine.expected(whole))
    transport.close()


def test_workers_that_cannot_map_the_senders_gpu_read_copies_of_host_memory_and_the_reason_is_told(model, workers):
    transport = connect(model, workers, ipc_refusal="CUDA IPC does not map memory of another process here")
    assert "in host memory, since a worker says: CUDA IPC does not map" in transport.reason
    assert "copied by the engine out of" not in transport.reason
    transport.transfer()
    assert workers.receiver._buffer._window.is_copy
    assert same(workers.engine.memory, workers.engine.expected(model))


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_of_kibibytes_is_split_where_groups_are_small(workers, way):
    model = Trainer()
    model.q = nn.Parameter(torch.randn(800, 6))
    workers.engine.memory["qk"] = torch.zeros(804, 6)
    load = workers.engine.load_weights

    def wider(weights):
        for name, tensor in weights:
            if name in ("q", "k"):
                rows = slice(0, 800) if name == "q" else slice(800, 804)
                workers.engine.memory["qk"][rows].copy_(tensor)
            else:
                load([(name, tensor)])

    workers.engine.load_weights = wider
    connect(model, workers, **WAYS[way]).transfer()
    assert torch.equal(workers.engine.memory["qk"], torch.cat([model.q, model.k]))


@pytest.mark.parametrize("way", WAYS)
def test_a_write_that_was_not_sent_is_noticed(model, workers, way):
    transport = connect(model, workers, **WAYS[way])
    transport.transfer()
    for write in (lambda: model.head.data[0, 0].add_(1), model.head.data[:, 2].neg_, lambda: model.q.data.mul_(2)):
        write()
        assert not transport.is_current()
        transport.transfer()
        assert transport.is_current()


def test_parameters_with_new_memory_are_described_again(model, workers):
    transport = connect(model, workers)
    transport.transfer()
    model.q.data = model.q.data.clone() + 3
    assert not transport.is_current()
    transport.transfer()
    assert same(workers.engine.memory, workers.engine.expected(model))
    assert workers.asked.count("bind") == 2 and workers.asked.count("release") == 1


@pytest.mark.parametrize("way", WAYS)
def test_parameters_of_another_dtype_are_described_again(model, workers, way):
    transport = connect(model, workers, **WAYS[way])
    transport.transfer()
    model.q.data = model.q.data.double() + 1
    model.head.data = model.head.data.float()
    assert not transport.is_current()
    for _ in range(2):
        transport.transfer()
        assert transport.is_current()
        assert same(workers.engine.memory, workers.engine.expected(model))
    assert workers.asked.count("bind") == 2


def test_after_parameters_that_did_not_fit_the_repaired_ones_arrive(model, workers):
    transport = connect(model, workers)
    fitting = model.down
    model.down = nn.Parameter(torch.randn(7, 9))
    for _ in range(2):
        with pytest.raises((Unsupported, TransferError), match="down"):
            transport.transfer(1)
    model.down = nn.Parameter(fitting.detach().clone())
    transport.transfer(2)
    assert transport.is_current()
    transport.close()


@pytest.mark.parametrize("way", WAYS)
def test_parameters_with_gaps_arrive(model, workers, way):
    model.q = nn.Parameter(torch.randn(8, 12)[:, :6])
    model.norm = nn.Parameter(torch.randn(12)[::2])
    transport = connect(model, workers, **WAYS[way])
    transport.transfer()
    assert same(workers.engine.memory, workers.engine.expected(model))
    model.q.data[7, 5] += 1
    assert not transport.is_current()


def test_a_tensor_without_elements_needs_no_memory():
    opened, place = Opened(CPU), Place(TensorSpec("none", "bfloat16", (0, 4), (4, 1)), NOWHERE, 0)
    opened.open({"tensors": [place.to_wire()], "memory": []})
    (empty,) = opened.tensors.values()
    assert (empty.dtype, empty.shape) == (torch.bfloat16, (0, 4))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_released_is_gone_at_once(model, workers, way):
    transport = connect(model, workers, **WAYS[way])
    transport.transfer()
    receiver = workers.receiver
    mapped = [weakref.ref(tensor) for group in receiver._groups for tensor in group.tensors.values()]
    mapped += [weakref.ref(group) for group in receiver._groups] + [weakref.ref(receiver._opened)]
    gc.collect()
    gc.disable()
    try:
        transport.close()
        assert [ref() for ref in mapped if ref() is not None] == []
    finally:
        gc.enable()


def test_what_is_exported_is_the_same_memory(model):
    tensors = dict(model.named_parameters())
    values = {name: p.detach().clone() for name, p in tensors.items()}
    exported = Exported(tensors)
    opened = Opened(CPU)
    opened.open(exported.wire)
    mapped = opened.tensors
    assert same(mapped, values)
    mapped["q"][2, 3] = 42
    assert model.q[2, 3] == 42
    assert exported.is_current(tensors)
    exported.close()
    assert same(dict(model.named_parameters()) | {"q": mapped["q"]}, values | {"q": mapped["q"]})


def test_memory_of_a_process_that_has_ended_is_said_to_be_gone(model):
    exported = Exported(dict(model.named_parameters()))
    gone = exported.wire["memory"][0] | {"path": "/proc/999999/fd/3", "pid": 999999}
    with pytest.raises(TransferError, match="cannot map .* of process 999999"):
        Opened(CPU).open({"tensors": exported.wire["tensors"], "memory": [gone]})


# ---- failures --------------------------------------------------------------------------------------------------------

SMALL = {"staged": True, "bucket_bytes": 256}


def group_of(transport, name):
    groups = transport._buffer.groups
    return next(i for i, group in enumerate(groups) if any(piece.name == name for piece in group))


def test_a_group_that_never_came_is_named(model, workers):
    transport = connect(model, workers, **SMALL)
    workers.take(lambda take, index: take(index) if index != group_of(transport, "down") else None)
    with pytest.raises(TransferError, match="missing: down"):
        transport.transfer()


def test_a_group_that_came_twice_is_named(model, workers):
    transport = connect(model, workers, **SMALL)
    workers.take(lambda take, index: [take(index) for _ in range(2 if index == group_of(transport, "k") else 1)])
    with pytest.raises(TransferError, match=r"doubled: .*k \(2 times\)"):
        transport.transfer()


def test_bytes_that_change_on_their_way_are_noticed(model, workers):
    transport = connect(model, workers, **SMALL)
    hit = group_of(transport, "k")

    def flip(take, index):
        if index == hit:
            transport._buffer._halves[hit % 2][1] ^= 1
        take(index)

    workers.take(flip)
    with pytest.raises(TransferError, match="1 tensors in the engine differ from what was sent, k"):
        transport.transfer()
    workers.take()
    transport.transfer()
    assert same(workers.engine.memory, workers.engine.expected(model))


@pytest.mark.parametrize("name", ["norm", "k", "down", "head", "codes", "scale"])
@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_does_not_keep_what_it_was_given_is_noticed(model, workers, way, name):
    transport = connect(model, workers, **WAYS[way])
    wrong = next(copy for copy in workers.receiver._plan.copies if copy.name == name)
    original = torch._foreach_copy_

    def forgetful(targets, sources, *rest):
        original(targets, sources, *rest)
        if any(t.untyped_storage().data_ptr() == wrong.target.untyped_storage().data_ptr() for t in targets):
            wrong.target.view(-1)[-1:] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", forgetful)
        with pytest.raises(TransferError, match=f"1 tensors in the engine differ from what was sent, {name}"):
            transport.transfer()
    transport.transfer()
    assert transport.is_current()


def test_what_was_summed_is_attested_with_checksums_only(model, workers):
    transport = connect(model, workers, **SMALL)
    receive = workers.receive
    for forgotten in (None, [[1], [2]]):
        workers.receive = lambda step, forgotten=forgotten, **arguments: receive(
            step, **(arguments | ({"checksums": forgotten} if step == "finish" else {}))
        )
        with pytest.raises(TransferError, match=r"\d+ groups were summed, and checksums of [02] were given"):
            transport.transfer()
        assert not transport.is_current()


def test_a_group_whose_checksums_are_too_few_is_named(model, workers):
    transport = connect(model, workers, staged=True)
    receive = workers.receive
    workers.receive = lambda step, **arguments: receive(
        step, **(arguments | ({"checksums": [arguments["checksums"][0][1:]]} if step == "finish" else {}))
    )
    with pytest.raises(TransferError, match="group 0 has 8 pieces, and 7 checksums were given"):
        transport.transfer()


@pytest.mark.parametrize("options", [SMALL, {"ipc_refusal": "it cannot map this"}])
def test_tensors_that_were_described_with_gaps_are_refused_and_nothing_stays_mapped(model, workers, options):
    receive = workers.receive

    def gaps(step, **arguments):
        if step == "bind":
            arguments["tensors"][0]["strides"] = [12, 1]
        return receive(step, **arguments)

    workers.receive = gaps
    with pytest.raises(Unsupported, match=r"strides \(12, 1\), with gaps"):
        connect(model, workers, **options)
    assert workers.receiver._buffer is None and workers.asked[-1] == "release"


@pytest.mark.parametrize("way", WAYS)
def test_another_shape_is_refused_before_anything_is_written_and_what_fits_arrives_again(model, workers, way):
    transport = connect(model, workers, **WAYS[way])
    before = {n: t.clone() for n, t in workers.engine.memory.items()}
    fitting = model.down
    model.down = nn.Parameter(torch.randn(6, 9))
    with pytest.raises((TransferError, Unsupported), match="down"):
        transport.transfer()
    assert same(before, workers.engine.memory)
    model.down = fitting
    assert not transport.is_current()
    transport.transfer()
    assert same(workers.engine.memory, workers.engine.expected(model))


def test_other_tensors_than_were_described_are_refused(model, workers):
    connect(model, workers, **SMALL)
    with pytest.raises(TransferError, match="version 1 consists of other tensors"):
        workers.receive("begin", version=1, digest="0" * 64)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m: m.register_parameter("extra", nn.Parameter(torch.zeros(2))), KeyError, "extra"),
        (lambda m: delattr(m, "k"), TransferError, "qk exactly once"),
        (lambda m: setattr(m, "q", nn.Parameter(torch.zeros(7, 6))), RuntimeError, "size|shape|broadcast"),
    ],
    ids=["a name that the engine does not know", "a tensor that is missing", "another shape"],
)
def test_weights_that_do_not_fit_the_engine_are_refused_when_they_are_described(model, workers, change, error, message):
    change(model)
    with pytest.raises((error, Unsupported), match=message):
        connect(model, workers)


def test_an_engine_that_computes_is_refused_with_the_reason(model, workers):
    load = workers.engine.load_weights
    workers.engine.load_weights = lambda weights: load((name, t * 2) for name, t in weights)
    with pytest.raises(Unsupported, match="computes with it"):
        connect(model, workers)


def test_an_update_that_has_not_begun_is_refused(workers):
    with pytest.raises(TransferError, match="bind first"):
        workers.receiver.begin(0, "x")
    with pytest.raises(TransferError, match="no update has begun"):
        workers.receiver.finish(None)


def test_an_exception_in_a_worker_reaches_the_trainer_and_the_next_transfer_is_whole(model, workers):
    transport = connect(model, workers, **SMALL)

    def fail(take, index):
        if index == 1:
            raise RuntimeError("the worker stumbled")
        take(index)

    workers.take(fail)
    with pytest.raises(RuntimeError, match="stumbled"):
        transport.transfer()
    assert not transport.is_current()
    workers.take()
    transport.transfer()
    assert same(workers.engine.memory, workers.engine.expected(model))


def test_a_sender_that_fails_on_its_way_lets_the_workers_go(model, workers):
    transport = connect(model, workers, **SMALL)
    fill, ended = transport._buffer._fill, []
    copy = workers.receiver.copy

    def watched(**arguments):
        try:
            copy(**arguments)
        except TransferError as error:
            ended.append(str(error))
            raise

    def broken(index, tensors):
        if index == 2:
            raise MemoryError("the sender stumbled")
        fill(index, tensors)

    workers.receiver.copy = watched
    transport._buffer._fill = broken
    with pytest.raises(MemoryError, match="stumbled"):
        transport.transfer()
    assert ended == ["the sender has stopped before group 3"]
    transport._buffer._fill = fill
    transport.transfer()
    assert same(workers.engine.memory, workers.engine.expected(model))


def test_nothing_is_copied_before_memory_was_described(model, workers):
    transport = connect(model, workers, **SMALL)
    specs = transport._manifest_of(dict(model.named_parameters())).specs
    workers.receiver.bind([spec.to_wire() | {"strides": None} for spec in specs])
    with pytest.raises(TransferError, match="no memory of the sender is mapped"):
        workers.receiver.copy(verify=True)


def test_workers_that_die_between_two_groups_end_the_transfer(model, workers):
    transport = connect(model, workers, **SMALL)
    receive = workers.receive

    def dies(step, **arguments):
        if step == "copy":
            raise EngineLost("its process ended during receive")
        return receive(step, **arguments)

    workers.receive = dies
    start_s = time.monotonic()
    with pytest.raises(EngineLost, match="its process ended"):
        transport.transfer()
    assert time.monotonic() - start_s < 10
    assert not transport.is_current()
    workers.receive = receive
    transport.transfer()
    assert same(workers.engine.memory, workers.engine.expected(model))


class TwoWorkers(Workers):
    """Two workers, which run side by side, and the first failing one's error."""

    pids = (0, 0)

    def __init__(self, engines):
        super().__init__(engines[0])
        other = Workers(engines[1])
        self.receivers = [self.receiver, Receiver(CPU, other._record, number=1)]

    def receive(self, step, **arguments):
        self.asked.append(step)
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(getattr(receiver, step), **arguments) for receiver in self.receivers]
        return [future.result() for future in futures]


@pytest.mark.parametrize("failing", [0, 1])
def test_one_failing_worker_of_two_is_told_at_once(model, failing):
    engines = [Engine(), Engine()]
    workers = TwoWorkers(engines)
    transport = connect(model, workers, **SMALL)
    take = workers.receivers[failing]._copy

    def stumble(index, verify):
        if index == 1:
            raise RuntimeError("the worker stumbled")
        take(index, verify=verify)

    workers.receivers[failing]._copy = stumble
    start_s = time.monotonic()
    with pytest.raises(RuntimeError, match="the worker stumbled"):
        transport.transfer()
    assert time.monotonic() - start_s < 10
    assert not transport.is_current()
    workers.receivers[failing]._copy = take
    transport.transfer()
    assert all(same(engine.memory, engine.expected(model)) for engine in engines)


@pytest.mark.parametrize("change", [{"version": 2}, {"num_tensors": 7}], ids=["another version", "fewer tensors"])
@pytest.mark.parametrize("way", WAYS)
def test_a_worker_that_attests_something_else_than_was_sent_is_noticed(model, way, change):
    workers = TwoWorkers([Engine(), Engine()])
    receive = workers.receive

    def altered(step, **arguments):
        answers = receive(step, **arguments)
        return [answers[0], answers[1] | change] if step == "finish" else answers

    transport = connect(model, workers, **WAYS[way])
    workers.receive = altered
    attested = {"version": 3, "num_tensors": 8} | change
    said = f"attests {attested['num_tensors']} tensors of version {attested['version']}, of 8 of version 3"
    with pytest.raises(TransferError, match=said):
        transport.transfer(3)
    workers.receive = receive
    transport.transfer(4)
    assert transport.is_current()


def test_both_places_that_a_tensor_goes_to_are_compared(model, workers):
    workers.engine.memory["again"] = torch.zeros(6, 8)
    load = workers.engine.load_weights

    def twice(weights):
        for name, tensor in weights:
            load([(name, tensor)])
            if name == "down":
                workers.engine.memory["again"].copy_(tensor)
                workers.engine.memory["third"].copy_(tensor)

    workers.engine.memory["third"] = torch.zeros(6, 8)
    workers.engine.load_weights = twice
    original = torch._foreach_copy_
    for place in ("again", "third"):
        for way in WAYS:
            transport = connect(model, workers, **WAYS[way])
            transport.transfer()

            def forgetful(targets, sources, *rest, place=place):
                original(targets, sources, *rest)
                workers.engine.memory[place][2, 3] += 1

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "_foreach_copy_", forgetful)
                with pytest.raises(TransferError, match="1 tensors in the engine differ from what was sent, down"):
                    transport.transfer()


@pytest.mark.parametrize("way", WAYS)
def test_regions_that_are_not_rows_arrive_in_pieces_too(model, workers, way):
    load = workers.engine.load_weights
    workers.engine.memory["down"] = torch.zeros(8, 6)
    del workers.engine.memory["rest"]

    def transposed(weights):
        for name, tensor in weights:
            if name == "down":
                workers.engine.memory["down"].copy_(tensor.T)
            else:
                load([(name, tensor)])

    workers.engine.load_weights = transposed
    transport = connect(model, workers, **WAYS[way])
    for _ in range(2):
        with torch.no_grad():
            model.down.add_(1)
        transport.transfer()
        assert torch.equal(workers.engine.memory["down"], model.down.T)
        assert transport.is_current()


def test_two_workers_read_the_same_host_memory(model):
    engines = [Engine(), Engine()]
    transport = connect(model, TwoWorkers(engines), ipc_refusal="the memory is not on cuda:1", bucket_bytes=256)
    for _ in range(2):
        with torch.no_grad():
            model.q.add_(1)
        transport.transfer()
        assert all(same(engine.memory, engine.expected(model)) for engine in engines)


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_was_started_again_is_told_everything_anew(model, workers, way):
    transport = connect(model, workers, **WAYS[way])
    transport.transfer()
    workers.engine = Engine()
    workers.receiver = Receiver(CPU, workers._record)
    workers.asked.clear()
    transport.reconnect()
    assert workers.asked[0] == "bind" and "release" not in workers.asked
    transport.transfer()
    assert same(workers.engine.memory, workers.engine.expected(model))


def test_one_worker_of_two_that_holds_something_else_is_noticed(model):
    engines = [Engine(), Engine()]
    transport = connect(model, TwoWorkers(engines))
    transport.transfer()
    assert transport.is_current()
    engines[1].memory["down"][0, 0] += 1
    assert not transport.is_current()


def test_a_group_is_not_overwritten_while_a_slow_worker_reads_it(model, workers):
    transport = connect(model, workers, **SMALL, verify=False)

    def slowly(take, index):
        time.sleep(0.02)
        take(index)

    workers.take(slowly)
    transport.transfer()
    assert same(workers.engine.memory, workers.engine.expected(model))


def test_a_group_is_not_read_before_a_slow_sender_has_filled_it(model, workers):
    transport = connect(model, workers, **SMALL, verify=False)
    fill = transport._buffer._fill

    def slowly(*args):
        time.sleep(0.02)
        fill(*args)

    transport._buffer._fill = slowly
    transport.transfer()
    assert same(workers.engine.memory, workers.engine.expected(model))
