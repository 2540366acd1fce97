"""Flash Llama against transformers: logits on 1, 2 and 4 ranks, and every way to cut the work."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modeling.adapters.product import OutputSlice
from modeling.models import llama
from modeling.models.base import PagedModel
from sharding.group import SingleRank, TensorParallel
from sharding.linear_weight import LinearWeight
from sharding.slicing import width
from tests.checkpoints import VARIANTS, load_oracle, oracle_greedy, oracle_logits, write_llama
from tests.modeling.models.paged_checks import (
    FLASH,
    PAGED,
    PROMPTS,
    SEQUENCE,
    Checkpoint,
    check_flash_forward,
)
from tests.modeling.models.stepping import Stepper, load
from tests.ranks import run_ranks


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = write_llama(tmp_path_factory.mktemp("llama"), request.param)
    return Checkpoint(folder, load_oracle(folder))


@pytest.fixture(scope="module")
def gqa(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = write_llama(tmp_path_factory.mktemp("gqa"), "gqa")
    return Checkpoint(folder, load_oracle(folder))


def assert_close(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_logits_equal_transformers(variant: Checkpoint, ranks: int) -> None:
    expected = [oracle_logits(variant.oracle, prompt) for prompt in PROMPTS]

    def on_rank(group: TensorParallel) -> list[Tensor]:
        return Stepper(load(variant.folder, group)).step(list(enumerate(PROMPTS)))

    for logits in run_ranks(ranks, on_rank):
        assert_close(logits, expected)


@pytest.mark.parametrize("page_size", [16, 128, 256])
@pytest.mark.parametrize("cuts", [(40,), (16, 32, 40), (1, 2, 39, 40), tuple(range(1, 41))])
def test_whole_and_cut_prefills_are_equal(
    gqa: Checkpoint, cuts: tuple[int, ...], page_size: int
) -> None:
    stepper = Stepper(load(gqa.folder, SingleRank()), page_size)
    logits = []
    for start, stop in zip((0, *cuts), cuts, strict=False):
        logits += stepper.step([(0, SEQUENCE[start:stop])])
    assert_close([torch.cat(logits)], [oracle_logits(gqa.oracle, SEQUENCE)])


def test_prefill_chunk_and_decode_share_a_step(gqa: Checkpoint) -> None:
    stepper = Stepper(load(gqa.folder, SingleRank()))
    decoding, chunked, fresh = SEQUENCE[:19], SEQUENCE[::-1], SEQUENCE[5:12]
    stepper.step([(0, decoding[:18]), (1, chunked[:17])])
    mixed = stepper.step([(1, chunked[17:]), (0, decoding[18:]), (2, fresh)])
    wanted = [
        oracle_logits(gqa.oracle, chunked)[17:],
        oracle_logits(gqa.oracle, decoding)[18:],
        oracle_logits(gqa.oracle, fresh),
    ]
    assert_close(mixed, wanted)


@pytest.mark.parametrize("ranks", [1, 2])
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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_stay_near_float32(tmp_path: Path, dtype: Any) -> None:
    folder = write_llama(tmp_path, "gqa", dtype=dtype)
    logits = Stepper(load(folder, SingleRank(), getattr(torch, dtype))).step([(0, SEQUENCE)])[0]
    assert logits.dtype == getattr(torch, dtype)
    exact = oracle_logits(load_oracle(folder), SEQUENCE)
    theirs = oracle_logits(load_oracle(folder, dtype), SEQUENCE).float()
    assert (logits.float() - exact).square().mean() < 2 * (theirs - exact).square().mean()


def test_a_sharded_checkpoint_is_the_same_model(gqa: Checkpoint, tmp_path: Path) -> None:
    folder = write_llama(tmp_path, "gqa", max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    logits = Stepper(load(folder, SingleRank())).step([(0, SEQUENCE)])
    assert_close(logits, [oracle_logits(gqa.oracle, SEQUENCE)])


def test_only_the_asked_for_tokens_get_logits(gqa: Checkpoint) -> None:
    model = load(gqa.folder, SingleRank())
    expected = oracle_logits(gqa.oracle, SEQUENCE)[[3, 39]]
    indices = torch.tensor([3, 39])
    logits = Stepper(model).run([(0, SEQUENCE)], lm_head_indices=indices)
    assert_close([logits], [expected])
    hidden = Stepper(model).run([(0, SEQUENCE)], lm_head_indices=indices, skip_lm_head=True)
    assert hidden.shape == (2, 32)
    assert isinstance(model, llama.FlashLlamaForCausalLM)
    assert_close([model.lm_head(hidden)], [expected])


def test_tokens_that_are_cached_already_need_no_storing(gqa: Checkpoint) -> None:
    """What is stored can be limited: here the first 8 tokens' pages are computed, then kept."""
    stepper = Stepper(load(gqa.folder, SingleRank()))
    stepper.step([(0, SEQUENCE[:8])])
    kept = [layer.keys.clone() for layer in stepper.cache]
    stepper.lengths[0] = 0
    logits = stepper.run([(0, SEQUENCE)], stored=torch.arange(8, 40))
    assert_close([logits], [oracle_logits(gqa.oracle, SEQUENCE)])
    page = stepper.tables[0][0]
    for layer, before in zip(stepper.cache, kept, strict=True):
        assert torch.equal(layer.keys[page, :8], before[page, :8])


