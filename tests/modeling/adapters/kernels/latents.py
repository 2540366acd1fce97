"""Adapters of a map from latents, against that map itself in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor

from modeling.adapters.bank import AdapterBank
from modeling.adapters.latents import LatentMap
from modeling.adapters.product import AdapterData
from modeling.adapters.projection import ModulePosition
from tests.modeling.adapters.loaded_bank import changes, rows_of

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 3e-3, torch.float32: 1e-5}


def latent_map(
    sizes: tuple[int, int, int, int], layer: int, dtype: torch.dtype, device: torch.device
) -> LatentMap:
    """sizes: heads, numbers of a key and of a value, of a latent."""
    heads, keys, values, latent = sizes
    weight = torch.randn(heads, keys + values, latent, device=device) * latent**-0.5
    return LatentMap(ModulePosition(0, layer), weight.to(dtype), keys)


def adapted(bank: AdapterBank, latents: LatentMap, slot: int) -> tuple[Tensor, Tensor | float]:
    """An adapter's weights W' [heads, keys + values, latent], and its bias, in float64."""
    layer, weight = latents.position.layer, latents.weight.double()
    rank = int(bank.ranks[slot, 0, layer])
    if not rank:
        return weight, 0.0
    page, row = rows_of(bank, slot, 0, rank)
    a, bt = (part[page, layer, row].double() for part in (bank.pools[0].a, bank.pools[0].bt))
    scale, bias = changes(bank, slot, 0, layer)
    flat = weight.flatten(0, 1)
    changed = flat + torch.as_tensor(scale, device=flat.device).view(-1, 1) * flat + bt.T @ a
    shaped = bias.view(weight.shape[:2]) if isinstance(bias, Tensor) else bias
    return changed.view_as(weight), shaped


def check(bank: AdapterBank, data: AdapterData, latents: LatentMap, slots: Sequence[int]) -> None:
    """Both directions of the map, for tokens of these slots (-1: base)."""
    heads, _, width = latents.weight.shape
    dtype, device, keys = latents.weight.dtype, latents.weight.device, latents.keys
    # As in a model: queries lie head by head, sums of latents in wider rows.
    q = torch.randn(heads, len(slots), keys + 8, device=device).to(dtype)
    x = q.transpose(0, 1)[..., :keys]
    wide = torch.empty(len(slots), heads, width + 8, dtype=dtype, device=device)
    sums = torch.randn(len(slots), heads, width + 8, device=device).to(dtype)[..., :width]
    queries = latents.queries(x, wide[..., :width])
    values = latents.values(sums)
    before = queries.clone(), values.clone()
    data.latent_queries(queries, x, latents)
    data.latent_values(values, sums, latents)
    for token, slot in enumerate(slots):
        if slot < 0:
            assert torch.equal(queries[token], before[0][token])
            assert torch.equal(values[token], before[1][token])
            continue
        weight, bias = adapted(bank, latents, slot)
        own = torch.einsum("hi,hil->hl", x[token].double(), weight[:, :keys])
        _near(queries[token], own, dtype)
        made = torch.einsum("hl,hil->hi", sums[token].double(), weight[:, keys:])
        _near(values[token], made + (bias[:, keys:] if isinstance(bias, Tensor) else 0), dtype)


def _near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = float((found.double() - expected).norm() / expected.norm())
    assert error < TOLERANCE[dtype], error
