"""Keys, quotas and rights, over HTTP."""

import hashlib
import math
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from configs.api import ApiConfig, KeyConfig, SecretConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.contract import AdapterInfo
from deployments.ingress.generation.engine import IngressSettings
from tests.deployments.ingress.conftest import PATIENCE, Server

BODY = {"inputs": "hello", "parameters": {"max_new_tokens": 5}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
ROUTES = [("/generate", BODY), ("/generate_stream", BODY), ("/", BODY),
          ("/v1/chat/completions", CHAT), ("/v1/completions", {"model": "", "prompt": "a"}),
          ("/tokenize", {"inputs": "a"})]  # fmt: skip


def _key(name: str, **rest: Any) -> KeyConfig:
    """A key whose secret is its name."""
    return KeyConfig(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), **rest)


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def _configure(server: Server, **api: Any) -> None:
    server.fresh_app(IngressSettings(api=ApiConfig(**api)))


@pytest.fixture
def guarded(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """One key that may do all, one that is kept in the environment and may use some adapters."""
    monkeypatch.setenv("POETS_KEY", "poets")
    keys = (
        _key("all"),
        KeyConfig(name="poets", env="POETS_KEY", adapters=("local:po*", "acme/*")),
    )
    _configure(server, keys=keys, admin_key=SecretConfig(sha256=_key("root").sha256))
    return server


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_requests_without_a_key_are_refused(
    guarded: Server, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    wrong = [{}, _bearer("wrong"), _bearer("ALL"), _bearer("none"), {"authorization": "Basic all"},
             {"authorization": "all"}, {"authorization": "Bearer clé".encode()}]  # fmt: skip
    for headers in wrong:
        reply = http.post(path, json=body, headers=headers)  # type: ignore[arg-type]
        assert reply.status_code == 401, headers
        assert reply.headers["www-authenticate"] == "Bearer"
    assert guarded.driver.requests == []
    for key in ("all", "poets", "root"):
        assert http.post(path, json=body, headers=_bearer(key)).status_code == 200


def test_the_two_dialects_of_a_missing_key(guarded: Server, http: httpx.Client) -> None:
    error = http.get("/v1/models").json()["error"]
    assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
    error = http.get("/info").json()
    assert (error["error_type"], error["code"]) == ("unauthorized", "unauthorized")


def test_a_body_is_not_read_without_a_key(guarded: Server, http: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    assert http.post("/generate", content=b"{", headers=headers).status_code == 401
    assert http.post("/no/such/route", json={}).status_code == 401


@pytest.mark.parametrize(
    "path",
    ["/", "/health", "/ping", "/playground", "/docs", "/docs/swagger-ui.css", "/openapi.json"],
)
def test_open_paths(guarded: Server, http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/info", "/metrics", "/startup", "/v1/models"])
def test_closed_paths(guarded: Server, http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 401
    assert http.get(path, headers=_bearer("all")).status_code == 200


@pytest.mark.parametrize(
    ("adapter", "allowed"),
    [
        ("local:poet", True), ("local:po", True), ("acme/sql", True), ("hub:acme/sql@v2", True),
        ("", True), ("tiny", True),
        ("poet", False), ("local:pirate", False), ("hub:po", False), ("acmes/sql", False),
        ("local:acme/sql", False),
    ],
)  # fmt: skip
def test_a_key_opens_its_adapters_and_the_base_model(
    guarded: Server, http: httpx.Client, adapter: str, allowed: bool
) -> None:
    native: dict[str, Any] = {"max_new_tokens": 2, "adapter_id": adapter}
    for path in ("/generate", "/generate_stream", "/"):
        body = {"inputs": "a", "parameters": native}
        reply = http.post(path, json=body, headers=_bearer("poets"))
        assert reply.status_code == (200 if allowed else 403), reply.text
    for stream in (False, True):
        chat = {**CHAT, "model": adapter, "stream": stream}
        reply = http.post("/v1/chat/completions", json=chat, headers=_bearer("poets"))
        assert reply.status_code == (200 if allowed else 403), reply.text
    assert bool(guarded.driver.requests) == allowed
    if not allowed:
        assert reply.json()["error"]["code"] == "forbidden"
        assert len(guarded.inboxes) == 0
    assert http.post("/generate", json={"inputs": "a", "parameters": native},
                     headers=_bearer("all")).status_code == 200  # fmt: skip


def test_a_key_sees_its_own_adapters_in_lists(guarded: Server, http: httpx.Client) -> None:
    def listed(key: str) -> set[str]:
        models = http.get("/v1/models", headers=_bearer(key)).json()["data"]
        shown = http.get("/info", headers=_bearer(key)).json()["adapters"]
        assert {model["root"] for model in models[1:]} == {one["id"] for one in shown}
        return {model["id"] for model in models}

    assert listed("all") == {"tiny", "org/pirate", "local:poet"}
    assert listed("poets") == {"tiny", "local:poet"}
    reply = http.get("/v1/models/org/pirate", headers=_bearer("poets"))
    assert reply.status_code == 404
    assert http.get("/metrics", headers=_bearer("poets")).status_code == 403


def test_a_key_sees_the_names_that_its_adapters_were_given(
    server: Server, http: httpx.Client
) -> None:
    pairs = (("rhymes", "local:poet"), ("poems", "hub:org/pirate"))
    named = [AdapterInfo(id, "local", "name", target) for id, target in pairs]
    _configure(server, keys=(_key("poets", adapters=("*:po*",)),))
    info = server.driver.info
    server.driver.info = replace(info, adapters=[*info.adapters, *named])
    models = http.get("/v1/models", headers=_bearer("poets")).json()["data"]
    assert [model["id"] for model in models] == ["tiny", "local:poet", "local:rhymes"]


def test_an_api_key_never_goes_to_the_hub(guarded: Server, http: httpx.Client) -> None:
    cases: list[tuple[dict[str, str], dict[str, object], str | None]] = [
        ({}, {}, None),
        ({"x-hub-token": "hf_x"}, {}, "hf_x"),
        ({"x-hub-token": "hf_x"}, {"api_token": "hf_y"}, "hf_y"),
        ({}, {"api_token": "hf_y"}, "hf_y"),
    ]
    for headers, extra, expected in cases:
        native = {"inputs": "a", "parameters": {"adapter_id": "a/b", "max_new_tokens": 1, **extra}}
        http.post("/generate", json=native, headers={**_bearer("all"), **headers})
        http.post("/v1/chat/completions", json={**CHAT, "model": "a/b", **extra},
                  headers={**_bearer("all"), **headers})  # fmt: skip
        tokens = [request.api_token for request in guarded.driver.requests[-2:]]
        assert tokens == [expected] * 2


def test_without_keys_the_bearer_is_the_hubs(server: Server, http: httpx.Client) -> None:
    http.post("/generate", json=BODY, headers=_bearer("hf_z"))
    assert server.driver.requests[-1].api_token == "hf_z"
    _configure(server, admin_key=SecretConfig(sha256=_key("root").sha256))
    for key, expected in (("hf_z", "hf_z"), ("root", None)):
        http.post("/generate", json=BODY, headers=_bearer(key))
        assert server.driver.requests[-1].api_token == expected


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_requests_per_minute(
    server: Server, http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    _configure(server, keys=(_key("slow", requests_per_minute=2), _key("other")))
    for _ in range(2):
        assert http.post(path, json=body, headers=_bearer("slow")).status_code == 200
    reply = http.post(path, json=body, headers=_bearer("slow"))
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "30"
    assert "requests per minute" in reply.text
    assert http.post(path, json=body, headers=_bearer("other")).status_code == 200
    assert http.get("/v1/models", headers=_bearer("slow")).status_code == 200
    server.clock.now += 30
    assert http.post(path, json=body, headers=_bearer("slow")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_per_minute(server: Server, http: httpx.Client, stream: bool) -> None:
    _configure(server, keys=(_key("short", tokens_per_minute=600),))
    body = {**CHAT, "max_tokens": 200, "n": 2, "seed": 1, "stream": stream}
    headers = _bearer("short")
    for _ in range(2):
        assert http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
    prompt = len(server.driver.requests[-1].sequences[0].prompt)
    reply = http.post("/v1/chat/completions", json=body, headers=headers)
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    spent = 2 * (prompt + 400)
    assert int(reply.headers["retry-after"]) == math.ceil((spent - 600 + 1) / 10)
    native = http.post("/generate", json=BODY, headers=headers)
    assert (native.status_code, native.json()["error_type"]) == (429, "overloaded")


def test_a_client_that_leaves_is_charged_for_its_tokens(server: Server, http: httpx.Client) -> None:
    _configure(server, keys=(_key("short", tokens_per_minute=60),))
    server.driver.hold_after = 100
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 300}}
    seen = 0
    with http.stream("POST", "/generate_stream", json=body, headers=_bearer("short")) as reply:
        for line in reply.iter_lines():
            seen += line.startswith("data:")
            if seen == 100:
                break
    assert server.driver.cancelled.wait(PATIENCE)
    server.driver.hold_after = None
    reply = http.post("/generate", json=BODY, headers=_bearer("short"))
    assert reply.status_code == 429


def test_a_client_that_leaves_before_its_answer_is_charged_too(
    server: Server, http: httpx.Client
) -> None:
    _configure(server, keys=(_key("short", tokens_per_minute=60),))
    server.driver.hold_after = 100
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 300}}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/generate", json=body, headers=_bearer("short"), timeout=3.0)
    assert server.driver.cancelled.wait(PATIENCE)
    server.driver.hold_after = None
    reply = http.post("/generate", json=BODY, headers=_bearer("short"))
    assert reply.status_code == 429


def test_a_missing_variable_is_an_error_at_the_start(server: Server) -> None:
    with pytest.raises(ValueError, match="NO_SUCH_KEY, which is not set"):
        _configure(server, keys=(KeyConfig(name="a", env="NO_SUCH_KEY"),))


def test_other_sites_only_when_configured(server: Server, http: httpx.Client) -> None:
    ask = {"origin": "https://a.example", "access-control-request-method": "POST",
           "access-control-request-headers": "content-type, authorization"}  # fmt: skip
    assert "access-control-allow-origin" not in http.get("/health", headers=ask).headers
    assert http.options("/generate", headers=ask).status_code == 405
    _configure(server, cors_allow_origin=("https://a.example",), keys=(_key("all"),))
    assert http.options("/generate", headers=ask).status_code == 200
    reply = http.post("/generate", json=BODY, headers={"origin": "https://a.example"})
    assert reply.status_code == 401
    assert reply.headers["access-control-allow-origin"] == "https://a.example"
    evil = http.post("/generate", json=BODY, headers={"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in evil.headers


def test_a_key_has_one_adapter_source_by_default(server: Server, http: httpx.Client) -> None:
    settings = IngressSettings(
        default_source=AdapterSource.LOCAL, api=ApiConfig(keys=(_key("a", adapters=("poet",)),))
    )
    server.fresh_app(settings)
    body = {"inputs": "a", "parameters": {"adapter_id": "poet", "max_new_tokens": 1}}
    assert http.post("/generate", json=body, headers=_bearer("a")).status_code == 200
    assert server.driver.requests[-1].adapter == AdapterReference(AdapterSource.LOCAL, "poet")
    body["parameters"]["adapter_source"] = "hub"  # type: ignore[index]
    assert http.post("/generate", json=body, headers=_bearer("a")).status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "http://localhost:8000", "host": "localhost:8000"}, 200),
        ({"origin": "http://ours.example"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"origin": "http://theirs.example"}, 401),
        ({"origin": "null"}, 401),
        ({"origin": "http://["}, 401),
        ({"host": "theirs.example:8000", "origin": "http://theirs.example:8000"}, 401),
        ({"host": "["}, 401),
    ],
)
@pytest.mark.parametrize("origins", [("http://ours.example",), ("*", "http://ours.example")])
def test_pages_of_other_sites_do_not_administer(
    server: Server, http: httpx.Client, headers: dict[str, str], status: int, origins: Any
) -> None:
    """Without a preflight, a browser sends a POST to a server on its visitor's machine."""
    api = ApiConfig(cors_allow_origin=origins)
    server.fresh_app(IngressSettings(api=api, loopback=True))
    assert http.post("/wake_up", headers=headers).status_code == status
    assert http.post("/generate", json=BODY, headers=headers).status_code == 200


def test_open_administration_has_any_name_but_no_foreign_pages(
    server: Server, http: httpx.Client
) -> None:
    _configure(server, admin="open")
    assert http.post("/wake_up", headers={"host": "gpu.example"}).status_code == 200
    assert http.post("/wake_up", headers={"origin": "http://theirs.example"}).status_code == 401


def test_a_page_with_the_admin_key_administers(guarded: Server, http: httpx.Client) -> None:
    headers = {"origin": "http://theirs.example", "host": "gpu.example", **_bearer("root")}
    assert http.post("/wake_up", headers=headers).status_code == 200
