"""`colo grpo`: a checkpoint and a dataset in, a trained checkpoint out, by TRL's trainer under colo's flag.

Everything that can be wrong with what was given is found before a model is loaded.
"""

from __future__ import annotations

import codecs
import functools
import importlib
import importlib.util
import inspect
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import trl.rewards
from datasets import Dataset, load_dataset, load_from_disk
from transformers import AutoConfig, ProgressCallback, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOTrainer, ModelConfig, ScriptArguments, get_peft_config, get_quantization_config

from colo.assembly.arguments import check_path
from colo.assembly.launch import check_config, refuse_adapted_head, revision_of, tokenizer_of
from colo.engines.text import check_prompts, encode_prompts, positions_of
from colo.errors import Unsupported
from colo.memory.uninterrupted import uninterrupted
from colo.rl.rewards import RewardFunction, await_reward, bound, call_reward, named_rewards
from colo.trl import ColoGRPOConfig, ColoGRPOTrainer
from colo.trl.checks import check_args, check_columns, check_options, is_awaited
from colo.trl.flag import FOLDED
from colo.trl.partial import check_partial
from colo.weights.sources.peft import check_lora_config

Tell = Callable[[str], None]
OnLog = Callable[[dict[str, float]], None]

PROMPT = "prompt"
"""The column that is sampled for: a text, or a conversation."""

_OF_A_CHECKPOINT = ("config.json", "adapter_config.json", "*.safetensors", "*.safetensors.index.json", "*.bin")
_OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")


@dataclass
class RunArguments(ScriptArguments):  # type: ignore[misc]
    """Arguments beside TRL's configs: those of its `grpo` script, and `colo grpo`'s own."""

    reward_funcs: list[str] = field(
        default_factory=list,
        metadata={"help": "`path.py:function`, `module:function`, or a reward function of TRL by its name."},
    )
    reward_model_name_or_path: str | None = field(
        default=None, metadata={"help": "A checkpoint of a reward model, beside or instead of functions."}
    )
    dataset_columns: list[str] = field(
        default_factory=list,
        metadata={"help": "Columns to rename, `prompt=question`: the new name, then the dataset's."},
    )
    eval_dataset_name: str | None = field(
        default=None, metadata={"help": "What to evaluate on, where that is not a split of the dataset."}
    )
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Train also where another run has left checkpoints, and remove those."}
    )

    def __post_init__(self) -> None:
        for name in ("reward_funcs", "dataset_columns"):
            if isinstance(one := getattr(self, name), str):  # in YAML, of which a list would be its letters
                setattr(self, name, [one])


@dataclass
class GRPORunConfig(ColoGRPOConfig):
    """`ColoGRPOConfig` with the flag on, the engine that is there, and a log of every step."""

    fast_inference: bool = field(default=True, metadata={"help": "Generate with an engine on the trainer's weights."})
    use_cpu: bool = field(default=False, metadata={"help": "Train on the CPU, as where there is no GPU."})
    bf16: bool | None = field(default=None, metadata={"help": "Autocast to bfloat16; by default on a GPU."})
    disable_tqdm: bool | None = field(default=None, metadata={"help": "No progress bars; by default none."})
    logging_steps: float = field(default=1, metadata={"help": "Steps of which means are logged."})
    colo_seeded: bool = field(  # type: ignore[assignment]  # `bool`, which a command line may give without a value
        default=None,  # until the engine is chosen
        metadata={"help": "Seed every rollout by its step; by default with the embedded engine, without partial ones."},
    )

    def __post_init__(self) -> None:
        has_cuda = torch.cuda.is_available()
        self.use_cpu = self.use_cpu or not has_cuda
        if self.bf16 is None and self.use_cpu:
            self.bf16 = False
        self.choose_engine()
        # Free for the embedded engine: a seed repeats a run then, and a resumed one draws what the first would have.
        seeded: Any = self.colo_seeded
        if seeded is None:
            self.colo_seeded = self.colo_engine == "torch" and not self.colo_partial_rollouts
        self.disable_tqdm = True if self.disable_tqdm is None else self.disable_tqdm
        super().__post_init__()


