"""Stored experts become code for Hopper that does not spill; Triton needs no GPU for that."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from modeling.quantisation.activations import FP8
from modeling.quantisation.fp4 import MXFP4, NVFP4
from tests.modeling.layers.kernels import test_experts_compile
from tests.modeling.layers.kernels.test_experts_compile import Compiled
from tests.modeling.quantisation.kernels.test_tiled_integers_compile import stack_of

pytestmark = test_experts_compile.pytestmark

EXPERTS, ACTIVE = 4, 2


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    pytest.importorskip("triton")
    from modeling.kernels.launch import Launcher
    from modeling.layers.kernels import expert_deltas, stored_experts
    from modeling.quantisation.kernels import rounding

    found = Compiled()
    monkeypatch.setattr(Launcher, "__call__", lambda own, *given: found(own, *given))
    for module in (stored_experts, expert_deltas, rounding):
        monkeypatch.setattr(module, "has_dependent_launch", lambda device: True)
    return found


def compile_layers(
    up: Any,
    down: Any,
    dtype: torch.dtype,
    compiled: Compiled,
    folder: Path,
    deltas: Any = lambda tokens: None,
) -> None:
    """Compile each cut; no code may spill. deltas: of a step's tokens."""
    from modeling.layers.kernels.stored_experts import stored_experts
    from modeling.layers.kernels.stored_weights import Gate

    counts = torch.zeros(EXPERTS, dtype=torch.int32)
    for tokens in [cut.tokens for cut in up.cuts[:-1]] + [up.cuts[-2].tokens + 1]:
        x, ids = torch.empty(tokens, up.shape[1]).to(dtype), torch.zeros(tokens, ACTIVE).long()
        shares = torch.empty(tokens, ACTIVE).to(dtype)
        stored_experts(x, up, down, Gate(), ids, shares, counts, deltas(tokens))
    assert not any(stack_of(code, folder) for code in compiled.codes)


def deltas_of(hidden: int, inner: int, tokens: int) -> Any:
    """One layer's adapters, of two pages for each expert."""
    from modeling.kernels.pairs import PairDeltas
    from modeling.layers.kernels.expert_deltas import LayerDeltas

    sides = ((hidden, inner), (hidden, inner), (inner, hidden))
    pools = tuple(
        (torch.empty(2, 64, 8, one).bfloat16(), torch.empty(2, 64, 8, other).bfloat16())
        for one, other in sides
    )
    table = torch.zeros(4, len(pools), EXPERTS, 2, dtype=torch.int32)
    deltas = PairDeltas(torch.zeros(tokens).int(), table, pools, (0, 1, 2))
    return LayerDeltas(deltas, (0, 1), 2, 0)


@pytest.mark.parametrize("size", [NVFP4, MXFP4])
@pytest.mark.parametrize(("hidden", "inner"), [(2048, 768), (2880, 1440)])
def test_4_bits(size: int, hidden: int, inner: int, tmp_path: Path, compiled: Compiled) -> None:
    """Layers of Qwen3-30B-A3B, and of inputs that are no whole chunks."""
    from modeling.layers.kernels.stored_weights import StoredWeight

    def weight(outputs: int, inputs: int) -> Any:
        chunks = -(-inputs // 128)
        codes = torch.empty(EXPERTS, chunks, outputs, 32, dtype=torch.int16)
        scales = torch.empty(EXPERTS, chunks, 32 // size, outputs, dtype=torch.int32)
        is_nvfp4 = size == NVFP4
        outer = torch.empty(EXPERTS, outputs) if is_nvfp4 else None
        own = torch.empty(EXPERTS) if is_nvfp4 else None
        return StoredWeight(codes, scales, None, (outputs, inputs), size, outer, True, own)

    up, down = weight(2 * inner, hidden), weight(hidden, inner)
    compile_layers(up, down, torch.bfloat16, compiled, tmp_path)
    assert {"_up", "_down", "_to_fp4"} < compiled.names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [FP8, torch.int8])
@pytest.mark.parametrize("activations", ["token", "static", "none"])
@pytest.mark.parametrize(("hidden", "inner"), [(2048, 768), (4096, 3584), (2880, 1440)])
def test_8_bits(
    dtype: torch.dtype,
    kind: torch.dtype,
    activations: str,
    hidden: int,
    inner: int,
    tmp_path: Path,
    compiled: Compiled,
) -> None:
    """Also half of Mixtral's layers; the scales of static activations are each expert's."""
    from modeling.layers.kernels.stored_weights import StoredWeight

    if activations == "none" and kind is torch.int8:
        pytest.skip("no checkpoint has such")
    own = torch.empty(EXPERTS) if activations == "static" else None

    def weight(outputs: int, inputs: int) -> Any:
        codes = torch.empty(EXPERTS, outputs, inputs, dtype=kind)
        how: dict[str, Any] = {"rounds": activations != "none", "input_scales": own}
        return StoredWeight(codes, torch.empty(EXPERTS, outputs), None, (outputs, inputs), **how)

    layers = weight(2 * inner, hidden), weight(hidden, inner)
    compile_layers(*layers, dtype, compiled, tmp_path)
    if hidden == 2048 and dtype is torch.bfloat16:
        deltas = partial(deltas_of, hidden, inner)
        compile_layers(*layers, dtype, compiled, tmp_path, deltas)
        assert "sum_deltas_kernel" in compiled.names
    assert ("_by_token" in compiled.names) == (activations != "none")
    product = ".s32.s8.s8" if kind is torch.int8 else ".f32.e4m3.e4m3"
    found = any(product in text for text in compiled.texts)
    assert found == (activations != "none"), "codes are not multiplied by the tensor cores"
