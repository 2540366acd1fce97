"""Classification, scores and reranking over HTTP: forms, numbers, order, refusals, clients."""

import math
from typing import Any

import httpx
import numpy as np
import pytest
from lorax import Client
from msgspec.structs import replace

from configs.wire.sampling import Pooling
from configs.wire.tasks import ModelTask, ScoreActivation, TaskKind
from deployments.contract import ErrorKind, Failed
from tests.deployments.ingress.conftest import Server
from tests.fakes import FakeDriver, embedding

BASE = {"model": "tiny"}
JUDGE = {"model": "local:judge"}
"""The fake's adapter with one label."""


def logits(driver: FakeDriver) -> list[list[float]]:
    """The vectors of the fake's last request."""
    request = driver.requests[-1]
    each = [np.frombuffer(embedding(s, request.adapter), "<f4") for s in request.sequences]
    return [vector.astype(float).tolist() for vector in each]


def softmax(row: list[float]) -> list[float]:
    powers = np.exp(np.array(row) - max(row))
    return list(powers / powers.sum())


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def post(http: httpx.Client, path: str, **body: object) -> Any:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
def test_vllms_form(http: httpx.Client, driver: FakeDriver, path: str) -> None:
    reply = post(http, path, **BASE, input=["the fox", "the lazy dog"])
    expected = [softmax(row) for row in logits(driver)]
    assert {s.sampling.pooling for s in driver.requests[-1].sequences} == {Pooling.SCORE}
    for index, (one, probs) in enumerate(zip(reply["data"], expected, strict=True)):
        assert one["probs"] == pytest.approx(probs)
        assert (one["index"], one["num_classes"]) == (index, 8)
        assert one["label"] == f"LABEL_{int(np.argmax(probs))}"
    num_tokens = sum(len(s.prompt) for s in driver.requests[-1].sequences)
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == num_tokens
    raw = post(http, path, **BASE, input="the fox", use_activation=False)
    assert raw["data"][0]["probs"] == pytest.approx(logits(driver)[0])


def test_loraxs_form_and_client(server: Server, http: httpx.Client, driver: FakeDriver) -> None:
    labels = tuple("abcdefgh")
    driver.info = replace(driver.info, task=ModelTask(TaskKind.CLASSIFY, labels))
    client = Client(server.url)
    found = client.classify("the fox").entities or []
    probs = softmax(logits(driver)[0])
    order = np.argsort(probs)[::-1]
    assert [one["entity_group"] for one in found] == [labels[index] for index in order]
    assert [one["score"] for one in found] == pytest.approx([probs[index] for index in order])
    assert {(one["word"], one["start"], one["end"]) for one in found} == {("the fox", 0, 7)}
    several = client.classify_batch(["the fox", "fox"])
    assert [len(one.entities or []) for one in several] == [8, 8]
    post(http, "/classify", inputs="fox", parameters={"adapter_id": "poet"})
    assert driver.requests[-1].adapter is not None
    assert http.get("/info").json()["model_pipeline_tag"] == "text-classification"


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_pairs(http: httpx.Client, driver: FakeDriver, path: str) -> None:
    reply = post(http, path, **JUDGE, text_1="the", text_2=["fox", "lazy dog"])
    expected = [sigmoid(row[0]) for row in logits(driver)]
    assert [one["score"] for one in reply["data"]] == pytest.approx(expected)
    pairs = [driver.tokenizer.encode("the", second).ids for second in ("fox", "lazy dog")]
    assert [s.prompt for s in driver.requests[-1].sequences] == pairs
    post(http, path, **JUDGE, queries=["the", "a"], documents=["fox", "dog"])
    assert len(driver.requests[-1].sequences) == 2
    reply = http.post(path, json={**JUDGE, "text_1": ["a", "b"], "text_2": ["fox"]})
    assert reply.status_code in (400, 422)
    assert "as many" in reply.text


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_the_best_documents(http: httpx.Client, driver: FakeDriver, path: str) -> None:
    documents = ["the fox", {"text": "lazy dog"}, "the dog", "fox"]
    texts = ["the fox", "lazy dog", "the dog", "fox"]
    reply = post(http, path, **JUDGE, query="the", documents=documents, top_n=3)
    expected = [sigmoid(row[0]) for row in logits(driver)]
    order = sorted(range(4), key=lambda index: -expected[index])[:3]
    assert [one["index"] for one in reply["results"]] == order
    assert [one["document"]["text"] for one in reply["results"]] == [texts[i] for i in order]
    found = [one["relevance_score"] for one in reply["results"]]
    assert found == pytest.approx([expected[index] for index in order])
    bare = post(http, path, **JUDGE, query="the", documents=texts, return_documents=False)
    assert len(bare["results"]) == 4
    assert not any("document" in one for one in bare["results"])