def test_the_seeds_forward_computes_the_same(gqa: Checkpoint) -> None:
    check_flash_forward(gqa)


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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_projection_of_every_layer_asks_for_its_delta(gqa: Checkpoint, ranks: int) -> None:
    def on_rank(group: TensorParallel) -> list[tuple[int, int, int]]:
        model = load(gqa.folder, group)
        recorder = Recorder(model, [])
        Stepper(model).run([(0, [1, 2, 3])], adapter_data=recorder)
        return recorder.asked

    query, key, inner = 32 // ranks, max(8, 16 // ranks), 48 // ranks
    offsets = [0, query, query + key, 0, 0, inner, 0]
    expected = [(layer, i, offset) for layer in range(2) for i, offset in enumerate(offsets)]
    assert run_ranks(ranks, on_rank) == [expected] * ranks


def test_projections_are_named_as_in_the_checkpoint(gqa: Checkpoint) -> None:
    model = load(gqa.folder, SingleRank())
    shapes = {name: tuple(p.shape) for name, p in gqa.oracle.named_parameters()}
    for projection in model.projections:
        for layer in range(projection.num_layers):
            shape = shapes[projection.module.format(layer=layer) + ".weight"]
            assert shape == (projection.out_features, projection.in_features)
        assert projection.module.endswith(projection.name)
        assert width(projection.inputs) == projection.in_features
        assert width(projection.outputs) == projection.out_features
    assert [p.name for p in model.projections] == [
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ]


def test_another_kind_of_layer_can_be_created(gqa: Checkpoint) -> None:
    from configs.architectures.select import load_architecture
    from sharding.checkpoint import SafetensorsCheckpoint
    from sharding.loader import Weights

    made: list[tuple[int, str]] = []

    def create(layer_id: int, prefix: str, config: Any, weights: Weights) -> nn.Module:
        made.append((layer_id, prefix))
        return llama.FlashLlamaLayer(layer_id, prefix, config, weights)

    source = SafetensorsCheckpoint(gqa.folder)
    weights = Weights(source, SingleRank(), torch.float32, torch.device("cpu"))
    config = load_architecture(gqa.folder)
    assert isinstance(config, llama.LlamaConfig)
    model = llama.FlashLlamaForCausalLM("", config, weights, create)
    weights.finish()
    assert made == [(0, "model"), (1, "model")]
    logits = Stepper(model).step([(0, SEQUENCE)])
    assert_close(logits, [oracle_logits(gqa.oracle, SEQUENCE)])


def test_the_seeds_signatures() -> None:
    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)[1:]

    decoder = ["prefix", "config", "weights", "create_layer_fn"]
    assert names(llama.FlashLlamaForCausalLM.__init__) == decoder
    assert names(llama.FlashLlamaModel.__init__) == decoder
    layer = ["layer_id", "prefix", "config", "weights"]
    assert names(llama.FlashLlamaLayer.__init__) == layer
    for part in (llama.FlashLlamaAttention, llama.LlamaMLP):
        assert names(part.__init__)[:3] == ["prefix", "config", "weights"]
    assert issubclass(llama.LlamaRMSNorm, nn.Module)
    assert llama.LlamaConfig.__name__ == "Architecture"
    signature = inspect.signature(llama.FlashLlamaForCausalLM.forward)
    assert ", ".join(names(llama.FlashLlamaForCausalLM.forward)) == FLASH
    assert ", ".join(names(llama.FlashLlamaForCausalLM.paged)) == PAGED
    defaults = {n: p.default for n, p in signature.parameters.items() if p.default is not p.empty}
    assert defaults == {
        "prefill_cache_indices": None,
        "lm_head_indices": None,
        "cross_attention_states": None,
        "skip_lm_head": False,
    }
