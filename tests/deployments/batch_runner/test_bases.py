"""Batches in front of several base models: each line goes to the base that its model names."""

import asyncio
import hashlib
import json
from functools import partial
from pathlib import Path

import httpx
import pytest

from configs.api import ApiConfig
from configs.batches import BatchesConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.batch_runner.requests import sender
from deployments.batch_runner.runner import BatchRunner
from deployments.ingress.batches.records import ENDED
from deployments.ingress.batches.store import BatchStore
from tests.deployments.batch_runner.world import CHAT, PATIENCE_S, in_a_hurry, line, when
from tests.deployments.ingress.test_bases import Bases


def _keys(*names: str) -> ApiConfig:
    keys = [{"name": n, "sha256": hashlib.sha256(n.encode()).hexdigest()} for n in names]
    return ApiConfig.model_validate({"keys": keys})


async def _results(client: httpx.AsyncClient, key: str, lines: list[str]) -> dict[str, int]:
    """The status of each line's reply, after a batch of these lines from its file to its end."""
    client.headers["authorization"] = f"Bearer {key}"
    files = {"file": ("in.jsonl", "\n".join(lines))}
    file = (await client.post("/v1/files", data={"purpose": "batch"}, files=files)).json()
    body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    id = (await client.post("/v1/batches", json=body)).json()["id"]
    async with asyncio.timeout(PATIENCE_S):
        while True:
            batch = (await client.get(f"/v1/batches/{id}")).json()
            if batch["status"] in ENDED:
                break
            await asyncio.sleep(0.01)
    found = {}
    for name in filter(None, (batch["output_file_id"], batch["error_file_id"])):
        text = (await client.get(f"/v1/files/{name}/content")).text
        for result in map(json.loads, text.splitlines()):
            found[result["custom_id"]] = result["response"]["status_code"]
    return found


def test_a_line_waits_for_a_base_that_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_hurry(monkeypatch)
    kept = BatchesConfig(storage=str(tmp_path / "kept"))
    bases = Bases(tmp_path, kept)
    large = bases.drivers["large"]
    large.broken = RuntimeError("it starts")

    async def story() -> None:
        transport = httpx.ASGITransport(app=bases.front)
        async with (
            bases.front.router.lifespan_context(bases.front),
            httpx.AsyncClient(transport=transport, base_url="http://front") as client,
        ):
            runner = BatchRunner(BatchStore(kept), partial(sender, bases.front), 1 << 20)
            running = asyncio.create_task(runner.run())
            try:
                lines = [json.dumps(line("sql", model="sql", max_tokens=3))]
                results = asyncio.create_task(_results(client, "", lines))
                await when(lambda: large.descriptions)
                large.broken = None
                assert await results == {"sql": 200}
                assert bases.drivers["small"].requests == []
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    asyncio.run(story())


def test_lines_go_to_the_bases_that_they_name_under_their_own_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_hurry(monkeypatch)
    kept = BatchesConfig(storage=str(tmp_path / "kept"))
    bases = Bases(tmp_path, kept, small=_keys("both"), large=_keys("both", "one"))
    models = ("small", "large/poet", "sql")
    lines = [json.dumps(line(model, model=model, max_tokens=3)) for model in models]

    async def story() -> None:
        transport = httpx.ASGITransport(app=bases.front)
        async with (
            bases.front.router.lifespan_context(bases.front),
            httpx.AsyncClient(transport=transport, base_url="http://front") as client,
        ):
            runner = BatchRunner(BatchStore(kept), partial(sender, bases.front), 1 << 20)
            running = asyncio.create_task(runner.run())
            try:
                assert await _results(client, "both", lines) == dict.fromkeys(models, 200)
                small, large = (driver.requests for driver in bases.drivers.values())
                assert [each.adapter for each in small] == [None]
                poet, sql = (AdapterReference(AdapterSource.LOCAL, x) for x in ("poet", "sql"))
                assert {each.adapter for each in large} == {poet, sql}
                assert all(each.background for each in (*small, *large))
                # A key of one base has that base alone.
                expected = {"small": 401, "large/poet": 200, "sql": 200}
                assert await _results(client, "one", lines) == expected
                assert len(small) == 1
                client.headers["authorization"] = "Bearer unknown"
                assert (await client.get("/v1/files")).status_code == 401
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    asyncio.run(story())
