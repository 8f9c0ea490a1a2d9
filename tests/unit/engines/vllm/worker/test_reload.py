"""What of the tensors that a reload is given reaches the model, without vLLM."""

import torch
from torch import nn

from colo.engines.vllm.compat import unused
from colo.engines.vllm.worker.weights import _is_tied, _Taken


def test_what_is_copied_in_part_or_not_at_all_is_left_out():
    taken = _Taken()
    given = {name: torch.ones(4, 2) for name in ("whole", "halves", "half", "counted", "skipped")}
    target = torch.zeros(4, 2)
    taken.expect(given)
    with taken:
        target.copy_(given["whole"])
        target[:2].copy_(given["halves"][:2])
        target[2:].copy_(given["halves"][2:])
        target[:, :1].copy_(given["half"].narrow(1, 0, 1))
        torch.empty(4, 2, device="meta").copy_(given["counted"])
    assert taken.left_out() == {"half": 4, "counted": 0, "skipped": 0}


def test_what_is_computed_with_is_taken_in_lists_too():
    taken = _Taken()
    given = {name: torch.ones(2) for name in ("a", "b", "c")}
    taken.expect(given)
    with taken:
        torch.cat([given["a"], given["b"]])
        _ = given["c"] * 2
    assert taken.left_out() == {}


def test_what_has_been_taken_is_let_go_when_more_is_expected():
    taken = _Taken()
    first = {"a": torch.ones(2), "b": torch.ones(2)}
    taken.expect(first)
    with taken:
        torch.zeros(2).copy_(first["a"])
    taken.expect({"c": torch.ones(2)})
    assert {name for name, _ in taken._waiting.values()} == {"b", "c"}
    assert taken.left_out() == {"b": 0, "c": 0}


class StageMissingLayer(nn.Module):
    """As vLLM calls what it leaves out of a model that is to take texts alone."""


def test_weights_of_parts_that_are_left_out_are_unused():
    names = ["model.visual.blocks.0.weight", "model.language_model.norm.weight", "lm_head.weight"]
    whole, text_only = nn.ModuleDict({"visual": nn.Linear(1, 1)}), nn.ModuleDict({"visual": StageMissingLayer()})
    assert unused(whole, names) == frozenset()
    assert unused(text_only, names) == {names[0]}


def test_an_output_layer_is_tied_by_its_memory_whatever_the_parameter():
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = nn.Embedding(8, 4)
    model.lm_head = nn.Linear(4, 8, bias=False)
    assert not _is_tied(model)
    model.lm_head.weight.data = model.model.embed_tokens.weight.data
    assert _is_tied(model)
    model.lm_head = model.model.embed_tokens
    assert _is_tied(model)
    assert not _is_tied(model.to("meta"))  # where memory says nothing
    del model.lm_head
    model.model.also = model.model.embed_tokens
    assert not _is_tied(model)
