"""The document's examples against the real engine: the demo on one rank, over HTTP."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from configs.wire.adapters import AdapterSource
from deployments.ingress.generation.engine import IngressSettings
from tests.checkpoints_scores import write_score_adapter
from tests.served import demo_app, demo_config, served


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    limits = {"max_batch_total_tokens": 4096, "max_total_tokens": 512}
    adapters = demo_config().adapters.model_dump()
    # The document's examples name classifiers, which the demo does not bring.
    folder = tmp_path_factory.mktemp("classifiers")
    write_score_adapter(folder / "mood", Path("configs/demo/model"), num_labels=2)
    write_score_adapter(folder / "judge", Path("configs/demo/model"), num_labels=1)
    roots = [*adapters["local_roots"], str(folder)]
    config = demo_config(limits=limits, adapters={**adapters, "local_roots": roots})
    app = demo_app(config, IngressSettings(default_source=AdapterSource.LOCAL, loopback=True))
    with served(app) as url, httpx.Client(base_url=url, timeout=300) as client:
        yield client


# The examples of these routes name files that a client would have sent or shared before.
_WITH_FILES = frozenset({"/v1/files", "/v1/batches", "/v1/push_lora_adapter"})


def test_every_example_of_the_document_is_answered(http: httpx.Client) -> None:
    num_examples = 0
    for path, methods in http.get("/openapi.json").json()["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        if body is None or path in _WITH_FILES:
            continue
        for example in body["content"]["application/json"]["examples"].values():
            reply = http.post(path, json=example["value"])
            assert reply.status_code == 200, (path, reply.text)
            assert '"error"' not in reply.text or path == "/v1/responses", reply.text
            num_examples += 1
    assert num_examples > 15


def test_an_answer_of_the_document_is_the_demos_own(http: httpx.Client) -> None:
    row = http.get("/openapi.json").json()["paths"]["/generate"]["post"]
    content = row["requestBody"]["content"]["application/json"]["examples"]["example0"]["value"]
    answer = row["responses"]["200"]["content"]["application/json"]["example"]
    assert http.post("/generate", json=content).json() == answer


def test_adapters_are_merged_for_a_request(http: httpx.Client) -> None:
    question, whole = (
        "What is the capital of France?",
        "Arr! The capital of France be Paris, matey!",
    )

    def ask(**merged: object) -> tuple[str, str]:
        parameters = {"merged_adapters": merged, "max_new_tokens": 20}
        native = http.post("/generate", json={"inputs": question, "parameters": parameters})
        body = {"model": "", "prompt": question, "temperature": 0, "max_tokens": 20}
        openai = http.post("/v1/completions", json={**body, "merged_adapters": merged})
        return native.json()["generated_text"].strip(), openai.json()["choices"][0]["text"].strip()

    # Of the same adapter twice A and B grow by the sum of the weights' roots.
    assert ask(ids=["pirate"], weights=[1]) == (whole, whole)
    assert ask(ids=["pirate"] * 2, weights=[0.25] * 2) == (whole, whole)
    both = "La capitale de la France est Paris, matey!"
    assert ask(ids=["french", "pirate"], weights=[0.7, 0.7]) == (both, both)


def test_the_cache_is_bounded(http: httpx.Client) -> None:
    info = http.get("/info").json()
    assert (info["max_batch_total_tokens"], info["max_total_tokens"]) == (4096, 512)
