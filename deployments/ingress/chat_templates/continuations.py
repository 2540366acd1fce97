"""A message that the model goes on with: its end is marked, rendered, and cut off there."""

from collections.abc import Mapping
from typing import Any

from deployments.ingress.http.errors import RequestError, invalid

_PARAM = "continue_final_message"
# The blank shows whether the template keeps what a message ends with.
_MARK = "THE-MESSAGE-GOES-ON-HERE "
# The same text by several names; a template reads one of them.
_REASONING = frozenset({"reasoning_content", "thinking", "reasoning"})


def marked(message: Mapping[str, Any], field: str, source: str) -> tuple[dict[str, Any], str]:
    """The message with a mark at the end of this field, and what the field said before.

    source: the template's. A field of parts goes on in its last text.
    """
    said = message.get(field)
    if said is None:
        raise _refused(f'the last message has no "{field}"')
    names = [field]
    if field in _REASONING:
        names = [name for name in sorted(_REASONING) if message.get(name) == said]
    if not any(name in source for name in names):
        raise _refused(f'the chat template does not read "{field}"')
    if isinstance(said, list):
        parts, text = _marked_parts(said)
        return {**message, field: parts}, text
    if not isinstance(said, str):
        raise _refused(f'"{field}" of the last message is no text')
    return {**message, **dict.fromkeys(names, said + _MARK)}, said


def _marked_parts(parts: list[Any]) -> tuple[list[Any], str]:
    for place in range(len(parts) - 1, -1, -1):
        part = parts[place]
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            goes_on = {**part, "text": part["text"] + _MARK}
            return [*parts[:place], goes_on, *parts[place + 1 :]], part["text"]
    raise _refused("the last message has no text")


def continued(rendered: str, said: str) -> str:
    """The prompt up to the mark; without the blanks before it where the template cut blanks."""
    at = rendered.rfind(_MARK.strip())
    if at < 0 or said.strip() not in rendered:
        raise _refused("the chat template does not show the last message as it is")
    whole = rendered.startswith(_MARK, at)
    return rendered[:at] if whole else rendered[:at].rstrip()


def _refused(why: str) -> RequestError:
    return invalid(f"`{_PARAM}` cannot be served: {why}", _PARAM)
