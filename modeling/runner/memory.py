"""How much of a device's memory each thing gets: adapter pools first, cache pages with the rest."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from configs.adapters import AdaptersConfig
from configs.engine import EngineConfig
from modeling.adapters.bank import PAGE_ROWS, BankSize
from modeling.runner.block_tables import BatchSize

DEFAULT_RANK = 16
"""The LoRA rank that a CPU's pools are sized for: the commonest one of published adapters."""

VOCABULARY_SHARE = 8
"""Pages of the layers' pools for one of embedding's and head's, where the config does not say."""

STATE_SHARE = 0.7
"""Of the memory behind the weights, what states of recurrent layers may take."""

CPU_POOL_BYTES = 256 * 2**20
CPU_CACHE_BYTES = 512 * 2**20

GRAPH_BYTES = 16 * 2**20
"""What the CUDA driver keeps for one more captured step of some hundred launches, with room."""

_NO_ROOM = "allocate memory", "out of memory"

PIECE_BYTES = 2**20
"""The same for one more graph piece, of some ten launches."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a CUDA device: all of it, and what no process has taken."""

    total: int
    free: int


def device_memory(device: torch.device) -> DeviceMemory:
    """Query the CUDA driver, after freeing what torch caches."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total=total, free=free)


STATE_SETTINGS = "the states of recurrent layers (limits.max_running, cache.kept_states)"
CACHE_SETTINGS = "the KV cache (cache.num_blocks, cache.block_size)"
POOL_SETTINGS = (
    "the adapters' pools (adapters.host_bytes, .device_pages, .max_device_adapters, .max_rank)"
)


@contextmanager
def fitting(taken: str) -> Iterator[None]:
    """MemoryError that names what was to be taken, with its settings, where there is no room."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On a CPU torch has no class of its own for it.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not any(
            words in str(error) for words in _NO_ROOM
        ):
            raise
        reason = str(error).splitlines()[0]
        raise MemoryError(f"no memory is left for {taken}: lower them ({reason})") from error


