"""OpenAI's requests as a 2026 client sends them."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from configs.reading import is_encodable
from configs.wire.sampling import LARGEST_TOP_K, MAX_ALLOWED_IDS, MAX_LOGIT_BIAS, Sampling, Stopping
from deployments.ingress.adapter_names.merges import MergedAdapters
from deployments.ingress.http.body_lists import Items, at_most
from deployments.ingress.http.body_values import Integer, Natural, Positive, Typed
from deployments.ingress.http.errors import invalid
from deployments.ingress.http.unicode import Unicode
from deployments.ingress.requests.request_fields import refuse_others
from deployments.ingress.structured.constraints import Constraint
from deployments.ingress.structured.fields import Constrainable
from deployments.ingress.tools.schema import AsWritten, CalledFunction, ToolCall, ToolFields

# Other servers' fields that name an adapter; ignoring one would run the wrong adapter.
_NAMES_OF_ADAPTERS = ("adapter_id", "lora_path")

# Small enough to keep the likeliest token alone.
_SMALLEST_TOP_P = 1e-30

_MAX_STOP_IDS = 256
_MAX_BAD_WORDS = 64
_BadWord = Annotated[Unicode, Field(min_length=1, max_length=256)]
# The names of fields are strings.
_Token = Annotated[int, Field(ge=0, strict=False)]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Biases = Annotated[dict[_Token, _Bias], Field(max_length=MAX_LOGIT_BIAS), at_most(MAX_LOGIT_BIAS)]

# The types of `prompt`, for /openapi.json.
PromptInput = str | list[str] | list[int] | list[list[int]]


class StreamOptions(Typed):
    """What a stream contains besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: Literal[False] | None = None


class _Body(Constrainable):
    """Fields of both routes; unknown ones stay in `model_extra`, for `refuse_unsupported`."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="allow")

    model: Unicode = Field(max_length=1024)
    max_tokens: Positive | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Integer | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: _Biases | None = None
    watermark: bool | None = None
    seed: Integer | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Unicode | Items[Unicode] | None = None
    n: Positive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop_token_ids: Items[Natural] | None = Field(None, max_length=_MAX_STOP_IDS)
    ignore_eos: bool | None = None
    ignore_eos_token: bool | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Items[_BadWord] | None = Field(None, max_length=_MAX_BAD_WORDS)
    allowed_token_ids: Items[Natural] | None = Field(None, max_length=MAX_ALLOWED_IDS)
    truncate_prompt_tokens: Integer | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    skip_special_tokens: bool | None = None
    detokenize: bool | None = None
    return_token_ids: bool | None = None
    min_tokens: Natural | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: Natural | None = None
    adapter_source: Unicode | None = None
    merged_adapters: MergedAdapters | None = None
    api_token: Unicode | None = None
    cache_salt: Unicode | None = Field(None, min_length=1)

    @property
    def choices(self) -> int:
        """How many choices each prompt has in the reply."""
        return self.n or 1

    @property
    def candidates(self) -> int:
        """How many sequences are generated for each prompt."""
        return self.choices

    @property
    def fills_context(self) -> bool:
        """Whether an answer that may not be as long as requested ends with the context."""
        return False

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
        """Requested alternatives of each token; -1: no logprobs."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int:
        """Requested alternatives of each prompt token; -1: no logprobs of the prompt."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    def sampling(self, seed: int, stopping: Stopping, constraint: Constraint) -> Sampling:
        """The sampling of one sequence, for the driver."""
        temperature = _or(self.temperature, 1.0)
        drawn = temperature > 0
        return Sampling(
            temperature=temperature,
            top_k=min(max(0, self.top_k or 0), LARGEST_TOP_K) if drawn else 0,
            # 0 keeps the likeliest token alone, as in transformers.
            top_p=max(_or(self.top_p, 1.0), _SMALLEST_TOP_P) if drawn else 1.0,
            min_p=_or(self.min_p, 0.0) if drawn else 0.0,
            typical_p=_or(self.typical_p, 1.0) if drawn else 1.0,
            seed=seed,
            # The best candidates are selected by their logprobs.
            logprobs=max(self.num_logprobs, 0 if self.candidates > self.choices else -1),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            watermark=bool(self.watermark),
            logit_bias=tuple((self.logit_bias or {}).items()),
            masked_ids=stopping.stop_token_ids if stopping.min_new_tokens > 0 else (),
            masked_tokens=stopping.min_new_tokens,
            json_schema=constraint.json_schema,
            grammar=constraint.grammar,
        )

    def refuse_unsupported(self) -> None:
        """Raise for a field that would change the result and is not implemented."""
        refuse_others(self.model_extra)
        for name, value in (self.model_extra or {}).items():
            if name in _NAMES_OF_ADAPTERS and value not in (None, "", self.model):
                message = f"`{name}` is not read here: name the adapter in `model`"
                raise invalid(message, name, "unsupported_parameter")


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


class CompletionBody(_Body):
    """POST /v1/completions."""

    prompt: list[str | list[int]]
    max_tokens: Natural | None = None
    logprobs: Natural | None = None
    echo: bool | None = None
    best_of: Positive | None = None

    @property
    def num_logprobs(self) -> int:
        """Requested alternatives of each token; -1: no logprobs."""
        return -1 if self.logprobs is None else self.logprobs

    @property
    def candidates(self) -> int:
        """How many sequences are generated for each prompt; the reply has the best of them."""
        return max(self.choices, self.best_of or 1)

    @property
    def num_prompt_logprobs(self) -> int:
        """Requested alternatives of each prompt token; with `echo` at least `logprobs`."""
        return max(super().num_prompt_logprobs, self.num_logprobs if self.echo else -1)

    @field_validator("prompt", mode="plain", json_schema_input_type=PromptInput)
    @classmethod
    def _prompts(cls, given: object) -> list[str | list[int]]:
        return prompts_of(given)


def prompts_of(given: object) -> list[str | list[int]]:
    """A list with one entry for each prompt, from any of OpenAI's four forms."""
    prompts = [given] if isinstance(given, str) or _is_ids(given) else given
    if isinstance(prompts, list) and all(isinstance(p, str) or _is_ids(p) for p in prompts):
        if not all(is_encodable(prompt) for prompt in prompts if isinstance(prompt, str)):
            raise ValueError("must be valid Unicode")
        return prompts
    raise ValueError("must be a string, token ids, or a list of strings or of token id lists")


