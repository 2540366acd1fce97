"""From a plan to a batch and back: the scheduler's words in the runner's, number by number."""

from modeling.batch import BatchJoin, BatchRow, ForwardBatch, RowLogprobs, SampledTokens
from scheduler.plan import StepPlan, StepResult, TokenLogprobs


def forward_batch(plan: StepPlan) -> ForwardBatch:
    """Return the plan's joins and rows; its fills and drops are commands of their own."""
    return ForwardBatch(
        joins=[
            BatchJoin(join.place, join.tokens, join.prompt_length, join.slot, join.sampling)
            for join in plan.joins
        ],
        rows=[
            BatchRow(row.place, row.start, row.length, row.blocks, row.samples) for row in plan.rows
        ],
    )


def step_result(plan: StepPlan, sampled: SampledTokens, seconds: float) -> StepResult:
    """Return the answer to a plan; `seconds` from the step's start to its tokens on the host."""
    expected = sum(row.samples for row in plan.rows)
    assert len(sampled.tokens) == expected, (plan.step, len(sampled.tokens), expected)
    logprobs = None
    if sampled.logprobs is not None:
        logprobs = [_logprobs(row) for row in sampled.logprobs]
    return StepResult(plan.epoch, plan.step, sampled.tokens, logprobs, seconds)


def _logprobs(row: RowLogprobs | None) -> TokenLogprobs | None:
    if row is None:
        return None
    return TokenLogprobs(row.logprob, row.top_ids, row.top_logprobs)
