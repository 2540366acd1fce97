"""A watermark in the choice of tokens (Kirchenbauer et al., ICML 2023), with LoRAX's numbers.

The token before splits the vocabulary into a green list and the rest; green logits are raised,
so a text that was made so holds more green tokens than chance would. Whoever knows `green` can
count them. LoRAX takes its lists from a device's own random generator; ours are a hash, the same
everywhere, so the two are told apart by different detectors.
"""

import torch
from torch import Tensor

from modeling.sampling.noise import vocabulary_hash

GREEN_SHARE = 0.5
"""How much of the vocabulary is green: LoRAX's gamma."""

GREEN_BONUS = 2.0
"""What is added to green logits: LoRAX's delta."""

KEY = 15485863
"""The watermark's own key: LoRAX's, the millionth prime."""


def green(previous: Tensor, vocab_size: int) -> Tensor:
    """Which tokens are green after those, int64 [n] to bool [n, vocab_size]."""
    key = previous.to(torch.int32)
    keys = torch.stack([key, torch.full_like(key, KEY)], dim=-1)
    # Hashes are signed words: those below this one are GREEN_SHARE of all.
    return vocabulary_hash(keys, vocab_size) < int((GREEN_SHARE - 0.5) * 2**32)
