"""LoRAX's routes: response headers, /tokenize, /info and /health."""

import httpx
import msgspec

from tests.deployments.ingress.conftest import Server
from tests.fakes import FakeDriver, token_id


def test_headers_of_a_whole_reply(http: httpx.Client, driver: FakeDriver) -> None:
    parameters = {"max_new_tokens": 4, "adapter_id": "pö\net", "adapter_source": "local"}
    for path in ("/", "/generate"):
        reply = http.post(path, json={"inputs": "héllo", "parameters": parameters})
        headers = reply.headers
        num_prompt = len(driver.requests[-1].sequences[0].prompt)
        assert headers["x-compute-type"] == "cpu"
        assert headers["x-compute-characters"] == "5"
        assert headers["x-prompt-tokens"] == str(num_prompt)
        assert headers["x-generated-tokens"] == "4"
        assert headers["x-total-tokens"] == str(num_prompt + 4)
        assert headers["x-queue-time"] == "250"
        assert headers["x-model-id"] == "org/tiny-base"
        assert headers["x-adapter-id"] == "p%C3%B6%0Aet"
        assert headers["x-adapter-source"] == "local"
        for name in ("compute", "total", "validation", "inference"):
            assert headers[f"x-{name}-time"].isdigit()
        for name in ("time-per-token", "time-to-first-token", "time-per-output-token"):
            assert headers[f"x-{name}"].isdigit()


def test_headers_of_a_stream(http: httpx.Client) -> None:
    parameters = {"max_new_tokens": 4, "adapter_id": "\u0007 é"}
    reply = http.post("/generate_stream", json={"inputs": "hello", "parameters": parameters})
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["x-compute-characters"] == "5"
    assert reply.headers["x-adapter-id"] == "%07%20%C3%A9"
    assert "x-total-time" not in reply.headers


def test_tokenize(http: httpx.Client, driver: FakeDriver) -> None:
    tokens = http.post("/tokenize", json={"inputs": "é END!"}).json()
    assert tokens[0] == {
        "id": token_id(driver.tokenizer, "<s>"),
        "text": "",
        "start": 0,
        "stop": 0,
    }
    assert [token["text"] for token in tokens[1:]] == ["é", " END", "!"]
    plain = http.post("/tokenize", json={"inputs": "é", "add_special_tokens": False}).json()
    assert len(plain) == 1


def test_tokenize_has_a_limit(http: httpx.Client) -> None:
    assert len(http.post("/tokenize", json={"inputs": "a" * 600}).json()) == 601
    reply = http.post("/tokenize", json={"inputs": "a" * 65_537})
    assert (reply.status_code, reply.json()["error_type"]) == (422, "validation")
    assert "at most 65536 characters. Given: 65537" in reply.json()["error"]


def test_info_and_health_follow_the_engine(http: httpx.Client, server: Server) -> None:
    info = http.get("/info").json()
    assert info["model_id"] == "org/tiny-base"
    assert info["max_total_tokens"] == 512
    assert info["max_stop_sequences"] == 4
    for path in ("/", "/health", "/ping"):
        assert http.get(path).status_code == 200
    assert server.driver.descriptions == 1
    server.fresh_app()
    server.driver.info = msgspec.structs.replace(server.driver.info, healthy=False)
    for path in ("/", "/health"):
        reply = http.get(path)
        assert reply.status_code == 503
        assert reply.json() == {"error": "unhealthy", "error_type": "healthcheck"}
    server.fresh_app()
    server.driver.broken = ConnectionError("gone")
    assert http.get("/health").status_code == 503
    assert http.get("/info").status_code == 503
