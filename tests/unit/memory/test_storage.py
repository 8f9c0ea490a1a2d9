"""Who refers to a storage, and tensors made over memory of others."""

import gc
import weakref

import pytest
import torch

from colo.memory.storage import (
    dense_parts,
    num_others,
    num_references,
    storage_bytes,
    storage_key,
    with_own_storage,
)

HELD = {
    "nobody": (lambda t: None, 1, 0),
    "the same object": (lambda t: [t, t], 1, 0),
    "what is detached": (lambda t: t.detach(), 2, 1),
    "a view, and through it the tensor": (lambda t: t.view(-1), 2, 2),
    "two views": (lambda t: [t[0], t[1:]], 3, 4),
}


@pytest.mark.parametrize("what", HELD)
def test_whoever_refers_to_memory_beside_known_tensors_is_counted(what):
    hold, references, others = HELD[what]
    known = torch.zeros(4, 4)
    held = hold(known)
    assert (num_references(known), num_others([known])) == (references, others)
    del held
    assert (num_references(known), num_others([known])) == (1, 0)


@pytest.mark.parametrize("export", [torch.Tensor.numpy, torch.utils.dlpack.to_dlpack])
def test_what_owns_a_tensor_without_python_is_counted(export):
    known = torch.zeros(4, 4)
    held = export(known)
    assert num_others([known]) > 0
    del held
    assert num_others([known]) == 0


def test_views_that_are_known_too_do_not_count_nor_does_what_only_they_hold():
    known = torch.zeros(4, 4)
    rows = [known[0], known[1]]
    assert num_others([known, *rows]) == 0
    assert num_others([known, rows[0]]) > 0
    unheld = [torch.zeros(4, 4)[0]]  # its base is held by it alone
    assert num_others(unheld) == 0
    both = list(torch.zeros(2, 4).unbind())
    assert num_others(both) == 0 and num_others(both[:1]) > 0
    base = both[0]._base
    assert base is not None and num_others(both) > 0


def test_a_view_of_a_tensor_whose_memory_has_been_exchanged_is_no_view_of_it():
    base = torch.zeros(4)
    view = base[1:]
    base.data = torch.ones(4)
    assert storage_key(base) != storage_key(view) and num_others([base]) == 1
    assert num_references(view) == 1


def test_bytes_of_a_storage_are_all_of_them():
    tensor = torch.arange(10, dtype=torch.int16)
    assert torch.equal(storage_bytes(tensor[3:5]), tensor.view(torch.uint8))
    assert storage_key(storage_bytes(tensor)) == storage_key(tensor) != storage_key(tensor.clone())


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", ["strided", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
def test_what_a_tensor_of_any_layout_keeps_its_bytes_in(layout):
    dense = torch.eye(4)
    block = {"blocksize": (2, 2)} if layout in ("sparse_bsr", "sparse_bsc") else {}
    parts = dense_parts(dense if layout == "strided" else dense.to_sparse(layout=getattr(torch, layout), **block))
    values = {"strided": 16, "sparse_bsr": 8, "sparse_bsc": 8}.get(layout, 4)
    assert [p.numel() for p in parts if p.is_floating_point()] == [values]
    indices = {"strided": [], "sparse_coo": [8], "sparse_csr": [5, 4], "sparse_csc": [5, 4]}.get(layout, [3, 2])
    assert [p.numel() for p in parts if not p.is_floating_point()] == indices


def test_a_storage_of_its_own_is_just_its_bytes_and_keeps_them_alive():
    whole = torch.arange(12.0).requires_grad_(True)
    gone = weakref.ref(whole)
    own = with_own_storage(whole[4:8])
    assert own.data_ptr() == whole.data_ptr() + 16 and own.untyped_storage().nbytes() == 16
    assert not own.requires_grad and storage_key(own) != storage_key(whole)
    with torch.no_grad():
        whole[4] = 9
    del whole
    gc.collect()
    assert gone() is None and own.tolist() == [9, 5, 6, 7]


def test_a_storage_of_its_own_is_refused_to_what_is_not_in_a_row_and_nothing_to_what_is_empty():
    with pytest.raises(ValueError, match=r"shape \(3, 2\) and strides \(1, 3\) is not contiguous"):
        with_own_storage(torch.zeros(2, 3).t())
    empty = with_own_storage(torch.zeros(4)[:0])
    assert empty.shape == (0,) and empty.untyped_storage().nbytes() == 0
