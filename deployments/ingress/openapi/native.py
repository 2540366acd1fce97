"""The document's rows for LoRAX's routes and for what operators' machines ask."""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from deployments.contract import AdapterInfo
from deployments.ingress.lorax.replies import Details, StreamEvent
from deployments.ingress.openapi.operation import PLAIN, Operation


class LoraxError(TypedDict):
    """An error of LoRAX's routes; code: the kind, for programs."""

    error: str
    error_type: str
    code: NotRequired[str]


class GenerateReply(TypedDict):
    """A whole answer; details where they were asked for."""

    generated_text: str
    details: NotRequired[Details]


class TextSlice(TypedDict):
    """A token and its place in the text, in characters."""

    id: int
    text: str
    start: int
    stop: int


class EmbedReply(TypedDict):
    """The embedding of one text."""

    embeddings: list[float]


class InfoReply(TypedDict):
    """LoRAX's fields, then ours; adapters: those that the caller may use."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_device_type: str
    model_pipeline_tag: str
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_length: int
    max_total_tokens: int
    max_batch_total_tokens: int
    version: str
    model_name: str
    chosen: dict[str, str]
    adapters: list[AdapterInfo]


_GENERATING = (422, 403, 424, 503, 500)
_QUESTION = {"inputs": "What is the capital of France?"}
_PIRATE = {**_QUESTION, "parameters": {"adapter_id": "pirate", "max_new_tokens": 20}}
_SAMPLED = {
    **_QUESTION,
    "parameters": {
        "adapter_id": "local:french",
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 7,
        "max_new_tokens": 20,
        "stop": ["\n"],
        "details": True,
    },
}
_MERGED = {
    **_QUESTION,
    "parameters": {
        "merged_adapters": {"ids": ["french", "pirate"], "weights": [0.7, 0.7]},
        "max_new_tokens": 20,
    },
}
_REQUESTS = {
    "an adapter": _PIRATE,
    "sampling, with details": _SAMPLED,
    "two adapters merged": _MERGED,
    "the base": _QUESTION,
}
_ANSWER = {"generated_text": " Arr! The capital of France be Paris, matey!"}

_COMPATIBLE = Operation(
    tag="LoRAX",
    summary="Generate, whole or as a stream",
    description="As /generate, or with `stream` as /generate_stream. The whole reply is a list "
    "of one.",
    reply=list[GenerateReply],
    event=StreamEvent,
    errors=_GENERATING,
    request={**_REQUESTS, "a stream": {**_PIRATE, "stream": True}},
    answer=[_ANSWER],
)
_HEALTH = Operation(
    tag="Probes",
    summary="Whether the ranks serve",
    description="Empty while they do; 503 while they start or are rebuilt.",
    others=(PLAIN,),
    errors=(503,),
)
_NO_CLASSES = Operation(
    tag="LoRAX",
    summary="Refused: text generation models do not classify",
    errors=(422,),
)

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("post", "/"): _COMPATIBLE,
    ("post", "/invocations"): _COMPATIBLE,
    ("post", "/generate"): Operation(
        tag="LoRAX",
        summary="Generate a whole answer",
        reply=GenerateReply,
        errors=_GENERATING,
        request=_REQUESTS,
        answer=_ANSWER,
    ),
    ("post", "/generate_stream"): Operation(
        tag="LoRAX",
        summary="Generate as a stream, one event a token",
        description="The last event bears the whole text. A failure on the way is an event with "
        "an error, and the last.",
        event=StreamEvent,
        only_events=True,
        errors=_GENERATING,
        request=_REQUESTS,
    ),
    ("post", "/tokenize"): Operation(
        tag="LoRAX",
        summary="A text's tokens and their places",
        reply=list[TextSlice],
        errors=(422, 503, 500),
        request={"a text": {"inputs": "Who?", "add_special_tokens": False}},
        answer=[{"id": 312, "text": "Who", "start": 0, "stop": 3}],
    ),
    ("post", "/embed"): Operation(
        tag="LoRAX",
        summary="The embedding of a text",
        description="Pooled hidden states of the model, with the adapter that `parameters` name.",
        reply=EmbedReply,
        errors=_GENERATING,
        request={"an adapter": {"inputs": "Paris", "parameters": {"adapter_id": "pirate"}}},
        answer={"embeddings": [0.0123, -0.0456, 0.0789]},
    ),
    ("post", "/classify"): _NO_CLASSES,
    ("post", "/classify_batch"): _NO_CLASSES,
    ("get", "/info"): Operation(
        tag="Probes",
        summary="The model, its limits, what start-up chose, the adapters",
        reply=InfoReply,
        errors=(503,),
    ),
    ("get", "/"): Operation(
        tag="Probes",
        summary="The health; for browsers the playground",
        errors=(503,),
        others=(PLAIN, "text/html"),
    ),
    ("get", "/health"): _HEALTH,
    ("get", "/ping"): _HEALTH,
    ("get", "/startup"): Operation(
        tag="Probes",
        summary="Whether a token can be generated, by generating one",
        others=(PLAIN,),
        errors=(500, 503),
    ),
    ("get", "/metrics"): Operation(
        tag="Probes",
        summary="LoRAX's metrics of this replica; as JSON for those who accept it",
        reply=dict[str, Any],
        others=(PLAIN,),
        errors=(403,),
    ),
}
