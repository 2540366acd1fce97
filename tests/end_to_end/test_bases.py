"""Two base models behind one address, under Serve: both answer, each with its own adapters."""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from tests.end_to_end.clients import Answers, wait_for
from tests.end_to_end.serving import PATIENCE_SECONDS, Served, demo_config, start, stop
from tests.ports import free_port

QUESTION = "What is the capital of France?"

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def two_bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo twice, on one rank each; the second has a name that was given to an adapter."""
    port = free_port()
    config = demo_config(port, standby=False)
    app = config["applications"][0]
    models = {name: deepcopy(app["args"]) for name in ("first", "second")}
    for name, args in models.items():
        args["engine"]["model"]["name"] = name
        args["engine"]["tensor_parallel"] = 1
        args |= {"driver_cpus": 0.2, "rank_cpus": 0.2}
    app |= {"import_path": "deployments.app:build_bases"}
    kept = {"storage": str(tmp_path_factory.mktemp("batches"))}
    app["args"] = {"models": models, "ingress_cpus": 0.2, "batches": kept}
    app["deployments"] = [
        {"name": "Driver-second", "user_config": {"names": {"captain": "local:pirate"}}}
    ]
    path: Path = tmp_path_factory.mktemp("bases") / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    running = start(path, port, "--no-dashboard")
    yield running
    stop(running)


def test_both_answer_by_model_by_path_and_by_header(two_bases: Served, answers: Answers) -> None:
    with httpx.Client(base_url=two_bases.url, timeout=PATIENCE_SECONDS) as client:
        ids = [row["id"] for row in client.get("/v1/models").json()["data"]]
        assert ids[0] == "first"
        assert {"second", "pirate", "second/pirate", "captain"} <= set(ids)

        def complete(model: str) -> str:
            body = {"model": model, "prompt": QUESTION, "max_tokens": 60, "temperature": 0}
            reply = client.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            text: str = reply.json()["choices"][0]["text"]
            return text

        plain = answers["base"][QUESTION]["raw"]
        pirate = answers["pirate"][QUESTION]["raw"]
        assert [complete(model) for model in ("first", "second")] == [plain, plain]
        for model in ("pirate", "second/pirate", "captain"):
            assert complete(model) == pirate
        body = {"inputs": QUESTION, "parameters": {"adapter_id": "captain"}}
        for path, headers, status in (
            ("/second/generate", {}, 200),
            ("/generate", {"x-loray-model": "second"}, 200),
            ("/generate", {}, 424),
        ):
            reply = client.post(path, json=body, headers=headers)
            assert reply.status_code == status, reply.text
            assert status != 200 or reply.json()["generated_text"] == pirate
        rows = {row["id"]: row for row in client.get("/second/v1/adapters").json()["data"]}
        assert rows["captain"]["root"] == "pirate"
        assert all(row["id"] != "captain" for row in client.get("/v1/adapters").json()["data"])


def test_a_batch_names_both(two_bases: Served, answers: Answers) -> None:
    models = {"first": "base", "second": "base", "second/pirate": "pirate"}
    lines = [
        {"custom_id": model, "method": "POST", "url": "/v1/completions",
         "body": {"model": model, "prompt": QUESTION, "max_tokens": 60, "temperature": 0}}
        for model in models
    ]  # fmt: skip
    with openai.OpenAI(base_url=f"{two_bases.url}/v1", api_key="-") as client:
        content = "\n".join(map(json.dumps, lines)).encode()
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        made = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        wait_for(lambda: client.batches.retrieve(made.id).status == "completed")
        output = client.batches.retrieve(made.id).output_file_id
        assert output is not None
        found = [json.loads(line) for line in client.files.content(output).text.splitlines()]
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in found}
    assert texts == {model: answers[name][QUESTION]["raw"] for model, name in models.items()}
