"""What chat templates are given, beside transformers over the same folder."""

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from deployments.ingress.requests.conversations import RESERVED
from tests.deployments.ingress.conftest import Server
from tests.deployments.ingress.openai.openai_http import CHAT, HELLO, post, refused
from tests.fakes import BOS, EOS, FakeDriver, write_tokenizer

WITH_TOOLS = (
    "{{ bos_token }}{% if tools is not none %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% if documents is none %}no documents{% else %}{{ documents | tojson(indent=1) }}{% endif %}"
    "{{ thinking_mode }}{{ reasoning_effort }}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m | tojson }}{{ m.content }}"
    "{% if m.content is defined %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARTS = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.content is string %}{{ m.content | trim }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text | trim }}+"
    "{% endif %}{% endfor %}{% endif %}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ONLY_PARTS = PARTS.replace("m.content is string", "false")
ALTERNATING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('take turns') }}{% endif %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SCOPES = (
    "{% set ns = namespace(n=0) %}{% set scope = 'outer' %}{% for m in messages %}"
    "{% generation %}{% set scope = 'inner' %}{% set ns.n = ns.n + 1 %}{{ m.content }}"
    "{% endgeneration %}{{ scope }}{{ ns.n }}{{ dict(a=1).a }}{% endfor %}"
)
THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

FUNCTION = {"name": "get_time", "strict": True, "parameters": {"type": ["object"]}, "x": [1]}
TOOLS = [
    {"type": "function", "function": FUNCTION},
    {"function": {"name": "f"}, "type": "function"},
]
DOCUMENTS = [{"title": "t", "text": "ü"}]
TWO = [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]
ANSWERED: list[dict[str, Any]] = [
    *HELLO,
    {"role": "assistant", "content": None, "refusal": None, "reasoning": "because",
     "tool_calls": [{"id": "call_1", "type": "function",
                     "function": {"name": "f", "arguments": {"b": 1, "a": None}}}]},
    {"role": "tool", "name": "f", "tool_call_id": "call_1", "content": "5"},
    {"role": "assistant", "content": "so 5", "thinking": "", "annotations": []},
    {"role": "user", "content": "thanks"},
]  # fmt: skip
BEGUN = [*HELLO, {"role": "assistant", "content": "It is "}]
THOUGHT = [*HELLO, {"role": "assistant", "content": "x", "thinking": "Let me"}]


@pytest.fixture
def folder(server: Server, tmp_path: Path) -> Path:
    """A model's folder, its template still to be written."""
    tokenizer = write_tokenizer(tmp_path)
    driver = server.driver
    driver.tokenizer = tokenizer
    driver.info = msgspec.structs.replace(
        driver.info, tokenizer=str(tmp_path), max_total_tokens=4096, max_input_tokens=4000
    )
    return tmp_path


def save(folder: Path, template: object) -> None:
    config = {"bos_token": BOS, "eos_token": {"content": EOS, "__type": "AddedToken"},
              "pad_token": None, "chat_template": template}  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")


def expected(folder: Path, body: dict[str, Any], **others: Any) -> list[int]:
    """The ids of transformers for the same chat."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    arguments = {"add_generation_prompt": not body.get("continue_final_message"), **body, **others}
    ids = tokenizer.apply_chat_template(arguments.pop("messages"), return_dict=False, **arguments)
    return list(ids)


def prompt_of(driver: FakeDriver) -> list[int]:
    return list(driver.requests[-1].sequences[0].prompt)


CASES: list[tuple[object, dict[str, Any]]] = [
    (WITH_TOOLS, {"messages": HELLO}),
    (WITH_TOOLS, {"messages": ANSWERED}),
    (WITH_TOOLS, {"messages": ANSWERED, "tools": TOOLS, "documents": DOCUMENTS}),
    (WITH_TOOLS, {"messages": HELLO, "documents": []}),
    (WITH_TOOLS, {"messages": HELLO, "reasoning_effort": "low"}),
    (WITH_TOOLS, {"messages": HELLO, "add_generation_prompt": False}),
    (WITH_TOOLS, {"messages": [{"role": "user", "content": "a", "zeta": 1, "alpha": {"b": None}}]}),
    (PARTS, {"messages": [{"role": "system", "content": TWO}, {"role": "user", "content": TWO}]}),
    (PARTS, {"messages": [{"role": "user", "content": " plain "}]}),
    (ONLY_PARTS, {"messages": [{"role": "user", "content": TWO}]}),
    (ALTERNATING, {"messages": BEGUN, "continue_final_message": True}),
    (SCOPES, {"messages": [*HELLO, *HELLO]}),
    (THINKS, {"messages": THOUGHT}),
    (THINKS, {"messages": [*HELLO, {"role": "assistant", "content": "x", "reasoning": "r"}]}),
    (THINKS, {"messages": BEGUN, "continue_final_message": True}),
    (THINKS, {"messages": THOUGHT, "continue_final_message": "thinking"}),
    (THINKS, {"messages": THOUGHT, "continue_final_message": "reasoning_content"}),
    (PARTS, {"messages": BEGUN, "continue_final_message": True}),
    (PARTS, {"messages": [*HELLO, {"role": "assistant", "content": TWO}],
             "continue_final_message": True}),
    ([{"name": "default", "template": THINKS}, {"name": "tool_use", "template": WITH_TOOLS}],
     {"messages": HELLO, "tools": TOOLS}),
    ([{"name": "default", "template": THINKS}, {"name": "tool_use", "template": WITH_TOOLS}],
     {"messages": HELLO}),
    ([{"name": "default", "template": THINKS}, {"name": "rag", "template": WITH_TOOLS}],
     {"messages": HELLO, "documents": DOCUMENTS, "chat_template": "rag"}),
    ({"default": THINKS, "tool_use": WITH_TOOLS}, {"messages": HELLO, "tools": TOOLS}),
]  # fmt: skip


@pytest.mark.parametrize(("template", "body"), CASES)
def test_prompts_are_those_of_transformers(
    http: httpx.Client, driver: FakeDriver, folder: Path, template: object, body: dict[str, Any]
) -> None:
    save(folder, template)
    want = expected(folder, body)
    sent = copy.deepcopy(body)
    for message in sent["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    post(http, CHAT, **sent, max_tokens=1)
    assert prompt_of(driver) == want


@pytest.mark.parametrize("form", ["file", "files", "others alone"])
def test_templates_in_files_come_first(
    http: httpx.Client, driver: FakeDriver, folder: Path, form: str
) -> None:
    save(folder, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "no"}])
    if form != "others alone":
        (folder / "chat_template.jinja").write_text(THINKS, "utf-8")
    if form != "file":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(WITH_TOOLS, "utf-8")
        post(http, CHAT, messages=HELLO, tools=TOOLS, max_tokens=1)
        assert prompt_of(driver) == expected(folder, {"messages": HELLO, "tools": TOOLS})
    if form != "others alone":
        post(http, CHAT, messages=HELLO, max_tokens=1)
        assert prompt_of(driver) == expected(folder, {"messages": HELLO})
        return
    with pytest.raises(ValueError, match="no default"):
        expected(folder, {"messages": HELLO})
    assert "none is the default" in refused(http, CHAT, 400, messages=HELLO)["message"]


@pytest.mark.parametrize(
    ("template", "body", "param"),
    [
        (PARTS, {"messages": HELLO, "documents": DOCUMENTS}, "documents"),
        (PARTS, {"messages": HELLO, "reasoning_effort": "low"}, "reasoning_effort"),
        (WITH_TOOLS, {"messages": HELLO, "reasoning_effort": "low",
                "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning_effort"),
        (WITH_TOOLS, {"messages": HELLO, "chat_template": "{{ messages }}"}, "chat_template"),
        (PARTS, {"messages": [{"role": "user", "content": None}], "continue_final_message": True},
         "continue_final_message"),
        (PARTS, {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message"),
        (PARTS, {"messages": BEGUN, "continue_final_message": "reasoning_content"},
         "continue_final_message"),
        ("{{ messages[0].content }}", {"messages": BEGUN, "continue_final_message": True},
         "continue_final_message"),
        (ALTERNATING, {"messages": [{"role": "system", "content": "x"}, *HELLO]}, "messages"),
    ],
)  # fmt: skip
def test_what_would_have_no_effect_is_refused(
    http: httpx.Client, folder: Path, template: str, body: dict[str, Any], param: str
) -> None:
    save(folder, template)
    assert refused(http, CHAT, 400, **body)["param"] == param


@pytest.mark.parametrize("fields", [{"content": None}, {"tool_calls": [], "refusal": None}])
def test_answers_without_content_have_an_empty_one(
    http: httpx.Client, driver: FakeDriver, folder: Path, fields: dict[str, Any]
) -> None:
    """Clients send back what a server answered: null where all of it was reasoning."""
    save(folder, "{% for m in messages %}{{ '[' + m.role + m.content + ']' }}{% endfor %}")
    answer = {"role": "assistant", "reasoning_content": "r", **fields}
    post(http, CHAT, messages=[*HELLO, answer, *HELLO], max_tokens=1)
    assert "[assistant][user" in driver.tokenizer.decode(prompt_of(driver))


def test_parameters_of_apply_chat_template_are_no_variables(
    http: httpx.Client, folder: Path
) -> None:
    taken = inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
    assert {*taken, "messages"} - {"self", "kwargs"} == RESERVED
    save(folder, WITH_TOOLS)
    for name in sorted(RESERVED):
        error = refused(http, CHAT, 400, messages=HELLO, chat_template_kwargs={name: []})
        assert error["param"] == "chat_template_kwargs"
        assert f"`{name}`" in error["message"]


def test_variables_reach_the_template(http: httpx.Client, driver: FakeDriver, folder: Path) -> None:
    save(folder, WITH_TOOLS)
    body = {"messages": HELLO, "chat_template_kwargs": {"thinking_mode": [1], "bos_token": "~"}}
    post(http, CHAT, **body, max_tokens=1)
    want = expected(folder, {"messages": HELLO}, thinking_mode=[1], bos_token="~")
    assert prompt_of(driver) == want


def test_empty_documents_pass(http: httpx.Client, folder: Path) -> None:
    save(folder, PARTS)
    post(http, CHAT, messages=HELLO, documents=[], max_tokens=1)


def test_a_broken_named_template_breaks_its_own_chats_only(
    http: httpx.Client, folder: Path
) -> None:
    save(folder, {"default": PARTS, "rag": "{% if %}"})
    post(http, CHAT, messages=HELLO, max_tokens=1)
    error = refused(http, CHAT, 400, messages=HELLO, chat_template="rag")
    assert (error["param"], "is broken" in error["message"]) == ("chat_template", True)


def text_of(driver: FakeDriver) -> str:
    return str(driver.tokenizer.decode(prompt_of(driver), skip_special_tokens=False))


def test_parts_become_text_only_if_the_template_needs_text(
    http: httpx.Client, driver: FakeDriver, folder: Path
) -> None:
    save(folder, ALTERNATING)
    post(http, CHAT, messages=[{"role": "user", "content": TWO}], max_tokens=1)
    assert text_of(driver) == "[user]a \nb[assistant]"


def test_text_becomes_parts_if_the_template_needs_parts(
    http: httpx.Client, driver: FakeDriver, folder: Path
) -> None:
    save(folder, ONLY_PARTS)
    post(http, CHAT, messages=HELLO, max_tokens=1)
    want = expected(folder, {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "hello"}]}]})  # fmt: skip
    assert prompt_of(driver) == want


def test_tools_as_text_need_no_system_role_and_keep_roles_alternating(
    http: httpx.Client, driver: FakeDriver, folder: Path
) -> None:
    save(folder, ALTERNATING)
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    results = [{"role": "tool", "tool_call_id": str(n), "content": str(n)} for n in range(2)]
    calls = [{"id": str(n), **call} for n in range(2)]
    messages = [*HELLO, {"role": "assistant", "tool_calls": calls}, *results]
    post(http, CHAT, messages=messages, tools=TOOLS, max_tokens=1)
    prompt = text_of(driver)
    assert prompt.startswith("[user]You can call functions.")
    assert json.dumps(FUNCTION) in prompt
    assert "</tool_call>\n\nhello[assistant]<tool_call>" in prompt
    assert "[user]<tool_response>\n0\n</tool_response>\n<tool_response>\n1\n</tool_resp" in prompt


@pytest.mark.parametrize(("known", "role"), [("", "system"), ("{# developer #}", "developer")])
def test_developer_messages_become_system_messages(
    http: httpx.Client, driver: FakeDriver, folder: Path, known: str, role: str
) -> None:
    save(folder, known + PARTS)
    post(http, CHAT, messages=[{"role": "developer", "content": "be brief"}], max_tokens=1)
    assert text_of(driver).startswith(f"<s><|{role}|>be brief")
