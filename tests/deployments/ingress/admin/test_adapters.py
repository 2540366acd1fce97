"""What operators do with adapters over HTTP: every replica does it, and only they may ask."""

import hashlib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from configs.api import ApiConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.contract import (
    ErrorKind,
    Failed,
    LoadAdapter,
    NameAdapter,
    PinAdapter,
    UnloadAdapter,
    UnpinAdapter,
)
from deployments.ingress.access.keys import is_loopback
from deployments.ingress.generation.engine import IngressSettings
from tests.deployments.ingress.conftest import PATIENCE, Server
from tests.fakes_adapters import Replicas

PIRATE = AdapterReference(AdapterSource.LOCAL, "pirate")
ADMIN = {"authorization": "Bearer open sesame"}


@pytest.fixture
def replicas(server: Server) -> Replicas:
    server.fresh_app(IngressSettings(default_source=AdapterSource.LOCAL, loopback=True))
    return server.driver.replicas


@pytest.fixture
def guarded(server: Server) -> Iterator[httpx.Client]:
    """A server with an admin key and an ordinary one."""
    keys = {
        "admin_key": {"sha256": hashlib.sha256(b"open sesame").hexdigest()},
        "keys": [{"name": "user", "sha256": hashlib.sha256(b"user").hexdigest()}],
    }
    server.fresh_app(IngressSettings(api=ApiConfig.model_validate(keys)))
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def ok(reply: httpx.Response) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_an_adapter_is_loaded_on_every_replica_and_listed(
    http: httpx.Client, replicas: Replicas
) -> None:
    row = ok(http.post("/v1/adapters", json={"id": "pirate", "pin": True}))
    assert (row["id"], row["state"], row["pinned"], row["rank"]) == ("pirate", "device", True, 16)
    assert {name: each["state"] for name, each in row["replicas"].items()} == {
        "a1": "device",
        "b2": "device",
    }
    assert ok(http.get("/v1/adapters")) == {"object": "list", "data": [row]}
    assert ok(http.get("/v1/adapters/pirate")) == row


def test_a_replica_without_the_adapter_is_absent(http: httpx.Client, replicas: Replicas) -> None:
    ok(http.post("/v1/adapters", json={"id": "pirate"}))
    del replicas.members[1].known[PIRATE]
    row = ok(http.get("/v1/adapters/pirate"))
    assert row["state"] == "host"
    assert row["replicas"]["b2"]["state"] == "absent"
    assert row["replicas"]["a1"]["host_bytes"] == 800


@pytest.mark.parametrize(
    ("body", "reference"),
    [
        ({"id": "pirate"}, PIRATE),
        ({"id": "hub:org/sql@v2"}, AdapterReference(AdapterSource.HUB, "org/sql", "v2")),
        (
            {"id": "org/sql", "source": "hub", "revision": "v2"},
            AdapterReference(AdapterSource.HUB, "org/sql", "v2"),
        ),
        ({"id": "s3://bucket/a"}, AdapterReference(AdapterSource.S3, "s3://bucket/a")),
    ],
)
def test_names_are_read_as_in_requests(
    http: httpx.Client, replicas: Replicas, body: dict[str, str], reference: AdapterReference
) -> None:
    ok(http.post("/v1/adapters", json=body))
    assert replicas.commands[-1] == LoadAdapter(reference)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"id": ""}, "id"),
        ({"id": " "}, "needs a name"),
        ({"id": "hub:a", "source": "local"}, "names the source hub"),
        ({"id": "a@1", "revision": "2"}, "names a revision"),
        ({"id": "a", "source": "ftp"}, "must be one of"),
        ({"id": "a", "pinn": True}, "pinn"),
    ],
)
def test_invalid_names_are_refused(
    http: httpx.Client, replicas: Replicas, body: dict[str, object], message: str
) -> None:
    reply = http.post("/v1/adapters", json=body)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
    assert replicas.commands == []


def test_pin_unpin_and_unload(http: httpx.Client, replicas: Replicas) -> None:
    ok(http.post("/v1/adapters", json={"id": "sub/pirate@v1"}))
    assert ok(http.patch("/v1/adapters/sub/pirate@v1", json={"pinned": True}))["pinned"]
    assert not ok(http.patch("/v1/adapters/sub/pirate@v1", json={"pinned": False}))["pinned"]
    assert ok(http.delete("/v1/adapters/sub/pirate@v1"))["state"] == "disk"
    reference = AdapterReference(AdapterSource.LOCAL, "sub/pirate", "v1")
    commands = [PinAdapter(reference), UnpinAdapter(reference), UnloadAdapter(reference)]
    assert replicas.commands[1:] == commands


def test_unknown_adapters(http: httpx.Client, replicas: Replicas) -> None:
    for reply in (
        http.get("/v1/adapters/unknown"),
        http.delete("/v1/adapters/unknown"),
        http.patch("/v1/adapters/unknown", json={"pinned": True}),
        http.post("/v1/unload_lora_adapter", json={"lora_name": "unknown"}),
    ):
        assert reply.status_code == 404
        assert "unknown" in reply.json()["error"]["message"]


