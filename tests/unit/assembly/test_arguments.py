"""What `launch` and `share` say of arguments that they do not take, and which forms of others they do."""

import copy
import json
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ConstantLR
from torch.optim.swa_utils import AveragedModel
from transformers import AutoModel, AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3MoeConfig

import colo
from colo.assembly.arguments import chosen_device, chosen_dtype, default_engine
from colo.assembly.launch import dtype_of
from colo.config import RuntimeConfig
from colo.engines.torch import TorchEngine
from colo.engines.vllm import compat
from colo.engines.vllm.client.engine import VLLMEngine
from colo.units import MIB
from tests.models import TINY, add_adapter

SIZES = TINY | {"num_hidden_layers": 2}
CONFIG = Qwen3Config(**SIZES)
MOE = Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
LORA = LoraConfig(r=2, target_modules=["q_proj"])


def adamw(params):
    return AdamW(params, lr=1e-2)


def made(config=CONFIG):
    return AutoModelForCausalLM.from_config(copy.deepcopy(config))


def with_adapter():
    model = made()
    add_adapter(model, LoraConfig(r=2, target_modules=["q_proj"]))
    return model


def made_in_inference_mode():
    with torch.inference_mode():
        return made()


def made_on_meta():
    with torch.device("meta"):
        return made()


def launch(model=CONFIG, **options):
    config = RuntimeConfig(kv_cache_bytes=MIB)
    return colo.launch(model, **({"optimizer": adamw, "device": "cpu", "config": config} | options))


def engine(config=CONFIG):
    return TorchEngine(config, device="cpu", dtype=torch.float32, kv_cache_bytes=MIB)


