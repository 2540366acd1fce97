"""BlockPool: who owns which block of the KV cache, by reference counts."""

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPool:
    """Block indices 0 .. num_blocks - 1: free, used (counted), or idle with content worth keeping.

    Idle blocks are given out when nothing is free, least recently used first; `forget` is then
    told which content is gone.
    """

    def __init__(self, num_blocks: int, forget: Callable[[int], None]) -> None:
        """Start with all blocks free."""
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

    @property
    def num_used(self) -> int:
        """How many blocks somebody holds."""
        return self.num_blocks - self.available

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks that nobody holds."""
        assert count <= self.available, (count, self.available)
        taken = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._refs[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more; idle ones come back into use with their content."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._idle[block]
            self._refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Let go of a chain of blocks, its end first, so that the least recent idle is a leaf."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            assert self._refs[block] >= 0, f"block {block} released twice"
            if self._refs[block] > 0:
                continue
            if self._kept[block]:
                self._idle[block] = None
            else:
                self._free.append(block)

    def keep(self, block: int) -> None:
        """From now on the content of a held block outlives its holders."""
        assert self._refs[block] > 0, f"block {block} is not held"
        self._kept[block] = True

    def is_idle(self, block: int) -> bool:
        """Whether nobody holds the block although its content is kept."""
        return self._refs[block] == 0 and bool(self._kept[block])

    def check(self, holders: Iterable[list[int]]) -> None:
        """Assert that each block is in one place and counted as often as `holders` hold it."""
        refs = [0] * self.num_blocks
        for blocks in holders:
            assert len(set(blocks)) == len(blocks), f"a block twice in one table: {blocks}"
            for block in blocks:
                refs[block] += 1
        assert refs == self._refs, "reference counts differ from the blocks held"
        unheld = {block for block, count in enumerate(refs) if count == 0}
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        assert set(self._free).isdisjoint(self._idle), "a block is free and idle"
        assert unheld == set(self._free) | set(self._idle), "a block is lost or in two places"
        assert all(self._kept[block] for block in self._idle), "an idle block without content"
        assert not any(self._kept[block] for block in self._free), "a free block with content"

    def _evict(self) -> int:
        """Give up the content that was not used for the longest time."""
        block, _ = self._idle.popitem(last=False)
        self._kept[block] = False
        self._forget(block)
        return block
