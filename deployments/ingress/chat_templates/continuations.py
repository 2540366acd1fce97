"""Prompts for an answer that continues the last message.

The end of the message is marked, and the rendered prompt is cut at the mark.
"""

from collections.abc import Mapping
from typing import Any

from deployments.ingress.http.errors import RequestError, invalid

_PARAM = "continue_final_message"
# The final blank shows whether the template keeps trailing blanks.
_MARK = "THE-MESSAGE-GOES-ON-HERE "
# Names of the same field; a template reads one of them.
_REASONING = frozenset({"reasoning_content", "thinking", "reasoning"})


def marked(message: Mapping[str, Any], field: str, source: str) -> tuple[dict[str, Any], str]:
    """The message with a mark at the end of this field, and the field's text before.

    source: of the template. In a list of parts, the last text is marked.
    """
    content = message.get(field)
    if content is None:
        raise _refused(f'the last message has no "{field}"')
    names = [field]
    if field in _REASONING:
        names = [name for name in sorted(_REASONING) if message.get(name) == content]
    if not any(name in source for name in names):
        raise _refused(f'the chat template does not read "{field}"')
    if isinstance(content, list):
        parts, text = _marked_parts(content)
        return {**message, field: parts}, text
    if not isinstance(content, str):
        raise _refused(f'"{field}" of the last message is no text')
    return {**message, **dict.fromkeys(names, content + _MARK)}, content


def _marked_parts(parts: list[Any]) -> tuple[list[Any], str]:
    for index in range(len(parts) - 1, -1, -1):
        part = parts[index]
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            marked_part = {**part, "text": part["text"] + _MARK}
            return [*parts[:index], marked_part, *parts[index + 1 :]], part["text"]
    raise _refused("the last message has no text")


def continued(rendered: str, text: str) -> str:
    """The prompt up to the mark; without the blanks before it if the template removed blanks.

    text: of the message, which the prompt must contain.
    """
    at = rendered.rfind(_MARK.strip())
    if at < 0 or text.strip() not in rendered:
        raise _refused("the chat template does not show the last message as it is")
    whole = rendered.startswith(_MARK, at)
    return rendered[:at] if whole else rendered[:at].rstrip()


def _refused(reason: str) -> RequestError:
    return invalid(f"`{_PARAM}` cannot be served: {reason}", _PARAM)
