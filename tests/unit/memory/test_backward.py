import pytest
import torch

from colo.memory.backward import PROGRESS_CALLS, BackwardWatch


class Log:
    def __init__(self, net, **changes):
        self.passes, self.progress, self.admitted = [], 0, 0
        calls = {"admit": self.admit, "on_pass": self.passes.append, "on_progress": self.advance} | changes
        self.watch = BackwardWatch(net.parameters(), **calls)

    def advance(self):
        self.progress += 1

    def admit(self):
        self.admitted += 1


def network(layers=20):
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))


def backward(net):
    net(torch.ones(1, 4)).sum().backward()


def test_passes_are_counted_from_one_and_anew_after_a_step():
    net = network()
    log = Log(net)
    for _ in range(3):
        backward(net)
    assert log.passes == [1, 2, 3]
    log.watch.forget()
    backward(net)
    assert log.passes == [1, 2, 3, 1]
    assert log.watch.passes == 1


def test_a_pass_begins_with_its_first_gradient():
    net = network()
    seen = []
    log = Log(net, on_pass=lambda n: seen.append(sum(p.grad is not None for p in net.parameters())))
    backward(net)
    assert seen == [1]
    assert log.admitted == 40


def test_progress_is_reported_some_times_in_every_pass():
    net = network()
    log = Log(net)
    backward(net)
    assert log.progress == PROGRESS_CALLS


def test_frozen_parameters_are_not_watched_and_removed_hooks_are_silent():
    net = network()
    net[0].requires_grad_(False)
    log = Log(net)
    backward(net)
    assert log.admitted == 38
    log.watch.remove()
    log.watch.remove()
    backward(net)
    assert log.admitted == 38


def test_refusing_a_gradient_ends_the_pass_and_leaves_those_before_it():
    class Refused(Exception):
        pass

    def refuse():
        if refusing:
            raise Refused

    net, refusing = network(), False
    log = Log(net, admit=refuse)
    backward(net)
    before = [p.grad.clone() for p in net.parameters()]
    refusing = True
    with pytest.raises(Refused):
        backward(net)
    assert log.passes == [1]
    assert all(torch.equal(p.grad, grad) for p, grad in zip(net.parameters(), before, strict=True))
