"""A decoder layer beside a model that guesses its next tokens: what the engine calls of one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from modeling.attention.base import AttentionSpec, AttentionStep
from modeling.attention.kv_cache import LayerCache


@dataclass(frozen=True)
class DraftStep:
    """Where tokens of one forward lie: m rows, T tokens.

    cache: the layer's. slots: int64 [T]. cu_seqlens: int32 [m + 1]. tables: int32 [m, pages].
    attention: as the backend has prepared it.
    """

    cache: LayerCache
    slots: Tensor
    cu_seqlens: Tensor
    tables: Tensor
    attention: AttentionStep


class DraftLayer(Protocol):
    """A layer over a target's states, on one rank.

    states_width: numbers of a token in these. width, dtype, device: of g. vocab_size: the target's.
    """

    states_width: int
    width: int
    dtype: torch.dtype
    device: torch.device
    vocab_size: int

    @property
    def sources(self) -> Sequence[nn.Module]:
        """The target's modules of which it reads what they return, side by side."""
        ...

    def attention_spec(self, page_size: int) -> AttentionSpec:
        """What a backend must serve; page_size: tokens of a page."""
        ...

    def from_target(self, inner: Tensor) -> Tensor:
        """What `sources` return, [tokens, states_width], to what it begins with [tokens, width]."""
        ...

    def __call__(
        self, input_ids: Tensor, positions: Tensor, states: Tensor, step: DraftStep
    ) -> Tensor:
        """Embed tokens int64 [tokens] beside states or g [tokens, width]; returns g.

        positions: int64 [tokens], of the states; rope sets are the target's own, and left out.
        """
        ...

    def logits(self, g: Tensor) -> Tensor:
        """[n, width] to [n, vocab_size]; -inf for tokens that are never guessed."""
        ...
