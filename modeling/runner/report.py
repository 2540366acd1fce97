"""What a rank reports about itself once it has started."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from configs.kv_groups import KvGroup
from configs.rope_sets import RopeSets


@dataclass(frozen=True)
class RunnerReport:
    """What a rank can hold, what it took to get there, and what it chose.

    The first seven fields, paged, state_bytes, pool_pages, rope_sets and kv_groups become the
    scheduler's Capacity. What is named bytes is this rank's alone.

    attention, adapter_kernel: names; their reasons say why they were taken.
    paged: whether prompts may be cut into chunks, and sequences may share cached blocks.
    state_bytes: of the states of recurrent layers. Where there are some, no tokens are guessed, for
        a state cannot go back, and blocks are shared where a copy was kept.
    kept_states: how many copies of a sequence's states are kept; None without recurrent layers.
    weight_forms: the bytes of weights in each form.
    captured_rows: the sizes of captured decode steps.
    draft_heads: how many tokens heads guess; None where drafts are not those of heads.
    """

    num_blocks: int
    block_size: int
    projections: tuple[str, ...]
    adapter_pages: int
    adapter_slots: int
    host_bytes: int
    max_total_tokens: int
    dtype: str
    device: str
    attention: str
    attention_reason: str
    adapter_kernel: str
    adapter_kernel_reason: str
    weight_bytes_read: int
    weight_bytes_resident: int
    kv_bytes: int
    adapter_pool_bytes: int
    weight_forms: Mapping[str, int] = field(default_factory=dict)
    paged: bool = False
    state_bytes: int = 0
    captured_rows: tuple[int, ...] = ()
    pool_pages: tuple[int, ...] = ()
    rope_sets: RopeSets | None = None
    kv_groups: tuple[KvGroup, ...] = ()
    draft_heads: int | None = None
    kept_states: int | None = None