def train_step(model, optimizer):
    ids = torch.tensor([[1, 2, 3]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


# ---- launch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"optimizer": adamw(nn.Linear(2, 2).parameters())}, TypeError, "lambda params: AdamW.* not an AdamW, or use"),
        ({"optimizer": "adamw"}, TypeError, "pass a function such as .* not 'adamw'"),
        ({"optimizer": lambda params: None}, TypeError, "returns an optimizer .* not None"),
        ({"config": {"offload": "auto", "verify": 1}}, TypeError, r"RuntimeConfig\(offload=\.\.\., verify=\.\.\.\)"),
        ({"config": CONFIG}, TypeError, "config is a colo.RuntimeConfig, not a Qwen3Config"),
        ({"lora": True}, TypeError, r"lora is a peft.LoraConfig, such as LoraConfig\(r=16\), not True"),
        ({"lora": {"r": 16}}, TypeError, "lora is a peft.LoraConfig.* not a dict"),
        ({"lora": IA3Config(target_modules=["q_proj"])}, colo.Unsupported, "the adapter is IA3 "),
        ({"engine": TorchEngine}, TypeError, "engine=the class TorchEngine .* colo.share"),
        ({"engine": "hf"}, ValueError, "engine must be 'torch' or 'vllm', not 'hf'"),
        (
            {"engine": "vllm", "engine_options": ["max_model_len"]},
            TypeError,
            "vllm.LLM by name.* not a list",
        ),
        ({"engine_options": {"max_model_len": 1}}, ValueError, r"pass engine='vllm' with \['max_model_len'\]"),
        ({"engine": "torch", "engine_options": {"revision": "v2"}}, ValueError, r"engine='vllm' with \['revision'\]"),
        ({"engine": "vllm", "engine_options": {"dtype": "auto"}}, TypeError, r"pass launch\(model, dtype=...\)"),
        (
            {"engine": "vllm", "engine_options": {"gpu_memory_utilization": 0.5}},
            TypeError,
            "has 'gpu_memory_utilization', .*kv_cache_bytes=\"4GiB\".* device_limit_bytes",
        ),
        ({"tokenizer": "Qwen/Qwen3-0.6B"}, TypeError, r"AutoTokenizer.from_pretrained\('Qwen/Qwen3-0.6B'\)"),
        ({"tokenizer": 7}, TypeError, "tokenizer is what .* returns, not 7"),
        ({"device": "gpu"}, ValueError, "device must be 'cuda', 'cuda:0' or 'cpu', not 'gpu'"),
        ({"device": "mps"}, colo.Unsupported, "colo runs on CUDA and on the CPU"),
        ({"dtype": "bf17"}, ValueError, "one of bfloat16, float16, float32, float64, or 'auto', not 'bf17'"),
        ({"dtype": torch.int8}, ValueError, "not torch.int8"),
        ({"lr": 1e-5}, TypeError, r"launch\(\) takes no 'lr': pass optimizer=lambda params: AdamW\(params, lr=1e-6\)"),
        ({"learning_rate": 1e-5}, TypeError, "takes no 'learning_rate': pass optimizer=lambda"),
        ({"gpu_memory_utilization": 0.5}, TypeError, r"pass config=colo.RuntimeConfig\(kv_cache_bytes="),
        ({"kv_cache_bytes": 1}, TypeError, r"pass config=colo.RuntimeConfig\(kv_cache_bytes=...\)"),
        ({"max_model_len": 8}, TypeError, r"pass engine_options=\{'max_model_len': ...\}"),
        ({"peft_config": LORA}, TypeError, r"pass lora=LoraConfig\(...\)"),
        ({"torch_dtype": "auto"}, TypeError, "pass dtype='bfloat16'"),
        ({"tokeniser": None}, TypeError, "did you mean tokenizer"),
        (
            {"batch": 4},
            TypeError,
            "it takes model, engine, engine_options, lora, optimizer, device, dtype",
        ),
        ({"dtype": float}, ValueError, "not <class 'float'>"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_launch_says_what_to_pass_instead(options, kind, words):
    with pytest.raises(kind, match=words) as caught:
        launch(**options)
    assert "\n" not in str(caught.value)


def test_start_and_share_name_what_they_take_too():
    with pytest.raises(TypeError, match=r"start\(\) takes no 'optimizer': launch takes a function"):
        colo.start(CONFIG, optimizer=adamw)
    with pytest.raises(TypeError, match=r"share\(\) takes no 'verify': pass config=colo.RuntimeConfig\(verify=...\)"):
        colo.share("torch", made(), None, verify=False)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("FP32", torch.float32), ("half", torch.half)])
def test_a_dtype_has_short_names(name, dtype):
    assert chosen_dtype(name, torch.device("cpu"), lambda: None) == dtype


@pytest.mark.parametrize("has_vllm", [True, False])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_engine_is_vllm_on_a_gpu_that_has_it_and_the_log_says_so(kind, has_vllm, monkeypatch, caplog):
    def version():
        if not has_vllm:
            raise colo.Unsupported("not installed")
        return "0.30.0"

    monkeypatch.setattr("colo.engines.vllm.compat.vllm_version", version)
    expected = "vllm" if kind == "cuda" and has_vllm else "torch"
    with caplog.at_level("INFO", logger="colo"):
        assert default_engine(torch.device(kind)) == expected
    assert f"engine={expected!r}, since none was named" in caplog.text


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: None, TypeError, "a folder or a hub id, a transformers config, or a transformers model, not None"),
        (lambda: Qwen3Config, TypeError, "not the class Qwen3Config"),
        (lambda: SIZES, TypeError, "not a dict"),
        (lambda: nn.Linear(2, 2), TypeError, "not a Linear: colo.share"),
        (lambda: get_peft_model(made(), LORA), TypeError, r"lora=LoraConfig\(...\), or share a PEFT model"),
        (with_adapter, TypeError, r"lora=LoraConfig\(...\)"),
        (lambda: nn.DataParallel(made()), colo.Unsupported, r"DataParallel .* launch\(model.module, ...\)"),
        (lambda: torch.compile(made(), backend="eager"), TypeError, r"launch\(model._orig_mod, ...\)"),
        (lambda: AutoModel.from_config(CONFIG), TypeError, "Qwen3Model generates no tokens: .* AutoModelForCausalLM"),
        (made_on_meta, ValueError, "meta device, without weights"),
        (lambda: "./no-such-folder", FileNotFoundError, "there is no './no-such-folder' in "),
        (lambda: Path("/no/such/folder"), FileNotFoundError, "there is no '/no/such/folder'"),
        (lambda: "~/no-such-folder", FileNotFoundError, "there is no '~/no-such-folder' in .* with ~ expanded"),
        (lambda: "nosuch", OSError, "found no folder 'nosuch' and could not read its config.json from the Hugging"),
    ],
)
def test_launch_says_which_models_it_takes(make, kind, words):
    with pytest.raises(kind, match=words) as caught:
        launch(make())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("optimizer", [AdamW, partial(SGD, lr=0.1)])
def test_what_makes_an_optimizer_may_be_a_class_or_a_partial(optimizer):
    with launch(optimizer=optimizer) as rt:
        before = rt.model.lm_head.weight.clone()
        with rt.train():
            train_step(rt.model, rt.optimizer)
        assert not torch.equal(rt.model.lm_head.weight, before)


