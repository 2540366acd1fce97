"""Mixtures of which some experts return what they get (LongCat-Flash), as products of the others.

transformers computes each expert on its own, and its host waits to know which were selected. Here
the other experts are a module as all mixtures have it, and what identities give a token is one
product: of the token, and of the sum of their shares. That is added behind the ranks' sum.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import MixtralExperts


class IdentityMixture(nn.Module):
    """Routed experts, then as many identities as the router has further rows."""

    def __init__(self, router: nn.Module, config: Any) -> None:
        """router: of transformers. config: its own; experts are made on the meta device."""
        super().__init__()
        sizes = copy.copy(config)
        # Under this name it has the width of its dense feed-forwards.
        sizes.intermediate_size = config.expert_ffn_hidden_size
        with torch.device("meta"):
            experts: Any = MixtralExperts(sizes)
        # transformers' own has a first matrix for each of these, which nothing reads.
        experts.loray_identities = {"gate_up_proj": config.zero_expert_num or 0}
        self.experts = experts
        self.router = router
        self._count: int = config.n_routed_experts

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., hidden] to the same shape, equal on every rank."""
        # transformers 5.17 returns no logits before them.
        *_, shares, ids = self.router(hidden_states)
        x, is_routed = hidden_states.flatten(0, -2), ids < self._count
        # Identities are computed as the first expert, and count nothing: which they are is known to
        # the device alone.
        routed = self.experts(x, torch.where(is_routed, ids, 0), torch.where(is_routed, shares, 0))
        same = x * shares.masked_fill(is_routed, 0).sum(1, keepdim=True)
        found: Tensor = routed + same.to(x.dtype)
        return found.view(hidden_states.shape)


def take_over_identities(causal: PreTrainedModel) -> None:
    """Replace mixtures with identities in a model without weights, under the same names."""
    config: Any = causal.config
    if config.model_type != "longcat_flash" or not config.n_routed_experts:
        return
    for path, module in list(causal.named_modules()):
        router = getattr(module, "router", None)
        if path.endswith(".mlp") and isinstance(router, nn.Module):
            causal.set_submodule(path, IdentityMixture(router, config))
