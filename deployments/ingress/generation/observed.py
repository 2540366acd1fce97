"""Counts every request once in the metrics: succeeded, failed, or dropped by its client."""

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from deployments.contract import Completion
from deployments.ingress.adapter_names.references import listed_reference
from deployments.ingress.generation.engine import EngineClient, GenerationJob
from deployments.ingress.generation.reply_headers import safe
from deployments.ingress.http.errors import ERROR_SHAPES, RequestError
from deployments.ingress.http.sse import ClientGone
from deployments.observability.lorax_metrics import BASE, RequestRecord

logger = logging.getLogger("loray.ingress")


class RequestObserver:
    """Measures and counts one request, from its call of the driver on."""

    def __init__(self, engine: EngineClient, job: GenerationJob) -> None:
        self._metrics = engine.metrics
        self._job = job
        self._submitted = time.monotonic()
        adapter = job.request.adapter
        source = engine.settings.default_source
        self._adapter = None if adapter is None else listed_reference(adapter, source)

    def ended(self, completion: Completion, lengths: Sequence[int]) -> RequestRecord:
        """Count a success; returns its times and lengths. lengths: of the sequences, in tokens."""
        sequences, outcomes = self._job.request.sequences, completion.sequences
        generated = sum(lengths)
        total = time.monotonic() - self._job.started
        validation = self._submitted - self._job.started
        queue = max(outcome.queue_seconds for outcome in outcomes)
        inference = max(0.0, total - validation - queue)
        record = RequestRecord(
            total=total,
            validation=validation,
            queue=queue,
            inference=inference,
            per_token=inference / max(1, generated),
            first_token=validation + max(outcome.first_token_seconds for outcome in outcomes),
            input_length=sum(len(s.prompt) for s in sequences[:: self._job.choices]),
            max_new_tokens=max(s.stopping.max_new_tokens for s in sequences),
            generated_tokens=generated,
            skipped_tokens=sum(
                bisect_left(outcome.skipped, length)
                for outcome, length in zip(outcomes, lengths, strict=True)
            ),
        )
        self._metrics.succeeded(self._adapter, record)
        _log_end(self._name, record)
        return record

    def failed(self, err: str) -> None:
        """Count a failure; err: its label in the metrics."""
        self._metrics.failed(err, self._adapter)
        fields = {"adapter": self._name, "error_type": err}
        logger.info("request over %s failed: %s", self._name, err, extra=fields)

    @property
    def _name(self) -> str:
        """The adapter's name for logs; escaped, as a client could put line breaks into it."""
        return BASE if self._adapter is None else safe(self._adapter)


def _log_end(adapter: str, record: RequestRecord) -> None:
    fields = {
        "adapter": adapter,
        "prompt_tokens": record.input_length,
        "generated_tokens": record.generated_tokens,
        "total_seconds": round(record.total, 6),
        "queue_seconds": round(record.queue, 6),
        "first_token_seconds": round(record.first_token, 6),
    }
    message = "request over %s: %d prompt and %d generated tokens, %.3f s, %.3f of it queued"
    values = (adapter, record.input_length, record.generated_tokens, record.total, record.queue)
    logger.info(message, *values, extra=fields)


@contextmanager
def observe(engine: EngineClient, job: GenerationJob) -> Iterator[RequestObserver]:
    """Observe a request. Internal errors are counted where their reply is written."""
    observer = RequestObserver(engine, job)
    try:
        yield observer
    except RequestError as error:
        error.counted = True
        observer.failed(ERROR_SHAPES[error.kind].metric)
        raise
    except (ClientGone, asyncio.CancelledError, GeneratorExit):
        observer.failed("dropped")
        raise
