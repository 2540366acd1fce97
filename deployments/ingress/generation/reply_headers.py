"""LoRAX's response headers; all times are whole milliseconds."""

import time
from typing import NamedTuple
from urllib.parse import quote

from deployments.contract import Completion, EngineInfo
from deployments.ingress.generation.engine import GenerationJob

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


class RequestTimes(NamedTuple):
    """The times of a request in seconds.

    total: from its arrival. validation: before the driver's call. queue: in the driver's queue.
    first: until all sequences have their first token.
    """

    total: float
    validation: float
    queue: float
    first: float

    @property
    def inference(self) -> float:
        """The time after the queue."""
        return max(0.0, self.total - self.validation - self.queue)

    @classmethod
    def of(cls, job: GenerationJob, completion: Completion, submitted: float) -> "RequestTimes":
        """The times of a job that ends now; submitted: when the driver was called."""
        validation = submitted - job.started
        outcomes = completion.sequences
        return cls(
            total=time.monotonic() - job.started,
            validation=validation,
            queue=max(outcome.queue_seconds for outcome in outcomes),
            first=validation + max(outcome.first_token_seconds for outcome in outcomes),
        )


def reply_headers(
    info: EngineInfo, job: GenerationJob, times: RequestTimes, generated: int
) -> dict[str, str]:
    """The headers of a whole reply: also counts and times."""
    sequences = job.request.sequences
    prompt = sum(len(sequence.prompt) for sequence in sequences)
    after_first = max(0.0, times.total - times.first)
    seconds = {
        "x-compute-time": times.total,
        "x-total-time": times.total,
        "x-validation-time": times.validation,
        "x-queue-time": times.queue,
        "x-inference-time": times.inference,
        "x-time-per-token": times.inference / max(1, generated),
        "x-time-to-first-token": times.first,
        "x-time-per-output-token": after_first / max(1, generated - len(sequences)),
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
