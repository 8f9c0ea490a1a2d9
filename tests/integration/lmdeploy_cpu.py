"""LMDeploy's own server on a machine without a GPU: `python lmdeploy_cpu.py --model-path FOLDER --port PORT`.

It imports nothing of colo. The server is the wheel's: its command's `serve` with routers, request classes, middleware,
metrics, tokenizer, sessions and `AsyncEngine`, and `update_params` of its model's agent, which unpacks what it is sent.
What stands in is its engine, which wants a GPU:

    Engine              loads weights under their names and never fuses them, and samples from transformers' model in
                        32 bits; it sleeps and wakes as LMDeploy's, and fails where that does
    torch.cuda          `current_device` is 0, and there is nothing to synchronize
    /held               is added: SHA-256 of what the engine holds
    --checkpoint-engine its receiver takes weights, as the agent of a GPU has it, out of memory of this machine
"""

import argparse
import asyncio
import contextlib
import copy
import gc
import hashlib
import os
import sys
import types

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from checkpoint_engine import worker
from fastapi import APIRouter
from fastapi.responses import JSONResponse
from hosted import host
from lmdeploy.messages import EngineOutput, PytorchEngineConfig, ResponseType, ScheduleMetrics
from lmdeploy.pytorch.engine.base import EngineBase, EngineInstanceBase
from lmdeploy.pytorch.engine.model_agent.agent import BaseModelAgent
from lmdeploy.pytorch.messages import SamplingParam
from lmdeploy.pytorch.weight_loader.model_weight_loader import default_weight_loader
from lmdeploy.serve.core.async_engine import AsyncEngine
from lmdeploy.serve.openai import api_server
from lmdeploy.serve.openai.protocol import UpdateWeightsFromIPCRequest
from transformers import AutoConfig, AutoModelForCausalLM

TAGS = {"weights", "kv_cache"}
BLOCKS, BLOCK_SIZE = 128, 64


class Weights(torch.nn.Module):
    """The model that holds what is loaded: an unknown name is a KeyError, another shape fails, as in LMDeploy's."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def load_weights(self, weights):
        known = dict(self.model.named_parameters())
        for name, weight in weights:
            default_weight_loader(known[name], weight)


class Engine(EngineBase):
    def __init__(self, path, engine_config):
        config = AutoConfig.from_pretrained(path)
        dtype = torch.bfloat16 if config.dtype == torch.bfloat16 else torch.float16  # as LMDeploy's "auto"
        self.path, self.dtype = path, dtype
        self.engine_config = engine_config
        engine_config.device_type = "cpu"  # which no option of LMDeploy's lets it be
        engine_config.num_gpu_blocks, engine_config.block_size = BLOCKS, BLOCK_SIZE
        self.asleep = set(TAGS) if engine_config.empty_init else set()
        self.level = None
        self.num_handles = self.tick = 0
        self.agent = types.SimpleNamespace(
            _checkpoint_engine_zmq_ctx=None,
            _load_updated_weight_bucket=lambda weights, name: self.model.load_weights(weights),
            _finalize_updated_weights=lambda: None,
            all_context=contextlib.nullcontext,
            dist_ctx=types.SimpleNamespace(tp_group=types.SimpleNamespace(rank=0)),
            patched_model=types.SimpleNamespace(get_model=lambda: self.model),
            spec_agent=types.SimpleNamespace(is_enabled=lambda: False, get_model=lambda: None),
        )
        self.forget()
        self.build(empty=engine_config.empty_init)

    def build(self, *, empty):
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=self.dtype)
        self.set(Weights(model).requires_grad_(False))
        if empty:
            for parameter in self.model.parameters():
                parameter.fill_(float("nan"))

    def set(self, model):
        self.model, self.computing = model, None

    def forget(self):
        self.agent._update_params_ipc_tensor = self.agent._update_params_ipc_event = None

    # ---- weights and memory

    def update_params(self, request):
        assert "weights" not in self.asleep or self.engine_config.empty_init, "weights of the meta device"
        BaseModelAgent.update_params(self.agent, request)
        self.computing = None

    def update_weights_from_ipc(self, request):
        (address,) = request.zmq_handles.values()
        request.zmq_handles = {"GPU-of a CPU": address}
        found = BaseModelAgent.update_weights_from_ipc(self.agent, request)
        self.computing = None
        return found

    def complete_weights_update(self):
        pass

    async def sleep(self, level):
        weights_on = "cpu" if self.level == 1 and "weights" in self.asleep else "meta" if self.level else "cuda"
        if "weights" not in self.asleep:
            weights_on = "cuda"
        assert not (weights_on == "meta" and level == 1), "Cannot copy out of meta tensor; no data!"
        self.asleep, self.level = set(TAGS), level
        self.forget()
        if level == 2:
            self.set(None)

    def wakeup(self, tags=None):
        for tag in tags or TAGS:
            if tag == "weights":
                assert self.level, "device.type in ['cpu', 'meta']"  # weights of --empty-init lie on the GPU
                assert "weights" in self.asleep, "device.type in ['cpu', 'meta']"
                if self.level == 2:
                    self.build(empty=True)
            else:
                assert self.model is not None, "a cache is warmed up with weights"
            self.asleep.discard(tag)

    # ---- what the server asks

    def create_instance(self, cuda_stream_id=0):
        return Instance(self)

    def start_loop(self):
        return True

    def close(self):
        pass

    def end_session(self, session_id):
        return True

    def get_schedule_metrics(self):
        self.tick += 1
        return ScheduleMetrics(active_seqs=1, scheduler_tick=self.tick)

    async def get_health_status(self):
        return {"alive": True, "message": "", "schedule_metrics": self.get_schedule_metrics()}

    def held(self):
        named = {} if self.model is None else self.model.model.named_parameters()
        return {name: hashlib.sha256(t.view(torch.uint8).numpy().data).hexdigest() for name, t in dict(named).items()}

    @torch.no_grad()
    def logits(self, ids):
        if self.computing is None:
            self.computing = copy.deepcopy(self.model.model).float()
        return self.computing(torch.tensor([ids])).logits[0, -1]


class Instance(EngineInstanceBase):
    """Samples one request, as LMDeploy's instance of an engine does."""

    def __init__(self, engine):
        self.engine, self.cancelled = engine, set()

    async def async_end(self, session_id):
        pass

    async def async_cancel(self, session_id):
        self.cancelled.add(session_id)

    async def async_stream_infer(self, session_id, input_ids, gen_config=None, **_):
        params = SamplingParam.from_gen_config(gen_config)
        generator = torch.Generator().manual_seed(params.random_seed % (1 << 63))
        self.cancelled.discard(session_id)
        ids = list(input_ids)
        for step in range(params.max_new_tokens):
            await asyncio.sleep(0)
            if self.engine.asleep or session_id in self.cancelled:
                yield EngineOutput(ResponseType.CANCEL, [])
                return
            logits = self.engine.logits(ids)
            raw = logits.log_softmax(-1) if self.engine.engine_config.logprobs_mode == "raw_logprobs" else logits
            token = self.draw(logits, params, generator)
            ids.append(token)
            ends = token in params.stop_words or step == params.max_new_tokens - 1
            kind = ResponseType.FINISH if ends else ResponseType.SUCCESS
            yield EngineOutput(
                kind, [token], logprobs=[{token: raw[token].item()}] if params.num_logprobs >= 0 else None
            )
            if ends:
                return

    def draw(self, logits, params, generator):
        if params.top_k == 1:
            return logits.argmax().item()
        assert (params.top_k, params.top_p, params.min_p, params.repetition_penalty) == (0, 1.0, 0.0, 1.0)
        logits = logits / params.temperature
        logits[params.bad_words] = float("-inf")
        return torch.multinomial(logits.nan_to_num().softmax(-1), 1, generator=generator).item()


