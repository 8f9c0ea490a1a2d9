"""Engines that are started for a model which exists, and pairs of both that wait for an optimizer."""

import copy
import gc
import operator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import IA3Config, LoraConfig, get_peft_model
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

import colo
from colo.assembly import share
from colo.assembly.share import EngineRequest, _held_bytes
from colo.config import RuntimeConfig
from colo.engine import EngineState
from colo.engines.torch import TorchEngine
from colo.engines.vllm.client import start
from colo.errors import BudgetError, TransferError, Unsupported
from colo.memory.offload import Mover
from colo.planning.estimate import RESIDUAL_BYTES, SAMPLER_BYTES_PER_LOGIT
from colo.planning.model_shape import ModelShape
from colo.runtime import Runtime, construction, lifetime, turns
from colo.runtime import runtime as runtime_module
from colo.runtime.lifetime import KEEPER, collect_dropped
from colo.trainer.master_weights import MasterWeights
from colo.units import GIB, MIB, format_bytes
from colo.weights.ranks import RankGroup
from tests.runtimes import adamw, launch, make_engine, qwen3, train_step

CONFIG = RuntimeConfig(kv_cache_bytes=MIB)


def made(dtype=torch.float32):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(qwen3(), dtype=dtype)


def test_an_engine_is_started_for_a_model_and_shares_its_weights():
    model = made()
    values = [p.detach().clone() for p in model.parameters()]
    with colo.share("torch", model, adamw(model.parameters()), config=CONFIG) as rt:
        assert rt.transport.name == "shared" and rt.bytes_synced == 0
        assert all(torch.equal(a, p) for a, p in zip(values, model.parameters(), strict=True))
        before = rt.generate([[1, 2, 3]], max_tokens=4, temperature=0)
        with rt.train():
            train_step(rt)
        after = rt.generate([[1, 2, 3]], max_tokens=4, temperature=0)
        assert before[0].weights_version == 0 and after[0].weights_version == 1
    assert model(torch.tensor([[1, 2]])).logits.isfinite().all(), "the model goes on without colo"


@pytest.mark.parametrize(
    ("path", "kind"),
    [("", "module"), (".mlp", "module"), (".input_layernorm", "module"), (".mlp.gate_proj.weight", "weight")],
)
@pytest.mark.parametrize("lora", [False, True])
def test_layers_that_share_a_module_are_named_with_what_to_change(path, kind, lora):
    model = made()
    first, second = (f"model.layers.{number}{path}" for number in range(2))
    owner, _, name = second.rpartition(".")
    give = partial(setattr, model.get_submodule(owner), name)
    shared = operator.attrgetter(first)(model)
    give(shared)
    before = "base_model.model." if lora else ""
    trained = get_peft_model(model, LoraConfig(target_modules=["q_proj"])) if lora else model
    words = f"^{before}{first} and {before}{second} of the model are one {kind}, .* put a copy.deepcopy"
    with pytest.raises(TransferError, match=words):
        colo.share("torch", trained, adamw(trained.parameters()), config=CONFIG)
    assert model(torch.tensor([[1, 2]])).logits.isfinite().all()
    if not lora:
        give(copy.deepcopy(shared))
        with colo.share("torch", model, adamw(model.parameters()), config=CONFIG) as rt:
            assert rt.transport.name == "shared"


@pytest.mark.parametrize(
    ("tokens", "sequences", "warm_up_bytes"),
    [
        (4096, 8, 2 * 4096 * 2 * 2 * (512 + 3 * 2048)),  # queries, keys and values, an MLP's intermediates, in and out
        (4096, 1024, 1024 * 151936 * SAMPLER_BYTES_PER_LOGIT),  # more than two such steps
        (16384, 8, 2 * 16384 * 2 * 2 * (512 + 3 * 2048)),
    ],
)
def test_the_default_kv_cache_leaves_vllm_what_it_starts_in(tokens, sequences, warm_up_bytes, monkeypatch):
    imports = []
    monkeypatch.setattr(start, "import_apart", lambda: imports.append("apart"))
    sizes = {"vocab_size": 151936, "num_hidden_layers": 96, "head_dim": 128, "max_position_embeddings": 4096}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 2048}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(qwen3(**sizes, **heads))
    options = {"max_num_batched_tokens": tokens, "max_num_seqs": sequences}
    cuda = torch.device("cuda", 0)
    request = EngineRequest("any", cuda, torch.bfloat16, RuntimeConfig(), 12 * GIB, None, options)
    left_bytes = 12 * GIB - 2 * sum(p.numel() for p in model.parameters())
    assert request.kv_cache_bytes(model, "torch") == int(0.9 * left_bytes), "which has no warm-up"
    assert request.kv_cache_bytes(model, "vllm") == int(0.9 * (left_bytes - RESIDUAL_BYTES - warm_up_bytes))
    assert imports == ["apart"], "or vLLM keeps the frames of whoever builds an engine"
    given = replace(request, config=RuntimeConfig(kv_cache_bytes=MIB))
    assert given.kv_cache_bytes(model, "vllm") == MIB
    assert imports == ["apart"], "what is given is not computed"
    tight = replace(request, capacity_bytes=12 * GIB - left_bytes + RESIDUAL_BYTES)
    words = f"do not fit in .* beside {format_bytes(RESIDUAL_BYTES + warm_up_bytes)} that vLLM starts in: lower max_num"
    with pytest.raises(BudgetError, match=words) as caught:
        tight.kv_cache_bytes(model, "vllm")
    assert caught.value.free_bytes == tight.capacity_bytes
    assert caught.value.needed_bytes == tight.capacity_bytes + warm_up_bytes + 16 * MIB
    just = replace(tight, capacity_bytes=caught.value.needed_bytes)
    assert just.kv_cache_bytes(model, "vllm") == 16 * MIB


