"""Matchers: what the ranks need to hold an answer to its constraint, prepared beside the steps.

A matcher is requested when its first request is next to be admitted. Until all ranks have prepared
it, the request waits outside its queue and others are admitted. Requests with the same constraint
share a matcher, and with it a lexer that grows with the texts it has seen. When the shared lexer
meets its limits, all requests that share it lose one token and continue with a matcher of their
own. A request ends when its own matcher meets the limits.
"""

from dataclasses import dataclass

import msgspec

from scheduler.request import Request
from scheduler.running import RunningRequests


class PrepareMatcher(msgspec.Struct, frozen=True):
    """A command for every rank: prepare one matcher.

    released: numbers of matchers that the ranks forget first.
    """

    number: int
    constraint: str
    released: list[int]


@dataclass(eq=False)
class _Matcher:
    """One matcher of the ranks.

    users: requests that have it and have not ended.
    awaited: a request that is next to be admitted waits for it.
    sent: the ranks have the command to prepare it, and none to forget it.
    ready: all ranks have prepared it.
    """

    number: int
    constraint: str
    users: int = 0
    awaited: bool = False
    sent: bool = False
    ready: bool = False


class Matchers:
    """The matchers that the ranks hold, prepare, or will prepare when there is room."""

    def __init__(self, max_held: int) -> None:
        """The ranks hold at most `max_held` matchers, each with a lexer of its own."""
        self._max_held = max_held
        self._next = 0
        self._known: dict[int, _Matcher] = {}
        self._shared: dict[str, _Matcher] = {}

    def is_ready(self, request: Request) -> bool:
        """Whether the request has no constraint or a ready matcher; if not, have one prepared."""
        constraint = request.sampling.constraint
        if not constraint:
            return True
        if request.matcher < 0:
            shared = self._shared.get(constraint) or self._new(constraint)
            self._shared[constraint] = shared
            self._assign(request, shared)
        matcher = self._known[request.matcher]
        # Only requests that are next come here: matchers of others are not prepared early.
        matcher.awaited = not matcher.ready
        return matcher.ready

    def give_own(self, request: Request) -> bool:
        """Give a request a matcher of its own; False if it has one already."""
        if request.own_matcher:
            return False
        constraint = request.sampling.constraint
        shared = self._shared.get(constraint)
        if shared is not None and shared.number == request.matcher:
            del self._shared[constraint]  # New requests start with a fresh one.
        self.release(request)
        self._assign(request, self._new(constraint))
        request.own_matcher = True
        return True

    def release(self, request: Request) -> None:
        """The request ended, or gets another matcher."""
        if request.matcher >= 0:
            matcher = self._known[request.matcher]
            matcher.users -= 1
            request.matcher = -1
            if not (matcher.users or matcher.sent):
                self._forget(matcher)

    def to_prepare(self, running: RunningRequests) -> list[PrepareMatcher]:
        """Commands for the ranks, each given once."""
        waiting = [each for each in self._known.values() if each.awaited and not each.sent]
        if not waiting:
            return []
        used = {request.matcher for request in running.unfinished}
        return [command for each in waiting for command in self._prepare(each, used)]

    def prepared(self, number: int, fault: str) -> None:
        """All ranks have replied; after a fault new requests do not share this matcher."""
        matcher = self._known[number]
        matcher.ready, matcher.awaited = True, False
        if fault and self._shared.get(matcher.constraint) is matcher:
            del self._shared[matcher.constraint]

    def ranks_lost(self) -> None:
        """The ranks are gone, and all their matchers."""
        for matcher in list(self._known.values()):
            matcher.sent = matcher.ready = matcher.awaited = False
            if not matcher.users:
                self._forget(matcher)

    def check(self, alive: list[Request]) -> None:
        """Assert that users are counted and that no more are held than may be."""
        numbers = [request.matcher for request in alive if request.matcher >= 0]
        for matcher in self._known.values():
            assert matcher.users == numbers.count(matcher.number), matcher
        assert set(numbers) <= set(self._known)
        assert sum(each.sent for each in self._known.values()) <= self._max_held

    def _prepare(self, matcher: _Matcher, used: set[int]) -> list[PrepareMatcher]:
        """The command to prepare this matcher; none while there is no room.

        used: the matchers of running requests.

        Matchers without users make room. If no sent matcher belongs to a running request, those of
        waiting requests make room too and are prepared again later: otherwise nothing would ever
        make room.
        """
        sent = [each for each in self._known.values() if each.sent]
        spare = [each for each in sent if each.ready and not each.users]
        if all(each.ready and each.number not in used for each in sent):
            spare += [each for each in sent if each.users]
        surplus = max(len(sent) + 1 - self._max_held, 0)
        if surplus > len(spare):
            return []
        for each in spare[:surplus]:
            each.sent = each.ready = False
            if not each.users:
                self._forget(each)
        matcher.sent = True
        released = [each.number for each in spare[:surplus]]
        return [PrepareMatcher(matcher.number, matcher.constraint, released)]

    def _new(self, constraint: str) -> _Matcher:
        matcher = _Matcher(self._next, constraint)
        self._known[self._next] = matcher
        self._next += 1
        return matcher

    def _assign(self, request: Request, matcher: _Matcher) -> None:
        matcher.users += 1
        request.matcher = matcher.number
        # Ordered by use: the one used least recently makes room first.
        self._known[matcher.number] = self._known.pop(matcher.number)

    def _forget(self, matcher: _Matcher) -> None:
        del self._known[matcher.number]
        if self._shared.get(matcher.constraint) is matcher:
            del self._shared[matcher.constraint]
