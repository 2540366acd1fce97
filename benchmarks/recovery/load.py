"""A steady load of streams with known answers: what each client sees, and when."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.serving import percentile

RETRY_S = 0.5


@dataclass(frozen=True)
class Question:
    """A prompt, the adapter (None: the base model), and the right answer.

    tokens: the answer's most; None: as many as the server allows.
    """

    prompt: str
    adapter: str | None
    answer: str
    tokens: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The request, greedy."""
        wanted = {"adapter_id": self.adapter, "max_new_tokens": self.tokens}
        return {"inputs": self.prompt, "parameters": wanted}


@dataclass
class Story:
    """One request, in seconds of a monotonic clock.

    born: of the first try. sent: of the last try. first: its first token. pause: the longest
    silence between its tokens.
    tries: how often it was sent. outcome: right, wrong; "" while it runs.
    faults: why tries failed.
    """

    question: Question
    born: float = field(default_factory=time.monotonic)
    sent: float = 0.0
    first: float | None = None
    pause: float = 0.0
    tries: int = 0
    outcome: str = ""
    faults: list[str] = field(default_factory=list)


class Load:
    """Sends `rate` requests a second until the end is set; failed ones are sent again."""

    def __init__(self, url: str, questions: Sequence[Question], rate: float, tries: int) -> None:
        """tries: of a request, before it counts as lost."""
        self._url = url
        self._questions = questions
        self._rate = rate
        self._tries = tries
        self._random = random.Random(3)
        self.stories: list[Story] = []
        self._heard = asyncio.Event()

    async def answered_after(self, at: float) -> None:
        """Return when a request that was sent after this time has its first token."""
        while back_after(self.stories, at) is None:
            self._heard.clear()
            await self._heard.wait()

    async def run(self, ended: asyncio.Event) -> None:
        """Send until `ended` is set, then wait for the answers."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=300)
        # A connection of its own for each request: one that breaks is one client's.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as clients,
        ):
            while not ended.is_set():
                story = Story(self._random.choice(self._questions))
                self.stories.append(story)
                clients.create_task(self._send(session, story))
                await asyncio.sleep(self._random.expovariate(self._rate))

    async def _send(self, session: aiohttp.ClientSession, story: Story) -> None:
        while not story.outcome and story.tries < self._tries:
            story.sent, story.first = time.monotonic(), None
            story.tries += 1
            try:
                text = await self._stream(session, story)
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as fault:
                story.faults.append(repr(fault)[:200])
                await asyncio.sleep(RETRY_S)
            else:
                story.outcome = "right" if text == story.question.answer else "wrong"
        story.outcome = story.outcome or "lost"

    async def _stream(self, session: aiohttp.ClientSession, story: Story) -> str:
        """The text of one stream; ConnectionError if it breaks off or ends in an error."""
        question, text, last = story.question, "", time.monotonic()
        async with session.post(f"{self._url}/generate_stream", json=question.body) as reply:
            if reply.status != 200:
                raise ConnectionError(f"{reply.status} {(await reply.text())[:150]}")
            async for line in reply.content:
                if not line.startswith(b"data:"):
                    continue
                event: dict[str, Any] = json.loads(line[5:])
                if "error" in event:
                    raise ConnectionError(str(event)[:200])
                now = time.monotonic()
                if story.first is None:
                    story.first = now
                    self._heard.set()
                else:
                    story.pause = max(story.pause, now - last)
                last = now
                text += "" if event["token"]["special"] else event["token"]["text"]
                if event["generated_text"] is not None:
                    return text
        raise ConnectionError("the stream broke off")


def summary(stories: Sequence[Story]) -> dict[str, Any]:
    """Counts, and times in seconds: of first tokens, and the longest pause of any stream."""
    outcomes = Counter(story.outcome for story in stories)
    firsts = [story.first - story.sent for story in stories if story.first is not None]
    again = [story for story in stories if story.tries > 1]
    faults = Counter(fault for story in stories for fault in story.faults)
    return {
        "requests": len(stories),
        "right": outcomes["right"],
        "wrong": outcomes["wrong"],
        "lost": outcomes["lost"],
        "sent_again_by_client": len(again),
        "first_token_p50_ms": percentile(firsts, 0.5),
        "first_token_p99_ms": percentile(firsts, 0.99),
        "longest_pause_s": rounded(max((story.pause for story in stories), default=None)),
        "faults": dict(faults.most_common(5)),
    }


def back_after(stories: Sequence[Story], blow: float) -> float | None:
    """Seconds from the blow to the first token of a request that was sent after it."""
    later = [s.first for s in stories if s.first is not None and s.sent > blow]
    return rounded(min(later) - blow) if later else None


def rounded(value: float | None) -> float | None:
    """The value to the millisecond."""
    return None if value is None else round(value, 3)