def test_an_embedding_model_scores_by_the_cosine(http: httpx.Client, driver: FakeDriver) -> None:
    driver.info = replace(driver.info, task=ModelTask(TaskKind.EMBED, pooling=Pooling.CLS))
    reply = post(http, "/v1/rerank", model="", query="the", documents=["fox", "dog", "the"])
    sequences = driver.requests[-1].sequences
    assert [len(sequences), sequences[0].sampling.pooling] == [3, Pooling.CLS]
    vectors = np.array(logits(driver))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    by_index = {one["index"]: one["relevance_score"] for one in reply["results"]}
    expected = [vectors[0] @ vectors[1], vectors[0] @ vectors[2], 1.0]
    assert [by_index[index] for index in range(3)] == pytest.approx(expected)
    assert post(http, "/v1/embeddings", model="", input="the")["data"][0]["index"] == 0
    assert driver.requests[-1].sequences[0].sampling.pooling is Pooling.CLS


def test_pooling_gives_what_the_model_is_for(http: httpx.Client, driver: FakeDriver) -> None:
    reply = post(http, "/pooling", **BASE, input="fox")
    assert driver.requests[-1].sequences[0].sampling.pooling is Pooling.MEAN
    assert math.hypot(*reply["data"][0]["data"]) == pytest.approx(1)
    reply = post(http, "/pooling", **BASE, input="fox", task="classify")
    assert reply["data"][0]["data"] == pytest.approx(softmax(logits(driver)[0]))


@pytest.mark.parametrize(
    ("task", "name", "expected"),
    [
        (ModelTask(), "base", "softmax"),
        (ModelTask(problem_type="multi_label_classification"), "base", "sigmoid"),
        (ModelTask(problem_type="regression"), "base", "none"),
        (ModelTask(), "local:judge", "sigmoid"),
    ],
)
def test_the_activation_is_transformers(task: ModelTask, name: str, expected: str) -> None:
    assert task.activation(1 if "judge" in name else 8) == ScoreActivation(expected)


def test_padding_at_the_end_is_not_read(http: httpx.Client, driver: FakeDriver) -> None:
    driver.info = replace(driver.info, task=ModelTask(pad_token_id=3))
    reply = post(http, "/v1/classify", **BASE, input=[[5, 3, 7, 3, 3], [3, 3]])
    assert [s.prompt for s in driver.requests[-1].sequences] == [[5, 3, 7], [3]]
    assert reply["usage"]["prompt_tokens"] == 7
    post(http, "/v1/embeddings", **BASE, input=[[5, 3]], pooling="last")
    assert driver.requests[-1].sequences[0].prompt == [5, 3]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/classify", {"input": []}, "cannot be empty"),
        ("/v1/classify", {"input": ["fox"] * 257}, "at most 256"),
        ("/v1/classify", {"input": "fox", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ("/v1/classify", {"input": "fox " * 9000}, "at most 500 tokens"),
        ("/v1/score", {"text_1": "fox", "text_2": "dog"}, "has 8 labels"),
        ("/v1/score", {"text_1": "fox", "text_2": ""}, "cannot be empty"),
        ("/v1/score", {"text_1": "fox", "text_2": ["dog"] * 257}, "at most 256"),
        ("/v1/rerank", {"query": "fox", "documents": []}, "`documents` cannot be empty"),
        ("/v1/rerank", {"query": "", "documents": ["fox"]}, "`query` cannot be empty"),
        ("/v1/rerank", {"query": "fox", "documents": ["a"], "max_chunks_per_doc": 2}, "max_chunks"),
        ("/v1/rerank", {"query": "fox", "documents": ["a"], "top_n": -1}, "top_n"),
    ],
)
def test_refusals(http: httpx.Client, path: str, body: dict[str, object], words: str) -> None:
    reply = http.post(path, json={**BASE, **body})
    assert reply.status_code == 400, reply.text
    assert words in reply.json()["error"]["message"]


def test_a_model_without_a_head_is_named(http: httpx.Client, driver: FakeDriver) -> None:
    driver.faults[None] = Failed(ErrorKind.VALIDATION, "Text generation models don't support it")
    reply = http.post("/classify", json={"inputs": "fox"})
    assert (reply.status_code, reply.json()["error_type"]) == (422, "validation")
