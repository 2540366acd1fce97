"""What the tests of the paged families share: sequences, checkpoints, comparisons."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modeling.models.base import PagedModel
from modeling.models.gpt2 import FlashGPT2ForCausalLM
from modeling.models.gpt_neox import GPTNeoXForCausalLM
from modeling.models.llama import FlashLlamaForCausalLM
from modeling.models.opt import OPTForCausalLM
from modeling.models.paged_base import FlashBase
from sharding.group import TensorParallel
from tests.checkpoints import load_oracle, oracle_logits
from tests.modeling.models.stepping import Stepper, load
from tests.ranks import run_ranks

PROMPTS = [[1, 5, 9, 30, 44, 7, 3], [2], [8, 9] * 9 + [60]]
SEQUENCE = [(7 * i + i * i) % 96 for i in range(40)]

PAGED = "input_ids, position_ids, context, lm_head_indices, skip_lm_head"
"""Parameters of the engine's interface."""


@dataclass
class Checkpoint:
    """A folder and what transformers makes of it."""

    folder: Path
    oracle: Any


def opened(folder: Path) -> Checkpoint:
    """The checkpoint in `folder`."""
    return Checkpoint(folder, load_oracle(folder))


def assert_close(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def check_logits(checkpoint: Checkpoint, ranks: int) -> None:
    expected = [oracle_logits(checkpoint.oracle, prompt) for prompt in PROMPTS]

    def on_rank(group: TensorParallel) -> list[Tensor]:
        return Stepper(load(checkpoint.folder, group)).step(list(enumerate(PROMPTS)))

    for logits in run_ranks(ranks, on_rank):
        assert_close(logits, expected)


def names(function: Any) -> list[str]:
    """A method's parameters after `self`."""
    return list(inspect.signature(function).parameters)[1:]


def check_flash_signature(model: type[FlashBase]) -> None:
    """`forward` has the parameters of LoRAX's flash models."""
    assert ", ".join(names(model.paged)) == PAGED
    assert ", ".join(names(model.forward)) == (
        "input_ids, position_ids, cu_seqlen_prefill, kv_cache, block_tables, slots, seqlen, "
        "max_s, adapter_data, prefill_cache_indices, lm_head_indices, cross_attention_states, "
        "skip_lm_head"
    )
    parameters = inspect.signature(model.forward).parameters
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    assert defaults == {
        "prefill_cache_indices": None,
        "lm_head_indices": None,
        "cross_attention_states": None,
        "skip_lm_head": False,
    }


@dataclass
class CountingRank(TensorParallel):
    """Rank 0 of two, without the other; counts its sums."""

    sums: int = 0
    rank = 0
    size = 2
    method = "counted"

    def all_reduce(self, x: Tensor) -> Tensor:
        self.sums += 1
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat((x, x), dim=-1)


def count_sums(folder: Path) -> int:
    """How often one step's layers sum over the ranks; the embedding does so once before."""
    rank = CountingRank()
    Stepper(load(folder, rank)).step([(0, SEQUENCE)])
    return rank.sums - 1


def conform(
    one: FlashLlamaForCausalLM,
    two: FlashGPT2ForCausalLM,
    three: GPTNeoXForCausalLM,
    four: OPTForCausalLM,
) -> tuple[PagedModel, ...]:
    """For the type checker: they are what the runner asks for."""
    return one, two, three, four
