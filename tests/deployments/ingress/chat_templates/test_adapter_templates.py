"""Adapters' own chat templates: used for their chats, rendered where they can do no harm."""

import json
from typing import Any

import httpx
import msgspec

from configs.wire.templates import TemplateSource
from deployments.contract import ErrorKind, Failed
from tests.deployments.ingress.conftest import Server
from tests.fakes import BOS, EOS, TEMPLATE, FakeDriver

SHOUT = TemplateSource(
    "{{ bos_token }}{% for m in messages %}{{ m.content | upper }}!{% endfor %}",
    {"bos_token": "<s>"},
)
HELLO = [{"role": "user", "content": "hello"}]


def chat(http: httpx.Client, model: str, **others: object) -> httpx.Response:
    body = {"model": model, "messages": HELLO, "max_tokens": 3, **others}
    return http.post("/v1/chat/completions", json=body)


def prompt(driver: FakeDriver) -> str:
    """The last request's prompt, special tokens included."""
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


def test_special_tokens_that_an_adapter_does_not_name_are_the_models(
    http: httpx.Client, driver: FakeDriver
) -> None:
    """As for an adapter whose folder has a template and no tokenizer."""
    text = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    driver.templates["org/plain"] = TemplateSource(text)
    driver.templates["org/own"] = TemplateSource(text, {"eos_token": "<|user|>"})
    assert chat(http, "org/plain").status_code == 200
    assert prompt(driver) == "<s>hello</s>"
    assert chat(http, "org/own").status_code == 200
    assert prompt(driver) == "<s>hello<|user|>"


def test_responses_use_it_too(http: httpx.Client, driver: FakeDriver) -> None:
    driver.templates["org/shout"] = SHOUT
    body = {"model": "org/shout", "input": "hello", "max_output_tokens": 3}
    assert http.post("/v1/responses", json=body).status_code == 200
    assert prompt(driver) == "<s>HELLO!"


def test_templates_are_cached_and_fetched_with_the_callers_token(
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


def test_a_template_is_cached_for_its_caller_only(http: httpx.Client, driver: FakeDriver) -> None:
    """Another token may not read a private adapter; the driver refuses it each time."""
    driver.templates["org/private"] = SHOUT
    assert chat(http, "org/private", api_token="hf_mine").status_code == 200
    driver.templates["org/private"] = Failed(ErrorKind.ADAPTER_NOT_FOUND, "not here")
    for others in ({"api_token": "hf_other"}, {}):
        assert chat(http, "org/private", **others).status_code == 404
    assert chat(http, "org/private", api_token="hf_mine").status_code == 200
    assert driver.template_tokens == ["hf_mine", "hf_other", None]


def test_an_unavailable_adapter_is_refused_before_the_call(
    http: httpx.Client, driver: FakeDriver
) -> None:
    driver.templates["org/gone"] = Failed(ErrorKind.ADAPTER_NOT_FOUND, "not here")
    answer = chat(http, "org/gone")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert not driver.requests


TOOLS = [{"type": "function", "function": {"name": "get_time"}}]
NAMED = TemplateSource("plain", {}, {"tool_use": "with {{ tools | tojson }}", "rag": "rag"})


def test_of_several_templates_the_right_one_is_used(http: httpx.Client, driver: FakeDriver) -> None:
    driver.templates["org/named"] = NAMED
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "plain"),
        ({"tools": TOOLS}, f"with {json.dumps(TOOLS)}"),
        ({"tools": TOOLS, "tool_choice": "none"}, "plain"),
        ({"chat_template": "rag"}, "rag"),
        ({"chat_template": "rag", "tools": TOOLS}, "rag"),
    ]
    for others, expected in cases:
        assert chat(http, "org/named", **others).status_code == 200
        assert prompt(driver) == expected
    for template in ("{{ messages }}", "other"):
        error = chat(http, "org/named", chat_template=template).json()["error"]
        assert error["param"] == "chat_template"
        assert "adapter 'org/named''s templates (default, tool_use, rag)" in error["message"]
    driver.templates["org/no-default"] = TemplateSource("", {}, {"tool_use": "x", "rag": "y"})
    error = chat(http, "org/no-default").json()["error"]
    assert "none is the default" in error["message"]


def test_an_adapters_copy_of_the_models_template_needs_no_other_process(
    server: Server, http: httpx.Client, driver: FakeDriver
) -> None:
    """Most adapters are saved with it."""
    driver.templates["org/copy"] = TemplateSource(TEMPLATE, {"bos_token": BOS, "eos_token": EOS})
    assert chat(http, "org/copy").status_code == 200
    assert prompt(driver) == "<s><|user|>hello</s>\n<|assistant|>"
    assert server.renderer._quick.worker.process is None
    driver.templates["org/other"] = TemplateSource(TEMPLATE, {"bos_token": "~"})
    assert chat(http, "org/other").status_code == 200
    assert prompt(driver).startswith("~<|user|>hello")
    assert server.renderer._quick.worker.process is not None


def test_long_chats_are_rendered_in_another_process(
    server: Server, http: httpx.Client, driver: FakeDriver
) -> None:
    driver.info = msgspec.structs.replace(
        driver.info, max_total_tokens=10**6, max_input_tokens=10**6
    )
    long = [{"role": "user", "content": "hello " * 20_000}]
    assert chat(http, "tiny", messages=long).status_code == 200
    assert prompt(driver) == f"<s><|user|>{'hello ' * 20_000}</s>\n<|assistant|>"
    assert server.renderer._own.worker.process is not None


def test_an_endless_template_is_named_and_refused(http: httpx.Client, driver: FakeDriver) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    driver.templates["org/endless"] = TemplateSource(loops)
    for _ in range(2):
        answer = chat(http, "org/endless")
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "the chat template of adapter 'org/endless' took over 2 s" in message
    assert chat(http, "tiny").status_code == 200
