"""LoRAX's response headers; all times are whole milliseconds."""

from urllib.parse import quote

from deployments.contract import EngineInfo
from deployments.ingress.generation.engine import GenerationJob
from deployments.observability.lorax_metrics import RequestRecord

_PRINTABLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


def safe(value: str) -> str:
    """Any string as a header value: all but printable ASCII is percent-encoded."""
    return quote(value, safe=_PRINTABLE, errors="replace")


def stream_headers(info: EngineInfo, job: GenerationJob) -> dict[str, str]:
    """The headers of a stream: what is known before the first token."""
    headers = {
        "x-compute-type": "gpu+optimized" if info.device.startswith("cuda") else "cpu",
        "x-compute-characters": str(job.characters),
        "x-model-id": safe(info.model_id),
    }
    adapter = job.request.adapter
    if adapter is not None:
        headers |= {"x-adapter-id": safe(adapter.id), "x-adapter-source": adapter.source.value}
    return headers


def reply_headers(info: EngineInfo, job: GenerationJob, record: RequestRecord) -> dict[str, str]:
    """The headers of a whole reply: also counts and times."""
    generated, sequences = record.generated_tokens, job.request.sequences
    prompt = sum(len(sequence.prompt) for sequence in sequences)
    after_first = max(0.0, record.total - record.first_token)
    seconds = {
        "x-compute-time": record.total,
        "x-total-time": record.total,
        "x-validation-time": record.validation,
        "x-queue-time": record.queue,
        "x-inference-time": record.inference,
        "x-time-per-token": record.per_token,
        "x-time-to-first-token": record.first_token,
        "x-time-per-output-token": after_first / max(1, generated - len(sequences)),
    }
    counts = {
        "x-prompt-tokens": prompt,
        "x-generated-tokens": generated,
        "x-skipped-tokens": record.skipped_tokens,
        "x-total-tokens": prompt + generated,
    }
    return (
        stream_headers(info, job)
        | {name: str(round(1000 * value)) for name, value in seconds.items()}
        | {name: str(value) for name, value in counts.items()}
    )
