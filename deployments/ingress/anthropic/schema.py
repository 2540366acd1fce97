"""The bodies of Anthropic's routes, and their conversion to a chat."""

from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from deployments.ingress.anthropic.conversation import (
    Block,
    MessageInput,
    chat_content,
    chat_messages,
)
from deployments.ingress.anthropic.fields import IGNORED, NAMES, REFUSED, THREADLESS
from deployments.ingress.anthropic.tool_fields import ToolChoiceInput, ToolInput, chat_choice
from deployments.ingress.http.body_lists import Closed, Items
from deployments.ingress.http.body_values import Integer, Positive, Typed
from deployments.ingress.http.errors import invalid
from deployments.ingress.http.unicode import Unicode
from deployments.ingress.requests.conversations import SWITCHES
from deployments.ingress.requests.renaming import malformed_chat
from deployments.ingress.requests.request_fields import NO_SUCH, refuse_others
from deployments.ingress.requests.schema import ChatBody

_SMALLEST_BUDGET = 1024


class ContextFillingChat(ChatBody):
    """A chat whose answer may end with the model's context, however long it was to be."""

    @property
    def fills_context(self) -> bool:
        """Whether an answer that may not be as long as requested ends with the context."""
        return True


class Thinking(Closed):
    """Whether the model thinks before it answers; budget_tokens: a hint, which is not enforced."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Integer | None = Field(None, ge=_SMALLEST_BUDGET)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Closed):
    """The schema of the answer."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Closed):
    """The form of the answer, and the effort for it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensBody(Typed):
    """POST /v1/messages/count_tokens: what the prompt is made of.

    Other fields are kept, for `as_chat`, which refuses those that no chat has.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="allow")

    model: Unicode = Field(max_length=1024)
    messages: Items[MessageInput] = Field(min_length=1)
    system: Unicode | Items[Block] | None = None
    tools: Items[ToolInput] | None = None
    tool_choice: ToolChoiceInput | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    thread: dict[str, Any] | None = None

    @property
    def shows_thinking(self) -> bool:
        """Whether the reply has the text of the thinking."""
        thinking = self.thinking
        return thinking is None or (thinking.type != "disabled" and thinking.display != "omitted")

    def as_chat(self) -> ChatBody:
        """The same request as a chat; RequestError for what is not supported."""
        if self.thread is not None:
            message = "`thread` is not supported: send the whole conversation in `messages`"
            raise invalid(message, "thread", THREADLESS)
        given = self.model_extra or {}
        refuse_others(given, REFUSED)
        for name, value in given.items():
            known = name in ChatBody.model_fields or name in REFUSED or name in IGNORED
            if not known and value is not None:
                raise invalid(f"`{name}`: there is no such field", name, NO_SUCH)
        extra = {name: given[name] for name in given if name in ChatBody.model_fields}
        chat = {**extra, **self._chat(given.get("chat_template_kwargs"))}
        try:
            return ContextFillingChat.model_validate(chat)
        except ValidationError as fault:
            raise malformed_chat(fault, chat, NAMES) from fault

    def _chat(self, variables: object) -> dict[str, Any]:
        choice, config = self.tool_choice, self.output_config or OutputConfig()
        chat: dict[str, Any] = {
            "model": self.model,
            "messages": self._messages(),
            # As in OpenAI's chats, the last message is continued only if that is requested.
            "continue_final_message": True if self.messages[-1].role == "assistant" else None,
            "tools": [tool.as_chat() for tool in self.tools] if self.tools else None,
            "tool_choice": chat_choice(choice) if choice is not None else None,
            "parallel_tool_calls": choice.parallel if choice is not None else None,
            "reasoning_effort": config.effort,
            "response_format": self._format(config),
            "chat_template_kwargs": self._variables(variables),
            "include_reasoning": None if self.shows_thinking else False,
        }
        return {name: value for name, value in chat.items() if value is not None}

    def _messages(self) -> list[dict[str, Any]]:
        messages = chat_messages(self.messages)
        if not self.system:
            return messages
        return [{"role": "system", "content": chat_content(self.system, "system")}, *messages]

    def _format(self, config: OutputConfig) -> dict[str, Any] | None:
        """The chat's response_format; `output_format` is the older name."""
        given = config.format or self.output_format
        if given is None:
            return None
        schema = {"name": "answer", "schema": given.json_schema, "strict": True}
        return {"type": "json_schema", "json_schema": schema}

    def _variables(self, given: object) -> object:
        """The template's variables: whether it is to think, where it reads that."""
        if self.thinking is None or not isinstance(given, dict | None):
            return given
        return dict.fromkeys(SWITCHES, self.thinking.type != "disabled") | (given or {})


class MessagesBody(CountTokensBody):
    """POST /v1/messages; the other fields of a chat (seed, min_p, ...) are served too."""

    max_tokens: Positive
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: Integer | None = Field(None, ge=-1)
    stop_sequences: Items[Unicode] | None = None
    stream: bool | None = None

    def _chat(self, variables: object) -> dict[str, Any]:
        thinking = self.thinking
        if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is None:
            raise invalid("`thinking.budget_tokens` is missing", "thinking")
        if thinking is not None and (thinking.budget_tokens or 0) >= self.max_tokens:
            raise invalid("`thinking.budget_tokens` must be less than max_tokens", "thinking")
        own = {
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "stream": self.stream,
        }
        set_here = {name: value for name, value in own.items() if value is not None}
        return {**super()._chat(variables), **set_here}
