"""Tokens for ingress replicas: sent at once, or as soon as the socket has room.

If there is no room for a frame, its runs are stored, those of one sequence joined, and are sent
before later ones. Stored tokens belong to open requests and are dropped when the request ends.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Protocol

import msgspec

from deployments.contract import ReplyAddress, TokenFrame, TokenRun

_FRAME_TOKENS = 16384
"""Most tokens in one frame: far below the largest frame that a receiver accepts."""

_Sequence = tuple[str, int]


class FrameLink(Protocol):
    """Sends frames to ingress replicas (`FrameSender`)."""

    def has_room(self, address: ReplyAddress) -> bool:
        """Whether `send` would take a frame now."""
        ...

    def send(self, address: ReplyAddress, frame: TokenFrame) -> bool:
        """Send a frame without waiting; False where there is no room for it."""
        ...


class Outbox:
    """Unsent token runs by ingress replica.

    num_delayed: frames that could not be sent at once.
    """

    def __init__(self, link: FrameLink) -> None:
        self._link = link
        self._new: defaultdict[ReplyAddress, list[TokenRun]] = defaultdict(list)
        self._unsent: dict[ReplyAddress, dict[_Sequence, TokenRun]] = {}
        self.num_delayed = 0

    @property
    def num_unsent(self) -> int:
        """Tokens that the sockets had no room for yet."""
        return sum(len(run.tokens) for kept in self._unsent.values() for run in kept.values())

    def add(self, address: ReplyAddress, run: TokenRun) -> None:
        """Add a run to the next `flush`."""
        self._new[address].append(run)

    def flush(self) -> None:
        """Send one frame to each ingress replica, or store its runs."""
        for address, runs in self._new.items():
            # After stored runs, never before them: a sequence's tokens stay in order.
            if address not in self._unsent and self._link.send(address, TokenFrame(runs)):
                continue
            self._store_unsent(address, runs)
            self.resend(address)
            self.num_delayed += address in self._unsent
        self._new.clear()

    def resend(self, address: ReplyAddress) -> None:
        """Send the stored runs while there is room."""
        kept = self._unsent.get(address)
        if kept is None:
            return
        while kept and self._link.has_room(address):
            self._link.send(address, TokenFrame(list(_take(kept))))
        if not kept:
            del self._unsent[address]

    def forget(self, address: ReplyAddress, request_id: str, num_sequences: int) -> None:
        """Drop the stored runs of a request that ended: its completion has all tokens."""
        kept = self._unsent.get(address)
        if kept is None:
            return
        for index in range(num_sequences):
            kept.pop((request_id, index), None)
        if not kept:
            del self._unsent[address]

    def drop(self, address: ReplyAddress) -> None:
        """Drop all runs for an ingress replica that is gone."""
        self._unsent.pop(address, None)
        self._new.pop(address, None)

    def _store_unsent(self, address: ReplyAddress, runs: list[TokenRun]) -> None:
        kept = self._unsent.setdefault(address, {})
        for run in runs:
            before = kept.get((run.request_id, run.index))
            if before is None:
                # A copy: the run's lists belong to its event.
                logprobs = None if run.logprobs is None else list(run.logprobs)
                kept[run.request_id, run.index] = msgspec.structs.replace(
                    run, tokens=list(run.tokens), logprobs=logprobs, skipped=list(run.skipped)
                )
                continue
            assert run.start == before.start + len(before.tokens), (run.start, before.start)
            before.tokens.extend(run.tokens)
            before.skipped.extend(run.skipped)
            if before.logprobs is not None and run.logprobs is not None:
                before.logprobs.extend(run.logprobs)


def _take(kept: dict[_Sequence, TokenRun]) -> Iterator[TokenRun]:
    """Remove and return the runs of one frame, oldest first; a long run is cut."""
    room = _FRAME_TOKENS
    while kept and room > 0:
        sequence, run = next(iter(kept.items()))
        if len(run.tokens) > room:
            head, rest = _cut(run, room)
            kept[sequence] = rest
            yield head
            return
        del kept[sequence]
        room -= len(run.tokens)
        yield run


def _cut(run: TokenRun, length: int) -> tuple[TokenRun, TokenRun]:
    """A run's first `length` tokens, and the rest."""
    scores = run.logprobs
    parts = [
        TokenRun(
            run.request_id,
            run.index,
            run.start + part.start,
            run.tokens[part],
            None if scores is None else scores[part],
            "" if part.start else run.origin,
            [at for at in run.skipped if part.start <= at - run.start < part.stop],
        )
        for part in (slice(0, length), slice(length, len(run.tokens)))
    ]
    return parts[0], parts[1]
