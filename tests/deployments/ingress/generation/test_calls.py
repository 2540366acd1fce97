import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from configs.wire.sampling import FinishReason, Sampling, Stopping
from deployments.contract import (
    Cancelled,
    Completion,
    Ending,
    ErrorKind,
    Failed,
    Finished,
    GenerateRequest,
    ReplyAddress,
    SequenceOutcome,
    SequenceRequest,
    TokenFrame,
    TokenRun,
)
from deployments.ingress.generation.calls import EngineCall, Event, events
from deployments.ingress.generation.frames import RequestInboxes
from deployments.ingress.http.errors import RequestError
from deployments.ingress.text.detokenizer_state import DetokenizerState
from deployments.ingress.text.stops import StopStrings
from deployments.ingress.text.tokenizer import ModelTokenizer
from tests.deployments.ingress.conftest import Server
from tests.fakes import FakeDriver, Unreliable, byte_level_tokenizer, engine_info

TOKENIZER = byte_level_tokenizer()
TEXT = ModelTokenizer(TOKENIZER)
IDS = TOKENIZER.encode("the fox END! the dog", add_special_tokens=False).ids
DONE = Finished(FinishReason.LENGTH)


class Scripted(FakeDriver):
    """A driver that sends one frame, then waits for `finish` if it is to, then ends."""

    def __init__(self, inboxes: RequestInboxes, framed: int, endings: list[Ending]) -> None:
        super().__init__(engine_info(Path(), TOKENIZER), TOKENIZER)
        self._inboxes = inboxes
        self._framed = framed
        self._endings = endings
        self.waits = False
        self._finished = asyncio.Event()
        self.failing_finish = False

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        runs = [TokenRun(request.id, i, 0, IDS[: self._framed]) for i in range(len(self._endings))]
        self._inboxes.deliver(TokenFrame(runs))
        if self.waits:
            await self._finished.wait()
        return Completion([SequenceOutcome(list(IDS), ending) for ending in self._endings])

    async def finish(self, request_id: str, index: int, at: int) -> None:
        self.finishes.append((index, at))
        self._finished.set()
        if self.failing_finish:
            raise ConnectionError("the driver is gone")


def _seen(
    framed: int,
    endings: list[Ending],
    stops: list[str],
    arrange: Callable[[Scripted], None] = lambda driver: None,
) -> tuple[list[Event], list[tuple[int, int]]]:
    """All events of one call, and the reported stop strings."""

    async def story() -> tuple[list[Event], list[tuple[int, int]]]:
        inboxes = RequestInboxes()
        driver = Scripted(inboxes, framed, endings)
        arrange(driver)
        sequence = SequenceRequest([1], Sampling(), Stopping(100))
        request = GenerateRequest("r", [sequence] * len(endings))
        transcripts = [
            DetokenizerState(TEXT.stream(), StopStrings(stops, keep=False), per_token=True)
            for _ in endings
        ]
        async with EngineCall(driver, inboxes, ReplyAddress("h", 1, "s"), request) as call:
            seen = [event async for batch in events(call, transcripts) for event in batch]
        assert len(inboxes) == 0
        return seen, driver.finishes

    return asyncio.run(story())


def _text(seen: list[Event], sequence: int = 0) -> str:
    return "".join(event.text for event in seen if event.sequence == sequence)


def test_frames_and_completion_make_one_text() -> None:
    for framed in (0, 1, 3, len(IDS)):
        seen, finishes = _seen(framed, [DONE, DONE], [])
        assert _text(seen, 0) == _text(seen, 1) == "the fox END! the dog"
        assert [event.reason for event in seen if event.reason] == [FinishReason.LENGTH] * 2
        assert finishes == []


def test_a_started_call_that_is_never_entered_is_cancelled() -> None:
    async def story() -> None:
        inboxes = RequestInboxes()
        driver = Scripted(inboxes, 0, [DONE])
        driver.waits = True
        request = GenerateRequest("r", [SequenceRequest([1], Sampling(), Stopping(100))])
        call = EngineCall(driver, inboxes, ReplyAddress("h", 1, "s"), request)
        call.start()
        await asyncio.sleep(0)
        await call.close()
        assert len(inboxes) == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(story())


def test_a_stop_string_is_reported_once_and_ends_the_text() -> None:
    def wait(driver: Scripted) -> None:
        driver.waits = True

    seen, finishes = _seen(len(IDS), [DONE], ["END"], wait)
    assert _text(seen) == "the fox "
    assert [event.reason for event in seen] == [FinishReason.STOP_STRING]
    [(index, at)] = finishes
    assert (index, TEXT.decode(IDS[:at])) == (0, "the fox END")


def test_a_stop_string_in_the_completion_is_not_reported() -> None:
    seen, finishes = _seen(1, [DONE], ["END"])
    assert _text(seen) == "the fox "
    assert seen[-1].reason is FinishReason.STOP_STRING
    assert finishes == []


def test_a_lost_finish_changes_nothing() -> None:
    def fail(driver: Scripted) -> None:
        driver.waits = driver.failing_finish = True

    seen, _ = _seen(len(IDS), [DONE], ["END"], fail)
    assert _text(seen) == "the fox "


def test_a_failure_after_the_stop_string_is_not_reported() -> None:
    failed = Failed(ErrorKind.GENERATION, "late")
    seen, _ = _seen(len(IDS), [failed], ["END"], lambda driver: setattr(driver, "waits", True))
    assert _text(seen) == "the fox "
    assert seen[-1].reason is FinishReason.STOP_STRING


@pytest.mark.parametrize(
    ("ending", "kind"),
    [
        (Failed(ErrorKind.ADAPTER_FORBIDDEN, "no"), ErrorKind.ADAPTER_FORBIDDEN),
        (Cancelled(), ErrorKind.UNAVAILABLE),
    ],
)
def test_other_endings_raise(ending: Ending, kind: ErrorKind) -> None:
    with pytest.raises(RequestError) as caught:
        _seen(0, [DONE, ending], [])
    assert caught.value.kind is kind


def test_refusals_of_the_driver_keep_their_kind(http: httpx.Client, server: Server) -> None:
    assert http.get("/info").status_code == 200
    server.driver.broken = RequestError(ErrorKind.OVERLOADED, "busy", retry_after_s=4)
    reply = http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "4")


def test_a_completion_that_does_not_fit_is_a_503(http: httpx.Client, server: Server) -> None:
    async def nothing(request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        return Completion([])

    server.driver.generate = nothing  # type: ignore[method-assign]
    reply = http.post("/v1/completions", json={"model": "tiny", "prompt": "a"})
    assert reply.status_code == 503


def test_many_requests_at_once_are_not_mixed_up(http: httpx.Client, server: Server) -> None:
    server.driver.link = Unreliable()

    def post_both(number: int) -> tuple[str, str]:
        adapter, prompt = f"a{number % 3}", f"p{number}"
        body = {
            "model": adapter,
            "prompt": prompt,
            "temperature": 0,
            "stop": ["END"],
        }
        whole = http.post("/v1/completions", json={**body, "max_tokens": 60}).json()
        parameters = {"adapter_id": adapter, "max_new_tokens": 60, "stop": ["END"]}
        native = http.post("/generate", json={"inputs": prompt, "parameters": parameters})
        return whole["choices"][0]["text"], native.json()["generated_text"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(post_both, range(40)))
    assert all(native.removesuffix("END") == text for text, native in answers)
    assert len(set(answers)) > 5
