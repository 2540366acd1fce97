"""Delivers token frames to their requests.

All of it runs on the ingress replica's event loop: the socket server must call
`RequestInboxes.deliver` there. A request's tokens are stored once, and kept to its end: another
driver gets them if its own is lost. So memory is bounded by its completion.
"""

import asyncio
from collections.abc import Container

from configs.wire.plan import TokenLogprobs
from deployments.contract import (
    Completion,
    Ending,
    SequenceOutcome,
    TokenFrame,
    TokenRun,
)


class SequenceUpdate:
    """New tokens of one sequence, their logprobs if they are requested, and its ending.

    ending: set in the sequence's last update only.
    skipped: as in `SequenceOutcome`, of all its tokens so far.
    """

    __slots__ = ("ending", "index", "logprobs", "skipped", "tokens")

    def __init__(
        self,
        index: int,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None,
        ending: Ending | None = None,
        skipped: Container[int] = (),
    ) -> None:
        self.index = index
        self.skipped = skipped
        self.tokens = tokens
        self.logprobs = logprobs
        self.ending = ending


class _Channel:
    """Tokens of one sequence so far, in order, each once.

    num_taken: how many of them the reader has. early: runs after a gap, by their start.
    skipped: as in `SequenceUpdate`.
    """

    __slots__ = ("early", "logprobs", "num_taken", "skipped", "tokens")

    def __init__(self) -> None:
        self.num_taken = 0
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.early: dict[int, TokenRun] = {}
        self.skipped: set[int] = set()

    def put(self, run: TokenRun) -> bool:
        """Add a run, or keep it until the gap before it is filled; whether there are new tokens."""
        self.skipped.update(run.skipped)
        if run.start > len(self.tokens):
            # A driver drops frames when its socket is full. The gap may last to the completion.
            self.early[run.start] = run
            return False
        before = len(self.tokens)
        self._append(run.start, run.tokens, run.logprobs)
        while self.early and (start := min(self.early)) <= len(self.tokens):
            following = self.early.pop(start)
            self._append(start, following.tokens, following.logprobs)
        return len(self.tokens) > before

    def repair(self, outcome: SequenceOutcome) -> None:
        """Append the tokens that no frame brought."""
        self.skipped.update(outcome.skipped)
        self._append(0, outcome.tokens, outcome.logprobs)
        self.early.clear()

    def take(self, index: int, ending: Ending | None = None) -> SequenceUpdate:
        """The tokens since the last call, as the update of the sequence with this index."""
        first, self.num_taken = self.num_taken, len(self.tokens)
        logprobs = None if self.logprobs is None else self.logprobs[first:]
        return SequenceUpdate(index, self.tokens[first:], logprobs, ending, self.skipped)

    def _append(self, start: int, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """Append the new part of a run; a driver may send a run twice."""
        num_known = len(self.tokens) - start
        new = tokens[num_known:] if num_known else tokens
        if not new:
            return
        self.tokens.extend(new)
        if logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs.extend(logprobs[num_known:])


class RequestInbox:
    """The new tokens of one request: from frames, at last from its completion.

    origin: of its tokens (`TokenRun`); "" before the first.
    """

    def __init__(self, num_sequences: int) -> None:
        self._channels = [_Channel() for _ in range(num_sequences)]
        self._updated_indices: dict[int, None] = {}
        self._updated = False
        self._waiter: asyncio.Future[None] | None = None
        self._completion: Completion | None = None
        self._failure: BaseException | None = None
        self.origin = ""

    def deliver(self, run: TokenRun) -> None:
        """Add a run from a frame; ignores invalid ones, for the completion has all tokens."""
        if not 0 <= run.index < len(self._channels) or self._completion is not None:
            return
        self.origin = run.origin or self.origin
        if self._channels[run.index].put(run):
            self._updated_indices[run.index] = None
            self._announce()

    def received(self, index: int) -> tuple[list[int], list[TokenLogprobs] | None]:
        """All tokens of one sequence so far, and their logprobs if they are requested."""
        channel = self._channels[index]
        return list(channel.tokens), channel.logprobs

    def restart(self) -> None:
        """The driver was lost: another one continues after what `received` returns."""
        for channel in self._channels:
            channel.early.clear()

    def complete(self, completion: Completion) -> None:
        """Add what the frames did not bring: the call has returned."""
        for channel, outcome in zip(self._channels, completion.sequences, strict=True):
            channel.repair(outcome)
        # From now on `deliver` ignores frames, which may still be on their way.
        self._completion = completion
        self._announce()

    def fail(self, failure: BaseException) -> None:
        """Make `take` raise this exception: the call has failed."""
        self._failure = failure
        self._announce()

    async def take(self) -> list[SequenceUpdate]:
        """Wait for updates and return all; [] after the last ones. For one caller only."""
        if not self._updated:
            # Not an asyncio.Event: it looks up its loop at every wait, under a global lock.
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._failure is not None:
            raise self._failure
        if self._completion is None:
            self._updated = False
            updated, self._updated_indices = self._updated_indices, {}
            return [self._channels[index].take(index) for index in updated]
        ended = enumerate(self._completion.sequences[: len(self._channels)])
        updates = [self._channels[i].take(i, outcome.ending) for i, outcome in ended]
        # The next call returns [], which ends the reader's loop.
        self._channels = []
        return updates

    def _announce(self) -> None:
        # The flag stays set if no reader waits, so that `take` cannot miss an update.
        self._updated = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class RequestInboxes:
    """The inboxes of all open requests of an ingress replica."""

    def __init__(self) -> None:
        self._inboxes: dict[str, RequestInbox] = {}

    def open(self, request_id: str, num_sequences: int, listen: bool = True) -> RequestInbox:
        """A new inbox for this request; listen: deliver frames to it from now on."""
        inbox = RequestInbox(num_sequences)
        if listen:
            self._inboxes[request_id] = inbox
        return inbox

    def rename(self, request_id: str, new_id: str) -> None:
        """Deliver the frames of another id to this request's inbox."""
        inbox = self._inboxes.pop(request_id, None)
        if inbox is not None:
            self._inboxes[new_id] = inbox

    def close(self, request_id: str) -> None:
        """Deliver no more frames to this request."""
        self._inboxes.pop(request_id, None)

    def deliver(self, frame: TokenFrame) -> None:
        """Deliver each run to its request; runs of ended requests are dropped."""
        for run in frame.runs:
            inbox = self._inboxes.get(run.request_id)
            if inbox is not None:
                inbox.deliver(run)

    def __len__(self) -> int:
        """The number of inboxes that receive frames."""
        return len(self._inboxes)
