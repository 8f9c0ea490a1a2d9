"""Versions of weights in a folder: whole or not there, the newest few, and never half read."""

import json
import os
import re
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import fsspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import colo
from colo.engines.buckets import bytes_of
from colo.engines.elsewhere import MANIFEST, Broadcaster, read_version, version_at
from colo.errors import BudgetError, TransferError
from tests.runtimes import qwen3


def some_weights(seed=0, count=5):
    generator = torch.Generator().manual_seed(seed)
    kinds = [torch.float32, torch.bfloat16, torch.float16]
    return {f"layer.{i}": torch.randn(3, 5 + i, generator=generator).to(kinds[i % 3]) for i in range(count)}


def held(version):
    found = {}
    for shard in version.glob("*.safetensors"):
        found |= load_file(shard)
    return found


def same_bits(left, right):
    return left.keys() == right.keys() and all(
        (left[n].shape, left[n].dtype) == (right[n].shape, right[n].dtype)
        and torch.equal(bytes_of(left[n]), bytes_of(right[n]))
        for n in left
    )


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6),
    kind=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]),
    shard_bytes=st.sampled_from([1, 64, 1 << 20]),
)
def test_what_is_read_is_what_was_written(tmp_path_factory, shapes, kind, shard_bytes):
    folder = colo.WeightsFolder(tmp_path_factory.mktemp("weights"), shard_bytes=shard_bytes)
    weights = {f"w{i}": torch.randint(0, 2, shape).to(kind) for i, shape in enumerate(shapes)}
    version = folder.write(weights.items())
    assert same_bits(held(version), weights)
    folder.check(version)


def test_views_of_one_memory_and_other_layouts_are_written_whole(tmp_path):
    whole = torch.arange(24.0).view(4, 6)
    weights = {"rows": whole[:2], "columns": whole[:, 1:3], "turned": whole.t(), "again": whole}
    assert same_bits(held(colo.WeightsFolder(tmp_path).write(weights.items())), weights)


def test_the_newest_versions_stay(tmp_path):
    folder = colo.WeightsFolder(tmp_path / "made" / "here", keep=2)
    assert folder.versions() == []
    written = [folder.write(some_weights(seed).items()) for seed in range(4)]
    assert folder.versions() == written[2:] and sorted(folder.path.iterdir()) == written[2:]
    assert same_bits(held(written[3]), some_weights(3))
    again = colo.WeightsFolder(folder.path, keep=1).write(some_weights(7).items())
    assert folder.versions() == [again] and again.name == "v00000005"
    with pytest.raises(ValueError, match="keep must be at least 1"):
        colo.WeightsFolder(tmp_path, keep=0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"keep": "2"}, "keep must be a whole number, not '2'"),
        ({"shard_bytes": "1GiB"}, "shard_bytes must be a whole number, not '1GiB'"),
        ({"delta": "no"}, "delta must be True or False, not 'no'"),
    ],
)
def test_settings_of_a_place_are_checked_before_weights_are_written_to_it(tmp_path, given, words):
    with pytest.raises(TypeError, match=words):
        colo.WeightsFolder(tmp_path, **given)
    with pytest.raises(TypeError, match=words):
        colo.WeightsBucket("memory://given", **given)
    for url in (None, str(tmp_path), ""):
        with pytest.raises(TypeError, match="a bucket has a URL, such as s3://bucket/run, not "):
            colo.WeightsBucket(url)


def test_the_same_weights_are_written_once(tmp_path):
    folder = colo.WeightsFolder(tmp_path)
    first = folder.write(some_weights().items())
    assert folder.write(iter(some_weights().items())) == first and folder.versions() == [first]
    (first / "model-00001.safetensors").write_bytes(b"spoilt")
    second = folder.write(some_weights().items())
    assert second != first
    folder.check(second)


def test_a_checkpoint_of_it_is_loaded_by_transformers(tmp_path):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**qwen3().to_dict()))
    version = colo.WeightsFolder(tmp_path, shard_bytes=20_000).write(model.named_parameters(), model.config)
    assert len(list(version.glob("*.safetensors"))) > 1
    loaded = AutoModelForCausalLM.from_pretrained(version)
    assert same_bits(dict(loaded.named_parameters()), dict(model.named_parameters()))


