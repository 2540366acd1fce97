"""Encoders over HTTP, beside sentence-transformers on the folders that it saved."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder

from configs.engine import EngineConfig
from configs.wire.adapters import AdapterSource
from deployments.ingress.generation.engine import IngressSettings
from deployments.offline.application import engine_app
from deployments.rank.local import LocalRanks
from tests.checkpoints_encoders import (
    LENGTH,
    VOCAB,
    encoder_truth,
    sentence_embeddings,
    write_encoder,
    write_encoder_adapter,
    write_sentence_transformer,
    write_word_tokenizer,
)
from tests.modeling.prompts import prompt_of
from tests.oracle import TOLERANCE
from tests.served import served

TYPES = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"]}
LIMIT = LENGTH // 2


def text_of(num_words: int) -> str:
    return " ".join(f"w{max(id, 3)}" for id in prompt_of(num_words, VOCAB))


TEXTS = [text_of(length) for length in (3, LIMIT - 2, 9, 1, 14)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT, with a head and without."""
    root = tmp_path_factory.mktemp("encoders")
    for name, num_labels in (("base", 0), ("head", 1)):
        write_encoder(root / name, "bert", num_labels)
        write_word_tokenizer(root / name, **TYPES)
    return root


def client_of(model: Path) -> Iterator[httpx.Client]:
    config = EngineConfig.model_validate(
        {
            "model": {"id": str(model)},
            "device": "cpu",
            "cache": {"block_size": 4},
            "limits": {"max_running": 8, "max_step_tokens": 40},
            "adapters": {"local_roots": [str(model.parent)], "default_source": "local"},
        }
    )
    app = engine_app(
        config, LocalRanks(config), IngressSettings(default_source=AdapterSource.LOCAL)
    )
    with served(app) as url, httpx.Client(base_url=url, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def embedder(root: Path) -> Iterator[httpx.Client]:
    """It embeds by its first token, to the length 1."""
    write_sentence_transformer(root / "embedder", root / "base", "cls", normalize=True)
    write_encoder_adapter(root / "own", root / "base", "bert", "FEATURE_EXTRACTION")
    yield from client_of(root / "embedder")


@pytest.fixture(scope="module")
def reranker(root: Path) -> Iterator[httpx.Client]:
    """A cross-encoder without a sigmoid."""
    whole = CrossEncoder(str(root / "head"), activation_fn=torch.nn.Identity(), device="cpu")
    whole.save_pretrained(str(root / "reranker"))
    yield from client_of(root / "reranker")


def post(client: httpx.Client, path: str, **body: object) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("adapter", [None, "own"])
def test_embeddings_are_sentence_transformers(
    embedder: httpx.Client, root: Path, adapter: str | None
) -> None:
    truth = sentence_embeddings(
        root / "embedder", None if adapter is None else root / adapter, TEXTS
    )
    reply = post(embedder, "/v1/embeddings", model=adapter or "", input=TEXTS)
    found = [row["embedding"] for row in reply["data"]]
    np.testing.assert_allclose(found, truth, atol=TOLERANCE)
    parameters = {} if adapter is None else {"adapter_id": adapter}
    one = post(embedder, "/embed", inputs=TEXTS[0], parameters=parameters)
    np.testing.assert_allclose(one["embeddings"], truth[0], atol=TOLERANCE)
    reply = post(embedder, "/v1/score", model=adapter or "", text_1=TEXTS[0], text_2=TEXTS)
    scores = [row["score"] for row in reply["data"]]
    np.testing.assert_allclose(scores, truth @ truth[0], atol=TOLERANCE)


def test_what_an_embedding_model_refuses(embedder: httpx.Client) -> None:
    generate = embedder.post("/generate", json={"inputs": TEXTS[0]})
    assert generate.status_code == 422
    assert "Embedding models don't support text generation" in generate.json()["error"]
    classify = embedder.post("/v1/classify", json={"input": TEXTS[0]})
    assert "Embedding models don't support classification" in classify.text
    long = embedder.post("/v1/embeddings", json={"model": "", "input": text_of(LIMIT - 1)})
    assert long.status_code == 400
    assert f"has {LIMIT + 1} tokens; at most {LIMIT}" in long.text
    assert embedder.get("/info").json()["model_pipeline_tag"] == "feature-extraction"


def test_scores_are_the_cross_encoders(reranker: httpx.Client, root: Path) -> None:
    oracle = CrossEncoder(str(root / "reranker"), device="cpu")
    pairs = [(TEXTS[0], text) for text in TEXTS]
    truth = oracle.predict(pairs)
    assert np.ptp(truth) > 100 * TOLERANCE
    reply = post(reranker, "/v1/score", text_1=TEXTS[0], text_2=TEXTS)
    np.testing.assert_allclose([row["score"] for row in reply["data"]], truth, atol=TOLERANCE)
    reply = post(reranker, "/v1/rerank", query=TEXTS[0], documents=TEXTS)
    order = [row["corpus_id"] for row in oracle.rank(TEXTS[0], TEXTS)]
    assert [row["index"] for row in reply["results"]] == order
    logit = post(reranker, "/v1/classify", input=[TEXTS[1]], use_activation=False)
    ids = [0, *(int(word[1:]) for word in TEXTS[1].split()), 2]
    [alone] = encoder_truth(root / "reranker", None, [ids], 0)
    assert logit["data"][0]["probs"] == pytest.approx(alone.tolist(), abs=TOLERANCE)
    assert "Classify models don't" in reranker.post("/generate", json={"inputs": "w5"}).text
