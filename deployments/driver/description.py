"""What an engine serves, from the model's folder and from its ranks' reports."""

from collections.abc import Sequence

import msgspec

from configs.wire.plan import Capacity
from deployments.rank.messages import LoadReport


def common(capacities: Sequence[Capacity]) -> Capacity:
    """What every rank can hold."""
    return msgspec.structs.replace(
        capacities[0],
        num_blocks=min(c.num_blocks for c in capacities),
        adapter_pages=min(c.adapter_pages for c in capacities),
        pool_pages=tuple(map(min, zip(*(c.pages for c in capacities), strict=True))),
        adapter_slots=min(c.adapter_slots for c in capacities),
        host_bytes=min(c.host_bytes for c in capacities),
    )


def _tokens(capacity: Capacity) -> str:
    """Tokens of a block in each KV group, and how many of the last ones a group keeps."""
    groups = []
    for group in capacity.groups:
        kept = group.window or group.chunk
        groups.append(f"{group.block_size}" + (f" (last {kept})" if kept else ""))
    return " or ".join(groups)


def startup_info(reports: Sequence[LoadReport]) -> dict[str, str]:
    """What start-up selected, as text."""
    first, pages = reports[0], common([report.capacity for report in reports])
    adapters = f"{pages.adapter_pages} of 8 rank rows a projection, {pages.adapter_slots} slots"
    return {
        "device": f"{first.device} x {len(reports)}, {first.dtype}",
        "attention": first.attention,
        "adapter kernel": first.adapter_kernel,
        "all-reduce": first.all_reduce,
        "pages": f"{pages.num_blocks} of {_tokens(pages)} tokens",
        "adapter pages": adapters,
        "load": f"{max(report.load_seconds for report in reports):.1f} s",
    }
