"""Trainers push weights over HTTP or in shared memory; every replica serves them."""

import json
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from configs.adapters import PushConfig
from configs.api import ApiConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.contract import AdapterReport, ErrorKind, Failed, PushAdapter
from deployments.engine_commands import EngineCommand
from deployments.ingress.generation.engine import IngressSettings
from sources.pushed import PushedFiles
from tests.deployments.ingress.conftest import Server
from tests.fakes_adapters import Replicas

PATH = "/v1/push_lora_adapter"
CONFIG = {"peft_type": "LORA", "r": 8}
WEIGHTS = b"weights" * 1000
LIMIT = 1 << 20


@pytest.fixture
def push_config(tmp_path: Path) -> PushConfig:
    return PushConfig(folder=str(tmp_path / "pushed"), max_bytes=LIMIT)


@pytest.fixture
def replicas(server: Server, push_config: PushConfig) -> Replicas:
    server.fresh_app(
        IngressSettings(default_source=AdapterSource.LOCAL, loopback=True, push=push_config)
    )
    return server.driver.replicas


@pytest.fixture
def segment() -> Iterator[str]:
    """Shared memory with the weights and padding after them."""
    memory = SharedMemory(create=True, size=len(WEIGHTS) + 100)
    assert memory.buf is not None
    memory.buf[: len(WEIGHTS)] = WEIGHTS
    yield memory.name
    memory.close()
    memory.unlink()


def form(**changes: Any) -> dict[str, Any]:
    """The parts of a push, for httpx; None leaves one out."""
    parts = {
        "lora_name": (None, "policy"),
        "adapter_config": (None, json.dumps(CONFIG)),
        "adapter_model": ("adapter_model.safetensors", WEIGHTS),
        **changes,
    }
    return {"files": {name: part for name, part in parts.items() if part is not None}}


def content_of(config: PushConfig, command: PushAdapter) -> tuple[bytes, bytes] | None:
    return PushedFiles(config, LIMIT).content(command.digest)


def test_a_form_and_shared_memory_bring_the_same_adapter(
    http: httpx.Client, replicas: Replicas, segment: str
) -> None:
    reply = http.post(PATH, **form())
    assert reply.status_code == 200, reply.text
    row = reply.json()
    assert (row["id"], row["root"], row["state"]) == ("policy", "pushed:policy", "host")
    body = {
        "lora_name": "policy",
        "load_inplace": True,
        "adapter_config": CONFIG,
        "shared_memory": segment,
        "size": len(WEIGHTS),
    }
    text = json.dumps(body)
    reply = http.post(PATH, content=text, headers={"content-type": "application/json"})
    assert reply.json()["digest"] == row["digest"]
    first, second = replicas.commands
    assert isinstance(first, PushAdapter)
    assert isinstance(second, PushAdapter)
    assert first.name == AdapterReference(AdapterSource.LOCAL, "policy")
    assert (first.replace, second.replace) == (False, True)
    assert first.pushed_at < second.pushed_at
    assert first.content is second.content is None


def test_files_stay_in_memory_only_while_a_driver_holds_them(
    http: httpx.Client, replicas: Replicas, push_config: PushConfig
) -> None:
    http.post(PATH, **form())
    command = replicas.commands[-1]
    assert isinstance(command, PushAdapter)
    assert content_of(push_config, command) is None
    files = PushedFiles(push_config, LIMIT)
    digest = files.store_content("policy", json.dumps(CONFIG).encode(), WEIGHTS)
    assert digest == command.digest
    http.post(PATH, **form(load_inplace=(None, "true")))
    assert content_of(push_config, command) == (json.dumps(CONFIG).encode(), WEIGHTS)


def test_a_replica_on_another_node_is_sent_the_files(
    http: httpx.Client, replicas: Replicas
) -> None:
    replicas.members[1].far = True
    assert http.post(PATH, **form(load_inplace=(None, "true"))).status_code == 200
    near, far = replicas.commands
    assert isinstance(near, PushAdapter)
    assert isinstance(far, PushAdapter)
    assert near.content is None
    assert far.content is not None
    assert (far.content.weights, far.digest) == (WEIGHTS, near.digest)
    assert repr(WEIGHTS)[:20] not in repr(far)


