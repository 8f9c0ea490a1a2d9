"""An engine of your own: a bigram model with a pretended KV cache. Run it: python examples/extending/engine.py"""

import torch

import colo
from colo.engine import Engine, EngineState
from colo.errors import PhaseError, StaleWeights, Unsupported
from colo.memory.load_plan import LoadPlan
from colo.memory.offload import Mover
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, Residency
from colo.phases.segment import FixedSegment
from colo.testing import FakeDevice, FakeSegment

TOKENS = 16


class BigramEngine:
    """The next token depends on the last one alone: `softmax(table[last])`. The table is the whole model."""

    name, placement, model_type = "bigram", "a table in this process", "bigram"
    device, residual_bytes, pids, ipc_refusal = torch.device("cpu"), {}, (), None
    before_generate, vocab_size = None, TOKENS

    def __init__(self):
        self.mover = Mover(self.device)  # what moves a trainer's state in this process
        self.table = torch.zeros(TOKENS, TOKENS)
        self.weights = FixedSegment(ENGINE_WEIGHTS, self.table.nbytes, Residency.RESIDENT)  # never leaves
        self.cache = FakeSegment(ENGINE_KV_CACHE, 4096, FakeDevice(4096), away=Residency.DISCARDED)
        self.segments = (self.weights, self.cache)  # what the scheduler may move
        self.weights_version, self.cause, self.paused, self.closed = None, "nothing was committed yet", False, False

    # ---- weights

    def load(self, weights):
        for name, tensor in weights:
            {"table.weight": self.table}[name].copy_(tensor)  # `KeyError` for a name that it does not know

    def record_plan(self, source):
        return LoadPlan.record(self.load, source, {"table.weight": self.table})

    def load_weights(self, weights):
        self.poison("weights have been loaded into it and not committed")
        with torch.no_grad():
            self.load(weights)

    def share_weights(self):
        """The table never leaves, so that a trainer may have it as its parameter."""

    def packed_weights(self):
        return {}

    def commit(self, version):
        self.weights_version = version

    def poison(self, cause):
        self.weights_version, self.cause = None, cause

    # ---- generation

    def sampling_params(self, params=None, **options):
        return params or colo.SamplingParams(**options)

    def sampling_temperature(self, params):
        return params.temperature

    def generate(self, prompts, params, *, adapter=None):
        if self.before_generate is not None:
            self.before_generate()  # the runtime's: weights that were written to are published first
        if self.state is not EngineState.AWAKE:
            raise PhaseError(f"the engine is {self.state} and cannot generate")
        if self.weights_version is None:
            raise StaleWeights(f"the engine does not generate: {self.cause}")
        return [self.sample(i, n, tuple(p), params) for i, p in enumerate(prompts) for n in range(params.n)]

    @torch.no_grad()
    def sample(self, prompt_index, sample_index, prompt, params):
        tokens, logprobs = [*prompt], []
        for _ in range(params.max_tokens):
            of_next = (self.table[tokens[-1]] / params.temperature).log_softmax(-1)
            tokens.append(int(of_next.exp().multinomial(1)))
            logprobs.append(float(of_next[tokens[-1]]))
        return colo.Completion(
            prompt_index=prompt_index,
            sample_index=sample_index,
            prompt_token_ids=prompt,
            token_ids=tuple(tokens[len(prompt) :]),
            logprobs=tuple(logprobs),
            finish_reason="length",
            weights_version=self.weights_version,
        )

    # ---- states: the table at the top of colo/engine.py

    @property
    def state(self):
        if self.closed:
            return EngineState.CLOSED
        if self.cache.residency is not Residency.RESIDENT:
            return EngineState.ASLEEP
        return EngineState.PAUSED if self.paused else EngineState.AWAKE

    def pause(self):
        self.paused = True

    def resume(self):
        if self.state is EngineState.ASLEEP:
            raise PhaseError("the engine is asleep and cannot resume: call wake() first")
        self.paused = False

    def sleep(self, level):
        self.paused = True
        self.cache.begin(Residency.DISCARDED).wait()

    def wake(self, tags=None):
        self.cache.begin(Residency.RESIDENT).wait()

    def recover(self):
        raise PhaseError("the engine is not lost: nothing to recover")

    def close(self):
        self.closed = True

    def reset_prefix_cache(self):
        """Nothing is kept from one call to the next."""

    def gather(self, value):
        return [value]  # of every rank that runs a part of the engine: there is one

    # ---- adapters

    def load_adapter(self, name, adapter):
        raise Unsupported("a bigram model takes no adapters")

    def replace_adapter(self, old, new, adapter):
        raise Unsupported("a bigram model takes no adapters")

    def remove_adapter(self, name):
        raise ValueError(f"there is no adapter {name!r}")


class Bigram(torch.nn.Module):
    """The model to train."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(TOKENS, TOKENS)

    def forward(self, ids):
        return self.table(ids)


def main():
    torch.manual_seed(0)
    engine, model = BigramEngine(), Bigram()
    assert isinstance(engine, Engine)  # has every member of the protocol
    optimizer = torch.optim.Adam(model.parameters(), lr=0.2)
    rewards = []
    with colo.share(engine, model, optimizer) as rt:
        for _ in range(30):
            with rt.rollout():
                completions = rt.generate([[1]], n=16, max_tokens=4)
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


if __name__ == "__main__":
    main()
