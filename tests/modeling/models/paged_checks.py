"""What every paged model is checked for, whatever its family."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from configs.architectures.select import load_architecture
from modeling.adapters.product import OutputSlice
from modeling.models.base import PagedModel
from modeling.models.gpt2 import FlashGPT2ForCausalLM
from modeling.models.gpt_neox import GPTNeoXForCausalLM
from modeling.models.opt import OPTForCausalLM
from modeling.models.select import build_model
from sharding.checkpoint import DummySource, SafetensorsCheckpoint
from sharding.group import SingleRank, Summand, TensorParallel
from sharding.linear_weight import LinearWeight
from sharding.loader import Weights
from sharding.slicing import width
from tests.checkpoints import load_oracle, oracle_greedy, oracle_logits
from tests.modeling.models.stepping import CPU, FlashStepper, Stepper, load
from tests.ranks import run_ranks
from tests.sharding.views import LoneRank

PROMPTS = [[1, 5, 9, 30, 44, 7, 3], [2], [8, 9] * 9 + [60]]
SEQUENCE = [(7 * i + i * i) % 96 for i in range(40)]
CUTS = [(40,), (16, 32, 40), (1, 2, 39, 40), tuple(range(1, 41))]

PAGED = "input_ids, position_ids, context, lm_head_indices, skip_lm_head"
"""Parameters of the engine's interface."""

FLASH = (
    "input_ids, position_ids, cu_seqlen_prefill, kv_cache, block_tables, slots, seqlen, "
    "max_s, adapter_data, prefill_cache_indices, lm_head_indices, cross_attention_states, "
    "skip_lm_head"
)
"""Parameters of LoRAX's flash models."""


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


def check_cut_prefill(checkpoint: Checkpoint, cuts: tuple[int, ...], page_size: int) -> None:
    stepper = Stepper(load(checkpoint.folder, SingleRank()), page_size)
    logits = []
    for start, stop in zip((0, *cuts), cuts, strict=False):
        logits += stepper.step([(0, SEQUENCE[start:stop])])
    assert_close([torch.cat(logits)], [oracle_logits(checkpoint.oracle, SEQUENCE)])


def check_mixed_step(checkpoint: Checkpoint) -> None:
    stepper = Stepper(load(checkpoint.folder, SingleRank()))
    decoding, chunked, fresh = SEQUENCE[:19], SEQUENCE[::-1], SEQUENCE[5:12]
    stepper.step([(0, decoding[:18]), (1, chunked[:17])])
    mixed = stepper.step([(1, chunked[17:]), (0, decoding[18:]), (2, fresh)])
    wanted = [
        oracle_logits(checkpoint.oracle, chunked)[17:],
        oracle_logits(checkpoint.oracle, decoding)[18:],
        oracle_logits(checkpoint.oracle, fresh),
    ]
    assert_close(mixed, wanted)


def check_greedy(checkpoint: Checkpoint, ranks: int) -> None:
    expected = [oracle_greedy(checkpoint.oracle, prompt, 8) for prompt in PROMPTS]

    def on_rank(group: TensorParallel) -> list[list[int]]:
        stepper = Stepper(load(checkpoint.folder, group))
        outs: list[list[int]] = [[] for _ in PROMPTS]
        rows: list[tuple[int, Sequence[int]]] = list(enumerate(PROMPTS))
        for _ in range(8):
            for out, logits in zip(outs, stepper.step(rows), strict=True):
                out.append(int(logits[-1].argmax()))
            rows = [(i, out[-1:]) for i, out in enumerate(outs)]
        return outs

    assert run_ranks(ranks, on_rank) == [expected] * ranks


def check_half(folder: Path, dtype: Any) -> None:
    """As near to float32 as transformers is in the same type; the checkpoint is of that type."""
    logits = Stepper(load(folder, SingleRank(), getattr(torch, dtype))).step([(0, SEQUENCE)])[0]
    assert logits.dtype == getattr(torch, dtype)
    exact = oracle_logits(load_oracle(folder), SEQUENCE)
    theirs = oracle_logits(load_oracle(folder, dtype), SEQUENCE).float()
    assert (logits.float() - exact).square().mean() < 2 * (theirs - exact).square().mean()


def check_asked_for_tokens(checkpoint: Checkpoint) -> None:
    """Only some tokens get logits, or none; cached tokens are not stored again."""
    model: Any = load(checkpoint.folder, SingleRank())
    whole = oracle_logits(checkpoint.oracle, SEQUENCE)
    indices = torch.tensor([3, 39])
    logits = Stepper(model).run([(0, SEQUENCE)], lm_head_indices=indices)
    assert_close([logits], [whole[indices]])
    hidden = Stepper(model).run([(0, SEQUENCE)], lm_head_indices=indices, skip_lm_head=True)
    assert len(hidden) == 2
    head = model.logits if hasattr(model, "logits") else model.lm_head
    assert_close([head(hidden)], [whole[indices]])
    stepper = Stepper(model)
    stepper.step([(0, SEQUENCE[:8])])
    kept = [layer.keys.clone() for layer in stepper.cache]
    stepper.lengths[0] = 0
    logits = stepper.run([(0, SEQUENCE)], stored=torch.arange(8, 40))
    assert_close([logits], [whole])
    page = stepper.tables[0][0]
    for layer, before in zip(stepper.cache, kept, strict=True):
        assert torch.equal(layer.keys[page, :8], before[page, :8])


