"""Small requests, ranks and limits for tests that step by hand."""

from configs.runtime import AdapterShare
from configs.wire.adapters import AdapterKey, AdapterShape
from configs.wire.plan import Capacity
from configs.wire.sampling import Sampling, Stopping
from scheduler.admission.limits import Limits
from scheduler.request import Request
from tests.strategies import PROJECTIONS, Action, Arrive, Story


def capacity(
    num_blocks: int = 100,
    block_size: int = 4,
    adapter_pages: int = 8,
    adapter_slots: int = 2,
    host_bytes: int = 1000,
) -> Capacity:
    """Ranks with room enough for most tests."""
    return Capacity(
        num_blocks=num_blocks,
        block_size=block_size,
        projections=PROJECTIONS,
        adapter_pages=adapter_pages,
        adapter_slots=adapter_slots,
        host_bytes=host_bytes,
        max_total_tokens=200,
    )


def make_request(
    index: int,
    prompt: list[int] | None = None,
    max_new_tokens: int = 4,
    adapter: int | None = None,
    stop: tuple[int, ...] = (),
) -> Request:
    """A request for sequence `index`, with a prompt of its own unless given."""
    return Request(
        id=("r", index),
        prompt=[index + 1] * 3 if prompt is None else prompt,
        sampling=Sampling(),
        stopping=Stopping(max_new_tokens, stop_token_ids=stop),
        adapter=None if adapter is None else AdapterKey(adapter),
    )


def arrive(length: int = 3, new: int = 4, adapter: int | None = None, first: int = 1) -> Arrive:
    """An arrival of `length` prompt tokens that generates `new` tokens."""
    prompt = tuple((first + position) % 11 for position in range(length))
    return Arrive(prompt, Stopping(new), None if adapter is None else AdapterKey(adapter))


def story(
    *actions: Action,
    ranks: Capacity | None = None,
    limits: Limits | None = None,
    pages: int = 1,
    num_adapters: int = 40,
    shares: dict[int | None, AdapterShare] | None = None,
    merges: dict[int, tuple[int, ...]] | None = None,
) -> Story:
    """A story of equal adapters of `pages` pages and ten bytes each."""
    shape = AdapterShape((pages, pages), 10)
    shapes = {AdapterKey(index): shape for index in range(1, num_adapters + 1)}
    own = {None if key is None else AdapterKey(key): s for key, s in (shares or {}).items()}
    made = {AdapterKey(k): tuple(map(AdapterKey, parts)) for k, parts in (merges or {}).items()}
    limits = limits or Limits()
    return Story(ranks or capacity(), limits, actions, shapes, shares=own, merges=made)
