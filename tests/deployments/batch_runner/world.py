"""A store, an application over a fake driver, and a runner of batches, in one process."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import pytest

from configs.api import ApiConfig
from configs.batches import BatchesConfig
from deployments.batch_runner import runner, work
from deployments.batch_runner.requests import LineReply, SendRequest, sender
from deployments.batch_runner.runner import BatchRunner
from deployments.contract import ReplyAddress
from deployments.ingress.app import build_app
from deployments.ingress.batches.records import BatchRecord, BatchStatus
from deployments.ingress.batches.store import BatchStore, owner_of
from deployments.ingress.generation.engine import IngressSettings
from deployments.ingress.generation.frames import RequestInboxes
from tests.fakes import FakeDriver, engine_info, write_tokenizer

CHAT: Final = "/v1/chat/completions"
OWNER = owner_of("")
PATIENCE_S = 120.0


class World:
    """One storage; `runner()` starts a server process anew over it."""

    def __init__(self, folder: Path, storage: str | None = None, **config: Any) -> None:
        self.tokens = folder / "tokens"
        self.tokens.mkdir()
        self.tokenizer = write_tokenizer(self.tokens)
        self.config = BatchesConfig(storage=storage or str(folder / "kept"), **config)
        self.now = 1_000_000.0
        self.store = BatchStore(self.config, lambda: self.now)
        self.driver = self._driver()
        self.api = ApiConfig()
        self.attempts = 0

    def _driver(self) -> FakeDriver:
        driver = FakeDriver(engine_info(self.tokens, self.tokenizer), self.tokenizer)
        driver.replies[None] = "The fox."
        return driver

    def file(self, lines: list[Any], owner: str = OWNER) -> str:
        """Keep a file of these lines; its id."""
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        return self.store.add_file(owner, io.BytesIO(text.encode()), "in.jsonl").id

    def batch(self, lines: list[Any], key: str = "", **fields: Any) -> str:
        """Make a batch of these lines; its id."""
        owner, now = owner_of(key), self.store.now
        record = BatchRecord(
            id=self.store.new_batch_id(),
            endpoint=fields.get("endpoint", CHAT),
            input_file_id=self.file(lines, owner),
            created_at=now,
            expires_at=now + 86_400,
        )
        self.store.add_batch(owner, key, record, None)
        return record.id

    def record(self, id: str, owner: str = OWNER) -> BatchRecord:
        return self.store.batch(owner, id)

    def results(self, file: str | None, owner: str = OWNER) -> dict[str, Any]:
        """The lines of an output by custom_id, each there once."""
        assert file is not None
        with self.store.content(owner, file) as stream:
            lines = [json.loads(line) for line in stream.read().splitlines()]
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines)
        return found

    @asynccontextmanager
    async def running(
        self, replies: int | None = None, refuses: Callable[[int], bool] = lambda _: False
    ) -> AsyncIterator[BatchRunner]:
        """A new server process over the storage; it ends like a killed one.

        replies: how many requests it answers before it hangs; None: all.
        refuses: whether it refuses the request of this number, from 1 over all processes.
        """
        inboxes, address = RequestInboxes(), ReplyAddress("127.0.0.1", 1, "hush")
        self.driver.deliver = inboxes.deliver
        settings = IngressSettings(api=self.api, batches=self.config)
        app = build_app(self.driver, inboxes, lambda: address, settings)
        async with app.router.lifespan_context(app):
            sends = partial(_answering, partial(sender, app), replies)
            counts = partial(self._counting, sends, refuses)
            made = BatchRunner(self.store, counts, self.api.max_body_bytes)
            task = asyncio.create_task(made.run())
            try:
                yield made
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _counting(
        self, make: Callable[[str], SendRequest], refuses: Callable[[int], bool], key: str
    ) -> SendRequest:
        send = make(key)

        async def sends(path: str, body: bytes) -> LineReply:
            self.attempts += 1
            if refuses(self.attempts):
                return LineReply(429, b"", 0.01)
            return await send(path, body)

        return sends

    async def until(self, id: str, status: BatchStatus, owner: str = OWNER) -> BatchRecord:
        async with asyncio.timeout(PATIENCE_S):
            while (record := self.record(id, owner)).status != status:
                assert record.status not in ("failed", "cancelled", "expired"), record
                await asyncio.sleep(0.01)
        return record


def _answering(make: Callable[[str], SendRequest], replies: int | None, key: str) -> SendRequest:
    """Sends so many requests; the others get no reply."""
    send, sent = make(key), count()

    async def sends(path: str, body: bytes) -> LineReply:
        if replies is not None and next(sent) >= replies:
            await asyncio.Event().wait()
        return await send(path, body)

    return sends


async def when(condition: Callable[[], object]) -> None:
    """Wait until it holds."""
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it did not come to that")


def line(id: str, **body: Any) -> dict[str, Any]:
    """One request of a batch."""
    content = {"model": "tiny", "messages": [{"role": "user", "content": id}], **body}
    return {"custom_id": id, "method": "POST", "url": CHAT, "body": content}


def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at batches and write parts all the time."""
    monkeypatch.setattr(runner, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(work, "_PART_SECONDS", 0.02)
