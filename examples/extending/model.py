"""An architecture of your own, sampled from and trained. Run it: python examples/extending/model.py"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import colo
from colo.units import MIB


class ScaledConfig(LlamaConfig):
    model_type = "scaled_llama"


class ScaledLlama(LlamaForCausalLM):
    """A Llama whose logits have a scale that is trained: a weight that no other architecture has."""

    config_class = ScaledConfig

    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.post_init()

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * self.scale
        return output


def main():
    AutoConfig.register(
        "scaled_llama", ScaledConfig, exist_ok=True
    )  # all that transformers, and so colo, needs to know
    AutoModelForCausalLM.register(ScaledConfig, ScaledLlama, exist_ok=True)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = ScaledConfig(vocab_size=64, eos_token_id=None, **sizes)
    settings = colo.RuntimeConfig(kv_cache_bytes=MIB)
    with colo.launch(config, optimizer=torch.optim.AdamW, device="cpu", dtype="float32", config=settings) as rt:
        for _ in range(2):
            with rt.rollout():
                (sample,) = rt.generate([[1, 2, 3]], max_tokens=4)
            with rt.train():
                ids = torch.tensor([[*sample.prompt_token_ids, *sample.token_ids]])
                rt.model(input_ids=ids).logits.log_softmax(-1)[0, :, 5].mean().neg().backward()
                rt.optimizer.step()
                rt.optimizer.zero_grad()
        with rt.rollout(), torch.no_grad():
            (sample,) = rt.generate([[1, 2, 3]], max_tokens=4)
            ids = torch.tensor([[*sample.prompt_token_ids, *sample.token_ids]])
            own = rt.model(input_ids=ids).logits.log_softmax(-1)[0, 2:-1].gather(-1, ids[0, 3:, None])[:, 0]
        print("log-probabilities, engine and trainer:", sample.logprobs, own.tolist())
        return sample, own, rt.transport.name, rt.model.scale.item()


if __name__ == "__main__":
    main()