def test_the_default_kv_cache_of_8b_lets_vllm_start_on_24_gib(monkeypatch):
    monkeypatch.setattr(start, "import_apart", lambda: None)
    sizes = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(qwen3(tie_word_embeddings=False, **sizes, **heads))
    free_bytes = int(23.33 * GIB)  # of 24, as vLLM 0.26 saw it on an H200
    options = {"max_num_batched_tokens": 4096, "max_num_seqs": 8}
    capacity_bytes = int(0.97 * free_bytes)
    request = EngineRequest(
        "any", torch.device("cuda", 0), torch.bfloat16, RuntimeConfig(), capacity_bytes, None, options
    )
    weights_bytes = 2 * sum(p.numel() for p in model.parameters())
    taken_bytes = int(2.7 * GIB)  # there, before its KV cache
    spare_bytes = free_bytes - weights_bytes - taken_bytes - request.kv_cache_bytes(model, "vllm")
    assert 1.25 * GIB < spare_bytes < 1.75 * GIB, "for CUDA graphs, and for the context of a process of its own"


def test_a_model_that_cannot_be_measured_has_a_default_kv_cache(monkeypatch):
    monkeypatch.setattr(start, "import_apart", lambda: None)

    def unknown(model):
        raise Unsupported("cannot plan a model")

    monkeypatch.setattr(ModelShape, "of", unknown)
    model = made()
    request = EngineRequest("any", torch.device("cuda", 0), torch.bfloat16, RuntimeConfig(), 2 * GIB, None, {})
    left_bytes = 2 * GIB - 2 * sum(p.numel() for p in model.parameters()) - RESIDUAL_BYTES
    assert request.kv_cache_bytes(model, "vllm") == min(int(0.9 * left_bytes), request.kv_cache_bytes(model, "torch"))


def test_an_adapter_in_fp32_is_no_copy_of_the_weights(monkeypatch):
    asked = []
    known = EngineRequest.kv_cache_bytes

    def asking(self, *args, **given):
        asked.append(given.get("beside_bytes"))
        return known(self, *args, **given)

    monkeypatch.setattr(EngineRequest, "kv_cache_bytes", asking)
    model = get_peft_model(made().bfloat16(), LoraConfig(r=2, target_modules="all-linear"))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.float32}, "as PEFT makes them"
    with colo.share("torch", model, adamw(trained), config=CONFIG) as rt:
        assert rt.transport.name == "shared"
    assert asked == [0]


