"""Whose prompts a caller can find in the prefix cache: its own group's, and by its own salt."""

import hashlib
import json
from typing import Any

import httpx
import pytest

from configs.api import ApiConfig, KeyConfig, SecretConfig
from deployments.ingress.generation.engine import IngressSettings
from tests.deployments.ingress.conftest import Server

MODEL = {"model": "tiny"}
OPENAI: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**MODEL, "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {**MODEL, "prompt": "hi"},
    "/v1/responses": {**MODEL, "input": "hi"},
    "/v1/embeddings": {**MODEL, "input": "hi"},
}
LORAX: dict[str, dict[str, Any]] = {
    path: {"inputs": "hi"} for path in ("/generate", "/generate_stream", "/embed")
}
ROUTES = {**OPENAI, **LORAX}
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


def key(name: str, **rest: Any) -> KeyConfig:
    """A key whose secret is its name."""
    return KeyConfig(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), **rest)


def configure(server: Server) -> None:
    keys = (
        key("a"), key("b"), key("c", cache_group="team"), key("d", cache_group="team"),
        key("team"), key("e", cache_group="a"),
    )  # fmt: skip
    admin = SecretConfig(sha256=hashlib.sha256(b"root").hexdigest())
    server.fresh_app(IngressSettings(api=ApiConfig(keys=keys, admin_key=admin)))


def salt(
    server: Server, http: httpx.Client, path: str, api_key: str | None = None, **fields: Any
) -> bytes:
    """The salt of the request that reaches the driver."""
    server.driver.requests.clear()
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    reply = http.post(path, json={**ROUTES[path], **fields}, headers=headers)
    assert reply.status_code == 200, reply.text
    [request] = server.driver.requests
    return request.cache_salt


@pytest.mark.parametrize("path", ROUTES)
def test_without_keys_all_share(server: Server, http: httpx.Client, path: str) -> None:
    assert salt(server, http, path) == salt(server, http, path, "anything") == b""


@pytest.mark.parametrize("path", ROUTES)
def test_each_key_has_its_own_cache_unless_it_is_in_a_group(
    server: Server, http: httpx.Client, path: str
) -> None:
    """No name of a key equals that of a group."""
    configure(server)
    found = {
        api_key: salt(server, http, path, api_key)
        for api_key in ("a", "b", "c", "d", "team", "e", "root")
    }
    assert found["c"] == found["d"]
    assert len(set(found.values())) == len(found) - 1
    assert b"" not in found.values()
    assert salt(server, http, path, "a") == found["a"]


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_has_the_salt_too(server: Server, http: httpx.Client, path: str) -> None:
    configure(server)
    whole = salt(server, http, path, "a", cache_salt="x")
    assert salt(server, http, path, "a", cache_salt="x", stream=True) == whole


@pytest.mark.parametrize("path", OPENAI)
def test_a_requests_own_salt_divides_its_group(
    server: Server, http: httpx.Client, path: str
) -> None:
    assert salt(server, http, path, cache_salt="x") != salt(server, http, path, cache_salt="y")
    open_to_all = salt(server, http, path, cache_salt="x")
    assert open_to_all != b""
    configure(server)
    plain, salted = salt(server, http, path, "c"), salt(server, http, path, "c", cache_salt="x")
    assert salt(server, http, path, "d", cache_salt="x") == salted
    assert len({plain, salted, open_to_all, salt(server, http, path, "a", cache_salt="x")}) == 4


@pytest.mark.parametrize("path", OPENAI)
@pytest.mark.parametrize("given", ["", 5, ["x"], "\ud800"])
def test_invalid_salts_are_refused(
    server: Server, http: httpx.Client, path: str, given: object
) -> None:
    content = json.dumps({**ROUTES[path], "cache_salt": given})
    reply = http.post(path, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert "cache_salt" in reply.text
    assert server.driver.requests == []


@pytest.mark.parametrize("path", ROUTES)
def test_downloads_are_charged_to_the_key(server: Server, http: httpx.Client, path: str) -> None:
    """Without a key it is charged to no one."""
    salt(server, http, path)
    assert [request.payer for request in server.driver.requests] == [""]
    configure(server)
    for name in ("a", "c"):
        salt(server, http, path, name)
        assert [request.payer for request in server.driver.requests] == [name]


def test_a_download_for_a_template_is_charged_to_the_key(
    server: Server, http: httpx.Client
) -> None:
    configure(server)
    body = {**OPENAI["/v1/chat/completions"], "model": "acme/sql"}
    assert http.post(
        "/v1/chat/completions", json=body, headers={"authorization": "Bearer c"}
    ).is_success
    assert server.driver.template_payers == ["c"]
