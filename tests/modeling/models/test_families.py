"""Llama, GPT-2, GPT-NeoX and OPT against transformers, on several ranks and cut in every way."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from configs.architectures.select import load_architecture
from modeling.adapters.product import AdapterData, OutputSlice
from modeling.models.base import PagedModel
from modeling.models.select import build_model
from sharding.checkpoint import DummySource, SafetensorsCheckpoint
from sharding.group import SingleRank, TensorParallel
from sharding.loader import Weights
from sharding.slicing import width
from tests.checkpoints import VARIANTS, load_oracle, oracle_greedy, oracle_logits, write_llama
from tests.checkpoints_others import (
    GPT2_VARIANTS,
    GPT_NEOX_VARIANTS,
    OPT_VARIANTS,
    write_gpt2,
    write_gpt_neox,
    write_opt,
)
from tests.modeling.models.paged_checks import (
    PROMPTS,
    SEQUENCE,
    Checkpoint,
    assert_close,
    check_logits,
    opened,
)
from tests.modeling.models.stepping import CPU, FlashStepper, Stepper, load
from tests.ranks import run_ranks
from tests.sharding.views import LoneRank
from tests.sweeps import swept


@dataclass(frozen=True)
class Family:
    """One paged family.

    variants: what `write` can write; it has a usual one. projections: their names in PEFT.
    offsets: where in its layer's output each projection's delta goes, by the number of ranks.
    whole: the tensors that every rank reads whole. conv1d: weights are [in, out].
    """

    variants: Sequence[str]
    write: Callable[..., Path]
    projections: tuple[str, ...]
    offsets: Callable[[int], list[int]]
    whole: str
    conv1d: bool = False


def llama_offsets(ranks: int) -> list[int]:
    query, key, inner = 32 // ranks, max(8, 16 // ranks), 48 // ranks
    return [0, query, query + key, 0, 0, inner, 0]


FAMILIES = {
    "llama": Family(
        tuple(VARIANTS),
        write_llama,
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        llama_offsets,
        "norm",
    ),
    "gpt2": Family(
        tuple(GPT2_VARIANTS),
        write_gpt2,
        ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"),
        lambda _: [0, 0, 0, 0],
        r"ln_|wpe|c_proj\.bias",
        conv1d=True,
    ),
    "gpt_neox": Family(
        tuple(GPT_NEOX_VARIANTS),
        write_gpt_neox,
        ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
        lambda _: [0, 0, 0, 0],
        r"norm|(dense|dense_4h_to_h)\.bias",
    ),
    "opt": Family(
        tuple(OPT_VARIANTS),
        write_opt,
        ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
        lambda ranks: [0, 32 // ranks, 64 // ranks, 0, 0, 0],
        r"norm|embed_positions|(out_proj|fc2)\.bias",
    ),
}

CASES = [(name, variant) for name, family in FAMILIES.items() for variant in family.variants]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    name, variant = request.param
    return opened(FAMILIES[name].write(tmp_path_factory.mktemp(name), variant))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def usual(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return opened(family.write(tmp_path_factory.mktemp("usual")))


@pytest.mark.parametrize("ranks", swept([1, 2, 4], lambda ranks: ranks == 2))
def test_logits_equal_transformers(variant: Checkpoint, ranks: int) -> None:
    check_logits(variant, ranks)


@pytest.mark.parametrize("ranks", swept([1, 2], lambda ranks: ranks == 1))
def test_greedy_continuations(variant: Checkpoint, ranks: int) -> None:
    expected = [oracle_greedy(variant.oracle, prompt, 8) for prompt in PROMPTS]

    def on_rank(group: TensorParallel) -> list[list[int]]:
        stepper = Stepper(load(variant.folder, group))
        outs: list[list[int]] = [[] for _ in PROMPTS]
        rows: list[tuple[int, Sequence[int]]] = list(enumerate(PROMPTS))
        for _ in range(8):
            for out, logits in zip(outs, stepper.step(rows), strict=True):
                out.append(int(logits[-1].argmax()))
            rows = [(i, out[-1:]) for i, out in enumerate(outs)]
        return outs

    assert run_ranks(ranks, on_rank) == [expected] * ranks


@pytest.mark.parametrize("page_size", [16, 128, 256])
@pytest.mark.parametrize("cuts", [(40,), (16, 32, 40), (1, 2, 39, 40), tuple(range(1, 41))])
def test_whole_and_cut_prefills_are_equal(
    usual: Checkpoint, cuts: tuple[int, ...], page_size: int
) -> None:
    stepper = Stepper(load(usual.folder, SingleRank()), page_size)
    logits = []
    for start, stop in zip((0, *cuts), cuts, strict=False):
        logits += stepper.step([(0, SEQUENCE[start:stop])])
    assert_close([torch.cat(logits)], [oracle_logits(usual.oracle, SEQUENCE)])


def test_prefill_chunk_and_decode_share_a_step(usual: Checkpoint) -> None:
    stepper = Stepper(load(usual.folder, SingleRank()))
    decoding, chunked, fresh = SEQUENCE[:19], SEQUENCE[::-1], SEQUENCE[5:12]
    stepper.step([(0, decoding[:18]), (1, chunked[:17])])
    mixed = stepper.step([(1, chunked[17:]), (0, decoding[18:]), (2, fresh)])
    wanted = [
        oracle_logits(usual.oracle, chunked)[17:],
        oracle_logits(usual.oracle, decoding)[18:],
        oracle_logits(usual.oracle, fresh),
    ]
    assert_close(mixed, wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "write",
    [write_llama, write_gpt2, partial(write_gpt2, variant="upcast"), write_gpt_neox, write_opt],
)
def test_half_types_stay_near_float32(
    tmp_path: Path, write: Callable[..., Path], dtype: Any
) -> None:
    """As near as transformers is in the same type; the checkpoint is of that type."""
    folder = write(tmp_path, dtype=dtype)
    logits = Stepper(load(folder, SingleRank(), getattr(torch, dtype))).step([(0, SEQUENCE)])[0]
    assert logits.dtype == getattr(torch, dtype)
    exact = oracle_logits(load_oracle(folder), SEQUENCE)
    theirs = oracle_logits(load_oracle(folder, dtype), SEQUENCE).float()
    assert (logits.float() - exact).square().mean() < 2 * (theirs - exact).square().mean()


def test_only_the_asked_for_tokens_get_logits(usual: Checkpoint) -> None:
    model: Any = load(usual.folder, SingleRank())
    expected = oracle_logits(usual.oracle, SEQUENCE)[[3, 39]]
    indices = torch.tensor([3, 39])
    logits = Stepper(model).run([(0, SEQUENCE)], lm_head_indices=indices)
    assert_close([logits], [expected])
    hidden = Stepper(model).run([(0, SEQUENCE)], lm_head_indices=indices, skip_lm_head=True)
    assert len(hidden) == 2
    head = model.logits if hasattr(model, "logits") else model.lm_head
    assert_close([head(hidden)], [expected])


def test_tokens_that_are_cached_already_need_no_storing(usual: Checkpoint) -> None:
    """What is stored can be limited: here the first 8 tokens' pages are computed, then kept."""
    stepper = Stepper(load(usual.folder, SingleRank()))
    stepper.step([(0, SEQUENCE[:8])])
    kept = [layer.keys.clone() for layer in stepper.cache]
    stepper.lengths[0] = 0
    logits = stepper.run([(0, SEQUENCE)], stored=torch.arange(8, 40))
    assert_close([logits], [oracle_logits(usual.oracle, SEQUENCE)])
    page = stepper.tables[0][0]
    for layer, before in zip(stepper.cache, kept, strict=True):
        assert torch.equal(layer.keys[page, :8], before[page, :8])


