"""TRL's trainers of a tiny model on a CPU: a data set of sums, and a reward that differs between completions."""

from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState
from datasets import Dataset
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from colo.config import RuntimeConfig
from colo.units import MIB

ALPHABET = "0123456789+=;"
SMALL_CACHE = RuntimeConfig(kv_cache_bytes=MIB)


def sums(count=32):
    """Rows with a prompt such as `3+5=` and its answer."""
    return Dataset.from_list(
        [{"prompt": f"{i % 10}+{i // 10}=", "answer": str(i % 10 + i // 10)} for i in range(count)]
    )


def digits(completions, **_):
    """The share of even digits, which differs between completions of random weights."""
    return [sum(c in "02468" for c in text) / 4 for text in completions]


def options(folder, **changes):
    """Arguments of a config: two steps of sixteen completions in two parts."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "seed": 0,
    } | changes


def trainer_of(
    model,
    folder,
    *,
    kind=GRPOTrainer,
    config=GRPOConfig,
    reward=digits,
    dataset=None,
    callbacks=None,
    made_with=None,
    **changes,
):
    """A trainer, quiet; `changes` are of its config, `made_with` are other arguments of the trainer's own."""
    trainer = kind(
        model,
        reward_funcs=reward,
        args=config(**options(folder, **changes)),
        train_dataset=dataset or sums(),
        eval_dataset=sums(8),
        callbacks=callbacks,
        **(made_with or {}),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def use_fsdp2(trainer):
    """Have accelerate's plugin shard the trainer's model; on a CPU its state has to be told so."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        state_dict_type="FULL_STATE_DICT",
    )
    state = trainer.accelerator.state
    state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # as accelerate does for GPUs
    trainer.is_fsdp_enabled = True


def logged(trainer, name="reward"):
    """A metric of every step that was logged."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def trained(model):
    """Copies of the weights that train."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def frozen(model):
    """Copies of the weights that do not."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
