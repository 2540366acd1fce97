"""KV groups: layers that hold keys and values in blocks of one shape, and need them as long.

All groups take their blocks from one pool, and every block has the same bytes. So a group of few
or narrow layers has more tokens in a block than another one.
"""

import msgspec


class KvGroup(msgspec.Struct, frozen=True):
    """How long the layers of one group need the keys and values of a position.

    block_size: tokens of a block.
    window: how many of the last tokens a token sees, itself included; None: all.
    chunk: tokens are in chunks of so many, and see those of their own chunk alone; None: no chunks.
    """

    block_size: int
    window: int | None = None
    chunk: int | None = None

    @property
    def forgets(self) -> bool:
        """Whether early positions are not needed any more once a sequence has grown."""
        return self.window is not None or self.chunk is not None

    def first_seen(self, position: int) -> int:
        """The earliest position that the token at `position`, or any later one, sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return 0 if self.chunk is None else position // self.chunk * self.chunk

    def first_block(self, position: int) -> int:
        """The index of the first block that is needed from this position on."""
        return self.first_seen(position) // self.block_size if self.forgets else 0

    def blocks(self, tokens: int) -> int:
        """Blocks of a sequence, those that are not needed any more included."""
        return -(-tokens // self.block_size)

    def most_held(self, tokens: int, ahead: int = 0) -> int:
        """The most blocks that a sequence of so many tokens holds at once.

        ahead: positions that are computed beside the one that is, and before any block is freed.
        """
        span = self.window if self.chunk is None else self.chunk
        if span is None:
            return self.blocks(tokens)
        return min(self.blocks(tokens), self.blocks(span - 1 + ahead) + 1)


def held_tokens(groups: tuple[KvGroup, ...], num_blocks: int) -> int:
    """How many tokens `num_blocks` hold of sequences that need all of their blocks."""
    longest = max(group.block_size for group in groups)
    each = sum(longest // group.block_size for group in groups)
    return num_blocks // each * longest


def blocks_of(groups: tuple[KvGroup, ...], tokens: int) -> int:
    """The blocks that hold so many tokens of sequences that need all of theirs."""
    longest = max(group.block_size for group in groups)
    return tokens // longest * sum(longest // group.block_size for group in groups)
