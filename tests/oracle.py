"""What transformers and PEFT say: greedy tokens, logprobs and margins, each computed once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints import load_adapted_oracle, load_oracle, oracle_greedy, oracle_logits

NUM_TOKENS = 24
TOLERANCE = 1e-4
"""On float32 logits, against sums taken in another order."""

MIN_MARGIN = 1e-3
MIN_SHIFT = 100 * TOLERANCE


@dataclass(frozen=True)
class Truth:
    """A greedy continuation: tokens, and logits [tokens, vocab] that each was taken from."""

    tokens: list[int]
    logits: Tensor

    @property
    def logprobs(self) -> Tensor:
        """Natural logprobs [tokens, vocab]."""
        return self.logits.double().log_softmax(-1)

    @property
    def margin(self) -> float:
        """The narrowest lead of a greedy token over the second best."""
        best = self.logits.topk(2).values
        return float((best[:, 0] - best[:, 1]).min())


@lru_cache(maxsize=64)
def _model(folder: Path, adapter: Path | None) -> Any:
    return load_oracle(folder) if adapter is None else load_adapted_oracle(folder, adapter)


@lru_cache(maxsize=512)
def _truth(folder: Path, adapter: Path | None, prompt: tuple[int, ...]) -> Truth:
    model = _model(folder, adapter)
    tokens = oracle_greedy(model, prompt, NUM_TOKENS)
    logits = oracle_logits(model, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    return Truth(tokens, logits)


def truth(folder: Path, adapter: Path | None, prompt: Sequence[int]) -> Truth:
    """Ask the oracle, and assert that its answer can tell right from wrong.

    No token is won by less than MIN_MARGIN, and an adapter moves the base model's logits by
    MIN_SHIFT at least: else a test that ignores adapters would pass.
    """
    found = _truth(folder, adapter, tuple(prompt))
    assert found.margin >= MIN_MARGIN, f"margin {found.margin}: choose another seed or prompt"
    if adapter is not None:
        sequence = [*prompt, *found.tokens[:-1]]
        base = oracle_logits(_model(folder, None), sequence)[len(prompt) - 1 :]
        shift = float((base - found.logits).abs().amax(-1).min())
        assert shift >= MIN_SHIFT, f"the adapter moves the logits by {shift} only"
    return found


def prompt_truth(folder: Path, adapter: Path | None, length: int) -> tuple[list[int], Truth]:
    """The first of some seeded prompts whose every greedy token is won by MIN_MARGIN."""
    vocab_size = int(_model(folder, None).config.vocab_size)
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        prompt: list[int] = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
        if _truth(folder, adapter, tuple(prompt)).margin >= MIN_MARGIN:
            break
    return prompt, truth(folder, adapter, prompt)


def prompt_logits(folder: Path, adapter: Path | None, prompt: Sequence[int]) -> Tensor:
    """Logits [prompt, vocab] of every position."""
    return oracle_logits(_model(folder, adapter), prompt)


@torch.no_grad()
def final_states(folder: Path, adapter: Path | None, prompt: Sequence[int]) -> Tensor:
    """transformers' hidden_states[-1], [prompt, width]."""
    model = _model(folder, adapter)
    out = model(torch.tensor([list(prompt)]), output_hidden_states=True)
    states: Tensor = out.hidden_states[-1][0]
    return states
