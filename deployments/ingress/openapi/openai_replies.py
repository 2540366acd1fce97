"""Replies of OpenAI's routes, for the document."""

from typing import Any, Literal, NotRequired, TypedDict

FinishReason = Literal["stop", "length", "tool_calls"]


class OpenAIErrorBody(TypedDict):
    """What went wrong; param: the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(TypedDict):
    """An error of OpenAI's routes."""

    error: OpenAIErrorBody


class CachedTokens(TypedDict):
    """Tokens of the prompt that were computed before."""

    cached_tokens: int


class UsageReply(TypedDict):
    """Token counts; a prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(TypedDict):
    """One entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One completed prompt, or a part of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]


class CompletionReply(TypedDict):
    """Completions; usage is null in a stream's chunks but the last."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageReply | None]


class TopLogprob(TypedDict):
    """A token that could have stood there."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """One entry a token."""

    content: list[TokenLogprob]
    refusal: None


class ToolFunction(TypedDict):
    """A function that is to be called; arguments are JSON."""

    name: NotRequired[str]
    arguments: str


class ToolCallReply(TypedDict):
    """One call; index: in streams, which one this is a part of."""

    index: NotRequired[int]
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: ToolFunction


class ChatMessageReply(TypedDict):
    """The answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCallReply]]


class ChatDelta(TypedDict):
    """What is new of the answer."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    refusal: NotRequired[None]
    tool_calls: NotRequired[list[ToolCallReply]]


class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: ChatMessageReply
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatReply(TypedDict):
    """Answers to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    prompt_logprobs: NotRequired[list[dict[str, Any] | None]]


class ChatChunkChoice(TypedDict):
    """A part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(TypedDict):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageReply | None]


class EmbeddingReply(TypedDict):
    """One input's embedding: numbers, or the base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(TypedDict):
    """Embeddings in the order of the inputs."""

    object: Literal["list"]
    data: list[EmbeddingReply]
    model: str
    usage: EmbeddingUsage


class ResponseError(TypedDict):
    """Why a response failed."""

    code: str
    message: str


class ResponseUsage(TypedDict):
    """Token counts."""

    input_tokens: int
    input_tokens_details: CachedTokens
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
    """One event of a streamed response; its other fields go by its type."""

    type: str
    sequence_number: int


class ModelReply(TypedDict):
    """The base model or an adapter, whose parent is the base model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: NotRequired[int]


class ModelsReply(TypedDict):
    """The base model first, then the adapters that the caller may use."""

    object: Literal["list"]
    data: list[ModelReply]