def expert_pages(config: AdaptersConfig, page_bytes: int, memory: DeviceMemory | None) -> int:
    """Return the number of pages in each pool of experts' factors.

    page_bytes: of one page in all of these pools; 0 for a model without. memory: None on a CPU.
    Unless the config says so, they take half of the pools' memory at most; where one page is more,
    there is none.
    """
    if not config.enabled or not page_bytes:
        return 0
    if config.expert_pages is not None:
        return config.expert_pages
    most = config.device_pages or config.max_device_adapters * -(-config.max_rank // PAGE_ROWS)
    return min(most, _budget(config, memory) // 2 // page_bytes)


def _budget(config: AdaptersConfig, memory: DeviceMemory | None) -> int:
    """Return the bytes that all pools may take, where the config gives no pages."""
    return CPU_POOL_BYTES if memory is None else int(memory.free * config.memory_fraction)


def adapter_pages(
    config: AdaptersConfig, page_bytes: int, memory: DeviceMemory | None, taken: int = 0
) -> int:
    """Return the number of pages in each projection's pool.

    page_bytes: of one page in all pools. memory: None on a CPU. taken: bytes of the experts' pools.
    The largest rank that is served always fits, and no pool is larger than all slots could fill.
    """
    if not config.enabled:
        return 0
    if config.device_pages is not None:
        return config.device_pages
    largest = -(-config.max_rank // PAGE_ROWS)
    if memory is None:
        wanted = config.max_device_adapters * -(-min(DEFAULT_RANK, config.max_rank) // PAGE_ROWS)
    else:
        wanted = config.max_device_adapters * largest
    budget = max(0, _budget(config, memory) - taken)
    return max(largest, min(wanted, budget // page_bytes))


def vocabulary_pages(config: AdaptersConfig, pages: int) -> int:
    """Return the pages of embedding's and head's pools; pages: of each other projection's.

    Few adapters change them: unless the config says so, they take no page from the others.
    """
    if config.vocabulary_pages is not None:
        return config.vocabulary_pages
    if config.vocabulary:
        return pages
    return min(pages, max(-(-config.max_rank // PAGE_ROWS), pages // VOCABULARY_SHARE))


def bank_size(
    config: AdaptersConfig, pages: int, copies: int = 0, experts: int | None = None
) -> BankSize:
    """Return the size of the adapters' pools; without pages there are no slots.

    pages: in each projection's pool. copies: of whole embeddings and heads. experts: pages in
    each pool of experts' factors; None: as in the others.
    """
    return BankSize(
        pages=pages,
        slots=config.max_device_adapters if pages else 0,
        max_rank=config.max_rank,
        host_bytes=config.host_bytes,
        copies=copies,
        vocabulary_pages=vocabulary_pages(config, pages),
        expert_pages=experts,
    )


def vocabulary_copies(config: AdaptersConfig, copy_bytes: int, memory: DeviceMemory | None) -> int:
    """Return how many whole embeddings and heads the pools hold; ValueError if they do not fit.

    copy_bytes: of one of each. memory: None on a CPU.
    """
    wanted = config.vocabulary_copies
    if memory is not None and wanted * copy_bytes > memory.free:
        raise ValueError(
            f"adapters.vocabulary_copies ({wanted}) takes {wanted * copy_bytes} bytes on this "
            f"rank, {memory.free} are free: lower it, or use more ranks"
        )
    return wanted


def check_linears(num_bytes: int, memory: DeviceMemory | None) -> None:
    """ValueError if the pools of whole linear maps and heads do not fit; memory: None on a CPU."""
    if memory is not None and num_bytes > memory.free:
        raise ValueError(
            f"adapters.whole_linears and adapters.draft_heads take {num_bytes} bytes on this rank, "
            f"{memory.free} are free: name fewer maps or lower the numbers, or use more ranks"
        )


def check_states(count: int, slot_bytes: int, memory: DeviceMemory | None) -> None:
    """ValueError if the states of recurrent layers leave too little for a cache.

    count: of sequences and of copies that are kept. slot_bytes: of one of them. memory: None on a
    CPU.
    """
    if memory is None or count * slot_bytes <= memory.free * STATE_SHARE:
        return
    most = int(memory.free * STATE_SHARE) // slot_bytes
    advice = f"let them be {most} at most" if most else "not even one fits"
    raise ValueError(
        "limits.max_running and cache.kept_states: recurrent layers take "
        f"{slot_bytes / 1e6:.0f} MB for each of {count} together, and this rank has "
        f"{memory.free / 1e9:.1f} GB free: {advice}"
    )


def dequantised_bytes(config: EngineConfig, memory: DeviceMemory | None, block_bytes: int) -> int:
    """Return how many bytes the numbers of integers may take beside them.

    memory: None on a CPU. block_bytes: of a block of the cache; where cache.num_blocks is set, that
    many are left room.
    """
    if memory is None:
        return 0
    others = memory.total * (1 - config.cache.device_memory_fraction)
    others += (config.cache.num_blocks or 0) * block_bytes
    return int(max(0.0, memory.free - others) * config.model.dequantised_fraction)


def empty_blocks(size: BatchSize, kept_states: int) -> int:
    """Blocks in which nothing lies, of a model of recurrent layers alone.

    They are enough for every batch slot, and every prefix behind which states are kept, at full
    length.
    """
    return (size.max_running + kept_states) * size.max_blocks


def cpu_blocks(size: BatchSize, block_bytes: int) -> int:
    """Blocks for every batch slot at full length, up to the default budget; for one at least."""
    wanted = size.max_running * size.max_blocks
    return max(size.max_blocks, min(wanted, CPU_CACHE_BYTES // block_bytes))


class NoCacheRoomError(ValueError):
    """No memory is left for a single block; lacking: how many bytes more it would take."""

    def __init__(self, message: str, lacking: int) -> None:
        super().__init__(message)
        self.lacking = lacking


def cuda_blocks(
    config: EngineConfig,
    memory: DeviceMemory,
    activation_bytes: int,
    block_bytes: int,
    empty: int = 0,
) -> int:
    """Blocks in what cache.device_memory_fraction leaves; NoCacheRoomError when that is none.

    activation_bytes: what steps will take beyond what is allocated now: the peak of the largest
    one, and the captured ones' memory. empty: how many there are if one has no bytes.
    """
    taken = memory.total - memory.free + activation_bytes
    room = int(memory.total * config.cache.device_memory_fraction) - taken
    if room < block_bytes:
        raise NoCacheRoomError(
            f"no memory is left for the KV cache: {taken} of {memory.total} bytes are taken and "
            f"cache.device_memory_fraction is {config.cache.device_memory_fraction}; raise it, "
            "lower adapters.memory_fraction or limits.max_step_tokens, or use more ranks",
            block_bytes - room,
        )
    return room // block_bytes if block_bytes else empty