def test_an_engine_is_started_for_a_model_with_an_adapter():
    model = get_peft_model(made(), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    with colo.share("torch", model, adamw([p for p in model.parameters() if p.requires_grad]), config=CONFIG) as rt:
        assert rt.transport.name == "shared"
        assert rt.generate([[1]])[0].adapter == "policy@0"


def test_an_engine_of_another_dtype_has_a_copy_that_is_cast():
    model = made()
    with colo.share("torch", model, adamw(model.parameters()), dtype="bfloat16", config=CONFIG) as rt:
        assert rt.engine.module.dtype == torch.bfloat16
        reason = rt.report().facts["weights"]
        assert "it is torch.float32 here and torch.bfloat16 in the engine" in reason
        size = format_bytes(rt.scheduler.segments["engine.weights"].size_bytes)
        assert f"the engine's copy takes {size}, and each version is copied into it" in reason
        with rt.train():
            train_step(rt)
        assert rt.generate([[1]], max_tokens=2)[0].weights_version == 1
        assert rt.bytes_synced > 0
        found = rt.engine.weights.hf_views()
        assert all(torch.equal(found[name], p.bfloat16()) for name, p in model.named_parameters())


def test_an_fp32_model_has_an_engine_in_bf16_on_a_gpu_unless_told_otherwise():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    model = made()
    assert share._dtype(model, None, cuda) == torch.bfloat16
    assert share._dtype(model, None, cpu) == share._dtype(model, "float32", cuda) == torch.float32
    assert share._dtype(model.half(), None, cuda) == torch.float16


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"engine": "sglang"}, TypeError, "or 'torch' or 'vllm', not 'sglang'"),
        ({"engine": "torch", "engine_options": {"max_model_len": 8}}, ValueError, "are those of vLLM"),
        ({"engine": "torch", "dtype": "int8"}, ValueError, "dtype must be a torch.dtype or its name"),
        (
            {"engine": "torch", "config": RuntimeConfig(kv_cache_bytes=MIB, device_limit_bytes=MIB)},
            colo.BudgetError,
            "do not fit",
        ),
    ],
)
def test_what_cannot_be_started_leaves_the_model_alone(options, error, message):
    model = made()
    memory = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(error, match=message):
        colo.share(model=model, optimizer=adamw(model.parameters()), **({"config": CONFIG} | options))
    assert memory == [p.data_ptr() for p in model.parameters()]
    with colo.share("torch", model, adamw(model.parameters()), config=CONFIG):
        pass


def test_options_of_an_engine_are_refused_where_it_runs_already():
    model = made()
    with pytest.raises(TypeError, match="this one runs already"):
        colo.share(make_engine(), model, adamw(model.parameters()), dtype="bfloat16")


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, target_modules="all-linear")], ids=["full", "lora"])
def test_an_engine_and_a_model_start_without_an_optimizer(lora):
    engine, model = colo.start(made(), lora=lora, device="cpu", config=CONFIG)
    groups = [{"params": [p for n, p in model.named_parameters() if p.requires_grad], "weight_decay": 0.0}]
    with colo.share(engine, model, AdamW(groups, lr=1e-2), config=CONFIG) as rt:
        assert rt.transport.name == "shared"
        assert rt.model is model
        with rt.train():
            train_step(rt)
        assert rt.generate([[1]], max_tokens=2)[0].weights_version == 1


def test_accelerates_optimizer_is_taken_as_it_is():
    model = made()
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare_optimizer(adamw(model.parameters()), device_placement=False)
    with colo.share("torch", model, optimizer, config=CONFIG) as rt:
        assert rt.optimizer is optimizer
        assert colo.Runtime.of(optimizer) is rt and colo.Runtime.of(optimizer.optimizer) is rt
        with rt.train():
            train_step(rt)
        assert rt.weights_version == 1
        with pytest.raises(colo.PhaseError, match="this optimizer has a runtime already"):
            colo.share("torch", made(), optimizer.optimizer, config=CONFIG)
    with pytest.raises(ValueError, match="no open runtime"):
        colo.Runtime.of(optimizer)


