"""The form of content that a template supports for each role, found by rendering test messages.

Most templates support text, some also a list of parts, few only parts. In the wrong form, a list
would be in the prompt as Python prints it, and a text would be missing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Content = str | list[dict[str, Any]]

# Digits: templates may change case or remove blanks.
_MARKER = "4170917"
# A field that no template reads: it is in the prompt only if a part is printed as a whole.
_FIELD = "8250824"


class Forms:
    """Converts messages to the forms that one template supports."""

    def __init__(self, render: Callable[[Sequence[Message]], str]) -> None:
        """render: renders messages with the template; "" if the template refuses them."""
        self._render = render
        self._supported: dict[tuple[str, bool], bool] = {}

    def fitted(self, messages: list[dict[str, Any]], tools_text: str) -> list[dict[str, Any]]:
        """The messages in the template's forms, with `tools_text` in the first suitable one."""
        if tools_text:
            messages = self._with_tools_text(messages, tools_text)
        return [self._fitted(message) for message in messages]

    def _fitted(self, message: dict[str, Any]) -> dict[str, Any]:
        role, content = message["role"], message.get("content")
        if isinstance(content, list) and not self._supports(role, parts=True):
            return {**message, "content": text_of(content)}
        if not isinstance(content, str) or self._supports(role, parts=False):
            return message
        if self._supports(role, parts=True):
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _with_tools_text(
        self, messages: list[dict[str, Any]], tools_text: str
    ) -> list[dict[str, Any]]:
        """The messages with `tools_text` in the system message.

        If the template refuses a system message, it is in the first user message.
        """
        if messages[0]["role"] == "system":
            content = text_of(messages[0].get("content") or "")
            first = {**messages[0], "content": f"{content}\n\n{tools_text}".lstrip()}
            return [first, *messages[1:]]
        if self._supports("system", parts=False) or self._supports("system", parts=True):
            return [{"role": "system", "content": tools_text}, *messages]
        for index, message in enumerate(messages):
            if message["role"] == "user":
                content = text_of(message.get("content") or "")
                merged = {**message, "content": f"{tools_text}\n\n{content}".rstrip()}
                return [*messages[:index], merged, *messages[index + 1 :]]
        return [{"role": "user", "content": tools_text}, *messages]

    def _supports(self, role: str, parts: bool) -> bool:
        role = role if role in _BEFORE else "user"  # Clients may send any others.
        supported = self._supported.get((role, parts))
        if supported is None:
            prompt = self._render(_test_messages(role, parts))
            supported = self._supported[role, parts] = _MARKER in prompt and _FIELD not in prompt
        return supported


def text_of(content: Content) -> str:
    """A content as one text; parts are joined by line breaks."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or "") for part in content)


_CALL = {"id": "417091700", "type": "function", "function": {"name": "f", "arguments": {}}}
# The messages before a message of each role, as templates check the order of roles.
_BEFORE: Mapping[str, tuple[str, ...]] = {
    "system": (), "developer": (), "user": (), "assistant": ("user",), "tool": ("user", "calls"),
}  # fmt: skip


def _test_messages(role: str, parts: bool) -> list[dict[str, Any]]:
    """A conversation in which a message of this role contains the marker."""

    def content(text: str) -> Content:
        return [{"type": "text", "text": text, _FIELD: _FIELD}] if parts else text

    user = {"role": "user", "content": content("a")}
    calls = {"role": "assistant", "content": content(""), "tool_calls": [_CALL]}
    kinds = {"user": user, "calls": calls}
    message: dict[str, Any] = {"role": role, "content": content(_MARKER)}
    if role == "tool":
        message |= {"name": "f", "tool_call_id": _CALL["id"]}
    before = [kinds[kind] for kind in _BEFORE[role]]
    after = [user] if role in ("system", "developer") else []
    return [*before, message, *after]
