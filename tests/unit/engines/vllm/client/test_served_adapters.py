"""Names of adapters in a server, and the numbers that its workers have for them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from colo.engines.vllm.client.server_link import ServedAdapters
from colo.errors import TransferError, Unsupported

INFO = SimpleNamespace(max_adapters=2, takes_adapters_by_name=True)
NAME = "base_model.model.model.layers.0.self_attn.q_proj"
TENSORS = [(f"{NAME}.lora_A.weight", torch.ones(4, 8)), (f"{NAME}.lora_B.weight", torch.ones(6, 4))]


class Server:
    """A server that numbers what it is told to load, and what it has read."""

    def __init__(self):
        self.numbers, self.names, self.read, self.refuses, self.others = {7}, {}, [], False, 0

    def post(self, path, body):
        if path == "/v1/unload_lora_adapter":
            if self.names.pop(body["lora_name"], None) is None:
                raise TransferError("not found")
            return
        assert path == "/v1/load_lora_adapter"
        if self.refuses:
            raise TransferError("rank 4 is too much")
        folder = Path(body["lora_path"])
        config = json.loads((folder / "adapter_config.json").read_text())
        self.read.append((folder, config, load_file(folder / "adapter_model.safetensors")))
        number = len(self.read)
        self.names[body["lora_name"]] = number
        self.numbers |= {number, *range(100, 100 + self.others)}


@pytest.fixture
def server():
    return Server()


@pytest.fixture
def adapters(server):
    return ServedAdapters("client", server.post, lambda: set(server.numbers))


def test_a_number_is_the_one_that_is_new_and_requests_name_it(adapters, server):
    first, second = adapters.reserve(INFO, TENSORS), adapters.reserve(INFO, TENSORS)
    assert (first, second) == (1, 2)
    assert server.names == {adapters.name(1): 1, adapters.name(2): 2}
    assert len(server.names) == 2


def test_what_the_server_reads_changes_nothing_and_is_gone_afterwards(adapters, server):
    adapters.reserve(INFO, [*TENSORS, ("base_model.model.lm_head.lora_A.weight", torch.ones(4, 8))])
    ((folder, config, tensors),) = server.read
    assert (config["r"], config["target_modules"]) == (4, ["q_proj"])
    assert {name: tensor.shape for name, tensor in tensors.items()} == {name: t.shape for name, t in TENSORS}
    assert not any(tensor.any() for tensor in tensors.values())
    assert not folder.exists()


def test_a_name_is_forgotten_once(adapters, server):
    number = adapters.reserve(INFO, TENSORS)
    adapters.release(number)
    adapters.release(number)
    assert server.names == {}
    again = adapters.reserve(INFO, TENSORS)
    server.names.clear()  # the server has been told by somebody else
    adapters.release(again)


@pytest.mark.parametrize("lacks", [{"max_adapters": 0}, {"takes_adapters_by_name": False}])
def test_a_server_that_takes_none_is_not_asked(adapters, server, lacks):
    with pytest.raises(Unsupported, match="takes no adapters: start it with VLLM_ALLOW_RUNTIME_LORA.*--enable"):
        adapters.reserve(SimpleNamespace(**vars(INFO) | lacks), TENSORS)
    assert server.read == []


def test_what_the_server_refuses_is_unsupported_in_its_words(adapters, server):
    server.refuses = True
    with pytest.raises(Unsupported, match="the server does not take the adapter: rank 4 is too much"):
        adapters.reserve(INFO, TENSORS)


def test_another_clients_adapter_is_not_taken_for_ours(adapters, server):
    server.others = 1
    with pytest.raises(TransferError, match="2 adapters have come to the server at once"):
        adapters.reserve(INFO, TENSORS)
