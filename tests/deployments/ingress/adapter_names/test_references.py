import httpx
import pytest

from configs.wire.adapters import AdapterReference, AdapterSource, parse_reference
from deployments.contract import AdapterInfo
from deployments.ingress.adapter_names.references import listed_name, parse_source
from deployments.ingress.http.errors import RequestError
from tests.fakes import FakeDriver

HUB, LOCAL, S3 = AdapterSource.HUB, AdapterSource.LOCAL, AdapterSource.S3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/poet", AdapterReference(HUB, "org/poet")),
        ("local:poet", AdapterReference(LOCAL, "poet")),
        ("hub:org/poet@v2", AdapterReference(HUB, "org/poet", "v2")),
        ("org/poet@abc", AdapterReference(HUB, "org/poet", "abc")),
        ("s3:bucket/prefix", AdapterReference(S3, "bucket/prefix")),
        ("s3://bucket/prefix", AdapterReference(S3, "s3://bucket/prefix")),
        ("odd:name", AdapterReference(HUB, "odd:name")),
        ("trailing@", AdapterReference(HUB, "trailing@")),
        ("@only", AdapterReference(HUB, "@only")),
    ],
)
def test_names_become_references(name: str, expected: AdapterReference) -> None:
    assert parse_reference(name, HUB) == expected


@pytest.mark.parametrize("name", ["http://h/a", "hub:https://h/a", "local:file:///etc", "x://y@z"])
def test_urls_are_no_names(http: httpx.Client, driver: FakeDriver, name: str) -> None:
    native = {"inputs": "a", "parameters": {"adapter_id": name}}
    assert "is an address" in http.post("/generate", json=native).json()["error"]
    reply = http.post("/v1/completions", json={"model": name, "prompt": "a"})
    assert (reply.status_code, driver.requests) == (400, [])


def test_a_source_without_an_id_is_refused() -> None:
    with pytest.raises(ValueError, match="names no adapter"):
        parse_reference("local:", HUB)


def test_sources_are_case_insensitive() -> None:
    assert parse_source("Local") is LOCAL
    with pytest.raises(RequestError, match="must be one of hub, local, s3"):
        parse_source("pbase")


def test_listed_names_lead_back_to_the_adapter() -> None:
    for source in AdapterSource:
        name = listed_name(AdapterInfo("a/b", source.value, "disk"), LOCAL)
        # A pushed adapter has the name that the push gave it.
        found = LOCAL if source is AdapterSource.PUSHED else source
        assert parse_reference(name, LOCAL) == AdapterReference(found, "a/b")
