"""The prefix cache: what is found is what was computed, for this adapter and these tokens."""

from configs.kv_groups import KvGroup
from configs.rope_sets import LONG, SHORT
from configs.wire.adapters import AdapterKey
from scheduler.kv.prefix_cache import PrefixCache, PrefixKey, extend_chain
from scheduler.request import Request
from tests.scheduler.small import make_request

SIZE = 4
ONE = (KvGroup(SIZE),)


def computed(cache: PrefixCache, request: Request, length: int) -> Request:
    """Let the request hold blocks for `length` computed tokens, and register them."""
    request.tables = [cache.pool.allocate(-(-length // SIZE))]
    request.computed = request.scheduled = length
    cache.register(request)
    cache.check()
    return request


def found(cache: PrefixCache, request: Request) -> list[int]:
    """The blocks of the only group."""
    return cache.match(request).tables[0]


def test_full_blocks_are_found_by_a_longer_prompt() -> None:
    cache = PrefixCache(8, ONE, enabled=True)
    first = computed(cache, make_request(0, list(range(10))), 10)
    assert found(cache, make_request(1, [*range(10), 10, 11])) == first.tables[0][:2]
    assert found(cache, make_request(1, [*range(6), 9, 9, 9])) == first.tables[0][:1]
    assert found(cache, make_request(1, [9, *range(9)])) == []


def test_a_full_hit_leaves_the_last_token_to_compute() -> None:
    cache = PrefixCache(8, ONE, enabled=True)
    first = computed(cache, make_request(0, list(range(8))), 8)
    assert found(cache, make_request(1, list(range(8)))) == first.tables[0][:1]
    assert found(cache, make_request(1, list(range(9)))) == first.tables[0][:2]


def test_adapters_share_nothing_with_each_other_nor_with_the_base_model() -> None:
    cache = PrefixCache(8, ONE, enabled=True)
    first = computed(cache, make_request(0, list(range(8)), adapter=1), 8)
    assert found(cache, make_request(1, list(range(9)), adapter=1)) == first.tables[0]
    assert found(cache, make_request(1, list(range(9)), adapter=2)) == []
    assert found(cache, make_request(1, list(range(9)))) == []


def test_only_equal_keys_have_one_root() -> None:
    """A caller's salt is bytes of any length, and lies beside numbers: none looks like another."""
    salts = [b"", b"a", b"\0" * 8, b"\1" + b"\0" * 7]
    adapters = [None, AdapterKey(1), AdapterKey(2), AdapterKey(256)]
    keys = [PrefixKey(s, r, a) for s in salts for r in (SHORT, LONG) for a in adapters]
    assert len({key.root for key in keys}) == len(keys)
    assert PrefixKey(b"a", LONG, None).root == PrefixKey(b"a", LONG, None).root


def test_callers_of_another_salt_find_nothing() -> None:
    cache = PrefixCache(8, ONE, enabled=True)
    request = make_request(0, list(range(8)))
    request.cache_salt = b"theirs"
    first = computed(cache, request, 8)
    other, same = make_request(1, list(range(9))), make_request(2, list(range(9)))
    same.cache_salt = b"theirs"
    assert found(cache, other) == []
    assert found(cache, same) == first.tables[0]


def test_a_block_names_the_rope_set_that_wrote_it() -> None:
    cache = PrefixCache(8, ONE, enabled=True)
    first = computed(cache, make_request(0, list(range(8))), 8)
    request = make_request(1, list(range(9)))
    assert found(cache, request) == first.tables[0]
    request.take_rope_set(LONG)
    assert found(cache, request) == []
    request.take_rope_set(SHORT)
    assert found(cache, request) == first.tables[0]


def test_only_blocks_of_known_tokens_that_are_scheduled_are_registered() -> None:
    cache = PrefixCache(8, ONE, enabled=True)
    request = make_request(0, list(range(11)))
    request.tables = [cache.pool.allocate(3)]
    request.scheduled = 7
    cache.register(request)
    assert found(cache, make_request(1, list(range(13)))) == request.tables[0][:1]
    request.scheduled, request.pending = 12, 1  # The last one is sampled, and not yet known.
    cache.register(request)
    assert found(cache, make_request(1, list(range(13)))) == request.tables[0][:2]
    assert request.registered == 2


def test_generated_tokens_count_like_the_prompt() -> None:
    cache = PrefixCache(8, ONE, enabled=True)
    request = make_request(0, [1, 2, 3], max_new_tokens=9)
    request.tokens += [4, 5, 6, 7, 8]
    computed(cache, request, 8)
    assert found(cache, make_request(1, [1, 2, 3, 4, 5, 6, 7, 8, 9])) == request.tables[0]


def test_the_first_block_computed_stays_the_one_that_is_found() -> None:
    cache = PrefixCache(8, ONE, enabled=True)
    first = computed(cache, make_request(0, list(range(8))), 8)
    second = computed(cache, make_request(1, list(range(8))), 8)
    assert set(first.tables[0]).isdisjoint(second.tables[0])
    assert found(cache, make_request(2, list(range(9)))) == first.tables[0]
    cache.pool.release(second.tables[0])
    assert cache.pool.available == 8 - 2
    assert found(cache, make_request(2, list(range(9)))) == first.tables[0]


def test_evicted_blocks_are_found_no_more_and_the_chain_shortens_from_its_end() -> None:
    cache = PrefixCache(3, ONE, enabled=True)
    first = computed(cache, make_request(0, list(range(12))), 12)
    blocks = list(first.tables[0])
    cache.pool.release(first.tables[0])
    cache.pool.allocate(1)
    assert found(cache, make_request(1, list(range(13)))) == blocks[:2]
    assert len(cache) == 2
    cache.check()


def test_when_off_nothing_is_kept_and_nothing_is_found() -> None:
    cache = PrefixCache(8, ONE, enabled=False)
    first = computed(cache, make_request(0, list(range(8))), 8)
    cache.pool.release(first.tables[0])
    assert len(cache) == 0
    assert found(cache, make_request(1, list(range(9)))) == []


def test_chains_grow_without_being_computed_again() -> None:
    request = make_request(0, list(range(12)))
    short = list(extend_chain(request, 1, SIZE))
    assert extend_chain(request, 3, SIZE)[:1] == short
    assert len(set(request.digests)) == 3
    other = make_request(1, [*range(4, 8), *range(4, 12)])
    assert extend_chain(other, 3, SIZE)[2] != request.digests[2]
