"""`launch` and `start`: an engine and a model on one copy of the weights, with an optimizer or without."""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from json import JSONDecodeError
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import find_adapter_config_file

from colo.assembly.arguments import (
    adapter_alone,
    check_launch,
    check_optimizer,
    check_optimizer_type,
    chosen_device,
    chosen_dtype,
    default_engine,
    names_checked,
)
from colo.assembly.share import (
    Checkpoint,
    EngineRequest,
    Undo,
    adapted_outline,
    add_lora_options,
    assemble,
    capacity,
    make_torch_engine,
    make_vllm_engine,
    told_of_others,
)
from colo.config import RuntimeConfig, Weights
from colo.engine import Engine, PacksWeights
from colo.engines.layout import bind, empty_model, require_causal_lm
from colo.errors import Unsupported, named_misfits
from colo.memory.storage import with_own_storage
from colo.planning.model_shape import config_file
from colo.runtime import Runtime
from colo.trainer.master_weights import MakeOptimizer, MasterWeights
from colo.weights.packed import BITSANDBYTES, method_of, pack, refuse_quantized
from colo.weights.sources.heads import refuse_heads
from colo.weights.sources.module import ModuleSource, why_shared
from colo.weights.sources.peft import TIED_WARNING, check_lora_config, has_adapted_head, warn_of_tied_head
from colo.weights.transports.choice import record_plan, why_not_shared

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.getLogger(__name__)

FULL_LEARNING_RATE = 1e-6
LORA_LEARNING_RATE = 1e-5

_OF_A_TOKENIZER = ("tokenizer*", "vocab*", "sentencepiece*")
_LFS_POINTER = b"version https://git-lfs"


@names_checked
@named_misfits()
# parameters made in a caller's inference mode could not be trained
@torch.inference_mode(False)
def launch(
    model: Checkpoint,
    *,
    engine: Literal["torch", "vllm"] | None = None,
    engine_options: Mapping[str, Any] | None = None,
    lora: LoraConfig | None = None,
    optimizer: MakeOptimizer | None = None,
    device: str | int | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    tokenizer: Any = None,
    config: RuntimeConfig | None = None,
) -> Runtime:
    """Start an engine and build a model to train on one copy of the weights.

    `model` is a folder or a hub id with a checkpoint, a transformers config for random weights, or a transformers model
    whose weights are copied and which is otherwise left alone: what is frozen in it is not trained, and what is trained
    has its attention and its checkpointing of activations. `engine` is "vllm", the default on a GPU that has it, or
    "torch", the embedded one. vLLM runs in its own process unless `engine_options` has `own_process=False`; the rest of
    `engine_options` are those of `vllm.LLM`; the embedded engine takes `revision` of them, a hub's.
    With `lora` the base is frozen and shared, and an adapter is trained; with `quantization="bitsandbytes"` among the
    `engine_options`, or a checkpoint that bitsandbytes has packed, that base is in 4 bits, and vLLM in this process.
    `optimizer` builds the optimizer from the trainable parameters; by default see `default_optimizer`. `dtype`, one of
    torch's or its name, or "auto" for the checkpoint's own, defaults to bf16 on CUDA and to fp32 on the CPU, where bf16
    is slow.

    Raises: `TypeError` and `ValueError` for what it does not take; `BudgetError` before anything is allocated when
    weights and KV cache do not fit; `Unsupported` for a LoRA setting that an engine cannot apply, or an optimizer of
    other parameters; whatever transformers raises for a checkpoint it cannot read.
    """
    with Undo() as undo:
        arguments = (model, engine, engine_options, lora, device, dtype, config)
        request, started, trained = _start(*arguments, undo, optimizer=optimizer, tokenizer=tokenizer)
        if tokenizer is None:
            # before the runtime: a checkpoint without a readable tokenizer fails while nothing has been published
            tokenizer = tokenizer_of(request.model, revision_of(request.engine_options))
        rt = assemble(
            started,
            trained,
            _made_optimizer(optimizer or default_optimizer, trained),
            request.config,
            undo,
            source=ModuleSource(trained),
            tokenizer=tokenizer,
            owns_model=True,
        )
        undo.pop_all()
    return rt


@names_checked
@torch.inference_mode(False)
def start(
    model: Checkpoint,
    *,
    engine: Literal["torch", "vllm"] | None = None,
    engine_options: Mapping[str, Any] | None = None,
    lora: LoraConfig | None = None,
    device: str | int | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    config: RuntimeConfig | None = None,
) -> tuple[Engine, Any]:
    """Start an engine and build a model to train on one copy of the weights, without an optimizer.

    For trainers that make the optimizer from the model's named parameters: `colo.share(engine, model, optimizer)` is
    the runtime then. Arguments and errors are those of `launch`. Where no runtime is made, close the engine.
    """
    with Undo() as undo:
        _, started, trained = _start(model, engine, engine_options, lora, device, dtype, config, undo)
        undo.pop_all()
    return started, trained


