"""A small network and its optimizer, and how the state of one is parked and compared."""

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from colo.phases.phase import Residency

STEPS = 3


class Trained:
    """A small network, its optimizer, and the way in which that one steps."""

    SIZES = (12, 16)

    def __init__(self, make):
        torch.manual_seed(1)
        size, inner = self.SIZES
        self.net = torch.nn.Sequential(torch.nn.Linear(size, inner), torch.nn.Tanh(), torch.nn.Linear(inner, 4))
        self.optimizer = make(self.net)

    def step(self, number, way):
        torch.manual_seed(number)
        np.random.seed(number)  # Kron of pytorch_optimizer draws from it
        if way == "closure":
            self.optimizer.step(lambda: self.backward(number))
        elif way == "loss":
            self.backward(number)
            self.optimizer.step(lambda: float(self.loss(number)))
        elif way == "loop":
            self.backward(number)
            self.optimizer.step()
        else:
            self.backward(number, create_graph=True)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, number, *, create_graph=False):
        with torch.enable_grad():
            self.optimizer.zero_grad()
            loss = self.loss(number)
            loss.backward(create_graph=create_graph)
        return loss

    def loss(self, number):
        generator = torch.Generator().manual_seed(number)
        return self.net(torch.randn(5, self.SIZES[0], generator=generator)).square().mean()

    def values(self):
        saved = pytree.tree_leaves([self.optimizer.state_dict()["state"], list(self.net.parameters())])
        return [_plain(leaf) for leaf in saved if isinstance(leaf, (torch.Tensor, int, float, bool, str))]


def _plain(leaf):
    if isinstance(leaf, torch.Tensor):
        is_quantized = is_traceable_wrapper_subclass(leaf) and hasattr(leaf, "block_size")
        return (leaf.dequantize() if is_quantized else leaf).detach().cpu()
    return torch.tensor(leaf) if isinstance(leaf, (int, float)) else leaf


def assert_same(left, right):
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        assert torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) if isinstance(a, torch.Tensor) else a == b


def park(trainer_state):
    trainer_state.refresh()
    for segment in trainer_state.segments:
        if segment.residency is Residency.RESIDENT:
            segment.begin(Residency.OFFLOADED).wait()


def is_at_host(mover, tensor):
    """True for a tensor over memory of the arena."""
    blocks = [(block.data.data_ptr(), block.size_bytes) for block in mover.arena._blocks]
    return any(start <= tensor.data_ptr() < start + size for start, size in blocks)
