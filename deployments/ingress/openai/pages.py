"""Pages of listings in OpenAI's form."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from deployments.ingress.batches.records import BatchRecord, FileRecord

R = TypeVar("R", FileRecord, BatchRecord)


def page(
    found: Sequence[R], limit: int, wanted: Callable[[R], bool] = lambda _: True
) -> dict[str, Any]:
    """A page of up to `limit` records; found: one more if there are more."""
    shown = [each for each in found[:limit] if wanted(each)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": len(found) > limit,
    }
