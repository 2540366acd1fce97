"""Replacements of transformers' linear layers, embedding and head in its own modules."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modeling.adapters.linear import AdapterColumnLinear, AdapterRowLinear
from modeling.adapters.vocabulary import embed_adapted, logits_adapted
from modeling.models.generic.outer_rows import OuterRows
from modeling.models.generic.step import CurrentStep
from sharding.embedding import ParallelHead, VocabParallelEmbedding
from sharding.linear import ColumnParallelLinear, RowParallelLinear
from sharding.loader import Weights

_NORMED = ("MuseGlimmerTextNormedEmbedding",)
"""Embeddings that end in a norm."""

CLEARS_PADDING = frozenset({"youtu"})
"""Types of which transformers sets the padding token's row to zero in an embedding that it has
read: their code to make new weights does not see that these are none."""


def _typed(base: ColumnParallelLinear | RowParallelLinear) -> Tensor:
    """Return the weight; of a quantised one nothing but the type that it is computed in."""
    return base.stored[:0] if base.matrix is None else base.matrix


def _rows(x: Tensor) -> Tensor:
    """[..., in] to [tokens, in], of which kernels read each row as neighbours."""
    x = x.flatten(0, -2)
    # Mamba's mixers hand on what they have transposed.
    return x if x.stride(1) == 1 else x.contiguous()


class GenericLinear(nn.Module):
    """A linear layer with the step's adapters, alone in its product."""

    def __init__(self, linear: AdapterColumnLinear | AdapterRowLinear, step: CurrentStep) -> None:
        super().__init__()
        self.linear = linear
        self._step = step

    @property
    def weight(self) -> Tensor:
        """This rank's part of the base weight; some modules read its type."""
        return _typed(self.linear.base)

    def forward(self, x: Tensor) -> Tensor:
        """[..., this rank's in] to [..., this rank's out]."""
        rows, data = _rows(x), self._step.adapter_data
        lacking = 0 if data is None else self._step.part_tokens - len(rows)
        if lacking > 0:
            # What is before a sequence's first token has that one's adapter (ZAYA: a row of zeros).
            rows = F.pad(rows, (0, 0, 0, lacking))
        y: Tensor = self.linear(rows, data)
        y = y[:-lacking] if lacking > 0 else y
        return y.view(*x.shape[:-1], y.shape[-1])


class MergedColumns(nn.Module):
    """Linear layers of one input, computed as one product when one of them is called."""

    def __init__(self, linear: AdapterColumnLinear, num_parts: int, step: CurrentStep) -> None:
        super().__init__()
        self.linear = linear
        self._num_parts = num_parts
        self._step = step
        self._x: Tensor | None = None
        self._y: Tensor | None = None
        self._left = 0

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """Columns start .. stop - 1 of the product with x; each part is called once for an x."""
        y = self._y
        # Of another x: a step that failed in between may have left parts uncalled.
        if y is None or self._x is not x:
            y = self.linear(_rows(x), self._step.adapter_data)
            self._x, self._y, self._left = x, y, self._num_parts
        self._left -= 1
        if not self._left:
            self._x = self._y = None
        return y[:, start:stop].view(*x.shape[:-1], stop - start)


class MergedPart(nn.Module):
    """One of the layers of a `MergedColumns`; the first of them has it as its submodule."""

    merged: MergedColumns

    def __init__(self, merged: MergedColumns, start: int, stop: int, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self._columns = (start, stop)
        if is_first:
            self.merged = merged
        else:
            # Not as a submodule: parameters belong to one module.
            object.__setattr__(self, "merged", merged)

    @property
    def weight(self) -> Tensor:
        """This rank's rows of the base weight."""
        start, stop = self._columns
        return _typed(self.merged.linear.base)[start:stop]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., this rank's out]."""
        return self.merged.part(x, *self._columns)


class GenericEmbedding(nn.Module):
    """The tokens' embedding with the step's adapters.

    scale: what transformers multiplies it by. norm: what it goes through behind that. outer: of
    tokens that it does not embed.
    """

    def __init__(
        self,
        base: VocabParallelEmbedding,
        step: CurrentStep,
        scale: Tensor | float | None,
        norm: nn.Module | None,
        outer: OuterRows | None,
    ) -> None:
        super().__init__()
        self.base = base
        self.norm = norm
        self.outer = outer
        self._step = step
        self._scale = scale

    @property
    def weight(self) -> Tensor:
        """This rank's rows."""
        return self.base.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [1, tokens] to [1, tokens, hidden], the same on every rank."""
        found = embed_adapted(self.base, input_ids[0], self._step.adapter_data)
        found = found if self._scale is None else found * self._scale
        found = found if self.norm is None else self.norm(found)
        return (found if self.outer is None else self.outer(found, input_ids[0]))[None]


class GenericHead(nn.Module):
    """The head with the step's adapters."""

    def __init__(
        self,
        base: ParallelHead,
        step: CurrentStep,
        bias: nn.Parameter | None,
        scale: "LogitScale | None" = None,
    ) -> None:
        """bias, scale: [vocab_size], the same on every rank; None for a head without one.

        scale: what logits are multiplied by; adapters of such a head are not served.
        """
        super().__init__()
        self.base = base
        self.bias = bias
        self.scale = scale
        self._step = step

    @property
    def weight(self) -> Tensor:
        """This rank's rows."""
        return self.base.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """[1, n, hidden] to [1, n, vocab_size], the same on every rank."""
        logits = logits_adapted(self.base, hidden[0], self._step.adapter_data)
        logits = logits if self.bias is None else logits + self.bias
        return (logits if self.scale is None else logits.float() * self.scale.whole)[None]


@dataclass(frozen=True)
class LogitScale:
    """What a head multiplies the logits by: `stored` is the checkpoint's, `whole` is float32."""

    stored: Tensor
    whole: Tensor


def embedding_norm(module: nn.Embedding) -> nn.Module | None:
    """The norm inside of an embedding; None for one without."""
    untyped: Any = module
    return untyped.embed_norm if type(module).__name__ in _NORMED else None


def embedding_scale(module: nn.Embedding, device: torch.device) -> Tensor | float | None:
    """What an embedding multiplies its rows by, on the device; None for a plain one.

    A float is not rounded to the rows' type. ValueError for an embedding that does anything else.
    """
    if type(module) is nn.Embedding or type(module).__name__ in _NORMED:
        return None
    scale: Any = getattr(module, "embed_scale", None)
    if isinstance(scale, Tensor):
        return scale.to(device, module.weight.dtype)
    if not isinstance(scale, float):
        raise ValueError(f"{type(module).__name__} is an embedding of a kind that is not known")
    return scale


def head_scale(module: nn.Linear, path: str, weights: Weights) -> LogitScale | None:
    """What a head multiplies logits by (Dory), [vocab_size]; None for a plain one."""
    if type(module).__name__ != "DoryLMHead":
        return None
    factor: Any = module.logit_scale_factor
    stored = weights.read(f"{path}.logit_scale", (module.out_features,))
    return LogitScale(stored, stored.float() * float(factor))


def keep_inside(table: nn.Embedding | None, vocab_size: int) -> None:
    """Let tokens that a table lacks read its first row, as newer transformers do.

    By 5.17's code an image's token in a prompt ends the process on a GPU (Gemma 3n).
    """
    if table is not None and table.num_embeddings < vocab_size:
        table.register_forward_pre_hook(
            lambda _, args: (torch.where(args[0] < table.num_embeddings, args[0], 0), *args[1:])
        )
