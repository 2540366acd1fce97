"""OpenAI's requests as a 2026 client sends them, and what is not built yet."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator

from configs.sampling import MAX_LOGIT_BIAS
from deployments.ingress.errors import invalid
from deployments.ingress.schemas import ResponseFormat
from deployments.ingress.unicode import Unicode, is_encodable

# A row goes away when its parameter is built; the values are those that change nothing.
NOT_YET: Mapping[str, tuple[object, ...]] = {
    "suffix": (None, ""),
    "length_penalty": (None, 1),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
    "prompt_embeds": (None,),
    "truncate_prompt_tokens": (None,),
    "bad_words": (None, []),
    "allowed_token_ids": (None, []),
    "logits_processors": (None, []),
    "truncate": (None,),
    "merged_adapters": (None,),
    "return_k_alternatives": (None,),
    "decoder_input_details": (None, False),
    "guideline": (None, ""),
    "tool_prompt": (None, ""),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None, []),
    "guided_grammar": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
}

_MAX_STOP_IDS = 256
_Bias = Annotated[float, Field(ge=-100, le=100)]

# What clients may write as `prompt`, for the API's documentation.
PromptInput = str | list[str] | list[int] | list[list[int]]


class StreamOptions(BaseModel):
    """What a stream carries beside the text."""

    include_usage: bool | None = None


class _Body(BaseModel):
    """Fields of both routes; unknown ones stay in `model_extra`, where NOT_YET looks."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="allow")

    model: Unicode = Field(max_length=1024)
    max_tokens: PositiveInt | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: dict[NonNegativeInt, _Bias] | None = Field(None, max_length=MAX_LOGIT_BIAS)
    watermark: bool | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Unicode | list[Unicode] | None = None
    n: PositiveInt | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop_token_ids: list[NonNegativeInt] | None = Field(None, max_length=_MAX_STOP_IDS)
    ignore_eos: bool | None = None
    ignore_eos_token: bool | None = None
    min_tokens: NonNegativeInt | None = None
    response_format: ResponseFormat | None = None
    adapter_source: Unicode | None = None
    api_token: Unicode | None = None

    @property
    def choices(self) -> int:
        """How many choices the client is shown for each prompt."""
        return self.n or 1

    @property
    def candidates(self) -> int:
        """How many sequences are generated for each prompt."""
        return self.choices

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_logprobs(self) -> int:
        """Alternatives wanted with each token; -1 for no logprobs at all."""
        raise NotImplementedError

    def refuse_unbuilt(self) -> None:
        """Raise for a parameter that would change the result and is not built."""
        for name, value in (self.model_extra or {}).items():
            if name in NOT_YET and value not in NOT_YET[name]:
                raise invalid(f"`{name}` is not supported yet", name, "unsupported_parameter")


class CompletionBody(_Body):
    """POST /v1/completions."""

    prompt: list[str | list[int]]
    logprobs: NonNegativeInt | None = None
    echo: bool | None = None
    best_of: PositiveInt | None = None

    @property
    def num_logprobs(self) -> int:
        """Alternatives wanted with each token; -1 for no logprobs at all."""
        return -1 if self.logprobs is None else self.logprobs

    @property
    def candidates(self) -> int:
        """How many sequences are generated for each prompt; the best of them are shown."""
        return max(self.choices, self.best_of or 1)

    @field_validator("prompt", mode="plain", json_schema_input_type=PromptInput)
    @classmethod
    def _prompts(cls, given: object) -> list[str | list[int]]:
        """One entry a prompt, whichever of the four forms was given."""
        prompts = [given] if isinstance(given, str) or _is_ids(given) else given
        if isinstance(prompts, list) and all(_is_text(p) or _is_ids(p) for p in prompts):
            return prompts
        raise ValueError("must be a string, token ids, or a list of strings or of token id lists")

    def refuse_unbuilt(self) -> None:
        """Raise for a parameter that would change the result and is not built."""
        super().refuse_unbuilt()
        if self.echo and self.logprobs is not None:
            message = "`echo` together with `logprobs` is not supported yet"
            raise invalid(message, "echo", "unsupported_parameter")


def _is_ids(value: object) -> bool:
    """Whether this is a prompt of token ids; `type` is asked because True is an int too."""
    return isinstance(value, list) and bool(value) and all(type(id) is int for id in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and is_encodable(value)


class ContentPart(BaseModel):
    """One part of a message; only text is served."""

    model_config = ConfigDict(extra="allow")

    type: Unicode
    text: Unicode | None = None


class Message(BaseModel):
    """One message of a chat; other fields go to the template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Unicode
    content: Unicode | list[ContentPart] | None = None


class ChatBody(_Body):
    """POST /v1/chat/completions; chat_template_kwargs are variables for the template."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: NonNegativeInt | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def num_logprobs(self) -> int:
        """Alternatives wanted with each token; -1 for no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else -1

    def rendered_messages(self) -> list[dict[str, Any]]:
        """Messages as templates know them: text content, no `developer` role."""
        return [_as_templates_know(message) for message in self.messages]


def _as_templates_know(message: Message) -> dict[str, Any]:
    plain = message.model_dump(exclude_none=True)
    plain["content"] = _text_of(message.content)
    if message.role == "developer":
        plain["role"] = "system"
    return plain


def _text_of(content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text" or part.text is None:
            raise invalid(f"content of type `{part.type}` is not supported: only text", "messages")
    return "\n".join(part.text or "" for part in content)
