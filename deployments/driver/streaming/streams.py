"""The output of a request: token frames while it runs, one completion at its end.

Lives on the replica's event loop. Tokens reach the ingress twice: at once in frames (outbox.py),
and whole in the completion that the unary call returns; each sequence ends exactly once.
"""

import asyncio

from configs.wire.adapters import AdapterRefusal
from configs.wire.sampling import FinishReason
from deployments.contract import (
    Cancelled,
    Completion,
    Ending,
    ErrorKind,
    Failed,
    Finished,
    GenerateRequest,
    ReplyAddress,
    SequenceOutcome,
    TokenRun,
)
from deployments.driver.streaming.outbox import FrameLink, Outbox
from scheduler import events


class _Stream:
    """One HTTP request's outcomes so far and the future that its unary call awaits.

    scheduled: sequences that the scheduler has not ended. One may have its outcome already, if it
    was failed or abandoned here.
    """

    def __init__(self, num_sequences: int, reply_to: ReplyAddress | None, origin: str) -> None:
        self.reply_to = reply_to
        self.origin = origin
        self.outcomes: list[SequenceOutcome | None] = [None] * num_sequences
        self.scheduled = set(range(num_sequences))
        self.completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

    @property
    def open_indices(self) -> list[int]:
        """Sequences that have not ended."""
        return [i for i, outcome in enumerate(self.outcomes) if outcome is None]

    def end(self, index: int, outcome: SequenceOutcome) -> None:
        """Set a sequence's outcome; the last one completes the request."""
        assert self.outcomes[index] is None, f"sequence {index} ended twice"
        self.outcomes[index] = outcome
        if not self.open_indices and not self.completion.done():
            self.completion.set_result(Completion([o for o in self.outcomes if o is not None]))


class Streams:
    """All open requests of one driver."""

    def __init__(self, link: FrameLink) -> None:
        """link: takes the frames; its calls must not block."""
        self._outbox = Outbox(link)
        self._streams: dict[str, _Stream] = {}
        self._held_back: dict[str, list[TokenRun]] = {}

    def __len__(self) -> int:
        """How many requests are open."""
        return len(self._streams)

    @property
    def num_delayed(self) -> int:
        """Frames that an ingress replica did not take at once."""
        return self._outbox.num_delayed

    def open(
        self, request: GenerateRequest, reply_to: ReplyAddress | None, origin: str = ""
    ) -> "asyncio.Future[Completion]":
        """Add a request; the future completes when its last sequence has ended.

        reply_to: where its frames go; None sends none. origin: as in `TokenRun`.
        """
        assert request.id not in self._streams, f"request {request.id} is open already"
        stream = self._streams[request.id] = _Stream(len(request.sequences), reply_to, origin)
        return stream.completion

    def close(self, request_id: str) -> list[int]:
        """Remove a request that ended or was cancelled; returns what the scheduler still has."""
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return []
        if stream.reply_to is not None:
            self._outbox.forget(stream.reply_to, request_id, len(stream.outcomes))
        return sorted(stream.scheduled)

    def take(self, event: events.RequestEvent) -> None:
        """Handle one event of the scheduler; `flush` sends the tokens."""
        request_id, index = event.request_id
        stream = self._streams.get(request_id)
        if stream is None:
            return  # It was closed while the event was on its way from the loop's thread.
        if isinstance(event, events.Ended):
            stream.scheduled.discard(index)
            if stream.outcomes[index] is None:
                stream.end(index, _outcome(event))
        elif stream.reply_to is not None and stream.outcomes[index] is None:
            origin = "" if event.start else stream.origin
            start, tokens = event.start, event.tokens
            skipped = list(range(start + 1, start + len(tokens)))
            run = TokenRun(request_id, index, start, tokens, event.logprobs, origin, skipped)
            if request_id in self._held_back:
                self._held_back[request_id].append(run)
            else:
                self._outbox.add(stream.reply_to, run)

    def hold(self, request_id: str) -> None:
        """Hold this request's tokens until `release`; the request need not be open yet."""
        self._held_back[request_id] = []

    def release(self, request_id: str) -> None:
        """Send a request's held tokens; none if it has ended."""
        held = self._held_back.pop(request_id, [])
        stream = self._streams.get(request_id)
        if held and stream is not None and stream.reply_to is not None:
            for run in held:
                self._outbox.add(stream.reply_to, run)
            self._outbox.flush()

    def flush(self) -> None:
        """Send the tokens taken since the last flush: one frame for each ingress replica."""
        self._outbox.flush()

    def resend(self, address: ReplyAddress) -> None:
        """Send the runs that an ingress replica had no room for."""
        self._outbox.resend(address)

    def fail(self, request_id: str, failure: Failed) -> None:
        """End the open sequences of one request with an error."""
        stream = self._streams.get(request_id)
        for index in stream.open_indices if stream is not None else ():
            assert stream is not None
            stream.end(index, SequenceOutcome([], failure))

    def fail_all(self, failure: Failed) -> None:
        """End all open requests with an error."""
        for request_id in list(self._streams):
            self.fail(request_id, failure)

    def abandon(self, address: ReplyAddress) -> None:
        """End the requests of an ingress replica that is gone, as cancelled."""
        self._outbox.drop(address)
        for stream in self._streams.values():
            if stream.reply_to == address:
                for index in stream.open_indices:
                    stream.end(index, SequenceOutcome([], Cancelled()))


def refusal(request: GenerateRequest, failure: Failed) -> Completion:
    """The completion of a request that never ran: every sequence failed."""
    return Completion([SequenceOutcome([], failure) for _ in request.sequences])


def unavailable(message: str) -> Failed:
    """The failure of a replica that cannot serve now; clients may retry after 5 s."""
    return Failed(ErrorKind.UNAVAILABLE, message, 5.0)


def unreadable(completion: Completion) -> bool:
    """Whether no token was generated because the adapter's files could not be read."""
    return all(
        isinstance(s.ending, Failed)
        and s.ending.kind is ErrorKind.ADAPTER_UNAVAILABLE
        and not s.tokens
        for s in completion.sequences
    )


def _outcome(event: events.Ended) -> SequenceOutcome:
    return SequenceOutcome(
        tokens=event.tokens,
        ending=_ending(event.ending),
        logprobs=event.logprobs,
        cached_tokens=event.cached_tokens,
        queue_seconds=_since(event.arrival, event.first_scheduled),
        first_token_seconds=_since(event.arrival, event.first_token),
        prompt_logprobs=event.prompt_logprobs,
        embedding=event.embedding,
        drafted_tokens=event.num_drafted,
        skipped=list(event.skipped),
    )


def _ending(ending: events.Ending) -> Ending:
    if isinstance(ending, FinishReason):
        return Finished(ending)
    if isinstance(ending, events.ClientCancelled):
        return Cancelled()
    if isinstance(ending, events.RanksFailure | events.ConstraintFailure):
        return Failed(ErrorKind.GENERATION, ending.message)
    retry = 5.0 if ending.refusal is AdapterRefusal.UNAVAILABLE else None
    return Failed(ErrorKind(ending.refusal.value), ending.message, retry)


def _since(start: float, end: float | None) -> float:
    return end - start if end is not None else 0.0
