"""The document's rows for the routes that control adapters."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from configs.wire.merging import MergeStrategy, SignMethod
from deployments.ingress.openapi.operation import PLAIN, Operation


class AdapterResidency(TypedDict):
    """What one replica has of an adapter, and does with it; last_used: seconds since the epoch."""

    state: Literal["absent", "disk", "host", "device"]
    digest: str | None
    host_bytes: int
    device_pages: int
    pinned: bool
    draining: bool
    running: int
    waiting: int
    num_requests: int
    last_used: float | None


class MergeRecipe(TypedDict):
    """A merge, in the words of a request."""

    ids: list[str]
    weights: list[float]
    merge_strategy: MergeStrategy
    density: float | None
    majority_sign_method: SignMethod | None


class AdapterReply(TypedDict):
    """An adapter over all replicas; state: the best of theirs, root: what the name stands for.

    Merges are listed while a replica has them in memory; they have no source.
    """

    id: str
    object: Literal["adapter"]
    source: str | None
    adapter_id: str
    revision: str | None
    root: str | None
    merged_adapters: MergeRecipe | None
    state: Literal["absent", "disk", "host", "device"]
    digest: str | None
    rank: int | None
    bytes: int | None
    pinned: bool
    num_requests: int
    last_used: float | None
    replicas: dict[str, AdapterResidency]


class AdaptersReply(TypedDict):
    """Every adapter that a replica knows."""

    object: Literal["list"]
    data: list[AdapterReply]


_ERRORS = (400, 403, 404, 503, 500)
_ADMIN = (
    "Needs the admin key where any key is configured. It reaches every replica; names and pins "
    "reach those too that start later."
)


def _row(summary: str, request: Mapping[str, Any] | None = None, **rest: Any) -> Operation:
    return Operation(
        tag="Control",
        summary=summary,
        description=_ADMIN,
        errors=_ERRORS,
        request=request or {},
        **rest,
    )


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("get", "/v1/adapters"): _row("Adapters and where they are", reply=AdaptersReply),
    ("post", "/v1/adapters"): _row(
        "Fetch and stage an adapter now",
        {"kept on the device": {"id": "local:pirate", "pin": True}},
        reply=AdapterReply,
    ),
    ("get", "/v1/adapters/{name}"): _row("One adapter", reply=AdapterReply),
    ("patch", "/v1/adapters/{name}"): _row(
        "Keep an adapter on the device, or no longer",
        {"keep it": {"pinned": True}},
        reply=AdapterReply,
    ),
    ("delete", "/v1/adapters/{name}"): _row("Unload an adapter", reply=AdapterReply),
    ("post", "/v1/load_lora_adapter"): _row(
        "Give an adapter a name, as vLLM does",
        {"a name": {"lora_name": "captain", "lora_path": "local:pirate"}},
        others=(PLAIN,),
    ),
    ("post", "/v1/unload_lora_adapter"): _row(
        "Take the name away, as vLLM does",
        {"a name": {"lora_name": "captain"}},
        others=(PLAIN,),
    ),
}