def test_an_optimizer_of_the_model_that_launch_copies_is_refused():
    model = made()
    with pytest.raises(colo.Unsupported, match="parameters of the optimizer are not the model's"):
        launch(model, optimizer=lambda _: adamw(model.parameters()))
    launch(model).close()


@pytest.mark.parametrize("optimizer", [lambda: None, lambda params, lr: None, 5, "adamw"])
def test_an_optimizer_that_does_not_take_parameters_alone_is_refused_before_a_model_is_made(monkeypatch, optimizer):
    monkeypatch.setattr("colo.assembly.launch.start_torch", None)
    with pytest.raises(
        TypeError, match=r"calls optimizer with its parameters: pass a function such as optimizer=lambda"
    ):
        launch(optimizer=optimizer)


def test_launch_leaves_nothing_behind_where_the_optimizer_is_refused(monkeypatch):
    closed, close = [], TorchEngine.close
    monkeypatch.setattr(TorchEngine, "close", lambda self: closed.append(self) or close(self))
    with pytest.raises(TypeError):
        launch(optimizer=lambda params: "adamw")
    assert len(closed) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_may_be_given_by_name(dtype):
    with launch(dtype=dtype) as rt:
        assert {p.dtype for p in rt.model.parameters()} == {torch.bfloat16}


def test_the_dtype_auto_is_the_checkpoints(tmp_path):
    made().to(torch.float16).save_pretrained(tmp_path)
    for model in (tmp_path, str(tmp_path), made().to(torch.float16), Qwen3Config(**SIZES, dtype="float16")):
        with launch(model, dtype="auto") as rt:
            assert rt.model.dtype is torch.float16


def test_a_config_that_is_given_is_left_alone():
    config = Qwen3Config(**SIZES)
    before = config.to_dict()
    launch(config, dtype="bfloat16").close()
    assert config.to_dict() == before


def test_a_cpu_with_a_number_is_the_cpu():
    assert chosen_device("cpu:0") == chosen_device(torch.device("cpu", 0)) == torch.device("cpu")


def test_a_checkpoint_without_a_dtype_takes_the_devices():
    assert dtype_of(Qwen3Config(**SIZES), "main") is None
    assert chosen_dtype("auto", torch.device("cpu"), lambda: None) is torch.float32
    assert chosen_dtype("auto", torch.device("cuda"), lambda: None) is torch.bfloat16
    assert chosen_dtype(None, torch.device("cuda"), lambda: torch.float16) is torch.bfloat16


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # which PEFT has added itself
def test_a_mixtures_packed_experts_cannot_be_adapted():
    with pytest.raises(colo.Unsupported, match=r"target_modules='all-linear' includes: name modules, as in") as caught:
        launch(MOE, lora=LoraConfig(r=2, target_modules="all-linear"))
    assert "base_layer" not in str(caught.value)
    launch(MOE, lora=LoraConfig(r=2, target_modules=["q_proj", "o_proj"])).close()


@pytest.mark.parametrize("weights", ["auto", "copy"])
def test_launch_within_inference_mode_makes_a_model_that_trains(weights):
    with torch.inference_mode():
        given = made()
        rt = launch(given, config=RuntimeConfig(kv_cache_bytes=MIB, weights=weights))
    with rt.train():
        train_step(rt.model, rt.optimizer)
    assert rt.generate([[1, 2]], max_tokens=1)[0].weights_version == 1
    rt.close()