def test_room_is_counted_with_everything_that_lies_on_the_device_once():
    model = made(torch.bfloat16)
    weights_bytes = sum(p.nbytes for p in model.parameters())
    optimizer = MasterWeights(lambda params: AdamW(params, lr=1e-2), remainders=False)(model.parameters())
    assert _held_bytes([], model, optimizer) == 3 * weights_bytes, "bf16 weights and fp32 masters"
    ids = torch.tensor([[1, 2, 3]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert _held_bytes([], model, optimizer) == 4 * weights_bytes, "and gradients"
    optimizer.step()
    steps_bytes = sum(4 for _ in model.parameters())
    assert _held_bytes([], model, optimizer) == 8 * weights_bytes + steps_bytes, "and two moments"
    with launch() as rt:
        engine_bytes = sum(segment.device_bytes for segment in rt.engine.segments)
        assert _held_bytes(rt.engine.segments, rt.model, rt.optimizer, rt.transport) == engine_bytes, "one copy"


class TestUndoing:
    """What was begun when something fails."""

    def test_an_engine_that_cannot_be_closed_keeps_no_memory_of_the_movers(self, monkeypatch):
        closed = []
        monkeypatch.setattr(TorchEngine, "close", lambda _: closed.append("engine") or 1 / 0)
        monkeypatch.setattr(Mover, "close", lambda _: closed.append("mover"))
        monkeypatch.setattr("colo.assembly.share.transport_for", lambda *_: (_ for _ in ()).throw(OSError("mine")))
        model = made()
        with pytest.raises(OSError, match="mine"):
            colo.share("torch", model, adamw(model.parameters()), config=CONFIG)
        assert closed == ["engine", "mover"]

    def test_weights_come_back_to_the_device_where_their_way_to_the_host_fails(self, monkeypatch):
        class Parameter:
            """A parameter that notes where it is, on a host with little room."""

            def __init__(self, fails):
                self.device, self.fails, self.requires_grad = torch.device("cuda"), fails, True

            @property
            def data(self):
                return self

            @data.setter
            def data(self, moved):
                self.device = moved

            def to(self, device):
                if self.fails and device == "cpu":
                    raise MemoryError("the host is full")
                return torch.device(device)

        emptied = []
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append([p.device.type for p in parameters]))
        parameters = [Parameter(False), Parameter(True), Parameter(False)]
        model = SimpleNamespace(parameters=lambda: parameters)
        with pytest.raises(MemoryError), share._in_host_memory(model):
            pytest.fail("not reached")
        assert all(p.device.type == "cuda" for p in parameters)
        parameters[1].fails = False
        with share._in_host_memory(model):
            assert emptied == [["cpu"] * 3], "an engine in another process could not have what torch keeps"

    @pytest.mark.parametrize("start", [colo.share, launch])
    @pytest.mark.parametrize(
        "step",
        [
            "Runtime.__init__",
            "register",
            "prepare_arena",
            "Closing.__init__",
            "make_versions",
            "check_phases",
            "RankGroup.any",
        ],
    )
    @pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
    def test_a_start_that_fails_at_its_end_leaves_nothing(self, monkeypatch, start, step, error):
        """The step is made, and fails then."""
        where, _, name = step.rpartition(".")
        part = {"Runtime": Runtime, "Closing": lifetime.Closing, "RankGroup": RankGroup}.get(where) or construction
        if step in ("register", "prepare_arena"):
            part = runtime_module
        elif step == "make_versions":
            part = turns
        real = getattr(part, name)

        def fail(*args, **given):
            real(*args, **given)
            raise error("mine")

        model = made()
        optimizer = adamw(model.parameters())
        values = [p.detach().clone() for p in model.parameters()]
        with monkeypatch.context() as patch:
            patch.setattr(part, name, fail)
            with pytest.raises(error, match="mine"):
                colo.share("torch", model, optimizer, config=CONFIG) if start is colo.share else launch(model)
        gc.collect()
        assert collect_dropped() == 0
        assert all(torch.equal(a, p) for a, p in zip(values, model.parameters(), strict=True))
        assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())
        assert not any(value for name, value in vars(optimizer).items() if name.endswith("_hooks"))
        assert KEEPER not in vars(model)
        colo.share("torch", model, optimizer, config=CONFIG).close()

    def test_an_engine_that_was_awake_is_awake_again(self):
        engine, model = make_engine(), made()
        with pytest.raises(colo.Unsupported):
            colo.share(engine, model, AdamW([torch.nn.Parameter(torch.ones(2))]))
        assert engine.state is EngineState.AWAKE


def test_an_adapter_that_no_engine_applies_is_refused_before_one_starts(monkeypatch):
    monkeypatch.setattr("colo.assembly.share.start_for", lambda *_: pytest.fail("an engine is started"))
    for config in (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), LoraConfig(r=2, use_dora=True)):
        model = get_peft_model(made(), config)
        with pytest.raises(colo.Unsupported, match="IA3|use_dora"):
            colo.share("torch", model, adamw([p for p in model.parameters() if p.requires_grad]), config=CONFIG)


def test_another_runtime_that_is_open_is_named_where_there_is_no_room():
    tight = RuntimeConfig(kv_cache_bytes=MIB, device_limit_bytes=MIB)
    with launch() as rt:
        model = made()
        optimizer = adamw(model.parameters())
        for make in (lambda: launch(config=tight), lambda: colo.share("torch", model, optimizer, config=tight)):
            with pytest.raises(colo.BudgetError) as caught:
                make()
            assert "1 other runtime is open in this process" in caught.value.__notes__[0]
        assert rt.generate([[1, 2]])


def test_what_torch_keeps_of_earlier_work_is_free(monkeypatch):
    free = [MIB]
    monkeypatch.setattr(share, "free_device_bytes", lambda _: free[0])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.__setitem__(0, 100 * MIB))
    assert share.capacity(RuntimeConfig(), torch.device("cuda", 0), held_bytes=0) == int(0.97 * 100 * MIB)
