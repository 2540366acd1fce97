"""What only GPT-2 has: float32 scores, Conv1D maps cut in three, old masks in checkpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling.attention.base import AttentionSpec
from modeling.attention.kv_cache import CacheSpec, allocate
from modeling.attention.sdpa import SdpaAttention
from modeling.models import gpt2
from sharding.checkpoint import CheckpointError
from sharding.group import SingleRank
from tests.checkpoints_others import write_gpt2
from tests.modeling.models import paged_checks as checks
from tests.modeling.models.paged_checks import Checkpoint, names, opened
from tests.modeling.models.stepping import load
from tests.sharding.views import LoneRank


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return opened(write_gpt2(tmp_path_factory.mktemp("plain")))


@pytest.mark.parametrize("tokens", [1, 3])
def test_scores_are_float32_whatever_the_type(tokens: int) -> None:
    """What reorder_and_upcast_attn asks for: scores beyond float16's 65504 do no harm."""
    cpu, half = torch.device("cpu"), torch.float16
    cache = allocate(CacheSpec(1, 16, 1, 8, half), 1, cpu)[0]
    k = torch.linspace(90, 110, tokens).view(-1, 1, 1).expand(-1, 1, 8).to(half)
    v = torch.arange(tokens).view(-1, 1, 1).expand(-1, 1, 8).to(half)
    cache.store(k, v, torch.arange(tokens))
    backend = SdpaAttention(AttentionSpec(1, 1, 8, 1.0, 16, half, cpu))
    tables = torch.zeros(1, 1, dtype=torch.int32)
    step = backend.prepare([1], [tokens], tables)
    q = torch.full((1, 1, 8), 120.0, dtype=half)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    out = backend.forward(q, cache, starts, tables, step)
    assert out.flatten().tolist() == [tokens - 1.0] * 8


def test_adapters_names_do_not_follow_the_checkpoints(tmp_path: Path) -> None:
    model = load(write_gpt2(tmp_path, "bare_names"), SingleRank())
    assert model.projections[0].module == "transformer.h.{layer}.attn.c_attn"


def test_c_attn_is_cut_for_each_of_its_three_parts(plain: Checkpoint) -> None:
    """Rank 1 of 4 has head 1 of q, of k and of v: 8 columns in each 32."""
    fused = load(plain.folder, LoneRank(1, 4)).projections[0]
    assert fused.outputs == ((8, 16), (40, 48), (72, 80))


def test_old_causal_masks_are_left_unread(tmp_path: Path) -> None:
    folder = write_gpt2(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4),
        "transformer.h.1.attn.masked_bias": torch.tensor(-1e4),
        "lm_head.weight": tensors["transformer.wte.weight"].clone(),
    }
    save_file({**tensors, **masks}, folder / "model.safetensors")
    load(folder, SingleRank())
    save_file(
        {**tensors, "transformer.h.0.attn.other": torch.ones(1)}, folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match=r"does not use 1 tensors.*attn\.other"):
        load(folder, SingleRank())


def test_heads_that_the_ranks_cannot_share(tmp_path: Path) -> None:
    folder = write_gpt2(tmp_path, n_embd=24, n_head=3)
    with pytest.raises(ValueError, match=r"num_attention_heads \(3\)"):
        load(folder, LoneRank(0, 2))


def test_the_seeds_signatures() -> None:
    assert names(gpt2.FlashGPT2ForCausalLM.__init__) == ["prefix", "config", "weights"]
    assert names(gpt2.FlashGPT2Model.__init__) == ["prefix", "config", "weights"]
    assert names(gpt2.FlashGPT2Attention.__init__)[:3] == ["prefix", "config", "weights"]
    assert names(gpt2.GPT2MLP.__init__)[:3] == ["prefix", "config", "weights"]
    assert names(gpt2.GPT2Block.__init__) == ["layer_id", "prefix", "config", "weights"]
    checks.check_flash_signature(gpt2.FlashGPT2ForCausalLM)
