"""Banks loaded by hand, and the equation of adapters/product.py in float64."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.adapters.bank import PAGE_ROWS, AdapterBank, BankSize
from modeling.adapters.product import OutputSlice
from modeling.adapters.projection import Projection

NUM_LAYERS = 2
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
) -> AdapterBank:
    """A bank of (in, out) projections with adapters on scattered pages; all else is NaN.

    ranks: int32 [slots, projections, layers].
    """
    projections = [
        Projection(f"p{i}", f"m.{{layer}}.p{i}", k, n, ((0, k),), ((0, n),), NUM_LAYERS)
        for i, (k, n) in enumerate(shapes)
    ]
    counts = [-(-int(part.max()) // PAGE_ROWS) for part in ranks]
    size = BankSize(sum(counts) + 3, len(ranks), MAX_RANK, 2**30)
    bank = AdapterBank(projections, size, dtype, device)
    order = random.Random(7).sample(range(size.pages), size.pages)
    for pool in bank.pools:
        pool.a.fill_(float("nan"))
        pool.bt.fill_(float("nan"))
    for slot, count in enumerate(counts):
        pages = torch.tensor([order.pop() for _ in range(count)], device=device)
        bank.page_table[slot, :, :count] = pages
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


def truth(
    bank: AdapterBank, y: Tensor, x: Tensor, layer: int, targets: Sequence[OutputSlice], of: Tensor
) -> Tensor:
    """y plus the deltas, in float64; of: the slot of each token, on the CPU."""
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
            result[tokens, columns] += x[tokens].double() @ a.T @ bt
    return result
