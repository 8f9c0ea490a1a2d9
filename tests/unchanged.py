"""What colo must leave alone in a process (invariant 4), looked at before colo is imported and after it has run.

    python -m tests.unchanged embedded|vllm

Prints what differs, as JSON: settings by name, and attributes of classes and modules of other libraries. The libraries
are used first, since many finish their own set-up when they are. A process of its own, where nothing of colo is yet.
"""

import gc
import json
import logging
import multiprocessing
import os
import signal
import sys
import threading
import types
import warnings

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "safetensors", "numpy", "vllm", "tokenizers", "tqdm")
TRACKED = (type, types.FunctionType, types.BuiltinFunctionType, property, staticmethod, classmethod)


def settings():
    """Global state that a library could change, by name."""
    import torch
    import transformers

    return {
        "environment": dict(os.environ),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "filters": [str(one) for one in warnings.filters],
        "showwarning": id(warnings.showwarning),
        "verbosity": transformers.logging.get_verbosity(),
        "logging": (logging.root.level, [id(h) for h in logging.root.handlers], logging.raiseExceptions),
        "signals": {number: id(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)},
        "hooks": [id(hook) for hook in (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook)],
        "imports": [id(one) for one in sys.meta_path],
        "garbage": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0),  # the count falls as objects die
        "start method": multiprocessing.get_start_method(allow_none=True),
        "directory": os.getcwd(),  # noqa: PTH109
    }


def attributes():
    """Functions, classes and descriptors of other libraries' modules and classes, by where they are."""
    found = {}
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] not in LIBRARIES:
            continue
        for attribute, value in list(vars(module).items()):
            if issubclass(type(value), TRACKED):  # `isinstance` would ask the value, and some warn
                found[f"{name}.{attribute}"] = value
            if issubclass(type(value), type) and vars(value).get("__module__") == name:
                for key, inner in list(vars(value).items()):
                    if isinstance(inner, TRACKED):
                        found[f"{name}.{attribute}.{key}"] = inner
    return found


def differences(before, after):
    """What was there and is another now, or no longer, and what classes have that they had not."""
    (then, old), (now, new) = before, after
    changed = {name: [str(then[name]), str(now[name])] for name in then if then[name] != now[name]}
    changed |= {name: "replaced or removed" for name, value in old.items() if new.get(name) is not value}
    classes = {name for name, value in old.items() if isinstance(value, type)}
    changed |= {name: "added" for name in new.keys() - old.keys() if name.rpartition(".")[0] in classes}
    return changed


def tiny():
    """A model of a few thousand parameters."""
    from tests.models import tiny_qwen3

    return tiny_qwen3(hidden_size=64, head_dim=32, max_position_embeddings=128, architectures=["Qwen3ForCausalLM"])


def train(model, optimizer):
    """One step."""
    import torch

    ids = torch.tensor([[1, 2, 3, 4]])
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def use_libraries():
    """What colo uses of them, without colo."""
    import peft
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights(include_buffers=False):
        AutoModelForCausalLM.from_config(tiny())
    model = AutoModelForCausalLM.from_config(tiny())
    train(model, torch.optim.AdamW(model.parameters()))
    train(model, torch.optim.AdamW(model.parameters(), fused=True))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear"))
    train(adapted, torch.optim.SGD(adapted.parameters(), momentum=0.9))
    with adapted.disable_adapter():
        adapted(input_ids=torch.tensor([[1, 2]]))
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=2)


def use_vllm(folder):
    """vLLM as it comes, without colo's plugin."""
    import vllm

    os.environ["VLLM_PLUGINS"] = ""
    # on a CPU that says it has AMX, and has not, its kernels of 16 bits are an illegal instruction
    llm = vllm.LLM(folder, skip_tokenizer_init=True, gpu_memory_utilization=0.1, dtype="float32", **VLLM)
    llm.generate([{"prompt_token_ids": [1, 2]}], vllm.SamplingParams(max_tokens=2), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    del os.environ["VLLM_PLUGINS"]


VLLM = {
    "enforce_eager": True,
    "max_model_len": 64,
    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",  # no process more on a CPU
}


def run_colo(engine):
    """Import colo and do with it what people do."""
    import peft
    import torch

    import colo

    options = {"engine": "vllm", "engine_options": VLLM} if engine == "vllm" else {}
    for lora in (None, peft.LoraConfig(r=2, target_modules=["q_proj"])):
        config = colo.RuntimeConfig(kv_cache_bytes=1 << 20, offload="always")
        with colo.launch(tiny(), device="cpu", lora=lora, dtype=torch.float32, config=config, **options) as rt:
            for _ in range(2):
                with rt.rollout():
                    rt.generate([[1, 2, 3]], max_tokens=2)
                with rt.train():
                    train(rt.model, rt.optimizer)
            str(rt.report())


def main(engine):
    """Print the differences."""
    import tempfile
    from contextlib import nullcontext

    import torch
    from transformers import AutoModelForCausalLM

    from tests import warm

    use_libraries()
    # engines are processes of their own, of which nothing is looked at
    with warm.engines() if engine == "vllm" and not torch.cuda.is_available() else nullcontext():
        if engine == "vllm":
            with tempfile.TemporaryDirectory() as folder:
                AutoModelForCausalLM.from_config(tiny()).save_pretrained(folder)
                use_vllm(folder)
        assert not any(name.partition(".")[0] == "colo" for name in sys.modules), "colo is there already"
        before = settings(), attributes()
        run_colo(engine)
        found = differences(before, (settings(), attributes()))
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
