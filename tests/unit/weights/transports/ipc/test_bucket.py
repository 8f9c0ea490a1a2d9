from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.units import align_up
from colo.weights.manifest import DTYPE_BYTES, TensorSpec
from colo.weights.transports.ipc.bucket import Bucket, Piece, plan_buckets

SHAPES = st.one_of(
    st.just(()),
    st.integers(0, 3000).map(lambda n: (n,)),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
)


@st.composite
def problems(draw):
    """Tensors of any dtype and shape, with a legal bucket size, alignment and replication."""
    kinds = draw(st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), SHAPES), max_size=12))
    specs = [TensorSpec(f"w{i}", dtype, shape) for i, (dtype, shape) in enumerate(kinds)]
    alignment = draw(st.sampled_from([16, 64, 256]))
    copies = st.integers(1, 4)
    by_name = st.fixed_dictionaries({}, optional={s.name: copies for s in specs})
    replication = draw(st.one_of(st.just(1), copies, by_name))
    bucket_bytes = draw(st.integers(4 * alignment, 8000))
    return specs, {"bucket_bytes": bucket_bytes, "alignment": alignment, "replication": replication}


def copies_of(name, replication):
    return replication if isinstance(replication, int) else replication.get(name, 1)


def mebi(name, num, dtype="uint8"):
    return TensorSpec(name, dtype, (num << 20,))


@settings(max_examples=150, deadline=None)
@given(problems())
def test_every_byte_once_and_in_order(problem):
    specs, options = problem
    pieces = [piece for bucket in plan_buckets(specs, **options) for piece in bucket.pieces]
    ranges = defaultdict(list)
    for piece in pieces:
        ranges[piece.name].append((piece.start_bytes, piece.stop_bytes))
    assert list(ranges) == [spec.name for spec in specs]
    for spec in specs:
        starts, stops = zip(*ranges[spec.name], strict=True)
        assert (starts[0], stops[-1]) == (0, spec.size_bytes)
        assert starts[1:] == stops[:-1]
        assert all(a < b for a, b in ranges[spec.name]) or ranges[spec.name] == [(0, 0)]


@settings(max_examples=150, deadline=None)
@given(problems())
def test_copies_are_aligned_disjoint_and_inside_the_bucket(problem):
    specs, options = problem
    for bucket in plan_buckets(specs, **options):
        end = 0
        for piece in bucket.pieces:
            assert piece.replication == copies_of(piece.name, options["replication"])
            for index in range(piece.replication):
                offset = piece.copy_offset_bytes(index)
                assert offset % options["alignment"] == 0
                assert offset >= end
                end = offset + piece.size_bytes
        assert end == bucket.size_bytes <= options["bucket_bytes"]


@settings(max_examples=150, deadline=None)
@given(problems())
def test_only_what_exceeds_a_bucket_is_cut_and_never_inside_an_element(problem):
    specs, options = problem
    buckets = plan_buckets(specs, **options)
    for spec in specs:
        pieces = [piece for bucket in buckets for piece in bucket.pieces if piece.name == spec.name]
        copies, alignment = copies_of(spec.name, options["replication"]), options["alignment"]
        taken = (copies - 1) * align_up(spec.size_bytes, alignment) + spec.size_bytes
        assert (len(pieces) == 1) or taken > options["bucket_bytes"]
        for piece in pieces:
            assert piece.start_bytes % alignment == 0
            assert piece.start_bytes % DTYPE_BYTES[spec.dtype] == piece.size_bytes % DTYPE_BYTES[spec.dtype] == 0


@settings(max_examples=100, deadline=None)
@given(problems())
def test_a_bucket_closes_only_when_the_next_tensor_needs_it(problem):
    specs, options = problem
    sizes = {spec.name: spec.size_bytes for spec in specs}
    buckets = plan_buckets(specs, **options)
    for before, after in pairwise(buckets):
        first = after.pieces[0]
        free = options["bucket_bytes"] - align_up(before.size_bytes, options["alignment"])
        whole = first.size_bytes == sizes[first.name]
        block = first.size_bytes if whole else options["alignment"]
        assert (first.replication - 1) * align_up(block, options["alignment"]) + block > free


@settings(max_examples=60, deadline=None)
@given(problems())
def test_same_input_same_plan(problem):
    specs, options = problem
    assert plan_buckets(iter(specs), **options) == plan_buckets(specs, **options)