@dataclass
class GRPOModelConfig(ModelConfig):  # type: ignore[misc]
    """`ModelConfig` with weights of a dtype that suits the device, and adapters on every linear layer."""

    dtype: str | None = field(
        default=None,
        metadata={
            "help": "Of the weights; by default bfloat16 on a GPU and float32 on a CPU.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    lora_target_modules: list[str] | None = field(
        default_factory=lambda: ["all-linear"], metadata={"help": "LoRA target modules."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        modules: Any = self.lora_target_modules
        if isinstance(modules, str) and modules != "all-linear" and modules.replace(".", "_").isidentifier():
            self.lora_target_modules = [modules]  # which TRL makes a pattern that no whole name matches


def train(
    run: RunArguments,
    args: GRPORunConfig,
    model: GRPOModelConfig,
    *,
    tell: Tell = lambda text: None,
    on_log: OnLog = lambda metrics: None,
) -> Path:
    """Train, and save model (or adapter) and tokenizer: the folder that they are in.

    `on_log` gets what TRL logs, of steps and evaluations, with `step` and `max_steps`. What was trained before an
    interrupt or an error is saved too, which `tell` says, and both are raised.

    Raises: `ValueError` and `OSError` for what was given, before the model is loaded; as `ColoGRPOTrainer`.
    """
    # all checks come before the model is loaded, which takes minutes
    check_args(args)
    check_options(args)
    _check_words(args)
    checkpoint = _check_output(run, args)
    revision = _revision(args, model)
    lora = _check_model(args, model, revision)
    rewards = _rewards(run, args, revision)
    _check_metric(args, rewards, tell)
    _check_whole(run)
    dataset = _rows(run.dataset_name, run, run.dataset_train_split)
    evaluation = _evaluation(run, args)
    longest = 0
    for rows, name in ((dataset, run.dataset_name), (evaluation, run.eval_dataset_name or run.dataset_test_split)):
        if rows is not None:
            tokens = check_rows(
                rows,
                name,
                model.model_name_or_path,
                revision=revision,
                trust_remote_code=any(getattr(each, "trust_remote_code", False) for each in (args, model)),
            )
            longest = max(longest, tokens)
            check_columns(rewards, rows)
    _check_batch(args, dataset)
    if args.colo_partial_rollouts:
        check_partial(args, {"train_dataset": dataset})
    if args.colo_engine == "vllm" and args.vllm_max_model_length is None and longest:
        most = positions_of(AutoConfig.from_pretrained(model.model_name_or_path, revision=revision)).count
        needed = longest + args.max_completion_length  # a whole context would ask for a KV cache as large
        args.vllm_max_model_length = needed if most is None else min(needed, most)
    given: dict[str, Any] = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    given = {name: value for name, value in given.items() if value is not None}
    given |= {} if revision == "main" else {"revision": revision}
    args.model_init_kwargs = given | dict(args.model_init_kwargs or {})
    tell(f"loading {model.model_name_or_path} for the engine {args.colo_engine!r}")
    whole = WholeSteps()
    trainer = ColoGRPOTrainer(
        model.model_name_or_path,
        rewards,
        args,
        train_dataset=dataset,
        eval_dataset=evaluation,
        quantization_config=get_quantization_config(model),
        peft_config=lora,
        callbacks=[whole],
    )
    for kind in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(kind)
    trainer.add_callback(_Logs(on_log, trainer.is_world_process_zero()))
    try:
        _train(trainer, checkpoint, whole, run.overwrite_output_dir, tell)
    finally:
        if args.fast_inference:
            trainer.colo.close()
    return Path(args.output_dir)


def _train(trainer: Any, checkpoint: str | None, whole: WholeSteps, overwrite: bool, tell: Tell) -> None:
    output = Path(trainer.args.output_dir)
    if overwrite:
        for folder in output.glob("checkpoint-*"):  # TRL would count those of another run among its own
            shutil.rmtree(folder)
    began = trainer.state.global_step
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    except BaseException as error:
        whole.end()
        if trainer.state.global_step > began and not isinstance(error, GeneratorExit):
            _save_what_there_is(trainer, tell)
        raise
    _save(trainer)
    tell(f"saved to {output}")


def _save_what_there_is(trainer: Any, tell: Tell) -> None:
    """Save after an error if possible; the caller raises the error in any case."""
    try:
        if trainer.args.fast_inference:
            with suppress(Exception):
                trainer.colo.enter(None)
        tell(f"saving what was trained in {trainer.state.global_step} steps")
        _save(trainer)
        tell(f"saved to {trainer.args.output_dir}")
    except Exception as error:  # noqa: BLE001 - the first error is the one to raise
        tell(f"nothing could be saved: {error}")


def _save(trainer: Any) -> None:
    if trainer.is_world_process_zero():
        for name in _checkpoint_files(Path(trainer.args.output_dir)):  # those of another model may have other names
            Path(trainer.args.output_dir, name).unlink()
    trainer.save_model()


class WholeSteps(TrainerCallback):  # type: ignore[misc]
    """Delays Ctrl-C until an optimizer step has ended, so that no half step is saved."""

    def __init__(self) -> None:
        self._held: AbstractContextManager[Any] | None = None

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Hold an interrupt back."""
        # entered and left by hand, since the block spans two callbacks
        self._held = uninterrupted()
        self._held.__enter__()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Let it through."""
        self.end()

    def end(self) -> None:
        """Let interrupts through also where a step has failed."""
        held, self._held = self._held, None
        if held is not None:
            held.__exit__(None, None, None)


class _Logs(TrainerCallback):  # type: ignore[misc]
    """Passes on what the trainer logs, on the first rank."""

    def __init__(self, on_log: OnLog, is_first: bool) -> None:
        self._on_log, self._is_first = on_log, is_first

    def on_log(self, _: Any, state: Any, __: Any, logs: Mapping[str, Any] | None = None, **___: Any) -> None:
        """Pass on numbers, with the step."""
        if self._is_first and logs and "train_runtime" not in logs:
            place = {"step": state.global_step, "max_steps": state.max_steps}
            self._on_log(place | {name: value for name, value in logs.items() if isinstance(value, int | float)})


# ---- what was given ------------------------------------------------------------------------------------------------


def _check_output(run: RunArguments, args: GRPORunConfig) -> str | None:
    """Make the output folder and try it; return the checkpoint to resume from.

    Raises: `OSError` for a folder that cannot be written to, or has the checkpoint of another run; `ValueError` where
    there is nothing to resume from.
    """
    path = Path(args.output_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path) as file:
            file.write(b"0")
    except OSError as error:
        raise OSError(f"output_dir {path} cannot be written to ({error.strerror or error}): choose another") from error
    given = args.resume_from_checkpoint
    if given and str(given).lower() not in ("false", "no", "0"):
        if str(given).lower() not in ("true", "yes", "1"):
            if not Path(given, "trainer_state.json").is_file():
                raise ValueError(
                    f"resume_from_checkpoint {given} has no trainer_state.json: give a checkpoint-N folder"
                )
            return str(given)
        last = get_last_checkpoint(path)
        if last is None:
            raise ValueError(f"there is no checkpoint in {path} to resume from: leave resume_from_checkpoint out")
        return str(last)
    found = [*_checkpoint_files(path), *sorted(folder.name for folder in path.glob("checkpoint-*"))]
    if found and not run.overwrite_output_dir:
        raise FileExistsError(
            f"{path} has the checkpoint of another run ({', '.join(found[:3])}): choose another folder, go on with "
            "--resume_from_checkpoint true, or pass --overwrite_output_dir"
        )
    return None


def _checkpoint_files(path: Path) -> list[str]:
    return sorted({file.name for pattern in _OF_A_CHECKPOINT for file in path.glob(pattern)})


def _revision(args: GRPORunConfig, model: GRPOModelConfig) -> str:
    """The revision of what is loaded, a reward model too; of an engine's options where no other names one."""
    options: Any = args.colo_engine_options or {}
    named = {} if model.model_revision == "main" else {"revision": model.model_revision}
    return revision_of(options | named | (args.model_init_kwargs or {}))


def _check_model(args: GRPORunConfig, model: GRPOModelConfig, revision: str) -> Any:
    """The adapter's config, or `None`. Raises: as `check_path`, and `Unsupported` for an adapter that cannot be."""
    check_path(model.model_name_or_path)
    check_config(model.model_name_or_path, revision)
    _check_needs(args, model)
    lora = get_peft_config(model)
    if lora is not None:
        folded = args.colo_fold_adapter
        check_lora_config(lora, folded=folded, advice=FOLDED)
        refuse_adapted_head(model.model_name_or_path, lora, revision, folded=folded)
    return lora


_NEEDS = {
    "use_peft": ("lora_", "use_rslora", "use_dora", "load_in_", "colo_fold_adapter"),
    "load_in_4bit": ("bnb_4bit_", "use_bnb_"),
}
"""Switches, and the first letters of options that have no effect without them."""


def _check_needs(args: GRPORunConfig, model: GRPOModelConfig) -> None:
    """Raise `ValueError` for options of an adapter, or of a quantization, that there is not."""
    plain = GRPOModelConfig()
    options = {each.name: getattr(model, each.name) != getattr(plain, each.name) for each in fields(plain)}
    options["colo_fold_adapter"] = args.colo_fold_adapter
    for switch, begins in _NEEDS.items():
        given = [name for name, is_given in options.items() if is_given and name.startswith(begins)]
        if given and not options[switch]:
            raise ValueError(
                f"{', '.join(given)} would be of no use without {switch}: pass --{switch}, or leave that out"
            )


def _check_whole(run: RunArguments) -> None:
    """Raise `ValueError` for options of a dataset that have no effect on a file."""
    given = {
        "--dataset_train_split": run.dataset_train_split != "train",
        "--dataset_config": run.dataset_config,
        "--dataset_streaming": run.dataset_streaming,
    }
    unused = [name for name, value in given.items() if value]
    if unused and Path(run.dataset_name).is_file():
        raise ValueError(f"{run.dataset_name} is a file, all of which is trained on: leave {', '.join(unused)} out")


def _rows(name: str, run: RunArguments, split: str) -> Any:
    columns = run.dataset_columns
    return load_rows(name, split, config=run.dataset_config, streaming=run.dataset_streaming, columns=columns)


def _evaluation(run: RunArguments, args: GRPORunConfig) -> Any:
    """Rows to evaluate on, `None` for no evaluation. Raises: `ValueError` where a file has no other split."""
    if args.eval_strategy == "no":
        return None
    if run.eval_dataset_name:
        return _rows(run.eval_dataset_name, run, run.dataset_test_split)
    if Path(run.dataset_name).is_file():
        raise ValueError(f"{run.dataset_name} has no split to evaluate on: pass --eval_dataset_name")
    return _rows(run.dataset_name, run, run.dataset_test_split)


_KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load_rows(
    name: str, split: str, *, config: str | None = None, streaming: bool = False, columns: Iterable[str] = ()
) -> Any:
    """Rows of a file (JSON lines, JSON, parquet, CSV), a folder or a dataset on the hub.

    Of the last two `config` and `split` are taken; `columns` renames, as in `prompt=question`, the new name first.
    Raises: `ValueError` for lines that are no rows, no rows at all, what cannot be read, or a column that is not there;
    `OSError` as `datasets`.
    """
    if not name.strip():
        raise ValueError("the name of a dataset is empty: give a file of rows, a folder or a dataset of the hub")
    path = Path(name)
    if path.suffix in _KINDS and not path.is_file():
        raise ValueError(f"there is no file {path}: give a file of JSON lines, parquet or CSV, or a dataset's name")
    if path.suffix == ".jsonl":
        rows: Any = _from_lines(path)
    elif path.is_file():
        if path.suffix not in _KINDS:
            raise ValueError(f"{path} is no file of rows: give JSON lines, JSON, parquet or CSV, by the file's ending")
        rows = _read(name, _KINDS[path.suffix], data_files=str(path), split="train")
    elif Path(path, "dataset_info.json").is_file() or Path(path, "dataset_dict.json").is_file():
        saved = load_from_disk(name)
        rows = saved[split] if isinstance(saved, Mapping) else saved
    else:
        rows = _read(name, name, config, split=split, streaming=streaming)
    if isinstance(rows, Dataset) and not len(rows):
        raise ValueError(f"dataset {name} is empty: there is nothing to train on")
    return _renamed(rows, name, columns)


def _read(name: str, *arguments: Any, **options: Any) -> Any:
    try:
        return load_dataset(*arguments, **options)
    except OSError:
        raise  # with a name
    except Exception as error:
        cause = " ".join(str(error.__cause__ or error).split())  # beneath what says only that something was wrong
        raise ValueError(
            f"dataset {name} cannot be read ({cause}): give a split that is there, of rows in UTF-8, all of the same "
            "columns"
        ) from error


def _from_lines(path: Path) -> Dataset:
    rows = []
    # of bytes, which no separator within a text splits (U+2028)
    for number, line in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error}): write one object a line") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: {row!r:.80} is not an object: write one a line")
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    try:
        return Dataset.from_dict(columns)
    except Exception as error:
        raise ValueError(f"{path}, {_misfit(columns)}") from error


