"""Renders chat templates in processes, so that a slow template does not delay the others.

A template first gets a quarter of a second. If it needs more, it counts as slow for ten minutes: it
waits in the lane of slow templates and gets two seconds there. If that is not enough, conversations
of that length or longer are refused for a minute. Each lane is round-robin over templates.
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
from deployments.ingress.chat_templates.render_lanes import RenderLane
from deployments.ingress.chat_templates.rendering import Rendered, Task
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.processes.fair_queue import QueueFull

QUICK_S = 0.25
LONGEST_S = 2.0

_SLOW_FOR_S = 600.0
_REFUSED_FOR_S = 60.0
_MAX_SLOW = 1024

_pack = msgspec.msgpack.Encoder().encode


class _Slow(NamedTuple):
    """A slow template.

    until: the time up to which it counts as slow.
    refused_bytes: conversations of this length or longer are refused; None: none.
    refused_until: the time up to which they are.
    """

    until: float
    refused_bytes: int | None = None
    refused_until: float = 0.0


class Renderer:
    """Renders adapters' templates, and long conversations with the model's templates."""

    def __init__(
        self, clock: Clock, quick_s: float = QUICK_S, longest_s: float = LONGEST_S
    ) -> None:
        self._clock = clock
        self._longest_s = longest_s
        self._quick = RenderLane(quick_s, max_each=128, max_all=1024)
        self._patient = RenderLane(longest_s, max_each=4, max_all=32)
        self._own = RenderLane(longest_s, max_each=64, max_all=64)
        self._slow: OrderedDict[bytes, _Slow] = OrderedDict()

    async def render(self, name: str, source: TemplateSource, conversation: bytes) -> str:
        """The prompt of a `packed` conversation by the template of adapter `name`.

        RequestError if the template refuses it, fails, takes too long, or too many chats wait.
        """
        task = _pack(Task(source, conversation))
        key = hashlib.blake2b(_pack(source), digest_size=16).digest()
        size = len(conversation)
        # Again if the template became slow while the task waited, or was too late in this lane.
        while True:
            if self._refuses(key, size):
                raise self._too_slow(name, size)
            lane = self._lane(key)
            is_wanted = partial(self._is_wanted, lane, key, size)
            on_reply = partial(self._record, lane, key, size)
            reply = await _render(lane, name, key, task, is_wanted, on_reply)
            if reply is not None and not reply.late:
                return _prompt(name, reply)

    async def render_own(self, source: TemplateSource, conversation: bytes) -> str:
        """The same by the model's template, in a lane of its own."""
        name = "the model"
        task = _pack(Task(source, conversation))
        reply = await _render(self._own, name, b"", task, lambda: True, lambda late: None)
        assert reply is not None, "is_wanted is always True"
        if reply.late:
            raise self._too_slow(name, len(conversation))
        return _prompt(name, reply)

    async def close(self) -> None:
        """End the processes."""
        for lane in (self._quick, self._patient, self._own):
            await lane.close()

    def _lane(self, key: bytes) -> RenderLane:
        slow = self._slow.get(key)
        return self._patient if slow is not None and self._clock() < slow.until else self._quick

    def _is_wanted(self, lane: RenderLane, key: bytes, size: int) -> bool:
        """Whether the lane is still right; the template may have become slow meanwhile."""
        return self._lane(key) is lane and not self._refuses(key, size)

    def _refuses(self, key: bytes, size: int) -> bool:
        slow = self._slow.get(key)
        if slow is None or slow.refused_bytes is None or self._clock() >= slow.refused_until:
            return False
        return size >= slow.refused_bytes

    def _too_slow(self, name: str, size: int) -> RequestError:
        return invalid(
            f"the chat template of {name} took over {self._longest_s:g} s of computing for a "
            f"conversation of {size} bytes or less: send a shorter one, or change the template",
            "messages",
        )

    def _record(self, lane: RenderLane, key: bytes, size: int, late: bool) -> None:
        """Note a template that was too late, and in the slow lane the length that was too long."""
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


async def _render(
    lane: RenderLane,
    name: str,
    key: bytes,
    task: bytes,
    is_wanted: Callable[[], bool],
    on_reply: Callable[[bool], None],
) -> Rendered | None:
    """`RenderLane.render`, with RequestError for its errors."""
    try:
        return await lane.render(key, task, is_wanted, on_reply)
    except QueueFull as error:
        message = f"{error.waiting} chats wait for the chat template of {name}: try again later"
        raise RequestError(ErrorKind.OVERLOADED, message, retry_after_s=lane.limit_s) from error
    except OSError as error:
        message = f"the process that renders chat templates could not be used ({error}): try again"
        raise RequestError(ErrorKind.UNAVAILABLE, message, retry_after_s=1.0) from error


def _prompt(name: str, reply: Rendered) -> str:
    if reply.refusal:
        raise invalid(f"{reply.refusal} (the template of {name})", "messages")
    return reply.prompt
