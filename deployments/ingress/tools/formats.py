# ruff: noqa: RUF001 (the bars of DeepSeek)
"""How models write calls of functions: a table of formats, and how one is found."""

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import NamedTuple

from configs.model import ToolParser


class ArgumentStyle(Enum):
    """How the arguments of a named call are written.

    JSON: an object. TAGGED: a pair of tags for each. ESCAPED: an object with bare names and strings
    between marks. PYTHON: keywords.
    """

    JSON = "json"
    TAGGED = "tagged"
    ESCAPED = "escaped"
    PYTHON = "python"


class Tags(NamedTuple):
    """The tags of TAGGED arguments.

    begin: the text with which the opening of one begins. opening: all of it, a pattern with the
    name as its group; its group `string` says whether the value is a string, else the schema does.
    close: after the value. end: after the last argument.
    trims: a line break at each end of a value belongs to the tags.
    """

    begin: str
    opening: str
    close: str
    end: str
    trims: bool = True


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls.

    A call is an object with `name` and `arguments` (or `parameters`), or as `head` says.
    begins: the markers before calls.
    end: the marker after them, "" for none.
    at_start: an answer that begins with { or [ is a call, also without a marker.
    head: what comes before the arguments of a call that is no object: a pattern that begins where
    blanks are skipped and in which NAME is the function; "" if all calls are objects.
    stop: the character at which a text is a head or is none.
    style, tags: of the arguments after a head. quote: the mark around ESCAPED strings.
    tails: texts after a call that mean nothing.
    others: other markers in a call.
    key: the field of the arguments in a grammar.
    constrained: a grammar may hold calls to their schemas where none is required.
    channels: calls are messages in channels, which another reader reads.
    """

    begins: tuple[str, ...] = ()
    end: str = ""
    at_start: bool = False
    head: str = ""
    stop: str = "{"
    style: ArgumentStyle = ArgumentStyle.JSON
    tags: Tags = field(default_factory=partial(Tags, "", "", "", ""))
    quote: str = ""
    tails: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    key: str = "arguments"
    constrained: bool = False
    channels: bool = False

    @property
    def markers(self) -> frozenset[str]:
        """All markers; the reader needs their text also if they are special tokens."""
        marks = (*self.begins, self.end, self.quote, *self.tails, *self.others, *_tokens(self.tags))
        return frozenset(marks) - {""}

    @property
    def named(self) -> bool:
        """Whether a call may be a name and its arguments, without an object around them."""
        return bool(self.head)


def _tokens(tags: Tags) -> tuple[str, ...]:
    """The tags that may be tokens."""
    return (tags.begin, tags.close, tags.end)


def _tagged(function: str, parameter: str, begin: str, end: str, trims: bool = True) -> CallFormat:
    """A format whose functions and parameters are tags with a name, e.g. `<function=NAME>`.

    A block may have several calls, so each function's tag is a marker too.
    function, parameter: the text of such a tag up to the name.
    """
    attribute = r'(?: string="(?P<string>true|false)"| [^<>]{0,64})?'
    close, after = (f"</{mark[1:].split(' ')[0].rstrip('=')}>" for mark in (parameter, function))
    return CallFormat(
        (begin, function),
        end,
        head=rf'(?:{function})?"?NAME"?>',
        stop=">",
        style=ArgumentStyle.TAGGED,
        tags=Tags(parameter, rf'{parameter}"?([^<>"]{{1,256}})"?{attribute}>', close, after, trims),
    )


_DEEPSEEK_CALL, _KIMI_CALL = "<｜tool▁call▁begin｜>", "<|tool_call_begin|>"
_SEPARATOR, _KIMI_ARGUMENTS = "<｜tool▁sep｜>", "<|tool_call_argument_begin|>"
_CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")
_PYTHON_LIST = CallFormat(
    ("<|python_start|>",),
    "<|python_end|>",
    at_start=True,
    head=r"NAME\(",
    stop="(",
    style=ArgumentStyle.PYTHON,
    key="parameters",
)

FORMATS = {
    ToolParser.HERMES: CallFormat(("<tool_call>",), "</tool_call>", constrained=True),
    ToolParser.LLAMA3_JSON: CallFormat(
        ("<|python_tag|>",), at_start=True, key="parameters", constrained=True
    ),
    ToolParser.MISTRAL: CallFormat(
        ("[TOOL_CALLS]",),
        head=r"NAME\s*+(?:\[CALL_ID\]\w++)?\s*+(?:\[ARGS\])?\s*+(?=\{)",
        others=("[ARGS]", "[CALL_ID]"),
        constrained=True,
    ),
    ToolParser.GRANITE: CallFormat(("<|tool_call|>", "<tool_call>"), "</tool_call>"),
    ToolParser.QWEN3_CODER: _tagged("<function=", "<parameter=", "<tool_call>", "</tool_call>"),
    ToolParser.SEED: _tagged("<function=", "<parameter=", "<seed:tool_call>", "</seed:tool_call>"),
    ToolParser.MINIMAX: _tagged(
        "<invoke name=", "<parameter name=", "<minimax:tool_call>", "</minimax:tool_call>"
    ),
    ToolParser.DEEPSEEK_V32: _tagged(
        "<｜DSML｜invoke name=",
        "<｜DSML｜parameter name=",
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        trims=False,
    ),
    ToolParser.GLM: CallFormat(
        ("<tool_call>",),
        head=r"NAME\s*+(?=<)",
        stop="<",
        style=ArgumentStyle.TAGGED,
        tags=Tags(
            "<arg_key>",
            r"<arg_key>([^<>]{1,256})</arg_key>\s{0,64}<arg_value>",
            "</arg_value>",
            "</tool_call>",
            trims=False,
        ),
        others=("</arg_key>", "<arg_value>"),
    ),
    ToolParser.DEEPSEEK: CallFormat(
        ("<｜tool▁calls▁begin｜>", _DEEPSEEK_CALL),
        "<｜tool▁calls▁end｜>",
        head=(
            rf"(?:{_DEEPSEEK_CALL}\s*+)?(?:function\s*+{_SEPARATOR}\s*+)?NAME\s*+"
            rf"(?:{_SEPARATOR}\s*+)?(?:```json\s*+)?(?=\{{)"
        ),
        tails=("```", "<｜tool▁call▁end｜>"),
        others=(_SEPARATOR,),
    ),
    ToolParser.KIMI: CallFormat(
        ("<|tool_calls_section_begin|>", _KIMI_CALL),
        "<|tool_calls_section_end|>",
        head=(
            r"(?:<\|tool_call_begin\|>\s*+)?(?:functions\.)?NAME(?::\d++)?\s*+"
            r"<\|tool_call_argument_begin\|>\s*+(?=\{)"
        ),
        tails=("<|tool_call_end|>",),
        others=(_KIMI_ARGUMENTS,),
    ),
    ToolParser.GEMMA: CallFormat(
        ("<|tool_call>",),
        "<tool_call|>",
        head=r"call:NAME\s*+(?=\{)",
        style=ArgumentStyle.ESCAPED,
        quote='<|"|>',
    ),
    ToolParser.FUNCTION_GEMMA: CallFormat(
        ("<start_function_call>",),
        "<end_function_call>",
        head=r"call:NAME\s*+(?=\{)",
        style=ArgumentStyle.ESCAPED,
        quote="<escape>",
    ),
    ToolParser.PYTHONIC: _PYTHON_LIST,
    ToolParser.LFM2: replace(
        _PYTHON_LIST, begins=("<|tool_call_start|>",), end="<|tool_call_end|>", at_start=False
    ),
    ToolParser.HARMONY: CallFormat(others=_CHANNEL_MARKS, channels=True),
}
FORCED = CallFormat(at_start=True, constrained=True)
"""The format of required calls, which a grammar enforces: one list of objects."""

TRACES = (
    ("[TOOL_CALLS]", ToolParser.MISTRAL),
    ("<｜DSML｜", ToolParser.DEEPSEEK_V32),
    ("<｜tool▁calls▁begin｜>", ToolParser.DEEPSEEK),
    ("<|tool_calls_section_begin|>", ToolParser.KIMI),
    ("<|channel|>", ToolParser.HARMONY),
    ("<start_function_call>", ToolParser.FUNCTION_GEMMA),
    ("<|tool_call>", ToolParser.GEMMA),
    ("<|tool_call|>", ToolParser.GRANITE),
    ("<minimax:tool_call>", ToolParser.MINIMAX),
    ("<seed:tool_call>", ToolParser.SEED),
    ("<function=", ToolParser.QWEN3_CODER),
    ("<arg_key>", ToolParser.GLM),
    ("<|python_start|>", ToolParser.PYTHONIC),
    ("<|tool_call_start|>", ToolParser.LFM2),
    ("<|tool_list_start|>", ToolParser.LFM2),
    ("<tool_call>", ToolParser.HERMES),
)
"""Texts in chat templates that show the format of calls; the more specific first."""
