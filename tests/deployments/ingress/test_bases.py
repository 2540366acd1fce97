"""Several base models behind one address: what names a base, and what all of them answer."""

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from msgspec.structs import replace
from pydantic import ValidationError
from starlette.testclient import TestClient

from configs.api import ApiConfig
from configs.batches import BatchesConfig
from configs.serve import BasesConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.contract import AdapterInfo, EngineLoad, ReplyAddress
from deployments.ingress import bases as front
from deployments.ingress.app import build_app
from deployments.ingress.bases import HEADER, build_front
from deployments.ingress.generation import engine
from deployments.ingress.generation.engine import IngressSettings
from deployments.ingress.generation.frames import RequestInboxes
from deployments.observability.lorax_metrics import RequestMetrics
from tests.fakes import FakeDriver, engine_info, write_tokenizer

PATHS = ("/v1/completions", "/v1/embeddings", "/v1/messages/count_tokens")


class Bases:
    """Two bases over fake drivers: each has the adapter `poet`, and one of its own."""

    def __init__(
        self, folder: Path, batches: BatchesConfig | None = None, **apis: ApiConfig
    ) -> None:
        tokenizer = write_tokenizer(folder)
        metrics = RequestMetrics()
        self.drivers: dict[str, FakeDriver] = {}
        self.apps: dict[str, FastAPI] = {}
        for name, own in (("small", "pirate"), ("large", "sql")):
            listed = [AdapterInfo(each, "local", "disk") for each in ("poet", own)]
            listed += [AdapterInfo("policy", "pushed", "known")] if name == "large" else []
            info = replace(
                engine_info(folder, tokenizer),
                model_id=f"org/{name}", model_name=name, adapters=listed,
            )  # fmt: skip
            driver = self.drivers[name] = FakeDriver(info, tokenizer)
            driver.engine_loads = [EngineLoad(name, 0, 0, 8, 8, 16, 4, 0, 0, 0, 0, [])]
            inboxes = RequestInboxes()
            driver.deliver = inboxes.deliver
            settings = IngressSettings(
                default_source=AdapterSource.LOCAL,
                api=apis.get(name, ApiConfig()),
                batches=batches or BatchesConfig(),
                bases=frozenset({"small", "large"}),
                loopback=True,
            )
            self.apps[name] = build_app(
                driver, inboxes, lambda: ReplyAddress("127.0.0.1", 1, "hush"), settings,
                metrics=metrics,
            )  # fmt: skip
        self.front = build_front(self.apps)

    def served(self) -> tuple[str, AdapterReference | None]:
        """The base and the adapter of the only request that has reached a driver since."""
        [found] = [
            (name, each) for name, driver in self.drivers.items() for each in driver.requests
        ]
        for driver in self.drivers.values():
            driver.requests.clear()
        return found[0], found[1].adapter


@pytest.fixture
def bases(tmp_path: Path) -> Bases:
    return Bases(tmp_path)


@pytest.fixture
def http(bases: Bases) -> Iterator[TestClient]:
    with TestClient(bases.front, base_url="http://localhost") as client:
        yield client


def local(name: str) -> AdapterReference:
    return AdapterReference(AdapterSource.LOCAL, name)


@pytest.mark.parametrize(
    ("model", "base", "adapter"),
    [
        ("small", "small", None),
        ("large", "large", None),
        ("org/large", "large", None),
        ("pirate", "small", "pirate"),
        ("sql", "large", "sql"),
        ("policy", "large", "policy"),
        ("poet", "small", "poet"),
        ("large/poet", "large", "poet"),
        ("small/org/any", "small", "org/any"),
        ("unlisted", "small", "unlisted"),
    ],
)
def test_model_names_the_base(
    bases: Bases, http: TestClient, model: str, base: str, adapter: str | None
) -> None:
    body = {"model": model, "prompt": "hello", "max_tokens": 3, "seed": 2**63 + 1}
    reply = http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert bases.served() == (base, None if adapter is None else local(adapter))


def test_a_path_or_a_header_names_the_base_of_lorax_routes(bases: Bases, http: TestClient) -> None:
    body = {"inputs": "hello", "parameters": {"adapter_id": "poet", "max_new_tokens": 3}}
    for path, headers, base in (
        ("/generate", {}, "small"),
        ("/large/generate", {}, "large"),
        ("/generate", {HEADER: "large"}, "large"),
        ("/large/v1/completions", {}, "large"),
    ):
        sent = body if path.endswith("generate") else {"model": "poet", "prompt": "hello"}
        reply = http.post(path, json=sent, headers=headers)
        assert reply.status_code == 200, reply.text
        assert bases.served() == (base, local("poet"))
    assert http.get("/large/info").json()["model_id"] == "org/large"
    assert http.get("/info").json()["model_id"] == "org/small"
    unknown = http.get("/info", headers={HEADER: "huge"})
    assert (unknown.status_code, "`huge`" in unknown.text) == (424, True)


