"""Chat templates, rendered as transformers' `apply_chat_template` does it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn, Protocol

import msgspec
from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from deployments.ingress.chat_templates.continuations import continued, marked
from deployments.ingress.chat_templates.message_forms import Forms, Message
from deployments.ingress.http.errors import RequestError, invalid

# What a template may raise over messages that it did not expect.
_TEMPLATE_FAULTS = (TemplateError, ArithmeticError, AssertionError, AttributeError, LookupError,
                    RuntimeError, TypeError, ValueError)  # fmt: skip
# The names of a message's reasoning, the one that most templates read first.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MAX_FAULT = 500


class Conversation(msgspec.Struct, frozen=True):
    """What one prompt is made of.

    messages: as the client wrote them. variables: what else the template reads. tools_in_words:
    what a template that reads no tools is to say of them, "" for nothing. continues: the field of
    the last message that the answer goes on with, "" for a new message.
    """

    messages: list[dict[str, Any]]
    variables: dict[str, Any] = {}
    tools_in_words: str = ""
    continues: str = ""


class TemplateText(Protocol):
    """What is known of a template without rendering it."""

    source: str

    def reads(self, variable: str) -> bool:
        """Whether the template uses this variable."""
        ...


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; it is a scope of its own."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        """A block that calls what lies between the two marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> Any:
        return caller()


class _MakeDict:
    """`dict` in templates: the class itself would be a way to its methods."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As `dict.fromkeys`."""
        return dict.fromkeys(*args)


class _PlainNamespace(Namespace):
    """`namespace` in templates, which holds no name that begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        given = dict(*rest, **kwargs)
        for name in given:
            _refuse_hidden(name)
        Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        """Set one name."""
        _refuse_hidden(name)
        super().__setitem__(name, value)


def _refuse_hidden(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}: it begins with an underscore")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: unescaped, where Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _MakeDict(),
        "namespace": _PlainNamespace,
    }
    return environment


class ChatTemplate:
    """One chat template; special tokens are variables of every rendering."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template; a broken one raises jinja2.TemplateSyntaxError."""
        self.source = source
        self._environment = _environment()
        self._template = self._environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self._forms = Forms(self._tried)

    @cached_property
    def _variables(self) -> frozenset[str]:
        parsed = self._environment.parse(self.source)
        return frozenset(meta.find_undeclared_variables(parsed))

    def reads(self, variable: str) -> bool:
        """Whether the template uses this variable."""
        return variable in self._variables

    def render(self, conversation: Conversation) -> str:
        """The prompt; RequestError when the template refuses the messages."""
        # Clients send fields that are not set as null; most templates expect them to be absent.
        messages = [_without_nulls(message) for message in conversation.messages]
        if "developer" not in self.source:
            messages = [_as_system(message) for message in messages]
        messages = self._forms.fitted(messages, conversation.tools_in_words)
        messages = [_aliased(message) for message in messages]
        if not conversation.continues:
            return self._run(messages, conversation.variables)
        last, said = marked(messages[-1], conversation.continues, self.source)
        rendered = self._run([*messages[:-1], last], conversation.variables)
        return continued(rendered, said)

    def _run(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        values: dict[str, Any] = {"add_generation_prompt": True, "tools": None, "documents": None}
        values |= self._special_tokens
        values |= variables
        values["messages"] = messages
        try:
            return self._template.render(values)
        except _TEMPLATE_FAULTS as fault:
            words = str(fault)[:_MAX_FAULT]
            raise invalid(f"the chat template refused the messages: {words}", "messages") from fault

    def _tried(self, messages: Sequence[Message]) -> str:
        """What becomes of these messages, "" if the template refuses them."""
        try:
            return self._run(messages, {"add_generation_prompt": False})
        except RequestError:
            return ""


def _without_nulls(message: Message) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}


def _as_system(message: dict[str, Any]) -> dict[str, Any]:
    """A developer's message by the role that it had before."""
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _aliased(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning by the names that templates read."""
    found = next((message[name] for name in _REASONING if name in message), None)
    if found is None:
        return message
    return {"thinking": found, **message, "reasoning_content": found}
