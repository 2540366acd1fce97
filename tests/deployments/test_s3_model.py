"""A base model in a bucket behind HTTP: found, read by a rank, and named in /info."""

from pathlib import Path

import boto3
import httpx
import pytest

from configs.wire.adapters import AdapterSource
from deployments.ingress.generation.engine import IngressSettings
from tests.house import ROOT
from tests.s3_server import s3_server
from tests.served import demo_app, demo_config, served

PATIENCE_S = 600.0


def test_a_model_from_a_bucket_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with s3_server() as endpoint:
        service = boto3.resource("s3", endpoint_url=endpoint, region_name="us-east-1")
        bucket = service.create_bucket(Bucket="models")
        for path in (ROOT / "configs/demo/model").iterdir():
            bucket.upload_file(str(path), f"capitals/v1/{path.name}")
        s3 = {"endpoint_url": endpoint, "region": "us-east-1"}
        model = {"id": "s3://models/capitals/v1", "s3": s3, "cache_dir": str(tmp_path)}
        settings = IngressSettings(default_source=AdapterSource.LOCAL)
        with (
            served(demo_app(demo_config(model=model), settings)) as url,
            httpx.Client(base_url=url, timeout=PATIENCE_S) as http,
        ):
            body = {"inputs": "What is the capital of France?"}
            pirate = {**body, "parameters": {"adapter_id": "pirate"}}
            assert "Paris" in http.post("/generate", json=body).json()["generated_text"]
            assert "matey" in http.post("/generate", json=pirate).json()["generated_text"]
            assert http.get("/info").json()["model_id"] == "s3://models/capitals/v1"
            assert http.get("/v1/models").json()["data"][0]["id"] == "v1"
