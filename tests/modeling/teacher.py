"""Teacher-forced logprobs: what a runner says after every prefix of a text that is given.

In half precision answers may part at a near tie, and then compare different questions; here
every prefix is asked for by itself, so that each row has its own truth.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.wire.sampling import Sampling
from modeling.runner.paged import ModelRunner
from tests.checkpoints import (
    AdapterRecipe,
    load_adapted_oracle,
    load_oracle,
    oracle_logits,
    write_llama,
)
from tests.checkpoints_others import write_gpt2, write_gpt_neox, write_opt
from tests.checkpoints_padded import write_padded
from tests.modeling.parity.comparison import BLOCK_SIZE, NUM_BLOCKS, WHOLE, full_logprobs
from tests.modeling.stepping import Asked, generate

SHORTEST, LONGEST = 5, 36
TOGETHER = 8
"""Prefixes in one batch."""

HEAD_DIMS = (64, 80, 128)

Write = Callable[[Path, int], Path]

SYSTEMS: dict[str, tuple[Write, Sequence[str]]] = {
    "llama": (lambda path, dim: write_llama(path, head_dim=dim), ("q_proj", "o_proj", "up_proj")),
    "gpt2": (lambda path, dim: write_gpt2(path, n_embd=4 * dim), ("c_attn", "mlp.c_proj")),
    "opt": (
        lambda path, dim: write_opt(path, hidden_size=4 * dim, word_embed_proj_dim=4 * dim),
        ("q_proj", "out_proj", "fc1"),
    ),
    "gpt_neox": (
        lambda path, dim: write_gpt_neox(path, hidden_size=4 * dim),
        ("query_key_value", "dense_4h_to_h"),
    ),
    "padded": (
        lambda path, dim: write_padded(path, "gptj", n_embd=4 * dim, n_positions=64),
        ("q_proj", "out_proj", "fc_in"),
    ),
}
"""How to write a tiny model of so wide heads, four of them, and which modules to adapt."""


@dataclass(frozen=True)
class Errors:
    """How far logprobs [n, vocab] are from the truth.

    largest: of a logprob's differences. kl: mean of KL(truth || found), in nats. flips: the
    share of rows whose best token is another.
    """

    largest: float
    kl: float
    flips: float

    def __str__(self) -> str:
        return f"max abs {self.largest:.3f}  mean KL {self.kl:.2e}  flips {self.flips:.1%}"


def errors(found: Tensor, truth: Tensor) -> Errors:
    """Compare logprobs [n, vocab]."""
    found, truth = found.double(), truth.double()
    kl = (truth.exp() * (truth - found)).sum(-1)
    flips = (found.argmax(-1) != truth.argmax(-1)).double()
    return Errors(float((found - truth).abs().max()), float(kl.mean()), float(flips.mean()))


def bounded(ours: Errors, theirs: Errors) -> bool:
    """The bound: about as near to float32 as transformers in the same type, which rounds too."""
    return (
        ours.kl <= 2 * theirs.kl + 1e-4
        and ours.largest <= 2 * theirs.largest + 0.05
        and ours.flips <= theirs.flips + 0.1
    )


def text(vocab_size: int) -> list[int]:
    """The text whose prefixes are asked for."""
    generator = torch.Generator().manual_seed(5)
    found: list[int] = torch.randint(3, vocab_size, (LONGEST,), generator=generator).tolist()
    return found


def oracle_logprobs(folder: Path, adapter: Path | None, dtype: Any = "float32") -> Tensor:
    """What transformers + PEFT say after each prefix, on the CPU in that type."""
    if adapter is None:
        model = load_oracle(folder, dtype)
    else:
        model = load_adapted_oracle(folder, adapter).to(getattr(torch, dtype))
    logits = oracle_logits(model, text(model.config.vocab_size))
    return logits[SHORTEST - 1 :].double().log_softmax(-1)


def adapter_recipe(system: str) -> AdapterRecipe:
    """An adapter of the system's modules that moves the logits by about two."""
    extra = {"fan_in_fan_out": True} if system == "gpt2" else {}
    targets = SYSTEMS[system][1]
    return AdapterRecipe(r=8, alpha=16.0, target_modules=targets, std=0.05, extra=extra)


def forced_logprobs(
    runner: ModelRunner, vocab_size: int, slot: int, decode: bool, block_size: int = BLOCK_SIZE
) -> Tensor:
    """What the runner says after each prefix: read whole, or its last token as a decode step."""
    tokens = text(vocab_size)
    lengths = range(SHORTEST, LONGEST + 1)
    requests = [
        Asked(
            tokens[:length],
            1,
            slot=slot,
            sampling=Sampling(logprobs=vocab_size),
            chunk=length - 1 if decode else WHOLE,
        )
        for length in lengths
    ]
    found = []
    for first in range(0, len(requests), TOGETHER):
        part = requests[first : first + TOGETHER]
        found += [full_logprobs(a)[0] for a in generate(runner, part, NUM_BLOCKS, block_size)]
    return torch.stack(found)