def test_a_failure_on_one_replica_is_reported_with_the_number(
    http: httpx.Client, replicas: Replicas
) -> None:
    replicas.members[1].broken = Failed(ErrorKind.ADAPTER_UNAVAILABLE, "the disk is full", 5.0)
    reply = http.post("/v1/adapters", json={"id": "pirate"})
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "the disk is full (on 1 of 2 replicas)"
    assert reply.headers["retry-after"] == "5"


def test_vllms_routes_give_an_adapter_another_name(http: httpx.Client, replicas: Replicas) -> None:
    body = {"lora_name": "sql", "lora_path": "/roots/team/sql-7"}
    reply = http.post("/v1/load_lora_adapter", json=body)
    assert reply.status_code == 200
    assert reply.text == "Success: LoRA adapter 'sql' added successfully."
    row = ok(http.get("/v1/adapters/sql"))
    assert (row["id"], row["root"]) == ("sql", "team/sql-7")
    again = http.post("/v1/load_lora_adapter", json=body)
    assert again.status_code == 400
    assert "taken" in again.json()["error"]["message"]
    assert http.post("/v1/load_lora_adapter", json={**body, "load_inplace": True}).is_success
    gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "sql", "lora_int_id": 3})
    assert gone.text == "Success: LoRA adapter 'sql' removed successfully."
    assert http.get("/v1/adapters/sql").status_code == 404


def test_the_target_of_a_name_may_be_a_reference_but_not_the_base_model(
    http: httpx.Client, replicas: Replicas
) -> None:
    body = {"lora_name": "sql", "lora_path": "hub:org/sql@v3"}
    assert http.post("/v1/load_lora_adapter", json=body).is_success
    [*_, command] = replicas.commands
    assert isinstance(command, NameAdapter)
    assert command.target == AdapterReference(AdapterSource.HUB, "org/sql", "v3")
    outside = {"lora_name": "passwords", "lora_path": "/etc"}
    assert http.post("/v1/load_lora_adapter", json=outside).status_code == 404
    base = {"lora_name": "tiny", "lora_path": "pirate"}
    reply = http.post("/v1/load_lora_adapter", json=base)
    assert reply.status_code == 400
    assert "base model" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/adapters", None),
        ("GET", "/v1/adapters/pirate", None),
        ("POST", "/v1/adapters", {"id": "pirate"}),
        ("PATCH", "/v1/adapters/pirate", {"pinned": True}),
        ("DELETE", "/v1/adapters/pirate", None),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}),
    ],
)
def test_only_the_admin_key_opens_these_routes(
    guarded: httpx.Client, server: Server, method: str, path: str, body: dict[str, object] | None
) -> None:
    def ask(headers: dict[str, str]) -> int:
        return guarded.request(method, path, json=body, headers=headers).status_code

    assert ask({}) == 401
    assert ask({"authorization": "Bearer wrong"}) == 401
    assert ask({"authorization": "Bearer user"}) == 403
    assert server.driver.replicas.commands == []
    assert ask(ADMIN) in (200, 404)
    assert server.driver.replicas.commands


ROUTES: list[tuple[str, str, dict[str, object] | None]] = [
    ("GET", "/v1/adapters", None),
    ("POST", "/v1/adapters", {"id": "pirate"}),
    ("PATCH", "/v1/adapters/pirate", {"pinned": True}),
    ("DELETE", "/v1/adapters/pirate", None),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
    ("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}),
]


@pytest.mark.parametrize(
    ("loopback", "admin", "is_open"),
    [(False, "key", False), (True, "key", True), (False, "open", True), (True, "open", True)],
)
def test_without_keys_only_loopback_or_the_config_opens_them(
    http: httpx.Client, server: Server, loopback: bool, admin: str, is_open: bool
) -> None:
    api = ApiConfig.model_validate({"admin": admin})
    settings = IngressSettings(default_source=AdapterSource.LOCAL, api=api, loopback=loopback)
    server.fresh_app(settings)
    spoofed = {"x-forwarded-for": "127.0.0.1", "host": "127.0.0.1"}
    for method, path, body in ROUTES:
        reply = http.request(method, path, json=body, headers=spoofed)
        assert reply.status_code == (401 if not is_open else reply.status_code), path
        if not is_open:
            for remedy in ("api.admin_key", "api.admin: open", "http_options.host"):
                assert remedy in reply.json()["error"]["message"]
    assert bool(server.driver.replicas.commands) == is_open


def test_an_admin_key_closes_them_on_loopback_too(http: httpx.Client, server: Server) -> None:
    secret = {"sha256": hashlib.sha256(b"open sesame").hexdigest()}
    api = ApiConfig.model_validate({"admin_key": secret})
    server.fresh_app(IngressSettings(api=api, loopback=True))
    assert http.get("/v1/adapters").status_code == 401
    assert http.get("/v1/adapters", headers=ADMIN).status_code == 200


@pytest.mark.parametrize(
    "keys",
    [
        {"admin_key": {"env": "ANY"}},
        {"keys": [{"name": "a", "env": "ANY"}]},
    ],
)
def test_open_administration_excludes_keys(keys: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="servers without any key"):
        ApiConfig.model_validate({"admin": "open"} | keys)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.0.1", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), (None, False), ("", False), ("10.0.0.1", False),
     ("127.0.0.1.example.org", False)],
)  # fmt: skip
def test_what_listens_on_loopback(host: str | None, loopback: bool) -> None:
    assert is_loopback(host) is loopback
