"""The document at /openapi.json: complete, and true of real replies."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator

from deployments.ingress.openapi.document import REPLIES, STREAMS, operations
from tests.deployments.ingress.conftest import Server
from tests.deployments.ingress.pages.browser import Browser
from tests.fakes import FakeDriver


@pytest.fixture
def document(http: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = http.get("/openapi.json").json()
    return found


def _operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def _check(document: dict[str, Any], schema: dict[str, Any], value: object) -> None:
    Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def _routes(routes: Sequence[Any]) -> Iterator[APIRoute]:
    """All of them, also where FastAPI keeps routers whole."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        elif router := getattr(route, "original_router", None):
            yield from _routes(router.routes)


def test_every_route_has_its_row_and_every_row_its_route(server: Server) -> None:
    app = server.fresh_app()
    written = {
        f"{method} {path}" for path, methods in app.openapi()["paths"].items() for method in methods
    }
    assert written == set(operations())
    assert {*REPLIES, *STREAMS} <= written
    hidden = {route.path for route in _routes(app.routes) if not route.include_in_schema}
    assert hidden == {"/playground", "/docs", "/docs/{name}", "/api-doc/openapi.json"}


def test_every_operation_is_complete(document: dict[str, Any]) -> None:
    for method, path, operation in _operations(document):
        name = f"{method} {path}"
        assert operation["summary"], name
        assert operation["tags"], name
        responses = operation["responses"]
        assert {"401", "431"} <= set(responses), name
        for status, response in responses.items():
            assert response["description"], name
            if status >= "400":
                reference = response["content"]["application/json"]["schema"]["$ref"]
                wanted = "OpenAIError" if path.startswith("/v1/") else "LoraxError"
                wanted = "AnthropicError" if path.startswith("/v1/messages") else wanted
                assert reference == f"#/components/schemas/{wanted}", name
        if "application/json" in operation.get("requestBody", {}).get("content", {}):
            assert operation["requestBody"]["content"]["application/json"]["examples"], name
            assert "429" in responses, name


def test_examples_fit_their_schemas(document: dict[str, Any]) -> None:
    checked = 0
    for _, _, operation in _operations(document):
        body = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if body:
            for example in body["examples"].values():
                _check(document, body["schema"], example["value"])
                checked += 1
        for response in operation["responses"].values():
            content = response.get("content", {}).get("application/json", {})
            if "example" in content:
                _check(document, content["schema"], content["example"])
                checked += 1
    assert checked > 15


def test_replies_to_the_examples_fit_too(
    http: httpx.Client, driver: FakeDriver, document: dict[str, Any]
) -> None:
    num_examples = 0
    for method, path, operation in _operations(document):
        if operation["tags"] == ["Control"]:
            continue
        for example in _examples(operation):
            reply = http.request(method, path.replace("{id}", "tiny"), json=example)
            response = operation["responses"].get(str(reply.status_code))
            assert response is not None, (path, reply.text)
            kind = reply.headers.get("content-type", "").split(";")[0]
            if reply.content:
                assert kind in response["content"], (path, kind)
            if kind == "application/json":
                _check(document, response["content"][kind]["schema"], reply.json())
            elif kind == "text/event-stream":
                _check_events(document, response["content"][kind]["itemSchema"], reply)
            num_examples += reply.status_code == 200
    assert num_examples > 15


def _examples(operation: dict[str, Any]) -> list[Any]:
    body = operation.get("requestBody")
    if body is None:
        return [None]
    # An upload is a form, which has no example.
    content = body["content"].get("application/json", {"examples": {}})
    return [one["value"] for one in content["examples"].values()]


def _check_events(document: dict[str, Any], schema: dict[str, Any], reply: httpx.Response) -> None:
    schema = schema["properties"]["data"]["contentSchema"]
    events = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert len(events) > 1
    for event in events:
        if event != "[DONE]":
            _check(document, schema, json.loads(event))


def test_the_page_loads_nothing_from_elsewhere(http: httpx.Client) -> None:
    reply = http.get("/docs")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r"(?:src|href)=\"(.*?)\"", reply.text)
    assert {"docs/swagger-ui.css", "docs/swagger-ui-bundle.js", "openapi.json"} <= set(named)
    for name in named:
        assert "//" not in name
        if not name.startswith("data:"):
            assert http.get(f"/{name}").status_code == 200
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert "connect-src 'self'" in policy
    assert http.get("/docs/fastapi_offline.py").status_code == 404
    assert http.get("/redoc").status_code == 404


def test_loraxs_path_of_the_document(http: httpx.Client, document: dict[str, Any]) -> None:
    assert http.get("/api-doc/openapi.json").json() == document


def test_the_page_shows_it(server: Server, browser: Browser) -> None:
    browser.open(f"{server.url}/docs")
    browser.wait_for("document.querySelectorAll('.opblock').length > 0")
    shown = browser.run(
        "[...document.querySelectorAll('.opblock-summary-path')].map((one) => one.dataset.path)"
    )
    assert set(shown) == {route.partition(" ")[2] for route in operations()}
    assert all(url.startswith((server.url, "data:", "about:")) for url in browser.requested)
    assert browser.complaints == []
