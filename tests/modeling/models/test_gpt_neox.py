"""What only GPT-NeoX has: fused heads, parallel residuals, two names of its head."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling.models import gpt_neox
from sharding.checkpoint import CheckpointError
from sharding.group import SingleRank
from tests.checkpoints import oracle_logits
from tests.checkpoints_others import write_gpt_neox
from tests.modeling.models import paged_checks as checks
from tests.modeling.models.paged_checks import Checkpoint, names, opened
from tests.modeling.models.stepping import Stepper, load
from tests.sharding.views import LoneRank


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return opened(write_gpt_neox(tmp_path_factory.mktemp("plain")))


def test_query_key_value_is_cut_head_by_head(plain: Checkpoint) -> None:
    """Heads are 16 wide: rank 1 of 2 has heads 2 and 3, whose rows begin at 96 and 144."""
    fused = load(plain.folder, LoneRank(1, 2)).projections[0]
    assert fused.outputs == (
        *((96, 112), (144, 160)),
        *((112, 128), (160, 176)),
        *((128, 144), (176, 192)),
    )


def test_a_parallel_residual_sums_once_a_layer(plain: Checkpoint, tmp_path: Path) -> None:
    assert checks.count_sums(plain.folder) == 2 * 1
    assert checks.count_sums(write_gpt_neox(tmp_path, "sequential")) == 2 * 2


def test_positions_beyond_the_trained_length(plain: Checkpoint) -> None:
    """256 positions were trained; angles are computed for any."""
    sequence = [(5 * i + i * i) % 96 for i in range(300)]
    logits = Stepper(load(plain.folder, SingleRank()), num_pages=32).step([(0, sequence)])
    checks.assert_close(logits, [oracle_logits(plain.oracle, sequence)])


def edit(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})


def test_the_head_has_two_names(plain: Checkpoint, tmp_path: Path) -> None:
    folder = write_gpt_neox(tmp_path)
    assert "embed_out.weight" in load_file(folder / "model.safetensors")
    edit(folder, lambda tensors: {k.replace("embed_out", "lm_head"): v for k, v in tensors.items()})
    checks.check_logits(Checkpoint(folder, plain.oracle), 1)


def test_a_decoder_saved_alone_has_bare_names(tmp_path: Path) -> None:
    folder = write_gpt_neox(tmp_path, "tied")
    checkpoint = opened(folder)
    edit(folder, lambda tensors: {k.removeprefix("gpt_neox."): v for k, v in tensors.items()})
    checks.check_logits(checkpoint, 1)
    model = load(folder, SingleRank())
    assert model.projections[1].module == "gpt_neox.layers.{layer}.attention.dense"


def test_old_buffers_are_left_unread(tmp_path: Path) -> None:
    folder = write_gpt_neox(tmp_path)
    buffers = {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4),
        "gpt_neox.layers.1.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.1.attention.rotary_emb.inv_freq": torch.ones(2),
    }
    edit(folder, lambda tensors: {**tensors, **buffers})
    load(folder, SingleRank())
    edit(folder, lambda tensors: {**tensors, "gpt_neox.layers.0.attention.other": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"does not use 1 tensors.*attention\.other"):
        load(folder, SingleRank())


def test_sizes_that_the_ranks_cannot_share(tmp_path: Path) -> None:
    folder = write_gpt_neox(tmp_path, intermediate_size=3)
    with pytest.raises(ValueError, match=r"intermediate_size \(3\)"):
        load(folder, LoneRank(0, 4))


def test_the_seeds_signatures() -> None:
    model = gpt_neox.GPTNeoXForCausalLM
    assert names(model.__init__) == ["config", "weights"]
    assert names(gpt_neox.GPTNeoXModel.__init__) == ["config", "weights"]
    assert names(gpt_neox.RotaryEmbedding.__init__) == ["config", "weights"]
    assert names(gpt_neox.GPTNeoXLayer.__init__) == ["layer_id", "prefix", "config", "weights"]
    assert names(gpt_neox.GPTNeoXAttention.__init__)[:3] == ["prefix", "config", "weights"]
    assert names(gpt_neox.GPTNeoXMLP.__init__)[:3] == ["prefix", "config", "weights"]
    assert ", ".join(names(model.paged)) == checks.PAGED
    assert ", ".join(names(model.forward)) == (
        "input_ids, attention_mask, position_ids, head_mask, past_key_values, inputs_embeds, "
        "labels, use_cache, output_attentions, output_hidden_states, return_dict"
    )
    parameters = inspect.signature(model.forward).parameters
    assert {parameters[name].default for name in names(model.forward)} == {None}