def spoil_bit(version):
    shard = version / "model-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def cut(version):
    shard = version / "model-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])


def swap(version):
    told = json.loads((version / MANIFEST).read_text())
    names = list(told["weights"])
    told["weights"][names[0]]["crc32"] += 1
    (version / MANIFEST).write_text(json.dumps(told))


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_bit,
        cut,
        swap,
        lambda version: (version / "model-00002.safetensors").unlink(),
        lambda version: (version / MANIFEST).unlink(),
        lambda version: (version / MANIFEST).write_text("{"),
        lambda version: (version / MANIFEST).write_text("{}"),
        lambda version: (version / "model-00001.safetensors").write_bytes(b""),
    ],
)
def test_a_version_that_is_not_what_was_written_is_refused(tmp_path, spoil):
    folder = colo.WeightsFolder(tmp_path, shard_bytes=64)
    version = folder.write(some_weights().items())
    spoil(version)
    with pytest.raises(TransferError, match=re.escape(str(version))):
        folder.check(version)


def test_what_fails_on_its_way_leaves_every_version_and_nothing_else(tmp_path, monkeypatch):
    folder = colo.WeightsFolder(tmp_path, shard_bytes=64)
    first = folder.write(some_weights().items())

    def broken():
        yield from list(some_weights(1).items())[:3]
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        folder.write(broken())
    with monkeypatch.context() as full:
        full.setattr("colo.engines.elsewhere.shutil.disk_usage", lambda path: SimpleNamespace(free=10))
        with pytest.raises(BudgetError, match=r"a shard of 60 B does not fit the 10 B that are free in") as caught:
            folder.write(some_weights(1).items())
        assert (caught.value.needed_bytes, caught.value.free_bytes) == (60, 10)
    with monkeypatch.context() as broken_disk:

        def no_space(*_, **__):
            raise OSError(28, os.strerror(28))

        broken_disk.setattr("colo.engines.elsewhere.save_file", no_space)
        with pytest.raises(TransferError, match="No space left on device"):
            folder.write(some_weights(1).items())
    assert list(tmp_path.iterdir()) == [first]
    folder.check(first)


def test_two_trainers_write_versions_of_their_own(tmp_path, monkeypatch):
    """Both have seen the same newest version; the slower one takes the next number."""
    one, other = colo.WeightsFolder(tmp_path), colo.WeightsFolder(tmp_path)
    rename, raced = type(tmp_path).rename, []

    def another_is_faster(self, target):
        if self.name.startswith(".part-") and not raced:
            raced.append(None)  # so that the other's own goes through
            raced[0] = other.write(some_weights(1).items())
        return rename(self, target)

    monkeypatch.setattr(type(tmp_path), "rename", another_is_faster)
    mine = one.write(some_weights(2).items())
    assert raced[0] != mine and folder_names(tmp_path) == [raced[0].name, mine.name]
    assert same_bits(held(mine), some_weights(2)) and same_bits(held(raced[0]), some_weights(1))


def folder_names(path):
    return sorted(entry.name for entry in path.iterdir())


# ---- an object store -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["file", "memory"])
def bucket_url(request, tmp_path):
    return f"file://{tmp_path}/store" if request.param == "file" else f"memory://{tmp_path}/store"


def read(version):
    return {name: tensor for shard in read_version(version) for name, tensor in shard.items()}


def test_versions_in_a_store_are_whole_and_the_newest_stay(bucket_url):
    bucket = colo.WeightsBucket(bucket_url + "/", keep=2, shard_bytes=64)
    assert bucket.versions() == [] and str(bucket) == f"versions of weights in {bucket_url}"
    written = [bucket.write(some_weights(seed).items()) for seed in range(4)]
    assert bucket.versions() == written[2:] and written[3].startswith(f"{bucket_url}/v00000004-")
    assert same_bits(read(version_at(written[3])), some_weights(3))
    assert bucket.write(some_weights(3).items()) == written[3]  # once
    bucket.check(written[3])
    other = colo.WeightsBucket(bucket_url, keep=3)  # of a second trainer
    assert other.write(some_weights(5).items()) in bucket.versions() and len(bucket.versions()) == 3
    changes = bucket.of_changes.write(some_weights(6).items())
    assert changes.startswith(f"{bucket_url}/changes/v00000001-") and changes not in bucket.versions()


