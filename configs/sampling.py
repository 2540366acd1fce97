"""What one sequence asks of the sampler and when it ends; plain values that travel in plans."""

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a sequence ended by itself; the values are LoRAX's words."""

    LENGTH = "length"
    STOP_TOKEN = "eos_token"
    STOP_STRING = "stop_sequence"


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the next token is chosen from the logits.

    temperature 0 means greedy; top_k 0 and top_p 1 mean off. The noise depends on
    (seed, position, vocabulary id) alone, so batch mates never change a sample.
    logprobs is the number of most likely alternatives to report with each token, -1 for
    no logprobs at all; they are those of the model's own distribution (before temperature).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int = -1

    def __post_init__(self) -> None:
        """Refuse values outside their domain; the messages name the field."""
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be >= 0 and finite, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0 (0 = off), got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be in [0, 2**64), got {self.seed}")


class Stopping(msgspec.Struct, frozen=True, array_like=True):
    """When a sequence ends; stop strings are matched by the ingress, not here.

    max_new_tokens counts every generated token, the end-of-sequence token included.
    stop_token_ids end the sequence once min_new_tokens are there; () when they are ignored.
    """

    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse an empty budget."""
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
