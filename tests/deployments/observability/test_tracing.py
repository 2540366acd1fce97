"""Spans of served requests, collected in memory: the real ingress, driver and one rank."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from ray.serve._private.tracing_utils import _load_span_processors

from configs.adapters import AdapterSource
from deployments.ingress.engine import IngressSettings
from deployments.observability.tracing import DRIVER, INGRESS
from tests.served import demo_app, demo_config, served

ASK = {"inputs": "What is the capital of France?", "parameters": {"adapter_id": "pirate"}}
TOKEN = "the-callers-own-token"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = IngressSettings(default_source=AdapterSource.LOCAL)
    with served(demo_app(demo_config(), settings)) as url:
        yield url


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What Serve's hook sets up, for this test alone."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def spans(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, ReadableSpan]:
    """The ingress' span and the driver's; a streamed answer may end before its span does."""
    deadline = time.monotonic() + 30
    found: dict[str, ReadableSpan] = {}
    while not {INGRESS, DRIVER} <= set(found) and time.monotonic() < deadline:
        time.sleep(0.01)
        # FastAPI has spans of its own.
        found = {span.name: span for span in exporter.get_finished_spans()}
    return found[INGRESS], found[DRIVER]


def told(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
def test_both_spans_tell_of_adapter_tokens_and_time(
    route: str, url: str, exporter: InMemorySpanExporter
) -> None:
    assert httpx.post(url + route, json=ASK, timeout=60).status_code == 200
    for span in spans(exporter):
        found = told(span)
        assert found["loray.adapter"] == "pirate"
        assert found["loray.adapter_source"] == "local"
        assert found["gen_ai.usage.input_tokens"] == 8
        assert found["gen_ai.usage.output_tokens"] == 14
        assert found["gen_ai.response.finish_reasons"] == ("eos_token",)
        assert 0 <= found["loray.queue_seconds"] <= found["loray.first_token_seconds"]
        assert span.status.status_code is StatusCode.UNSET


def test_the_drivers_span_is_below_the_ingress_span(
    url: str, exporter: InMemorySpanExporter
) -> None:
    httpx.post(url + "/generate", json={"inputs": "Hello"}, timeout=60)
    ingress, driver = spans(exporter)
    assert driver.parent is not None
    assert ingress.context is not None
    assert driver.parent.span_id == ingress.context.span_id
    assert "loray.adapter" not in told(driver)


def test_a_trace_that_the_client_began_goes_on(url: str, exporter: InMemorySpanExporter) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    began = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    httpx.post(url + "/generate", json={"inputs": "Hello"}, headers=began, timeout=60)
    for span in spans(exporter):
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == trace_id


def test_a_failure_is_the_spans_status(url: str, exporter: InMemorySpanExporter) -> None:
    httpx.post(url + "/generate", json={"inputs": "x", "parameters": {"adapter_id": "nobody"}})
    for span in spans(exporter):
        assert span.status.status_code is StatusCode.ERROR
        assert told(span)["error.type"] == "adapter_not_found"


def test_no_span_holds_a_token_or_a_text(url: str, exporter: InMemorySpanExporter) -> None:
    body = {**ASK, "parameters": {**ASK["parameters"], "api_token": TOKEN}}  # type: ignore[dict-item]
    assert httpx.post(url + "/generate", json=body, timeout=60).status_code == 200
    spans(exporter)
    written = "".join(span.to_json() for span in exporter.get_finished_spans())
    for secret in (TOKEN, "capital", "Paris"):
        assert secret not in written


def test_nothing_is_recorded_unless_configured(url: str) -> None:
    assert httpx.post(url + "/generate", json=ASK, timeout=60).status_code == 200
    assert not trace.get_current_span().is_recording()


def test_serve_takes_the_collectors_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    [processor] = _load_span_processors("deployments.observability.tracing:otlp", "")
    processor.shutdown()
