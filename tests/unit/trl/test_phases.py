import copy
import pickle
from dataclasses import replace

import pytest
import torch
from transformers import TrainerCallback

from colo.errors import PhaseError
from colo.phases.phase import Phase
from colo.report.charts import reward_chart
from colo.report.table import switching_s
from tests.trainers import SMALL_CACHE, logged, sums

IDS = torch.tensor([[1, 10, 2, 11]])
METRICS = ["rollout_s", "train_s", "switch_s", "rollout_gib", "train_gib", "tokens_per_s", "mismatch", "sent_bytes"]


@pytest.fixture
def trainer(make, attach):
    trainer = make(max_steps=3)
    attach(trainer)
    return trainer


def test_a_forward_pass_leaves_a_rollout(trainer):
    trainer.colo.enter(Phase.ROLLOUT)
    with torch.no_grad():
        trainer.model(IDS)
    assert trainer.colo.phase is Phase.TRAIN


def test_the_embeddings_alone_leave_it_too(trainer):
    trainer.colo.enter(Phase.ROLLOUT)
    trainer.model.get_input_embeddings()(IDS)
    assert trainer.colo.phase is Phase.TRAIN


def test_a_forward_pass_enters_training_only_where_it_trains(trainer):
    trainer.model.eval()
    trainer.model(IDS)
    trainer.model.train()
    with torch.no_grad():
        trainer.model(IDS)
    assert trainer.colo.phase is Phase.IDLE
    trainer.model(IDS)
    assert trainer.colo.phase is Phase.TRAIN


def test_a_phase_that_a_pass_has_entered_is_nobodys_block(trainer):
    """The user has opened none: samples may be asked for at any time, and blocks be opened."""
    rt = trainer.colo
    trainer.model.train()
    trainer.model(IDS)
    assert rt.phase is Phase.TRAIN
    assert rt.generate([[1, 10]], max_tokens=2) and rt.phase is Phase.IDLE
    for block in (rt.rollout, rt.train):
        trainer.model(IDS)
        with block():
            assert rt.phase is not Phase.IDLE
        assert rt.phase is Phase.IDLE
    with rt.rollout(), torch.no_grad():
        trainer.model(IDS)  # moves on to training
    assert rt.generate([[1, 10]], max_tokens=2)


def test_a_phase_that_was_asked_for_by_name_is_left_by_name(trainer):
    trainer.colo.enter(Phase.TRAIN)
    trainer.model(IDS)
    with pytest.raises(PhaseError, match="inside train"):
        trainer.colo.generate([[1, 10]], max_tokens=2)


def test_callbacks_and_rewards_sample_from_the_runtime_whenever_they_are_called(make, attach):
    texts = []

    class Samples(TrainerCallback):
        def on_step_end(self, *_, **__):
            texts.append(trainer.colo.generate([[1, 10]], max_tokens=2)[0].token_ids)

        on_substep_end = on_step_end

    def judged(completions, **_):
        return [float(len(c.token_ids)) for c in trainer.colo.generate([[1, 10]] * len(completions), max_tokens=2)]

    trainer = make(callbacks=[Samples()], reward=judged, max_steps=2, gradient_accumulation_steps=2)
    attach(trainer)
    trainer.train()
    assert len(texts) == 4


def test_copies_of_the_model_have_nothing_of_the_runtime(trainer):
    """An EMA or a teacher is copied from the model, and saved."""
    trainer.train()
    hooks = [copy.deepcopy(hook) for hook in trainer.model._forward_pre_hooks.values()]
    trainer.colo.enter(Phase.ROLLOUT)
    for hook in (*hooks, *(pickle.loads(pickle.dumps(hook)) for hook in trainer.model._forward_pre_hooks.values())):
        assert hook(trainer.model, (IDS,)) is None
    assert hooks and trainer.colo.phase is Phase.ROLLOUT


def test_a_reward_without_an_opinion_on_a_whole_batch_is_logged_as_none(make, attach):
    trainer = make(reward=lambda completions, **_: [None] * len(completions))
    attach(trainer)
    trainer.train()
    assert trainer.state.global_step


