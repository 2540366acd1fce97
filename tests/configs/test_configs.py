"""Configs: the files that ship are valid, unknown keys and contradictions are refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from configs.adapters import AdapterReference, AdapterSource, parse_reference
from configs.engine import EngineConfig
from configs.env import THROUGHPUT_ENVIRONMENT, export_throughput_mode, proxy_mode
from configs.serve import ServeConfig
from deployments.app import bundles

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


def test_a_replica_reserves_a_bundle_for_the_driver_and_one_for_each_rank() -> None:
    config = ServeConfig.model_validate(
        {"engine": {**ENGINE, "tensor_parallel": 2, "device": "cuda"}, "driver_cpus": 0.5}
    )
    assert bundles(config) == [{"CPU": 0.5}, {"CPU": 1.0, "GPU": 1}, {"CPU": 1.0, "GPU": 1}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor_paralel": 2}, "tensor_paralel"),
        ({"limits": {"max_step_tokens": 8, "max_running": 16}}, "max_step_tokens"),
        ({"cache": {"block_size": 0}}, "block_size"),
        ({"device": "tpu"}, "device"),
        ({"adapters": {"memory_fraction": float("nan")}}, "memory_fraction"),
    ],
)
def test_wrong_engines_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EngineConfig.model_validate({**ENGINE, **change})


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


def test_throughput_mode_keeps_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in THROUGHPUT_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert proxy_mode().startswith("python proxy")
    monkeypatch.setenv("RAY_SERVE_THROUGHPUT_OPTIMIZED", "0")
    export_throughput_mode()
    assert proxy_mode() == "haproxy"
    for name in THROUGHPUT_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
