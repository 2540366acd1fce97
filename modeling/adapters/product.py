"""AdapterData: the multi-adapter product as layers call it.

    y[t, o + j] += sum_r ( sum_i x[t, i] * A[row(t, r), i] ) * Bt[row(t, r), j]

t: token; r: rank row of t's adapter, r < rank(t); row(t, r): the pool row that the adapter's
page table names. Tokens of the base model (slot -1) are left untouched. The scaling is already
in B. DoRA and biases change y before anything is added (`output_rows.py`). x: [tokens, in]; A pool:
[pages, layers, 8, in]; Bt pool: [pages, layers, 8, out].
Several projections that share the input x add into column ranges of one y.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from modeling.adapters.bank import DeviceAdapter
from modeling.adapters.latents import LatentMap
from sharding.linear_weight import LinearWeight


@dataclass(frozen=True)
class OutputSlice:
    """The columns of y that get a projection's delta: offset .. offset + local_outputs."""

    projection: int
    offset: int


@dataclass(frozen=True)
class TokenGroup:
    """The tokens of one adapter.

    rows: a slice where they lie together, else their int64 indices.
    """

    rows: slice | Tensor
    adapter: DeviceAdapter


class AdapterData(Protocol):
    """The adapters of one step, as layers use them (`adapter_data` in the models).

    Subclasses that define `add` alone leave base products to torch.
    """

    def has_product(
        self, x: Tensor, weight: LinearWeight, targets: tuple[OutputSlice, ...]
    ) -> bool:
        """Return whether `product` computes these targets' base product faster."""
        return False

    def product(
        self,
        y: Tensor,
        x: Tensor,
        weight: LinearWeight,
        layer: int,
        targets: tuple[OutputSlice, ...],
    ) -> None:
        """Write x W^T into y [tokens, out], and prepare `add`.

        Call it only if `has_product` returned true, and call `add` of the same targets next.
        """
        raise AssertionError("has_product returned False")

    def add(self, y: Tensor, x: Tensor, layer: int, targets: tuple[OutputSlice, ...]) -> None:
        """Add the deltas of `targets` at `layer` to y [tokens, out]; x: [tokens, in]."""
        ...

    def latent_queries(self, y: Tensor, x: Tensor, latents: LatentMap) -> None:
        """Change y [tokens, heads, latent], which is `LatentMap.queries` of x."""
        raise AssertionError(f"{type(self).__name__} has no adapters of latents")

    def latent_values(self, y: Tensor, x: Tensor, latents: LatentMap) -> None:
        """Change y [tokens, heads, values], which is `LatentMap.values` of x."""
        raise AssertionError(f"{type(self).__name__} has no adapters of latents")


@runtime_checkable
class GatedAdapters(Protocol):
    """What a step's adapters do to gate and up, where a kernel joins it with silu."""

    def gated(
        self, gate_up: Tensor, x: Tensor, layer: int, targets: tuple[OutputSlice, ...]
    ) -> Tensor | None:
        """Return silu(gate') * up' [tokens, n], gate' and up' with their deltas.

        gate_up: [tokens, 2 * n], the base product; x: [tokens, in]. None: call `add` instead.
        """
        ...


@runtime_checkable
class NormAdapters(Protocol):
    """What a captured step's adapters do at norms (`norm_rows.py`)."""

    @property
    def norm_pages(self) -> Tensor | None:
        """int32 [tokens]; None where no adapter can bring norms."""
        ...


class ExpertDeltas(Protocol):
    """A step's adapters of experts, multiplied by kernels; those of products read more of them."""

    def add(
        self,
        y: Tensor,
        x: Tensor,
        experts: Tensor,
        tokens: Tensor,
        projection: int,
        layer: int,
        count: int,
        offset: int,
    ) -> None:
        """Add a projection's deltas to y [pairs, out], from column `offset` on.

        x: [pairs, in]. experts, tokens: int64 [pairs], those of each pair. layer: its index among
        those with experts; count: this rank's experts.
        """
        ...


@runtime_checkable
class ExpertAdapters(Protocol):
    """What a step's adapters do to experts, where kernels multiply them."""

    @property
    def expert_deltas(self) -> ExpertDeltas | None:
        """None where no adapter has factors of experts, or no kernel multiplies them."""
        ...


@runtime_checkable
class WholeAdapters(Protocol):
    """What a step's adapters do to whole linear maps (`whole_linears.py`)."""

    def replace(
        self,
        y: Tensor,
        x: Tensor,
        layer: int,
        targets: tuple[OutputSlice, ...],
        bias: Tensor | None,
    ) -> None:
        """Overwrite y [tokens, out] by W' x + bias, for rows of adapters that bring W'.

        bias: the base model's, which y has; None without one.
        """
        ...


@runtime_checkable
class TokenAdapters(Protocol):
    """What a step's trained tokens set (`token_rows.py`)."""

    def set_embedded(self, y: Tensor, input_ids: Tensor) -> None:
        """Set trained tokens in y [tokens, hidden], which is summed over the ranks."""
        ...

    def set_logits(self, z: Tensor, x: Tensor) -> None:
        """Set trained tokens' logits in z [n, vocab_size], which is gathered from the ranks."""
        ...


@runtime_checkable
class EndAdapters(Protocol):
    """What a step's adapters do at embedding and head (`vocabulary.py`)."""

    def embed(self, y: Tensor, local_ids: Tensor, foreign: Tensor | None) -> None:
        """Change y [tokens, hidden] by this rank's part of A, or of W'; see `local_ids`."""
        ...

    def logits(self, z: Tensor, x: Tensor) -> None:
        """Change z [n, this rank's range] by the adapters of the head; x: [n, hidden]."""
        ...