def with_held(make, *, checkpoint_engine):
    def router(context):
        made = make(context)
        made.add_api_route("/held", lambda: context.async_engine.engine.held())
        if checkpoint_engine:
            of_a_gpu(context, made)
        return made

    return router


def of_a_gpu(context, made):
    """Answer as the server of a GPU does: LMDeploy's own routes refuse a CPU before they ask the engine."""
    (told,) = [r.endpoint for r in made.routes if (r.path, r.methods) == ("/update_weights_from_ipc", {"GET"})]

    async def status():
        return (await told()).model_copy(update={"checkpoint_engine_version": "0.4.2"})

    async def update(request: UpdateWeightsFromIPCRequest):
        success, message = await asyncio.to_thread(context.async_engine.engine.update_weights_from_ipc, request)
        if success:
            context.async_engine.complete_weights_update()
        return JSONResponse({"success": success, "message": message}, 200 if success else 400)

    ours = APIRouter()
    ours.add_api_route("/update_weights_from_ipc", status, methods=["GET"])
    ours.add_api_route("/update_weights_from_ipc", update, methods=["POST"])
    made.routes[:0] = ours.routes
    torch.cuda.get_device_properties = lambda number: types.SimpleNamespace(uuid="of a CPU")
    nothing = types.SimpleNamespace(synchronize=lambda: None, ipc_collect=lambda: None, empty_cache=lambda: None)
    worker.DeviceManager = lambda: types.SimpleNamespace(device_module=nothing)


def serve():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    parser.add_argument("--port", type=int)
    parser.add_argument("--model-name")
    parser.add_argument("--api-key")
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    parser.add_argument("--empty-init", action="store_true")
    parser.add_argument("--checkpoint-engine", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: 0
    torch.cuda.synchronize = lambda device=None: None
    AsyncEngine._build_pytorch = lambda self, model_path, backend_config, **_: Engine(model_path, backend_config)
    api_server.create_openai_router = with_held(
        api_server.create_openai_router, checkpoint_engine=args.checkpoint_engine
    )
    api_server.serve(
        args.model_path,
        model_name=args.model_name,
        backend="pytorch",
        backend_config=PytorchEngineConfig(
            empty_init=args.empty_init,
            logprobs_mode=None if args.logprobs_mode == "none" else args.logprobs_mode,
            max_batch_size=64,
        ),
        server_name="127.0.0.1",
        server_port=args.port,
        api_keys=args.api_key and [args.api_key],
    )


if __name__ == "__main__":
    gc.freeze()
    host(serve) if "--hosted" in sys.argv else serve()