@pytest.mark.parametrize(
    ("parts", "status", "message"),
    [
        ({"lora_name": None}, 400, "no part `lora_name`"),
        ({"adapter_model": None}, 400, "no part `adapter_model`"),
        ({"lora_name": (None, "hub:policy")}, 400, "no source"),
        ({"lora_name": (None, "policy@v1")}, 400, "no revision"),
        ({"lora_name": (None, "base-model")}, 400, "base model's name"),
        ({"lora_name": (None, "")}, 400, "needs a name"),
        ({"load_inplace": (None, "maybe")}, 400, "true or false"),
        ({"other": (None, "x")}, 400, "unknown part `other`"),
        ({"adapter_config": (None, "x" * (2 << 20))}, 400, "longer than"),
        ({"adapter_model": ("a", b"x" * (LIMIT + 1))}, 400, "over the server's limit"),
    ],
)
def test_bad_forms_are_refused_and_nothing_is_served(
    http: httpx.Client,
    server: Server,
    replicas: Replicas,
    parts: dict[str, Any],
    status: int,
    message: str,
) -> None:
    if parts.get("lora_name") == (None, "base-model"):
        parts = {"lora_name": (None, server.driver.info.model_id)}
    reply = http.post(PATH, **form(**parts))
    assert (reply.status_code, message in reply.text) == (status, True), reply.text
    assert replicas.commands == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"shared_memory": "../../etc/passwd"}, "plain name"),
        ({"shared_memory": "no-such-segment"}, "or send the weights in a form"),
        ({"shared_memory": ".."}, "plain name"),
        ({"shared_memory": "a\0b"}, "plain name"),
        ({"shared_memory": "x", "size": -1}, "$.size"),
        ({}, "shared_memory"),
        ({"shared_memory": "x", "path": "/etc"}, "path"),
    ],
)
def test_bad_segments_are_refused(
    http: httpx.Client, replicas: Replicas, body: dict[str, Any], message: str
) -> None:
    whole = {"lora_name": "policy", "adapter_config": CONFIG, **body}
    reply = http.post(PATH, json=whole)
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]
    assert replicas.commands == []


def test_a_segment_with_fewer_bytes_than_the_push_says_is_refused(
    http: httpx.Client, replicas: Replicas, segment: str
) -> None:
    body = {"lora_name": "policy", "adapter_config": CONFIG, "shared_memory": segment}
    reply = http.post(PATH, json={**body, "size": 2 * len(WEIGHTS)})
    assert (reply.status_code, f"`size` says {2 * len(WEIGHTS)}" in reply.text) == (400, True)
    assert replicas.commands == []


def test_other_bodies_are_refused(http: httpx.Client, replicas: Replicas) -> None:
    for kind in ("text/plain", "multipart/form-data", "multipart/form-data; boundary=x"):
        reply = http.post(PATH, content=b"what", headers={"content-type": kind})
        assert reply.status_code == 400, reply.text
    deep = http.post(PATH, content="[" * 100_000, headers={"content-type": "application/json"})
    assert deep.status_code == 400


def test_a_taken_name_and_a_failing_replica(http: httpx.Client, replicas: Replicas) -> None:
    assert http.post(PATH, **form()).status_code == 200
    taken = http.post(PATH, **form())
    assert (taken.status_code, "is taken" in taken.text) == (400, True)
    replicas.members[0].broken = Failed(ErrorKind.ADAPTER_UNSUPPORTED, "not a LoRA")
    failed = http.post(PATH, **form(load_inplace=(None, "true")))
    assert (failed.status_code, "(on 1 of 2 replicas)" in failed.text) == (400, True)


def test_only_the_admin_may_push(server: Server, push_config: PushConfig) -> None:
    server.fresh_app(IngressSettings(api=ApiConfig(), push=push_config))
    with httpx.Client(base_url=server.url) as client:
        reply = client.post(PATH, **form())
    assert reply.status_code == 401
    assert server.driver.replicas.commands == []
    assert not Path(push_config.folder).exists()


def test_a_clock_that_is_set_back_makes_no_push_an_older_one(
    http: httpx.Client, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    http.post(PATH, **form())
    monkeypatch.setattr("time.time_ns", lambda: 1)
    again = form(load_inplace=(None, "true"))
    assert http.post(PATH, **again).status_code == 200
    first, second = replicas.commands
    assert isinstance(first, PushAdapter)
    assert isinstance(second, PushAdapter)
    assert first.pushed_at < second.pushed_at


def test_a_push_that_a_younger_one_has_replaced_says_so(
    http: httpx.Client, replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another ingress, whose clock is ahead; the drivers ignore this one."""
    run = replicas.run

    def ignored(command: EngineCommand) -> list[AdapterReport]:
        younger = []
        for report in run(command):
            served = [replace(status, digest="another") for status in report.adapters]
            younger.append(replace(report, adapters=served))
        return younger

    monkeypatch.setattr(replicas, "run", ignored)
    reply = http.post(PATH, **form())
    assert reply.status_code == 503
    assert "a younger push of 'policy' is served" in reply.text
