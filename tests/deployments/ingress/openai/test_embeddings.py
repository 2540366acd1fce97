"""Embeddings over HTTP: forms of input, of numbers, of naming an adapter; refusals; clients."""

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from lorax import Client

from configs.embeddings import EmbeddingsConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.sampling import Pooling
from deployments.contract import ErrorKind, Failed
from deployments.ingress.generation.engine import IngressSettings
from tests.deployments.ingress.conftest import PATIENCE, Server
from tests.fakes import FakeDriver, embedding

PATH = "/v1/embeddings"


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected_vector(driver: FakeDriver, index: int = 0, length_1: bool = True) -> Any:
    """The vector of the fake's last request."""
    request = driver.requests[-1]
    vector = np.frombuffer(embedding(request.sequences[index], request.adapter), "<f4")
    return vector / np.linalg.norm(vector) if length_1 else vector


def post(http: httpx.Client, **body: object) -> dict[str, Any]:
    reply = http.post(PATH, json={"model": "tiny", **body})
    assert reply.status_code == 200, reply.text
    value: dict[str, Any] = reply.json()
    return value


@pytest.mark.parametrize("kind", ["text", "texts", "ids", "lists of ids"])
def test_every_form_of_input(http: httpx.Client, driver: FakeDriver, kind: str) -> None:
    texts = ["the fox", "the lazy dog"]
    known = [driver.tokenizer.encode(text).ids for text in texts]
    given = {"text": texts[0], "texts": texts, "ids": known[0], "lists of ids": known}[kind]
    reply = post(http, input=given)
    several = kind in ("texts", "lists of ids")
    requested = driver.requests[-1].sequences
    assert [each.prompt for each in requested] == (known if several else known[:1])
    assert all(each.stopping.max_new_tokens == 0 for each in requested)
    assert [(each["object"], each["index"]) for each in reply["data"]] == [
        ("embedding", index) for index in range(len(requested))
    ]
    for index, each in enumerate(reply["data"]):
        np.testing.assert_allclose(each["embedding"], expected_vector(driver, index), rtol=1e-6)
    num_tokens = sum(len(each.prompt) for each in requested)
    assert reply["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (reply["object"], reply["model"]) == ("list", "tiny")


def test_pooling_and_length_are_the_clients_or_the_servers(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        settings = EmbeddingsConfig(pooling=Pooling.LAST, normalize=False)
        for own in (EmbeddingsConfig(), settings):
            server.fresh_app(IngressSettings(embeddings=own))
            (first,) = post(http, input="fox")["data"]
            requested = server.driver.requests[-1].sequences[0].sampling
            assert requested.pooling is own.pooling
            expected = expected_vector(server.driver, 0, own.normalize)
            np.testing.assert_allclose(first["embedding"], expected, rtol=1e-6)
        (first,) = post(http, input="fox", pooling="mean", normalize=True)["data"]
        assert server.driver.requests[-1].sequences[0].sampling.pooling is Pooling.MEAN
        np.testing.assert_allclose(first["embedding"], expected_vector(server.driver), rtol=1e-6)


def test_the_model_names_an_adapter(http: httpx.Client, driver: FakeDriver) -> None:
    body = {"model": "poet@v2", "input": "fox", "adapter_source": "local", "api_token": "hush"}
    reply = http.post(PATH, json=body)
    assert reply.json()["model"] == "poet@v2"
    request = driver.requests[-1]
    assert request.adapter is not None
    assert (request.adapter.id, request.adapter.revision) == ("poet", "v2")
    assert request.api_token == "hush"
    driver.faults["poet"] = Failed(ErrorKind.ADAPTER_NOT_FOUND, "no such adapter")
    refused = http.post(PATH, json=body)
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"


def test_an_adapter_in_loraxs_parameters_replaces_the_model(
    http: httpx.Client, driver: FakeDriver
) -> None:
    own: dict[str, Any] = {"adapter_id": "poet", "adapter_source": "local", "api_token": "hush"}
    post(http, model="whatever", input="fox", parameters=own)
    request = driver.requests[-1]
    assert request.adapter == AdapterReference(AdapterSource.LOCAL, "poet")
    assert request.api_token == "hush"
    merged = {"ids": ["a", "b"], "weights": [1, 1]}
    post(http, input="fox", parameters={"merged_adapters": merged})
    assert driver.requests[-1].adapter is not None
    assert len(driver.requests[-1].adapter.parts) == 2
    post(http, model="poet", input="fox", parameters={})
    assert driver.requests[-1].adapter == AdapterReference(AdapterSource.HUB, "poet")
    body = {"model": "", "input": "a", "parameters": {"adapter_id": "a", "merged_adapters": merged}}
    reply = http.post(PATH, json=body)
    assert (reply.status_code, "at most one" in reply.text) == (400, True)


def test_base64_is_little_endian_float32(http: httpx.Client, driver: FakeDriver) -> None:
    (first,) = post(http, input="fox", encoding_format="base64", normalize=False)["data"]
    assert base64.b64decode(first["embedding"]) == expected_vector(driver, 0, False).tobytes()


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": ""}, "input", "cannot be empty"),
        ({"input": []}, "input", "cannot be empty"),
        ({"input": ["a", ""]}, "input", "cannot be empty"),
        ({"input": 5}, "input", "must be a string"),
        ({"input": [True]}, "input", "must be a string"),
        ({"input": [5, 9999]}, "input", "`input` has token 9999; ids must be in"),
        ({"input": [7] * 501}, "input", "has 501 tokens; at most 500"),
        ({"input": ["a"] * 257}, "input", "has 257 entries; at most 256"),
        ({"input": "a", "dimensions": 8}, "dimensions", "is not supported"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "pooling": "cls"}, "pooling", "'mean' or 'last'"),
        ({"input": "a", "adapter_source": "pbase"}, "adapter_source", "must be one of"),
        ({}, "input", "required"),
    ],
)
def test_bad_input_never_reaches_the_driver(
    http: httpx.Client, driver: FakeDriver, body: dict[str, object], param: str, words: str
) -> None:
    reply = http.post(PATH, json={"model": "tiny", **body})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert words in error["message"]
    assert driver.requests == []


