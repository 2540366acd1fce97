"""The demo's exact answers through HTTP, alone and together."""

import asyncio
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from deployments.observability.steps import StepRecord
from scheduler.snapshot import Snapshot
from tests.end_to_end.clients import (
    MODELS,
    Answers,
    adapter_of,
    ask_driver,
    longest_questions,
    stream_text,
    until_open,
    wait_for,
)
from tests.end_to_end.processes import ranks, stopped_processes
from tests.end_to_end.serving import PATIENCE_SECONDS, Served

QUESTION = "What is the capital of France?"

pytestmark = pytest.mark.ray


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=PATIENCE_SECONDS) as client:
        yield client


@pytest.mark.parametrize("model", MODELS)
def test_generate(client: httpx.Client, answers: Answers, model: str) -> None:
    def ask(question: str) -> None:
        body = {"inputs": question, "parameters": {"adapter_id": adapter_of(model)}}
        reply = client.post("/generate", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json() == {"generated_text": answers[model][question]["raw"]}

    alone, *together = answers[model]
    ask(alone)
    with ThreadPoolExecutor(len(together)) as threads:
        list(threads.map(ask, together))


def test_models_info_health_tokenize(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert {model["id"] for model in listed["data"]} == {"loray-demo", *MODELS[1:]}
    info = client.get("/info").json()
    assert info["model_dtype"] == "float32"
    assert client.get("/health").status_code == 200
    tokens = client.post("/tokenize", json={"inputs": "Hello"}).json()
    assert "".join(token["text"] for token in tokens[1:]) == "Hello"


@pytest.mark.parametrize("value", [b"\xff", "é".encode(), b"\x80" * 500])
def test_no_byte_of_a_header_is_a_server_error(client: httpx.Client, value: bytes) -> None:
    """Serve reads some headers before any route, and would answer with 500."""
    for name in (b"x-request-id", b"serve_multiplexed_model_id", b"x-request-timeout-seconds",
                 b"x-session-id", b"x-request-disconnect-disabled", b"traceparent"):  # fmt: skip
        for path in ("/health", "/v1/models", "/nowhere"):
            reply = client.get(path, headers=[(name, value)])
            assert (reply.status_code, name.decode() in reply.text) == (400, True)
    for name in (b"user-agent", b"cookie", b"x-hub-token", b"authorization", b"accept"):
        assert client.get("/v1/models", headers=[(name, value)]).status_code == 200


def test_ids_of_requests_come_back(client: httpx.Client) -> None:
    """Also with errors, and for ids that the client did not set."""
    ways: list[tuple[str, str, int]] = [
        ("GET", "/health", 200), ("HEAD", "/info", 200), ("POST", "/generate", 422),
        ("POST", "/v1/completions", 400), ("GET", "/nowhere", 404),
    ]  # fmt: skip
    made = set()
    for method, path, status in ways:
        own = {"x-request-id": f"mine-{status}"}
        body: dict[str, str] | None = {} if method == "POST" else None
        reply = client.request(method, path, headers=own, json=body)
        assert (reply.status_code, reply.headers["x-request-id"]) == (status, own["x-request-id"])
        reply = client.request(method, path, json=body)
        made.add(reply.headers["x-request-id"])
    assert len(made) == len(ways)


def test_a_quiet_replica_writes_its_log_lines_at_once(client: httpx.Client) -> None:
    """Serve's throughput mode would keep the first thousand."""
    id, began = uuid.uuid4().hex, time.time()
    body = {"inputs": QUESTION, "parameters": {"max_new_tokens": 1}}
    client.post("/generate", json=body, headers={"x-request-id": id}).raise_for_status()

    def is_written() -> bool:
        # Another cluster of this machine may be the latest session.
        logs = Path("/tmp/ray").glob("session_2*/logs/serve/replica_loray_Ingress_*.log")
        fresh = (log for log in logs if log.stat().st_mtime > began - 1)
        return any(id in log.read_text() for log in fresh)

    wait_for(is_written)


def test_bad_adapters_get_a_clear_4xx_in_both_dialects(client: httpx.Client) -> None:
    body = {"inputs": QUESTION, "parameters": {"adapter_id": "nobody"}}
    native = client.post("/generate_stream", json=body)
    assert native.status_code == 424
    assert native.json()["error_type"] == "generation"
    assert native.json()["code"] == "adapter_not_found"
    for stream in (False, True):
        sent = {"model": "../../model", "prompt": "Hi", "stream": stream}
        reply = client.post("/v1/completions", json=sent)
        assert reply.status_code == 404
        assert "was not found" in reply.json()["error"]["message"]


def test_64_streams_over_four_adapters_share_steps(served: Served, answers: Answers) -> None:
    """Each gets the answer that it gets alone, and the log shows that they ran together."""
    questions = longest_questions(answers, 4)
    requests = [(MODELS[i % 5], questions[i % len(questions)]) for i in range(64)]

    async def ask_all() -> list[str]:
        limits = httpx.Limits(max_connections=len(requests) + 1)
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS, limits=limits) as client:
            with stopped_processes(ranks(served)):  # until all are there
                replies = asyncio.gather(
                    *(stream_text(client, served.url, model, q) for model, q in requests)
                )
                for adapter in MODELS[1:]:
                    count = sum(model == adapter for model, _ in requests)
                    await until_open(client, served.url, adapter, count)
            return await replies

    first: list[StepRecord] = ask_driver(served, "steps")
    reply = asyncio.run(ask_all())
    assert reply == [answers[model][question]["raw"] for model, question in requests]
    records: list[StepRecord] = ask_driver(served, "steps")
    before = first[-1].step if first else 0
    log = [record for record in records if record.step > before and record.num_sampled > 1]
    mean = sum(record.num_sampled for record in log) / len(log)
    assert mean >= 16, f"mean batch {mean:.1f} over {len(log)} steps"
    assert max(record.num_adapters for record in log) >= 3


def test_requests_run_before_their_calls_are_there(
    served: Served, client: httpx.Client, answers: Answers
) -> None:
    """The answers are the same; an ingress replica's first request has no connection yet."""
    question = longest_questions(answers, 1)[0]
    for model in [*MODELS, MODELS[0]]:
        body = {"inputs": question, "parameters": {"adapter_id": adapter_of(model)}}
        reply = client.post("/generate", json=body).json()
        assert reply == {"generated_text": answers[model][question]["raw"]}
    assert ask_driver(served, "early_submits") > 0


def test_clients_that_leave_leave_nothing_open(served: Served, answers: Answers) -> None:
    question = longest_questions(answers, 1)[0]
    body = {"inputs": question, "parameters": {"max_new_tokens": 400, "ignore_eos_token": True}}

    async def leave_all() -> None:
        async def leave(client: httpx.AsyncClient) -> None:
            async with client.stream("POST", f"{served.url}/generate_stream", json=body) as reply:
                assert reply.status_code == 200
                await anext(reply.aiter_lines())

        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
            await asyncio.gather(*(leave(client) for _ in range(8)))

    asyncio.run(leave_all())

    def is_idle() -> bool:
        snapshot: Snapshot = ask_driver(served, "snapshot")
        return snapshot.running == snapshot.queued == 0

    wait_for(is_idle)


def test_an_operator_adds_and_removes_an_alias(client: httpx.Client) -> None:
    folder = Path("configs/demo/adapters/pirate").resolve()
    body = {"lora_name": "captain", "lora_path": str(folder)}
    reply = client.post("/v1/load_lora_adapter", json=body)
    assert reply.text == "Success: LoRA adapter 'captain' added successfully."
    # Without a temperature OpenAI's is 1, and one answer of a thousand is another.
    sent = {"prompt": QUESTION, "max_tokens": 8, "temperature": 0}
    replies = [
        client.post("/v1/completions", json={"model": m, **sent}).json()
        for m in ("captain", "pirate")
    ]
    assert replies[0]["choices"] == replies[1]["choices"]
    rows = {row["id"]: row for row in client.get("/v1/adapters").json()["data"]}
    assert rows["captain"]["root"] == "pirate"
    assert rows["captain"]["digest"] == rows["pirate"]["digest"]
    assert rows["pirate"]["rank"] == rows["captain"]["rank"] > 0
    gone = client.post("/v1/unload_lora_adapter", json={"lora_name": "captain"})
    assert gone.status_code == 200
    reply = client.post("/v1/completions", json={"model": "captain", **sent})
    assert reply.status_code == 404