def _misfit(columns: Mapping[str, list[Any]]) -> str:
    """Name the column that arrow does not take, and say what is wrong with it."""
    for name, values in columns.items():
        try:
            Dataset.from_dict({name: values})
        except UnicodeError as error:  # half of a character that JSON writes as two
            return f"column {name!r} has a text that is not UTF-8 ({error}): write its characters whole"
        except Exception as error:  # noqa: BLE001 - pyarrow's and Python's own
            if isinstance(error, OverflowError) or "too large" in str(error):
                return f"column {name!r} has a number of more than 64 bits ({error}): write it as a text"
            return f"column {name!r} has values of several types ({error}): make them alike"
    return "which cannot be read as one table: give all rows the same columns"


def _renamed(rows: Any, name: str, columns: Iterable[str]) -> Any:
    for pair in columns:
        new, equals, old = pair.partition("=")
        if not (equals and new and old):
            raise ValueError(f"dataset_columns {pair!r} renames nothing: write the new name, =, and the dataset's")
        there = list(rows.column_names or [])
        if there and old not in there:
            raise ValueError(f"dataset {name} has no column {old!r} to call {new!r}, but {', '.join(there)}")
        if new in there and new != old:
            rows = rows.remove_columns(new)
        rows = rows.rename_column(old, new) if new != old else rows
    there = list(rows.column_names or [])
    if there and PROMPT not in there:
        raise ValueError(
            f"dataset {name} has no column {PROMPT!r}, but {', '.join(there)}: say which is sampled for, a text or a "
            f"list of messages, as in --dataset_columns {PROMPT}={there[0]}"
        )
    return rows


