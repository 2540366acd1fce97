"""What an engine serves, from the model's folder and from its ranks' reports."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from configs.engine import EngineConfig, SpeculationConfig, SpeculationKind
from configs.model import ModelConfig
from configs.wire.plan import Capacity
from deployments.contract import AdapterDemand, AdapterTier, EngineLoad
from deployments.rank.messages import LoadReport
from scheduler.adapters.resident import AdapterState
from scheduler.snapshot import AdapterView, Snapshot


def model_name(config: ModelConfig, folder: Path) -> str:
    """A short name of the base model, equal on all nodes; folder: of its snapshot."""
    named = config.model_dump_json() + folder.name
    return hashlib.blake2b(named.encode(), digest_size=8).hexdigest()


def common(capacities: Sequence[Capacity]) -> Capacity:
    """What every rank can hold; ValueError for ranks that cut their cache in different ways."""
    if len({capacity.kv_groups for capacity in capacities}) > 1:
        cut = "; ".join(_tokens(capacity) for capacity in capacities)
        raise ValueError(
            f"the ranks have blocks of different tokens ({cut}): this number of ranks shares the "
            "KV heads unevenly; set tensor_parallel to one that divides them"
        )
    return msgspec.structs.replace(
        capacities[0],
        num_blocks=min(c.num_blocks for c in capacities),
        adapter_pages=min(c.adapter_pages for c in capacities),
        pool_pages=tuple(map(min, zip(*(c.pages for c in capacities), strict=True))),
        adapter_slots=min(c.adapter_slots for c in capacities),
        host_bytes=min(c.host_bytes for c in capacities),
    )


def capacity_changes(before: Capacity, after: Capacity) -> str:
    """What new ranks can hold, where the ranks before them held another number."""
    counts = ("num_blocks", "adapter_pages", "adapter_slots", "host_bytes")
    return ", ".join(
        f"{name} {new} (before: {old})"
        for name in counts
        if (new := getattr(after, name)) != (old := getattr(before, name))
    )


def _tokens(capacity: Capacity) -> str:
    """Tokens of a block in each KV group, and how many of the last ones a group keeps."""
    groups = []
    for group in capacity.groups:
        kept = group.window or group.chunk
        groups.append(f"{group.block_size}" + (f" (last {kept})" if kept else ""))
    return " or ".join(groups)


TIERS: dict[AdapterState, AdapterTier] = {
    AdapterState.DISK: "disk",
    AdapterState.STAGING: "disk",
    AdapterState.HOST: "host",
    AdapterState.LOADING: "host",
    AdapterState.DEVICE: "device",
}


def engine_load(
    config: EngineConfig, snapshot: Snapshot, adapters: Mapping[str, AdapterView], asleep: bool
) -> EngineLoad:
    """A replica's work; adapters: by clients' names; asleep: its ranks have ended."""
    return EngineLoad(
        model=config.model.served_name,
        queued=snapshot.queued,
        running=snapshot.running,
        num_blocks=snapshot.num_blocks,
        free_blocks=snapshot.free_blocks,
        block_size=config.cache.block_size,
        device_slots=snapshot.tiers.device_slots,
        prompt_tokens=snapshot.num_prompt_tokens,
        cached_tokens=snapshot.num_cached_tokens,
        generated_tokens=snapshot.num_generated_tokens,
        preemptions=snapshot.num_preemptions,
        adapters=[
            AdapterDemand(name, TIERS[view.state], view.running, view.waiting)
            for name, view in adapters.items()
        ],
        asleep=asleep,
    )


def startup_info(reports: Sequence[LoadReport], speculation: SpeculationConfig) -> dict[str, str]:
    """What start-up selected, as text."""
    first, pages = reports[0], common([report.capacity for report in reports])
    cache = _size(max(report.cache_bytes for report in reports))
    pools = _size(max(report.adapter_bytes for report in reports))
    adapters = f"{pages.adapter_pages} of 8 rank rows a projection, {pages.adapter_slots} slots"
    own = zip(pages.projections, pages.pages, strict=True)
    of_experts = [count for name, count in own if name.startswith("experts.")]
    if of_experts:
        adapters += f"; {min(of_experts)} of 8 rows of one expert for each of the experts' maps"
    states = max(report.state_bytes for report in reports)
    return {
        "device": f"{first.device} x {len(reports)}, {first.dtype}",
        "attention": first.attention,
        "adapter kernel": first.adapter_kernel,
        "all-reduce": first.all_reduce,
        "pages": f"{pages.num_blocks} of {_tokens(pages)} tokens, {cache}{_shortened(pages)}",
        "adapter pages": f"{adapters}; {pools}",
        **({"states": f"{_size(states)} of recurrent layers"} if states else {}),
        "weights": "; ".join(dict.fromkeys(map(_weights, reports))),
        "speculation": _speculation(speculation, pages),
        "load": f"{max(report.load_seconds for report in reports):.1f} s",
    }


def _shortened(capacity: Capacity) -> str:
    """What a request can have where the cache is smaller than the model's longest one."""
    longest, most = capacity.longest_sequence, capacity.max_total_tokens
    return "" if longest == most else f"; a request has at most {longest} tokens, not {most}"


def _speculation(config: SpeculationConfig, capacity: Capacity) -> str:
    """What guesses tokens; none where the ranks cannot check drafts."""
    if config.kind is SpeculationKind.NONE:
        return "none"
    if not capacity.drafts:
        return f"none: {config.kind.value} needs a paged model, without recurrent layers"
    most = min(config.max_tokens, capacity.draft_heads or config.max_tokens)
    return f"{config.kind.value}, up to {most} tokens"


def _weights(report: LoadReport) -> str:
    """The bytes of a rank's weights in each form."""
    forms = sorted(report.weight_forms.items(), key=lambda form: -form[1])
    parts = ", ".join(f"{_size(size)} {name}" for name, size in forms)
    return parts or _size(report.weight_bytes_resident)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
