"""The demo over all three sources: every fault has its error, and no other request notices."""

import json
import os
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import boto3
import httpx
import pytest
import torch
from safetensors.torch import load, save

from deployments.ingress.generation.engine import IngressSettings
from tests.hub_server import HubServer
from tests.s3_server import FaultyS3, s3_server
from tests.served import demo_app, demo_config, served
from tests.sources.adapter_files import left_over, write_files
from tests.sources.test_faults import Bomb

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PIRATE = {
    path.name: path.read_bytes() for path in Path("configs/demo/adapters/pirate").glob("adapter_*")
}
SOURCES = ("hub", "s3", "local")
TOO_MANY_BYTES = 2**24


@dataclass(frozen=True)
class World:
    """A server, the sources behind it, and how to put an adapter into each of them."""

    http: httpx.Client
    hub: HubServer
    s3: FaultyS3
    put: dict[str, Callable[[str, dict[str, bytes]], object]]
    root: Path


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def s3() -> Iterator[FaultyS3]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with s3_server() as url, FaultyS3(url) as faulty:
            yield faulty


@pytest.fixture(scope="module")
def world(root: Path, s3: FaultyS3) -> Iterator[World]:
    service = boto3.resource("s3", endpoint_url=s3.target, region_name="us-east-1")
    bucket = service.create_bucket(Bucket="adapters")

    def put_s3(name: str, files: dict[str, bytes]) -> None:
        for file, content in files.items():
            bucket.put_object(Key=f"acme/{name}/{file}", Body=content)

    (root / "roots").mkdir()
    with HubServer() as hub:
        put: dict[str, Callable[[str, dict[str, bytes]], object]] = {
            "hub": lambda name, files: hub.add(f"acme/{name}", files),
            "s3": put_s3,
            "local": lambda name, files: write_files(root / "roots" / "acme" / name, files),
        }
        adapters = {
            "local_roots": ["configs/demo/adapters", str(root / "roots")],
            "device_pages": 64,
            "max_device_adapters": 16,
            "host_bytes": 2**28,
            "max_file_bytes": TOO_MANY_BYTES,
            "hub_endpoint": hub.url,
            "s3": {"roots": ["adapters"], "endpoint_url": s3.url, "region": "us-east-1"},
            "fetch": {
                "cache_dir": str(root / "cache"),
                "backoff_s": 0.01,
                "refusal_s": 0.0,
                "connect_timeout_s": 300,
                "read_timeout_s": 300,
            },
            "allow_pickle": True,
        }
        app = demo_app(demo_config(adapters=adapters), IngressSettings())
        with served(app) as url, httpx.Client(base_url=url, timeout=300) as http:
            yield World(http, hub, s3, put, root)


def say(world: World, model: str) -> httpx.Response:
    body = {"model": model, "temperature": 0, "max_tokens": 12, "prompt": "Who are you?"}
    return world.http.post("/v1/completions", json=body)


