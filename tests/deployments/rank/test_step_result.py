import msgspec
import pytest

from configs.rope_sets import LONG
from configs.wire.adapters import AdapterKey
from configs.wire.plan import (
    AdapterLoad,
    PromptReport,
    RequestJoin,
    StepPlan,
    StepResult,
    StepRow,
    TokenLogprobs,
)
from configs.wire.sampling import Sampling
from deployments.observability.steps import StepLog
from deployments.rank.worker import step_result
from modeling.batch import SampledTokens

SAMPLING = Sampling(temperature=0.5, top_k=3, top_p=0.9, seed=2**64 - 1, logprobs=2)

PLAN = StepPlan(
    epoch=3,
    step=41,
    joins=[
        RequestJoin(
            batch_slot=5, tokens=[7, 8, 9], prompt_length=2, adapter_slot=1, sampling=SAMPLING
        )
    ],
    rows=[
        StepRow(batch_slot=5, start=0, length=3, blocks=[4, 6], samples=True),
        StepRow(batch_slot=0, start=9, length=4, blocks=[], samples=False),
        StepRow(batch_slot=2, start=17, length=1, blocks=[1], samples=True, rope_set=LONG),
    ],
    loads=[AdapterLoad(key=AdapterKey(9), slot=1, pages=[[0], []])],
    drops=[AdapterKey(4)],
)


def test_a_result_has_the_plans_tokens() -> None:
    sampled = SampledTokens([11, 12], [None, TokenLogprobs(-0.5, [12, 3], [-0.5, -1.5])])
    assert step_result(PLAN, sampled, 0.25) == StepResult(
        epoch=3,
        step=41,
        tokens=[11, 12],
        logprobs=[None, TokenLogprobs(-0.5, [12, 3], [-0.5, -1.5])],
        compute_seconds=0.25,
    )
    assert step_result(PLAN, SampledTokens([11, 12]), 0.0).logprobs is None
    assert step_result(PLAN, SampledTokens([11, 12], idle_seconds=0.5), 0.0).idle_seconds == 0.5


@pytest.mark.parametrize("captured", [False, True])
def test_a_result_has_the_replay(captured: bool) -> None:
    plan = msgspec.structs.replace(PLAN, rows=PLAN.rows[:1])
    result = step_result(plan, SampledTokens([11], captured=captured), 0.0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=StepResult) == result
    log = StepLog()
    log.record(plan, result)
    assert [record.captured for record in log.last()] == [captured]


def test_prompt_reports_are_encoded_whole() -> None:
    answer = PromptReport(1, 10, [TokenLogprobs(-0.5, [3], [-0.25])], b"\x00\x01")
    reply = step_result(PLAN, SampledTokens([11, 12], reports=[answer]), 0.0)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=StepResult)
    report = PromptReport(1, 10, [TokenLogprobs(-0.5, [3], [-0.25])], b"\x00\x01")
    assert sent.reports == [report]
    assert step_result(PLAN, SampledTokens([11, 12]), 0.0).reports is None


def test_rows_that_follow_bring_what_they_turn_out_to_be() -> None:
    """One of them reaches up to six positions, and has up to three guesses."""
    rows = [PLAN.rows[0], StepRow(5, 18, 6, [], True, follows=3)]
    plan = msgspec.structs.replace(PLAN, rows=rows)
    result = step_result(plan, SampledTokens([11, 12, 13]), 0.0)
    log = StepLog()
    log.record(plan, result)
    assert [record.num_tokens for record in log.last()] == [3 + 2]
    for tokens in ([11], [11, 12, 13, 14, 15, 16]):
        with pytest.raises(AssertionError):
            step_result(plan, SampledTokens(tokens), 0.0)