def _start(
    model: Checkpoint,
    engine: str | None,
    engine_options: Mapping[str, Any] | None,
    lora: LoraConfig | None,
    device: str | int | torch.device | None,
    dtype: torch.dtype | str | None,
    config: RuntimeConfig | None,
    undo: Undo,
    *,
    optimizer: MakeOptimizer | None = None,
    tokenizer: Any = None,
) -> tuple[EngineRequest, Engine, Any]:
    """Check the arguments, start the engine, which `undo` closes, and make the model, with an adapter if asked for."""
    target = chosen_device(device)
    engine = default_engine(target) if engine is None else engine
    check_launch(model, engine, engine_options, lora, optimizer, tokenizer, config)
    if isinstance(model, PreTrainedModel):
        refuse_heads(model)
    config, options = config or RuntimeConfig(), dict(engine_options or {})
    weights_dtype = chosen_dtype(dtype, target, lambda: dtype_of(model, revision_of(options)))
    if isinstance(model, PretrainedConfig):
        model = copy.deepcopy(model)  # in which transformers notes the dtype of what it builds
    capacity_bytes = capacity(config, target, held_bytes=0)
    request = EngineRequest(model, target, weights_dtype, config, capacity_bytes, lora, options)
    if lora is not None:
        # a tied head with an adapter is warned of before a minute of start-up
        warn_of_tied_head(adapted_outline(config_of(model, revision_of(options)), lora))
    with told_of_others():
        started, trained = (start_vllm if engine == "vllm" else start_torch)(request, undo)
    return request, started, trained if lora is None else _adapted(trained, lora)


def default_optimizer(params: Any) -> torch.optim.Optimizer:
    """AdamW with fp32 masters for 16-bit parameters (learning rate 1e-6), or without for fp32 ones (1e-5)."""
    params = list(params)
    fused = all(p.device.type == "cuda" for p in params)
    # in bf16 alone most updates at this learning rate would round away
    if any(p.element_size() < 4 for p in params):
        return MasterWeights(lambda ps: torch.optim.AdamW(ps, lr=FULL_LEARNING_RATE, fused=fused))(params)
    return torch.optim.AdamW(params, lr=LORA_LEARNING_RATE, fused=fused)


def _adapted(model: nn.Module, lora: LoraConfig) -> Any:
    """The model with a new adapter. Raises: `Unsupported` for one that an engine cannot apply."""
    from peft import get_peft_model

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", TIED_WARNING)  # of which `warn_of_tied_head` has told
        adapted: Any = get_peft_model(cast("PreTrainedModel", model), lora)
    check_lora_config(adapted.peft_config[adapted.active_adapter])  # to which PEFT may have added a mixture's experts
    return adapted


