"""OpenAI's own client, unmodified, against files and batches."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest

from configs.api import ApiConfig, KeyConfig
from configs.batches import BatchesConfig
from deployments.batch_runner.requests import sender
from deployments.batch_runner.runner import BatchRunner
from deployments.ingress.batches.store import BatchStore, owner_of
from deployments.ingress.generation.engine import IngressSettings
from tests.deployments.batch_runner.world import CHAT, PATIENCE_S, in_a_hurry, line
from tests.deployments.ingress.conftest import Server

LINES = "\n".join(json.dumps(line(id)) for id in "abc").encode()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> IngressSettings:
    """Batches, and two keys."""
    monkeypatch.setenv("ONE", "sk-1")
    monkeypatch.setenv("TWO", "sk-2")
    keys = (KeyConfig(name="one", env="ONE"), KeyConfig(name="two", env="TWO"))
    kept = BatchesConfig(storage=str(tmp_path), max_file_bytes=4096, max_files=3, max_open=2)
    return IngressSettings(api=ApiConfig(keys=keys), batches=kept)


def client_of(server: Server, key: str = "sk-1") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def client(server: Server, settings: IngressSettings) -> Iterator[openai.OpenAI]:
    server.fresh_app(settings)
    with client_of(server) as client:
        yield client


@pytest.fixture
def _runner(
    server: Server,
    settings: IngressSettings,
    client: openai.OpenAI,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """A runner over the same storage, on the server's event loop."""
    in_a_hurry(monkeypatch)

    async def run() -> None:
        app = server.app
        await BatchRunner(BatchStore(settings.batches), partial(sender, app), 10**6).run()

    running = asyncio.run_coroutine_threadsafe(run(), server.loop)
    yield
    running.cancel()


def test_files_are_kept_listed_read_and_deleted(client: openai.OpenAI) -> None:
    made = client.files.create(
        file=("in.jsonl", LINES), purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )  # fmt: skip
    assert (made.filename, made.bytes, made.purpose) == ("in.jsonl", len(LINES), "batch")
    assert made.expires_at == made.created_at + 3600
    other = client.files.create(file=("other.jsonl", b"{}"), purpose="batch")
    assert [each.id for each in client.files.list()] == [other.id, made.id]
    assert [each.id for each in client.files.list(limit=1, order="asc")] == [made.id, other.id]
    with pytest.raises(openai.BadRequestError, match="`limit`: Input should be greater"):
        client.files.list(limit=0)
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == LINES
    assert client.files.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match=made.id):
        client.files.retrieve(made.id)


@pytest.mark.usefixtures("_runner")
def test_a_batch_from_its_file_to_its_results(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", LINES), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"run": "7"}
    )
    assert (made.status, made.metadata) == ("validating", {"run": "7"})
    for _ in range(round(PATIENCE_S / 0.05)):
        batch = client.batches.retrieve(made.id)
        if batch.status == "completed":
            break
        assert httpx.get(str(client.base_url) + "models").status_code == 401  # It serves others.
    assert batch.request_counts is not None
    assert batch.request_counts.completed == batch.request_counts.total == 3
    assert batch.output_file_id is not None
    text = client.files.content(batch.output_file_id).text
    assert {json.loads(each)["custom_id"] for each in text.splitlines()} == {"a", "b", "c"}
    assert [each.id for each in client.batches.list()] == [made.id]


def test_a_key_sees_its_own_files_and_batches_only(client: openai.OpenAI, server: Server) -> None:
    file = client.files.create(file=("in.jsonl", LINES), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    with client_of(server, "sk-2") as other:
        assert not [*other.files.list(), *other.batches.list()]
        for call in (
            lambda: other.files.retrieve(file.id),
            lambda: other.files.content(file.id),
            lambda: other.files.delete(file.id),
            lambda: other.batches.retrieve(batch.id),
            lambda: other.batches.cancel(batch.id),
            lambda: other.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h"
            ),
            lambda: other.files.retrieve("..%2F..%2Fopen"),
            lambda: other.files.retrieve("file-" + "0" * 27 + "/"),
        ):
            with pytest.raises(openai.NotFoundError):
                call()


def test_a_batch_is_cancelled(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", LINES), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert client.batches.cancel(made.id).status == "cancelling"


def test_what_strangers_send_is_bounded(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError, match="longer than 69632") as too_long:
        client.files.create(file=("in.jsonl", b"x" * 200_000), purpose="batch")
    assert too_long.value.status_code == 413
    for _ in range(3):
        file = client.files.create(file=("in.jsonl", LINES), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="delete some"):
        client.files.create(file=("in.jsonl", LINES), purpose="batch")
    for _ in range(2):
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.RateLimitError, match="have not ended"):
        client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def test_wrong_fields_are_refused_by_name(client: openai.OpenAI) -> None:
    def refused(path: str, **fields: object) -> str:
        with pytest.raises(openai.BadRequestError) as error:
            client.post(path, body=fields, cast_to=object)
        return str(error.value)

    batch = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}
    assert "`endpoint`" in refused("/batches", **{**batch, "endpoint": "/v1/adapters"})
    assert "`completion_window`" in refused("/batches", **{**batch, "completion_window": "1h"})
    assert "`metadata" in refused("/batches", **batch, metadata={"a": "b" * 513})
    with pytest.raises(openai.BadRequestError, match="`purpose`"):
        client.files.create(file=("in.jsonl", LINES), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="expires_after"):
        client.files.create(
            file=("in.jsonl", LINES), purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 1},
        )  # fmt: skip


def test_a_storage_that_fails_answers_503(client: openai.OpenAI, tmp_path: Path) -> None:
    (tmp_path / owner_of("one")).write_bytes(b"")  # No folder can be made here, as on a full disk.
    with pytest.raises(openai.InternalServerError, match="storage of files") as refused:
        client.files.create(file=("in.jsonl", LINES), purpose="batch")
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) > 0


def test_without_a_storage_both_are_off(server: Server) -> None:
    server.fresh_app(replace(IngressSettings(), batches=BatchesConfig()))
    with client_of(server) as client, pytest.raises(openai.BadRequestError, match="storage"):
        client.files.list()
