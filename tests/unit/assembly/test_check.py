"""`colo.check`: an engine that computes another model, or does not sample as it is told, is named."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import colo
from colo.config import RuntimeConfig
from colo.engines.torch import TorchEngine
from colo.errors import PhaseError, StaleWeights, Unsupported
from colo.units import MIB
from tests.runtimes import adamw, qwen3

CONFIG = RuntimeConfig(kv_cache_bytes=MIB)


def made(**changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(qwen3(**changes), dtype=torch.float32)


def shared(engine="torch", model=None):
    model = made() if model is None else model
    trained = [p for p in model.parameters() if p.requires_grad]
    return colo.share(engine, model, adamw(trained), config=CONFIG)


class Deaf(TorchEngine):
    """An engine that ignores some sampling options, and refuses others by name."""

    ignored: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    refusal = Unsupported
    led_elsewhere: tuple[str, ...] = ()  # seeds of which one draw in two is another, stop tokens after other ones
    turns = 0

    def sampling_params(self, params, **options):
        for name in self.refused:
            if name in options:
                raise self.refusal(f"no {name}")
        if "stop_token_ids" in options and "stop_token_ids" in self.led_elsewhere:
            options["temperature"] = 1.0
        if "seed" in options and "seed" in self.led_elsewhere:
            self.turns += 1
            options["seed"] += self.turns % 2 * self.turns
        return super().sampling_params(params, **{k: v for k, v in options.items() if k not in self.ignored})


def deaf_engine(config=None, **changes):
    engine = Deaf(config or qwen3(), device="cpu", dtype=torch.float32, kv_cache_bytes=MIB)
    for name, value in changes.items():
        setattr(engine, name, value)
    return engine


def deaf(**changes):
    return shared(deaf_engine(**changes))


def test_an_engine_that_does_what_the_trainer_does_passes_and_no_weight_changes():
    with shared() as rt:
        before = [p.detach().clone() for p in rt.model.parameters()]
        found = colo.check(rt)
        assert found.mismatch < 1e-5 and found.num_tokens == 32 and found.adapter_tensors == 0
        assert {"top_k", "top_p", "min_p", "seed", "stop_token_ids", "n", "temperature"} <= set(found.options)
        assert "differ by" in str(found) and "top_k" in str(found)
        assert all(torch.equal(a, p) for a, p in zip(before, rt.model.parameters(), strict=True))
        assert colo.check(rt) == found, "it draws from a seed"


@pytest.mark.parametrize("ends_at", [None, 0, 1])
def test_an_engine_that_ends_where_the_model_does_is_asked_no_more(ends_at):
    """Of a greedy completion every token is the model's end in turn."""
    with deaf(refused=("ignore_eos",)) as rt:
        if ends_at is not None:
            greedy = rt.generate([[1, 2, 3]], temperature=0.0, max_tokens=8)[0].token_ids
            rt.engine.module.config.eos_token_id = greedy[ends_at]
        found = colo.check(rt, [[1, 2, 3], [4, 5]])
    assert {"max_tokens", "top_k", "stop_token_ids"} <= set(found.options) and found.mismatch < 1e-5


def test_a_model_whose_passes_colo_does_not_know_is_refused():
    with shared() as rt:
        rt.model = torch.nn.ModuleList([rt.model])
        with pytest.raises(Unsupported, match="does not know how a ModuleList computes log-probabilities"):
            colo.check(rt)


def test_every_tensor_of_an_adapter_is_served():
    model = get_peft_model(made(), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    with shared(model=model) as rt:
        found = colo.check(rt)
    assert found.adapter_tensors == sum("lora_" in name for name, _ in model.named_parameters())
    assert f"{found.adapter_tensors} tensors of the adapter are served" in str(found)


def test_a_trainer_that_computes_something_else_is_found():
    with shared() as rt:
        handle = rt.model.get_output_embeddings().register_forward_hook(lambda *a: 2 * a[-1])
        with pytest.raises(StaleWeights, match="compute different models"):
            colo.check(rt, max_mismatch=0.01)
        assert colo.check(rt, max_mismatch=100).mismatch > 0.01
        handle.remove()
        assert colo.check(rt, max_mismatch=0.01).mismatch < 1e-5


@pytest.mark.parametrize("option", ["top_k", "top_p", "min_p", "seed", "stop_token_ids"])
def test_an_option_that_the_engine_ignores_is_named(option):
    with deaf(ignored=(option,)) as rt, pytest.raises(Unsupported, match=f"does not honour {option}:"):
        colo.check(rt)


def test_an_engine_whose_batches_lead_elsewhere_at_times_honours_what_it_is_told():
    """Other clients' requests in a batch change the last bits of logits, and a token that was nearly another is it."""
    with deaf(led_elsewhere=("seed", "stop_token_ids")) as rt:
        found = colo.check(rt)
    assert {"seed", "stop_token_ids"} <= set(found.options)


@pytest.mark.parametrize("noise", [0, 0.01])
def test_tokens_that_are_equally_likely_may_be_drawn_by_a_filter_that_leaves_the_best(noise):
    model = made(tie_word_embeddings=False)
    with torch.no_grad():  # every token has a twin
        head = model.get_output_embeddings().weight
        head[1::2] = head[::2]
    # as of a deep model in bf16: the engine does not see it
    odd = noise * (torch.arange(len(head)) % 2)
    model.get_output_embeddings().register_forward_hook(lambda *given: given[-1] + odd)
    with shared(model=model) as rt:
        assert {"top_k", "top_p", "min_p"} <= set(colo.check(rt).options)
    with (
        shared(deaf_engine(model.config, ignored=("top_p",)), model=model) as rt,
        pytest.raises(Unsupported, match="honour top_p:"),
    ):
        colo.check(rt)


@pytest.mark.parametrize("refusal", [Unsupported, ValueError])
def test_a_filter_that_the_engine_refuses_is_not_among_those_it_honours(refusal):
    with deaf(refused=("top_p", "min_p"), refusal=refusal) as rt:
        found = colo.check(rt)
        assert "top_k" in found.options and not {"top_p", "min_p"} & set(found.options)
        with pytest.raises(refusal, match="no top_p"):
            colo.check(rt, sampling={"top_p": 0.9})


def test_a_check_within_a_phase_is_refused():
    with shared() as rt, rt.train(), pytest.raises(PhaseError):
        colo.check(rt)


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"max_mismatch": "0.1"}, TypeError, "max_mismatch must be a number or None, not '0.1'"),
        ({"max_mismatch": -1}, ValueError, "max_mismatch must be positive or None, not -1"),
        ({"max_mismatch": float("nan")}, ValueError, "max_mismatch must be positive or None, not nan"),
        ({"sampling": colo.SamplingParams(n=2)}, TypeError, "sampling has options by name, .* is a SamplingParams"),
        ({"prompts": 5}, TypeError, "prompts is a list of prompts, .*, not 5"),
    ],
    ids=str,
)
def test_what_a_check_does_not_take_is_refused_before_anything_is_sampled(monkeypatch, given, kind, words):
    with shared() as rt:
        monkeypatch.setattr(rt, "rollout", None)
        with pytest.raises(kind, match=words):
            colo.check(rt, **given)


def test_prompts_of_a_check_may_be_a_tensor():
    with shared() as rt:
        assert colo.check(rt, torch.tensor([[1, 2], [3, 4]])).mismatch < 1e-5


def test_what_is_no_runtime_is_a_type_error():
    with pytest.raises(TypeError, match="check takes a runtime, as colo.launch and colo.share return, not a Qwen3For"):
        colo.check(made())
