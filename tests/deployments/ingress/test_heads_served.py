"""Drafts over HTTP: answers are those without, greedy and sampled, in fewer steps."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from configs.wire.adapters import AdapterSource
from deployments.ingress.generation.engine import IngressSettings
from scheduler import speculation
from scheduler.drafts import Drafter
from tests import eagle3
from tests.checkpoints import load_oracle
from tests.oracle import inner_states
from tests.served import demo_app, demo_config, served
from tests.speculation_sweep import known_drafts
from tests.sweeps import swept, swept_rows

HEADS: dict[str, object] = {"kind": "medusa", "model": "configs/demo/heads"}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
DEMO = Path("configs/demo")
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


def write_eagle3(folder: Path, texts: dict[str, list[int]]) -> Path:
    """Train EAGLE-3 heads on one text of each style, and write them."""
    model, layers = DEMO / "model", [0, 1, 2]
    adapters = {style: DEMO / "adapters" / style for style in texts if style != "base"}
    states = {
        style: inner_states(model, adapters.get(style), text, layers)
        for style, text in texts.items()
    }
    torch.manual_seed(1)
    heads = eagle3.Heads(load_oracle(model).get_input_embeddings().weight.detach().float())
    heads.train_on([(states[style], text) for style, text in texts.items()])
    return heads.write(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": layers})


def ids(answer: dict[str, Any]) -> list[int]:
    return [token["id"] for token in answer["details"]["tokens"]]


@dataclass(frozen=True)
class Plain:
    """The prompts of all questions, and what is answered without drafts, greedily and drawn."""

    prompts: list[list[int]]
    greedy: list[list[int]]
    drawn: list[list[int]]

    @property
    def texts(self) -> list[list[int]]:
        """Greedy answers, then drawn ones, with their prompts."""
        both = zip([*self.prompts, *self.prompts], [*self.greedy, *self.drawn], strict=True)
        return [[*prompt, *answer] for prompt, answer in both]


@pytest.fixture(scope="module")
def plain() -> Plain:
    def prompt(question: str) -> list[int]:
        found = httpx.post(f"{url}/tokenize", json={"inputs": question}, timeout=300).json()
        return [token["id"] for token in found]

    with demo(1, kind="none") as url:
        prompts = [prompt(question) for own in RECORDED.values() for question in list(own)[:3]]
        greedy, drawn = (list(map(ids, answers(url, **more))) for more in ({}, SAMPLED))
    return Plain(prompts, greedy, drawn)


@pytest.mark.parametrize(
    ("ranks", "kind"),
    swept_rows(
        product((1, 2), ("medusa", "prompt_lookup")),
        lambda ranks, kind: (ranks == 1) == (kind == "medusa"),
    ),
)
def test_the_demos_drafts_change_no_token(
    plain: Plain, monkeypatch: pytest.MonkeyPatch, ranks: int, kind: str
) -> None:
    """Few answers here repeat themselves, so drafts are what is known, every sixth token wrong."""
    used: dict[str, object] = HEADS
    if kind == "prompt_lookup":
        used = {"kind": kind, "max_tokens": 4}
        monkeypatch.setattr(Drafter, "find", known_drafts(plain.texts, Drafter.find))
    # Whether drafts pay is measured, beside whatever else this machine does.
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    with demo(ranks, **used) as url:
        assert f"{kind}, up to 4" in httpx.get(f"{url}/info").json()["chosen"]["speculation"]
        greedy, drawn = answers(url), answers(url, **SAMPLED)
    recorded = [own[question]["raw"] for own in RECORDED.values() for question in list(own)[:3]]
    assert [each["generated_text"] for each in greedy] == recorded
    assert list(map(ids, greedy)) == plain.greedy
    assert list(map(ids, drawn)) == plain.drawn
    for found in (greedy, drawn):
        tokens = [token for each in found for token in each["details"]["tokens"]]
        assert sum(token["skipped"] for token in tokens) > len(tokens) // 5


@pytest.mark.parametrize("ranks", swept([1, 2], lambda ranks: ranks == 2))
def test_eagle3_heads_change_no_token(
    plain: Plain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Trained on one answer of each style, whose prompts and answers come again."""
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    firsts = plain.texts[: len(plain.greedy) : 3]
    heads = write_eagle3(tmp_path, dict(zip(RECORDED, firsts, strict=True)))
    with demo(ranks, kind="eagle3", model=str(heads), max_tokens=4) as url:
        assert "eagle3, up to 4" in httpx.get(f"{url}/info").json()["chosen"]["speculation"]
        greedy, drawn = answers(url), answers(url, **SAMPLED)
    assert list(map(ids, greedy)) == plain.greedy
    assert list(map(ids, drawn)) == plain.drawn
    skipped = [token["skipped"] for each in greedy[::3] for token in each["details"]["tokens"]]
    assert sum(skipped) > len(skipped) // 5
