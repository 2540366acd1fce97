"""The demo's heads over HTTP: answers are those without, greedy and sampled, in fewer steps."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from configs.wire.adapters import AdapterSource
from deployments.ingress.generation.engine import IngressSettings
from tests.served import demo_app, demo_config, served

HEADS = {"kind": "medusa", "model": "configs/demo/heads"}
RECORDED = json.loads(Path("configs/demo/answers.json").read_text("utf-8"))["answers"]
SETTINGS = IngressSettings(default_source=AdapterSource.LOCAL, loopback=True)


@contextmanager
def demo(ranks: int, **speculation: object) -> Iterator[str]:
    config = demo_config(tensor_parallel=ranks, speculation=speculation)
    with served(demo_app(config, SETTINGS)) as url:
        yield url


def ask(url: str, question: str, style: str, **parameters: Any) -> dict[str, Any]:
    adapter = {} if style == "base" else {"adapter_id": style}
    given = {"max_new_tokens": 200, "details": True, **adapter, **parameters}
    body = {"inputs": question, "parameters": given}
    reply = httpx.post(f"{url}/generate", json=body, timeout=300)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    assert reply.headers["x-skipped-tokens"] == str(found["details"]["skipped_tokens"])
    return found


def answers(url: str, **parameters: Any) -> list[dict[str, Any]]:
    """All styles' answers to three questions, sent at once."""
    wanted = [
        (url, question, style) for style in RECORDED for question in list(RECORDED[style])[:3]
    ]
    with ThreadPoolExecutor(5) as threads:
        return list(threads.map(lambda each: ask(*each, **parameters), wanted))


def ids(answer: dict[str, Any]) -> list[int]:
    return [token["id"] for token in answer["details"]["tokens"]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_demos_heads_change_no_token(ranks: int) -> None:
    sampled = {"temperature": 1.0, "seed": 7}
    with demo(1, kind="none") as url:
        plain = list(map(ids, answers(url, **sampled)))
    with demo(ranks, **HEADS) as url:
        assert "medusa, up to 4" in httpx.get(f"{url}/info").json()["chosen"]["speculation"]
        greedy, drawn = answers(url), answers(url, **sampled)
    recorded = [own[question]["raw"] for own in RECORDED.values() for question in list(own)[:3]]
    assert [each["generated_text"] for each in greedy] == recorded
    assert list(map(ids, drawn)) == plain
    for found in (greedy, drawn):
        tokens = [token for each in found for token in each["details"]["tokens"]]
        assert sum(token["skipped"] for token in tokens) > len(tokens) // 5
