"""From a plan to a batch and back: the scheduler's words in the runner's, number by number."""

from configs.wire.plan import PromptReport, StepPlan, StepResult, TokenLogprobs
from modeling.batch import (
    BatchJoin,
    BatchRow,
    ForwardBatch,
    PromptScores,
    RowLogprobs,
    SampledTokens,
)


def forward_batch(plan: StepPlan) -> ForwardBatch:
    """Return the plan's joins and rows; its fills and drops are commands of their own."""
    return ForwardBatch(
        joins=[
            BatchJoin(
                join.place, join.tokens, join.prompt_length, join.slot, join.sampling, join.matcher
            )
            for join in plan.joins
        ],
        rows=[
            BatchRow(row.place, row.start, row.length, row.blocks, row.samples, row.rope_set)
            for row in plan.rows
        ],
    )


def step_result(plan: StepPlan, sampled: SampledTokens, seconds: float) -> StepResult:
    """Return the answer to a plan; `seconds` from the step's start to its tokens on the host."""
    expected = sum(row.samples for row in plan.rows)
    assert len(sampled.tokens) == expected, (plan.step, len(sampled.tokens), expected)
    logprobs = None
    if sampled.logprobs is not None:
        logprobs = [_logprobs(row) for row in sampled.logprobs]
    reports = None
    if sampled.prompts is not None:
        reports = [_report(answer) for answer in sampled.prompts]
    return StepResult(
        epoch=plan.epoch,
        step=plan.step,
        tokens=sampled.tokens,
        logprobs=logprobs,
        compute_seconds=seconds,
        reports=reports,
        idle_seconds=sampled.idle_seconds,
        captured=sampled.captured,
        faults=sampled.faults,
    )


def _report(answer: PromptScores) -> PromptReport:
    logprobs = [_told(row) for row in answer.logprobs]
    return PromptReport(answer.row, answer.first, logprobs, answer.embedding)


def _logprobs(row: RowLogprobs | None) -> TokenLogprobs | None:
    return None if row is None else _told(row)


def _told(row: RowLogprobs) -> TokenLogprobs:
    return TokenLogprobs(row.logprob, row.top_ids, row.top_logprobs)
