"""An engine behind HTTP needs the base and a client: its weights are sent, its cache sleeps, it ends and comes back."""

import json
import runpy
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import colo
from colo.engine import Adapters, Engine, EngineState, LoadPlans, Recovers, SleepLevel
from colo.engines.base import EngineBase, EngineStatus
from colo.engines.http import HttpClient, Refused, Silent
from colo.errors import EngineLost, PhaseError, TransferError, Unsupported
from colo.phases.phase import ENGINE_KV_CACHE, ENGINE_WEIGHTS, Done, FixedSegment, Residency, check_move

EXAMPLE = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "extending" / "engine.py"))
TOKENS, CACHE_BYTES = EXAMPLE["TOKENS"], 4096


class BigramServer:
    """The engine's process: a bigram table, and a cache that sleeps."""

    def __init__(self):
        self.table, self.sleeps, self.asked = torch.zeros(TOKENS, TOKENS), False, []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer(200, {})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "null")
                server.asked.append(self.path)
                try:
                    self.answer(200, getattr(server, self.path[1:])(**body))
                except Exception as error:  # noqa: BLE001 - an answer
                    self.answer(400, {"error": str(error)})

            def answer(self, status, body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def load(self, name, values):
        if name != "table.weight":
            raise ValueError(f"no weight {name}")
        self.table.copy_(torch.tensor(values))

    def sleep(self):
        self.sleeps = True

    def wake(self):
        self.sleeps = False

    def generate(self, prompt, max_tokens, temperature):
        if self.sleeps:
            raise ValueError("asleep")
        tokens, logprobs = [*prompt], []
        for _ in range(max_tokens):
            of_next = (self.table[tokens[-1]] / temperature).log_softmax(-1)
            tokens.append(int(of_next.exp().multinomial(1)))
            logprobs.append(float(of_next[tokens[-1]]))
        return {"token_ids": tokens[len(prompt) :], "logprobs": logprobs}

    def end(self):
        self.http.shutdown()
        self.http.server_close()


class HttpSegment:
    """The cache of the server, which it moves when it is asked to."""

    name, size_bytes, host_bytes, away = ENGINE_KV_CACHE, CACHE_BYTES, 0, Residency.DISCARDED

    def __init__(self, ask):
        self.residency, self._ask = Residency.RESIDENT, ask

    @property
    def device_bytes(self):
        return CACHE_BYTES if self.residency is Residency.RESIDENT else 0

    def begin(self, target):
        if target is not self.residency:
            check_move(self.name, self.residency, target)
            self._ask("/wake" if target is Residency.RESIDENT else "/sleep", {})
            self.residency = target
        return Done()


class HttpEngine(EngineBase):
    name, model_type, vocab_size = "bigram-server", "bigram", TOKENS

    def __init__(self):
        self.server = BigramServer()
        self._http = HttpClient(self.server.url, deadline_s=60)
        self.cache = HttpSegment(self.ask)
        weights = FixedSegment(ENGINE_WEIGHTS, TOKENS * TOKENS * 4, Residency.RESIDENT)
        status = EngineStatus(lambda: self.segments, on_loss=self.lose_cache)
        super().__init__(torch.device("cpu"), (weights, self.cache), status=status)

    @property
    def placement(self):
        return f"a server at {self.server.url}"

    def ask(self, path, body):
        self._status.require_present()
        try:
            return self._http.ask("POST", path, body)
        except Silent as error:
            raise self._status.lose(str(error)) from error
        except Refused as error:
            raise TransferError(f"the server refuses {path}: {error}") from error

    def load_weights(self, weights):
        self.poison_for_load()
        for name, tensor in weights:
            self.ask("/load", {"name": name, "values": tensor.tolist()})

    def generate(self, prompts, params, *, adapter=None):
        version = self.ready()
        asked = {"max_tokens": params.max_tokens, "temperature": params.temperature}
        rows = [(p, s, tuple(prompt)) for p, prompt in enumerate(prompts) for s in range(params.n)]
        answers = [self.ask("/generate", {"prompt": prompt, **asked}) for _, _, prompt in rows]
        return [
            colo.Completion(
                prompt_index=index,
                sample_index=sample,
                prompt_token_ids=prompt,
                token_ids=tuple(answer["token_ids"]),
                logprobs=tuple(answer["logprobs"]),
                finish_reason="length",
                weights_version=version,
            )
            for (index, sample, prompt), answer in zip(rows, answers, strict=True)
        ]

    def lose_cache(self):
        self.cache.residency = Residency.DISCARDED

    def recover(self):
        if self._status.lost is None:
            raise PhaseError("the engine is not lost: nothing to recover")
        self._http.close()
        self.server = BigramServer()
        self._http = HttpClient(self.server.url, deadline_s=60)
        self._status.revive()
        self.cache.residency = Residency.RESIDENT
        self.poison("it has been started again: publish to it")

    def _release(self):
        self._http.close()
        self.server.end()


@pytest.fixture
def engine():
    made = HttpEngine()
    yield made
    made.close()


def share(engine):
    model = EXAMPLE["Bigram"]()
    return model, colo.share(engine, model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_it_has_what_every_engine_has_and_says_what_it_can_do_besides(engine):
    assert isinstance(engine, Engine) and isinstance(engine, Recovers)
    assert not isinstance(engine, LoadPlans) and not isinstance(engine, Adapters)


def test_it_learns_from_weights_that_are_sent(engine):
    rewards, bytes_sent, transport = EXAMPLE["train"](engine)
    assert rewards[-1] > rewards[0] + 0.3
    assert (bytes_sent, transport) == (30 * TOKENS * TOKENS * 4, "local")


def test_its_cache_is_away_while_the_trainer_works_and_it_samples_from_the_last_weights(engine):
    model, rt = share(engine)
    with rt:
        with rt.train():
            (-model(torch.tensor([1]))[0, 3]).backward()
            rt.optimizer.step()
        engine.sleep(SleepLevel.KEEP_WEIGHTS)
        assert engine.server.sleeps and engine.state is EngineState.ASLEEP
        with pytest.raises(PhaseError, match="the engine is asleep and cannot generate"):
            engine.generate([[1]], engine.sampling_params())
        with pytest.raises(PhaseError, match="level 1 would move engine.weights, which is memory that stays"):
            engine.sleep(1)
        with rt.rollout():
            rt.generate([[1]], max_tokens=1)
        assert torch.equal(engine.server.table, model.table.weight.detach())


def test_a_server_that_ends_is_lost_refuses_and_comes_back_with_the_weights(engine):
    model, rt = share(engine)
    with rt:
        with rt.rollout():
            rt.generate([[1]], max_tokens=2)
        engine.server.end()
        with pytest.raises(EngineLost, match="the engine is lost: it did not answer /generate"), rt.rollout():
            rt.generate([[1]], max_tokens=2)
        assert engine.state is EngineState.LOST and engine.weights_version is None
        rt.recover()
        with rt.rollout():
            assert rt.generate([[1]], max_tokens=2)
        assert torch.equal(engine.server.table, model.table.weight.detach())


def test_an_adapter_for_it_is_refused_before_anything_moves(engine):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from tests.models import tiny_qwen3

    model = get_peft_model(AutoModelForCausalLM.from_config(tiny_qwen3()), LoraConfig())
    with pytest.raises(Unsupported, match="the bigram-server engine takes no adapters: merge the adapter"):
        colo.share(engine, model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0))
    assert engine.server.asked == []