def check_rows(rows: Any, name: str, model: str, *, revision: str = "main", trust_remote_code: bool = False) -> int:
    """Tokens of the longest prompt, 0 of a stream. Raises: `ValueError` for a row that cannot be sampled for."""
    if not isinstance(rows, Dataset):
        return 0
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = tokenizer_of(model, revision, trust_remote_code=trust_remote_code)
    if tokenizer is None:
        raise ValueError(
            f"the folder {model} has no tokenizer, and prompts are texts: save that of its model there, "
            f"AutoTokenizer.from_pretrained(...).save_pretrained({model!r})"
        )
    config = AutoConfig.from_pretrained(model, **options)
    vocab_size, num_positions = config.get_text_config().vocab_size, positions_of(config).count
    longest = 0
    for number, prompt in enumerate(rows[PROMPT], start=1):
        try:
            if isinstance(prompt, Mapping):
                raise ValueError("prompt 0 is a single message: give a list of messages")
            if isinstance(prompt, int):
                raise ValueError(f"prompt 0 is neither a text nor a list of messages, but {prompt}")
            (token_ids,) = encode_prompts([_messages(prompt)], tokenizer)
            check_prompts([token_ids], vocab_size, num_positions)
        except (TypeError, ValueError, Unsupported) as error:
            words = str(error).replace("prompt 0", "its prompt")
            raise ValueError(f"row {number} of {name}: {words}") from error
        longest = max(longest, len(token_ids))
    return longest


