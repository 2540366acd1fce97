"""Hypothesis strategies: whole stories of a server's life, small enough to shrink."""

from dataclasses import dataclass, field

import msgspec
from hypothesis import strategies as st

from configs.kv_groups import KvGroup
from configs.rope_sets import RopeSets
from configs.runtime import AdapterShare
from configs.wire.adapters import NEVER_ACTIVE, AdapterKey, AdapterShape
from configs.wire.plan import Capacity
from configs.wire.sampling import Stopping
from scheduler.admission.limits import Limits

PROJECTIONS = ("q_proj", "down_proj")
VOCABULARY = 11


@dataclass(frozen=True)
class Arrive:
    """A request comes; the ingress will match a stop string at `stop_at`, `late` ticks later.

    scored, pooled: whether its prompt's logprobs are requested, and whether it is an embedding's.
    constraint: what its answer is held to.
    background: it is served only where no other request wants to be.
    active_from: the first position that its adapter changes. salt: of its cached blocks.
    """

    prompt: tuple[int, ...]
    stopping: Stopping
    adapter: AdapterKey | None = None
    logprobs: bool = False
    stop_at: int | None = None
    late: int = 0
    scored: bool = False
    pooled: bool = False
    constraint: str = ""
    background: bool = False
    active_from: int = 0
    salt: bytes = b""

    def adapter_at(self, position: int) -> AdapterKey | None:
        """The adapter that changes a position."""
        return self.adapter if position >= self.active_from else None


@dataclass(frozen=True)
class Cancel:
    """The client of the index-th arrival leaves."""

    index: int


@dataclass(frozen=True)
class Ticks:
    """The loop goes round `count` times."""

    count: int


@dataclass(frozen=True)
class LoseGroup:
    """The ranks die and new ones come."""


@dataclass(frozen=True)
class Pin:
    """An adapter is pinned or unpinned."""

    key: AdapterKey
    pinned: bool


@dataclass(frozen=True)
class Unload:
    """An adapter is unloaded."""

    key: AdapterKey


@dataclass(frozen=True)
class Want:
    """An adapter is to be staged without a request."""

    key: AdapterKey


@dataclass(frozen=True)
class Reshare:
    """An operator changes all shares; None is the base model's."""

    shares: dict[AdapterKey | None, AdapterShare]


@dataclass(frozen=True)
class Relimit:
    """An operator changes how many tokens a step has, up to those that it had first."""

    max_step_tokens: int


Action = Arrive | Cancel | Ticks | LoseGroup | Pin | Unload | Want | Reshare | Relimit


@dataclass(frozen=True)
class Story:
    """A server and what happens to it.

    shapes: what each adapter takes. failing: adapters whose first staging fails. delays: ticks
    that staging takes, per adapter. copies: ticks that a fill takes beyond the first, likewise.
    shares: the shares at first. merges: adapters that are made of others. making: ticks
    that a matcher takes. wear: after how many tokens one's lexer meets its limits.
    meanwhile: by tick, what happens while that tick's plan is in flight.
    """

    capacity: Capacity
    limits: Limits
    actions: tuple[Action, ...]
    shapes: dict[AdapterKey, AdapterShape] = field(default_factory=dict)
    failing: frozenset[AdapterKey] = frozenset()
    delays: dict[AdapterKey, int] = field(default_factory=dict)
    copies: dict[AdapterKey, int] = field(default_factory=dict)
    shares: dict[AdapterKey | None, AdapterShare] = field(default_factory=dict)
    merges: dict[AdapterKey, tuple[AdapterKey, ...]] = field(default_factory=dict)
    making: int = 0
    wear: int = 1000
    meanwhile: dict[int, Action] = field(default_factory=dict)

    def all_shares(self) -> list[AdapterShare]:
        """Every share of any time."""
        actions = (*self.actions, *self.meanwhile.values())
        later = [action.shares for action in actions if isinstance(action, Reshare)]
        return [share for shares in (self.shares, *later) for share in shares.values()]


def keys(count: int) -> list[AdapterKey]:
    """The adapters 1 .. count."""
    return [AdapterKey(index) for index in range(1, count + 1)]


