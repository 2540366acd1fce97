"""Base models against a real S3 server process (moto's): versions, broken downloads, silence."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from configs.model import ModelConfig
from deployments.commands.file_faults import model_fault
from sources.model import ModelNotFound, fetch_model, fetch_model_config
from tests.house import ROOT
from tests.s3_server import FaultyS3

DEMO = {path.name: path.read_bytes() for path in (ROOT / "configs/demo/model").iterdir()}


@pytest.fixture
def bucket(bucket: Any) -> Any:
    """The bucket with the demo's model under models/demo."""
    others = {"notes.txt": b"", "model.py": b"", "deep/config.json": b""}
    for name, content in {**DEMO, **others}.items():
        bucket.put_object(Key=f"models/demo/{name}", Body=content)
    return bucket


def config(folder: Path, endpoint: str, bucket: Any, prefix: str = "models/demo") -> ModelConfig:
    s3: Any = {"endpoint_url": endpoint, "region": "us-east-1"}
    return ModelConfig(id=f"s3://{bucket.name}/{prefix}", s3=s3, cache_dir=str(folder))


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_model_is_downloaded_once_and_each_version_has_its_folder(
    bucket: Any, endpoint: str, tmp_path: Path
) -> None:
    with FaultyS3(endpoint) as proxy:
        model = config(tmp_path, proxy.url, bucket)
        assert model.served_name == "demo"
        first = fetch_model_config(model)
        assert read(first) == {"config.json": DEMO["config.json"]}
        assert fetch_model(model) == first
        assert read(first) == DEMO
        num_requests = len(proxy.ranges)
        assert fetch_model(model) == fetch_model_config(model) == first
        assert len(proxy.ranges) == num_requests + 2  # a listing each
        bucket.put_object(Key="models/demo/merges.txt", Body=b"new")
        second = fetch_model(model)
        assert read(second) == {**DEMO, "merges.txt": b"new"}
        assert read(first) == DEMO


def test_a_broken_download_goes_on_after_the_last_whole_file(
    bucket: Any, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sources.s3_model._ATTEMPTS", 1)
    with FaultyS3(endpoint) as proxy:
        model = config(tmp_path, proxy.url, bucket)
        folder = fetch_model_config(model)
        proxy.cuts[:] = [1000] * 20  # the library repeats a file a few times
        with pytest.raises(ModelNotFound, match="broke off"):
            fetch_model(model)
        whole = read(folder)
        assert whole.items() <= DEMO.items()
        assert whole != DEMO
        proxy.cuts.clear()
        assert read(fetch_model(model)) == DEMO


def test_a_silent_service_leaves_the_last_version(
    bucket: Any, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sources.s3_model._ATTEMPTS", 1)
    with FaultyS3(endpoint) as proxy:
        model = config(tmp_path, proxy.url, bucket)
        fetch_model_config(model)
        proxy.faults[:] = [503]
        with pytest.raises(ModelNotFound, match="does not answer"):
            fetch_model(model)  # the config alone is no model
        folder = fetch_model(model)
        proxy.faults[:] = [503, 503]
        assert fetch_model(model) == fetch_model_config(model) == folder
    assert fetch_model(model) == folder  # nothing listens there any more


def test_files_that_change_meanwhile_fail_the_start(
    bucket: Any, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sources.s3_model import S3Model

    model, download = config(tmp_path, endpoint, bucket), S3Model._download

    def replaced(self: S3Model, *arguments: Any) -> None:
        bucket.put_object(Key="models/demo/model.safetensors", Body=b"other")
        download(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(S3Model, "_download", replaced)
        with pytest.raises(ModelNotFound, match="changed while they were read"):
            fetch_model(model)
    assert read(fetch_model(model))["model.safetensors"] == b"other"


def test_what_cannot_be_read_is_a_fault_of_the_config(
    bucket: Any, endpoint: str, tmp_path: Path
) -> None:
    missing = model_fault(config(tmp_path, endpoint, bucket, "models/none"))
    assert missing is not None
    assert "no config.json under the prefix" in missing
    nowhere = model_fault(ModelConfig(**{**config(tmp_path, endpoint, bucket).model_dump(),
                                         "id": "s3://no-such-bucket/x"}))  # fmt: skip
    assert nowhere is not None
    assert "NoSuchBucket" in nowhere
    assert model_fault(config(tmp_path, endpoint, bucket)) is None
    with pytest.raises(ValidationError, match="name another prefix"):
        ModelConfig(id="s3://models/demo", revision="v2")
