"""Every quantised format with adapters: the tokens of transformers + PEFT over the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.model import ModelConfig, Quantize
from modeling.runner.load_paged import load_paged
from modeling.runner.report import RunnerReport
from sharding.checkpoint import CheckpointError
from sharding.group import TensorParallel
from tests.checkpoints import AdapterRecipe, load_oracle, write_adapter, write_llama
from tests.checkpoints_generic import write_generic
from tests.checkpoints_others import write_gpt2
from tests.checkpoints_quantised import (
    load_bitsandbytes,
    rounded_to_8_bits,
    unpacked,
    weights_in_8_bits,
    write_compressed,
    write_fp8_blocks,
    write_several,
)
from tests.modeling.parity.comparison import engine_config
from tests.modeling.quantisation.quantised import (
    FP8,
    ROW_PARALLEL,
    answers,
    compare,
    decompressed,
    round_in_parts,
    rounds_in_parts,
)
from tests.ranks import run_in_memory
from tests.sweeps import swept, swept_rows

GENERIC = "gemma2_untied"
RECURRENT = "qwen3_5_text"

SIZES: dict[str, dict[str, Any]] = {
    "llama": {},
    "blocks": {"intermediate_size": 64, "num_key_value_heads": 4},
    "wide": {"hidden_size": 128, "intermediate_size": 128},
}
"""Of Llamas; in wide ones two ranks get whole blocks of 64 inputs."""

WIDE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 64,
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
"""Of a generic model, of which four ranks get whole blocks of 64 inputs."""

GPT2: dict[str, Any] = {"n_embd": 128, "n_inner": 128}
"""Its matrices are stored transposed."""

ADAPTERS = {
    "all": AdapterRecipe(r=8, std=0.2),
    "rows": AdapterRecipe(r=4, target_modules=("o_proj", "down_proj"), std=0.3, seed=2),
}


class World:
    """Tiny models, quantised or not, and adapters on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def dense(self, family: str) -> Path:
        folder = self.root / family / "dense"
        if not folder.exists():
            if family in (GENERIC, RECURRENT):
                write_generic(folder, family)
            else:
                write_llama(folder, **SIZES[family])
        return folder

    def compressed(self, family: str, preset: str) -> Path:
        folder = self.root / family / preset
        if not folder.exists():
            kind: dict[str, Any] = {"group_size": 16} if "A16" in preset else {}
            write_compressed(folder, self.dense(family), preset, **kind)
        return folder

    def blocks(self) -> Path:
        """fp8 in blocks of compressed-tensors."""
        folder = self.root / "blocks" / "FP8_BLOCK"
        if not folder.exists():
            form: dict[str, Any] = {"inputs": {"group_size": 8}, "block_structure": [16, 8]}
            write_compressed(folder, self.dense("blocks"), "FP8_BLOCK", **form)
        return folder

    def adapters(self, family: str) -> list[Path]:
        folders = {name: self.root / family / name for name in ADAPTERS}
        for name, folder in folders.items():
            if not folder.exists():
                write_adapter(folder, self.dense(family), ADAPTERS[name])
        return list(folders.values())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("quantised"))


@pytest.mark.parametrize("ranks", swept([1, 2, 4], lambda ranks: ranks == 2))
def test_fp8_with_scales_of_tokens(made: World, ranks: int) -> None:
    """Stored, and made at load: the same numbers."""
    stored = made.compressed("llama", "FP8_DYNAMIC")
    oracle = decompressed(stored)
    round_in_parts(oracle, ranks)
    compare(stored, made.adapters("llama"), oracle, ranks)
    compare(made.dense("llama"), made.adapters("llama"), oracle, ranks, quantize=FP8)


@pytest.mark.parametrize("ranks", swept([1, 2, 4], lambda ranks: ranks == 2))
def test_8_bits_with_scales_of_tokens(made: World, ranks: int) -> None:
    stored = made.compressed("llama", "W8A8")
    oracle = decompressed(stored)
    round_in_parts(oracle, ranks)
    compare(stored, made.adapters("llama"), oracle, ranks)


@pytest.mark.parametrize("ranks", [1, 4])
def test_8_bits_with_scales_of_the_checkpoint(made: World, tmp_path: Path, ranks: int) -> None:
    inputs = {"dynamic": False, "strategy": "tensor", "observer": "minmax"}
    stored = write_compressed(tmp_path / "static", made.dense("llama"), "W8A8", inputs=inputs)
    compare(stored, made.adapters("llama"), decompressed(stored), ranks)


@pytest.mark.parametrize(
    ("preset", "ranks"),
    swept_rows(
        [("FP8", 1), ("FP8", 4), ("W4A16", 1), ("W4A16", 4), ("W8A16", 2)],
        lambda preset, ranks: (ranks == 1) == (preset == "FP8"),
    ),
)
def test_formats_that_ranks_do_not_change(made: World, preset: str, ranks: int) -> None:
    """Static scales, and inputs that are not rounded: all rank counts give one rank's tokens."""
    stored = made.compressed("llama", preset)
    compare(stored, made.adapters("llama"), decompressed(stored), ranks)


