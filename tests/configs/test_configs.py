"""Configs: the files that ship are valid, unknown keys and contradictions are refused."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from configs.api import ApiConfig
from configs.base import faults
from configs.engine import EngineConfig, RecoveryConfig
from configs.env import (
    THROUGHPUT_ENVIRONMENT,
    export_throughput_mode,
    joining_environment,
    proxy_mode,
)
from configs.serve import ServeConfig
from configs.wire.adapters import AdapterReference, AdapterSource, parse_reference
from deployments.bundles import bundles
from tests.checkpoints import write_llama

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = [ROOT / "serve_config.yaml", *sorted((ROOT / "configs/presets").glob("*.yaml"))]
ENGINE: dict[str, Any] = {"model": {"id": "acme/model"}}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path: Path) -> None:
    raw = yaml.safe_load(path.read_text())
    [app] = ServeDeploySchema.model_validate(raw).applications
    assert app.import_path == "deployments.app:build"
    assert {deployment.name for deployment in app.deployments} == {"Ingress", "Driver"}
    ServeConfig.model_validate(app.args)


def test_a_replica_reserves_a_bundle_for_the_driver_and_one_for_each_rank(tmp_path: Path) -> None:
    engine = {"model": {"id": str(write_llama(tmp_path))}, "tensor_parallel": 2, "device": "cuda"}
    config = ServeConfig.model_validate({"engine": engine, "driver_cpus": 0.5})
    assert bundles(config) == [{"CPU": 0.5}, {"CPU": 1.0, "GPU": 1}, {"CPU": 1.0, "GPU": 1}]


def test_ranks_on_gpus_have_standby_processes_unless_the_config_says_otherwise() -> None:
    assert [RecoveryConfig().wants_standby(on_gpu) for on_gpu in (True, False)] == [True, False]
    for wanted in (True, False):
        recovery = RecoveryConfig(standby=wanted)
        assert recovery.wants_standby(on_gpu=True) == recovery.wants_standby(on_gpu=False) == wanted


def test_a_padded_model_is_one_rank_with_all_the_gpus(tmp_path: Path) -> None:
    config = {"architectures": ["BloomForCausalLM"], "vocab_size": 96, "n_layer": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = {"model": {"id": str(tmp_path)}, "tensor_parallel": 2, "device": "cuda"}
    driver, rank = {"CPU": 0.0}, {"CPU": 1.0}
    args: dict[str, Any] = {"engine": engine, "driver_cpus": 0.0}
    assert bundles(ServeConfig.model_validate(args)) == [driver, rank | {"GPU": 2}]
    engine["device"] = "cpu"
    with pytest.raises(
        ValueError, match=r"tensor_parallel \(2\) must be 1 for this model on a CPU"
    ):
        bundles(ServeConfig.model_validate(args))
    engine["tensor_parallel"] = 1
    assert bundles(ServeConfig.model_validate(args)) == [driver, rank]


def test_several_ranks_of_an_encoder_are_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 64}
    config = {"architectures": ["BertModel"], "model_type": "bert", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = {"model": {"id": str(tmp_path)}, "tensor_parallel": 2, "device": "cuda"}
    with pytest.raises(ValueError, match="must be 1 for this model: it is an encoder"):
        bundles(ServeConfig.model_validate({"engine": engine}))


def test_a_model_of_bitsandbytes_is_cut_over_gpus(tmp_path: Path) -> None:
    write_llama(tmp_path)
    model = {"id": str(tmp_path), "quantize": "bitsandbytes"}
    args = {"engine": {"model": model, "tensor_parallel": 4, "device": "cuda"}}
    assert bundles(ServeConfig.model_validate(args))[1:] == 4 * [{"CPU": 1.0, "GPU": 1}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor_paralel": 2}, "tensor_paralel"),
        ({"limits": {"max_step_tokens": 8, "max_running": 16}}, "max_step_tokens"),
        ({"cache": {"block_size": 0}}, "block_size"),
        ({"device": "tpu"}, "device"),
        ({"adapters": {"memory_fraction": float("nan")}}, "memory_fraction"),
        ({"adapters": {"vocabulary_copies": 1, "vocabulary": False}}, "needs adapters.vocabulary"),
    ],
)
def test_wrong_engines_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EngineConfig.model_validate({**ENGINE, **change})


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a source that is not set up": (
        {"engine": {"adapters": {"default_source": "s3"}}}, "set adapters.s3.roots"
    ),
    "a root without a name": ({"engine": {"adapters": {"local_roots": [""]}}}, "roots.0"),
    "pages of no pool": (
        {"engine": {"adapters": {"vocabulary": False, "vocabulary_pages": 4}}}, "vocabulary_pages"
    ),
    "a hub without a scheme": (
        {"engine": {"adapters": {"hub_endpoint": "hub.acme"}}}, "hub.acme is no URL: begin it with"
    ),
    "a service without a scheme": (
        {"engine": {"model": {"id": "x", "s3": {"endpoint_url": "minio:9000"}}}}, "minio:9000 is no"
    ),
    "a folder that is another for each process": (
        {"engine": {"adapters": {"push": {"folder": "pushed"}}}}, "adapters.push.folder"
    ),
    "a revision of nothing": ({"engine": {"speculation": {"revision": "v1"}}}, "revision .v1. is"),
    "one key for two callers": (
        {"api": {"keys": [{"name": "a", "env": "K"}, {"name": "b", "env": "K"}]}}, "both have env K"
    ),
    "one key for callers and operators": (
        {"api": {"keys": [{"name": "a", "sha256": "0" * 64}], "admin_key": {"sha256": "0" * 64}}},
        "both have sha256",
    ),
    "an origin that no browser sends": (
        {"api": {"cors_allow_origin": ["https://acme.org/"]}}, "acme.org/` is no origin"
    ),
    "a host as an origin": ({"api": {"cors_allow_origin": ["acme.org"]}}, "`acme.org` is no"),
    "bounds of no storage": ({"batches": {"max_lines": 5}}, "without `storage`"),
    "a storage that is relative": ({"batches": {"storage": "files"}}, "`files` is no absolute"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_could_have_no_effect_is_refused(name: str) -> None:
    given, message = CONTRADICTIONS[name]
    args = {**given, "engine": {**ENGINE, **given.get("engine", {})}}
    with pytest.raises(ValidationError) as refusal:
        ServeConfig.model_validate(args)
    [fault] = faults(refusal.value, ServeConfig)
    assert re.search(message, fault)


def test_origins_as_browsers_send_them() -> None:
    for origin in ("*", "null", "https://acme.org", "http://localhost:3000", "app://acme"):
        assert ApiConfig(cors_allow_origin=(origin,)).cors_allow_origin == (origin,)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pirate", AdapterReference(AdapterSource.LOCAL, "pirate")),
        ("hub:acme/sql@v2", AdapterReference(AdapterSource.HUB, "acme/sql", "v2")),
        ("S3:bucket/a", AdapterReference(AdapterSource.S3, "bucket/a")),
        ("s3://bucket/a@b", AdapterReference(AdapterSource.S3, "s3://bucket/a", "b")),
        ("@v2", AdapterReference(AdapterSource.LOCAL, "@v2")),
        ("other:thing", AdapterReference(AdapterSource.LOCAL, "other:thing")),
    ],
)
def test_references(text: str, expected: AdapterReference) -> None:
    assert parse_reference(text, AdapterSource.LOCAL) == expected


@pytest.mark.parametrize("text", ["", " ", "hub:"])
def test_a_reference_without_a_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="needs a name"):
        parse_reference(text, AdapterSource.HUB)


def test_a_process_that_joins_a_cluster_sends_its_token_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert joining_environment()["RAY_AUTH_MODE"] == "token"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert joining_environment()["RAY_AUTH_MODE"] == "disabled"


def test_throughput_mode_keeps_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in THROUGHPUT_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert proxy_mode().startswith("python proxy")
    monkeypatch.setenv("RAY_SERVE_THROUGHPUT_OPTIMIZED", "0")
    export_throughput_mode()
    assert proxy_mode() == "haproxy"
    # Two users of one machine share no file.
    mine = f"/tmp/haproxy-serve-{os.getuid()}"
    files = [value for value in os.environ.values() if value.startswith("/tmp/haproxy-serve")]
    assert len(files) == 5
    assert all(Path(mine) in (Path(file), Path(file).parent) for file in files)
    for name in THROUGHPUT_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
