"""Every request in the metrics once: when it ended well, failed, or was left by its client."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from deployments.contract import Completion
from deployments.ingress.engine import Engine, Job
from deployments.ingress.errors import SPELLINGS, RequestError
from deployments.ingress.headers import Times
from deployments.ingress.references import listed_reference
from deployments.ingress.sse import ClientGone
from deployments.observability.lorax_metrics import RequestRecord


class Watch:
    """One request from its call of the driver on."""

    def __init__(self, engine: Engine, job: Job) -> None:
        """The call begins now."""
        self._metrics = engine.metrics
        self._job = job
        self._submitted = time.monotonic()
        adapter = job.request.adapter
        source = engine.settings.default_source
        self._adapter = None if adapter is None else listed_reference(adapter, source)

    def ended(self, completion: Completion, generated: int) -> Times:
        """The request ended well, after so many tokens; returns where its time went."""
        times = Times.of(self._job, completion, self._submitted)
        sequences = self._job.request.sequences
        record = RequestRecord(
            total=times.total,
            validation=times.validation,
            queue=times.queue,
            inference=times.inference,
            per_token=times.inference / max(1, generated),
            first_token=times.first,
            input_length=sum(len(s.prompt) for s in sequences[:: self._job.choices]),
            max_new_tokens=max(s.stopping.max_new_tokens for s in sequences),
            generated_tokens=generated,
        )
        self._metrics.succeeded(self._adapter, record)
        return times

    def failed(self, err: str) -> None:
        """The request failed."""
        self._metrics.failed(err, self._adapter)


@contextmanager
def observed(engine: Engine, job: Job) -> Iterator[Watch]:
    """Watch a request; defects are counted where they are answered."""
    watch = Watch(engine, job)
    try:
        yield watch
    except RequestError as error:
        error.counted = True
        watch.failed(SPELLINGS[error.kind].metric)
        raise
    except (ClientGone, asyncio.CancelledError, GeneratorExit):
        watch.failed("dropped")
        raise
