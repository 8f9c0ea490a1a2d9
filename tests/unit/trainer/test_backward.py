import pytest
import torch

from colo.trainer.backward import PROGRESS_CALLS, BackwardWatch


class Log:
    def __init__(self, net, **changes):
        self.passes, self.progress, self.admitted = [], 0, 0
        calls = {"admit": self.admit, "on_pass": self.passes.append, "on_progress": self.advance} | changes
        self.watch = BackwardWatch(**calls)
        self.watch.watch(net.parameters())

    def advance(self):
        self.progress += 1

    def admit(self):
        self.admitted += 1


def network(layers=20):
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(layers)))


def backward(net):
    net(torch.ones(1, 4)).sum().backward()


def test_a_pass_of_a_module_is_admitted_before_it_begins():
    begun = []

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network(2)

        def forward(self, x):
            return {"outputs": (self.inner(x), None)}

    def refuse():
        raise RuntimeError("not now")

    net, admitted = Net(), []

    def begin(module, inputs, output):
        if output["outputs"][0].requires_grad:
            output["outputs"][0].register_hook(begun.append)

    net.register_forward_hook(begin)
    calls = {"on_pass": lambda _: None, "on_progress": lambda: None}
    watch = BackwardWatch(modules=[net], admit=refuse, **calls)
    loss = net(torch.ones(1, 4))["outputs"][0].sum()
    with pytest.raises(RuntimeError, match="not now"):
        loss.backward()
    assert begun == []
    assert all(p.grad is None for p in net.parameters())
    watch.remove()
    watch = BackwardWatch(modules=[net], admit=lambda: admitted.append(1), **calls)
    net(torch.ones(1, 4))["outputs"][0].sum().backward()
    assert (len(admitted), len(begun)) == (1, 1)
    with torch.no_grad():
        net(torch.ones(1, 4))


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


@pytest.mark.parametrize(("layers", "distance"), [(20, 5), (16, 4)])
def test_progress_is_reported_at_equal_distances_and_at_the_end(layers, distance):
    net = network(layers)
    seen = []
    log = Log(net, on_progress=lambda: seen.append(sum(p.grad is not None for p in net.parameters())))
    backward(net)
    assert log.passes == [1]  # hooks do not keep it: it is kept here
    assert seen == [distance * number for number in range(1, PROGRESS_CALLS + 1)]


def test_parameters_that_are_watched_already_are_not_watched_twice():
    net = network()
    net[0].requires_grad_(False)
    log = Log(net)
    net[0].requires_grad_(True)
    log.watch.watch(net.parameters())
    backward(net)
    assert (log.admitted, log.passes, log.progress) == (40, [1], PROGRESS_CALLS)


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


def test_a_pass_that_ends_with_its_first_gradient_has_begun():
    def interrupt():
        raise KeyboardInterrupt

    net = network(2)
    log = Log(net, on_progress=interrupt)
    with pytest.raises(KeyboardInterrupt):
        backward(net)
    assert log.watch.passes == 1
