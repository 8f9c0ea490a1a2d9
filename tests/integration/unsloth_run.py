"""The real Unsloth under colo: python tests/integration/unsloth_run.py FOLDER [--shape tiny|0.6b] [--notebook]

`--four-bits` packs the base, `--compiled` starts vLLM as Unsloth does. On a GPU all is as it is; on a CPU with an
accelerator that is imitated, by functions that answer for it and without Unsloth's kernels. What is seen is printed, a
line each, and the process fails where something is not as expected.
"""

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch

HAS_GPU = torch.cuda.is_available()
GIB = 1 << 30
TINY = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SHAPES = {
    "tiny": TINY,
    "0.6b": {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TEXTS = [f"{a}+{b}=" for a in range(10, 18) for b in range(10, 18)]
GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
WITHIN = 0.02  # of log-probabilities in bf16, on average

began_s = time.time()


def show(what, value, *, expected=True):
    """Print what was seen; `expected` false is remembered, and fails the run at its end."""
    print(f"{time.time() - began_s:6.1f}  {'  ' if expected else '! '}{what}: {value}", flush=True)
    if not expected:
        unexpected.append(what)


unexpected = []


# ---- an accelerator, imitated ----------------------------------------------------------------------------------------


def import_unsloth(folder, *, four_bits=False):
    os.environ.update(
        UNSLOTH_DISABLE_STATISTICS="1", UNSLOTH_COMPILE_LOCATION=str(folder / "compiled"), HF_HUB_OFFLINE="1"
    )
    if HAS_GPU:
        import unsloth  # noqa: F401 - before all others
    else:
        imitate_accelerator(four_bits=four_bits)


def imitate_accelerator(*, four_bits):
    """Import Unsloth for a "cuda" that is not there: questions are answered, tensors stay on the CPU."""
    os.environ.update(UNSLOTH_ALLOW_CPU="1", UNSLOTH_FUSED_LORA_DROPOUT="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    answers = {"name": "imitation", "total_memory": 8 * GIB, "major": 9, "minor": 0, "multi_processor_count": 1}
    torch.cuda.mem_get_info = lambda *_: (8 * GIB, 8 * GIB)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(**answers, gcnArchName="")
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    sys.modules["vllm._C"] = (
        None  # which Unsloth loads to see if it can, and which has instructions that a CPU may lack
    )
    import unsloth

    del sys.modules["vllm._C"]
    from vllm.platforms import current_platform

    current_platform.import_kernels()  # those of this CPU, which may be that module
    import unsloth.models.llama
    import unsloth.models.loader
    import unsloth.models.rl
    import unsloth_zoo.vllm_utils
    import vllm
    from unsloth.models.qwen3 import FastQwen3Model

    from colo.engines.vllm import plugin

    FastQwen3Model.pre_patch = staticmethod(lambda: None)  # transformers' own passes, in place of kernels
    unsloth_zoo.vllm_utils.get_target_device = lambda index=None: torch.device("cpu")
    unsloth.models.llama.SUPPORTS_BFLOAT16 = True
    for module in (unsloth.models.llama, unsloth.models.loader):
        module.is_bfloat16_supported = lambda: True
    os.environ["UNSLOTH_ALLOW_CPU"] = "0"  # else trainers are not rewritten
    unsloth.models.rl.PatchFastRL(FastLanguageModel=unsloth.FastLanguageModel)
    os.environ["UNSLOTH_ALLOW_CPU"] = "1"
    plugin.register()
    if four_bits:  # vLLM's own loader packs them, here too
        unsloth.models.loader.ALLOW_BITSANDBYTES = True
        return
    start = vllm.LLM
    vllm.LLM = lambda **options: start(**options | {"load_format": "colo"})  # which packs no weights on a CPU


# ---- what Unsloth makes ----------------------------------------------------------------------------------------------


def checkpoint(folder, shape):
    """A model of random weights, and a tokenizer that has a text for every id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(f"<{i}>" for i in range(shape["vocab_size"] - len(letters) - 3))]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    marks = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", model_max_length=4096, **marks)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(**shape, **ends, bos_token_id=None, max_position_embeddings=4096, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device("cuda" if HAS_GPU else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


def load(folder, utilization, *, four_bits, compiled):
    from unsloth import FastLanguageModel

    checkpointing = "unsloth" if HAS_GPU else False
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=256,
        dtype=torch.bfloat16,
        load_in_4bit=four_bits,
        fast_inference=True,
        max_lora_rank=16,
        gpu_memory_utilization=utilization,
        enforce_eager=not compiled,
        use_gradient_checkpointing=checkpointing,
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=16,
        target_modules=TARGETS,
        lora_alpha=16,
        lora_dropout=0.0 if HAS_GPU else 0.01,  # with which there are no kernels for LoRA
        use_gradient_checkpointing=checkpointing,
        random_state=3407,
    )
    return model, tokenizer


def trainer_of(model, tokenizer, folder):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def even(completion_ids, **_):
        return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]

    args = GRPOConfig(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=16,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        bf16=True,
        use_cpu=not HAS_GPU,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        generation_kwargs={"ignore_eos": True},
    )
    data = Dataset.from_dict({"prompt": TEXTS})
    return GRPOTrainer(model=model, processing_class=tokenizer, reward_funcs=[even], args=args, train_dataset=data)


def states_of(state):
    """Tensors of bitsandbytes' state of a packed weight, those of the state of its scales too."""
    if state is None:
        return []
    return [t for t in (state.absmax, state.code, state.offset) if t is not None] + states_of(state.state2)


class Base:
    """The weights beneath the adapter: how many are vLLM's memory, and whether their bits are as before."""

    def __init__(self, model):
        self._model = model
        (inner,) = model.vllm_engine.collective_rpc(lambda worker: getattr(worker, "worker", worker).get_model())
        self._spans = {(p.data_ptr(), p.data_ptr() + p.nbytes) for p in inner.parameters()}
        self._sums = self._now()

    def _weights(self):
        return [(name, p) for name, p in self._model.named_parameters() if "lora_" not in name]

    @property
    def num_packed(self):
        return sum(hasattr(p, "quant_state") for _, p in self._weights())

    def _now(self):
        from colo.engines.buckets import bytes_of  # Unsloth is imported before

        parts = {name: [p, *states_of(getattr(p, "quant_state", None))] for name, p in self._weights()}
        return {name: [int(bytes_of(t).sum(dtype=torch.int64)) for t in tensors] for name, tensors in parts.items()}

    def show(self, when):
        weights = self._weights()
        inside = sum(any(a <= p.data_ptr() < b for a, b in self._spans) for _, p in weights)
        show(f"weights that are vLLM's memory {when}", f"{inside} of {len(weights)}", expected=inside == len(weights))
        same = self._now() == self._sums
        show(f"base bit-identical {when}", same, expected=same)


# ---- what colo makes of it -------------------------------------------------------------------------------------------


def refused(what, function, kind, words):
    try:
        function()
    except kind as error:
        show(f"{what} is refused", str(error), expected=words in str(error))
    else:
        show(f"{what} is refused", False, expected=False)


def used():
    free, total = torch.cuda.mem_get_info()
    return f"{(total - free) / GIB:.1f} GiB"


def train_step(rt, completions):
    ids = torch.tensor([[*c.prompt_token_ids, *c.token_ids] for c in completions], device=rt.device)
    with rt.train():
        rt.model(input_ids=ids, labels=ids).loss.backward()
        rt.optimizer.step()
        rt.optimizer.zero_grad()
        return used()


def as_before(what, completions, before, *, repeats):
    """Show if tokens are as before, and how far log-probabilities are up to the first token that is another.

    `repeats`: kernels that add in any order do not repeat every token of random weights.
    """
    gaps, same = [], True
    for one, other in zip(completions, before, strict=True):
        for token, its, a, b in zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=True):
            gaps.append(abs(a - b))
            if token != its:
                same = False
                break
    gap = sum(gaps) / len(gaps)
    show(what, same, expected=same or not repeats)
    show(f"difference of {len(gaps)} log-probabilities", round(gap, 5), expected=gap < WITHIN)


def shared(model, base, *, standby, compiled):
    """`colo.share`, its check, Unsloth's own `generate` in a rollout and out of one, and the end."""
    from vllm import SamplingParams

    import colo

    def own(request=True):
        lora = model.load_lora("unsloth_lora", load_tensors=True) if request else None
        found = model.fast_generate(TEXTS[:4], SamplingParams(**GREEDY), use_tqdm=False, lora_request=lora)
        return [tuple(output.outputs[0].token_ids) for output in found]

    def colos():
        return rt.generate(TEXTS[:4], **GREEDY)

    def texts(completions):
        return [completion.token_ids for completion in completions]

    def most_probable():
        found = rt.generate(TEXTS[:4], temperature=0.0, max_tokens=1)
        return torch.tensor([completion.logprobs[0] for completion in found])

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model.vllm_engine.sleep(level=1 if standby else 0)
    refused(
        "an engine that is asleep", lambda: colo.share(model.vllm_engine, model, optimizer), colo.PhaseError, "wake_up"
    )
    model.vllm_engine.wake_up()
    # with sleep mode, a setting by which the cache has to leave for training
    crowded = {"train_working_bytes": torch.cuda.mem_get_info()[1] - 16 * GIB} if standby else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rt = colo.share(model.vllm_engine, model, optimizer, config=colo.RuntimeConfig(**crowded))
    said = [str(w.message) for w in caught if "KV cache stays" in str(w.message)]
    expected = HAS_GPU and not standby
    show("said of the KV cache", said[0] if said else "nothing", expected=bool(said) == expected)
    show("transport", f"{rt.transport.name}, {rt.transport.reason}", expected=rt.transport.shares)
    for _ in range(2):
        with rt.rollout():
            show("in use in a rollout", used())
            completions = rt.generate(TEXTS[:4], n=2, max_tokens=16, ignore_eos=True)
        show("in use in training", train_step(rt, completions))
    check = colo.check(rt)
    show("check", check, expected=check.mismatch < WITHIN)
    base.show("while shared")
    with rt.rollout():
        before, again, logprobs, version = colos(), colos(), most_probable(), rt.weights_version
        show("colo's texts twice are equal", f"{sum(map(tuple.__eq__, texts(again), texts(before)))} of 4")
        show("Unsloth's own texts in a rollout are colo's", f"{sum(map(tuple.__eq__, own(), texts(before)))} of 4")
        gap = (most_probable() - logprobs).abs().mean().item()
        show("difference of colo's log-probabilities to those before", round(gap, 5), expected=gap < WITHIN)
        repeats = texts(again) == texts(before) and not compiled
        as_before("colo's are as before", colos(), before, repeats=repeats)
        show("versions that this has raised", rt.weights_version - version)
    base.show("after Unsloth's own rollout")
    if standby or not HAS_GPU:
        with rt.train():
            rt.engine.sleep("keep-weights")
            model.vllm_engine.wake_up()  # as standby's `generate` does; stock vLLM would wait
            refused("a request while the KV cache is away", lambda: own(False), colo.PhaseError, "rt.rollout()")
        as_before("colo's texts afterwards are as before", colos(), before, repeats=not compiled)
    print(rt.report(), flush=True)
    rt.close()
    base.show("after close()")
    show("Unsloth's own texts are colo's", f"{sum(map(tuple.__eq__, own(), texts(before)))} of 4")


def attached(model, tokenizer, base, folder):
    """`colo.attach` with its defaults beneath two trainers of Unsloth's, one after the other."""
    import colo

    for number in range(2):
        trainer = trainer_of(model, tokenizer, folder / f"run{number}")
        made = trainer.vllm_generation
        rt = colo.attach(trainer)
        ranks = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ]
        show("attached", f"{rt.transport.name}; left of a rank: {ranks}", expected=rt.transport.shares and not ranks)
        before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
        trainer.train()
        for entry in trainer.state.log_history:
            if "reward" in entry:
                names = ("reward", "grad_norm", "step_time", "colo/mismatch", "colo/rollout_s", "colo/train_s")
                show("step", {name: round(float(entry[name]), 5) for name in names}, expected=entry["grad_norm"] > 0)
                show("its mismatch", entry["colo/mismatch"], expected=entry["colo/mismatch"] < WITHIN)
        trained = [p for p in model.parameters() if p.requires_grad]
        changed = sum(not torch.equal(old, new) for old, new in zip(before, trained, strict=True))
        said = f"{changed} of {len(before)}"
        show("matrices of the adapter that have changed", said, expected=changed == len(before))
        base.show("in training")
        if number == 0:
            print(rt.report(), flush=True)
        rt.close()
        as_made = trainer.use_vllm and trainer.vllm_generation is made
        show("the trainer is as it was made", as_made, expected=as_made)
        base.show("after close()")


def notebook(folder):
    """The cells of notebooks/04_unsloth.ipynb, one after the other, in `folder`."""
    path = Path(__file__).parents[2] / "notebooks/04_unsloth.ipynb"
    os.environ.update(MODEL=str(folder / "model"), STEPS="1")
    os.chdir(folder)
    seen = {"__name__": "notebook"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), seen)
    (saved,) = Path("adapter").glob("*.safetensors")
    show("the notebook's adapter", saved.name)
    show("its transport", seen["rt"].transport.name, expected=seen["rt"].transport.shares)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--four-bits", action="store_true", help="a base that vLLM packs as it loads it")
    parser.add_argument("--compiled", action="store_true", help="start vLLM as Unsloth does, with CUDA graphs")
    parser.add_argument("--notebook", action="store_true", help="run the cells of the notebook, and nothing else")
    parser.add_argument("--utilization", type=float, default=0.3 if HAS_GPU else 0.05)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    given.folder = given.folder.resolve()
    os.chdir(given.folder)  # Unsloth writes what it has no path for
    standby = os.environ.get("UNSLOTH_VLLM_STANDBY", "0") == "1"
    import_unsloth(given.folder, four_bits=given.four_bits and not given.notebook)
    import trl
    import unsloth
    import vllm

    import colo

    show("versions", {m.__name__: m.__version__ for m in (unsloth, vllm, trl, torch, colo)})
    checkpoint(given.folder / "model", SHAPES[given.shape])
    if given.notebook:
        notebook(given.folder.resolve())
        return end()
    started_s = time.time()
    model, tokenizer = load(
        given.folder / "model", given.utilization, four_bits=given.four_bits, compiled=given.compiled
    )
    show("loaded", f"{used()} in use, in {time.time() - started_s:.0f} s")
    base = Base(model)
    show("packed weights", base.num_packed, expected=bool(base.num_packed) == given.four_bits)
    base.show("as made")
    shared(model, base, standby=standby, compiled=given.compiled)
    attached(model, tokenizer, base, given.folder)
    return end()


def end():
    show("unexpected", unexpected or "nothing", expected=True)
    sys.stdout.flush()
    os._exit(bool(unexpected))  # how vLLM and Unsloth end is not what is looked at


if __name__ == "__main__":
    main()