def _messages(prompt: Any) -> Any:
    """A prompt without the keys that arrow adds to messages which lack them."""
    if not isinstance(prompt, list):
        return prompt
    return [{k: v for k, v in m.items() if v is not None} if isinstance(m, Mapping) else m for m in prompt]


_WORDS = {
    "loss_type": ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
}


def _check_words(args: GRPORunConfig) -> None:
    """Raise `ValueError` for a word that TRL looks up once a rollout has been sampled.

    A trainer of yours, in a script, may know others.
    """
    for name, known in _WORDS.items():
        if (given := getattr(args, name)) not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, not {given!r}")


def _check_metric(args: GRPORunConfig, rewards: Iterable[Any], tell: Tell) -> None:
    """Raise `ValueError` for a metric to compare that no evaluation has; `tell` of one that only a reward may log."""
    given = args.metric_for_best_model
    # TRL lists its metrics nowhere; one that writes them in another way is not asked
    of_trl = re.findall(r'_metrics\[mode\]\[f?"([^"]+)"\]', inspect.getsource(GRPOTrainer))
    if given is None or args.eval_strategy == "no" or not of_trl:
        return
    names = [reward.split("/")[-1] if isinstance(reward, str) else reward.__name__ for reward in rewards]
    known = {metric.replace("{reward_func_name}", name) for metric in of_trl for name in names}
    known |= {"loss", "runtime", "samples_per_second", "steps_per_second"}
    if not args.beta:
        known.discard("kl")
    if given.removeprefix("eval_") in known:
        return
    words = f"metric_for_best_model {given!r} is none of an evaluation's, which are {', '.join(sorted(known))}"
    if not any(_may_log(reward) for reward in rewards):
        raise ValueError(f"{words}: name one of those")
    tell(f"{words}, and what a reward logs by log_metric: without it the first evaluation is an error")