def _made_optimizer(make: MakeOptimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of what is trained. Raises: `TypeError` for another thing, `Unsupported` as `check_optimizer`."""
    made = make([p for p in model.parameters() if p.requires_grad])  # with an adapter: of the adapter alone
    check_optimizer_type(made, "optimizer is a function that returns an optimizer of the parameters it is given")
    check_optimizer(made, model)
    return made


def tokenizer_of(model: Checkpoint, revision: str, **options: Any) -> Any:
    """The checkpoint's tokenizer, read with `options`, or `None` where it has none."""
    if isinstance(model, (PretrainedConfig, PreTrainedModel)):
        return None
    folder = Path(model)
    # AutoTokenizer would raise, and a folder without one is taken
    if folder.is_dir() and not any(file for name in _OF_A_TOKENIZER for file in folder.glob(name)):
        return None
    try:
        return AutoTokenizer.from_pretrained(os.fspath(model), revision=revision, **options)
    except JSONDecodeError as error:
        raise ValueError(f"the tokenizer of {model} cannot be read ({error}): copy or save it again, whole") from error


# ---- an engine and a model over its memory -------------------------------------------------------------------------


def start_torch(request: EngineRequest, undo: Undo) -> tuple[Engine, Any]:
    """Start the embedded engine and make a model over its memory."""
    if isinstance(request.model, (PretrainedConfig, PreTrainedModel)):
        refuse_quantized(config_of(request.model, "main"))  # before weights are drawn
    checkpoint = _load_checkpoint(request.model, request.dtype, revision_of(request.engine_options))
    config = checkpoint.config
    model = empty_model(config, dtype=request.dtype, attn_implementation=config._attn_implementation)
    _refuse_other_weights(checkpoint, model)
    engine = make_torch_engine(
        checkpoint, request, request.make_mover(undo), request.kv_cache_bytes(checkpoint, "torch")
    )
    undo.add(engine.close)
    engine.load_weights(ModuleSource(checkpoint))
    if request.config.weights is not Weights.AUTO:
        # a copy each was asked for: the trainer keeps its own tensors
        return engine, _trained(_own(checkpoint, request.model).to(request.device), request.model)
    bind(model, _ordinary(engine.weights.hf_views()), engine.weights.layout.tied)
    model.generation_config = checkpoint.generation_config
    return engine, _trained(model, request.model)


def start_vllm(request: EngineRequest, undo: Undo) -> tuple[Engine, Any]:
    """Start vLLM, which reads the checkpoint itself, and make a model over its memory, or a copy where that fails."""
    packs, config = _is_packed_by_vllm(request), config_of(request.model, revision_of(request.engine_options))
    # options before the start: `vllm.LLM` sizes its LoRA buffers once
    add_lora_options(request, config)
    if not packs:
        _check_complete(request.model, request.dtype, revision_of(request.engine_options))
    # on the meta device: the weights must not exist twice while vLLM starts
    model = empty_model(config, dtype=request.dtype, attn_implementation=config._attn_implementation)
    if isinstance(request.model, PreTrainedModel):
        _refuse_other_weights(request.model, model)
    _take_generation_config(model, request)
    kv_cache_bytes = request.kv_cache_bytes(model, "vllm", packed=packs)
    engine = make_vllm_engine(request, request.make_mover(undo), kv_cache_bytes)
    undo.add(engine.close)
    packed = engine.packed_weights() if isinstance(engine, PacksWeights) else {}
    pack(model, packed, compute_dtype=torch.bfloat16)  # as vLLM does, whatever the dtype of other weights
    # recorded on the empty model: shapes are all that a plan needs
    tensors, plan = record_plan(engine, ModuleSource(model))
    # the model has no memory yet: whether it can have the engine's decides where it gets some
    why_not = why_not_shared(plan, tensors, request.config)
    if packs:
        if why_not is not None:
            raise Unsupported(f"packed weights can only be shared: {why_not}")
        bind(model, _ordinary(plan.aliases) | {name: tensors[name] for name in packed}, _tied(model))
        return engine, model.train()  # frozen: an adapter is what is trained
    if why_not is None:
        bind(model, _ordinary(plan.aliases), _tied(model))
        if isinstance(request.model, PreTrainedModel):
            _copy_weights(request.model, model)
        elif isinstance(request.model, PretrainedConfig):
            # vLLM has filled the memory with dummies
            _draw_weights(model)
    else:
        checkpoint = _load_checkpoint(request.model, request.dtype, revision_of(request.engine_options))
        model = _own(checkpoint, request.model).to(request.device)
    return engine, _trained(model, request.model)


def _take_generation_config(model: PreTrainedModel, request: EngineRequest) -> None:
    """Give a model that is made empty what the one that it stands for has for generation, such as end tokens."""
    if isinstance(request.model, PreTrainedModel):
        model.generation_config = copy.deepcopy(request.model.generation_config)
    elif not isinstance(request.model, PretrainedConfig):
        with suppress(OSError):  # a checkpoint without one, whose config says it
            revision = revision_of(request.engine_options)
            model.generation_config = GenerationConfig.from_pretrained(os.fspath(request.model), revision=revision)


def _ordinary(views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same memory as tensors with storages of their own: code that saves or copies a model expects those."""
    return {name: with_own_storage(view) for name, view in views.items()}


def _is_packed_by_vllm(request: EngineRequest) -> bool:
    """Tell if vLLM packs the weights to 4 bits as it reads them. Raises: `Unsupported` where they could not be shared.

    Its loader of such weights puts them where no other process can map them, so that the engine runs in this one.
    """
    from colo.engines.vllm import compat
    from colo.engines.vllm.client.start import check_quantization, import_apart, packs_weights

    options = request.engine_options
    check_quantization(request.model, options)
    if not packs_weights(request.model, options):
        return False
    if request.lora is None:
        raise Unsupported("weights that bitsandbytes has packed cannot be trained: pass lora=LoraConfig(...)")
    if request.dtype not in (torch.float16, torch.bfloat16):
        raise Unsupported(f"vLLM packs 16-bit weights, and these would be {request.dtype}: pass dtype=torch.bfloat16")
    # `setdefault`: this process unless the caller has said otherwise, which is refused
    if options.setdefault("own_process", False):
        raise Unsupported(
            "vLLM keeps packed weights where no other process can map them: pass engine_options={'own_process': False}"
        )
    # vLLM is imported apart, before `require_packing` imports it
    import_apart()
    compat.require_packing()
    return True


def _draw_weights(model: PreTrainedModel) -> None:
    """Random weights as transformers draws them, in place."""
    for module in model.modules():  # which believe that they were initialized when they were empty
        module._is_hf_initialized = False
    model.init_weights()


def _tied(model: nn.Module) -> dict[str, str]:
    """Second names of tied parameters."""
    first = {id(p): name for name, p in model.named_parameters()}
    names = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in names if first[id(p)] != name}


@torch.no_grad()
def _copy_weights(source: nn.Module, target: nn.Module) -> None:
    tensors = ModuleSource(source).tensors()
    for name, tensor in ModuleSource(target):
        tensor.copy_(tensors[name])


def _own(model: Any, given: Checkpoint) -> Any:
    """Deep-copy a model that the caller passed in: `launch` never trains the caller's object."""
    return copy.deepcopy(model) if model is given else model


def _trained(model: PreTrainedModel, given: Checkpoint) -> PreTrainedModel:
    """The model in training mode, all of it trainable; frozen or checkpointed as a model that was given."""
    model.requires_grad_(True).train()
    if not isinstance(given, PreTrainedModel):
        return model
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(given.get_parameter(name).requires_grad)
    checkpointed = {name: module for name, module in given.named_modules() if hasattr(module, "gradient_checkpointing")}
    if any(module.gradient_checkpointing for module in checkpointed.values()):
        # its name from transformers 5.23 on; it has the embeddings' output require gradients, too
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        for name, module in checkpointed.items():
            its = model.get_submodule(name)
            if module.gradient_checkpointing:
                its._gradient_checkpointing_func = module._gradient_checkpointing_func
            its.gradient_checkpointing = module.gradient_checkpointing
    return model


def _refuse_other_weights(given: nn.Module, built: nn.Module) -> None:
    """Raise `Unsupported` for a model of other weights than one that is built of its config has, which is trained."""
    names, built_names = ({name for name, _ in ModuleSource(model)} for model in (given, built))
    if other := sorted(names ^ built_names):
        raise Unsupported(
            f"the model's weights are not those that its config says: {len(other)} of them, {other[0]} for one, are in "
            f"{'the model' if other[0] in names else 'what the config builds'} alone, and launch builds a model of the "
            "config. "
            + (
                why_shared(given)
                or "Say in the config what the model has (tie_word_embeddings, num_hidden_layers), or tie its weights"
            )
        )


# ---- what a checkpoint holds ---------------------------------------------------------------------------------------


def _load_checkpoint(model: Checkpoint, dtype: torch.dtype, revision: str) -> Any:
    """A model with the weights of a checkpoint or random ones, on the host unless it was given.

    Raises: `Unsupported` for an adapter, which would be dropped; `ValueError` for a checkpoint without some weights.
    """
    if isinstance(model, PreTrainedModel):
        return model
    if isinstance(model, PretrainedConfig):
        require_causal_lm(model)
        return AutoModelForCausalLM.from_config(model, dtype=dtype)
    loaded, lacking = _read(os.fspath(model), dtype=dtype, revision=revision)
    _refuse_incomplete(model, lacking)
    return loaded


def _check_complete(model: Checkpoint, dtype: torch.dtype, revision: str) -> None:
    """Raise `ValueError` for a checkpoint without some of its weights, which vLLM would leave as its memory was."""
    if isinstance(model, (PretrainedConfig, PreTrainedModel)):
        return
    try:
        _, lacking = _read(os.fspath(model), dtype=dtype, revision=revision, device_map="meta")  # names and shapes
    except Exception as error:
        if isinstance(error.__cause__, SafetensorError):
            raise
        # vLLM reads files that transformers does not
        logger.debug("not checked for missing weights: %s", error)
    else:
        _refuse_incomplete(model, lacking)


def _read(path: str, **options: Any) -> tuple[Any, list[str]]:
    """Read a model, and the names of weights that its checkpoint lacks. Raises: `Unsupported` for an adapter alone."""
    if find_adapter_config_file(path, revision=options["revision"]) is not None:
        raise adapter_alone(path)  # transformers would put it on its base
    require_causal_lm(config := config_of(path, options["revision"]))
    # of other methods some are undone as they are read, and the engine refuses those that are not
    if (method_of(config) or "").startswith(BITSANDBYTES):
        refuse_quantized(config)
    with _without_its_code(path):
        # a plain load draws at random what is missing, and only warns
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                path, output_loading_info=True, trust_remote_code=False, **options
            )
        except (SafetensorError, JSONDecodeError, KeyError) as error:  # the last two of an index
            words = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(f"the weights of {path} cannot be read ({words}): {_remedy(path)}") from error
    return model, sorted(info["missing_keys"])


def _remedy(path: str) -> str:
    """Advice for weights that are no safetensors."""
    for file in sorted(Path(path).glob("*.safetensors")):
        with file.open("rb") as opened:
            if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
                return f"{file} is a pointer of Git LFS, in the place of the weights; fetch them with git lfs pull"
    return "copy or save them again, whole"


def _refuse_incomplete(model: Checkpoint, lacking: list[str]) -> None:
    if lacking:
        raise ValueError(
            f"the checkpoint {model} lacks {len(lacking)} of the model's weights, {lacking[0]} for one: copy or save "
            "it again, whole. Where random values are meant, load the model yourself and pass that"
        )


def config_of(model: Checkpoint, revision: str) -> PretrainedConfig:
    """The config of a checkpoint, read if need be, or of a model.

    Raises: `Unsupported` for a checkpoint with code of its own, which is not run and not asked about; `OSError` where
    there is no config.
    """
    if isinstance(model, PretrainedConfig):
        return model
    if isinstance(model, PreTrainedModel):
        return model.config
    with _without_its_code(model):
        try:
            return AutoConfig.from_pretrained(os.fspath(model), revision=revision, trust_remote_code=False)
        except OSError as error:
            check_config(os.fspath(model), revision, error)
            raise


def check_config(model: str, revision: str, cause: OSError | None = None) -> None:
    """Raise `OSError` for a checkpoint without a config: transformers says of a name that it is no hub's, or nothing.

    `cause` is what has been raised already.
    """
    try:
        config_file(model, revision=revision)
    except ValueError as error:
        raise OSError(str(error)) from cause or error


@contextmanager
def _without_its_code(model: str | os.PathLike[str]) -> Iterator[None]:
    """Raise `Unsupported` for a checkpoint with code of its own: transformers would ask at the terminal to run it."""
    try:
        yield
    except ValueError as error:
        # transformers raises `ValueError` for much else
        if "trust_remote_code" not in str(error):
            raise
        raise Unsupported(
            f"{os.fspath(model)} comes with code of its own, and colo starts models of transformers' classes alone, "
            "whatever trust_remote_code says: register its classes (AutoConfig.register, AutoModelForCausalLM.register)"
        ) from error


def revision_of(engine_options: Mapping[str, Any]) -> str:
    """The revision of a hub's checkpoint."""
    return str(engine_options.get("revision") or "main")


def dtype_of(model: Checkpoint, revision: str) -> torch.dtype | None:
    """The dtype that a model's weights have, or that a checkpoint's config names; `None` where it names none."""
    if isinstance(model, PreTrainedModel):
        return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    config = config_of(model, revision)
    # a multimodal config keeps it one level down
    named: object = config.dtype or config.get_text_config().dtype
    found = getattr(torch, named, None) if isinstance(named, str) else named
    return found if isinstance(found, torch.dtype) else None


def check_attention(model: Checkpoint, attention: Any, revision: str = "main") -> None:
    """Raise `ValueError` for an attention that transformers does not know or that needs a package which is not there.

    An empty model takes it, as the one with weights will.
    """
    empty = empty_model(config_of(model, revision), dtype=torch.float32, attn_implementation=None)
    try:
        empty.set_attn_implementation(attention)
    except Exception as error:
        words = " ".join(str(error).split())
        raise ValueError(f"attn_implementation={attention!r} cannot be had ({words}): leave it out") from error


def refuse_adapted_head(model: Checkpoint, lora: LoraConfig, revision: str = "main", *, folded: bool = False) -> None:
    """Raise `Unsupported` for an adapter on the output layer, as `adapted_outline` for others that cannot be.

    For trainers that compute log-probabilities from hidden states and the output layer's weight.
    """
    outline = adapted_outline(config_of(model, revision), lora, folded=folded)
    if has_adapted_head(outline) or hasattr(outline.get_output_embeddings(), "modules_to_save"):
        raise Unsupported(
            "log-probabilities are computed from the output layer's weight, so that an adapter on it would not be "
            "trained: leave the output layer out of target_modules and modules_to_save"
        )