@pytest.mark.parametrize("options", [{}, {"quantization": "bitsandbytes"}])
def test_an_engine_that_is_not_installed_is_named_before_anything_is_made(monkeypatch, options):
    def version(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(compat, "version", version)
    with pytest.raises(colo.Unsupported, match="vLLM is not installed: pip install"):
        launch(engine="vllm", engine_options=options, lora=LORA)


@pytest.mark.parametrize("form", ["config", "folder"])
def test_weights_in_4_bits_are_refused_by_the_embedded_engine_with_the_one_that_has_them(tmp_path, form, monkeypatch):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is missing: pip install colo-rl[qlora]")
    made().save_pretrained(tmp_path / "whole")
    packing = BitsAndBytesConfig(load_in_4bit=True)
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", quantization_config=packing)
    packed.save_pretrained(tmp_path / "packed")
    read = "from_pretrained"
    monkeypatch.setattr(AutoModelForCausalLM, read, lambda *_, **__: pytest.fail("the weights are being read"))
    with pytest.raises(colo.Unsupported, match="shared with vLLM alone, in 4 bits: engine='vllm'"):
        launch(packed.config if form == "config" else tmp_path / "packed", lora=LORA)


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq"])
def test_quantized_weights_are_refused_by_the_embedded_engine_and_not_built_otherwise(method):
    words = rf"these are quantized \({method}\): give a checkpoint from before that, or, where they are not, a config"
    model = made()
    model.config.quantization_config = {"quant_method": method, "bits": 4}
    with pytest.raises(colo.Unsupported, match=words):
        launch(model.config)
    with pytest.raises(colo.Unsupported, match=words):
        launch(model)
    with pytest.raises(colo.Unsupported, match=words):
        colo.share("torch", model, torch.optim.SGD(model.parameters()))
    model.config.quantization_config = None
    launch(model.config).close()


@pytest.mark.parametrize("form", ["folder", "config", "model", "share"])
@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, "fp8"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}, "gptq"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}, "bitsandbytes in 8 bits"),
        ({"quantization_config": {"producer": {"name": "modelopt"}}}, "by a method without a name"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_quantized_checkpoint_is_refused_before_vllm_starts_or_weights_are_read(
    monkeypatch, tmp_path, settings, method, form
):
    monkeypatch.setattr(VLLMEngine, "__init__", lambda *_, **__: pytest.fail("vLLM is being started"))
    model = made()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | settings))
    for name, value in settings.items():
        setattr(model.config, name, value)
    with pytest.raises(colo.Unsupported, match=rf"are quantized \({method}\): give a checkpoint from before that"):
        if form == "share":
            colo.share("vllm", model, SGD(model.parameters(), lr=0.1))
        else:
            launch({"folder": tmp_path, "config": model.config, "model": model}[form], engine="vllm")


@pytest.mark.parametrize("ways_in", [colo.launch, colo.start])
def test_a_path_without_a_config_is_named_whatever_transformers_takes_it_for(ways_in, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("folder", "a b", ".hidden"):
        Path(folder).mkdir()
    for file in ("model.safetensors", "folder/config.jsn"):
        Path(file).touch()
    for path in (".", "", "folder", "a b", Path(".hidden"), tmp_path, f"{tmp_path}/"):
        with pytest.raises(
            OSError, match=r"the folder \S.* has no config.json: pass the folder of a Hugging Face model"
        ):
            ways_in(path, engine="torch", device="cpu")
    for path in ("model.safetensors", Path("folder/config.jsn"), tmp_path / "model.safetensors"):
        with pytest.raises(OSError, match="is a file: pass the folder that holds the model's config.json"):
            ways_in(path, engine="torch", device="cpu")


def test_a_model_has_no_files_that_vllm_could_pack_to_4_bits():
    model, packing = made(), {"quantization": "bitsandbytes"}
    for ask in (
        lambda: launch(model, engine="vllm", engine_options=packing, lora=LORA),
        lambda: colo.share("vllm", model, SGD(model.parameters(), lr=0.1), engine_options=packing),
    ):
        with pytest.raises(colo.Unsupported, match="vLLM packs weights as it reads a checkpoint: give a folder"):
            ask()


@pytest.mark.parametrize("method", ["awq", "gptq", "gptq_marlin", "compressed-tensors", "quark", "modelopt_mxfp8"])
def test_a_quantization_of_checkpoints_is_refused_before_vllm_starts(tmp_path, method):
    model, options = made(), {"quantization": method}
    model.save_pretrained(tmp_path)
    for ask in (
        lambda: launch(tmp_path, engine="vllm", engine_options=options),
        lambda: launch(model, engine="vllm", engine_options=options),
        lambda: colo.share("vllm", model, SGD(model.parameters(), lr=0.1), engine_options=options),
    ):
        with pytest.raises(colo.Unsupported, match=f"quantization='{method}' is of checkpoints whose weights are "):
            ask()


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_an_adapter_is_no_model(monkeypatch, tmp_path, engine):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    made().save_pretrained(base)
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora).save_pretrained(adapter)
    with pytest.raises(colo.Unsupported, match=r"adapter' is an adapter: launch the model .* under colo.share"):
        launch(adapter, engine=engine)
    # of the hub's, known once transformers has loaded it
    monkeypatch.setattr("colo.assembly.arguments.ADAPTER_FILE", "none")
    monkeypatch.setattr("colo.assembly.arguments.config_file", lambda path: path)
    monkeypatch.setattr("colo.assembly.arguments.read_config", lambda path: path)
    with pytest.raises(colo.Unsupported, match="adapter' is an adapter"):
        launch(adapter)


