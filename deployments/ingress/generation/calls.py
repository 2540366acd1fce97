"""One request's call of the driver. Frames bring tokens early; the call's result has them all."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from configs.wire.sampling import FinishReason
from deployments.contract import (
    Cancelled,
    Completion,
    Ending,
    ErrorKind,
    Failed,
    GenerateRequest,
    ReplyAddress,
)
from deployments.driver_interface import Driver
from deployments.ingress.generation.frames import RequestInboxes, SequenceUpdate
from deployments.ingress.generation.resubmissions import MOST_RESUBMISSIONS, resubmission
from deployments.ingress.http.errors import EngineLost, RequestError
from deployments.ingress.text.detokenizer_state import DetokenizerState, TextPiece
from deployments.observability.tracing import INGRESS, request_span

logger = logging.getLogger("loray.ingress.calls")


class Event(NamedTuple):
    """New text of one sequence.

    rest: text after the last piece; "" before the end.
    reason: why the sequence ended; None before the end.
    stop: the stop string that ended it.
    """

    sequence: int
    pieces: list[TextPiece]
    rest: str
    reason: FinishReason | None
    stop: str | None = None

    @property
    def text(self) -> str:
        """All new text."""
        return "".join([piece.text for piece in self.pieces]) + self.rest


class EngineCall:
    """A running `Driver.generate` and the tokens that it has produced so far.

    If its driver is lost, another one goes on after the tokens that are here.

    An async context manager. Leaving it cancels a call that still runs: so a client's disconnect
    reaches the driver. completion: the result; None before the call returns.
    """

    def __init__(
        self,
        driver: Driver,
        inboxes: RequestInboxes,
        reply_to: ReplyAddress,
        request: GenerateRequest,
        frames: bool = True,
    ) -> None:
        """frames: receive frames; without, all tokens come from the completion."""
        self._driver = driver
        self._inboxes = inboxes
        self._reply_to = reply_to
        self._request = request
        self._name = request.id
        self._stops: dict[int, int] = {}
        # Opened before the call starts: the first frame may arrive before `_run` continues.
        self._inbox = inboxes.open(request.id, len(request.sequences), listen=frames)
        self._running: asyncio.Task[None] | None = None
        self._finishing: set[asyncio.Task[None]] = set()
        self.completion: Completion | None = None

    def start(self) -> None:
        """Start the call before the context is entered. Enter it, or call `close`, afterwards."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())

    async def __aenter__(self) -> "EngineCall":
        """Start the call if it does not run."""
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the call."""
        await self.close()

    async def close(self) -> None:
        """Cancel the call if it runs, and receive no more frames."""
        # First, so that no frame is stored for a request without a reader.
        self._inboxes.close(self._request.id)
        tasks = [*self._finishing, *([self._running] if self._running else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def updates(self) -> AsyncIterator[list[SequenceUpdate]]:
        """Batches of updates until every sequence has ended; a failed call raises RequestError."""
        while updates := await self._inbox.take():
            yield updates

    def fail(self, error: RequestError) -> None:
        """Make `updates` raise this error; closing the call then ends it on the driver."""
        self._inbox.fail(error)

    def finish(self, index: int, at: int) -> None:
        """Report to the driver that its text ended a sequence after `at` tokens."""
        self._stops[index] = at
        # A task, as the reader must not wait for it. Stored: asyncio has only weak references.
        task = asyncio.create_task(self._finish(index, at))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _finish(self, index: int, at: int) -> None:
        try:
            await self._driver.finish(self._request.id, index, at)
        except Exception:
            # The client's text is right; the sequence just runs on to its token limit.
            logger.warning("finish was not delivered for %s", self._request.id, exc_info=True)

    async def _run(self) -> None:
        try:
            with request_span(INGRESS, self._request) as span:
                self.completion = span.ended(await self._generate())
            self._inbox.complete(self.completion)
        except RequestError as error:
            self._inbox.fail(error)
        except asyncio.CancelledError:
            # Also if another party cancels the task: the reader must not wait forever.
            self._inbox.fail(RequestError(ErrorKind.UNAVAILABLE, "the engine cancelled the call"))
            raise
        except Exception as fault:
            # The transport has exceptions of its own; clients get a known error.
            logger.exception("generate failed for %s", self._request.id)
            message = f"the engine did not answer ({type(fault).__name__})"
            self._inbox.fail(RequestError(ErrorKind.UNAVAILABLE, message))

    async def _generate(self) -> Completion:
        """The driver's completion, of another driver where the first one was lost."""
        while True:
            try:
                return await self._driver.generate(self._request, self._reply_to)
            except EngineLost:
                if self._request.resubmissions == MOST_RESUBMISSIONS:
                    raise
                self._resubmit()

    def _resubmit(self) -> None:
        self._inbox.restart()
        request = resubmission(self._request, self._name, self._inbox, self._stops)
        self._inboxes.rename(self._request.id, request.id)
        num_tokens = sum(len(sequence.generated) for sequence in request.sequences)
        logger.warning("request %s goes on after %d tokens", request.id, num_tokens)
        self._request = request


async def events(
    call: EngineCall, detokenizers: Sequence[DetokenizerState]
) -> AsyncIterator[list[Event]]:
    """Batches of events of all sequences; RequestError if one of them fails."""
    async for updates in call.updates():
        batch = [
            event for update in updates if (event := _event(call, detokenizers, update)) is not None
        ]
        if batch:
            yield batch


def _event(
    call: EngineCall, detokenizers: Sequence[DetokenizerState], update: SequenceUpdate
) -> Event | None:
    """The event of one update; None if the client sees nothing of it."""
    detokenizer = detokenizers[update.index]
    if detokenizer.stopped:
        return None
    pieces = detokenizer.feed(update.tokens, update.logprobs, update.skipped)
    if detokenizer.stopped:
        if update.ending is None:
            # The driver does not see text, so the sequence still runs there.
            call.finish(update.index, detokenizer.num_tokens)
        stop = detokenizer.stop
        reason = FinishReason.STOP_TOKEN if stop is None else FinishReason.STOP_STRING
        return Event(update.index, pieces, "", reason, stop)
    if update.ending is None:
        return Event(update.index, pieces, "", None) if pieces else None
    reason = _reason(update.ending)
    rest = detokenizer.end()
    reason = FinishReason.STOP_STRING if detokenizer.stopped else reason
    return Event(update.index, pieces, rest, reason, detokenizer.stop)


def _reason(ending: Ending) -> FinishReason:
    """The reason of a finished sequence; RequestError for other endings."""
    if isinstance(ending, Failed):
        raise RequestError.of(ending)
    if isinstance(ending, Cancelled):
        raise RequestError(ErrorKind.UNAVAILABLE, "the request was cancelled")
    return ending.reason
