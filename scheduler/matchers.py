"""Matchers: what each rank makes of a constraint before an answer can be held to it.

They are made beside the steps, for a request whose turn has come; until all ranks have its matcher
the request stands aside, and others join. Answers under the same constraint share a lexer, which
grows with what they have come across. Where its limits are met, all that share it lose a token;
each goes on with a matcher of its own, and ends if it meets the limits alone.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass

import msgspec

from scheduler.request import Request


class PrepareMatcher(msgspec.Struct, frozen=True):
    """Have every rank make a matcher, in the place of those that are gone."""

    number: int
    constraint: str
    released: list[int]


@dataclass(eq=False)
class _Matcher:
    """users: requests that have not ended. awaited: one of them is in turn and awaits it. sent: the
    ranks were told; ready: all have it.
    """

    number: int
    constraint: str
    users: int = 0
    awaited: bool = False
    sent: bool = False
    ready: bool = False


class Matchers:
    """Which matchers the ranks hold, are making, or will make when there is room."""

    def __init__(self, most: int) -> None:
        """None yet; the ranks hold so many at once, and each lexer may grow to its limit."""
        self._max_held = most
        self._next = 0
        self._known: dict[int, _Matcher] = {}
        self._shared: dict[str, _Matcher] = {}

    def is_ready(self, request: Request) -> bool:
        """Whether the request may join as far as its constraint goes; if not, it is seen to."""
        constraint = request.sampling.constraint
        if not constraint:
            return True
        if request.matcher < 0:
            shared = self._shared.get(constraint) or self._new(constraint)
            self._shared[constraint] = shared
            self._assign(request, shared)
        matcher = self._known[request.matcher]
        matcher.awaited = not matcher.ready
        return matcher.ready

    def give_own(self, request: Request) -> bool:
        """Give a request a matcher of its own; False if it had one, and nobody shares it."""
        if request.own_matcher:
            return False
        constraint = request.sampling.constraint
        worn = self._shared.get(constraint)
        if worn is not None and worn.number == request.matcher:
            del self._shared[constraint]  # Who comes now begins with a fresh one.
        self.release(request)
        self._assign(request, self._new(constraint))
        request.own_matcher = True
        return True

    def release(self, request: Request) -> None:
        """The request ended."""
        if request.matcher >= 0:
            matcher = self._known[request.matcher]
            matcher.users -= 1
            request.matcher = -1
            if not (matcher.users or matcher.sent):
                self._forget(matcher)

    def to_prepare(self, running: Callable[[], Set[int]]) -> list[PrepareMatcher]:
        """What to tell the ranks now, each once; `running`: the matchers of those with places."""
        waiting = [each for each in self._known.values() if each.awaited and not each.sent]
        return [order for each in waiting for order in self._prepare(each, running())]

    def prepared(self, number: int, fault: str) -> None:
        """All ranks have answered; with a fault nobody else is to wait for it."""
        matcher = self._known[number]
        matcher.ready, matcher.awaited = True, False
        if fault and self._shared.get(matcher.constraint) is matcher:
            del self._shared[matcher.constraint]

    def ranks_lost(self) -> None:
        """The ranks are gone, with all that they had made."""
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

    def _prepare(self, matcher: _Matcher, running: Set[int]) -> list[PrepareMatcher]:
        """The order to make this one; none while there is no room.

        Others make room that nobody uses. If no one runs who could leave any, those make room too
        whose users wait: they are made again at their turn.
        """
        sent = [each for each in self._known.values() if each.sent]
        spare = [each for each in sent if each.ready and not each.users]
        if all(each.ready and each.number not in running for each in sent):
            spare += [each for each in sent if each.users]
        surplus = max(len(sent) + 1 - self._max_held, 0)
        if surplus > len(spare):
            return []
        for each in spare[:surplus]:
            each.sent = each.ready = False
            if not each.users:
                self._forget(each)
        matcher.sent = True
        return [
            PrepareMatcher(
                matcher.number, matcher.constraint, [each.number for each in spare[:surplus]]
            )
        ]

    def _new(self, constraint: str) -> _Matcher:
        matcher = _Matcher(self._next, constraint)
        self._known[self._next] = matcher
        self._next += 1
        return matcher

    def _assign(self, request: Request, matcher: _Matcher) -> None:
        matcher.users += 1
        request.matcher = matcher.number
        # The one used last is forgotten last.
        self._known[matcher.number] = self._known.pop(matcher.number)

    def _forget(self, matcher: _Matcher) -> None:
        del self._known[matcher.number]
        if self._shared.get(matcher.constraint) is matcher:
            del self._shared[matcher.constraint]
