"""Optimizers of every family, as trainers make them: by name, with what to make each from the parameters of a model."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import torch

Make = Callable[[torch.nn.Module], torch.optim.Optimizer]
Cases = Iterator[tuple[str, Make]]

TORCH = "SGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta ASGD RMSprop Rprop Adafactor".split()  # noqa: SIM905
FLAGS = "foreach fused maximize amsgrad nesterov centered capturable differentiable".split()  # noqa: SIM905
OF_SEVERAL_PROCESSES = {"DeMo", "DistributedMuon"}


def torch_cases() -> Cases:
    """torch's own, plain and with every flag that they have."""
    for name in TORCH:
        kind = getattr(torch.optim, name)
        known = inspect.signature(kind).parameters
        variants = [{}, {"lr": torch.tensor(1e-2)}] + [{flag: True} for flag in FLAGS if flag in known]
        variants += [{key: value} for key, value in (("weight_decay", 0.1), ("momentum", 0.9)) if key in known]
        for changes in variants:
            more = {"momentum": 0.9} if "nesterov" in changes else {}
            options = {"lr": 1e-2, **more, **changes}
            label = "".join(f"-{key}" for key in changes)
            yield f"torch-{name}{label}", partial(_of_all, kind, **options)
    for search in (None, "strong_wolfe"):
        yield f"torch-LBFGS-{search}", partial(_of_all, torch.optim.LBFGS, lr=0.1, max_iter=3, line_search_fn=search)
    yield "torch-Muon", partial(_of_matrices, torch.optim.Muon, lr=1e-2)


def torchao_cases() -> Cases:
    """torchao's, with state in 4 and 8 bits."""
    import torchao.optim as family

    for name in ("Adam4bit", "Adam8bit", "AdamFp8", "AdamW4bit", "AdamW8bit", "AdamWFp8"):
        for changes in ({}, {"amsgrad": True}, {"bf16_stochastic_round": True}):
            label = "".join(f"-{key}" for key in changes)
            yield f"torchao-{name}{label}", partial(_of_all, getattr(family, name), lr=1e-2, block_size=32, **changes)


def bitsandbytes_cases() -> Cases:
    """bitsandbytes', in 32 and 8 bits, paged or not."""
    from bitsandbytes import optim as family

    for name, kind in _optimizers_of(family):
        known = inspect.signature(kind).parameters
        options = {key: value for key, value in (("momentum", 0.9), ("min_8bit_size", 16)) if key in known}
        yield f"bitsandbytes-{name}", partial(_of_all, kind, lr=1e-2, **options)


def schedulefree_cases() -> Cases:
    """schedule-free's, in training mode."""
    import schedulefree as family

    for name, kind in _optimizers_of(family):
        if "Wrapper" not in name:
            yield f"schedulefree-{name}", partial(_in_training_mode, partial(_of_all, kind, lr=1e-2))
    for name in ("ScheduleFreeWrapper", "ScheduleFreeWrapperReference"):
        yield f"schedulefree-{name}", partial(_in_training_mode, partial(_around_adamw, getattr(family, name)))


def pytorch_optimizer_cases() -> Cases:
    """What pytorch_optimizer has under a name, and its wrappers around other optimizers."""
    import pytorch_optimizer as family

    for name in sorted(family.get_supported_optimizers()):
        kind = family.load_optimizer(name)
        if kind.__name__ not in OF_SEVERAL_PROCESSES:
            way = _of_matrices if kind.__name__ == "SpectralSphere" else _as_it_likes
            yield f"pytorch_optimizer-{kind.__name__}", partial(way, kind)
    for name in ("SAM", "LookSAM", "FriendlySAM"):
        kind = getattr(family, name)
        yield f"pytorch_optimizer-{name}", partial(_of_all, kind, base_optimizer=torch.optim.AdamW, lr=1e-2)
    yield "pytorch_optimizer-WSAM", partial(_around_model, family.WSAM)
    for name in ("Lookahead", "TRAC", "OrthoGrad", "ScheduleFreeWrapper"):
        yield f"pytorch_optimizer-{name}", partial(_in_training_mode, partial(_around_adamw, getattr(family, name)))


def cases() -> dict[str, Make]:
    """Every optimizer of the families that are installed."""
    made = dict(torch_cases())
    for family in (torchao_cases, bitsandbytes_cases, schedulefree_cases, pytorch_optimizer_cases):
        if find_spec(family.__name__.removesuffix("_cases")) is not None:
            made |= dict(family())
    return made


def _optimizers_of(family: object) -> list[tuple[str, type[torch.optim.Optimizer]]]:
    return [
        (name, kind)
        for name, kind in vars(family).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    ]


def _of_all(kind: type, model: torch.nn.Module, **options: object) -> torch.optim.Optimizer:
    return kind(model.parameters(), **options)


def _of_matrices(kind: type, model: torch.nn.Module, **options: object) -> torch.optim.Optimizer:
    return kind([p for p in model.parameters() if p.dim() == 2], **options)


def _around_adamw(kind: type, model: torch.nn.Module) -> torch.optim.Optimizer:
    return kind(torch.optim.AdamW(model.parameters(), lr=1e-2))


def _around_model(kind: type, model: torch.nn.Module) -> torch.optim.Optimizer:
    return kind(model, model.parameters(), base_optimizer=torch.optim.AdamW, lr=1e-2)


def _in_training_mode(make: Make, model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = make(model)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


def _as_it_likes(kind: type, model: torch.nn.Module) -> torch.optim.Optimizer:
    """With the arguments that its signature asks for: groups for those that treat matrices otherwise, say."""
    known = inspect.signature(kind).parameters
    extra = {"num_iterations": 10, "num_data": 5, "lr": 1e-2}
    options = {key: value for key, value in extra.items() if key in known and _is_required(known[key])}
    if next(iter(known)) == "model":
        return kind(model, **options)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    ways = (
        list(model.parameters()),
        [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}],
        matrices,
    )
    for parameters in ways[:-1]:
        try:
            return kind(parameters, **options)
        except (ValueError, KeyError, TypeError, RuntimeError):
            continue
    return kind(ways[-1], **options)


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty
