"""Strangers' templates: what they may cost, and that none pays for another."""

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from configs.wire.templates import TemplateSource
from deployments.contract import ErrorKind
from deployments.ingress.chat_templates.render_lanes import RenderLane
from deployments.ingress.chat_templates.renderer import Renderer
from deployments.ingress.chat_templates.rendering import Rendered, packed
from deployments.ingress.chat_templates.template import Conversation
from deployments.ingress.http.errors import RequestError
from tests.clocks import Clock

GOOD = "{{ messages[0].content }}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# As many iterations as the message has characters.
BY_LENGTH = (
    "{% for a in range(messages[0].content | length) %}{% for b in range(9999) %}{% endfor %}"
    "{% endfor %}done"
)

Story = Callable[[Renderer, Clock], Awaitable[None]]


def play(story: Story, **limits: float) -> None:
    async def whole() -> None:
        clock = Clock()
        renderer = Renderer(clock, **limits)
        try:
            await story(renderer, clock)
        finally:
            await renderer.close()

    asyncio.run(whole())


async def outcome(renderer: Renderer, text: str, content: str = "hello", name: str = "it") -> str:
    """The prompt, or the error."""
    conversation = packed(Conversation([{"role": "user", "content": content}]))
    try:
        return await renderer.render(name, TemplateSource(text), conversation)
    except RequestError as error:
        return f"{error.kind.value}: {error.message}"


def counted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The limits of all renderings from now on."""
    limits: list[float] = []
    render = RenderLane._run

    async def count(self: RenderLane, task: bytes, on_reply: Callable[[bool], None]) -> Rendered:
        limits.append(self.limit_s)
        return await render(self, task, on_reply)

    monkeypatch.setattr(RenderLane, "_run", count)
    return limits


def test_bad_templates_affect_no_others() -> None:
    bad = {
        LOOPS: "took over 0.5 s",
        "{{ 9 ** (9 ** 9) }}": "took over 0.5 s",
        "{% set x = 'a' * 10 ** 10 %}": "needs more than 512 MiB of memory",
        "{{ 'a' * 20000000 }}": "longer than 16 MiB",
        "{% if %}": "broken",
        "{{ raise_exception('no hello') }}": "no hello",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}": "refused the messages",
        "{{ '\\ud800' }}": "half of a surrogate pair",
        "{{ raise_exception('a' * 10000000) }}": "refused the messages: aaa",
    }

    async def story(renderer: Renderer, clock: Clock) -> None:
        assert await outcome(renderer, GOOD) == "hello"
        for text, words in bad.items():
            answer = await outcome(renderer, text, name="adapter 'x'")
            assert answer.startswith("validation: ")
            assert words in answer
            assert "adapter 'x'" in answer
            assert len(answer) < 1000
            assert await outcome(renderer, GOOD) == "hello"
        # None of them has cost the process that renders.
        assert renderer._quick.worker.process is not None
        assert renderer._quick.worker.process.returncode is None

    play(story, longest_s=0.5)


def test_an_endless_template_delays_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve chats over it cost two renderings, and another's chat waits for one of them."""
    limits = counted(monkeypatch)
    done: list[str] = []

    async def chat(renderer: Renderer, text: str) -> None:
        done.append(await outcome(renderer, text))

    async def story(renderer: Renderer, clock: Clock) -> None:
        endless = [asyncio.ensure_future(chat(renderer, LOOPS)) for _ in range(12)]
        await chat(renderer, GOOD)
        slow = [answer for answer in done if "took over" in answer]
        assert (done[-1], slow) == ("hello", [])
        await asyncio.gather(*endless)

    play(story)
    assert sorted(limits) == [0.25, 0.25, 2.0]
    kinds = {answer.split(":")[0] for answer in done if answer != "hello"}
    assert kinds == {"validation", "overloaded"}


def test_slow_conversations_are_refused_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = counted(monkeypatch)

    async def story(renderer: Renderer, clock: Clock) -> None:
        for _ in range(3):
            assert "took over 0.5 s" in await outcome(renderer, BY_LENGTH, "x" * 90_000)
        assert limits == [0.25, 0.5]
        # Shorter chats are served all the while, in the line of those that are slow.
        assert await outcome(renderer, BY_LENGTH, "x") == "done"
        assert limits[2:] == [0.5]
        clock.now += 60
        assert "took over 0.5 s" in await outcome(renderer, BY_LENGTH, "x" * 90_000)
        assert limits[3:] == [0.5]
        clock.now += 600
        assert await outcome(renderer, BY_LENGTH, "x") == "done"
        assert limits[4:] == [0.25]

    play(story, longest_s=0.5)


def test_the_models_template_waits_for_no_other() -> None:
    async def story(renderer: Renderer, clock: Clock) -> None:
        assert await outcome(renderer, GOOD) == "hello"
        assert renderer._quick.worker.process is not None
        renderer._quick.worker.process.send_signal(signal.SIGSTOP)
        waiting = asyncio.ensure_future(outcome(renderer, GOOD))
        conversation = packed(Conversation([{"role": "user", "content": "mine"}]))
        assert await renderer.render_own(TemplateSource(GOOD), conversation) == "mine"
        assert not waiting.done()
        renderer._quick.worker.process.send_signal(signal.SIGCONT)
        assert await waiting == "hello"
        with pytest.raises(RequestError, match=r"of the model took over 0\.5 s"):
            await renderer.render_own(TemplateSource(LOOPS), conversation)

    play(story, longest_s=0.5)


def test_a_paused_process_does_not_count_as_slow() -> None:
    """What is counted is computing: a process that was stopped has used none of its time."""

    async def story(renderer: Renderer, clock: Clock) -> None:
        assert await outcome(renderer, GOOD) == "hello"
        assert renderer._quick.worker.process is not None
        renderer._quick.worker.process.send_signal(signal.SIGSTOP)
        rendering = asyncio.ensure_future(outcome(renderer, GOOD))
        await asyncio.sleep(0.3)
        renderer._quick.worker.process.send_signal(signal.SIGCONT)
        assert await rendering == "hello"

    play(story)


def test_a_client_that_leaves_does_not_mix_up_the_next_answer() -> None:
    async def story(renderer: Renderer, clock: Clock) -> None:
        first = asyncio.ensure_future(outcome(renderer, "{{ 'first' }}"))
        for _ in range(3):
            await asyncio.sleep(0)
        first.cancel()
        assert await outcome(renderer, "{{ 'second' }}") == "second"

    play(story)


def test_a_process_that_cannot_start_is_a_503() -> None:
    async def story(renderer: Renderer, clock: Clock) -> None:
        renderer._quick = RenderLane(1.0, max_each=1, max_all=1, command=("/nowhere/python",))
        assert (await outcome(renderer, GOOD)).startswith(ErrorKind.UNAVAILABLE.value)

    play(story)


@pytest.mark.parametrize("value", [10**30, -(10**30), "\ud800", 1.5, [{"a": True}]])
def test_unusual_values_reach_the_template_unchanged(value: Any) -> None:
    async def story(renderer: Renderer, clock: Clock) -> None:
        conversation = packed(Conversation([{"role": "user", "x": value}], {"sent": value}))
        source = TemplateSource(
            "{{ messages[0].x == sent }} {{ sent | tojson(ensure_ascii=True) }}"
        )
        assert await renderer.render("it", source, conversation) == f"True {json.dumps(value)}"

    play(story)
