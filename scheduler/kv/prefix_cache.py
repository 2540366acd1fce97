"""PrefixCache: which blocks hold which tokens, so that they are not computed again.

The name of a full block is blake2b over the name of the block before it and its own token ids.
The chain starts at a `PrefixKey`, which says what else shapes keys and values, and which callers
may share them. Blocks before an activated adapter's first position are the base model's, in its
chain; from there on the adapter and that position are in the names. So equal names mean equal
content. Several KV groups have one chain, of blocks of the smallest size; a larger block has the
name of the last small one in it.
"""

import struct
from array import array
from hashlib import blake2b
from typing import NamedTuple

from configs.kv_groups import KvGroup
from configs.wire.adapters import AdapterKey
from scheduler.kv.block_pool import BlockPool
from scheduler.kv.kept_states import KeptStates
from scheduler.request import Request

DIGEST_BYTES = 16

FREED = -1
"""In a table: a block that is not held, for no later position needs it."""


class CachedPrefix(NamedTuple):
    """What a request need not compute: so many tokens, in blocks of each KV group.

    known: the tokens of which blocks are known; more than `tokens` where no states are kept behind
    them. state: the number of those behind `tokens`; -1 without any.
    """

    tokens: int
    tables: list[list[int]]
    known: int
    state: int

    def held(self, group: int) -> list[int]:
        """The blocks of a group that later positions need."""
        return [block for block in self.tables[group] if block != FREED]


class PrefixKey(NamedTuple):
    """What must be equal for two requests to share blocks, beside the tokens.

    Nothing else decides it: what differs by KV group is found by group.
    salt: the caller's (`GenerateRequest.cache_salt`).
    rope_set: that of position 0, which decides those of later positions (configs/rope_sets.py).
    adapter: that of position 0: its key, one for each content digest; None is the base model.
    """

    salt: bytes
    rope_set: int
    adapter: AdapterKey | None

    @classmethod
    def of(cls, request: Request) -> "PrefixKey":
        """The key of a request's blocks."""
        adapter = None if request.active_from > 0 else request.adapter
        return cls(request.cache_salt, request.rope_set, adapter)

    @property
    def root(self) -> bytes:
        """Where the chains of this key start."""
        fixed = struct.pack("<qq", self.rope_set, self.adapter or 0)
        return blake2b(fixed + self.salt, digest_size=DIGEST_BYTES).digest()


def extend_chain(request: Request, num_blocks: int, block_size: int) -> list[bytes]:
    """The digests of the request's first `num_blocks` full blocks; computes missing ones."""
    # They depend on the tokens and the key alone, so a preempted request keeps them.
    digests = request.digests
    assert num_blocks * block_size <= len(request.tokens), (num_blocks, len(request.tokens))
    for index in range(len(digests), num_blocks):
        parent = digests[-1] if digests else PrefixKey.of(request).root
        if request.active_from and index == request.active_from // block_size:
            parent += struct.pack("<qq", request.adapter or 0, request.active_from)
        ids = array("q", request.tokens[index * block_size : (index + 1) * block_size])
        digests.append(blake2b(parent + ids.tobytes(), digest_size=DIGEST_BYTES).digest())
    return digests


