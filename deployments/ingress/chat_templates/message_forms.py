"""Which form of a message's content a template takes, found by rendering a test message.

Some templates take a content that is a list of parts, others take text alone, and few take parts
alone. A list where only text is known would stand in the prompt as Python writes it; a text where
only parts are known would be left out. So a template is tried with a message of each role.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Content = str | list[dict[str, Any]]

# Digits stay what they are in templates that change case or cut blanks.
_MARKER = "4170917"
# A field that no template reads: it is seen only where a part is written as it is.
_FIELD = "8250824"


class Forms:
    """Fits messages to one template."""

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        """`render` gives the template's text of some messages, "" where it refuses them."""
        self._render = render
        self._known: dict[tuple[str, bool], bool] = {}

    def fitted(self, messages: list[dict[str, Any]], tools_text: str) -> list[dict[str, Any]]:
        """The messages as the template takes them; `tools_text` goes into a system or user one."""
        if tools_text:
            messages = self._with_words(messages, tools_text)
        return [self._fitted(message) for message in messages]

    def _fitted(self, message: dict[str, Any]) -> dict[str, Any]:
        role, content = message["role"], message.get("content")
        if isinstance(content, list) and not self._takes(role, parts=True):
            return {**message, "content": text_of(content)}
        if not isinstance(content, str) or self._takes(role, parts=False):
            return message
        if self._takes(role, parts=True):
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _with_words(self, messages: list[dict[str, Any]], tools_text: str) -> list[dict[str, Any]]:
        """The messages with `tools_text` in the system's, or in the user's where it has none.

        Some templates refuse a system's message.
        """
        if messages[0]["role"] == "system":
            content = text_of(messages[0].get("content") or "")
            first = {**messages[0], "content": f"{content}\n\n{tools_text}".lstrip()}
            return [first, *messages[1:]]
        if self._takes("system", parts=False) or self._takes("system", parts=True):
            return [{"role": "system", "content": tools_text}, *messages]
        for index, message in enumerate(messages):
            if message["role"] == "user":
                content = text_of(message.get("content") or "")
                merged = {**message, "content": f"{tools_text}\n\n{content}".rstrip()}
                return [*messages[:index], merged, *messages[index + 1 :]]
        return [{"role": "user", "content": tools_text}, *messages]

    def _takes(self, role: str, parts: bool) -> bool:
        role = role if role in _BEFORE else "user"  # Clients may invent any number of others.
        known = self._known.get((role, parts))
        if known is None:
            shown = self._render(_test_messages(role, parts))
            known = self._known[role, parts] = _MARKER in shown and _FIELD not in shown
        return known


def text_of(content: Content) -> str:
    """A content as one text, parts with line breaks between them."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or "") for part in content)


_CALL = {"id": "417091700", "type": "function", "function": {"name": "f", "arguments": {}}}
# What must stand before a message of each role, in templates that check the roles' sequence.
_BEFORE: Mapping[str, tuple[str, ...]] = {
    "system": (), "developer": (), "user": (), "assistant": ("user",), "tool": ("user", "calls"),
}  # fmt: skip


def _test_messages(role: str, parts: bool) -> list[dict[str, Any]]:
    """A conversation in which a message of this role contains the marker."""

    def says(text: str) -> Content:
        return [{"type": "text", "text": text, _FIELD: _FIELD}] if parts else text

    user = {"role": "user", "content": says("a")}
    calls = {"role": "assistant", "content": says(""), "tool_calls": [_CALL]}
    kinds = {"user": user, "calls": calls}
    message: dict[str, Any] = {"role": role, "content": says(_MARKER)}
    if role == "tool":
        message |= {"name": "f", "tool_call_id": _CALL["id"]}
    before = [kinds[kind] for kind in _BEFORE[role]]
    after = [user] if role in ("system", "developer") else []
    return [*before, message, *after]
