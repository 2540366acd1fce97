"""Only the configured servers are called, for any name that a client sends."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from configs.adapters import AdaptersConfig
from configs.wire.adapters import AdapterError, AdapterSource, parse_reference
from sources.adapters import AdapterSources
from sources.base import Unreachable

HUB, STORE = "hub.invalid", "store.invalid"
# Some are refused by their form, the rest are looked up where lookups belong.
NAMES = (
    "acme/sql", "evil.example", "evil.example/x", "//evil.example/x", "http://evil.example/x",
    "https://evil.example/x@main", "acme/sql@http://evil.example/", "acme/sql@../../evil",
    "user:password@evil.example/x", "evil.example:8080/x", "169.254.169.254/latest", "a/b?c=http://d",
    "a/b#c", "a\\b", "a%2f..%2fb", "../../x", "file:///etc/passwd", "ftp://evil.example/x",
    "s3://evil.example/x", "s3:evil.example/../x", "s3:@evil.example/x", "s3:bucket/x",
    "s3:http://evil.example/x", "hub:s3://evil.example/x", "local:http://evil.example/x",
)  # fmt: skip


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The hosts whose addresses were looked up; no address is returned."""
    hosts: set[str] = set()

    def nowhere(host: Any, *_: object, **__: object) -> Any:
        hosts.add(host.decode() if isinstance(host, bytes) else str(host))
        raise socket.gaierror(socket.EAI_NONAME, "no such host")

    def refused(self: socket.socket, address: Any) -> None:
        hosts.add(str(address[0]))
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    monkeypatch.setattr(socket.socket, "connect", refused)
    return hosts


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterSources]:
    """All sources, for all tests: each of boto3's clients takes half a second."""
    pytest.importorskip("boto3")
    folder = tmp_path_factory.mktemp("sources")
    with pytest.MonkeyPatch.context() as patch:
        # As the start script has it; else the library asks its own server for more than a name.
        patch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
        patch.setenv("AWS_ACCESS_KEY_ID", "x")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield AdapterSources(
            AdaptersConfig.model_validate(
                {
                    "hub_endpoint": f"http://{HUB}",
                    "s3": {"roots": ["bucket/adapters"], "endpoint_url": f"http://{STORE}"},
                    "local_roots": [str(folder)],
                    "fetch": {"cache_dir": str(folder / "cache"), "attempts": 1},
                }
            )
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("default", list(AdapterSource))
def test_no_name_leads_elsewhere(
    sources: AdapterSources, looked_up: set[str], name: str, default: AdapterSource
) -> None:
    reference = parse_reference(name, default)
    with pytest.raises((AdapterError, Unreachable)):
        sources.resolve(reference, False)
    assert looked_up <= {HUB, STORE, f"bucket.{STORE}"}


def test_the_configured_servers_are_asked(sources: AdapterSources, looked_up: set[str]) -> None:
    with pytest.raises((AdapterError, Unreachable)):
        sources.resolve(parse_reference("acme/sql", AdapterSource.HUB), False)
    assert looked_up == {HUB}
    with pytest.raises((AdapterError, Unreachable)):
        sources.resolve(parse_reference("s3:sql", AdapterSource.HUB), False)
    assert len(looked_up) == 2
