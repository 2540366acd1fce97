"""What a runner takes for one step, and what it returns.

A runner keeps each slot's tokens, block table, adapter slot and sampling parameters, so a running
request needs only one `StepRow`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from configs.wire.plan import PromptReport, RequestJoin, StepRow, TokenLogprobs


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one step, in the order in which their tokens are returned.

    guesses: tokens that heads guess behind each row; 0: none.
    """

    joins: list[RequestJoin]
    rows: list[StepRow]
    guesses: int = 0


@dataclass(frozen=True)
class SampledTokens:
    """What one step sampled; the fields are those of `configs.wire.plan.StepResult`.

    tokens: `num_samples` token ids for each row, in row order.
    logprobs: None when no row requests any, else one entry (or None) for each token.
    reports: what rows report about their prompts, None when no row does.
    idle_seconds: how long the device had nothing to do before the step; None if unknown.
    captured: the step was a replay of a CUDA graph.
    faults: (row's index, reason) of rows with a matcher that failed; None without any.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    reports: list[PromptReport] | None = None
    idle_seconds: float | None = None
    captured: bool = False
    faults: list[tuple[int, str]] | None = None
    guesses: list[list[int]] | None = None


Known = Callable[[], tuple[list[int], list[list[int]] | None]]
"""Blocks until a step's tokens, and its guesses by rows, are on the host."""


@dataclass(frozen=True)
class StepOutput:
    """A step that was launched; `wait()` blocks until its tokens are on the host.

    A runner may get the next batch before `wait()` is called on this one.
    known: for rows that follow, which need no more than that; None of runners without guesses.
    """

    wait: Callable[[], SampledTokens] = field(repr=False)
    known: Known | None = field(default=None, repr=False)
