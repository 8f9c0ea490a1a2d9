"""The optimizer, and the model under accelerate's FSDP2 plugin; on two ranks: tests/integration/test_trl_sharded.py."""

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch.distributed.tensor import DTensor

from colo.errors import Unsupported
from colo.integrations.trl import preparation
from colo.trainer.master_weights import MasterWeights, MasterWeightsOptimizer
from tests.trainers import use_fsdp2


def test_the_optimizer_is_the_one_that_trl_makes_and_prepared_in_place(make, attach):
    trainer, stock = make(weight_decay=0.1), make(weight_decay=0.1)
    stock.create_optimizer()
    attach(trainer)
    made = trainer.optimizer.optimizer
    assert type(made) is type(stock.optimizer)
    assert [len(g["params"]) for g in made.param_groups] == [len(g["params"]) for g in stock.optimizer.param_groups]
    assert [g["weight_decay"] for g in made.param_groups] == [0.1, 0.0]
    assert trainer.optimizer._is_accelerate_prepared


def test_weights_in_16_bits_have_masters(make, attach):
    trainer = make(model_init_kwargs={"dtype": "bfloat16"}, weight_decay=0.1)
    attach(trainer)
    made = trainer.optimizer.optimizer
    assert isinstance(made, MasterWeightsOptimizer) and isinstance(made.inner, torch.optim.AdamW)
    assert [g["weight_decay"] for g in made.param_groups] == [0.1, 0.0]
    assert {p.dtype for g in made.inner.param_groups for p in g["params"]} == {torch.float32}
    assert trainer.optimizer_cls_and_kwargs is None


def test_an_optimizer_of_the_users_is_kept_and_one_without_masters_is_warned_about(make, attach):
    trainer = make(model_init_kwargs={"dtype": "bfloat16"})
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    with pytest.warns(UserWarning, match="swallow updates"):
        attach(trainer)
    assert isinstance(trainer.optimizer.optimizer, torch.optim.SGD)
    trainer = make(model_init_kwargs={"dtype": "bfloat16"})
    given = MasterWeights(lambda params: torch.optim.SGD(params, lr=1.0))(trainer.model.parameters())
    trainer.optimizer = given
    attach(trainer)
    assert trainer.optimizer.optimizer is given


def test_several_optimizers_for_weights_in_16_bits_are_refused_by_name(make, attach):
    trainer = make(model_init_kwargs={"dtype": "bfloat16"})
    trainer.optimizer_cls_and_kwargs = (lambda: None), {}
    with pytest.raises(Unsupported, match="makes several optimizers"):
        attach(trainer)
    assert not hasattr(trainer, "colo")


@pytest.fixture
def sharded(mesh, make, monkeypatch):
    """Makes trainers with the plugin; what accelerate's processes share is as before afterwards."""
    for state in (PartialState, AcceleratorState):
        monkeypatch.setattr(state, "_shared_state", state._shared_state)

    def build(**changes):
        trainer = make(**changes)
        for state in (PartialState, AcceleratorState):
            monkeypatch.setattr(state, "_shared_state", dict(state._shared_state))
        use_fsdp2(trainer)
        return trainer

    return build


def test_the_optimizer_is_made_of_the_shards_and_training_keeps_it(sharded, attach):
    trainer = sharded()
    model = trainer.model
    rt = attach(trainer)
    params = list(model.parameters())
    assert trainer.model is trainer.model_wrapped is model
    assert all(isinstance(p, DTensor) for p in params)
    trainer.train()
    assert rt.weights_version == 2
    assert {id(p) for g in trainer.optimizer.param_groups for p in g["params"]} == set(map(id, params))


def test_an_optimizer_of_the_users_is_switched_to_the_shards(sharded, attach):
    trainer = sharded()
    given = trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=1.0)
    attach(trainer)
    assert trainer.optimizer.optimizer is given
    assert all(isinstance(p, DTensor) for g in given.param_groups for p in g["params"])
    trainer.train()
    assert trainer.colo.weights_version == 2


def test_masters_of_whole_weights_are_refused_before_anything_is_sharded(sharded, attach):
    trainer = sharded(model_init_kwargs={"dtype": "bfloat16"})
    made = MasterWeights(lambda params: torch.optim.SGD(params, lr=1.0))(trainer.model.parameters())
    trainer.optimizer = made
    with pytest.raises(Unsupported, match="give the trainer no optimizer"):
        attach(trainer)
    assert trainer.optimizer is made
    assert not any(isinstance(p, DTensor) for p in trainer.model.parameters())


def test_weights_that_accelerate_keeps_in_fp32_need_no_masters(sharded, attach):
    trainer = sharded(model_init_kwargs={"dtype": "bfloat16"}, bf16=True)
    attach(trainer)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert isinstance(trainer.optimizer.optimizer, torch.optim.AdamW)


def test_a_rank_without_a_part_of_several_weights_is_refused(sharded, attach, monkeypatch):
    """accelerate knows parameters by their address, which is the same for all that have no memory."""
    monkeypatch.setattr(preparation, "local_shard", lambda p: torch.empty(0) if p.ndim == 1 else p)
    with pytest.raises(Unsupported, match=r"nothing of model.layers.0\S+ and \d+ other weights.*fewer ranks"):
        attach(sharded())
