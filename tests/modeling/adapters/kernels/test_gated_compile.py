"""The kernel of gate and up becomes code for Hopper; Triton needs no GPU for that."""

import os
from typing import Any

import pytest
import torch

from modeling.adapters.product import OutputSlice
from tests.modeling.adapters.loaded_bank import NUM_LAYERS, fill_bank
from tests.modeling.layers.kernels.test_experts_compile import Compiled

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled"
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_it_compiles(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps with few and with many tokens; other widths are left to the expand."""
    pytest.importorskip("triton")
    from modeling.adapters.kernels import buffers
    from modeling.adapters.kernels.plan import TritonPlan
    from modeling.kernels.launch import Launcher

    compiled = Compiled()
    launch = lambda own, *given: compiled(own, *given)  # noqa: E731
    monkeypatch.setattr(Launcher, "__call__", launch)
    monkeypatch.setattr(buffers, "has_async_copies", lambda device: True)
    monkeypatch.setattr(buffers, "has_dependent_launch", lambda device: True)
    ranks = torch.full((2, 4, NUM_LAYERS), 40)
    widths = [(64, 144), (64, 144), (64, 40), (64, 40)]
    bank = fill_bank(widths, ranks, dtype, torch.device("cpu"), max_rank=64)
    plan: Any = TritonPlan(bank, 1200)
    for tokens in (600, 1200):
        data = plan.batch(tokens, plan.update([0, 1], [tokens - 7, 7]))
        x, y = torch.empty(tokens, 64, dtype=dtype), torch.empty(tokens, 288, dtype=dtype)
        assert data.gated(y, x, 0, (OutputSlice(0, 0), OutputSlice(1, 144))).shape == (tokens, 144)
        few, targets = y[:, :80].contiguous(), (OutputSlice(2, 0), OutputSlice(3, 40))
        assert data.gated(few, x, 0, targets) is None
    assert compiled.names == {"shrink_kernel", "gated_kernel"}
