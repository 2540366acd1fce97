"""KvTables: the block tables of requests, one for each KV group, over one pool of blocks.

A group that forgets (a window, chunks) gives blocks back while their request runs: those that no
later position needs, once every step that read them was applied.
"""

from configs.wire.plan import Capacity
from scheduler.kv.kept_states import KeptStates
from scheduler.kv.prefix_cache import FREED, CachedPrefix, PrefixCache
from scheduler.request import Request


class KvTables:
    """Grows and frees requests' tables. prefix: finds blocks by their content."""

    def __init__(self, capacity: Capacity, prefix_caching: bool, ahead: int) -> None:
        """ahead: positions that plans in flight and the next one name at most."""
        self.groups = capacity.groups
        kept = capacity.kept_states
        states = None if kept is None else KeptStates(kept, capacity.kept_after)
        self.prefix = PrefixCache(capacity.num_blocks, self.groups, prefix_caching, states)
        self.pool = self.prefix.pool
        self._ahead = ahead
        self._unit = capacity.block_size
        self._sizes = [group.block_size for group in self.groups]
        self._longest = max(self._sizes)
        # Blocks of all groups that hold so many tokens.
        self._each = sum(self._longest // size for size in self._sizes)
        self._forgetting = [index for index, group in enumerate(self.groups) if group.forgets]

    def lacking(self, request: Request, end: int) -> int:
        """How many blocks its tables lack to hold the positions below `end`."""
        count = 0
        for size, table in zip(self._sizes, request.tables, strict=True):
            count += -(-end // size) - len(table)
        return count

    def reach(self, request: Request, end: int) -> int:
        """The last end up to `end` for which there are blocks."""
        if self.lacking(request, end) <= self.pool.available:
            return end
        longest = -(-end // self._longest) * self._longest
        short = self.lacking(request, longest) - self.pool.available
        longest -= max(0, short // self._each) * self._longest
        while self.lacking(request, longest) > self.pool.available:
            longest = (longest - 1) // self._unit * self._unit
        return min(end, longest)

    def extend(self, request: Request, end: int) -> list[int]:
        """Let its tables hold the positions below `end`; returns the new blocks, group by group."""
        fresh: list[int] = []
        for size, table in zip(self._sizes, request.tables, strict=True):
            new = self.pool.allocate(-(-end // size) - len(table))
            table += new
            fresh += new
        request.covered = -(-end // self._unit) * self._unit
        return fresh

    def take(self, request: Request, cached: CachedPrefix) -> None:
        """Hold the cached blocks for a request, which continues behind them."""
        for index in range(len(self.groups)):
            self.pool.share(cached.held(index))
        request.tables = cached.tables
        request.freed = [table.count(FREED) for table in cached.tables]
        request.computed = request.scheduled = request.covered = cached.tokens
        request.registered = cached.tokens // self._unit
        request.keeps = self.prefix.to_keep(request, cached)

    def computed(self, request: Request) -> None:
        """Its full blocks can be found now; those that it needs no more are freed."""
        self.prefix.register(request)
        for index in self._forgetting:
            table, freed = request.tables[index], request.freed[index]
            first = min(self.groups[index].first_block(request.computed), len(table))
            if first > freed:
                self.pool.release(table[freed:first])
                table[freed:first] = [FREED] * (first - freed)
                request.freed[index] = first

    def free(self, request: Request) -> None:
        """Give all its blocks back."""
        for table in self.held(request):
            self.pool.release(table)
        request.tables, request.freed, request.covered = [], [], 0

    def held(self, request: Request) -> list[list[int]]:
        """The blocks that it holds in each group."""
        return [table[freed:] for table, freed in zip(request.tables, request.freed, strict=True)]

    def to_join(self, request: Request, cached: CachedPrefix) -> int:
        """The blocks that its known tokens take beside those cached ones that others hold."""
        tokens, count = len(request.tokens), 0
        for index, group in enumerate(self.groups):
            new = group.blocks(tokens) - len(cached.tables[index])
            count += min(new, group.most_held(tokens, self._ahead))
            count += sum(1 for block in cached.held(index) if self.pool.is_idle(block))
        return count

    def to_grow(self, request: Request) -> int:
        """The blocks that its known tokens will still take."""
        tokens, count = request.total, 0
        for index, group in enumerate(self.groups):
            new = group.blocks(tokens) - len(request.tables[index])
            held = len(request.tables[index]) - request.freed[index]
            count += min(new, max(0, group.most_held(tokens, self._ahead) - held))
        return count