def _may_log(reward: Any) -> bool:
    try:
        takes = {} if isinstance(reward, str) else inspect.signature(reward).parameters
    except (TypeError, ValueError):  # of a builtin, which has none
        return False
    return "log_metric" in takes or any(each.kind is each.VAR_KEYWORD for each in takes.values())


def _check_batch(args: GRPORunConfig, dataset: Any) -> None:
    """Raise `ValueError` for a dataset with fewer prompts than one rollout takes: TRL would make no step."""
    prompts = args.generation_batch_size // args.num_generations
    with suppress(TypeError):  # of a stream, which has no length
        if len(dataset) < prompts:
            raise ValueError(
                f"the dataset has {len(dataset)} rows, and a rollout takes {prompts} prompts (generation_batch_size "
                f"{args.generation_batch_size} / num_generations {args.num_generations}): give more rows, or lower "
                "per_device_train_batch_size, gradient_accumulation_steps or steps_per_generation"
            )


def _rewards(run: RunArguments, args: GRPORunConfig, revision: str) -> list[Any]:
    """Reward functions and models. Raises: `ValueError` for what cannot be loaded, or other weights than rewards."""
    functions: dict[str, RewardFunction] = {}
    for given in run.reward_funcs:
        function = load_function(given)
        if (name := _name_of(function, given)) in functions:
            raise ValueError(f"several rewards are called {name}: rename the functions, and give each of them once")
        functions[name] = function
    models = [run.reward_model_name_or_path] if run.reward_model_name_or_path else []
    named = named_rewards(functions) if functions or not models else {}
    if models:
        check_path(models[0])
        check_config(models[0], revision)
    rewards = [*models, *(_called_with_what_it_takes(name, function) for name, function in named.items())]
    if args.reward_weights is not None and len(args.reward_weights) != len(rewards):
        raise ValueError(
            f"there are {len(args.reward_weights)} reward_weights for {len(rewards)} rewards: give one for each, that "
            "of a reward model first"
        )
    return rewards


def _name_of(function: RewardFunction, given: str) -> str:
    """A function's own name; of an object or a lambda, which has none, that under which it was `given`."""
    own = str(getattr(function, "__name__", ""))
    return own if own.isidentifier() else given.rpartition(":" if ":" in given else ".")[2]


def _called_with_what_it_takes(name: str, function: RewardFunction) -> RewardFunction:
    """A function for TRL, which gives all columns to each and takes any value; errors name reward, step and line."""

    def asked(columns: Mapping[str, Any]) -> dict[str, Any]:
        step = getattr(columns.get("trainer_state"), "global_step", 0) + 1
        call = bound(function, columns)
        return {"call": call, "expected": len(columns["completions"]), "step": step, "allow_none": True}

    def or_none(values: list[float]) -> list[float | None]:
        return [None if math.isnan(value) else value for value in values]

    if is_awaited(function):

        @functools.wraps(function)
        async def call_and_await(**columns: Any) -> list[float | None]:
            return or_none(await await_reward(name, **asked(columns)))

        call_and_await.__name__ = name  # by which TRL logs it
        return call_and_await

    @functools.wraps(function)
    def call(**columns: Any) -> list[float | None]:
        return or_none(call_reward(name, **asked(columns)))

    call.__name__ = name
    return call


def load_function(name: str) -> RewardFunction:
    """A function by `module:function`, `path.py:function`, or TRL's name for it. Raises: `ValueError` without one."""
    if name in _OF_TRL and hasattr(trl.rewards, name):
        of_trl: RewardFunction = getattr(trl.rewards, name)
        return of_trl
    place, _, wanted = name.rpartition(":" if ":" in name else ".")
    if not place or not wanted or (":" not in name and name.endswith(".py")):
        raise ValueError(
            f"{name!r} names no reward: give module:function, path.py:function, or one of TRL's, {', '.join(_OF_TRL)}"
        )
    try:
        if not place.endswith(".py") and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it
        module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise ValueError(f"reward {name!r} cannot be loaded ({type(error).__name__}: {error})") from error
    function = getattr(module, wanted, None)
    if not callable(function):
        there = ", ".join(
            n for n, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__
        )
        raise ValueError(f"{place} has no function {wanted!r}, but {there or 'none'}: name one of those")
    found: RewardFunction = function
    return found


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = f"colo_rewards:{path.resolve()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # else the next attempt would get the half-loaded module
        del sys.modules[name]
        raise
    return module
