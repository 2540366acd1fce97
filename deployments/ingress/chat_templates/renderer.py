"""Chat templates rendered beside this process, so that none holds up another for long.

A template is given a quarter of a second first. One that needs more is slow for a while: it waits
in a line of its own, with others that are slow, and has two seconds there. How long a conversation
was that took longer still is remembered, and conversations of that length are refused unread.
In each line templates have their turn one after the other, however many chats each has waiting.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from configs.wire.templates import TemplateSource
from deployments.contract import ErrorKind
from deployments.ingress.access.quotas import Clock
from deployments.ingress.chat_templates.render_lanes import Full, Lane
from deployments.ingress.chat_templates.rendering import Rendered, Task
from deployments.ingress.http.errors import RequestError, invalid

QUICK_S = 0.25
LONGEST_S = 2.0

_SLOW_FOR_S = 600.0
_REFUSED_FOR_S = 60.0
_MAX_SLOW = 1024

_pack = msgspec.msgpack.Encoder().encode


class _Slow(NamedTuple):
    """A template that took long: until when it counts as slow, and what is refused until when."""

    until: float
    refused_bytes: int | None = None
    refused_until: float = 0.0


class Renderer:
    """Renders strangers' templates, and long conversations with the model's own."""

    def __init__(
        self, clock: Clock, quick_s: float = QUICK_S, longest_s: float = LONGEST_S
    ) -> None:
        """Nothing runs yet."""
        self._clock = clock
        self._longest_s = longest_s
        self._quick = Lane(quick_s, max_each=128, max_all=1024)
        self._patient = Lane(longest_s, max_each=4, max_all=32)
        self._own = Lane(longest_s, max_each=64, max_all=64)
        self._slow: OrderedDict[bytes, _Slow] = OrderedDict()

    async def render(self, name: str, source: TemplateSource, conversation: bytes) -> str:
        """The prompt by a stranger's template; `name` is whose, the conversation is `packed`.

        RequestError when the template refuses, breaks, takes too long or has too many waiting.
        """
        asked = _pack(Task(source, conversation))
        key = hashlib.blake2b(_pack(source), digest_size=16).digest()
        size = len(conversation)
        while True:
            self._refuse_known(name, key, size)
            lane = self._lane(key)
            wanted, learn = (
                partial(self._still, lane, key, size),
                partial(self._learn, lane, key, size),
            )
            answer = await _asked(lane, name, key, asked, wanted, learn)
            if answer is not None and not answer.late:
                return _prompt(name, answer)

    async def render_own(self, source: TemplateSource, conversation: bytes) -> str:
        """The same by the model's own template, which waits for no other."""
        name = "the model"
        asked = _pack(Task(source, conversation))
        answer = await _asked(self._own, name, b"", asked, lambda: True, lambda late: None)
        assert answer is not None, "always wanted"
        if answer.late:
            raise self._too_slow(name, len(conversation))
        return _prompt(name, answer)

    async def close(self) -> None:
        """End the processes."""
        for lane in (self._quick, self._patient, self._own):
            await lane.close()

    def _lane(self, key: bytes) -> Lane:
        slow = self._slow.get(key)
        return self._patient if slow is not None and self._clock() < slow.until else self._quick

    def _still(self, lane: Lane, key: bytes, size: int) -> bool:
        """Whether the turn came in the right line; others may have found out meanwhile."""
        return self._lane(key) is lane and not self._refuses(key, size)

    def _refuses(self, key: bytes, size: int) -> bool:
        slow = self._slow.get(key)
        if slow is None or slow.refused_bytes is None or self._clock() >= slow.refused_until:
            return False
        return size >= slow.refused_bytes

    def _refuse_known(self, name: str, key: bytes, size: int) -> None:
        if self._refuses(key, size):
            raise self._too_slow(name, size)

    def _too_slow(self, name: str, size: int) -> RequestError:
        return invalid(
            f"the chat template of {name} took over {self._longest_s:g} s of computing for a "
            f"conversation of {size} bytes or less: send a shorter one, or change the template",
            "messages",
        )

    def _learn(self, lane: Lane, key: bytes, size: int, late: bool) -> None:
        """Remember a template that took too long, and for what, if it had all the time."""
        if not late:
            return
        now = self._clock()
        slow = _Slow(now + _SLOW_FOR_S)
        if lane is self._patient:
            refused = size
            before = self._slow.get(key)
            if (
                before is not None
                and before.refused_bytes is not None
                and now < before.refused_until
            ):
                refused = min(size, before.refused_bytes)
            slow = _Slow(now + _SLOW_FOR_S, refused, now + _REFUSED_FOR_S)
        self._slow[key] = slow
        self._slow.move_to_end(key)
        if len(self._slow) > _MAX_SLOW:
            self._slow.popitem(last=False)


async def _asked(
    lane: Lane,
    name: str,
    key: bytes,
    asked: bytes,
    wanted: Callable[[], bool],
    learn: Callable[[bool], None],
) -> Rendered | None:
    """The lane's answer, None if it is not wanted any more when its turn has come."""
    try:
        return await lane.ask(key, asked, wanted, learn)
    except Full as error:
        message = f"{error.waiting} chats wait for the chat template of {name}: try again later"
        raise RequestError(ErrorKind.OVERLOADED, message, retry_after_s=lane.limit_s) from error
    except OSError as error:
        message = f"the process that renders chat templates could not be used ({error}): try again"
        raise RequestError(ErrorKind.UNAVAILABLE, message, retry_after_s=1.0) from error


def _prompt(name: str, answer: Rendered) -> str:
    if answer.refusal:
        raise invalid(f"{answer.refusal} (the template of {name})", "messages")
    return answer.prompt
