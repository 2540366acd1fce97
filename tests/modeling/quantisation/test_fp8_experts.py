"""Mixtures of experts in fp8 blocks, as they are published, beside transformers over the numbers.

The oracle rounds what enters each quantised map by the formula of the format.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modeling.runner.loading import load_model
from sharding.group import LoneRank
from tests.checkpoints import load_oracle, write_adapter
from tests.checkpoints_experts import EXPERT_ADAPTERS
from tests.checkpoints_generic import write_generic
from tests.checkpoints_quantised import write_fp8_blocks
from tests.modeling.parity.comparison import engine_config
from tests.modeling.quantisation.quantised import compare, round_experts
from tests.sweeps import swept

# PEFT looks for patterns of parameters among modules, and warns that it found none.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

GROUP = 4
"""Inputs of a block: cuts of two ranks lie between them."""


def rounded(x: Tensor) -> Tensor:
    """Round x [..., in] to fp8 with a scale for each group of a token's inputs."""
    parts = x.view(*x.shape[:-1], -1, GROUP)
    scales = parts.abs().amax(-1, keepdim=True) / 448
    scales = torch.where(scales == 0, torch.ones(()), scales)
    found: Tensor = (parts / scales).to(torch.float8_e4m3fn).float() * scales
    return found.flatten(-2)


def rounding_oracle(numbers: Path, quantised: set[str]) -> Any:
    """transformers' model of the numbers, whose quantised maps and experts round their inputs."""
    model = load_oracle(numbers)
    model.set_experts_implementation("eager")
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            round_experts(module, lambda name, expert, x: (rounded(x),))
        elif isinstance(module, nn.Linear) and f"{name}.weight" in quantised:
            module.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))
    return model


KINDS = swept(["qwen3_moe", "deepseek_v3", "deepseek_v32"], lambda kind: kind != "deepseek_v32")


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fp8-experts")
    dense = write_generic(root / "dense", request.param)
    numbers = write_fp8_blocks(root / "stored", dense, (GROUP, GROUP))
    assert any(".experts." in name for name in numbers)
    (root / "numbers").mkdir()
    (root / "numbers" / "config.json").write_bytes((dense / "config.json").read_bytes())
    tensors = load_file(dense / "model.safetensors") | numbers
    save_file(tensors, root / "numbers" / "model.safetensors", {"format": "pt"})
    (root / "quantised").write_text("\n".join(numbers))
    for name in ("r8", "parameters"):
        write_adapter(root / name, dense, EXPERT_ADAPTERS[name])
    return root


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_with_adapters_of_experts(made: Path, ranks: int) -> None:
    oracle = rounding_oracle(made / "numbers", set((made / "quantised").read_text().split()))
    compare(made / "stored", [made / "r8", made / "parameters"], oracle, ranks)


def test_a_rank_with_whole_experts_keeps_its_own(made: Path) -> None:
    config = engine_config(made / "stored", expert_parallel=True)
    loaded = load_model(config, LoneRank(1, 2), torch.device("cpu"))
    model: Any = loaded.model
    wanted: Any = load_oracle(made / "numbers")
    for name, whole in wanted.named_modules():
        if name.endswith(".experts"):
            own, half = model.causal.get_submodule(name), whole.num_experts // 2
            assert torch.equal(own.down_proj, whole.down_proj[half:])
            assert torch.equal(own.gate_up_proj, whole.gate_up_proj[half:])
    assert loaded.weight_forms["fp8 in blocks"] > 0
