"""Tools in Anthropic's form, and their conversion to those of a chat."""

from typing import Any, Literal

from pydantic import ConfigDict

from deployments.ingress.http.body_lists import Closed
from deployments.ingress.http.body_values import Typed
from deployments.ingress.http.errors import invalid
from deployments.ingress.http.unicode import Unicode
from deployments.ingress.requests.request_fields import NO_SUCH

# Fields of a tool that would change the prompt.
_REFUSED: dict[str, tuple[object, ...]] = {
    "allowed_callers": (None, ["direct"]),
    "defer_loading": (None, False),
    "input_examples": (None, []),
}


class ToolInput(Typed):
    """One tool that the client runs; Anthropic's own tools have other types."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: Unicode | None = None
    name: Unicode | None = None
    description: Unicode | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> dict[str, Any]:
        """The tool of a chat."""
        if self.type not in (None, "custom"):
            message = f"tools of type `{self.type}` are not supported: only those with a schema"
            raise invalid(message, "tools", NO_SUCH)
        for name, neutral in _REFUSED.items():
            if (self.model_extra or {}).get(name) not in neutral:
                raise invalid(f"`{name}` of a tool is not supported", "tools", NO_SUCH)
        if self.input_schema is None:
            raise invalid("a tool needs `input_schema`", "tools")
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
            "strict": self.strict,
        }
        given = {name: value for name, value in function.items() if value is not None}
        return {"type": "function", "function": given}


class ToolChoiceInput(Closed):
    """Whether a tool must be called, and which; without parallel use, at most one is."""

    type: Literal["auto", "any", "tool", "none"]
    name: Unicode | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def parallel(self) -> bool | None:
        """The chat's `parallel_tool_calls`."""
        return False if self.disable_parallel_tool_use else None


def chat_choice(choice: ToolChoiceInput) -> str | dict[str, Any]:
    """The tool_choice of a chat."""
    if choice.type == "any":
        return "required"
    if choice.type != "tool":
        return choice.type
    if choice.name is None:
        raise invalid("`tool_choice` of type tool needs `name`", "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}
