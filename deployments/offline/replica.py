"""One replica of an offline batch: an engine that Ray Data calls with batches of lines."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import placement_group

from configs.batches import BatchesConfig
from configs.serve import ServeConfig
from deployments.batch_runner.requests import SendRequest, send_until_done, sender
from deployments.ingress.batches.lines import (
    read_line,
    result_of,
    unanswered_line,
)
from deployments.ingress.batches.records import LineFault
from deployments.ingress.generation.engine import IngressSettings
from deployments.ingress.text.tokenizer import ModelTokenizer
from deployments.offline.application import engine_app
from deployments.rank.group import RayRanks
from sources.model import fetch_model


class OfflineReplica:
    """Holds one engine, with ranks in a placement group of its own.

    Ray Data makes one for each actor, and may call it from several threads at once.
    """

    def __init__(self, config: ServeConfig, rank_bundles: Sequence[dict[str, float]]) -> None:
        """Start the ranks and load the model."""
        self._config = config
        self._slots = asyncio.Semaphore(2 * config.engine.limits.max_running)
        self._life = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        # The first bundle is the driver's, which is this actor.
        bundles = placement_group([{"CPU": 0.001}, *rank_bundles], config.placement.value)
        ray.get(bundles.ready())
        folder = str(fetch_model(config.engine.model))
        group = RayRanks(config.engine, folder, bundles, config.observability.log_format)
        self._send = self._run(self._start(group))

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Answer the lines in `text`; each result is a line of the output."""
        return {"result": self._run(self._answer(list(batch["text"])))}

    async def _start(self, group: RayRanks) -> SendRequest:
        engine = self._config.engine
        settings = IngressSettings(
            default_source=engine.adapters.default_source,
            max_stop_sequences=engine.limits.max_stop_sequences,
            max_best_of=engine.limits.max_best_of,
            embeddings=self._config.embeddings,
            batches=BatchesConfig(),
            tool_parser=engine.model.tool_parser,
            reasoning_parser=engine.model.reasoning_parser,
            read_text=partial(
                ModelTokenizer.load, trust_remote_code=engine.model.trust_remote_code
            ),
        )
        app = engine_app(engine, group, settings)
        await self._life.enter_async_context(app.router.lifespan_context(app))
        return sender(app, "")

    async def _answer(self, lines: Sequence[str]) -> list[str]:
        return await asyncio.gather(*(self._answer_line(line.encode()) for line in lines))

    async def _answer_line(self, raw: bytes) -> str:
        line = read_line(0, raw, self._config.api.max_body_bytes)
        if isinstance(line, LineFault):
            return unanswered_line("", line.code, line.message).decode()
        async with self._slots:
            reply = await send_until_done(self._send, line.url, line.body)
        return result_of(line, reply.status, reply.body)[1].decode()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