def check_flash_forward(checkpoint: Checkpoint) -> None:
    """The seeds' `forward` computes what `paged` does, with every one of its arguments."""
    model = load(checkpoint.folder, SingleRank())
    paged, flash = Stepper(model), FlashStepper(model)
    rows = list(enumerate(PROMPTS))
    recorders = [Recorder(model, []), Recorder(model, [])]
    for options in (
        {},
        {"lm_head_indices": torch.tensor([0, 4])},
        {"skip_lm_head": True},
        {"stored": torch.arange(2)},
    ):
        found = [
            stepper.run(rows, recorder, **options)
            for stepper, recorder in zip((paged, flash), recorders, strict=True)
        ]
        assert torch.equal(*found)
        for one, other in zip(paged.cache, flash.cache, strict=True):
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.values, other.values)
    assert recorders[0].asked == recorders[1].asked
    with pytest.raises(ValueError, match="cross_attention_states"):
        flash.run([(0, [1])], cross_attention_states=torch.zeros(1))


@dataclass
class Recorder:
    """Adapter data that adds nothing and remembers who asked."""

    model: PagedModel
    asked: list[tuple[int, int, int]]

    def has_product(
        self, x: Tensor, weight: LinearWeight, targets: tuple[OutputSlice, ...]
    ) -> bool:
        return False

    def product(
        self,
        y: Tensor,
        x: Tensor,
        weight: LinearWeight,
        layer: int,
        targets: tuple[OutputSlice, ...],
    ) -> None:
        raise AssertionError

    def add(self, y: Tensor, x: Tensor, layer: int, targets: tuple[OutputSlice, ...]) -> None:
        for target in targets:
            projection = self.model.projections[target.projection]
            assert x.shape[1] == projection.local_inputs
            assert target.offset + projection.local_outputs <= y.shape[1]
            self.asked.append((layer, target.projection, target.offset))


def check_every_projection_asks(folder: Path, ranks: int, offsets: Sequence[int]) -> None:
    """offsets: where in its layer's output each projection's delta goes."""

    def on_rank(group: TensorParallel) -> list[tuple[int, int, int]]:
        model = load(folder, group)
        recorder = Recorder(model, [])
        Stepper(model).run([(0, [1, 2, 3])], adapter_data=recorder)
        return recorder.asked

    expected = [(layer, i, offset) for layer in range(2) for i, offset in enumerate(offsets)]
    assert run_ranks(ranks, on_rank) == [expected] * ranks


def check_projection_names(checkpoint: Checkpoint, names: Sequence[str], conv1d: bool) -> None:
    """Modules are found in transformers' model, where PEFT looks; conv1d: weights are [in, out]."""
    model = load(checkpoint.folder, SingleRank())
    shapes = {name: tuple(p.shape) for name, p in checkpoint.oracle.named_parameters()}
    for projection in model.projections:
        shape = (projection.out_features, projection.in_features)
        for layer in range(projection.num_layers):
            stored = shapes[projection.module.format(layer=layer) + ".weight"]
            assert stored == (shape[::-1] if conv1d else shape)
        assert projection.module.endswith(projection.name)
        assert width(projection.inputs) == projection.in_features
        assert width(projection.outputs) == projection.out_features
    assert [projection.name for projection in model.projections] == list(names)


@dataclass
class CountingRank:
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

    def output_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        return None

    def summand(self, shape: Sequence[int], dtype: torch.dtype) -> Summand | None:
        return None


def count_sums(folder: Path) -> int:
    """How often one step's layers sum over the ranks; the embedding does so once before."""
    rank = CountingRank()
    Stepper(load(folder, rank)).step([(0, SEQUENCE)])
    return rank.sums - 1


def check_shares(folder: Path, whole: str) -> None:
    """Each of two ranks reads half of every tensor but those whose names match `whole`."""
    tensors = load_file(folder / "model.safetensors")
    expected = sum(
        value.nbytes if re.search(whole, name) else value.nbytes // 2
        for name, value in tensors.items()
    )
    for rank in range(2):
        source = SafetensorsCheckpoint(folder)
        weights = Weights(source, LoneRank(rank, 2), torch.float32, CPU)
        build_model(load_architecture(folder), weights)
        assert source.bytes_read == expected


def check_dummy_weights(folder: Path) -> None:
    """A model of no files: every name is to be had."""
    config = load_architecture(folder)
    source = DummySource(CPU, torch.float32)
    model = build_model(config, Weights(source, SingleRank(), torch.float32, CPU))
    logits = Stepper(model).step([(0, [1, 2, 3])])[0]
    assert logits.shape == (3, config.vocab_size)
    assert logits.isfinite().all()


def conform(
    one: FlashGPT2ForCausalLM, two: OPTForCausalLM, three: GPTNeoXForCausalLM
) -> tuple[PagedModel, ...]:
    """For the type checker: they are what the runner asks for."""
    return one, two, three
