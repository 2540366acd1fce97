"""Spans of served requests, collected in memory: the real ingress, driver and one rank."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.trace import StatusCode
from ray.serve._private.tracing_utils import _load_span_processors

from configs.wire.adapters import AdapterSource
from deployments.ingress.generation.engine import IngressSettings
from deployments.observability.tracing import DRIVER, INGRESS
from tests.served import demo_app, demo_config, served

ASK = {"inputs": "What is the capital of France?", "parameters": {"adapter_id": "pirate"}}
TOKEN = "the-callers-own-token"
PATIENCE = 300.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    settings = IngressSettings(default_source=AdapterSource.LOCAL)
    with served(demo_app(demo_config(), settings)) as url:
        yield url


class Spans(SpanExporter):
    """Stores exported spans and wakes their waiters."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self.all: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._news:
            self.all += spans
            self._news.notify_all()
        return SpanExportResult.SUCCESS

    def both(self) -> tuple[ReadableSpan, ReadableSpan]:
        """The ingress' span and the driver's; a streamed answer may end before its span does."""
        with self._news:
            assert self._news.wait_for(lambda: {INGRESS, DRIVER} <= set(self._named()), PATIENCE)
            return self._named()[INGRESS], self._named()[DRIVER]

    def _named(self) -> dict[str, ReadableSpan]:
        """By name; FastAPI has spans of its own."""
        return {span.name: span for span in self.all}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """What Serve's hook sets up, for this test alone."""
    exporter = Spans()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


def reply(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("route", ["/generate", "/generate_stream"])
def test_both_spans_have_adapter_tokens_and_time(route: str, url: str, exporter: Spans) -> None:
    assert httpx.post(url + route, json=ASK, timeout=PATIENCE).status_code == 200
    for span in exporter.both():
        found = reply(span)
        assert found["loray.adapter"] == "pirate"
        assert found["loray.adapter_source"] == "local"
        assert found["gen_ai.usage.input_tokens"] == 8
        assert found["gen_ai.usage.output_tokens"] == 14
        assert found["gen_ai.response.finish_reasons"] == ("eos_token",)
        assert 0 <= found["loray.queue_seconds"] <= found["loray.first_token_seconds"]
        assert span.status.status_code is StatusCode.UNSET


def test_the_drivers_span_is_below_the_ingress_span(url: str, exporter: Spans) -> None:
    httpx.post(url + "/generate", json={"inputs": "Hello"}, timeout=PATIENCE)
    ingress, driver = exporter.both()
    assert driver.parent is not None
    assert ingress.context is not None
    assert driver.parent.span_id == ingress.context.span_id
    assert "loray.adapter" not in reply(driver)


def test_a_trace_that_the_client_began_continues(url: str, exporter: Spans) -> None:
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    began = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
    httpx.post(url + "/generate", json={"inputs": "Hello"}, headers=began, timeout=PATIENCE)
    for span in exporter.both():
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == trace_id


def test_a_failure_is_the_spans_status(url: str, exporter: Spans) -> None:
    body = {"inputs": "x", "parameters": {"adapter_id": "nobody"}}
    httpx.post(url + "/generate", json=body, timeout=PATIENCE)
    for span in exporter.both():
        assert span.status.status_code is StatusCode.ERROR
        assert reply(span)["error.type"] == "adapter_not_found"


def test_no_span_holds_a_token_or_a_text(url: str, exporter: Spans) -> None:
    body = {**ASK, "parameters": {**ASK["parameters"], "api_token": TOKEN}}  # type: ignore[dict-item]
    assert httpx.post(url + "/generate", json=body, timeout=PATIENCE).status_code == 200
    exporter.both()
    written = "".join(span.to_json() for span in exporter.all)
    for secret in (TOKEN, "capital", "Paris"):
        assert secret not in written


def test_nothing_is_recorded_unless_configured(url: str) -> None:
    assert httpx.post(url + "/generate", json=ASK, timeout=PATIENCE).status_code == 200
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def test_serve_takes_the_collectors_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    [processor] = _load_span_processors("deployments.observability.tracing:otlp", "")
    processor.shutdown()
