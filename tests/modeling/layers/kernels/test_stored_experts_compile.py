"""Experts in nvfp4 and mxfp4 become code for Hopper that does not spill; Triton needs no GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from modeling.quantisation.fp4 import MXFP4, NVFP4
from tests.modeling.layers.kernels import test_experts_compile
from tests.modeling.layers.kernels.test_experts_compile import Compiled
from tests.modeling.quantisation.kernels.test_tiled_integers_compile import stack_of

pytestmark = test_experts_compile.pytestmark

EXPERTS, ACTIVE = 4, 2


@pytest.mark.parametrize("size", [NVFP4, MXFP4])
@pytest.mark.parametrize(("hidden", "inner"), [(2048, 768), (2880, 1440)])
def test_they_compile(
    size: int, hidden: int, inner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cut, for layers of Qwen3-30B-A3B, and of inputs that are no whole chunks."""
    pytest.importorskip("triton")
    from modeling.kernels.launch import Launcher
    from modeling.layers.kernels import expert_deltas, stored_experts
    from modeling.layers.kernels.stored_weights import FP4_CUTS, Gate, StoredWeight
    from modeling.quantisation.kernels import rounding

    compiled = Compiled()
    launch = lambda own, *given: compiled(own, *given)  # noqa: E731
    monkeypatch.setattr(Launcher, "__call__", launch)
    for module in (stored_experts, expert_deltas, rounding):
        monkeypatch.setattr(module, "has_dependent_launch", lambda device: True)

    def weight(outputs: int, inputs: int) -> Any:
        chunks = -(-inputs // 128)
        codes = torch.empty(EXPERTS, chunks, outputs, 32, dtype=torch.int16)
        scales = torch.empty(EXPERTS, chunks, 32 // size, outputs, dtype=torch.int32)
        is_nvfp4 = size == NVFP4
        outer = torch.empty(EXPERTS, outputs) if is_nvfp4 else None
        own = torch.empty(EXPERTS) if is_nvfp4 else None
        return StoredWeight(codes, scales, None, (outputs, inputs), size, outer, True, own)

    up, down = weight(2 * inner, hidden), weight(hidden, inner)
    counts = torch.zeros(EXPERTS, dtype=torch.int32)
    for tokens in [cut.tokens for cut in FP4_CUTS[:-1]] + [FP4_CUTS[-2].tokens + 1]:
        x, ids = torch.empty(tokens, hidden).bfloat16(), torch.zeros(tokens, ACTIVE).long()
        shares = torch.empty(tokens, ACTIVE).bfloat16()
        stored_experts.stored_experts(x, up, down, Gate(), ids, shares, counts)
    assert {"_up", "_down", "_to_fp4"} < compiled.names
    assert not any(stack_of(code, tmp_path) for code in compiled.codes)
