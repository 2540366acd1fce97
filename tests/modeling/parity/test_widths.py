"""Feed-forwards whose width the ranks do not divide, and their adapters."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sharding.slicing import Segments, cut_width
from tests.checkpoints import write_llama, write_relative
from tests.checkpoints_others import (
    GPT2_ADAPTERS,
    GPT_NEOX_ADAPTERS,
    OPT_ADAPTERS,
    write_gpt2,
    write_gpt_neox,
    write_opt,
)
from tests.modeling.parity.comparison import (
    ADAPTERS,
    BASE,
    FAMILIES,
    FUSED_ADAPTERS,
    Family,
    Mismatch,
    Setting,
    World,
    compare,
)
from tests.sweeps import swept

HEADS: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 12}
PLAIN: dict[str, Any] = {"hidden_size": 48, "num_attention_heads": 12}

FAMILY: dict[str, tuple[Family, str]] = {
    "llama": (Family(partial(write_llama, **HEADS, intermediate_size=50), ADAPTERS), "biases"),
    "phi3": (
        Family(partial(write_relative, **HEADS, intermediate_size=50), FUSED_ADAPTERS),
        "phi3",
    ),
    "gpt2": (Family(partial(write_gpt2, n_embd=48, n_head=12, n_inner=50), GPT2_ADAPTERS), "plain"),
    "opt": (Family(partial(write_opt, **PLAIN, ffn_dim=50), OPT_ADAPTERS), "plain"),
    "gpt_neox": (
        Family(
            partial(write_gpt_neox, **PLAIN, rotary_pct=0.5, intermediate_size=50),
            GPT_NEOX_ADAPTERS,
        ),
        "parallel",
    ),
}
NAMES = {"llama": ["r8", "rows", "patterns"], "phi3": ["r8", "columns", "rows"]}


@pytest.fixture
def widths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Compare a family's adapters in one batch, on so many ranks."""

    def run(name: str, ranks: int) -> None:
        family, variant = FAMILY[name]
        monkeypatch.setitem(FAMILIES, f"{name}_width", family)
        names = NAMES.get(name, ["r8", "rows", "columns"])
        compare(World(tmp_path), Setting(f"{name}_width", variant, ranks, [BASE, *names]))

    return run


@pytest.mark.parametrize("ranks", swept([1, 2, 3, 4], lambda ranks: ranks == 3))
@pytest.mark.parametrize("name", FAMILY)
def test_any_width_is_served(widths: Callable[[str, int], None], name: str, ranks: int) -> None:
    widths(name, ranks)


def test_a_share_too_few_is_noticed(
    widths: Callable[[str, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(size: int, rank: int, ranks: int, what: str) -> Segments:
        ((first, last),) = cut_width(size, rank, ranks, what)
        return ((first, last - (rank == ranks - 1)),)

    monkeypatch.setattr("modeling.models.llama_projections.cut_width", short)
    with pytest.raises(Mismatch):
        widths("llama", 3)
