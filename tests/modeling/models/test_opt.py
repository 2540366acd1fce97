"""What only OPT has: its table of positions, optional projections, bare names."""

import inspect
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modeling.models import opt
from sharding.checkpoint import CheckpointError
from sharding.group import SingleRank
from tests.checkpoints_others import write_opt
from tests.modeling.models import paged_checks as checks
from tests.modeling.models.paged_checks import Checkpoint, names, opened
from tests.modeling.models.stepping import load
from tests.sharding.views import LoneRank


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return opened(write_opt(tmp_path_factory.mktemp("plain")))


def test_adapters_names_do_not_follow_the_checkpoints(tmp_path: Path) -> None:
    model = load(write_opt(tmp_path, "bare_names"), SingleRank())
    assert model.projections[4].module == "model.decoder.layers.{layer}.fc1"


def test_two_sums_a_layer(plain: Checkpoint) -> None:
    assert checks.count_sums(plain.folder) == 2 * 2


def test_a_position_is_two_rows_down_the_table(plain: Checkpoint) -> None:
    model = load(plain.folder, SingleRank())
    assert isinstance(model, opt.OPTForCausalLM)
    table = model.model.decoder.embed_positions
    theirs = plain.oracle.model.decoder.embed_positions.weight
    assert torch.equal(table(torch.tensor([-1, 0, 7])), theirs[[1, 2, 9]])


def test_positions_count_what_the_mask_shows(plain: Checkpoint) -> None:
    model = load(plain.folder, SingleRank())
    assert isinstance(model, opt.OPTForCausalLM)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    assert model.positions(mask, 0).tolist() == [[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert model.positions(mask, 4).tolist() == [[2], [4]]


def test_tensors_without_a_use_are_named(tmp_path: Path) -> None:
    folder = write_opt(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    left = {"model.decoder.project_in.weight": torch.ones(32, 32)}
    save_file({**tensors, **left}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"does not use 1 tensors.*project_in"):
        load(folder, SingleRank())


def test_sizes_that_the_ranks_cannot_share(tmp_path: Path) -> None:
    folder = write_opt(tmp_path, ffn_dim=3)
    with pytest.raises(ValueError, match=r"ffn_dim \(3\)"):
        load(folder, LoneRank(0, 4))


def test_the_seeds_signatures() -> None:
    assert names(opt.OPTForCausalLM.__init__) == ["config", "weights"]
    assert names(opt.OPTModel.__init__) == ["config", "weights"]
    assert names(opt.OPTDecoder.__init__) == ["config", "weights"]
    assert names(opt.OPTDecoderLayer.__init__) == ["layer_id", "prefix", "config", "weights"]
    assert names(opt.OPTAttention.__init__)[:3] == ["prefix", "config", "weights"]
    assert names(opt.OPTLearnedPositionalEmbedding.__init__) == ["prefix", "config", "weights"]
    assert ", ".join(names(opt.OPTForCausalLM.paged)) == checks.PAGED
    assert ", ".join(names(opt.OPTForCausalLM.forward)) == (
        "input_ids, attention_mask, head_mask, past_key_values, inputs_embeds, labels, "
        "use_cache, output_attentions, output_hidden_states, return_dict"
    )
    parameters = inspect.signature(opt.OPTForCausalLM.forward).parameters
    assert {parameters[name].default for name in names(opt.OPTForCausalLM.forward)} == {None}
