"""BlockPool: which blocks of the KV cache are in use, by reference counts."""

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """Block indices 0 .. num_blocks - 1: free, used (counted), or idle with content that is kept.

    When no block is free, idle ones are given out, least recently used first, and
    `forget` is called with each of them.
    """

    def __init__(self, num_blocks: int, forget: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._forget = forget
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self._kept = bytearray(num_blocks)
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """How many blocks `allocate` could give."""
        return len(self._free) + len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks that no request holds."""
        assert count <= self.available, (count, self.available)
        taken = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more; idle ones are in use again with their content."""
        for block in blocks:
            if self._refs[block] == 0:  # Idle until now: it must not be evicted any more.
                del self._idle[block]
            self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Give a chain of blocks back, its end first: a prefix must outlive what continues it."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} released twice"
            if self._refs[block] > 0:
                continue
            # The most recently used idle block is the last one.
            if self._kept[block]:
                self._idle[block] = None
            else:
                self._free.append(block)

    def keep(self, block: int) -> None:
        """Keep the content of a held block after its last holder has released it."""
        assert self._refs[block] > 0, f"block {block} is not held"
        self._kept[block] = True

    def is_idle(self, block: int) -> bool:
        """Whether no request holds the block although its content is kept."""
        return self._refs[block] == 0 and bool(self._kept[block])

    def check(self, holders: Iterable[list[int]]) -> None:
        """Assert that each block is in one state and counted as often as `holders` hold it."""
        refs = [0] * self.num_blocks
        for blocks in holders:
            assert len(set(blocks)) == len(blocks), f"a block twice in one table: {blocks}"
            for block in blocks:
                refs[block] += 1
        assert refs == self._refs, "reference counts differ from the blocks held"
        unheld = {block for block, count in enumerate(refs) if count == 0}
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert set(self._free).isdisjoint(self._idle), "a block is free and idle"
        assert unheld == set(self._free) | set(self._idle), "a block is lost or in two states"
        assert all(self._kept[block] for block in self._idle), "an idle block without content"
        assert not any(self._kept[block] for block in self._free), "a free block with content"

    def _evict(self) -> int:
        """Give up the content that was unused for the longest time."""
        block, _ = self._idle.popitem(last=False)
        self._kept[block] = False
        self._forget(block)
        return block