def _is_ids(value: object) -> bool:
    """Whether this is a prompt of token ids. `type`, because a bool is an int too."""
    return isinstance(value, list) and bool(value) and all(type(id) is int for id in value)


class ContentPart(Typed):
    """One part of a message; only text is served."""

    model_config = ConfigDict(extra="allow")

    type: Unicode
    text: Unicode | None = None


class Message(AsWritten):
    """One message of a chat; the template gets it as the client wrote it."""

    model_config = ConfigDict(extra="allow")

    role: Unicode
    content: Unicode | Items[ContentPart] | None = None
    name: Unicode | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: Unicode | None = None
    function_call: CalledFunction | None = None

    def rendered(self) -> dict[str, Any]:
        """The message with current roles and fields, and arguments of calls as values."""
        _check_text(self.content)
        message = dict(self._written)
        if self.role == "function":
            message["role"] = "tool"
        calls = [call.rendered() for call in self.tool_calls or ()]
        if message.pop("function_call", None) is not None and self.function_call is not None:
            calls.append({"type": "function", "function": self.function_call.rendered()})
        return {**message, "tool_calls": calls} if calls else message


class ChatBody(_Body, ToolFields):
    """POST /v1/chat/completions.

    chat_template_kwargs: variables of the template.
    include_reasoning: false leaves the reasoning out of the reply.
    separate_reasoning: false leaves it in the text, with the model's own marks.
    """

    messages: Items[Message] = Field(min_length=1)
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Natural | None = None
    documents: Items[dict[str, Any]] | None = None
    reasoning_effort: Unicode | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    chat_template: Unicode | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Unicode | None = None

    @property
    def num_logprobs(self) -> int:
        """Requested alternatives of each token; -1: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else -1

    def rendered_messages(self) -> list[dict[str, Any]]:
        """The messages for the template; results of calls get the names of their functions."""
        called: dict[str | None, str] = {}
        rendered = []
        for message in self.messages:
            called |= {call.id: call.function.name for call in message.tool_calls or ()}
            plain = message.rendered()
            is_named = plain.get("name") is not None
            if plain["role"] == "tool" and message.tool_call_id in called and not is_named:
                plain["name"] = called[message.tool_call_id]
            rendered.append(plain)
        return rendered


def _check_text(content: str | list[ContentPart] | None) -> None:
    for part in content if isinstance(content, list) else ():
        if part.type == "text" and part.text is None:
            raise invalid("content of type `text` needs `text`, a string", "messages")
        if part.type != "text":
            raise invalid(f"content of type `{part.type}` is not supported: only text", "messages")
