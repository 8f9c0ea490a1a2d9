"""How completions are compared with the model that they were sampled from."""

import pytest
import torch

from tests.runtimes import PROMPTS, launch, launch_lora, train_step


@pytest.mark.parametrize("lora", [False, True])
def test_an_error_of_numbers_names_the_weight_that_is_to_blame_or_is_raised_as_it_is(lora, monkeypatch):
    rt = launch_lora() if lora else launch()

    def fail(*args, **kwargs):
        raise FloatingPointError("somewhere")

    monkeypatch.setattr(rt.engine, "generate", fail)
    with pytest.raises(FloatingPointError, match="^somewhere$"):
        rt.generate([[1]], max_tokens=1)
    name = next(n for n, _ in rt.model.named_parameters() if ("lora_B" in n) is lora)
    rt.model.get_parameter(name).data.view(-1)[:2] = float("nan")
    named = (
        r"q_proj.*has 2 values that are NaN" if lora else r"embed_tokens\.weight \(100, 64\) has 2 values that are NaN"
    )
    with pytest.raises(FloatingPointError, match=named):
        rt.generate([[1]], max_tokens=1)
    rt.close()


def test_completions_are_compared_once_and_only_with_the_weights_that_they_were_sampled_from(rt):
    rt.generate(PROMPTS, max_tokens=4)
    for _ in range(2):
        with rt.train():
            assert len(rt.trace.metrics["mismatch_sampled"]) == 1
    rt.generate(PROMPTS, max_tokens=4)
    with torch.no_grad():
        rt.model.model.norm.weight.mul_(2)
    with rt.train():
        assert len(rt.trace.metrics["mismatch_sampled"]) == 1
    assert rt.weights_version == 1


def test_a_baseline_without_the_adapter_is_not_compared_with_the_model_that_has_it():
    rt = launch_lora()
    with rt.train():
        train_step(rt)
    with rt.model.disable_adapter(), rt.rollout():
        rt.generate(PROMPTS, max_tokens=4)
    with rt.train():
        pass
    assert "mismatch_sampled" not in rt.trace.metrics
    rt.close()


@pytest.mark.parametrize("also", ["filtered", "without the adapter"])
def test_samples_of_another_distribution_do_not_take_the_place_of_those_to_compare(also):
    rt = launch_lora()
    with rt.rollout():
        rt.generate(PROMPTS, max_tokens=4)
        if also == "filtered":
            rt.generate(PROMPTS, max_tokens=4, top_p=0.9)
        else:
            with rt.model.disable_adapter():
                rt.generate(PROMPTS, max_tokens=4)
    with rt.train():
        pass
    assert rt.trace.metrics["mismatch_sampled"][-1] < 1e-4
    rt.close()
