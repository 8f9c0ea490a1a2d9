"""A model and an optimizer of your own on an engine of your own, and what is refused before anything moves."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.units import MIB
from tests.models import add_adapter
from tests.runtimes import adamw, launch, make_engine, qwen3, train_step


def test_sharing_your_own_model_keeps_its_parameters_objects_values_and_optimizer():
    model = AutoModelForCausalLM.from_config(qwen3())
    optimizer = adamw(model.parameters())
    objects = list(model.parameters())
    values = [p.detach().clone() for p in objects]
    rt = colo.share(make_engine(), model, optimizer)
    assert [id(p) for p in model.parameters()] == [id(p) for p in objects]
    assert all(torch.equal(a, p) for a, p in zip(values, objects, strict=True))
    assert rt.transport.name == "shared"
    with rt.train():
        train_step(rt)
    trained = [p.detach().clone() for p in objects]
    rt.close()
    assert all(torch.equal(a, p) for a, p in zip(trained, model.parameters(), strict=True))
    ids = torch.tensor([[1, 2, 3]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def test_a_compiled_model_keeps_its_names():
    model = AutoModelForCausalLM.from_config(qwen3())
    optimizer = adamw(model.parameters())
    rt = colo.share(make_engine(), torch.compile(model, backend="eager"), optimizer)
    assert rt.transport.name == "shared"
    rt.close()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's own look at what a layer is given
def test_layers_may_be_compiled_one_by_one():
    model = AutoModelForCausalLM.from_config(qwen3())
    optimizer, layers = adamw(model.parameters()), model.model.layers
    for number, layer in enumerate(layers):
        layers[number] = torch.compile(layer, backend="eager")
    with colo.share(make_engine(), model, optimizer) as rt:
        assert rt.transport.name == "shared"
        with rt.rollout():
            rt.generate([[1, 2]], max_tokens=2)
        with rt.train():
            train_step(rt)
        assert rt.trace.metrics["mismatch_sampled"][-1] < 1e-5


@pytest.mark.parametrize("weights", ["auto", "copy"])
@pytest.mark.parametrize("add", [get_peft_model, add_adapter])
def test_an_engine_does_not_sample_without_an_adapter_that_the_model_got_since(add, weights):
    model = AutoModelForCausalLM.from_config(qwen3())
    config = RuntimeConfig(kv_cache_bytes=MIB, weights=weights)
    with colo.share("torch", model, adamw(model.parameters()), config=config) as rt:
        rt.generate([[1]])
        add(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        for _ in range(2):
            with pytest.raises(colo.StaleWeights, match="has an adapter, and had none when .*Close the runtime"):
                rt.generate([[1]])


def test_a_users_own_peft_model_is_shared():
    model = get_peft_model(AutoModelForCausalLM.from_config(qwen3()), LoraConfig(r=2, target_modules=["q_proj"]))
    rt = colo.share(make_engine(), model, adamw([p for p in model.parameters() if p.requires_grad]))
    assert rt.transport.name == "shared"
    with rt.train():
        train_step(rt)
    assert rt.generate([[1]])[0].adapter == "policy@1"
    rt.close()


@pytest.mark.parametrize("engine", ["http://localhost:8000", object()])
def test_what_is_no_engine_is_refused_with_what_would_be(rt, engine):
    other = AutoModelForCausalLM.from_config(qwen3())
    with pytest.raises(TypeError, match=r"a vllm.LLM, .*colo.connect\(url\) first, or 'torch' or 'vllm', not "):
        colo.share(engine, other, AdamW(other.parameters()))


def test_a_model_has_one_runtime_at_a_time(rt):
    with pytest.raises(colo.PhaseError, match="has a runtime already"):
        colo.share(make_engine(), rt.model, rt.optimizer)
    with rt.train():
        train_step(rt)
    assert rt.generate([[1]])[0].weights_version == 1, "the first runtime is as it was"


def test_a_runtime_that_cannot_be_built_leaves_model_and_optimizer_as_they_were():
    config = qwen3(tie_word_embeddings=False)
    model = get_peft_model(AutoModelForCausalLM.from_config(config), LoraConfig(r=2, target_modules=["embed_tokens"]))
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    with pytest.raises(colo.Unsupported, match="adapted as an embedding"):
        colo.share(make_engine(config=config), model, optimizer)
    ids = torch.tensor([[1, 2, 3]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    rt = colo.launch(qwen3(), device="cpu", config=RuntimeConfig(kv_cache_bytes=MIB))
    rt.close()


def test_an_engine_and_an_optimizer_have_one_runtime_at_a_time_too(rt):
    other = AutoModelForCausalLM.from_config(qwen3())
    with pytest.raises(colo.PhaseError, match="this engine has a runtime already"):
        colo.share(rt.engine, other, adamw(other.parameters()))
    with pytest.raises(colo.PhaseError, match="this optimizer has a runtime already"):
        colo.share(make_engine(), other, rt.optimizer)
    assert colo.Runtime.of(rt.model) is colo.Runtime.of(rt.engine) is rt
    with pytest.raises(ValueError, match="has no open runtime"):
        colo.Runtime.of(other)


def test_an_optimizer_of_something_else_is_refused_before_anything_moves():
    model, other = (AutoModelForCausalLM.from_config(qwen3()) for _ in range(2))
    address = next(model.parameters()).data_ptr()
    with pytest.raises(colo.Unsupported, match="parameters of the optimizer are not the model's"):
        colo.share(make_engine(), model, adamw(other.parameters()))
    assert next(model.parameters()).data_ptr() == address


def test_weights_that_are_packed_are_refused_before_anything_moves():
    class Params4bit(torch.nn.Parameter):
        """Stands in for that of bitsandbytes, which runs on a GPU."""

    model = AutoModelForCausalLM.from_config(qwen3())
    address = next(model.parameters()).data_ptr()
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = Params4bit(layer.weight.data, requires_grad=False)
    with pytest.raises(colo.Unsupported, match=r"1 weights are quantized by bitsandbytes, .*down_proj.* 16 bits"):
        colo.share(make_engine(), model, adamw(p for p in model.parameters() if p.requires_grad))
    assert next(model.parameters()).data_ptr() == address


def test_cuda_is_refused_with_advice_where_there_is_none():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(colo.Unsupported, match="colo doctor"):
        launch(device="cuda")
