"""An engine of your own: a bigram model with a pretended KV cache. Run it: python examples/extending/engine.py"""

import torch

import colo
from colo.engine import Engine, LoadPlans
from colo.engines.base import EngineBase
from colo.engines.sampling import Sampler
from colo.engines.text import check_prompts
from colo.memory.load_plan import LoadPlan
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, FixedSegment, Residency
from colo.testing import FakeDevice, FakeSegment, check_engine

TOKENS = 16


class BigramEngine(EngineBase):
    """The next token depends on the last one alone: `softmax(table[last])`. The table is the whole model."""

    name, placement = "bigram", "a table in this process"  # for reports
    model_type, vocab_size = "bigram", TOKENS

    def __init__(self):
        self.table = torch.zeros(TOKENS, TOKENS)
        weights = FixedSegment(ENGINE_WEIGHTS, self.table.nbytes, Residency.RESIDENT)  # never leaves
        cache = FakeSegment(ENGINE_KV_CACHE, 4096, FakeDevice(4096), away=Residency.DISCARDED)
        super().__init__(torch.device("cpu"), (weights, cache))  # what the scheduler may move

    def load_weights(self, weights):
        self.poison_for_load()  # until the next `commit`
        self.load(weights)

    @torch.no_grad()
    def load(self, weights):
        for name, tensor in weights:
            {"table.weight": self.table}[name].copy_(tensor)  # `KeyError` for a name that it does not know

    def generate(self, prompts, params, *, adapter=None):
        version = self.ready()  # refuses while asleep or poisoned
        check_prompts(prompts, self.vocab_size, None)  # `None`: a prompt may have any length
        return [
            self.sample(prompt_index, sample_index, tuple(prompt), params, version)
            for prompt_index, prompt in enumerate(prompts)
            for sample_index in range(params.n)
        ]

    @torch.no_grad()
    def sample(self, prompt_index, sample_index, prompt, params, version):
        sampler = Sampler(params, [(prompt_index, sample_index)], self.device)  # temperature, filters and seeds
        tokens, logprobs, stopped = [*prompt], [], False
        while not stopped and len(logprobs) < params.max_tokens:
            token, logprob = sampler.sample(self.table[tokens[-1:]])  # logits, shape (1, TOKENS)
            tokens.append(int(token))
            logprobs.append(float(logprob))
            stopped = tokens[-1] in params.stop_token_ids
        return colo.Completion(
            prompt_index=prompt_index,
            sample_index=sample_index,
            prompt_token_ids=prompt,
            token_ids=tuple(tokens[len(prompt) :]),
            logprobs=tuple(logprobs),
            finish_reason="stop" if stopped else "length",
            weights_version=version,
        )

    # ---- `LoadPlans`, which is optional: a trainer's parameters can be this memory

    def record_plan(self, source):
        return LoadPlan.record(self.load, source, {"table.weight": self.table})

    def share_weights(self):
        """The table never leaves as it is, and ends with the engine."""
        return False


class Bigram(torch.nn.Module):
    """The model to train."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(TOKENS, TOKENS)

    def forward(self, ids):
        return self.table(ids)


def train(engine):
    """Teach it even numbers; returns the rewards, the bytes sent, and how they went."""
    torch.manual_seed(0)
    model = Bigram()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.2)
    rewards = []
    with colo.share(engine, model, optimizer) as rt:
        for step in range(30):
            with rt.rollout():
                completions = rt.generate([[1]], n=16, max_tokens=4, seed=step)
            ids = torch.tensor([[1, *c.token_ids] for c in completions])
            reward = (ids[:, 1:] % 2 == 0).float().mean(1)  # even tokens are wanted
            with rt.train():
                chosen = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
                (-(reward - reward.mean())[:, None] * chosen).mean().backward()
                rt.optimizer.step()
                rt.optimizer.zero_grad()
            rewards.append(float(reward.mean()))
        print(f"reward {rewards[0]:.2f} at first, {rewards[-1]:.2f} in the end; {rt.bytes_synced} bytes sent")
        return rewards, rt.bytes_synced, rt.transport.name


def main():
    engine = BigramEngine()
    assert isinstance(engine, Engine) and isinstance(engine, LoadPlans)  # has every member of both protocols
    check_engine(BigramEngine())  # and does what it says
    return train(engine)


if __name__ == "__main__":
    main()