@dataclass
class Recorder(AdapterData):
    """Adapter data that adds nothing and remembers who asked."""

    model: PagedModel
    asked: list[tuple[int, int, int]]

    def add(self, y: Tensor, x: Tensor, layer: int, targets: tuple[OutputSlice, ...]) -> None:
        for target in targets:
            projection = self.model.projections[target.projection]
            assert x.shape[1] == projection.local_inputs
            assert target.offset + projection.local_outputs <= y.shape[1]
            self.asked.append((layer, target.projection, target.offset))


@pytest.mark.parametrize("write", [write_llama, write_gpt2])
def test_the_seeds_forward_computes_the_same(tmp_path: Path, write: Callable[..., Path]) -> None:
    """LoRAX's `forward` computes what `paged` does, with every one of its arguments."""
    model = load(write(tmp_path), SingleRank())
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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_projection_of_every_layer_asks_for_its_delta(
    family: Family, usual: Checkpoint, ranks: int
) -> None:
    def on_rank(group: TensorParallel) -> list[tuple[int, int, int]]:
        model = load(usual.folder, group)
        recorder = Recorder(model, [])
        Stepper(model).run([(0, [1, 2, 3])], adapter_data=recorder)
        return recorder.asked

    offsets = family.offsets(ranks)
    expected = [(layer, i, offset) for layer in range(2) for i, offset in enumerate(offsets)]
    assert run_ranks(ranks, on_rank) == [expected] * ranks


def test_projections_are_named_as_peft_names_them(family: Family, usual: Checkpoint) -> None:
    """Modules are found in transformers' model, where PEFT looks."""
    model = load(usual.folder, SingleRank())
    shapes = {name: tuple(p.shape) for name, p in usual.oracle.named_parameters()}
    for projection in model.projections:
        shape = (projection.out_features, projection.in_features)
        for layer in range(projection.num_layers):
            stored = shapes[projection.module.format(layer=layer) + ".weight"]
            assert stored == (shape[::-1] if family.conv1d else shape)
        assert projection.module.endswith(projection.name)
        assert width(projection.inputs) == projection.in_features
        assert width(projection.outputs) == projection.out_features
    assert tuple(projection.name for projection in model.projections) == family.projections


def test_each_rank_reads_its_share(family: Family, usual: Checkpoint) -> None:
    """Half of every tensor but those whose names match `whole`."""
    tensors = load_file(usual.folder / "model.safetensors")
    expected = sum(
        value.nbytes if re.search(family.whole, name) else value.nbytes // 2
        for name, value in tensors.items()
    )
    for rank in range(2):
        source = SafetensorsCheckpoint(usual.folder)
        weights = Weights(source, LoneRank(rank, 2), torch.float32, CPU)
        build_model(load_architecture(usual.folder), weights)
        assert source.bytes_read == expected


def test_dummy_weights_need_no_files(usual: Checkpoint) -> None:
    """A model of no files: every name is to be had."""
    config = load_architecture(usual.folder)
    source = DummySource(CPU, torch.float32)
    model = build_model(config, Weights(source, SingleRank(), torch.float32, CPU))
    logits = Stepper(model).step([(0, [1, 2, 3])])[0]
    assert logits.shape == (3, config.vocab_size)
    assert logits.isfinite().all()
