"""gpt-oss with experts in mxfp4 beside transformers over the numbers that it makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from configs.architectures.base import ArchitectureError
from configs.model import DType, ModelConfig
from modeling.models.generic.experts import RoutedLayers
from modeling.models.generic.fp4_experts import Fp4Matrices
from modeling.quantisation.fp4 import pack
from modeling.runner.loading import load_model
from sharding.group import LoneRank, SingleRank
from tests.checkpoints import load_oracle, write_adapter
from tests.checkpoints_experts import EXPERT_ADAPTERS
from tests.checkpoints_generic import randomise, write_generic
from tests.modeling.parity.comparison import engine_config
from tests.modeling.quantisation.quantised import compare

# PEFT looks for patterns of parameters among modules, and warns that it found none.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")


def write_mxfp4(stored: Path, numbers: Path) -> None:
    """Write a checkpoint as it is published, and one of the numbers that transformers makes."""
    config: Any = AutoConfig.from_pretrained(write_generic(stored, "gpt_oss"))
    config.intermediate_size = 64  # Whole groups of inputs that share a scale.
    auto: Any = AutoModelForCausalLM
    torch.manual_seed(5)
    model = auto.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        randomise(name, parameter)
    for folder in (stored, numbers):
        model.save_pretrained(folder)
    path = stored / "model.safetensors"
    dense = load_file(path)
    packed: dict[str, Tensor] = {}
    for name, tensor in list(dense.items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            codes = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 126, codes.shape[:3], dtype=torch.uint8)
            made = convert_moe_packed_tensors(codes, scales, dtype=torch.float32)
            assert made.shape == tensor.shape
            dense[name] = made
            packed |= {f"{name}_blocks": codes, f"{name}_scales": scales}
    assert packed
    save_file(dense, numbers / path.name, {"format": "pt"})
    left = {name: each for name, each in dense.items() if f"{name}_blocks" not in packed}
    save_file(left | packed, path, {"format": "pt"})
    said = stored / "config.json"
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    said.write_text(json.dumps(json.loads(said.read_text()) | {"quantization_config": method}))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("mxfp4")
    write_mxfp4(root / "stored", root / "numbers")
    for name in ("r8", "parameters"):
        write_adapter(root / name, root / "numbers", EXPERT_ADAPTERS[name])
    return root


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_with_adapters_of_experts(made: Path, ranks: int) -> None:
    adapters = [made / "r8", made / "parameters"]
    compare(made / "stored", adapters, load_oracle(made / "numbers"), ranks)


def test_numbers_are_made_for_each_product(made: Path) -> None:
    """A rank keeps 4.25 bits of each, of inputs in whole chunks of 128, and what it makes of them
    is transformers' own."""
    loaded = load_model(engine_config(made / "stored"), SingleRank(), torch.device("cpu"))
    model: Any = loaded.model
    wanted: Any = load_oracle(made / "numbers")
    total = 0
    for name, module in wanted.named_modules():
        if name.endswith(".experts"):
            own = model.causal.get_submodule(name)
            for each in ("gate_up_proj", "down_proj"):
                numbers = getattr(module, each)
                assert torch.equal(getattr(own, each), numbers)
                kept = sum(p.nbytes for p in getattr(own, f"{each}_stored").parameters())
                experts, inputs, outputs = numbers.shape
                assert kept == experts * outputs * -(-inputs // 128) * 128 * 17 // 32
                total += kept
    assert loaded.weight_forms["mxfp4"] == total


def test_a_rank_with_whole_experts_keeps_its_own(made: Path) -> None:
    config = engine_config(made / "stored", expert_parallel=True)
    model: Any = load_model(config, LoneRank(1, 2), torch.device("cpu")).model
    wanted: Any = load_oracle(made / "numbers")
    name = "model.layers.1.mlp.experts"
    whole, own = wanted.get_submodule(name), model.causal.get_submodule(name)
    half = whole.num_experts // 2
    assert torch.equal(own.down_proj, whole.down_proj[half:])
    assert torch.equal(own.gate_up_proj, whole.gate_up_proj[half:])


@pytest.mark.parametrize(
    ("dtype", "ranks", "taken"),
    [(DType.BFLOAT16, 1, True), (DType.BFLOAT16, 2, True), (DType.FLOAT32, 1, False)],
)
def test_where_gpus_take_adapters_of_these_experts(
    made: Path, dtype: DType, ranks: int, taken: bool
) -> None:
    settings = ModelConfig(id=str(made / "stored"), dtype=dtype)
    config = engine_config(made / "stored", model=settings)
    group = SingleRank() if ranks == 1 else LoneRank(0, ranks)
    model: Any = load_model(config, group, torch.device("cpu")).model
    assert model.adapts_experts_on_gpus is model.has_expert_kernels is taken


def test_whole_experts_in_mxfp4_are_refused_on_gpus(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = RoutedLayers.leave_stored
    monkeypatch.setattr(RoutedLayers, "leave_stored", lambda own, _, *more: leave(own, True, *more))
    config = engine_config(made / "stored", expert_parallel=True)
    with pytest.raises(ArchitectureError, match="whole quantised experts on ranks"):
        load_model(config, LoneRank(0, 2), torch.device("cpu"))


def matrices(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Fp4Matrices:
    """Put together codes, uint8 [experts, out, in], and scales [experts, out, in / 32]."""
    return Fp4Matrices(map(pack, codes, scales), codes.shape[2], dtype)


@pytest.mark.parametrize("inputs", [64, 96, 128, 224])
def test_kernels_read_the_same_numbers(inputs: int) -> None:
    """By masks and a factor, as modeling/kernels/fp4_tiles.py makes them."""
    codes = torch.randint(0, 16, (2, 6, inputs), dtype=torch.uint8)
    scales = torch.randint(1, 129, (2, 6, inputs // 32), dtype=torch.uint8)
    stored = matrices(codes, scales, torch.bfloat16)
    words, powers = stored.codes.data, stored.scales.data[:, :, 0]
    made = []
    for place in range(4):
        bits = words.int() & 0xFFFF
        low = bits << (6 - 4 * place) if place < 2 else bits >> (4 * place - 6)
        parts = (low & 0x1C0) | ((bits << (12 - 4 * place)) & 0x8000)
        factors = ((((powers >> (8 * place)) & 255) + 126) << 7).short().view(torch.bfloat16)
        # Integers of 16 bits have a sign where a number of bfloat16 has it.
        found = torch.where(parts > 0x7FFF, parts - 0x10000, parts).short().view(torch.bfloat16)
        made.append(found.double() * factors.double()[..., None])
    own = torch.stack(made, 3).permute(0, 2, 1, 3, 4).flatten(2)[..., :inputs]
    assert torch.equal(own, stored.numbers().double())


def test_numbers_that_kernels_do_not_make_are_refused() -> None:
    codes = torch.zeros(1, 2, 32, dtype=torch.uint8)
    for scale, dtype in ((129, torch.bfloat16), (120, torch.float16)):
        stored = matrices(codes, torch.full((1, 2, 1), scale).byte(), dtype)
        with pytest.raises(ArchitectureError, match="GPUs multiply them in bfloat16"):
            stored.kernel_fields()
