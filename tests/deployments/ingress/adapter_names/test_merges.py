"""`merged_adapters` on every route that generates or embeds."""

from typing import Any

import httpx
import lorax
import pytest

from configs.api import ApiConfig, KeyConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.merging import MergeRule, MergeStrategy, SignMethod
from configs.wire.templates import TemplateSource
from deployments.contract import AdapterStatus
from deployments.ingress.generation.engine import IngressSettings
from tests.deployments.ingress.conftest import Server
from tests.fakes import FakeDriver

HUB, LOCAL = AdapterSource.HUB, AdapterSource.LOCAL
PARTS = (AdapterReference(HUB, "a/b", "v1"), AdapterReference(LOCAL, "c"))
GIVEN: dict[str, Any] = {
    "ids": ["a/b@v1", "local:c"],
    "weights": [0.5, -1],
    "merge_strategy": "dare_ties",
    "density": 0.25,
    "majority_sign_method": "frequency",
}
RULE = MergeRule((0.5, -1.0), MergeStrategy.DARE_TIES, 0.25, SignMethod.FREQUENCY)
WANTED = AdapterReference(HUB, "a/b@v1,local:c", None, PARTS, RULE)
MESSAGES = [{"role": "user", "content": "hello"}]
OPENAI = {"model": "", "max_tokens": 2, "merged_adapters": GIVEN}
NATIVE = {"inputs": "hello", "parameters": {"max_new_tokens": 2, "merged_adapters": GIVEN}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", NATIVE),
        ("/generate_stream", NATIVE),
        ("/", NATIVE),
        ("/embed", NATIVE),
        ("/v1/completions", {**OPENAI, "prompt": "hello"}),
        ("/v1/chat/completions", {**OPENAI, "messages": MESSAGES}),
        ("/v1/responses", {"model": "", "input": "hello", "merged_adapters": GIVEN}),
        ("/v1/embeddings", {"model": "", "input": "hello", "merged_adapters": GIVEN}),
    ],
)
def test_every_route_requests_the_merge(
    server: Server, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    server.fresh_app(IngressSettings(default_source=HUB))
    # A template of the merge's parts would be another prompt.
    server.driver.templates = {"a/b@v1,local:c": TemplateSource("no {{ messages[0].content }}")}
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    assert server.driver.requests[-1].adapter == WANTED
    assert server.driver.template_tokens == []


def test_headers_name_all_parts(http: httpx.Client) -> None:
    reply = http.post("/generate", json=NATIVE)
    assert reply.headers["x-adapter-id"] == "a/b@v1,local:c"


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"density": 0.0}, MergeRule((1.0, 2.0))),
        ({"merge_strategy": None, "majority_sign_method": None}, MergeRule((1.0, 2.0))),
        (
            {"merge_strategy": "ties", "density": 1},
            MergeRule((1.0, 2.0), MergeStrategy.TIES, 1.0),
        ),
        (
            {"merge_strategy": "dare_linear", "density": 0.5, "majority_sign_method": "frequency"},
            MergeRule((1.0, 2.0), MergeStrategy.DARE_LINEAR, 0.5),
        ),
    ],
)
def test_defaults_and_what_does_not_count(
    http: httpx.Client, driver: FakeDriver, given: dict[str, Any], rule: MergeRule
) -> None:
    merged = {"ids": ["a", "b"], "weights": [1, 2], **given}
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 1, "merged_adapters": merged}}
    assert http.post("/generate", json=body).status_code == 200
    adapter = driver.requests[-1].adapter
    assert adapter is not None
    assert adapter.rule == rule


def test_one_part_is_always_linear(http: httpx.Client, driver: FakeDriver) -> None:
    merged = {"ids": ["a"], "weights": [0.5], "merge_strategy": "ties"}
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 1, "merged_adapters": merged}}
    assert http.post("/generate", json=body).status_code == 200
    adapter = driver.requests[-1].adapter
    assert adapter is not None
    assert adapter.rule == MergeRule((0.5,))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"merge_strategy": "cat"}, "'linear', 'ties', 'dare_linear' or 'dare_ties'"),
        ({"majority_sign_method": "mean"}, "'total' or 'frequency'"),
        ({"weights": [1, "x"]}, "valid number"),
        ({"ids": ["a"] * 33, "weights": [1] * 33}, "at most 32"),
    ],
)
def test_unknown_values_are_refused_with_the_known_ones(
    http: httpx.Client, driver: FakeDriver, given: dict[str, Any], words: str
) -> None:
    body = {**NATIVE, "parameters": {"merged_adapters": {**GIVEN, **given}}}
    reply = http.post("/generate", json=body)
    assert reply.status_code == 422
    assert words in reply.json()["error"]
    assert driver.requests == []


def test_a_key_must_permit_every_part(
    server: Server, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POETS_KEY", "s3cret")
    keys = (KeyConfig(name="poets", env="POETS_KEY", adapters=("local:po*",)),)
    server.fresh_app(IngressSettings(default_source=LOCAL, api=ApiConfig(keys=keys)))
    headers = {"authorization": "Bearer s3cret"}
    for ids, status in (
        (["poet", "pope"], 200), (["poet", "cook"], 403), (["poet", "hub:poet"], 403),
    ):  # fmt: skip
        merged = {"ids": ids, "weights": [1, 1]}
        native = {"inputs": "a", "parameters": {"max_new_tokens": 1, "merged_adapters": merged}}
        chat = {"model": "", "messages": MESSAGES, "max_tokens": 1, "merged_adapters": merged}
        for path, body in (("/generate", native), ("/v1/chat/completions", chat)):
            reply = http.post(path, json=body, headers=headers)
            assert reply.status_code == status, reply.text
    assert len(server.driver.requests) == 2


def test_loraxs_client_merges(server: Server) -> None:
    server.fresh_app(IngressSettings(default_source=HUB))
    merged = lorax.MergedAdapters(**GIVEN)
    lorax.Client(server.url).generate("hello", merged_adapters=merged, max_new_tokens=2)
    assert server.driver.requests[-1].adapter == WANTED


def test_a_listed_merge_has_its_fields(server: Server, http: httpx.Client) -> None:
    server.fresh_app(IngressSettings(default_source=HUB, loopback=True))
    linear = AdapterReference(HUB, "a/b@v1,local:c", None, PARTS, MergeRule((0.5, 2.0)))
    for replica in server.driver.replicas.members:
        replica.known = {
            WANTED: AdapterStatus(WANTED, "device", None, "d1", 16),
            linear: AdapterStatus(linear, "host", None, "d2", 16),
            PARTS[1]: AdapterStatus(PARTS[1], "disk", None, "d3", 16),
        }
    rows = http.get("/v1/adapters").json()["data"]
    assert [row["id"] for row in rows] == ["a/b@v1,local:c"] * 2 + ["local:c"]
    assert [row["source"] for row in rows] == [None, None, "local"]
    assert rows[2]["merged_adapters"] is None
    assert rows[0]["merged_adapters"] == {**GIVEN, "weights": [0.5, -1.0]}
    for row, wanted in zip(rows, (WANTED, linear), strict=False):
        parameters = {"max_new_tokens": 2, "merged_adapters": row["merged_adapters"]}
        reply = http.post("/generate", json={"inputs": "hello", "parameters": parameters})
        assert reply.status_code == 200, reply.text
        assert server.driver.requests[-1].adapter == wanted
