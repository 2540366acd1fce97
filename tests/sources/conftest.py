"""A hub and an S3 server on this machine."""

import re
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from tests.hub_server import HubServer
from tests.s3_server import s3_server


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """A new bucket; credentials come as boto3 finds them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    service = boto3.resource("s3", endpoint_url=endpoint, region_name="us-east-1")
    bucket = service.Bucket(re.sub(r"[^a-z0-9]+", "-", request.node.name)[-40:].strip("-"))
    bucket.create()
    return bucket