def test_all_models_are_listed_and_each_can_be_looked_up(http: TestClient) -> None:
    listed = http.get("/v1/models").json()["data"]
    ids = [row["id"] for row in listed]
    assert ids == ["small", "poet", "pirate", "large", "large/poet", "sql", "policy"]
    for id in ids:
        found = http.get(f"/v1/models/{id}")
        assert found.status_code == 200, found.text
        assert found.json()["id"] == id.removeprefix("large/")
    assert http.get("/v1/models/unknown").status_code == 404


def test_a_new_adapter_is_found_at_its_first_request(bases: Bases, http: TestClient) -> None:
    http.get("/v1/models")
    driver = bases.drivers["large"]
    new = AdapterInfo("new", "local", "disk")
    driver.info = replace(driver.info, adapters=[*driver.info.adapters, new])
    for app in bases.apps.values():
        app.state.engine._refreshed_at = float("-inf")  # A second has passed.
    assert http.post("/v1/completions", json={"model": "new", "prompt": "x"}).status_code == 200
    assert bases.served() == ("large", local("new"))


def test_a_base_that_starts_delays_no_other(
    bases: Bases, http: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first request reads the tokenizer, which may take longer than what is waited for below.
    assert http.get("/small/v1/models").status_code == 200
    monkeypatch.setattr(front, "_REFRESH_SECONDS", 0.2)
    monkeypatch.setattr(engine, "_DESCRIBE_SECONDS", 1e6)
    monkeypatch.setattr(bases.drivers["large"], "describe", asyncio.Event().wait)
    assert [row["id"] for row in http.get("/v1/models").json()["data"]] == [
        "small",
        "poet",
        "pirate",
    ]
    assert http.get("/health").status_code == 200
    assert http.get("/metrics").status_code == 200
    for model in ("small", "pirate", "unlisted"):
        body = {"model": model, "prompt": "x", "max_tokens": 1}
        assert http.post("/v1/completions", json=body).status_code == 200, model
    monkeypatch.setattr(bases.drivers["small"], "describe", asyncio.Event().wait)
    for app in bases.apps.values():
        app.state.engine._refreshed_at = float("-inf")
    for path in ("/v1/models", "/health"):
        assert http.get(path).status_code == 503


@pytest.mark.parametrize("path", ["", "/large"])
def test_an_adapter_is_found_as_soon_as_a_command_has_named_it(
    bases: Bases, http: TestClient, path: str
) -> None:
    base = path.removeprefix("/") or "small"
    http.get("/v1/models")
    driver = bases.drivers[base]
    before = driver.info.adapters
    for route, adapters, served in (
        ("load_lora_adapter", [*before, AdapterInfo("new", "local", "disk")], base),
        ("unload_lora_adapter", before, "small"),
    ):
        driver.info = replace(driver.info, adapters=adapters)
        body = {"lora_name": "new", "lora_path": "poet"}
        command = http.post(f"{path}/v1/{route}", json=body)
        assert command.status_code == 200, command.text
        reply = http.post("/v1/completions", json={"model": "new", "prompt": "x"})
        assert reply.status_code == 200, reply.text
        assert bases.served() == (served, local("new"))


def test_a_base_is_called_by_its_name_and_by_that_of_its_model(
    bases: Bases, http: TestClient
) -> None:
    driver = bases.drivers["large"]
    driver.info = replace(driver.info, model_name="llama")
    for model in ("large", "llama", "large/llama"):
        reply = http.post("/v1/completions", json={"model": model, "prompt": "x"})
        assert (reply.status_code, reply.json().get("model")) == (200, "llama"), reply.text
        assert bases.served() == ("large", None)
    assert http.get("/v1/models/large").json()["id"] == "llama"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("large", "base model's name"),
        ("large/mine", "send `mine` to /large/v1"),
        ("small/mine", "send `mine` to /small/v1"),
    ],
)
def test_a_name_that_means_another_base_is_refused(
    http: TestClient, name: str, message: str
) -> None:
    body = {"lora_name": name, "lora_path": "poet"}
    named = http.post("/v1/load_lora_adapter", json=body)
    form = {"lora_name": name, "adapter_config": "{}"}
    pushed = http.post("/v1/push_lora_adapter", data=form, files={"adapter_model": b"x"})
    for reply in (named, pushed):
        assert (reply.status_code, message in reply.text) == (400, True), reply.text


