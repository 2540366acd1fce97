"""A causal model of transformers with its decoder left out: what its `forward` does behind it."""

import copy
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast


@dataclass
class _Output(MoeModelOutputWithPast):
    """What any causal class reads of its decoder's output."""

    shared_kv_states: Any = None
    cross_attentions: Any = None
    cache_params: Any = None


class _Given(nn.Module):
    """Replaces a decoder where its output is computed already."""

    def __init__(self, decoder: nn.Module) -> None:
        """decoder: a causal class may multiply by a number that it keeps there."""
        super().__init__()
        self.__dict__ |= {k: v for k, v in vars(decoder).items() if isinstance(v, float)}

    def forward(
        self, *_ids: None, inputs_embeds: Tensor, **_options: Any
    ) -> MoeModelOutputWithPast:
        """Return what came in."""
        # transformers types it for float tensors of one kind.
        return _Output(last_hidden_state=cast(Any, inputs_embeds))


def without_decoder(causal: PreTrainedModel, prefix: str) -> nn.Module:
    """The model for `inputs_embeds` that the decoder would return; prefix: the decoder's name."""
    tail = copy.copy(causal)
    tail._modules = {**causal._modules, prefix: _Given(getattr(causal, prefix))}
    return tail
