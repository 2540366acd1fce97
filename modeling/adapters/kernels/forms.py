"""How the kernels cut a step: tables found with `python -m benchmarks.kernels --tune`."""

from dataclasses import dataclass, replace

import torch

ANY = 2**31 - 1
"""The largest number of tokens: the last form of a table takes what the others do not."""


MOST_PARTS = 16
"""Of x for all targets of a launch: each takes memory for every token."""


@dataclass(frozen=True)
class Blocks:
    """How one kernel works.

    columns: columns that a program takes at once.
    warps: of a program.
    stages: depth of the pipeline that loads ahead.
    registers: limit for each thread; None: as many as the compiler wants.
    """

    columns: int
    warps: int
    stages: int = 1
    registers: int | None = None


@dataclass(frozen=True)
class Form:
    """The kernels' sizes for steps of up to `max_tokens` tokens.

    tile_tokens: tokens of one adapter that a program serves.
    rank_rows: LoRA rank rows that a program takes at once, a multiple of 16.
    splits: the most parts that the shrink cuts x's width into, a power of two.
    part: about how many columns a part has, if `splits` parts would have more; a launch's targets
    then have up to MOST_PARTS together. None: there are never more than `splits`.
    shrink, expand: the two kernels.
    programs: about how many of a launch are enough, 16 for each multiprocessor. A captured launch
    must hold for the mix with the most tiles, and programs without work are not free: beyond this
    number each takes several tiles.
    summed: whether the shrink adds its partial sums, or leaves that to the expand.
    more_rows: rank rows taken at once of an adapter that has more than `rank_rows`.
    gated: how the kernel of gated.py joins deltas and silu(gate) * up, which needs partial
    sums that the shrink has added. None: it does not run.
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
    gated: Blocks | None = None
    part: int | None = None

    def splits_of(self, inputs: int, targets: int) -> int:
        """Return the most parts of an x of so many columns, for each of a launch's targets."""
        if self.part is None:
            return self.splits
        wanted = 1 << (-(-inputs // self.part) - 1).bit_length()
        most = 1 << ((MOST_PARTS // targets).bit_length() - 1)
        return max(self.splits, min(wanted, most))

    def widest(self, max_rank: int) -> int:
        """Return the most rank rows that a program takes at once where no rank is larger."""
        return self.rank_rows if max_rank <= self.rank_rows else self.more_rows


_MANY = Form(
    *(ANY, 16, 16, 4, Blocks(128, 2, 4), Blocks(256, 4, registers=80), 4096),
    summed=True,
    gated=Blocks(128, 2, registers=168),
)
HALF = (
    Form(64, 8, 16, 16, Blocks(128, 2, 4), Blocks(512, 8), programs=1024, more_rows=32),
    Form(128, 8, 16, 16, Blocks(128, 2, 4), Blocks(512, 8, registers=80), programs=1024),
    Form(512, 8, 16, 8, Blocks(128, 2, 4), Blocks(256, 4, registers=80)),
    # Tokens that decode beside a prompt: few tiles of many adapters.
    replace(_MANY, max_tokens=1024, part=1024),
    _MANY,
)
"""bfloat16 and float16. Small tiles while most of the bytes are weights, large ones when they are
tokens; never so large that a decode row's few tokens leave most of a tile empty."""

FLOAT32 = (
    Form(512, 16, 16, 8, Blocks(64, 4, 2), Blocks(64, 4)),
    Form(ANY, 32, 16, 4, Blocks(64, 4, 2), Blocks(64, 4)),
)
"""float32 without tensor cores: for comparison with the reference, not for speed."""


def forms_of(dtype: torch.dtype) -> tuple[Form, ...]:
    """Return the table of a type, by rising `max_tokens`."""
    return FLOAT32 if dtype == torch.float32 else HALF
