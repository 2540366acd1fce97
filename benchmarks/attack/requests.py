"""Requests that cost a server more than they seem to."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.attack.constraints import COSTLY, FAIR, STEEP

_CHAT, _GENERATE = "/v1/chat/completions", "/generate"
_HELLO = [{"role": "user", "content": "t1 t2 t3"}]

TEMPLATES: Mapping[str, str] = {
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "doubling": "{% set ns = namespace(x='x') %}{% for i in range(40) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "filtering": "{{ (range(99999) | list | string * 200) | reverse | list | sort | join }}",
    "powers": "{{ 9 ** (9 ** 9) }}",
}
"""Chat templates that an adapter may bring."""


@dataclass(frozen=True)
class Attack:
    """One request."""

    name: str
    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


def attacks() -> Iterator[Attack]:
    """All of them, one after the other: some are large."""
    for kind, many in (("costly", COSTLY), ("steep", STEEP), ("fair", FAIR)):
        for name, fields in many.items():
            yield _chat(f"{kind}: {name}", max_tokens=64, **fields)
    yield from _tools()
    for index, name in enumerate(TEMPLATES):
        yield _chat(f"template: {name}", model=f"a{index}")
    yield from _bodies()
    yield from _headers()


def _chat(name: str, **fields: Any) -> Attack:
    body = {"model": "base", "messages": _HELLO, "max_tokens": 4, **fields}
    return Attack(name, _CHAT, json.dumps(body).encode())


def _tools() -> Iterator[Attack]:
    def tool(index: int, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        function = {"name": f"f{index}", "parameters": parameters, "strict": True}
        return {"type": "function", "function": function}

    small = {"type": "object", "properties": {"a": {"enum": list(range(20))}}}
    costly = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 999_983}}}
    for name, tools in {
        "tools: 128 small": [tool(index, small) for index in range(128)],
        "tools: 5,000 small": [tool(index, small) for index in range(5000)],
        "tools: one costly": [tool(0, costly)],
    }.items():
        yield _chat(name, tools=tools, tool_choice="required")


def _bodies() -> Iterator[Attack]:
    yield Attack("body: deep", _CHAT, b"[" * 100_000)
    yield Attack("body: 7 MiB of one prompt", _GENERATE, _generate("t1 " * (7 * 2**20 // 3)))
    yield Attack("body: 7 MiB without a space", _GENERATE, _generate("x" * 7 * 2**20))
    yield Attack("body: 64 MiB", _GENERATE, _generate("x" * 64 * 2**20))
    yield Attack("body: a long number", _GENERATE, b'{"inputs": ' + b"9" * 2**20 + b"}")
    yield _chat("body: 100,000 messages", messages=_HELLO * 100_000)
    yield _chat("body: 1 MiB stop string", stop=["x" * 2**20])
    yield _chat("body: 100,000 biases", logit_bias={str(id): 1 for id in range(100_000)})
    yield _chat("body: 100,000 stop ids", stop_token_ids=list(range(100_000)))
    yield _chat("body: many choices", n=10**9)
    yield _chat("body: template variables", chat_template_kwargs={"x": ["y" * 100] * 10_000})


def _headers() -> Iterator[Attack]:
    body = _generate("t1", max_new_tokens=1)
    yield Attack("headers: 500", _GENERATE, body, {f"x-{i}": "y" for i in range(500)})
    yield Attack("headers: 60 KiB", _GENERATE, body, {"x-long": "y" * 60_000})
    yield Attack("headers: id that is no UTF-8", _GENERATE, body, {"x-request-id": "\udcff"})
    yield Attack("headers: long token", _GENERATE, body, {"authorization": "Bearer " + "y" * 7000})


def _generate(inputs: str, **parameters: Any) -> bytes:
    return json.dumps(
        {"inputs": inputs, "parameters": {"max_new_tokens": 4, **parameters}}
    ).encode()
