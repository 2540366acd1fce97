"""Requests whose first driver was lost: the next one continues after the tokens that it gets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.sampling import FinishReason, Sampling, Stopping
from deployments.contract import (
    Completion,
    ErrorKind,
    Failed,
    Finished,
    GenerateRequest,
    SequenceOutcome,
    SequenceRequest,
    TokenFrame,
    TokenRun,
)
from deployments.driver.engine import DriverEngine
from deployments.frames import FrameReceiver
from deployments.rank.local import LocalRanks
from tests.deployments.driver.fake_ranks import FakeGroup, continuation
from tests.deployments.driver.routing.stories import (
    NOWHERE,
    PATIENCE_S,
    play,
    request,
    together,
    tokens,
    until_true,
)
from tests.served import demo_config

SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},'
    ' "required": ["a", "b"], "additionalProperties": false}'
)
NUM_TOKENS = 24
WARM = Sampling(temperature=1.3, seed=7)
KINDS = {
    "greedy": Sampling(),
    "sampled": replace(WARM, top_k=40, top_p=0.95, typical_p=0.9, min_p=0.001),
    "logprobs": replace(WARM, logprobs=2),
    "prompt": replace(WARM, prompt_logprobs=1),
    "penalised": replace(WARM, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.4),
    "watermarked": replace(WARM, watermark=True),
    "masked": replace(WARM, masked_ids=tuple(range(0, 200, 2)), masked_tokens=8),
    "worded": replace(WARM, bad_words=((40, 41), (42,)), logit_bias=((50, 2.0),)),
    "schema": replace(WARM, json_schema=SCHEMA),
    "schema, greedy": Sampling(json_schema=SCHEMA),
}


def resubmitted(sent: GenerateRequest, ends: list[SequenceOutcome], cut: int) -> GenerateRequest:
    """The request with the first tokens of each answer."""
    sequences = [
        replace(
            sequence,
            generated=end.tokens[:cut],
            logprobs=(end.logprobs or [])[:cut],
        )
        for sequence, end in zip(sent.sequences, ends, strict=True)
    ]
    return replace(sent, id=f"{sent.id}-{cut}", sequences=sequences, resubmissions=1)


@asynccontextmanager
async def demo() -> AsyncIterator[DriverEngine]:
    config = demo_config(limits={"max_total_tokens": 256})
    engine = DriverEngine(config, Path(config.model.id), LocalRanks(config))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def test_every_kind_of_request_continues_as_it_would_have() -> None:
    """On the demo's model, cut after each number of tokens; 8 requests at a time share steps."""

    async def story() -> None:
        stopping = Stopping(NUM_TOKENS, (2,), 3)
        adapters = [None, AdapterReference(AdapterSource.LOCAL, "pirate")]
        sent = [
            GenerateRequest(
                name, [SequenceRequest([5, 9, 30 + i, 77], sampling, stopping)], adapter
            )
            for i, (name, sampling) in enumerate(KINDS.items())
            for adapter in adapters[i % 2 :][:1]
        ]
        async with demo() as engine:
            whole = {each.id: await engine.generate(each, NOWHERE) for each in sent}
            assert len({tuple(tokens(whole[each.id])[0]) for each in sent}) > len(sent) / 2
            for cut in (0, 1, 5, 11, NUM_TOKENS - 1, NUM_TOKENS):
                again = [resubmitted(each, whole[each.id].sequences, cut) for each in sent]
                ends = await asyncio.gather(*(engine.generate(each, NOWHERE) for each in again))
                for each, end in zip(sent, ends, strict=True):
                    check_equal(end, whole[each.id], f"{each.id}, cut at {cut}")

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def check_equal(found: Completion, expected: Completion, where: str) -> None:
    """The same tokens, ends and logprobs, as far as other batches compute these."""
    for end, right in zip(found.sequences, expected.sequences, strict=True):
        assert (end.tokens, end.ending) == (right.tokens, right.ending), where
        for mine, other in (
            (end.logprobs, right.logprobs),
            (end.prompt_logprobs, right.prompt_logprobs),
        ):
            assert (mine is None) == (other is None), where
            assert [each.logprob for each in mine or ()] == pytest.approx(
                [each.logprob for each in other or ()], abs=1e-3
            ), where


def test_frames_begin_after_the_tokens_that_it_got(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        runs: list[TokenRun] = []

        def deliver(frame: TokenFrame) -> None:
            runs.extend(frame.runs)

        receiver = FrameReceiver(deliver)
        address = await receiver.start("127.0.0.1")
        answer = continuation("", [1, 2], 20)
        first = await engine.generate(request("r", [1, 2], 20, num=2), address)
        again = resubmitted(request("r", [1, 2], 20, num=2), first.sequences, 12)
        assert tokens(await engine.generate(again, address)) == [answer] * 2
        await until_true(lambda: sum(len(run.tokens) for run in runs) == 56)
        origins = {run.origin for run in runs if run.start == 0}
        assert len(origins) == 1
        assert "" not in origins
        later = [run for run in runs if run.request_id == "r-12" and run.index == 1]
        assert [token for run in later for token in run.tokens] == answer[12:]
        assert (later[0].start, later[0].origin) == (12, "")
        await receiver.close()

    play(root, story)


def test_sequences_that_had_ended_are_not_run_again(root: Path) -> None:
    """One of three had its last token, one its stop token, and the third runs on."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        answer = continuation("", [4], 30)
        stopped = SequenceRequest([4], Sampling(), Stopping(30, (answer[5],)), answer[:6])
        sequences = [
            SequenceRequest([4], Sampling(), Stopping(6), answer[:6]),
            stopped,
            SequenceRequest([4], Sampling(), Stopping(30), answer[:6]),
        ]
        sent = GenerateRequest("r-1", sequences, resubmissions=1)
        ends = (await engine.generate(sent, NOWHERE)).sequences
        assert [end.tokens for end in ends] == [answer[:6], answer[:6], answer]
        reasons = [FinishReason.LENGTH, FinishReason.STOP_TOKEN, FinishReason.LENGTH]
        assert [end.ending for end in ends] == [Finished(reason) for reason in reasons]
        only = GenerateRequest("s-1", [stopped], resubmissions=1)
        assert tokens(await engine.generate(only, NOWHERE)) == [answer[:6]]

    play(root, story)


def test_tokens_of_another_model_or_version_are_refused_by_name(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        for adapter in (None, "red"):
            moved = replace(request("r-1", [4], 9, adapter), resubmissions=1, origin="another")
            [end] = (await engine.generate(moved, NOWHERE)).sequences
            assert isinstance(end.ending, Failed)
            assert end.ending.kind is ErrorKind.UNAVAILABLE
            assert "has changed since" in end.ending.message

    play(root, story)


def test_a_request_that_was_admitted_once_is_not_refused_for_load(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.gate.clear()
        sent = [request(f"r{i}", [i], 3) for i in range(6)]
        sent += [replace(request(f"moved{i}", [i], 3), resubmissions=1) for i in range(6)]
        tasks = await together(engine, sent)
        group.gate.set()
        ends = [end for task in tasks for end in (await task).sequences]
        kinds = [end.ending.kind for end in ends if isinstance(end.ending, Failed)]
        assert kinds == [ErrorKind.OVERLOADED] * 3
        assert all(isinstance(end.ending, Finished) for end in ends[6:])

    play(root, story, limits={"max_step_tokens": 16, "max_running": 2, "max_queued": 1})
