"""`colo.connect` asks a server what it is before it speaks its protocol."""

import httpx
import pytest
from transformers import Qwen3Config

import colo
from colo.errors import EngineLost, Unsupported


def connect(answer, **options):
    return colo.connect("localhost:8000/v1", device="cpu", http=httpx.MockTransport(answer), **options)


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:port",
        "localhost:99999",
        "http://127.0.0.1:65536/v1",
        "http://x:-1",
        "x:0",
        "x:80:80",
        "http://a\nb",
        "",
        "http://",
        "http:///v1",
        "ftp://x",
        "file:///tmp",
        "HTTPX://x",
    ],
)
def test_what_is_no_address_is_named(url):
    with pytest.raises(ValueError, match="is no address of a server .*: write http://HOST:PORT"):
        colo.connect(url, device="cpu")


@pytest.mark.parametrize("device", ["tpu", "cpu:x", "mps", "meta", "ü", "cuda:-1", 0.5])
def test_what_is_no_device_is_named_before_a_server_is_asked(device):
    with pytest.raises(ValueError, match="device must be 'cuda', 'cuda:0' or 'cpu', not "):
        colo.connect("http://localhost:1", device=device)


def test_a_gpu_that_is_not_there_is_named_before_a_server_is_asked(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(Unsupported, match="torch sees no CUDA device, run `colo doctor`, or pass 'cpu'"):
        colo.connect("http://localhost:1", device="cuda")


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
@pytest.mark.parametrize("key", ["ü", "a\nb", "\x00"])
def test_a_key_that_no_header_takes_is_named(name, key):
    with pytest.raises(ValueError, match=f"{name} has a character that no header of HTTP takes"):
        colo.connect("http://localhost:1", device="cpu", **{name: key})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"api_key": 5}, "api_key must be a text, not 5"),
        ({"admin_key": b"k"}, "admin_key must be a text, not b'k'"),
        (
            {"through": "weights"},
            "through is a colo.WeightsFolder.path., WeightsBucket.url. or Broadcast.., not 'weights'",
        ),
        ({"through": colo.WeightsFolder}, "through is a colo.WeightsFolder.path., .* not <class"),
    ],
)
def test_a_key_or_a_way_that_is_none_is_named_before_a_server_is_asked(given, words):
    with pytest.raises(TypeError, match=words):
        colo.connect("http://localhost:1", device="cpu", **given)


@pytest.mark.parametrize("url", [None, 8000, b"http://localhost"])
def test_an_address_that_is_no_text_is_named(url):
    with pytest.raises(TypeError, match="the address of a server is a text such as 'http://localhost:8000', not "):
        colo.connect(url, device="cpu")


def test_a_server_without_the_others_paths_is_taken_for_vllm():
    asked = []

    def answer(request):
        asked.append(request.url.path)
        return httpx.Response(200, json={"version": "0.31.0"}) if asked[-1] == "/version" else httpx.Response(404)

    with pytest.raises(Unsupported, match="localhost:8000 is not in vLLM's development mode"):
        connect(answer)
    assert asked[:3] == ["/model_info", "/update_weights_from_ipc", "/version"]


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_wants_a_key_says_so(status):
    with pytest.raises(Unsupported, match="http://localhost:8000 wants a key: pass api_key"):
        connect(lambda request: httpx.Response(status))


def test_the_key_is_sent_and_nothing_at_the_address_is_told():
    def answer(request):
        assert request.headers["authorization"] == "Bearer one"
        raise httpx.ConnectError("All connection attempts failed")

    with pytest.raises(EngineLost, match="no server answers at http://localhost:8000: it did not answer /model_info"):
        connect(answer, api_key="one")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"version": "0.4.9"}, "is of version 0.4.9: colo needs 0.5.21 or later"),
        ({"dp_size": 2}, "was started with --dp-size 2: each replica would have to be attested"),
        ({"weight_cache_mode": "client"}, "--weight-cache-mode client: the weights belong to another process"),
        ({"quantization": "fp8"}, "--quantization fp8: quantized weights are not the trainer's"),
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE: a drafter's weights"),
        ({}, "the config of /nowhere/at/all, which the SGLang server at http://localhost:8000 has loaded, cannot be"),
    ],
)
def test_an_sglang_server_that_cannot_take_weights_is_refused_with_what_to_change(told, words):
    plain = {"version": "0.5.21", "dtype": "auto", "device": "cpu", "max_total_num_tokens": 1, "max_req_input_len": 1}
    plain |= {"tp_size": 1, "pp_size": 1, "dp_size": 1, "weight_cache_mode": "off"}
    answers = {
        "/model_info": {"weight_version": "default", "model_path": "/nowhere/at/all"},
        "/server_info": plain | told,
        "/v1/models": {"data": [{"max_model_len": 64}]},
    }
    with pytest.raises(Unsupported, match=words):
        connect(lambda request: httpx.Response(200, json=answers[request.url.path]))


def test_a_server_on_a_quantized_checkpoint_is_refused(tmp_path):
    Qwen3Config(quantization_config={"quant_method": "fp8"}).save_pretrained(tmp_path)
    sglang = {"version": "0.5.21", "dtype": "auto", "device": "cpu", "max_total_num_tokens": 1, "max_req_input_len": 1}
    answers = {
        "/model_info": {"weight_version": "default", "model_path": str(tmp_path)},
        "/server_info": sglang | {"tp_size": 1, "pp_size": 1, "dp_size": 1},
        "/v1/models": {"data": [{"max_model_len": 64}]},
    }
    with pytest.raises(Unsupported, match=r"these are quantized \(fp8\)"):
        connect(lambda request: httpx.Response(200, json=answers[request.url.path]))


def test_an_sglang_server_is_sent_no_changes_alone():
    with pytest.raises(Unsupported, match="SGLang's, whose loader takes whole weights alone: leave delta=True out"):
        connect(
            lambda request: httpx.Response(200, json={"weight_version": "default"}),
            through=colo.Broadcast("a", delta=True),
        )


def test_an_sglang_server_reads_from_no_object_store():
    with pytest.raises(Unsupported, match=r"reads files of its own machine: take WeightsFolder\(path\)"):
        connect(
            lambda request: httpx.Response(200, json={"weight_version": "default"}),
            through=colo.WeightsBucket("s3://weights"),
        )