@settings(max_examples=60, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_bytes_survive_a_trip_through_the_buckets(problem, random):
    specs, options = problem
    sent = {spec.name: random.randbytes(spec.size_bytes) for spec in specs}
    received = {spec.name: bytearray(spec.size_bytes) for spec in specs}
    buffer = bytearray(options["bucket_bytes"])
    for bucket in plan_buckets(specs, **options):
        for piece in bucket.pieces:
            for index in range(piece.replication):
                offset = piece.copy_offset_bytes(index)
                buffer[offset : offset + piece.size_bytes] = sent[piece.name][piece.start_bytes : piece.stop_bytes]
        for piece in bucket.pieces:
            offset = piece.copy_offset_bytes(piece.replication - 1)
            received[piece.name][piece.start_bytes : piece.stop_bytes] = buffer[offset : offset + piece.size_bytes]
    assert {name: bytes(data) for name, data in received.items()} == sent


def test_nothing_to_send_is_no_bucket():
    assert plan_buckets([], bucket_bytes=256) == []
    assert Bucket(pieces=()).size_bytes == 0


def test_a_tensor_larger_than_a_bucket_starts_in_the_room_that_is_left():
    specs = [TensorSpec("a", "int8", (100,)), TensorSpec("big", "float32", (600,)), TensorSpec("z", "bool", ())]
    plan = plan_buckets(specs, bucket_bytes=1000)
    found = [[(p.name, p.start_bytes, p.stop_bytes, p.offset_bytes) for p in bucket.pieces] for bucket in plan]
    assert found == [
        [("a", 0, 100, 0), ("big", 0, 512, 256)],
        [("big", 512, 1280, 0)],
        [("big", 1280, 2048, 0)],
        [("big", 2048, 2400, 0), ("z", 0, 1, 512)],
    ]
    assert [bucket.size_bytes for bucket in plan] == [768, 768, 768, 513]


def test_a_tensor_of_exactly_one_bucket_is_whole():
    plan = plan_buckets([mebi("a", 1), mebi("b", 2), mebi("c", 1)], bucket_bytes=2 << 20)
    assert [[p.name for p in bucket.pieces] for bucket in plan] == [["a"], ["b"], ["c"]]


def test_an_embedding_larger_than_the_buffer_is_sent():
    embedding = TensorSpec("model.embed_tokens.weight", "bfloat16", (151936, 4096))
    plan = plan_buckets([embedding], bucket_bytes=1 << 30)
    assert [bucket.size_bytes for bucket in plan] == [1 << 30, embedding.size_bytes - (1 << 30)]


def test_empty_tensors_take_no_room_and_are_kept():
    specs = [TensorSpec("e", "float32", (0, 5)), TensorSpec("w", "float32", (64,)), TensorSpec("f", "int8", (0,))]
    (bucket,) = plan_buckets(specs, bucket_bytes=256)
    assert [(p.name, p.size_bytes, p.offset_bytes) for p in bucket.pieces] == [
        ("e", 0, 0),
        ("w", 256, 0),
        ("f", 0, 256),
    ]
    assert bucket.size_bytes == 256


def test_replication_is_counted_in_the_bucket():
    specs = [mebi("qkv", 3), mebi("norm", 1)]
    assert len(plan_buckets(specs, bucket_bytes=4 << 20)) == 1
    plan = plan_buckets(specs, bucket_bytes=4 << 20, replication={"qkv": 4})
    assert [[(p.name, p.size_bytes >> 20, p.replication) for p in b.pieces] for b in plan] == [
        [("qkv", 1, 4)],
        [("qkv", 1, 4)],
        [("qkv", 1, 4)],
        [("norm", 1, 1)],
    ]
    assert [plan[0].pieces[0].copy_offset_bytes(i) for i in range(4)] == [i << 20 for i in range(4)]


def test_a_copy_that_is_not_there_is_refused():
    piece = Piece(name="w", start_bytes=0, size_bytes=8, offset_bytes=0, replication=2, stride_bytes=256)
    assert piece.end_bytes == 264
    for index in (-1, 2):
        with pytest.raises(ValueError, match=f"no copy {index}, the bucket holds 2"):
            piece.copy_offset_bytes(index)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket_bytes": 255}, "bucket of 255 bytes .* at least 256"),
        ({"bucket_bytes": 0}, "at least 256"),
        ({"bucket_bytes": 1000, "replication": 4}, "4 aligned block.* at least 1024"),
        ({"bucket_bytes": 1024, "replication": 0}, "replication of w must be at least 1, but is 0"),
        ({"bucket_bytes": 1024, "replication": {"w": -2}}, "but is -2"),
        ({"bucket_bytes": 1024, "replication": {"v": 2}}, "1 tensors that are not in the plan, such as v"),
        ({"bucket_bytes": 1024, "replication": dict.fromkeys("edcba", 2)}, "5 tensors .* not in the plan, such as a"),
        ({"bucket_bytes": 1024, "alignment": 8}, "at least 16 bytes.* but is 8"),
        ({"bucket_bytes": 1024, "alignment": 48}, "power of two .* but is 48"),
    ],
)
def test_impossible_plans_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        plan_buckets([TensorSpec("w", "int8", (8,))], **options)


def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(ValueError, match="w is listed more than once"):
        plan_buckets([TensorSpec("w", "int8", (8,))] * 2, bucket_bytes=256)