def spoken(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def _faults(trace: Path) -> dict[str, dict[str, bytes]]:
    """Adapters that must not be served, by what is wrong with them."""
    tensors = load(PIRATE[WEIGHTS])
    first = next(iter(tensors))
    fields = json.loads(PIRATE[CONFIG])
    return {
        "half-file": {**PIRATE, WEIGHTS: PIRATE[WEIGHTS][: len(PIRATE[WEIGHTS]) // 2]},
        "10-gb-header": {**PIRATE, WEIGHTS: (10 * 2**30).to_bytes(8, "little") + PIRATE[WEIGHTS]},
        "shapes": {**PIRATE, WEIGHTS: save({**tensors, first: torch.ones(3, 3)})},
        "not-a-number": {**PIRATE, WEIGHTS: save({**tensors, first: tensors[first] * torch.nan})},
        "half-json": {**PIRATE, CONFIG: PIRATE[CONFIG][:-20]},
        "deep-json": {**PIRATE, CONFIG: b"[" * 100_000},
        "dora": {**PIRATE, CONFIG: json.dumps({**fields, "use_dora": True}).encode()},
        "bomb": {CONFIG: PIRATE[CONFIG], PICKLE: pickle.dumps(Bomb(trace))},
    }


@pytest.mark.parametrize("source", SOURCES)
def test_bad_files_are_refused_with_a_reason_and_others_are_served(
    world: World, source: str
) -> None:
    expected = spoken(say(world, "local:pirate"))
    trace = world.root / "went-off"
    faults = _faults(trace)
    for name, files in faults.items():
        world.put[source](name, files)
    world.put[source]("good", PIRATE)
    world.put[source]("large", {**PIRATE, WEIGHTS: PIRATE[WEIGHTS] + bytes(TOO_MANY_BYTES)})
    names = [*faults, "large", "missing"]
    with ThreadPoolExecutor(16) as pool:
        good = [pool.submit(say, world, f"{source}:acme/good") for _ in range(8)]
        bad = [pool.submit(say, world, f"{source}:acme/{name}") for name in names]
    assert {spoken(answer.result()) for answer in good} == {expected}
    replies = {
        name: answer.result().json()["error"] for name, answer in zip(names, bad, strict=True)
    }
    assert {name: error["code"] for name, error in replies.items()} == {
        **dict.fromkeys(faults, "adapter_unsupported"),
        "large": "adapter_too_large",
        "missing": "model_not_found",
    }
    assert all(len(error["message"]) > 30 for error in replies.values())
    assert not trace.exists()
    assert not left_over(world.root)
    assert world.http.get("/health").status_code == 200


def test_adapters_that_source_or_config_forbid_are_refused(world: World) -> None:
    world.hub.add("acme/gated", PIRATE, readers={"hf_good"}, gated=True)
    outside = write_files(world.root / "outside", PIRATE)
    linked = write_files(world.root / "roots" / "linked", PIRATE) / WEIGHTS
    linked.unlink()
    linked.symlink_to(outside / WEIGHTS)
    world.s3.faults = [403]
    for model in ("hub:acme/gated", "local:linked", "s3:acme/forbidden", "s3://other/acme/good"):
        answer = say(world, model)
        assert answer.status_code == 403, (model, answer.text)
        assert answer.json()["error"]["code"] == "adapter_forbidden"
    assert say(world, "local:../outside").status_code == 404


def test_a_slow_source_delays_only_its_own_requests(world: World) -> None:
    """How long it is waited for is the sources' own affair, and tested there."""
    expected = spoken(say(world, "local:pirate"))
    for source in ("hub", "s3"):
        world.put[source]("slow", PIRATE)
    for server in (world.hub, world.s3):
        server.gate.clear()
    with ThreadPoolExecutor(8) as pool:
        slow = [pool.submit(say, world, f"{source}:acme/slow") for source in ("hub", "s3")]
        good = [pool.submit(say, world, "local:pirate") for _ in range(6)]
        assert {spoken(answer.result()) for answer in good} == {expected}
        assert not any(answer.done() for answer in slow)
        for server in (world.hub, world.s3):
            server.gate.set()
        assert {spoken(answer.result()) for answer in slow} == {expected}


def test_a_broken_download_resumes_unnoticed(world: World) -> None:
    for source, server in (("hub", world.hub), ("s3", world.s3)):
        world.put[source]("cut", PIRATE)
        server.cuts = [100]
        assert spoken(say(world, f"{source}:acme/cut")) == spoken(say(world, "local:pirate"))
    assert world.hub.resumed[-1:] == [100]
    assert "bytes=100-" in world.s3.ranges
    assert not left_over(world.root)


@pytest.mark.parametrize("source", SOURCES)
def test_a_repaired_adapter_is_served(world: World, source: str) -> None:
    """A refusal is for what lies there now, not for the name."""
    world.put[source]("mended", {**PIRATE, WEIGHTS: b"half"})
    assert say(world, f"{source}:acme/mended").status_code == 400
    world.put[source]("mended", PIRATE)
    if source == "local":
        os.utime(world.root / "roots" / "acme" / "mended" / WEIGHTS)
    assert spoken(say(world, f"{source}:acme/mended")) == spoken(say(world, "local:pirate"))