class PrefixCache:
    """Digest → block for full blocks, over a pool that evicts the idle ones."""

    def __init__(
        self,
        num_blocks: int,
        groups: tuple[KvGroup, ...],
        enabled: bool,
        states: KeptStates | None = None,
    ) -> None:
        """If not enabled, nothing is found and nothing is kept.

        states: of models that go on from kept states alone.
        """
        self.enabled = enabled
        self.states = states
        self.block_size = min(group.block_size for group in groups)
        self.pool = BlockPool(num_blocks, self._forget)
        self._groups = groups
        self._strides = [group.block_size // self.block_size for group in groups]
        # A prefix ends where a block of every group does.
        self._step = max(self._strides)
        # Behind a digest: equal ones of several groups name several blocks.
        self._marks = [bytes([index]) if index else b"" for index in range(len(groups))]
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        """How many blocks can be found."""
        return len(self._block_of)

    def match(self, request: Request) -> CachedPrefix:
        """The longest known prefix of the request; at least one token is left to compute.

        Of a group that forgets, only the blocks are needed that the next position sees. Nothing is
        found for a request with a report that needs its whole prompt.
        """
        # The last token is computed in any case: its logits give the next one.
        limit = (len(request.tokens) - 1) // self.block_size
        if not self.enabled or request.needs_whole_prompt:
            limit = 0
        digests = extend_chain(request, limit, self.block_size)
        end = limit - limit % self._step
        tables = []
        for index, group in enumerate(self._groups):
            found = self._known(index, digests, end)
            if not group.forgets:
                end = min(end, len(found) * self._strides[index])
                end -= end % self._step
            tables.append(found)
        known = end = self._common_end(tables, end)
        state = -1
        if self.states is not None:
            end = self._kept_end(self.states, tables, digests, end)
            state = self.states.use(digests[end - 1]) if end else -1
        size = self.block_size
        return CachedPrefix(end * size, self._cut(tables, end), known * size, state)

    def to_keep(self, request: Request, cached: CachedPrefix) -> list[int]:
        """The positions behind `cached` before which the request's states are worth a copy.

        The last one from which the same tokens could go on, and where others went another way.
        """
        if self.states is None or not self.enabled:
            return []
        unit = self._step * self.block_size
        last = (len(request.tokens) - 1) // unit * unit
        least = cached.tokens + self.states.least_tokens
        return sorted({at for at in (cached.known, last) if at >= least})

    def keep(self, request: Request, end: int) -> tuple[tuple[int, int], ...]:
        """(position, number) of the states that a row up to `end` keeps."""
        found = []
        while request.keeps and request.keeps[0] <= end:
            at = request.keeps.pop(0)
            blocks = at // self.block_size
            assert self.states is not None
            number = self.states.keep(extend_chain(request, blocks, self.block_size)[blocks - 1])
            if number is not None:
                found.append((at, number))
        return tuple(found)

    def register(self, request: Request) -> None:
        """Make the request's full blocks of known tokens findable, up to `scheduled`.

        A row that finds them is in the same step or a later one, and a layer stores all keys and
        values of a step before it reads any.
        """
        full = min(request.scheduled, len(request.tokens)) // self.block_size
        before = request.registered
        if full <= before:
            return
        request.registered = full
        if not self.enabled:
            return
        digests = extend_chain(request, full, self.block_size)
        for index, stride in enumerate(self._strides):
            mark, table = self._marks[index], request.tables[index]
            for at in range(before // stride, full // stride):
                self._register(digests[(at + 1) * stride - 1] + mark, table[at])

    def check(self) -> None:
        """Assert that both directions of the map agree."""
        assert len(self._block_of) == len(self._digest_of)
        for digest, block in self._block_of.items():
            assert self._digest_of[block] == digest, block
        if self.states is not None:
            self.states.check()

    def _known(self, index: int, digests: list[bytes], end: int) -> list[int]:
        """A group's blocks below `end`; of one that forgets, FREED where they are not known."""
        stride, mark, find = self._strides[index], self._marks[index], self._block_of.get
        forgets = self._groups[index].forgets
        found = []
        for at in range(stride - 1, end, stride):
            block = find(digests[at] + mark, FREED)
            if block == FREED and not forgets:
                break
            found.append(block)
        return found

    def _kept_end(
        self, states: KeptStates, tables: list[list[int]], digests: list[bytes], end: int
    ) -> int:
        """The last common end up to `end` behind which states are kept."""
        # A long prompt that waits is looked for in each step, and few of its blocks have states.
        for at in range(end, 0, -self._step):
            if digests[at - 1] in states and self._common_end(tables, at) == at:
                return at
        return 0

    def _common_end(self, tables: list[list[int]], end: int) -> int:
        """The last end up to `end` at which every group that forgets has what it needs."""
        while True:
            before = end
            for index, group in enumerate(self._groups):
                if group.forgets:
                    end = self._own_end(group, self._strides[index], tables[index], end)
            if end == before:
                return end

    def _own_end(self, group: KvGroup, stride: int, table: list[int], end: int) -> int:
        """The same for one group."""
        while end:
            first = group.first_block(end * self.block_size)
            needed = range(end // stride - 1, first - 1, -1)
            missing = next((at for at in needed if table[at] == FREED), None)
            if missing is None:
                break
            # Every later end up to here needs that block too.
            end = missing * stride - missing * stride % self._step
        return end

    def _cut(self, tables: list[list[int]], end: int) -> list[list[int]]:
        """The tables up to `end`, without what is not needed there."""
        cut = []
        for group, stride, table in zip(self._groups, self._strides, tables, strict=True):
            first = group.first_block(end * self.block_size)
            cut.append([FREED] * first + table[first : end // stride])
        return cut

    def _register(self, digest: bytes, block: int) -> None:
        # Two requests may compute the same tokens at once: the first block stays the one found.
        if block != FREED and digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest
            self.pool.keep(block)

    def _forget(self, block: int) -> None:
        del self._block_of[self._digest_of.pop(block)]
