"""ForwardBatch: one step as numbers on the host, before a runner makes tensors of it.

`deployments/rank/batch.py` translates a plan into it; a runner keeps each place's tokens,
block table, adapter slot and sampling parameters, so that a running row is four numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from configs.wire.sampling import Sampling


@dataclass(frozen=True)
class BatchJoin:
    """A request that takes a place: its known tokens, prompt first; slot -1 is the base model.

    matcher: the number under which its constraint's was prepared, -1 without one.
    """

    place: int
    tokens: list[int]
    prompt_length: int
    slot: int
    sampling: Sampling
    matcher: int = -1


@dataclass(frozen=True)
class BatchRow:
    """Compute positions start .. start + length - 1 of the request at `place`.

    blocks: cache blocks to append to the place's block table first.
    samples: whether the last position's logits choose the token at start + length.
    rope_set: whose rotary frequencies these positions take; see configs/rope_sets.py.
    """

    place: int
    start: int
    length: int
    blocks: list[int]
    samples: bool
    rope_set: int = 0


@dataclass(frozen=True)
class ForwardBatch:
    """The rows of one step, in the order in which their tokens are answered."""

    joins: list[BatchJoin]
    rows: list[BatchRow]


@dataclass(frozen=True)
class RowLogprobs:
    """Natural logprobs of one sampled token and of the most likely alternatives, best first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True)
class PromptScores:
    """What a row tells about its request's prompt.

    row: its index in the batch. first: the position of the first of `logprobs`. embedding:
    float32, little-endian; empty before the prompt's last position.
    """

    row: int
    first: int
    logprobs: list[RowLogprobs]
    embedding: bytes


@dataclass(frozen=True)
class SampledTokens:
    """What one step sampled: one token for each row with `samples`, in row order.

    logprobs: None when no row asked, else one entry (or None) for each token. prompts: what
    rows tell about their prompts, None when no row does. idle_seconds: how long the device had
    nothing to do before the step, None where it does not tell. captured: the step was a replay
    of a captured one. faults: rows, by their index, whose matchers could not go on, and why; None
    without any.
    """

    tokens: list[int]
    logprobs: list[RowLogprobs | None] | None = None
    prompts: list[PromptScores] | None = None
    idle_seconds: float | None = None
    captured: bool = False
    faults: list[tuple[int, str]] | None = None


@dataclass(frozen=True)
class StepOutput:
    """A step that was launched; `wait()` blocks until its tokens are on the host.

    A runner may be given the next batch before `wait()` is called on this one.
    """

    wait: Callable[[], SampledTokens] = field(repr=False)
