"""Adapters of a linear map from latents, which is multiplied where latents are read, not stored.

    k[j, h] = U[h] c[j]        v[j, h] = V[h] c[j]
    q . k[j, h] = (U[h]^T q) . c[j]        sum_j a[j] v[j, h] = V[h] sum_j a[j] c[j]

c: a token's latent. An adapter makes U of U + B_u A, and so changes what a query is brought to
latents by, and what a head's sum of latents is brought to values by:

    (U'[h]^T q) = U[h]^T (1 + c_u) q + A^T (B_u[h]^T q)
    V'[h] s = (1 + c_v) V[h] s + B_v[h] (A s) + d_v

1 + c: DoRA's scale, d: a bias (`output_rows.py`). A bias of the keys adds the same to all scores of
a query, which changes no weight.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.adapters.device_adapter import DeviceAdapter
from modeling.adapters.projection import ModulePosition


@dataclass(frozen=True)
class LatentMap:
    """The linear map of one layer.

    position: where its adapters are. weight: [heads, keys + values, latent], this rank's.
    keys: numbers of a head's key that it makes; those of its value are behind them.
    """

    position: ModulePosition
    weight: Tensor
    keys: int

    def with_weight(self, matrix: Tensor) -> "LatentMap":
        """The same with other weights, [heads * (keys + values), latent]."""
        return LatentMap(self.position, matrix.view_as(self.weight), self.keys)

    def queries(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """U^T x: [tokens, heads, keys] to [tokens, heads, latent], in `out` if given."""
        return _by_head(x, self.weight[:, : self.keys], out)

    def values(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """V x: [tokens, heads, latent] to [tokens, heads, values], in `out` if given."""
        return _by_head(x, self.weight[:, self.keys :].transpose(1, 2), out)


def _by_head(x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    """[tokens, heads, n] and [heads, n, m] to [tokens, heads, m]."""
    if out is None:
        out = x.new_empty(*x.shape[:2], weight.shape[2])
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
    return out


def query_deltas(adapter: DeviceAdapter, x: Tensor, latents: LatentMap) -> Tensor:
    """What an adapter adds to `LatentMap.queries` of x [n, heads, keys]."""
    at, heads = latents.position, x.shape[1]
    factors = adapter.factors(at.projection, at.layer)
    b = factors.bt.view(-1, heads, factors.bt.shape[1] // heads)[:, :, : latents.keys]
    found = torch.einsum("thi,rhi->thr", x, b) @ factors.a.t()
    scale, _ = adapter.output_vectors(at.projection, at.layer)
    if scale is not None:
        found += latents.queries(x * scale.view(heads, -1)[:, : latents.keys])
    return found


def adapted_values(adapter: DeviceAdapter, y: Tensor, x: Tensor, latents: LatentMap) -> Tensor:
    """What an adapter makes of y [n, heads, values], which is `LatentMap.values` of x."""
    at, (_, heads, size) = latents.position, y.shape
    factors = adapter.factors(at.projection, at.layer)
    b = factors.bt.view(-1, heads, factors.bt.shape[1] // heads)[:, :, latents.keys :]
    scale, bias = adapter.output_vectors(at.projection, at.layer)
    if scale is not None:
        y = torch.addcmul(y, y, scale.view(heads, -1)[:, -size:])
    if bias is not None:
        y = y + bias.view(heads, -1)[:, -size:]
    return y + torch.einsum("thr,rhi->thi", x @ factors.a, b)
