"""Weights of a model with names of its own, as an engine knows them. Run it: python examples/extending/source.py"""

import torch
from transformers import LlamaConfig, LlamaModel

import colo
from colo.engines.torch import TorchEngine
from colo.units import GIB, MIB
from colo.weights.sources.module import ModuleSource
from colo.weights.transports.local import LocalTransport


class Policy(torch.nn.Module):
    """A model to train that transformers would not recognize: other names, another `forward`."""

    def __init__(self, config):
        super().__init__()
        self.trunk = LlamaModel(config)
        self.vocabulary = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids):
        return self.vocabulary(self.trunk(input_ids=ids).last_hidden_state)


class PolicySource(ModuleSource):
    """The policy's weights under the names that a checkpoint of a Llama has, which is what engines load."""

    NAMES = (("trunk.", "model."), ("vocabulary.", "lm_head."))

    def __iter__(self):
        for name, tensor in super().__iter__():  # the live tensors, looked up anew each time
            for own, engines in self.NAMES:
                if name.startswith(own):
                    yield engines + name.removeprefix(own), tensor


def main():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)
    policy = Policy(config)
    engine = TorchEngine(config, device="cpu", dtype=torch.float32, kv_cache_bytes=MIB)
    source = PolicySource(policy)
    plan = source.given_to(engine.record_plan)  # what the engine's own loader copies where
    source.settle_names()
    rt = colo.Runtime(
        engine=engine,
        model=policy,
        optimizer=torch.optim.AdamW(policy.parameters()),
        transport=LocalTransport(source, engine, plan, why_not_shared="an example of copies"),
        mover=engine.mover,
        config=colo.RuntimeConfig(),
        capacity_bytes=GIB,
    )
    with rt:
        for _ in range(2):
            with rt.rollout():
                (sample,) = rt.generate([[1, 2, 3]], max_tokens=4)
            with rt.train():
                ids = torch.tensor([[*sample.prompt_token_ids, *sample.token_ids]])
                torch.nn.functional.cross_entropy(policy(ids)[0, :-1], ids[0, 1:]).backward()
                rt.optimizer.step()
                rt.optimizer.zero_grad()
        with rt.rollout(), torch.no_grad():
            (sample,) = rt.generate([[1, 2, 3]], max_tokens=4)
            ids = torch.tensor([[*sample.prompt_token_ids, *sample.token_ids]])
            own = policy(ids).log_softmax(-1)[0, 2:-1].gather(-1, ids[0, 3:, None])[:, 0]
        print("log-probabilities, engine and policy:", sample.logprobs, own.tolist())
        return sample, own


if __name__ == "__main__":
    main()
