"""Adapters' own chat templates: used for their chats, rendered where they can do no harm."""

import asyncio
import signal

import httpx

from configs.templates import TemplateSource
from deployments.contract import ErrorKind, Failed
from deployments.ingress.errors import RequestError
from deployments.ingress.renderer import Renderer, Task
from tests.deployments.ingress.conftest import Server
from tests.fakes import FakeDriver

SHOUT = TemplateSource(
    "{{ bos_token }}{% for m in messages %}{{ m.content | upper }}!{% endfor %}",
    {"bos_token": "<s>"},
)
HELLO = [{"role": "user", "content": "hello"}]


def chat(http: httpx.Client, model: str, **others: object) -> httpx.Response:
    body = {"model": model, "messages": HELLO, "max_tokens": 3, **others}
    return http.post("/v1/chat/completions", json=body)


def prompt(driver: FakeDriver) -> str:
    """The last request's prompt, special tokens spelled out."""
    text: str = driver.tokenizer.decode(
        driver.requests[-1].sequences[0].prompt, skip_special_tokens=False
    )
    return text


def test_an_adapters_own_template_makes_its_prompts(http: httpx.Client, driver: FakeDriver) -> None:
    driver.templates["org/shout"] = SHOUT
    assert chat(http, "org/shout").status_code == 200
    assert prompt(driver) == "<s>HELLO!"
    for name in ("org/pirate", "tiny"):
        assert chat(http, name).status_code == 200
        assert "<|user|>hello" in prompt(driver)


def test_numbers_beyond_64_bits_are_refused(http: httpx.Client, driver: FakeDriver) -> None:
    driver.templates["org/shout"] = SHOUT
    for others in (
        {"messages": [{**HELLO[0], "weight": 10**30}]},
        {"chat_template_kwargs": {"weight": -(10**30)}},
    ):
        reply = chat(http, "org/shout", **others)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
        assert "over 64 bits" in reply.json()["error"]["message"]
    assert chat(http, "org/shout").status_code == 200


def test_responses_use_it_too(http: httpx.Client, driver: FakeDriver) -> None:
    driver.templates["org/shout"] = SHOUT
    body = {"model": "org/shout", "input": "hello", "max_output_tokens": 3}
    assert http.post("/v1/responses", json=body).status_code == 200
    assert prompt(driver) == "<s>HELLO!"


def test_the_driver_is_asked_seldom_and_with_the_callers_token(
    server: Server, http: httpx.Client, driver: FakeDriver
) -> None:
    driver.templates["org/shout"] = SHOUT
    for _ in range(5):
        chat(http, "org/shout", api_token="hf_mine")
    assert driver.template_tokens == ["hf_mine"]
    server.clock.now += 5
    driver.templates["org/shout"] = TemplateSource("new {{ messages[0].content }}")
    chat(http, "org/shout", api_token="hf_mine")
    assert driver.template_tokens == ["hf_mine"] * 2
    assert prompt(driver) == "new hello"


def test_an_adapter_that_cannot_be_had_is_refused_before_it_is_called(
    http: httpx.Client, driver: FakeDriver
) -> None:
    driver.templates["org/gone"] = Failed(ErrorKind.ADAPTER_NOT_FOUND, "not here")
    answer = chat(http, "org/gone")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert not driver.requests


def told(renderer: Renderer, *templates: str) -> list[str]:
    """What each template makes of HELLO, one after the other: a prompt or a refusal."""

    async def story() -> list[str]:
        texts = []
        for template in templates:
            try:
                texts.append(await renderer.render(Task(TemplateSource(template), HELLO, {})))
            except RequestError as error:
                texts.append(f"refused: {error.message}")
        await renderer.close()
        return texts

    return asyncio.run(story())


def test_bad_templates_end_themselves_alone() -> None:
    good = "{{ messages[0].content }}"
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    bad = (
        loops,
        "{{ 'a' * 10 ** 10 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% if %}",
        "{{ raise_exception('no hello') }}",
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ 'a' * 20000000 }}",
    )
    answers = told(Renderer(0.5), good, *(text for each in bad for text in (each, good)))
    assert answers[::2] == ["hello"] * (len(bad) + 1)
    assert all(answer.startswith("refused: ") for answer in answers[1::2])
    assert "took over 0.5 s" in answers[1]
    assert "took over 0.5 s" in answers[5]
    assert "no hello" in answers[9]


def test_a_template_may_stand_still_for_as_long_as_the_machine_does() -> None:
    async def story() -> None:
        renderer, task = Renderer(0.5), Task(TemplateSource("{{ 'hello' }}"), HELLO, {})
        assert await renderer.render(task) == "hello"
        assert renderer._process is not None
        renderer._process.send_signal(signal.SIGSTOP)
        rendering = asyncio.create_task(renderer.render(task))
        await asyncio.sleep(0.6)
        renderer._process.send_signal(signal.SIGCONT)
        assert await rendering == "hello"
        await renderer.close()

    asyncio.run(story())


def test_a_client_that_leaves_does_not_mix_up_the_next_answer() -> None:
    async def story() -> None:
        renderer = Renderer()
        first = asyncio.create_task(
            renderer.render(Task(TemplateSource("{{ 'first' }}"), HELLO, {}))
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.cancel()
        second = await renderer.render(Task(TemplateSource("{{ 'second' }}"), HELLO, {}))
        assert second == "second"
        await renderer.close()

    asyncio.run(story())