def test_a_model_without_hidden_states_is_refused(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fakes.embedding", lambda *args: b"")
    reply = http.post(PATH, json={"model": "tiny", "input": "a"})
    assert reply.status_code == 400
    assert "cannot embed" in reply.json()["error"]["message"]


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_numbers_that_json_has_not_are_an_error(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    """They were null in the reply."""
    data = np.array([0.5, float(number)], "<f4").tobytes()
    monkeypatch.setattr("tests.fakes.embedding", lambda *args: data)
    reply = http.post(PATH, json={"model": "tiny", "input": "a"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
    assert "not finite" in reply.json()["error"]["message"]
    reply = http.post("/embed", json={"inputs": "a"})
    assert (reply.status_code, reply.json()["error_type"]) == (424, "generation")


def test_openais_client(client: openai.OpenAI, driver: FakeDriver) -> None:
    """The client requests base64 and decodes it."""
    reply = client.embeddings.create(model="org/pirate", input=["fox", "dog"])
    for index, each in enumerate(reply.data):
        np.testing.assert_allclose(each.embedding, expected_vector(driver, index), rtol=1e-6)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens > 0
    plain = client.embeddings.create(
        model="tiny", input=[5, 6], encoding_format="float", extra_body={"pooling": "last"}
    )
    np.testing.assert_allclose(plain.data[0].embedding, expected_vector(driver), rtol=1e-6)
    assert driver.requests[-1].sequences[0].sampling.pooling is Pooling.LAST


def test_loraxs_route_and_client(server: Server, http: httpx.Client, driver: FakeDriver) -> None:
    reply = Client(server.url).embed("the fox")
    np.testing.assert_allclose(reply.embeddings, expected_vector(driver), rtol=1e-6)
    given = {"adapter_id": "poet", "adapter_source": "local", "max_new_tokens": 5}
    answer = http.post("/embed", json={"inputs": "the fox", "parameters": given}).json()
    np.testing.assert_allclose(answer["embeddings"], expected_vector(driver), rtol=1e-6)
    request = driver.requests[-1]
    assert request.adapter is not None
    assert request.adapter.id == "poet"
    assert request.sequences[0].stopping.max_new_tokens == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"inputs": ""}, "`inputs` cannot be empty"),
        ({"inputs": "x " * 252}, "`inputs` must have less than 500 tokens. Given: 505"),
        ({"inputs": "a", "parameters": {"merged_adapters": {"ids": ["a"], "weights": [1, 2]}}},
         "number of adapter IDs must match number of adapter weights"),
    ],
)  # fmt: skip
def test_embed_has_loraxs_messages(http: httpx.Client, body: dict[str, object], words: str) -> None:
    reply = http.post("/embed", json=body)
    assert reply.status_code == 422
    assert reply.json()["error"] == f"Input validation error: {words}"


def test_embeddings_are_counted(http: httpx.Client) -> None:
    post(http, input=["fox", "dog"])
    http.post(PATH, json={"model": "tiny", "input": ""})
    metrics = http.get("/metrics").text
    assert 'lorax_request_failure{err="validation"} 1.0' in metrics
    assert "lorax_request_success" in metrics
