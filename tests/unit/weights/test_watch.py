import torch

from colo.weights.sources.module import ModuleSource
from colo.weights.watch import WriteWatch


def test_a_write_is_noticed_once():
    net = torch.nn.Linear(2, 2)
    watch = WriteWatch(ModuleSource(net))
    assert not watch.has_changed()
    net.load_state_dict({name: t + 1 for name, t in net.state_dict().items()})
    assert watch.has_changed()
    assert not watch.has_changed()


def test_what_a_step_wrote_can_be_accepted():
    net = torch.nn.Linear(2, 2)
    watch = WriteWatch(ModuleSource(net))
    with torch.no_grad():
        net.weight.add_(1)
    watch.accept()
    assert not watch.has_changed()
