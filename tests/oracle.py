"""What transformers and PEFT say: greedy tokens, logprobs and margins, each computed once.

In float64, but for the norms and softmaxes that transformers computes in float32 always: what a
runner's float32 is then off by is its own rounding alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.checkpoints import load_adapted_oracle, load_oracle, oracle_answer, oracle_logits

NUM_TOKENS = 24
TOLERANCE = 1e-4
"""On float32 logits, against sums taken in another order."""

MIN_MARGIN = 1e-3
MIN_SHIFT = 100 * TOLERANCE
MAX_DRIFT = TOLERANCE / 5
"""What transformers' own float32 may be off by: where it is more, rounding decides on any CPU."""


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


@dataclass(frozen=True)
class _OracleRun:
    """A truth; by how much its logprobs are off in float32, and how far an adapter moved them."""

    truth: Truth
    drift: float
    shift: float

    @property
    def clear(self) -> bool:
        """Whether rounding, in whatever order, changes nothing that is looked at."""
        return self.truth.margin >= MIN_MARGIN and self.drift <= MAX_DRIFT


@lru_cache(maxsize=64)
def _model(folder: Path, adapter: Path | None) -> Any:
    model = load_oracle(folder) if adapter is None else load_adapted_oracle(folder, adapter)
    return _exact(model)


def _exact(model: Any) -> Any:
    """Turn it to float64, unless its own code uses float32."""
    upcasts = getattr(model.config, "reorder_and_upcast_attn", False)
    return model if upcasts or model.config.model_type == "xglm" else model.double()


@lru_cache(maxsize=512)
def _run(folder: Path, adapter: Path | None, prompt: tuple[int, ...]) -> _OracleRun:
    model = _model(folder, adapter)
    found = Truth(*oracle_answer(model, prompt, NUM_TOKENS))
    # Two passes of one kind differ by rounding alone, or by the adapter alone.
    whole = _in_one_pass(model, prompt, found.tokens)
    rounded = _in_one_pass(model.float(), prompt, found.tokens)
    _exact(model)  # Its weights are those of before.
    drift = float((rounded.logprobs - whole.logprobs).abs().max())
    if adapter is None:
        return _OracleRun(found, drift, inf)
    base = _in_one_pass(_model(folder, None), prompt, found.tokens)
    return _OracleRun(found, drift, float((base.logits - whole.logits).abs().amax(-1).min()))


def _in_one_pass(model: Any, prompt: Sequence[int], tokens: list[int]) -> Truth:
    """These tokens, and the logits that each would be taken from, of one pass over all."""
    logits = oracle_logits(model, [*prompt, *tokens[:-1]])
    return Truth(tokens, logits[len(prompt) - 1 :])


def truth(folder: Path, adapter: Path | None, prompt: Sequence[int]) -> Truth:
    """Ask the oracle, and assert that its answer can tell right from wrong.

    No token is won by less than MIN_MARGIN, and an adapter moves the base model's logits by
    MIN_SHIFT at least: else a test that ignores adapters would pass.
    """
    run = _run(folder, adapter, tuple(prompt))
    margin, shift = run.truth.margin, run.shift
    assert margin >= MIN_MARGIN, f"margin {margin}: choose another seed or prompt"
    assert shift >= MIN_SHIFT, f"the adapter moves the logits by {shift} only"
    return run.truth


def prompt_truth(folder: Path, adapter: Path | None, length: int) -> tuple[list[int], Truth]:
    """The first of some seeded prompts on which rounding has no say, and what follows it."""
    vocab_size = int(_model(folder, None).config.get_text_config().vocab_size)
    for seed in range(16):
        generator = torch.Generator().manual_seed(seed)
        prompt: list[int] = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
        if _run(folder, adapter, tuple(prompt)).clear:
            return prompt, truth(folder, adapter, prompt)
    raise AssertionError("rounding has a say on all prompts: choose another seed or model")


def prompt_logits(folder: Path, adapter: Path | None, prompt: Sequence[int]) -> Tensor:
    """Logits [prompt, vocab] of every position."""
    return oracle_logits(_model(folder, adapter), prompt)


@torch.no_grad()
def inner_states(
    folder: Path, adapter: Path | None, prompt: Sequence[int], layers: Sequence[int]
) -> Tensor:
    """transformers' states behind these layers side by side, float32 [prompt, layers * width]."""
    model = _model(folder, adapter)
    out = model(torch.tensor([list(prompt)]), output_hidden_states=True)
    # Behind the last layer they are normed.
    assert max(layers) < len(out.hidden_states) - 2, layers
    return torch.cat([out.hidden_states[each + 1][0] for each in layers], -1).float()


@torch.no_grad()
def final_states(folder: Path, adapter: Path | None, prompt: Sequence[int]) -> Tensor:
    """transformers' hidden_states[-1], float32 [prompt, width]."""
    model = _model(folder, adapter)
    out = model(torch.tensor([list(prompt)]), output_hidden_states=True)
    states: Tensor = out.hidden_states[-1][0]
    return states.float()