@pytest.mark.parametrize("name", METRICS)
def test_metrics_of_every_step_are_in_trls_history(trainer, name):
    trainer.train()
    values = logged(trainer, f"colo/{name}")
    assert len(values) == 3
    assert all(value > 0 for value in values) or name in ("mismatch", "sent_bytes")
    assert all(0 <= value < 1e-5 for value in values) or name not in ("mismatch", "sent_bytes")


def test_seconds_of_phases_are_those_of_the_step(make, attach):
    """Phases that have been attach's own check, or another step's, are not counted again."""
    trainer = make(max_steps=3)
    rt = attach(trainer)
    before = sum(s.duration_s for s in rt.trace.spans if (s.category, s.name) == ("phase", "rollout"))
    trainer.train()
    whole = sum(s.duration_s for s in rt.trace.spans if (s.category, s.name) == ("phase", "rollout"))
    assert before > 0
    assert sum(logged(trainer, "colo/rollout_s")) == pytest.approx(whole - before)


def test_seconds_of_switches_are_those_of_the_report(make, attach):
    """Weights are sent within a change of phases, and that time is the sending's alone."""
    trainer = make(max_steps=3)
    rt = attach(trainer, config=replace(SMALL_CACHE, weights="staged"))
    start_s = rt.trace.now_s()
    trainer.train()
    spans = [span for span in rt.trace.spans if span.start_s > start_s]
    sent_s = [span.duration_s for span in spans if (span.category, span.phase) == ("phase", Phase.SYNC)]
    assert sum(sent_s) > 0
    assert sum(logged(trainer, "colo/sync_s")) == pytest.approx(sum(sent_s))
    assert sum(logged(trainer, "colo/switch_s")) == pytest.approx(switching_s(spans))


def test_the_fraction_of_changed_weights_is_logged_for_masters(make, attach):
    trainer = make(model_init_kwargs={"dtype": "bfloat16"})
    attach(trainer)
    trainer.train()
    assert all(0 < value <= 1 for value in logged(trainer, "colo/changed_fraction"))


def test_sent_bytes_are_logged(make, attach):
    import colo

    trainer = make()
    rt = attach(trainer, config=colo.RuntimeConfig(kv_cache_bytes=1 << 20, weights="staged"))
    trainer.train()
    assert sum(logged(trainer, "colo/sent_bytes")) > 0
    assert not rt.transport.shares


def test_the_report_has_trls_metrics_and_counts_training_steps_alone(make, attach):
    trainer = make(max_steps=3, eval_strategy="steps", eval_steps=1, beta=0.1)
    rt = attach(trainer)
    trainer.evaluate()
    trainer.train()
    found = rt.report().to_json()
    assert found["num_steps"] == 3
    assert found["phases"]["evaluation"]["count"] >= 4
    assert found["phases"]["train"]["count"] == 3
    for name, logs in (("reward", "reward"), ("loss", "loss"), ("kl", "kl"), ("rewards/digits/mean",) * 2):
        assert rt.trace.metrics[name] == logged(trainer, logs) and len(logged(trainer, logs)) == 3
    assert rt.trace.metrics["completion_tokens"] == logged(trainer, "completions/mean_length")
    assert len(rt.trace.metrics["eval_reward"]) == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
        {"num_iterations": 2},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 1, "max_steps": 3},
        {"num_iterations": 2, "eval_strategy": "steps", "eval_steps": 1},
        {"max_steps": -1, "num_train_epochs": 2, "dataset": sums(8)},
    ],
    ids=["generation", "iterations", "cut short", "evaluated", "epochs"],
)
def test_the_report_counts_steps_of_the_optimizer_however_many_a_rollout_serves(make, attach, changes):
    trainer = make(**({"max_steps": 4} | changes))
    rt = attach(trainer)
    trainer.train()
    assert rt.report().to_json()["num_steps"] == trainer.state.global_step == len(logged(trainer, "loss"))


def test_a_report_says_how_many_values_a_run_has_logged(make, attach):
    trainer = make(max_steps=4, logging_steps=2)
    rt = attach(trainer)
    trainer.train()
    assert reward_chart(rt.trace).heading.caption.startswith("2 values of 4 training steps")


def test_evaluation_is_no_part_of_a_steps_metrics(make, attach):
    trainer = make(max_steps=3, eval_strategy="steps", eval_steps=1)
    attach(trainer)
    trainer.train()
    assert logged(trainer, "colo/rollout_s") and not logged(trainer, "colo/evaluation_s")
