"""Probes, SageMaker's aliases, metrics, and routes of other kinds of models."""

import re

import httpx
import pytest
from msgspec.structs import replace

from configs.wire.sampling import Pooling
from configs.wire.tasks import ModelTask, TaskKind
from deployments.contract import EngineLoad, ErrorKind, Failed
from deployments.observability.lorax_metrics import MAX_ADAPTERS, RequestMetrics, RequestRecord
from tests.deployments.ingress.conftest import PATIENCE, Server, send_by_hand
from tests.deployments.ingress.openai.openai_http import COMPLETIONS
from tests.fakes import FakeDriver


def values(http: httpx.Client) -> dict[str, float]:
    """Every series of the text format; each line is one, or a comment."""
    reply = http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line for line in reply.text.splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r'\w+(\{(\w+="[^"]*",?)+\})? [-+.\w]+', line) for line in lines)
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_startup_generates_a_token(http: httpx.Client, driver: FakeDriver) -> None:
    assert http.get("/startup").status_code == 200
    [sequence] = driver.requests[-1].sequences
    assert sequence.prompt == driver.tokenizer.encode("Hello").ids
    assert (sequence.stopping.max_new_tokens, sequence.sampling.temperature) == (1, 0)
    driver.faults[None] = Failed(ErrorKind.UNAVAILABLE, "the ranks are gone")
    reply = http.get("/startup")
    assert reply.status_code == 500
    assert reply.json() == {"error": "the ranks are gone", "error_type": "failed healthcheck"}


@pytest.mark.parametrize(
    ("kind", "pooling"), [(TaskKind.CLASSIFY, Pooling.SCORE), (TaskKind.EMBED, Pooling.MEAN)]
)
def test_startup_does_what_the_model_is_for(
    http: httpx.Client, driver: FakeDriver, kind: TaskKind, pooling: Pooling
) -> None:
    driver.info = replace(driver.info, task=ModelTask(kind))
    assert http.get("/startup").status_code == 200
    [sequence] = driver.requests[-1].sequences
    assert (sequence.stopping.max_new_tokens, sequence.sampling.pooling) == (0, pooling)


def test_sagemakers_aliases(http: httpx.Client) -> None:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 5}}
    assert http.post("/invocations", json=body).json() == http.post("/", json=body).json()
    assert http.get("/ping").status_code == 200


def test_requests_are_counted_by_adapter_and_error(http: httpx.Client, driver: FakeDriver) -> None:
    driver.faults["bad"] = Failed(ErrorKind.ADAPTER_NOT_FOUND, "no such adapter")
    driver.faults["late"] = Failed(ErrorKind.GENERATION, "gone")
    for model in ("tiny", "tiny", "org/pirate", "local:poet@v2", "bad", "late"):
        for streams in (False, True):
            body = {"model": model, "prompt": "a", "max_tokens": 5, "stream": streams}
            http.post(COMPLETIONS, json=body)
    http.post("/generate", json={"inputs": ""})
    http.post("/generate", json={"wrong": ""})
    http.post("/tokenize", json={"wrong": ""})
    http.post(COMPLETIONS, json={"model": "tiny", "prompt": "a", "n": 99})
    found = values(http)
    assert found['lorax_request_count{adapter="base"}'] == 4
    assert found['lorax_request_success{adapter="base"}'] == 4
    assert found['lorax_request_success{adapter="org/pirate"}'] == 2
    assert found['lorax_request_success{adapter="local:poet"}'] == 2
    assert found['lorax_request_count{adapter="other"}'] == 4
    assert found['lorax_request_count{adapter=""}'] == 3
    assert found['lorax_request_failure{err="download_adapter"}'] == 2
    assert found['lorax_request_failure{err="generation"}'] == 2
    assert found['lorax_request_failure{err="validation"}'] == 3
    assert found["lorax_request_generated_tokens_sum"] == 40
    assert found["lorax_request_duration_count"] == 8
    assert found['lorax_request_max_new_tokens_bucket{le="8.0"}'] == 8
    assert found["lorax_request_queue_duration_sum"] == 2.0
    assert not any("_created" in name or "_total" in name for name in found)


@pytest.mark.parametrize("tokens", [0, 5])
def test_requests_of_clients_that_left_are_counted(
    server: Server, http: httpx.Client, driver: FakeDriver, tokens: int
) -> None:
    driver.hold_after = tokens
    body = {"model": "tiny", "prompt": "a", "stream": True}
    with send_by_hand(server, COMPLETIONS, body) as connection:
        assert driver.arrived.wait(PATIENCE)
        assert tokens == 0 or b"200 OK" in connection.recv(4096)
    assert driver.cancelled.wait(PATIENCE)
    for _ in range(100):  # The server counts it a bit later.
        if found := values(http).get('lorax_request_failure{err="dropped"}'):
            break
    assert found == 1


def test_gateways_find_vllms_names(http: httpx.Client, driver: FakeDriver) -> None:
    driver.engine_loads = [EngineLoad("tiny", 7, 1, 1, 1, 1, 1, 1, 1, 1, 1, [])]
    found = http.get("/metrics").text
    assert 'vllm:num_requests_waiting{model_name="tiny"} 7.0' in found
    assert "lorax_request_count" in found


def test_metrics_need_no_driver(http: httpx.Client, driver: FakeDriver) -> None:
    driver.broken = ConnectionError("gone")
    found = http.get("/metrics").text
    assert "lorax_request_count" in found
    assert "vllm:" not in found


def test_metrics_as_json(http: httpx.Client) -> None:
    http.post("/generate", json={"inputs": "a", "parameters": {"max_new_tokens": 3}})
    found = http.get("/metrics", headers={"accept": "application/json"}).json()
    assert found["lorax_request_count"] == {
        "type": "counter", "data": [{"key": '{adapter="base"}', "value": 1.0}],
    }  # fmt: skip
    assert {"key": "sum", "value": 3.0} in found["lorax_request_generated_tokens"]["data"]


def test_the_number_of_adapter_labels_is_limited() -> None:
    metrics = RequestMetrics()
    record = RequestRecord(1.0, 0.1, 0.1, 0.8, 0.1, 0.2, 3, 10, 8)
    for number in range(MAX_ADAPTERS + 50):
        metrics.succeeded(f'a{number}\n"', record)
        metrics.failed("generation", f"never{number}")
    text = metrics.text().decode()
    assert text.count("lorax_request_success{") == MAX_ADAPTERS + 1
    assert 'lorax_request_success{adapter="other"} 50.0' in text
    assert 'adapter="a7\\n\\""' in text
