"""Every quantised format with adapters: the tokens of transformers + PEFT over the same weights."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import AdapterRecipe, write_adapter, write_llama
from tests.checkpoints_generic import write_generic
from tests.checkpoints_quantised import write_compressed
from tests.modeling.quantisation.quantised import FP8, compare, decompressed, round_in_parts

GENERIC = "gemma2_untied"

ADAPTERS = {
    "all": AdapterRecipe(r=8, std=0.2),
    "rows": AdapterRecipe(r=4, target_modules=("o_proj", "down_proj"), std=0.3, seed=2),
}


class World:
    """Tiny models, quantised or not, and adapters on disk."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def dense(self, family: str) -> Path:
        folder = self._root / family / "dense"
        if not folder.exists():
            write = write_llama if family == "llama" else write_generic
            write(folder, "gqa" if family == "llama" else family)
        return folder

    def compressed(self, family: str, preset: str) -> Path:
        folder = self._root / family / preset
        if not folder.exists():
            kind: dict[str, Any] = {"group_size": 16} if preset.startswith("W") else {}
            write_compressed(folder, self.dense(family), preset, **kind)
        return folder

    def adapters(self, family: str) -> list[Path]:
        folders = {name: self._root / family / name for name in ADAPTERS}
        for name, folder in folders.items():
            if not folder.exists():
                write_adapter(folder, self.dense(family), ADAPTERS[name])
        return list(folders.values())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("quantised"))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fp8_with_scales_of_tokens(made: World, ranks: int) -> None:
    """Stored, and made at load: the same numbers."""
    stored = made.compressed("llama", "FP8_DYNAMIC")
    oracle = decompressed(stored)
    round_in_parts(oracle, ranks)
    compare(stored, made.adapters("llama"), oracle, ranks)
    compare(made.dense("llama"), made.adapters("llama"), oracle, ranks, quantize=FP8)


@pytest.mark.parametrize("preset", ["FP8", "W4A16"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_formats_that_ranks_do_not_change(made: World, preset: str, ranks: int) -> None:
    """Static scales, and inputs that are not rounded: all rank counts give one rank's tokens."""
    stored = made.compressed("llama", preset)
    compare(stored, made.adapters("llama"), decompressed(stored), ranks)


@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "W4A16"])
def test_generic_models(made: World, preset: str) -> None:
    stored = made.compressed(GENERIC, preset)
    oracle = decompressed(stored)
    if preset == "FP8_DYNAMIC":
        round_in_parts(oracle, 2)
    compare(stored, made.adapters(GENERIC), oracle, 2)
