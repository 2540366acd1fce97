"""Banks loaded by hand, and the equation of adapters/product.py in float64."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from modeling.adapters.bank import PAGE_ROWS, AdapterBank, BankSize
from modeling.adapters.product import OutputSlice
from modeling.adapters.projection import Projection, ProjectionKind

NUM_LAYERS = 2
OUTPUT_ROWS = ((), (0,), (), (0, 1), (), (1,))
"""The output rows of adapters, by turns: 0 is the scale, 1 the bias."""

MAX_RANK = 128


@dataclass(frozen=True)
class Case:
    """A layer's input and the targets that share it."""

    inputs: int
    targets: tuple[OutputSlice, ...]
    outputs: int


def fill_bank(
    shapes: Sequence[tuple[int, int]],
    ranks: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    max_rank: int = MAX_RANK,
    kinds: Mapping[int, ProjectionKind] = MappingProxyType({}),
) -> AdapterBank:
    """A bank of (in, out) projections with adapters on scattered pages; all else is NaN.

    ranks: int32 [slots, projections, layers]. Every second adapter has no output rows, the others
    have scales, biases or both. kinds: of projections that are not linear.
    """
    projections = [
        Projection(
            name=f"p{i}",
            module=f"m.{{layer}}.p{i}",
            in_features=k,
            out_features=n,
            inputs=((0, k),),
            outputs=((0, n),),
            num_layers=NUM_LAYERS,
            kind=kinds.get(i, ProjectionKind.LINEAR),
        )
        for i, (k, n) in enumerate(shapes)
    ]
    most = [int(part.max()) for part in ranks]
    behind = [(OUTPUT_ROWS[slot % len(OUTPUT_ROWS)]) for slot in range(len(most))]
    counts = [-(-(rank + len(rows)) // PAGE_ROWS) for rank, rows in zip(most, behind, strict=True)]
    size = BankSize(sum(counts) + 3, len(ranks), max_rank, 2**30)
    bank = AdapterBank(projections, size, dtype, device)
    order = random.Random(7).sample(range(size.pages), size.pages)
    for pool in bank.pools:
        pool.a.fill_(float("nan"))
        pool.bt.fill_(float("nan"))
    for slot, count in enumerate(counts):
        pages = torch.tensor([order.pop() for _ in range(count)], device=device)
        named = min(count, bank.page_table.shape[2])
        bank.page_table[slot, :, :named] = pages[:named]
        for at, kind in enumerate(behind[slot], start=most[slot]):
            own, within = int(pages[at // PAGE_ROWS]), at % PAGE_ROWS
            first = own * NUM_LAYERS * PAGE_ROWS + within
            bank.output_rows[slot, :, kind] = first
            for pool in bank.pools:
                values = torch.randn(NUM_LAYERS, pool.bt.shape[3], device=device) / 4
                pool.bt[own, :, within] = values.to(dtype)
    bank.ranks.copy_(ranks)
    generator = torch.Generator(device).manual_seed(3)
    for slot, projection, layer in torch.cartesian_prod(*map(torch.arange, ranks.shape)).tolist():
        rank = int(ranks[slot, projection, layer])
        pool, (page, row) = bank.pools[projection], rows_of(bank, slot, projection, rank)
        k, n = shapes[projection]
        a = torch.randn(rank, k, generator=generator, device=device) * k**-0.5
        bt = torch.randn(rank, n, generator=generator, device=device) * max(rank, 1) ** -0.5
        pool.a[page, layer, row] = a.to(dtype)
        pool.bt[page, layer, row] = bt.to(dtype)
    return bank


def rows_of(bank: AdapterBank, slot: int, projection: int, rank: int) -> tuple[Tensor, Tensor]:
    """(pages, rows within them) of an adapter's rank rows."""
    r = torch.arange(rank, device=bank.page_table.device)
    return bank.page_table[slot, projection, r // PAGE_ROWS].long(), r % PAGE_ROWS


def changes(
    bank: AdapterBank, slot: int, projection: int, layer: int
) -> tuple[Tensor | float, Tensor | float]:
    """An adapter's scale less 1, and its bias, in float64; 0 without."""
    pool = bank.pools[projection].bt.flatten(0, 2).double()
    rows = bank.output_rows[slot, projection].tolist()
    found = [pool[row + layer * PAGE_ROWS] if row >= 0 else 0.0 for row in rows]
    return found[0], found[1]


def truth(
    bank: AdapterBank, y: Tensor, x: Tensor, layer: int, targets: Sequence[OutputSlice], of: Tensor
) -> Tensor:
    """y, changed by output rows, plus the deltas, in float64; of: each token's slot, on the CPU."""
    result = y.double()
    for slot in sorted(set(of.tolist())):
        if slot < 0:
            continue
        tokens = (of == slot).nonzero()[:, 0].to(x.device)
        for target in targets:
            rank = int(bank.ranks[slot, target.projection, layer])
            page, row = rows_of(bank, slot, target.projection, rank)
            pool = bank.pools[target.projection]
            a, bt = pool.a[page, layer, row].double(), pool.bt[page, layer, row].double()
            columns = slice(target.offset, target.offset + bt.shape[1])
            if rank:
                scale, bias = changes(bank, slot, target.projection, layer)
                result[tokens, columns] += scale * result[tokens, columns] + bias
            result[tokens, columns] += x[tokens].double() @ a.T @ bt
    return result