@st.composite
def capacities(draw: st.DrawFn) -> Capacity:
    """Ranks so small that everything runs short; mostly a request or two fit."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    capacity = st.builds(
        Capacity,
        num_blocks=st.integers(10, 70).map(lambda tokens: -(-tokens // block_size)),
        block_size=st.just(block_size),
        projections=st.just(PROJECTIONS),
        adapter_pages=st.integers(2, 5),
        adapter_slots=st.integers(1, 3),
        rope_sets=st.none() | st.builds(RopeSets, st.integers(1, 20), st.booleans()),
        host_bytes=st.sampled_from([30, 60, 1000]),
        max_total_tokens=st.just(40),
        kv_groups=st.one_of(st.just(()), kv_groups(block_size)),
        kept_states=st.one_of(st.none(), st.none(), st.integers(0, 3)),
        kept_after=st.sampled_from([1, 4, 12]),
    )
    found = draw(capacity)
    # A state cannot go back behind a wrong draft.
    return msgspec.structs.replace(found, drafts=found.kept_states is None)


@st.composite
def kv_groups(draw: st.DrawFn, block_size: int) -> tuple[KvGroup, ...]:
    """Up to three groups; a block of some holds more tokens than the smallest."""
    larger = draw(st.sampled_from([1, 2, 3]))
    sizes = st.sampled_from([block_size, block_size * larger])
    window = st.integers(1, 9)
    group = st.one_of(
        st.builds(KvGroup, sizes),
        st.builds(KvGroup, sizes, window=window),
        st.builds(KvGroup, sizes, chunk=window.map(lambda blocks: blocks * block_size * larger)),
    )
    first = st.one_of(
        st.builds(KvGroup, st.just(block_size)),
        st.builds(KvGroup, st.just(block_size), window=window),
    )
    others = draw(st.lists(group, max_size=2))
    return (draw(first), *others)


def limits() -> st.SearchStrategy[Limits]:
    """Budgets from one token a step up, one or two steps in flight."""
    return st.builds(
        Limits,
        max_step_tokens=st.integers(1, 24),
        max_mixed_prompt_tokens=st.sampled_from([None, 1, 5]),
        max_running=st.integers(1, 6),
        max_queued=st.just(1000),
        prefix_caching=st.booleans(),
        steps_ahead=st.sampled_from([1, 2, 2]),
        quantum_tokens=st.sampled_from([1, 8, 50]),
        patience_steps=st.sampled_from([0, 3, 10]),
        slice_steps=st.sampled_from([1, 4, 128]),
        max_matchers=st.sampled_from([64, 1, 2]),
    )


def shapes() -> st.SearchStrategy[AdapterShape]:
    """Adapters of mixed ranks; some can never be loaded."""
    pages = st.integers(0, 3)
    return st.builds(AdapterShape, st.tuples(pages, pages), st.integers(5, 25))


def prompts() -> st.SearchStrategy[tuple[int, ...]]:
    """Prompts of which many share their beginning."""
    shared = st.integers(0, 12).map(lambda length: tuple(i % 5 for i in range(length)))
    own = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6).map(tuple)
    return st.tuples(shared, own).map(lambda parts: (*parts[0], *parts[1]))


def stoppings() -> st.SearchStrategy[Stopping]:
    """Short budgets, sometimes none at all, sometimes with a stop token or with a minimum."""
    return st.builds(
        Stopping,
        max_new_tokens=st.integers(0, 12),
        stop_token_ids=st.sampled_from([(), (3,), (3, 7)]),
        min_new_tokens=st.sampled_from([0, 0, 3]),
    )


def adapter_choices(count: int) -> st.SearchStrategy[st.SearchStrategy[AdapterKey | None]]:
    """Which adapters requests use: base only, identical, distinct or uniform, Zipf, skewed."""
    known = keys(count)
    zipf = [key for rank, key in enumerate(known, 1) for _ in range(12 // rank)]
    skewed: list[AdapterKey | None] = [*([known[0]] * 8), None, *known[1:]]
    return st.sampled_from(
        [
            st.none(),
            st.just(known[0]),
            st.sampled_from(known),
            st.sampled_from([None, *known]),
            st.sampled_from(zipf),
            st.sampled_from(skewed),
        ]
    )


def adapter_shares(count: int) -> st.SearchStrategy[dict[AdapterKey | None, AdapterShare]]:
    """Mostly equal shares; some with caps, rates of a few tokens a step, other priorities."""
    share = st.builds(
        AdapterShare,
        weight=st.sampled_from([1.0, 0.01, 3.0]),
        max_concurrent=st.sampled_from([None, None, 1, 2]),
        tokens_per_second=st.sampled_from([None, None, 2.0, 7.5]),
        priority=st.sampled_from([0, 0, -2, 3]),
    )
    known: list[AdapterKey | None] = [None, *keys(count)]
    return st.one_of(st.just({}), st.dictionaries(st.sampled_from(known), share, max_size=3))


def merges(count: int) -> st.SearchStrategy[dict[AdapterKey, tuple[AdapterKey, ...]]]:
    """The last two adapters may be merges of some of the others."""
    *plain, first, second = keys(count)
    parts = st.lists(st.sampled_from(plain), min_size=1, max_size=3, unique=True).map(tuple)
    return st.one_of(st.just({}), st.fixed_dictionaries({first: parts, second: parts}))


@st.composite
def stories(draw: st.DrawFn, num_adapters: int = 5) -> Story:
    """A server, its adapters, and arrivals among everything that can go wrong."""
    adapters = draw(adapter_choices(num_adapters))
    again = st.sampled_from(draw(st.lists(prompts(), min_size=1, max_size=2)))
    further = st.tuples(again, st.lists(st.integers(0, VOCABULARY - 1), max_size=6).map(tuple))
    prompt = st.one_of(prompts(), again, further.map(lambda parts: (*parts[0], *parts[1])))
    known = st.sampled_from(keys(num_adapters))
    active_from = st.one_of(st.just(0), st.just(0), st.integers(1, 18), st.just(NEVER_ACTIVE))
    arrive = st.builds(
        Arrive,
        prompt=prompt,
        stopping=stoppings(),
        adapter=adapters,
        logprobs=st.booleans(),
        stop_at=st.one_of(st.none(), st.none(), st.integers(0, 6)),
        late=st.integers(0, 2),
        scored=st.booleans(),
        constraint=st.sampled_from(["", "", "a", "b", "c"]),
        background=st.sampled_from([False, False, True]),
        active_from=active_from,
        salt=st.sampled_from([b"", b"", b"", b"own"]),
    )
    embed = st.builds(
        Arrive, prompt=prompt, stopping=st.just(Stopping(0)), adapter=adapters,
        scored=st.booleans(), pooled=st.just(True), active_from=active_from,
    )  # fmt: skip
    ticks = st.builds(Ticks, st.integers(1, 4))
    rare = st.one_of(
        st.builds(Cancel, st.integers(0, 20)),
        st.builds(Pin, known, st.booleans()),
        st.builds(Unload, known),
        st.builds(LoseGroup),
        st.builds(Want, known),
        st.builds(Reshare, adapter_shares(num_adapters)),
        st.builds(Relimit, st.integers(1, 24)),
    )
    action = st.one_of(arrive, arrive, arrive, arrive, embed, ticks, rare)
    num_actions = draw(st.integers(1, 30))  # A list of its own choice stays too short.
    return Story(
        capacity=draw(capacities()),
        limits=draw(limits()),
        actions=tuple(draw(st.lists(action, min_size=num_actions, max_size=num_actions))),
        shapes={key: draw(shapes()) for key in keys(num_adapters)},
        failing=draw(st.frozensets(known, max_size=1)),
        delays={key: draw(st.integers(0, 9)) for key in keys(num_adapters)},
        copies={key: draw(st.sampled_from([0, 0, 1, 5])) for key in keys(num_adapters)},
        shares=draw(adapter_shares(num_adapters)),
        merges=draw(merges(num_adapters)),
        making=draw(st.sampled_from([0, 1, 4])),
        wear=draw(st.sampled_from([1, 6, 20, 1000])),
        meanwhile=draw(st.dictionaries(st.integers(1, 40), rare, max_size=6)),
    )
