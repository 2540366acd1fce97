"""A watermark in sampled tokens (Kirchenbauer et al., ICML 2023), with LoRAX's parameters.

The previous token splits the vocabulary into a green list and the rest. Green logits are raised, so
the text holds more green tokens than chance would give; a detector that knows `green` counts them.
LoRAX takes its lists from the device's random generator; ours are a hash, the same on all devices,
so LoRAX's detector does not find this watermark, nor ours LoRAX's.
"""

import torch
from torch import Tensor

from modeling.sampling.noise import vocabulary_hash

GREEN_SHARE = 0.5
"""The green fraction of the vocabulary: LoRAX's gamma."""

GREEN_BONUS = 2.0
"""The number added to green logits: LoRAX's delta."""

KEY = 15485863
"""The watermark's key: LoRAX's, the millionth prime."""

GREEN_LIMIT = int((GREEN_SHARE - 0.5) * 2**32)
"""Hashes are signed words: those below this one are GREEN_SHARE of all."""


def green(previous: Tensor, vocab_size: int) -> Tensor:
    """Return which tokens are green after `previous`: int64 [n] to bool [n, vocab_size]."""
    key = previous.to(torch.int32)
    keys = torch.stack([key, torch.full_like(key, KEY)], dim=-1)
    return vocabulary_hash(keys, vocab_size) < GREEN_LIMIT
