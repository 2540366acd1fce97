"""LoRAX's routes: failures of the driver."""

import json

import httpx
import pytest

from deployments.contract import ErrorKind, Failed
from tests.deployments.ingress.lorax.lorax_http import refused
from tests.fakes import FakeDriver


@pytest.mark.parametrize("kind", [kind for kind in ErrorKind if kind.value.startswith("adapter")])
def test_adapter_failures_are_424_with_a_code(
    http: httpx.Client, driver: FakeDriver, kind: ErrorKind
) -> None:
    driver.faults["bad"] = Failed(kind, "no such luck")
    assert refused(http, 424, adapter_id="bad") == {
        "error": "Request failed during generation: no such luck",
        "error_type": "generation",
        "code": kind.value,
    }


def test_overload(http: httpx.Client, driver: FakeDriver) -> None:
    driver.faults[None] = Failed(ErrorKind.OVERLOADED, "full", retry_after_s=7.0)
    error = refused(http, 429)
    assert (error["error"], error["error_type"]) == ("Model is overloaded", "overloaded")
    assert http.post("/generate", json={"inputs": "a"}).headers["retry-after"] == "7"


def test_a_failure_in_a_stream_is_the_last_event(http: httpx.Client, driver: FakeDriver) -> None:
    driver.faults[None] = Failed(ErrorKind.GENERATION, "gone")
    driver.fail_after = 3
    reply = http.post("/generate_stream", json={"inputs": "a"})
    assert reply.status_code == 200
    last = json.loads(reply.text.split("\n\n")[-2].removeprefix("data: "))
    assert last["error"] == "Request failed during generation: gone"
    assert last["error_type"] == "generation"
