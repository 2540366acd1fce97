"""How the kernels cut a step: tables found with `python -m benchmarks.kernels --tune`."""

from dataclasses import dataclass

import torch

ANY = 2**31 - 1
"""The largest number of tokens: the last form of a table takes what the others do not."""


@dataclass(frozen=True)
class Blocks:
    """How one kernel works: columns a program takes at once, its warps, stages, registers.

    stages: depth of the pipeline that loads ahead. registers: limit a thread; None: as needed.
    """

    columns: int
    warps: int
    stages: int = 1
    registers: int | None = None


@dataclass(frozen=True)
class Form:
    """The kernels' sizes for steps of up to `max_tokens` tokens.

    tile_tokens: tokens of one adapter that a program serves. rank_rows: rank rows it takes at
    once, a multiple of 16; more_rows: of an adapter that has more than those. splits: the most
    parts that the shrink cuts x's width into, a power of two. programs: about how many of a launch
    are enough, 16 for each multiprocessor: a captured launch must hold for the mix with the most
    tiles, programs without work are not free, so beyond this number each takes several tiles in
    turn. summed: whether the shrink adds its partial sums, or leaves that to the expand.
    """

    max_tokens: int
    tile_tokens: int
    rank_rows: int
    splits: int
    shrink: Blocks
    expand: Blocks
    programs: int = 2048
    summed: bool = False
    more_rows: int = 16

    def widest(self, max_rank: int) -> int:
        """Return the most rank rows that a program takes at once where no rank is larger."""
        return self.rank_rows if max_rank <= self.rank_rows else self.more_rows


HALF = (
    Form(64, 8, 16, 16, Blocks(128, 2, 4), Blocks(512, 8), programs=1024, more_rows=32),
    Form(128, 8, 16, 16, Blocks(128, 2, 4), Blocks(512, 8), programs=1024),
    Form(512, 8, 16, 8, Blocks(128, 2, 4), Blocks(256, 4, registers=80)),
    Form(ANY, 16, 16, 4, Blocks(128, 2, 4), Blocks(256, 4, registers=80), 4096, summed=True),
)
"""bfloat16 and float16. Small tiles while weights are the bytes, large ones when tokens are;
never so large that the few tokens of a decode row beside a prompt leave most of theirs empty."""

FLOAT32 = (
    Form(512, 16, 16, 8, Blocks(64, 4, 2), Blocks(64, 4)),
    Form(ANY, 32, 16, 4, Blocks(64, 4, 2), Blocks(64, 4)),
)
"""float32 without tensor cores: for comparison with the reference, not for speed."""


def forms_of(dtype: torch.dtype) -> tuple[Form, ...]:
    """Return the table of a type, by rising `max_tokens`."""
    return FLOAT32 if dtype == torch.float32 else HALF
