"""What a state dict to load shares with what is given, and what not."""

import torch

from colo.memory.storage import storage_key
from colo.trainer.snapshot import detach_state


def is_shared(one, other):
    return storage_key(one) == storage_key(other)


def test_what_loading_copies_is_given_as_it_is_and_what_it_would_keep_is_copied():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    here, there, number = torch.ones(3), torch.ones(3, device="meta"), torch.ones((), device="meta")
    given = {"state": {0: {"here": here, "there": there, "step": number, "again": here}}, "param_groups": []}
    state = detach_state(given, optimizer)["state"][0]
    assert is_shared(state["there"], there) and state["there"] is not there
    assert not is_shared(state["here"], here) and torch.equal(state["here"], here)
    assert not is_shared(state["step"], number)
    assert state["again"] is state["here"]
    assert given["state"][0]["here"] is here