SEVERAL: dict[str, dict[str, tuple[str, ...]]] = {
    "parts": {"W4A16": (r"re:.*mlp\.",), "FP8_DYNAMIC": (r"re:.*self_attn\.",)},
    "nested": {
        "FP8_DYNAMIC": ("Linear",),
        "W8A16": (r"re:.*\.[qk]_proj$", "model.layers.0.mlp.up_proj"),
        "W4A16": (r"re:.*layers\.0\.", r"re:.*v_proj"),
    },
}
"""Schemes and their targets. nested: maps of one input differ, and several targets match."""


@pytest.mark.parametrize(
    ("family", "name", "ranks"),
    swept_rows(
        [
            *(("llama", "parts", 1), ("llama", "nested", 1), ("llama", "nested", 2)),
            (GENERIC, "parts", 2),
        ],
        lambda family, _, ranks: family == "llama" and ranks == 1,
    ),
)
def test_several_schemes(made: World, tmp_path: Path, family: str, name: str, ranks: int) -> None:
    stored = write_several(tmp_path / "several", made.dense(family), SEVERAL[name])
    oracle = decompressed(stored)
    schemes = {
        path: module.quantization_scheme.input_activations is not None
        for path, module in oracle.named_modules()
        if hasattr(module, "quantization_scheme")
    }
    assert set(schemes.values()) == {True, False}, "some round their inputs"
    round_in_parts(oracle, ranks)
    compare(stored, made.adapters(family), oracle, ranks)


@pytest.mark.parametrize("ranks", [1, 4])
def test_packed_integers_with_zero_points(made: World, ranks: int) -> None:
    """transformers does not load such files; the package unpacks each map."""
    stored = made.compressed("llama", "W4A16_ASYM")
    oracle = load_oracle(made.dense("llama"))
    oracle.load_state_dict({**oracle.state_dict(), **unpacked(stored)})
    compare(stored, made.adapters("llama"), oracle, ranks)


@pytest.mark.parametrize(
    ("preset", "ranks"),
    swept_rows(
        [
            *(("FP8_DYNAMIC", ranks) for ranks in (1, 2, 4)),
            *(("W8A8", 1), ("W8A8", 2), ("W4A16", 2), ("W8A16", 4)),
        ],
        lambda *row: row in {("FP8_DYNAMIC", 1), ("W8A8", 1), ("W4A16", 2)},
    ),
)
def test_generic_models(made: World, preset: str, ranks: int) -> None:
    stored = made.compressed(GENERIC, preset)
    oracle = decompressed(stored)
    if preset in ("FP8_DYNAMIC", "W8A8"):
        round_in_parts(oracle, ranks)
    compare(stored, made.adapters(GENERIC), oracle, ranks)


@pytest.mark.parametrize(
    ("preset", "ranks"),
    swept_rows([("FP8_DYNAMIC", 1), ("W4A16", 2)], lambda preset, _: preset == "W4A16"),
)
def test_recurrent_layers(made: World, preset: str, ranks: int) -> None:
    """Their linear maps are quantised as others, their convolutions are not."""
    stored = made.compressed(RECURRENT, preset)
    compare(stored, made.adapters(RECURRENT), decompressed(stored), ranks)


@pytest.mark.parametrize("ranks", swept([1, 4], lambda ranks: ranks == 4))
def test_fp8_in_blocks(made: World, tmp_path: Path, ranks: int) -> None:
    """compressed-tensors' blocks, and those of transformers, whose package has no CPU product.

    Groups of inputs lie within the ranks' cuts, so the tokens are those of one rank.
    """
    folder, stored = made.dense("blocks"), made.blocks()
    oracle = decompressed(stored)
    compare(stored, made.adapters("blocks"), oracle, ranks)
    numbers = write_fp8_blocks(tmp_path / "fp8", folder, (16, 8))
    oracle.load_state_dict({**oracle.state_dict(), **numbers})
    compare(tmp_path / "fp8", made.adapters("blocks"), oracle, ranks)


@pytest.mark.parametrize("stored", [None, torch.float32], ids=["transformers", "DeepSeek"])
def test_fp8_in_blocks_with_powers_of_two(
    made: World, tmp_path: Path, stored: torch.dtype | None
) -> None:
    """DeepSeek's files have them in float32."""
    folder = made.dense("blocks")
    oracle = decompressed(made.blocks())
    numbers = write_fp8_blocks(tmp_path / "fp8", folder, (16, 8), "ue8m0", stored)
    oracle.load_state_dict({**oracle.state_dict(), **numbers})
    compare(tmp_path / "fp8", made.adapters("blocks"), oracle, 2)


def test_a_rank_that_would_cut_a_block_is_refused(made: World, tmp_path: Path) -> None:
    write_fp8_blocks(tmp_path / "fp8", made.dense("blocks"), (16, 16))
    with pytest.raises(ValueError, match=r"not whole groups of 16.*tensor_parallel"):
        answers(tmp_path / "fp8", [], 4, [[1, 2, 3]])


