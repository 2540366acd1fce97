"""The replies of Anthropic's routes, for their writers and for /openapi.json."""

from typing import Any, Literal, NotRequired, TypedDict

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class ThinkingTokens(TypedDict):
    """Tokens of the thinking, among the output's."""

    thinking_tokens: int


class MessageUsage(TypedDict):
    """Token counts; input_tokens: those of the prompt that were not in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[ThinkingTokens]


class MessageReply(TypedDict):
    """An answer: a list of blocks."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(TypedDict):
    """One event of a streamed answer; its other fields depend on its type."""

    type: str
    index: NotRequired[int]


class TokenCount(TypedDict):
    """The tokens of a prompt."""

    input_tokens: int