def test_health_and_metrics_are_of_all_bases(bases: Bases, http: TestClient) -> None:
    driver = bases.drivers["small"]
    driver.info = replace(driver.info, healthy=False)
    assert http.get("/small/health").status_code == 503
    assert http.get("/health").status_code == 200
    other = bases.drivers["large"]
    other.info = replace(other.info, healthy=False)
    for model in ("small", "large"):
        http.post("/v1/completions", json={"model": model, "prompt": "x", "max_tokens": 1})
    text = http.get("/metrics").text
    assert "lorax_request_skipped_tokens_count 2.0" in text
    for each in ("small", "large"):
        assert f'vllm:e2e_request_latency_seconds_count{{model_name="{each}"}} 1.0' in text
        own = http.get(f"/{each}/metrics").text
        assert f'vllm:num_requests_running{{model_name="{each}"}}' in own
        assert own.count("\nvllm:num_requests_running{") == 1


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model": 5}', b'{"model": null}', b"\xff"])
@pytest.mark.parametrize("path", PATHS)
def test_other_bodies_are_refused_as_by_one_base(http: TestClient, path: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    one = http.post(f"/small{path}", content=body, headers=headers)
    assert one.status_code == 400
    assert http.post(path, content=body, headers=headers).json() == one.json()


def test_each_base_has_its_own_keys(tmp_path: Path) -> None:
    key = {"name": "b", "sha256": hashlib.sha256(b"b").hexdigest(), "requests_per_minute": 1}
    apis = {
        "small": ApiConfig.model_validate(
            {"keys": [{"name": "a", "sha256": hashlib.sha256(b"a").hexdigest()}]}
        ),
        "large": ApiConfig.model_validate({"keys": [key]}),
    }
    bases = Bases(tmp_path, None, **apis)

    def ask(http: TestClient, model: str, key: str) -> Any:
        body = {"model": model, "prompt": "x", "max_tokens": 1}
        headers = {"authorization": f"Bearer {key}"}
        return http.post("/v1/completions", json=body, headers=headers).status_code

    with TestClient(bases.front, base_url="http://localhost") as http:
        assert ask(http, "small", "a") == 200
        assert ask(http, "small", "b") == 401
        assert ask(http, "large", "a") == 401
        assert [ask(http, "large", "b") for _ in range(2)] == [200, 429]
        assert ask(http, "large", "unknown") == 401
        listed = http.get("/v1/models", headers={"authorization": "Bearer b"}).json()["data"]
        assert [row["id"] for row in listed] == ["large", "poet", "sql", "policy"]
        assert http.get("/v1/models").status_code == 401


def test_a_name_that_is_listed_for_a_key_is_served_to_it(tmp_path: Path) -> None:
    apis = {
        base: ApiConfig.model_validate(
            {"keys": [{"name": base, "sha256": hashlib.sha256(base.encode()).hexdigest()}]}
        )
        for base in ("small", "large")
    }
    bases = Bases(tmp_path, None, **apis)
    with TestClient(bases.front, base_url="http://localhost") as http:
        for base in apis:
            headers = {"authorization": f"Bearer {base}"}
            ids = [row["id"] for row in http.get("/v1/models", headers=headers).json()["data"]]
            assert {base, "poet"} <= set(ids)
            for id in ids:
                assert http.get(f"/v1/models/{id}", headers=headers).status_code == 200, id
                body = {"model": id, "prompt": "x", "max_tokens": 1}
                reply = http.post("/v1/completions", json=body, headers=headers)
                assert reply.status_code == 200, reply.text
                assert bases.served()[0] == base
        # What another base alone has stays closed.
        refused = http.get("/v1/models/pirate", headers={"authorization": "Bearer large"})
        assert refused.status_code == 401


def test_names_of_bases() -> None:
    engine = {"engine": {"model": {"id": "org/x"}}}
    config = BasesConfig.model_validate({"models": {"small": engine}})
    assert config.named()["small"].engine.model.served_name == "small"
    for models in ({}, {"v1": engine}, {"a/b": engine}, {"": engine}):
        with pytest.raises(ValidationError):
            BasesConfig.model_validate({"models": models})
    same = {"engine": {"model": {"id": "org/x", "name": "same"}}}
    with pytest.raises(ValidationError, match="the same engine"):
        BasesConfig.model_validate({"models": {"a": same, "b": same}})
    with pytest.raises(ValidationError, match="`same` is another base"):
        BasesConfig.model_validate({"models": {"a": same, "same": engine}})


def test_batches_are_of_all_bases_and_of_keys_by_their_names() -> None:
    keyed = {
        name: {
            "engine": {"model": {"id": name}},
            "api": {"keys": [{"name": "clients", "env": f"KEY_{name}"}]},
        }
        for name in ("a", "b")
    }
    batches = {"storage": "/batches"}
    with pytest.raises(ValidationError, match="give each key a name of its own"):
        BasesConfig.model_validate({"models": keyed, "batches": batches})
    BasesConfig.model_validate({"models": keyed})
    alone = {"engine": {"model": {"id": "a"}}}
    named = BasesConfig.model_validate({"models": {"a": alone}, "batches": batches}).named()
    assert named["a"].batches.storage == "/batches"
    with pytest.raises(ValidationError, match="beside `models`"):
        BasesConfig.model_validate({"models": {"a": alone | {"batches": batches}}})
