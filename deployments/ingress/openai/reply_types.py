"""The replies of OpenAI's routes, for their writers and for /openapi.json."""

from typing import Any, Literal, NotRequired, TypedDict

from deployments.ingress.requests.usage import CachedTokens, UsageReply
from deployments.ingress.text.logprobs import ChatLogprobs, CompletionLogprobs

Reason = Literal["stop", "length", "tool_calls", "function_call"]


class CompletionChoice(TypedDict):
    """One completed prompt, or a part of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Reason | None
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


class CompletionReply(TypedDict):
    """Completions; in a stream only the last chunk has usage."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageReply | None]


class ToolFunction(TypedDict):
    """The function of a call; arguments: JSON text."""

    name: NotRequired[str]
    arguments: str


class ToolCallReply(TypedDict):
    """One call; index: of the call in a stream."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: ToolFunction


class ChatMessageReply(TypedDict):
    """The answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallReply]]
    function_call: NotRequired[ToolFunction]


class ChatDelta(TypedDict):
    """New parts of the answer."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    refusal: NotRequired[None]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallReply]]
    function_call: NotRequired[ToolFunction]


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: ChatMessageReply
    logprobs: ChatLogprobs | None
    finish_reason: Reason
    token_ids: NotRequired[list[int]]


class ChatReply(TypedDict):
    """Answers to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]
    prompt_token_ids: NotRequired[list[int]]


class ChatChunkChoice(TypedDict):
    """A part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Reason | None
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageReply | None]
    prompt_token_ids: NotRequired[list[int]]


class ResponseError(TypedDict):
    """Why a response failed."""

    code: str
    message: str


class InputTokens(CachedTokens):
    """Prompt tokens from the prefix cache, and those written to it on request (none)."""

    cache_write_tokens: int


class ResponseUsage(TypedDict):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseReply(TypedDict):
    """A response; its output is a list of messages and function calls."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    store: bool
    usage: ResponseUsage | None


class ResponseEvent(TypedDict):
    """One event of a streamed response; its other fields depend on its type."""

    type: str
    sequence_number: int


class ModelReply(TypedDict):
    """The base model or an adapter, whose parent is the base model; OpenAI's and Anthropic's form.

    created, created_at: when the server started, as a number and as RFC 3339 has it.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_model_len: NotRequired[int]


class ModelsReply(TypedDict):
    """The base model first, then the adapters that the caller may use."""

    object: Literal["list"]
    data: list[ModelReply]
    first_id: str
    last_id: str
    has_more: Literal[False]
