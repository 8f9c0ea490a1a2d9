from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colo.units import align_up
from colo.weights.manifest import DTYPE_BYTES, TensorSpec
from colo.weights.transports.ipc.bucket import ALIGNMENT_BYTES, Bucket, plan_buckets

SHAPES = st.one_of(
    st.just(()),
    st.integers(0, 3000).map(lambda n: (n,)),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
)


@st.composite
def problems(draw):
    """Tensors of any dtype and shape, with a legal bucket size."""
    kinds = draw(st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), SHAPES), max_size=12))
    specs = [TensorSpec(f"w{i}", dtype, shape) for i, (dtype, shape) in enumerate(kinds)]
    return specs, {"bucket_bytes": draw(st.integers(ALIGNMENT_BYTES, 8000))}


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
def test_pieces_are_aligned_disjoint_and_inside_the_bucket(problem):
    specs, options = problem
    for bucket in plan_buckets(specs, **options):
        end = 0
        for piece in bucket.pieces:
            assert piece.offset_bytes % ALIGNMENT_BYTES == 0
            assert piece.offset_bytes >= end
            end = piece.end_bytes
            assert end == piece.offset_bytes + piece.size_bytes
        assert end == bucket.size_bytes <= options["bucket_bytes"]


@settings(max_examples=150, deadline=None)
@given(problems())
def test_only_what_exceeds_a_bucket_is_cut_and_never_inside_an_element(problem):
    specs, options = problem
    buckets = plan_buckets(specs, **options)
    for spec in specs:
        pieces = [piece for bucket in buckets for piece in bucket.pieces if piece.name == spec.name]
        assert (len(pieces) == 1) or spec.size_bytes > options["bucket_bytes"]
        for piece in pieces:
            assert piece.start_bytes % ALIGNMENT_BYTES == 0
            assert piece.start_bytes % DTYPE_BYTES[spec.dtype] == piece.size_bytes % DTYPE_BYTES[spec.dtype] == 0


@settings(max_examples=100, deadline=None)
@given(problems())
def test_a_bucket_closes_only_when_the_next_tensor_needs_it(problem):
    specs, options = problem
    sizes = {spec.name: spec.size_bytes for spec in specs}
    buckets = plan_buckets(specs, **options)
    for before, after in pairwise(buckets):
        first = after.pieces[0]
        free = options["bucket_bytes"] - align_up(before.size_bytes, ALIGNMENT_BYTES)
        whole = first.size_bytes == sizes[first.name]
        block = first.size_bytes if whole else ALIGNMENT_BYTES
        assert block > free


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
            buffer[piece.offset_bytes : piece.end_bytes] = sent[piece.name][piece.start_bytes : piece.stop_bytes]
        for piece in bucket.pieces:
            received[piece.name][piece.start_bytes : piece.stop_bytes] = buffer[piece.offset_bytes : piece.end_bytes]
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


@pytest.mark.parametrize("bucket_bytes", [255, 0])
def test_a_bucket_that_is_too_small_is_refused(bucket_bytes):
    with pytest.raises(ValueError, match=f"bucket of {bucket_bytes} bytes .* at least 256"):
        plan_buckets([TensorSpec("w", "int8", (8,))], bucket_bytes=bucket_bytes)
