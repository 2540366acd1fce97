"""The stories must notice the mistakes that schedulers of this kind make."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample

from configs.rope_sets import RopeSets
from configs.wire.adapters import NEVER_ACTIVE, AdapterKey
from scheduler.adapters.device_tier import DeviceTier
from scheduler.adapters.host_tier import HostTier
from scheduler.adapters.residency import Residency
from scheduler.adapters.resident import Resident
from scheduler.kv import prefix_cache as prefix
from scheduler.kv.kept_states import KeptStates
from scheduler.kv.tables import KvTables
from scheduler.request import Request
from scheduler.running import RunningRequests
from scheduler.scheduler import Scheduler
from scheduler.step import StepBuilder
from tests.scheduler.stage import play
from tests.strategies import Story, stories
from tests.sweeps import swept

Patch = pytest.MonkeyPatch

HUNT = settings(
    max_examples=10_000,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def no_checks(patch: Patch) -> None:
    """Leave only the ranks and the clients to notice; a mutant must not be caught by itself."""

    def check(self: Scheduler) -> None:
        """Look away."""

    patch.setattr(Scheduler, "check", check)


def free_before_apply(patch: Patch) -> None:
    """Blocks and batch slots are free when a request ends, although a plan still names them."""

    def leave(self: RunningRequests, request: Request) -> None:
        self.members.remove(request)
        self._free(request)

    patch.setattr(RunningRequests, "release", leave)


def find_the_next_block(patch: Patch) -> None:
    """A name finds the block behind the one that it names."""
    register = prefix.PrefixCache.register

    def shifted(self: prefix.PrefixCache, request: Request) -> None:
        tables = request.tables
        request.tables = [[*table[1:], *table[:1]] for table in tables]
        register(self, request)
        request.tables = tables

    patch.setattr(prefix.PrefixCache, "register", shifted)


def forget_the_salt(patch: Patch) -> None:
    """Adapters share cached blocks."""
    patch.setattr(prefix.PrefixKey, "root", b"")


def forget_the_rope_set(patch: Patch) -> None:
    """Blocks are found whatever frequencies their keys were rotated by."""
    of = prefix.PrefixKey.of
    patch.setattr(prefix.PrefixKey, "of", lambda request: of(request)._replace(rope_set=0))


def forget_the_caller(patch: Patch) -> None:
    """Callers who are to be separated share cached blocks."""
    of = prefix.PrefixKey.of
    patch.setattr(prefix.PrefixKey, "of", lambda request: of(request)._replace(salt=b""))


def forget_the_invocation(patch: Patch) -> None:
    """What an activated adapter computes is found as the base model's."""
    of = prefix.extend_chain

    def unchanged(request: Request, num_blocks: int, block_size: int) -> list[bytes]:
        own, request.active_from = request.active_from, NEVER_ACTIVE if request.active_from else 0
        digests = of(request, num_blocks, block_size)
        request.active_from = own
        return digests

    patch.setattr(prefix, "extend_chain", unchanged)


def go_on_without_states(patch: Patch) -> None:
    """A prefix is found as far as its blocks are known."""
    patch.setattr(KeptStates, "__contains__", lambda self, name: True)
    patch.setattr(KeptStates, "use", lambda self, name: self._number_of.get(name, -1))


def let_rows_cross_the_border(patch: Patch) -> None:
    """All of a row takes the set of its first position."""
    patch.setattr(RopeSets, "room", lambda self, first, position, length: length)


def reuse_adapter_pages(patch: Patch) -> None:
    """An adapter's pages come free when its last request ends, under plans in flight."""

    def is_evictable(self: DeviceTier, resident: Resident) -> bool:
        return resident.on_device and not resident.pinned

    patch.setattr(DeviceTier, "_is_evictable", is_evictable)


def use_before_loaded(patch: Patch) -> None:
    """Rows may join as soon as a load was planned."""
    load = Residency.load

    def load_and_report(self: Residency, key: AdapterKey, step: StepBuilder) -> None:
        load(self, key, step)
        self.loaded(key)

    patch.setattr(Residency, "load", load_and_report)


def drop_while_loading(patch: Patch) -> None:
    """The host copy may go although bytes of it are still on their way."""

    def victim(self: HostTier, awaited: bool) -> Resident | None:
        return next((r for r in self._copies.values() if r.on_device), None)

    def discard_anyway(self: HostTier, resident: Resident) -> None:
        loading, resident.loading = resident.loading, False
        discard(self, resident)
        resident.loading = loading

    discard = HostTier.discard
    patch.setattr(HostTier, "_victim", victim)
    patch.setattr(HostTier, "discard", discard_anyway)


def free_a_block_early(patch: Patch) -> None:
    """A group gives the block back that its window has just begun to leave."""
    computed = KvTables.computed

    def too_far(self: KvTables, request: Request) -> None:
        real = request.computed
        request.computed += max(group.block_size for group in self.groups)
        computed(self, request)
        request.computed = real

    patch.setattr(KvTables, "computed", too_far)
    # What is found too early is another mistake.
    patch.setattr(prefix.PrefixCache, "register", lambda self, request: None)


def forget_the_group(patch: Patch) -> None:
    """A block of one KV group is found for another one."""
    init = prefix.PrefixCache.__init__

    def unmarked(self: prefix.PrefixCache, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self._marks = [b""] * len(self._marks)

    patch.setattr(prefix.PrefixCache, "__init__", unmarked)


def find_without_the_window(patch: Patch) -> None:
    """A prefix is found as far as one group knows it."""
    patch.setattr(prefix.PrefixCache, "_common_end", lambda self, tables, end: end)


def mix_tables_up(patch: Patch) -> None:
    """The groups' new blocks are sent in the wrong order."""
    extend = KvTables.extend

    def reversed_blocks(self: KvTables, request: Request, end: int) -> list[int]:
        return extend(self, request, end)[::-1]

    patch.setattr(KvTables, "extend", reversed_blocks)


MUTANTS: list[Callable[[Patch], None]] = [
    free_before_apply,
    find_the_next_block,
    forget_the_salt,
    forget_the_rope_set,
    forget_the_caller,
    forget_the_invocation,
    go_on_without_states,
    let_rows_cross_the_border,
    reuse_adapter_pages,
    use_before_loaded,
    drop_while_loading,
    free_a_block_early,
    forget_the_group,
    find_without_the_window,
    mix_tables_up,
]


def goes_wrong(story: Story) -> bool:
    """Whether the story breaks a promise; a mutant may also break the machinery."""
    try:
        play(story)
    except (AssertionError, KeyError, ValueError, IndexError, AttributeError):
        return True
    return False


QUICK = (free_before_apply, find_the_next_block)
"""Those that the first stories find."""


@pytest.mark.parametrize("mutate", swept(MUTANTS, lambda mutate: mutate in QUICK))
def test_a_planted_bug_is_found(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    no_checks(monkeypatch)
    find(stories(), goes_wrong, settings=HUNT)


@pytest.mark.sweep
def test_the_hunt_finds_nothing_without_a_bug() -> None:
    """The same stories end well when nothing is planted, so what is found is the bug."""
    calm = settings(HUNT, max_examples=60)
    with pytest.raises(NoSuchExample):
        find(stories(), goes_wrong, settings=calm)
