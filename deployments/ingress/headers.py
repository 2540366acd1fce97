"""The response headers that LoRAX's users read; all times are whole milliseconds."""

import time
from urllib.parse import quote

from deployments.contract import Completion, EngineInfo
from deployments.ingress.engine import Job

_PRINTABLE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


def safe(value: str) -> str:
    """A header value that any string can be: what is not printable ASCII is percent-encoded."""
    return quote(value, safe=_PRINTABLE, errors="replace")


def stream_headers(info: EngineInfo, job: Job) -> dict[str, str]:
    """What is known before the first token."""
    headers = {
        "x-compute-type": "gpu+optimized" if info.device.startswith("cuda") else "cpu",
        "x-compute-characters": str(job.characters),
        "x-model-id": safe(info.model_id),
    }
    adapter = job.request.adapter
    if adapter is not None:
        headers |= {"x-adapter-id": safe(adapter.id), "x-adapter-source": adapter.source.value}
    return headers


def reply_headers(
    info: EngineInfo, job: Job, completion: Completion, submitted: float, generated: int
) -> dict[str, str]:
    """Counts and times of a whole reply; `submitted` is when the driver was called."""
    outcomes = completion.sequences
    total = time.monotonic() - job.started
    validation = submitted - job.started
    queue = max(outcome.queue_seconds for outcome in outcomes)
    first = validation + max(outcome.first_token_seconds for outcome in outcomes)
    inference = max(0.0, total - validation - queue)
    prompt = sum(len(sequence.prompt) for sequence in job.request.sequences)
    seconds = {
        "x-compute-time": total,
        "x-total-time": total,
        "x-validation-time": validation,
        "x-queue-time": queue,
        "x-inference-time": inference,
        "x-time-per-token": inference / max(1, generated),
        "x-time-to-first-token": first,
        "x-time-per-output-token": max(0.0, total - first) / max(1, generated - len(outcomes)),
    }
    counts = {
        "x-prompt-tokens": prompt,
        "x-generated-tokens": generated,
        "x-skipped-tokens": 0,
        "x-total-tokens": prompt + generated,
    }
    return (
        stream_headers(info, job)
        | {name: str(round(1000 * value)) for name, value in seconds.items()}
        | {name: str(value) for name, value in counts.items()}
    )
