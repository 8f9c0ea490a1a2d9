"""A transport of your own: weights go to the engine through NumPy. Run it: python examples/extending/transport.py"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import colo
from colo.engines.torch import TorchEngine
from colo.errors import TransferError
from colo.units import GIB, MIB
from colo.weights.sources.module import ModuleSource
from colo.weights.transports.base import CopyingTransport


class NumpyTransport(CopyingTransport):
    name = "numpy"  # what `rt.report()` calls it
    reason = "an example: each side has a copy, and NumPy carries it"
    working_bytes = 0  # device memory that a transfer takes for its time

    def __init__(self, source, engine):
        self.source = source
        self._engine = engine
        self._plan = source.given_to(engine.record_plan)  # what the engine's own loader copies where
        source.settle_names()

    def transfer(self, version=0):  # the engine is paused, its weights are resident
        arrays = {name: tensor.detach().cpu().numpy().copy() for name, tensor in self.source}
        self._engine.load_weights((name, torch.from_numpy(array)) for name, array in arrays.items())
        return sum(array.nbytes for array in arrays.values())

    def verify(self):  # called after each transfer, before the version is committed
        if different := self._plan.differences(self.source.tensors()):
            raise TransferError(f"{len(different)} weights differ after the transfer, {different[0]} for one")

    def is_current(self):
        return not self._plan.differences(self.source.tensors())


def main():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=64, eos_token_id=None, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    engine = TorchEngine(config, device="cpu", dtype=torch.float32, kv_cache_bytes=MIB)
    rt = colo.Runtime(
        engine=engine,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        transport=NumpyTransport(ModuleSource(model), engine),
        mover=engine.mover,
        config=colo.RuntimeConfig(),
        capacity_bytes=GIB,
    )
    ids = torch.arange(8)[None]
    with rt:
        rt.generate([[1, 2, 3]], max_tokens=4)  # with version 0, which was sent at the start
        with rt.train():
            model(input_ids=ids, labels=ids).loss.backward()
            rt.optimizer.step()
        (sample,) = rt.generate([[1, 2, 3]], max_tokens=4)  # version 1 is sent first
        print(rt.report())
        return sample, rt.publications


if __name__ == "__main__":
    main()
