import os

import pytest
import torch

# Tiny models gain nothing from more threads, and on busy cores OpenMP's threads wait for one another for seconds.
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def device():
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
