"""Layers that predict a further token guess what transformers' do, and change no token."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.architectures.base import ArchitectureError
from configs.engine import EngineConfig, SpeculationConfig, SpeculationKind
from modeling.models.generic.mtp import MtpLayer
from modeling.runner.load_paged import load_paged
from scheduler import speculation
from sharding.checkpoint import CheckpointError
from sharding.group import SingleRank
from tests.checkpoints import AdapterRecipe, write_adapter, write_llama
from tests.checkpoints_experts import write_mixture
from tests.modeling.models.tiny_causal import write_tiny
from tests.modeling.parity.comparison import engine_config
from tests.modeling.parity.test_eagle3 import CPU, NUM_DRAFTS, Captures, Trained, answers
from tests.modeling.parity.test_speculation import REQUESTS
from tests.modeling.stepping import Answer
from tests.mtp import Mtp
from tests.oracle import final_states
from tests.ranks import run_in_memory, run_ranks

RECIPES = [
    AdapterRecipe(r=8, seed=2, target_modules=("o_proj", "q_proj", "q_b_proj")),
    AdapterRecipe(r=3, target_modules=("o_proj",)),
]


def with_mtp(model: Path) -> EngineConfig:
    speculates = SpeculationConfig(kind=SpeculationKind.MTP, max_tokens=NUM_DRAFTS)
    return engine_config(model, speculation=speculates)


class TrainedMtp(Trained):
    """A layer that was trained on answers, and what it should guess."""

    def __init__(self, model: Path, adapters: Sequence[Path], plain: list[Answer]) -> None:
        self._plain = plain
        self._texts = [[*r.prompt, *a.tokens] for r, a in zip(REQUESTS, plain, strict=True)]
        folders = [adapters[each.slot] if each.slot >= 0 else None for each in REQUESTS]
        pairs = zip(folders, self._texts, strict=True)
        self._states = [final_states(model, own, text) for own, text in pairs]
        torch.manual_seed(4)
        self._heads = layer = Mtp(model)
        layer.train_on(list(zip(self._states, self._texts, strict=True)))
        self.config = with_mtp(layer.write())


def write_all(kind: str, folder: Path) -> tuple[Path, list[Path]]:
    """Write a target and two adapters."""
    model = write_mixture(folder / "model", kind)
    return model, [write_adapter(folder / f"a{i}", model, each) for i, each in enumerate(RECIPES)]


def compare(folder: Path, kind: str, ranks: int, lost_at: int | None, captures: Captures) -> None:
    """Compare the answers of all ranks, and all drafts."""
    model, adapters = write_all(kind, folder)
    plainly = partial(answers, engine_config(model), adapters, 0, None, Captures.NONE)
    [(plain, _)] = run_in_memory(1, plainly)
    trained = TrainedMtp(model, adapters, plain)
    own = partial(answers, trained.config, adapters, NUM_DRAFTS, lost_at, captures)
    for made, run in run_ranks(ranks, own):
        assert (run.runner.num_captured > 5) == (captures is not Captures.NONE)
        trained.check(made, run)


@pytest.mark.parametrize(
    ("kind", "ranks", "lost_at", "captures"),
    [
        ("glm4_moe_lite", 2, None, Captures.NONE),
        ("deepseek_v3", 1, 12, Captures.HEADS),
        pytest.param("glm4_moe", 1, None, Captures.NONE, marks=pytest.mark.sweep),
    ],
)
def test_layers_guess_as_transformers_do_and_change_no_token(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    ranks: int,
    lost_at: int | None,
    captures: Captures,
) -> None:
    """Greedy and sampled, over adapters and without, in chunks, with a prefix of others."""
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    compare(tmp_path, kind, ranks, lost_at, captures)


@pytest.mark.sweep
@pytest.mark.parametrize("fault", ["order", "norm", "states"])
def test_faults_on_purpose_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The comparison with transformers must fail."""
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    right = MtpLayer.__init__

    def wrong(self: MtpLayer, *given: object) -> None:
        right(self, *given)  # type: ignore[arg-type]
        if fault == "order":
            self.eh_proj.data = self.eh_proj.roll(self.width, 1)
        else:
            self.enorm.weight.data.mul_(1.2)

    if fault == "states":
        monkeypatch.setattr(MtpLayer, "from_target", lambda self, inner: inner * 1.1 + 0.1)
    else:
        monkeypatch.setattr(MtpLayer, "__init__", wrong)
    with pytest.raises(AssertionError, match="guesses differ"):
        compare(tmp_path, "glm4_moe", 1, None, Captures.NONE)


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    def load(model: Path) -> None:
        load_paged(with_mtp(model), SingleRank(), CPU)

    with pytest.raises(ArchitectureError, match="LlamaForCausalLM is none of these: set engine"):
        load(write_llama(tmp_path / "llama", "gqa"))
    with pytest.raises(ArchitectureError, match="this is a qwen3_moe: set engine"):
        load(write_tiny(tmp_path / "other", "qwen3_moe"))
    model = write_mixture(tmp_path / "model", "glm4_moe_lite")
    with pytest.raises(ArchitectureError, match=r"needs num_nextn_predict_layers 1.*has None"):
        load(model)
    config = model / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "num_nextn_predict_layers": 3}))
    with pytest.raises(ArchitectureError, match="which has 3: set engine"):
        load(model)
    config.write_text(json.dumps({**settings, "num_nextn_predict_layers": 1}))
    with pytest.raises(CheckpointError, match=r"no tensor of model.layers.2: take files that"):
        load(model)
    config.write_text(json.dumps(settings))
    load(Mtp(model).write())
    path = model / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "model.layers.2.more.weight": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"does not use 1 tensors .*more"):
        load(model)
    del tensors["model.layers.2.eh_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="eh_proj"):
        load(model)
