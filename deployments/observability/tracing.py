"""Spans of a request, one in the ingress and one in the driver, through OpenTelemetry.

Serve's tracing_config installs the exporter and carries the context from process to process.
Without it these spans record nothing and cost nothing. Spans never have prompts, answers or API
tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.trace import Span, Status, StatusCode

from deployments.contract import Completion, Failed, Finished, GenerateRequest, SequenceOutcome

INGRESS, DRIVER = "loray.ingress", "loray.driver"


class RequestSpan:
    """The span of one request."""

    def __init__(self, span: Span) -> None:
        """span: has begun."""
        self._span = span

    def ended(self, completion: Completion) -> Completion:
        """Write the outcome into the span; returns the same completion."""
        if self._span.is_recording():
            outcomes = completion.sequences
            self._span.set_attributes(_outcome_attributes(outcomes))
            failed = [o.ending for o in outcomes if isinstance(o.ending, Failed)]
            if failed:
                self._span.set_attribute("error.type", failed[0].kind.value)
                self._span.set_status(Status(StatusCode.ERROR, failed[0].message))
        return completion


@contextmanager
def request_span(name: str, request: GenerateRequest) -> Iterator[RequestSpan]:
    """A span for the duration of the context, a child of the current one."""
    with trace.get_tracer("loray").start_as_current_span(name) as span:
        if span.is_recording():
            span.set_attributes(_request_attributes(request))
        yield RequestSpan(span)


def _request_attributes(request: GenerateRequest) -> dict[str, str | int]:
    """The request's attributes, named by OpenTelemetry's GenAI conventions if possible."""
    adapter = request.adapter
    named: dict[str, str | int] = {}
    if adapter is not None:
        named["loray.adapter"] = adapter.id
        named["loray.adapter_source"] = adapter.source.value
        named["loray.adapter_revision"] = adapter.revision or ""
    return {
        **named,
        "loray.request_id": request.id,
        "loray.sequences": len(request.sequences),
        "gen_ai.request.max_tokens": max(s.stopping.max_new_tokens for s in request.sequences),
        "gen_ai.usage.input_tokens": sum(len(s.prompt) for s in request.sequences),
    }


def _outcome_attributes(outcomes: Sequence[SequenceOutcome]) -> dict[str, int | float | list[str]]:
    """The outcome's attributes; times are those of the slowest sequence."""
    endings = [o.ending.reason.value for o in outcomes if isinstance(o.ending, Finished)]
    return {
        "gen_ai.usage.output_tokens": sum(len(o.tokens) for o in outcomes),
        "gen_ai.response.finish_reasons": endings,
        "loray.cached_tokens": sum(o.cached_tokens for o in outcomes),
        "loray.queue_seconds": max(o.queue_seconds for o in outcomes),
        "loray.first_token_seconds": max(o.first_token_seconds for o in outcomes),
    }


def otlp() -> list[SpanProcessor]:
    """An exporter to an OTLP collector over HTTP, for `tracing_config.exporter_import_path`.

    Needs `pip install loray[otlp]`. The collector's address and headers come from
    OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_ENDPOINT, ..._HEADERS), on every node.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return [BatchSpanProcessor(OTLPSpanExporter())]
