"""What the document says of one route beyond what its code does: replies, errors, examples."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

JSON = "application/json"
EVENTS = "text/event-stream"
PLAIN = "text/plain"

# What any request may meet before its route.
_DOOR = (401, 431)
# What a request with a body may meet there.
_BODY = (*_DOOR, 400, 408, 413, 415, 429)


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    reply: the type of a JSON reply, None for an empty or another one. event: the type of one
    event's data where the route can stream. only_events: it always does. others: more content
    types of the reply. errors: statuses beside those that every such route has. request, answer:
    examples by their summaries; the first answer belongs to the first request.
    """

    tag: str
    summary: str
    description: str = ""
    reply: Any = None
    event: Any = None
    only_events: bool = False
    others: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    request: Mapping[str, Any] = field(default_factory=dict)
    answer: Any = None
    status: int = 200

    def statuses(self, has_body: bool) -> list[int]:
        """Every status that an error of this route can have."""
        return sorted({*(_BODY if has_body else _DOOR), *self.errors})
