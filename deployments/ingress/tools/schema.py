"""The fields of requests about tools: functions, the choice among them, and earlier calls."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StringConstraints,
    model_validator,
)

from deployments.ingress.http.body_lists import Items
from deployments.ingress.http.body_values import Typed
from deployments.ingress.http.errors import invalid
from deployments.ingress.http.unicode import Unicode

_MAX_TOOLS = 128
_UNSUPPORTED = "unsupported_parameter"

FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]


class AsWritten(Typed):
    """Keeps the client's object, which chat templates get, like in transformers."""

    _written: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def as_written(self) -> dict[str, Any]:
        """The client's object."""
        return self._written

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        made = handler(given)
        if isinstance(given, dict):
            made._written = given
        return made


class Function(AsWritten):
    """A function; parameters: the JSON schema of its arguments."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: FunctionName
    description: Unicode | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(AsWritten):
    """One tool; only functions are served."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Unicode
    function: Function | None = None


class Named(Typed):
    """A function by its name."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: Unicode


class AllowedTools(Typed):
    """Some of the tools, and whether one of them must be called."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    mode: Literal["auto", "required"]
    tools: Items["ToolChoice"]


class ToolChoice(Typed):
    """One function that must be called, or several that may be."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Unicode = "function"
    function: Named | None = None
    allowed_tools: AllowedTools | None = None


class CalledFunction(AsWritten):
    """An earlier call; arguments: values, or a model's JSON text, which may be invalid."""

    model_config = ConfigDict(extra="ignore")

    name: Unicode
    arguments: Any = ""

    def rendered(self) -> dict[str, Any]:
        """The call for chat templates: arguments as values, or as text if it is invalid JSON."""
        arguments = self.arguments
        read = _read(arguments) if isinstance(arguments, str) else arguments
        return {**self.as_written, "arguments": read}


class ToolCall(AsWritten):
    """An earlier call with its id."""

    model_config = ConfigDict(extra="ignore")

    id: Unicode | None = None
    type: Unicode = "function"
    function: CalledFunction

    def rendered(self) -> dict[str, Any]:
        """The call for chat templates."""
        return {**self.as_written, "function": self.function.rendered()}


@dataclass(frozen=True)
class Toolbox:
    """The tools of one request.

    functions: in the prompt.
    callable: those that may be called.
    forced: the answer must be a call.
    parallel: the answer may have several calls.
    legacy: the request has `functions` instead of `tools`.
    param: the field with the choice, for error messages.
    shown: the tools for chat templates.
    """

    functions: tuple[Function, ...]
    callable: tuple[Function, ...]
    forced: bool
    parallel: bool
    legacy: bool
    param: str = "tool_choice"
    shown: tuple[dict[str, Any], ...] = ()


class ToolFields(Typed):
    """A chat request's fields about tools; functions and function_call are the older form."""

    tools: Items[Tool] | None = Field(None, max_length=_MAX_TOOLS)
    tool_choice: Unicode | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Items[Function] | None = Field(None, max_length=_MAX_TOOLS)
    function_call: Unicode | Named | None = None

    @property
    def toolbox(self) -> Toolbox | None:
        """The tools of this request; None if none may be called."""
        legacy = not self.tools and bool(self.functions)
        if self.tools and self.functions:
            raise invalid("`functions` cannot be combined with `tools`", "functions")
        param = "function_call" if legacy else "tool_choice"
        functions = self.functions or [] if legacy else _functions(self.tools or [])
        _refuse_twice(functions, "functions" if legacy else "tools")
        choice = _legacy_choice(self.function_call) if legacy else self.tool_choice
        if not functions:
            _refuse_choice(self.tool_choice, "tool_choice", "tools")
            _refuse_choice(self.function_call, "function_call", "functions")
            return None
        if choice == "none":
            return None
        may, forced = _callable(choice, functions, param)
        # OpenAI: a named function is called exactly once, whatever `parallel_tool_calls` is.
        parallel = not (legacy or self.parallel_tool_calls is False or _names_one(choice))
        shown = [{"type": "function", "function": function.as_written} for function in functions]
        if not legacy:
            shown = [tool.as_written for tool in self.tools or ()]
        return Toolbox(tuple(functions), may, forced, parallel, legacy, param, tuple(shown))


def _functions(tools: Sequence[Tool]) -> list[Function]:
    for tool in tools:
        if tool.type != "function":
            message = f"tools of type `{tool.type}` are not supported: only functions"
            raise invalid(message, "tools", _UNSUPPORTED)
        if tool.function is None:
            raise invalid("a tool of type function needs `function`", "tools")
    return [tool.function for tool in tools if tool.function is not None]


def _refuse_twice(functions: Sequence[Function], param: str) -> None:
    names = [function.name for function in functions]
    for name in names:
        if names.count(name) > 1:
            raise invalid(f"the function `{name}` is defined more than once", param)


def _refuse_choice(choice: object, param: str, missing: str) -> None:
    """Refuse a choice without tools, unless it is none or auto."""
    if choice not in (None, "none", "auto"):
        raise invalid(f"`{param}` needs `{missing}`", param)


def _legacy_choice(choice: str | Named | None) -> str | ToolChoice | None:
    return ToolChoice(function=choice) if isinstance(choice, Named) else choice


def _names_one(choice: str | ToolChoice | None) -> bool:
    """Whether the choice is one function, not a mode or a list."""
    if isinstance(choice, ToolChoice):
        return choice.type != "allowed_tools"
    return choice not in (None, "auto", "required")


def _callable(
    choice: str | ToolChoice | None, functions: Sequence[Function], param: str
) -> tuple[tuple[Function, ...], bool]:
    """The functions that may be called, and whether one must be."""
    if choice is None or choice in ("auto", "required"):
        return tuple(functions), choice == "required"
    if isinstance(choice, str):  # LoRAX names a function by a string.
        return _by_name([choice], functions, param), True
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        allowed = choice.allowed_tools
        names = [_name(tool, param) for tool in allowed.tools]
        return _by_name(names, functions, param), allowed.mode == "required"
    return _by_name([_name(choice, param)], functions, param), True


def _name(choice: ToolChoice, param: str) -> str:
    if choice.type != "function" or choice.function is None:
        raise invalid(f"`{param}` must be none, auto, required, or name a function", param)
    return choice.function.name


def _by_name(
    names: Sequence[str], functions: Sequence[Function], param: str
) -> tuple[Function, ...]:
    by_name = {function.name: function for function in functions}
    for name in names:
        if name not in by_name:
            raise invalid(f"`{param}` names `{name}`, which is none of the functions", param)
    if not names:
        raise invalid(f"`{param}` allows no function", param)
    return tuple(by_name[name] for name in dict.fromkeys(names))


def _read(arguments: str) -> Any:
    """The value of arguments in JSON; "" means no arguments.

    Invalid or unfinished JSON is returned as it is: clients send back what a model wrote.
    """
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
