"""How models mark their reasoning, and how the marks of one model are found."""

from enum import Enum
from typing import NamedTuple

from configs.model import ReasoningParser
from deployments.ingress.chat_templates.template import TemplateText
from deployments.ingress.text.tokenizer import ModelTokenizer


class Start(Enum):
    """Where an answer begins: in its reasoning, in its text, or where its first words say."""

    REASONING = "reasoning"
    TEXT = "text"
    EITHER = "either"


class ReasoningFormat(NamedTuple):
    """The marks around the reasoning of an answer.

    channels: the answer is a sequence of messages in channels, each with a header.
    """

    begin: str
    end: str
    channels: bool = False

    @property
    def markers(self) -> frozenset[str]:
        """All marks; the reader needs the text of their tokens also if these are special."""
        return _CHANNEL_MARKERS if self.channels else frozenset((self.begin, self.end))

    def start(self, prompt: str) -> Start:
        """Where an answer to this prompt begins; many templates write a mark at its end."""
        written = prompt.rstrip()
        if written.endswith(self.begin):
            return Start.REASONING
        return Start.TEXT if written.endswith(self.end) else Start.EITHER

    def start_within(self, message: str) -> Start:
        """Where the continuation of an unfinished message begins."""
        return (
            Start.REASONING if message.rfind(self.begin) > message.rfind(self.end) else Start.TEXT
        )


class FreePart(NamedTuple):
    """The part of an answer before its constraint, as `Sampling.free_from` and `free_until`."""

    begin: int = -1
    end: tuple[int, ...] = ()


async def free_part(
    format: ReasoningFormat, start: Start, tokenizer: ModelTokenizer, vocab_size: int
) -> FreePart | None:
    """The reasoning as tokens; None if this model's marks are no tokens of their own.

    vocab_size: of the model, which may lack some of its tokenizer's tokens.
    """
    if start is Start.TEXT:
        return FreePart()
    found = tokenizer.added_within(format.markers)
    ids = {token: id for token, id in found.items() if id < vocab_size}
    if format.channels:
        if not format.markers <= ids.keys():
            return None
        final = await tokenizer.encode("final", add_special_tokens=False)
        # Whatever comes before the message to the user: reasoning, or nothing. Its header may name
        # a format before the last mark.
        return FreePart(end=(ids["<|channel|>"], *final, ids["<|message|>"]))
    if format.end not in ids:
        return None
    if start is Start.REASONING:
        return FreePart(end=(ids[format.end],))
    # A mark may be a token and a word.
    first = max(filter(format.begin.startswith, ids), key=len, default=None)
    return None if first is None else FreePart(ids[first], (ids[format.end],))


_CHANNEL_MARKERS = frozenset((
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>",
))  # fmt: skip

FORMATS = {
    ReasoningParser.HARMONY: ReasoningFormat(
        "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", channels=True
    ),
    ReasoningParser.MISTRAL: ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningParser.GEMMA: ReasoningFormat("<|channel>thought", "<channel|>"),
    ReasoningParser.SEED: ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningParser.COMMAND: ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    ReasoningParser.GRANITE: ReasoningFormat(
        "Here is my thought process:", "Here is my response:"
    ),
    ReasoningParser.THINK: ReasoningFormat("<think>", "</think>"),
}  # fmt: skip
"""In the order in which `auto` looks for their marks in a chat template."""


def reasoning_format(
    parser: ReasoningParser, template: TemplateText | None
) -> ReasoningFormat | None:
    """The marks of this model; None if its answers are not split."""
    if parser is not ReasoningParser.AUTO:
        return FORMATS.get(parser)
    source = template.source if template is not None else ""
    return next((one for one in FORMATS.values() if one.begin in source or one.end in source), None)