# ---- devices -------------------------------------------------------------------------------------------------------


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1", 0):
        with pytest.raises(colo.Unsupported, match="torch sees no CUDA device"):
            chosen_device(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(colo.Unsupported, match="'cuda:2' was asked for, but torch sees 2"):
        chosen_device(2)
    assert [chosen_device(device) for device in (None, "cuda", 0, "cpu")] == [
        torch.device("cuda", 1),
        torch.device("cuda", 1),
        torch.device("cuda", 0),
        torch.device("cpu"),
    ]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    with pytest.raises(colo.Unsupported, match="leave that out, or set PYTORCH_ALLOC_CONF, torch's newer name"):
        chosen_device("cuda")
    assert chosen_device("cpu") == torch.device("cpu")


# ---- share ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: (m, adamw), "such as AdamW.* not the function adamw"),
        (lambda m: (m, AdamW), "not the class AdamW"),
        (lambda m: (m, None), "not None"),
        (lambda m: (m, ConstantLR(adamw(m.parameters()))), "not a ConstantLR"),
        (lambda m: (adamw(m.parameters()), m), "takes an nn.Module second, not an AdamW"),
        (lambda m: ("Qwen/Qwen3-0.6B", adamw(m.parameters())), "takes an nn.Module second, not 'Qwen/Qwen3-0.6B'"),
    ],
)
def test_share_says_what_it_takes(make, words):
    with pytest.raises(TypeError, match=words):
        colo.share(engine(), *make(made()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"config": {"kv_cache_bytes": MIB}}, r"colo.RuntimeConfig\(kv_cache_bytes=...\)"),
        ({"tokenizer": "gpt2"}, r"AutoTokenizer.from_pretrained\('gpt2'\)"),
    ],
)
def test_share_says_what_its_options_are(options, words):
    model = made()
    with pytest.raises(TypeError, match=words):
        colo.share(engine(), model, adamw(model.parameters()), **options)


@pytest.mark.parametrize("wrap", [nn.DataParallel, AveragedModel])
def test_a_wrapped_model_is_shared_without_its_wrapper(wrap):
    wrapped = wrap(made())
    optimizer = adamw(wrapped.parameters())
    with pytest.raises(colo.Unsupported, match=rf"{wrap.__name__} .* colo.share\(engine, model.module, optimizer\)"):
        colo.share(engine(), wrapped, optimizer)
    with colo.share(engine(), wrapped.module, optimizer) as rt:
        before = rt.engine.module.lm_head.weight.clone()
        with rt.train():
            train_step(wrapped, optimizer)
        assert rt.generate([[1, 2]], max_tokens=1)[0].weights_version == 1
        assert not torch.equal(rt.engine.module.lm_head.weight, before)


def test_a_compiled_model_is_shared_as_it_is():
    model = torch.compile(made(), backend="eager")
    with colo.share(engine(), model, adamw(model.parameters())) as rt:
        assert rt.transport.name == "shared"


def test_a_model_made_in_inference_mode_is_refused_and_its_copy_taken():
    model = made_in_inference_mode()
    with pytest.raises(colo.Unsupported, match=r"inference_mode\(\).* copy.deepcopy\(model\)"):
        colo.share(engine(), model, adamw(model.parameters()))
    trained = copy.deepcopy(model)
    with colo.share(engine(), trained, adamw(trained.parameters())) as rt:
        with rt.train():
            train_step(trained, rt.optimizer)
        assert rt.generate([[1, 2]], max_tokens=1)[0].weights_version == 1


def test_buffers_of_inference_mode_that_no_engine_is_given_are_taken():
    model = made()
    rotary = model.model.rotary_emb
    with torch.inference_mode():
        rotary.inv_freq = rotary.inv_freq.clone()
        scale = torch.ones(1)
    assert rotary.inv_freq.is_inference()
    with colo.share(engine(), model, adamw(model.parameters())) as rt:
        with rt.train():
            train_step(model, rt.optimizer)
        assert rt.generate([[1, 2]], max_tokens=1)[0].weights_version == 1
    model.model.register_buffer("scale", scale)  # which a checkpoint would hold
    with pytest.raises(colo.Unsupported, match=r"1 tensors of the model, model.scale for one.*inference_mode\(\)"):
        colo.share(engine(), model, adamw(model.parameters()))


def test_share_within_inference_mode_leaves_what_trains():
    model = made()
    optimizer = adamw(model.parameters())
    with torch.inference_mode():
        rt = colo.share(engine(), model, optimizer)
    with rt.train():
        train_step(model, optimizer)
    assert rt.generate([[1, 2]], max_tokens=1)[0].weights_version == 1
    rt.close()