def test_a_version_without_its_manifest_or_a_shard_is_no_version(bucket_url):
    bucket = colo.WeightsBucket(bucket_url, shard_bytes=64)
    first, second = (bucket.write(some_weights(seed).items()) for seed in range(2))
    files, root = fsspec.url_to_fs(bucket_url)
    last = f"{root}/{second.rpartition('/')[2]}"
    data = files.cat_file(f"{last}/model-00002.safetensors")
    files.pipe_file(f"{last}/model-00002.safetensors", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(TransferError, match=r"layer\.\d in \S+/model-00002.safetensors is not what was written"):
        bucket.check(second)
    files.rm_file(f"{root}/{first.rpartition('/')[2]}/model-00001.safetensors")
    with pytest.raises(TransferError, match="is not a whole version of weights"):
        bucket.check(first)
    assert bucket.write(some_weights(1).items()) != second  # the spoilt one is not taken for these weights
    files.rm_file(f"{last}/{MANIFEST}")
    assert second not in bucket.versions()
    with pytest.raises(TransferError, match="is not a whole version of weights"):
        bucket.check(second)


def test_a_store_that_cannot_be_reached_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(TransferError, match="weights could not be written to .*nowhere"):
        colo.WeightsBucket("nowhere://weights").write(some_weights().items())
    bucket = colo.WeightsBucket("memory://told")

    def fail(self, *_, **__):
        raise RuntimeError("403: no such key")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFileSystem.put_file", fail)
    with pytest.raises(TransferError, match="memory://told: RuntimeError: 403: no such key"):
        bucket.write(some_weights().items())
    assert bucket.versions() == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_engines_of_a_fleet_write_one_version_at_the_same_time(tmp_path, kind):
    place = colo.WeightsFolder(tmp_path) if kind == "folder" else colo.WeightsBucket(f"file://{tmp_path}/store")
    for seed in range(3):
        with ThreadPoolExecutor(4) as pool:
            written = set(pool.map(lambda _, seed=seed: place.write(some_weights(seed).items()), range(4)))
        assert written == {place.versions()[-1]}
        place.check(written.pop())
    assert len(place.versions()) == 2


def test_a_failed_upload_leaves_nothing(bucket_url, monkeypatch):
    bucket = colo.WeightsBucket(bucket_url, shard_bytes=64)
    files, root = fsspec.url_to_fs(bucket_url)
    put = type(files).put_file

    def fail(self, path, target, **how):
        if target.endswith(MANIFEST):
            raise RuntimeError("the connection is gone")
        return put(self, path, target, **how)

    monkeypatch.setattr(type(files), "put_file", fail)
    with pytest.raises(TransferError, match="the connection is gone"):
        bucket.write(some_weights().items())
    assert files.glob(f"{root}/v*") == []


def test_a_request_goes_out_while_a_broadcast_waits_for_who_is_asked_to_take_part():
    """NCCL connects in the first broadcast of a group, and returns once all of its ranks are in it."""
    asked, did = threading.Event(), []

    class End:
        is_whole = True

        def broadcast(self, whole):
            did.append(asked.wait(10))

        def settle(self, device):
            did.append("settled")

    broadcaster = Broadcaster("127.0.0.1", torch.device("cpu"), 1, 10.0)
    broadcaster.end = End()
    with broadcaster.sending([("w", torch.ones(3))]) as ordered:
        asked.set()
    assert [name for name, _ in ordered] == ["w"] and did == [True, "settled"]


def test_a_broadcast_that_fails_ends_the_group():
    told = []

    class End:
        is_whole = True

        def broadcast(self, whole):
            raise RuntimeError("no such device")

        def give_up(self, why):
            told.append(str(why))

    broadcaster = Broadcaster("127.0.0.1", torch.device("cpu"), 1, 10.0)
    broadcaster.end = End()
    with pytest.raises(TransferError, match="the broadcast of weights to the server failed: no such device"):
        with broadcaster.sending([("w", torch.ones(3))]):
            pass
    assert told == ["no such device"]
