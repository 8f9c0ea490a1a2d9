"""What people save a model with, in every phase: every tensor arrives, with its value, and outlives the runtime."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, load_model, save_model
from torch.distributed import checkpoint as dcp
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import AutoModelForCausalLM

import colo
from colo.units import MIB
from tests.models import small_qwen3
from tests.runtimes import adamw, make_engine


def config(*, tied=False):
    return small_qwen3(tie_word_embeddings=tied)


def launched(**options):
    settings = colo.RuntimeConfig(kv_cache_bytes=MIB, offload="always")
    return colo.launch(config(**options), optimizer=adamw, device="cpu", config=settings)


def shared():
    model = AutoModelForCausalLM.from_config(config())
    engine = make_engine(config=config())
    return colo.share(engine, model, adamw(model.parameters()), config=colo.RuntimeConfig(offload="always"))


def adapted():
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    settings = colo.RuntimeConfig(kv_cache_bytes=MIB, offload="always")
    return colo.launch(config(), lora=lora, optimizer=adamw, device="cpu", config=settings)


RUNTIMES = {"launched": launched, "tied": lambda: launched(tied=True), "shared": shared, "adapted": adapted}


def train_step(rt):
    ids = torch.tensor([[1, 2, 3, 4]])
    rt.model(input_ids=ids, labels=ids).loss.backward()
    rt.optimizer.step()
    rt.optimizer.zero_grad()


def accelerate_model(model, folder):
    Accelerator(cpu=True).save_model(model, folder)
    return load_file(folder / "model.safetensors")


def accelerate_state(model, folder):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare_model(model)
    accelerator.save_state(folder)
    return load_file(folder / "model.safetensors")


def pretrained(model, folder):
    model.save_pretrained(folder)
    if isinstance(model, PeftModel):
        base = AutoModelForCausalLM.from_config(config())
        base.load_state_dict({k: v.clone() for k, v in base_weights(model).items()})
        return PeftModel.from_pretrained(base, folder).state_dict()
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def base_weights(model):
    names = {n: n.removeprefix("base_model.model.").replace(".base_layer", "") for n in model.state_dict()}
    return {plain: model.state_dict()[n] for n, plain in names.items() if "lora_" not in n}


def safetensors(model, folder):
    folder.mkdir()
    save_model(model, folder / "model.safetensors")
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.zero_()
    load_model(other, folder / "model.safetensors")
    return other.state_dict()


def torch_save(model, folder):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    size = sum(t.nbytes for t in {t.data_ptr(): t for t in model.state_dict().values()}.values())
    assert len(file.getbuffer()) < 2 * size, "storages are not saved over and over"
    return torch.load(io.BytesIO(file.getvalue()))


def distributed(model, folder):
    state = model.state_dict()
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    return loaded


def averaged(model, folder):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.0))
    average.update_parameters(model)
    average.update_parameters(model)
    return average.module.state_dict()


SAVERS = {
    "accelerate save_model": accelerate_model,
    "accelerate save_state": accelerate_state,
    "save_pretrained": pretrained,
    "safetensors": safetensors,
    "torch.save": torch_save,
    "torch.distributed.checkpoint": distributed,
    "deepcopy": lambda model, folder: copy.deepcopy(model).state_dict(),
    "pickle": lambda model, folder: pickle.loads(pickle.dumps(model)).state_dict(),
    "moving average": averaged,
}


def assert_whole(saved, expected):
    lacking = expected.keys() - saved.keys()
    assert lacking <= {"lm_head.weight"}, f"{len(lacking)} of {len(expected)} tensors are not there: {sorted(lacking)}"
    if lacking:  # which is saved once where it is the embedding
        assert torch.equal(expected["lm_head.weight"], expected["model.embed_tokens.weight"])
    for name, tensor in saved.items():
        assert torch.equal(tensor, expected[name]), name


def copied(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.filterwarnings("ignore:.*torch.distributed:UserWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("kind", RUNTIMES)
def test_every_tensor_is_saved_in_every_phase_and_after_close(kind, saver, tmp_path):
    rt, save = RUNTIMES[kind](), SAVERS[saver]
    with rt.train():
        train_step(rt)
        expected = copied(rt.model)
        assert_whole(save(rt.model, tmp_path / "train"), expected)
    assert_whole(save(rt.model, tmp_path / "idle"), expected)
    with rt.rollout():
        rt.generate([[1, 2]], max_tokens=2)
        assert_whole(save(rt.model, tmp_path / "rollout"), expected)
    rt.close()
    assert_whole(save(rt.model, tmp_path / "closed"), expected)


@pytest.mark.parametrize("kind", RUNTIMES)
def test_what_was_taken_from_the_model_outlives_the_runtime(kind):
    rt = RUNTIMES[kind]()
    expected = copied(rt.model)
    state, data = rt.model.state_dict(), {n: p.data for n, p in rt.model.named_parameters()}
    detached = {n: p.detach() for n, p in rt.model.named_parameters()}
    rows = rt.model.get_input_embeddings().weight[3:5]
    rt.close()
    for taken in (state, data, detached):
        for name, tensor in taken.items():
            assert torch.equal(tensor, expected[name]), name
    file = io.BytesIO()
    torch.save(state, file)
    assert_whole(torch.load(io.BytesIO(file.getvalue())), expected)
    name = next(n for n in expected if n.endswith("embed_tokens.weight"))
    assert torch.equal(rows, expected[name][3:5])


def test_every_parameter_has_a_storage_of_just_its_bytes():
    with launched() as rt:
        for name, parameter in rt.model.named_parameters():
            assert parameter.untyped_storage().nbytes() == parameter.nbytes, name
            assert parameter.storage_offset() == 0, name
        assert len({p.untyped_storage().data_ptr() for p in rt.model.parameters()}) == len(list(rt.model.parameters()))
        assert rt.transport.name == "shared"


def test_writes_are_counted_by_parameter():
    with launched() as rt:
        before = {name: p._version for name, p in rt.model.named_parameters()}
        with torch.no_grad():
            rt.model.lm_head.weight.add_(1)
        after = {name: p._version for name, p in rt.model.named_parameters()}
        assert [name for name in before if before[name] != after[name]] == ["lm_head.weight"]


@pytest.mark.parametrize("kind", RUNTIMES)
def test_the_engines_memory_goes_with_the_last_tensor_over_it(kind):
    rt = RUNTIMES[kind]()
    rt.generate([[1, 2]], max_tokens=2)
    gone = []
    storage = rt.engine.weights.regions[0].bytes.untyped_storage()
    weakref.finalize(storage, gone.append, "gone")
    kept = rt.model.state_dict()
    del storage
    rt.close()
    assert not gone
    del kept
    gc.collect()
    assert gone, "something of the runtime's refers to the engine's memory"
