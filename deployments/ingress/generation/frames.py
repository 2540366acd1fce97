"""Delivers token frames to the requests that they belong to.

Everything here runs on the ingress replica's event loop: the socket server must call
`RequestInboxes.deliver` there. Memory is bounded by the completion: each token is kept once.
"""

import asyncio

from configs.wire.plan import TokenLogprobs
from deployments.contract import (
    Completion,
    Ending,
    SequenceOutcome,
    TokenFrame,
    TokenRun,
)


class SequenceUpdate:
    """What is new of one sequence: tokens (logprobs beside them when asked for), and its end."""

    __slots__ = ("ending", "index", "logprobs", "tokens")

    def __init__(
        self,
        index: int,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None,
        ending: Ending | None = None,
    ) -> None:
        """`ending` is set in the sequence's last update."""
        self.index = index
        self.tokens = tokens
        self.logprobs = logprobs
        self.ending = ending


class _Channel:
    """Tokens of one sequence that were not taken yet, in order, each once."""

    __slots__ = ("early", "length", "logprobs", "tokens")

    def __init__(self) -> None:
        self.length = 0
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.early: dict[int, TokenRun] = {}

    def put(self, run: TokenRun) -> bool:
        """Add a run; one beyond a gap waits for the gap's. Whether there are new tokens."""
        if run.start > self.length:
            self.early[run.start] = run
            return False
        before = self.length
        self._append(run.start, run.tokens, run.logprobs)
        while self.early and (start := min(self.early)) <= self.length:
            following = self.early.pop(start)
            self._append(start, following.tokens, following.logprobs)
        return self.length > before

    def repair(self, outcome: SequenceOutcome) -> None:
        """Append what no frame brought."""
        self._append(0, outcome.tokens, outcome.logprobs)
        self.early.clear()

    def take(self) -> tuple[list[int], list[TokenLogprobs] | None]:
        """Return and clear the waiting tokens."""
        taken = self.tokens, self.logprobs
        self.tokens, self.logprobs = [], None
        return taken

    def _append(self, start: int, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """Keep the part of a run that is new; runs come twice when a driver resends."""
        known = self.length - start
        new = tokens[known:] if known else tokens
        if not new:
            return
        self.length += len(new)
        self.tokens.extend(new)
        if logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(logprobs[known:])


class RequestInbox:
    """All sequences of one request; frames fill it, the completion repairs and closes it."""

    def __init__(self, num_sequences: int) -> None:
        self._channels = [_Channel() for _ in range(num_sequences)]
        self._touched: dict[int, None] = {}
        self._updated = False
        self._waiter: asyncio.Future[None] | None = None
        self._completion: Completion | None = None
        self._failure: BaseException | None = None

    def deliver(self, run: TokenRun) -> None:
        """Add a run from a frame. Invalid runs are ignored: the completion has all tokens."""
        if not 0 <= run.index < len(self._channels) or self._completion is not None:
            return
        if self._channels[run.index].put(run):
            self._touched[run.index] = None
            self._announce()

    def complete(self, completion: Completion) -> None:
        """The unary call returned: repair what frames did not bring, and close."""
        for channel, outcome in zip(self._channels, completion.sequences, strict=True):
            channel.repair(outcome)
        self._completion = completion
        self._announce()

    def fail(self, failure: BaseException) -> None:
        """The unary call raised; `take` raises the exception."""
        self._failure = failure
        self._announce()

    async def take(self) -> list[SequenceUpdate]:
        """Wait for updates and return all; empty once everything was taken. One caller only."""
        if not self._updated:
            # An asyncio.Event asks for its loop at every wait, under a lock of all loops.
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._failure is not None:
            raise self._failure
        if self._completion is None:
            self._updated = False
            touched, self._touched = self._touched, {}
            return [SequenceUpdate(index, *self._channels[index].take()) for index in touched]
        ended = enumerate(self._completion.sequences[: len(self._channels)])
        updates = [
            SequenceUpdate(i, *self._channels[i].take(), outcome.ending) for i, outcome in ended
        ]
        self._channels = []
        return updates

    def _announce(self) -> None:
        self._updated = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RequestInboxes:
    """The open inboxes of an ingress replica, by request id."""

    def __init__(self) -> None:
        self._inboxes: dict[str, RequestInbox] = {}

    def open(self, request_id: str, num_sequences: int, listen: bool = True) -> RequestInbox:
        """An inbox for this request; it takes frames from now on if it is to listen."""
        inbox = RequestInbox(num_sequences)
        if listen:
            self._inboxes[request_id] = inbox
        return inbox

    def close(self, request_id: str) -> None:
        """Ignore frames for this request from now on."""
        self._inboxes.pop(request_id, None)

    def deliver(self, frame: TokenFrame) -> None:
        """Hand each run to its request; runs of requests that are gone are dropped."""
        for run in frame.runs:
            inbox = self._inboxes.get(run.request_id)
            if inbox is not None:
                inbox.deliver(run)

    def __len__(self) -> int:
        """How many requests are open."""
        return len(self._inboxes)