SETTINGS: dict[Quantize, dict[str, Any]] = {
    Quantize.BITSANDBYTES: {"load_in_8bit": True},
    Quantize.BITSANDBYTES_NF4: {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": torch.float32,
    },
}


@pytest.mark.parametrize("quantize", SETTINGS)
def test_bitsandbytes(made: World, tmp_path: Path, quantize: Quantize) -> None:
    """Rounded at load, and stored by transformers; in 4 bits over several ranks too."""
    # In 8 bits no number may reach the threshold, which the package applies to whole columns.
    family = "llama" if quantize is Quantize.BITSANDBYTES else "wide"
    folder, adapters, settings = made.dense(family), made.adapters(family), SETTINGS[quantize]
    oracle = load_bitsandbytes(folder, **settings)
    nested = {**settings, "bnb_4bit_use_double_quant": True}
    stored = load_bitsandbytes(folder, **nested)
    stored.save_pretrained(tmp_path / "stored")
    for ranks in (1, 2) if quantize is Quantize.BITSANDBYTES_NF4 else (1,):
        compare(folder, adapters, oracle, ranks, quantize=quantize)
        compare(tmp_path / "stored", adapters, stored, ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_round_their_inputs_in_8_bits_by_themselves(made: World, ranks: int) -> None:
    """By the package's function, over the package's numbers."""
    folder = made.dense("llama")
    oracle = load_oracle(folder)
    numbers = weights_in_8_bits(folder)
    oracle.load_state_dict({**oracle.state_dict(), **numbers})
    for name in numbers:
        path = name.removesuffix(".weight")
        parts = ranks if path.rsplit(".", 1)[-1] in ROW_PARALLEL else 1
        rounds_in_parts(oracle.get_submodule(path), parts, rounded_to_8_bits)
    compare(folder, made.adapters("llama"), oracle, ranks, quantize=Quantize.BITSANDBYTES)


def test_four_bits_that_do_not_fit(made: World, tmp_path: Path) -> None:
    load_bitsandbytes(made.dense("wide"), **SETTINGS[Quantize.BITSANDBYTES_NF4]).save_pretrained(
        tmp_path
    )
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.q_proj.weight.absmax"
    save_file({**tensors, name: tensors[name][:3]}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"q_proj: its tensors are not of the format nf4"):
        answers(tmp_path, [], 1, [[1, 2]])


def test_four_bits_of_a_generic_model(made: World) -> None:
    """Over four ranks, of which each has a block of 64 inputs."""
    folder = made.root / "wide" / GENERIC
    write_generic(folder, GENERIC, **WIDE)
    adapters = [write_adapter(made.root / "wide" / "rows", folder, ADAPTERS["rows"])]
    how = SETTINGS[Quantize.BITSANDBYTES_NF4]
    oracle = load_bitsandbytes(folder, **how)
    compare(folder, adapters, oracle, 4, quantize=Quantize.BITSANDBYTES_NF4)


def test_blocks_of_bitsandbytes_are_not_cut(made: World) -> None:
    with pytest.raises(ValueError, match=r"not whole blocks of 64.*tensor_parallel"):
        answers(made.dense("wide"), [], 4, [[1, 2]], quantize=Quantize.BITSANDBYTES_NF4)


@pytest.mark.parametrize(
    ("quantize", "form", "bits"),
    [(Quantize.FP8, "fp8", 8), (Quantize.BITSANDBYTES_NF4, "bitsandbytes of 4 bits", 4)],
)
def test_ranks_say_what_their_weights_take(
    made: World, quantize: Quantize, form: str, bits: int
) -> None:
    def load(group: TensorParallel) -> RunnerReport:
        model = ModelConfig(id=str(made.dense("wide")), quantize=quantize)
        config = engine_config(made.dense("wide"), model=model)
        return load_paged(config, group, torch.device("cpu")).allocate().report

    for report in run_in_memory(2, load):
        found = dict(report.weight_forms)
        numbers = 2 * 128 * (2 * 128 + 2 * 64 + 3 * 128) // 2
        scales = found.pop(form) - numbers * bits // 8
        assert 0 < scales < numbers * bits // 8 // 3
        # The embedding, the head and the norms stay as they are.
        assert found == {"float32": 4 * (96 * 128 + 5 * 128)}
        assert report.weight_bytes_resident == sum(report.weight_forms.values())


def test_matrices_that_are_stored_transposed(tmp_path: Path) -> None:
    dense = write_gpt2(tmp_path / "dense", **GPT2)
    recipe = AdapterRecipe(
        r=8, std=0.2, target_modules=("c_attn", "c_fc"), extra={"fan_in_fan_out": True}
    )
    adapter = write_adapter(tmp_path / "adapter", dense, recipe)
    oracle = load_bitsandbytes(dense, **SETTINGS[Quantize.BITSANDBYTES_NF4])
    compare(dense, [adapter], oracle, 1, quantize=Quantize.BITSANDBYTES_NF4)
