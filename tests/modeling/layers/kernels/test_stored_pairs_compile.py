"""Experts in mxfp4, pair by pair, become code for Hopper; Triton needs no GPU for that."""

import os
from typing import Any

import pytest
import torch

from tests.modeling.layers.kernels.test_experts_compile import Compiled

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled"
)


@pytest.mark.parametrize(("hidden", "inner"), [(2880, 2880), (2880, 1440)])
def test_it_compiles(hidden: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss' layers, whole and halved."""
    pytest.importorskip("triton")
    from modeling.kernels.launch import Launcher
    from modeling.layers.kernels.stored_pairs import experts_by_pair
    from modeling.layers.kernels.stored_weights import Gate, StoredWeight

    compiled = Compiled()
    launch = lambda own, *given: compiled(own, *given)  # noqa: E731
    monkeypatch.setattr(Launcher, "__call__", launch)

    def weight(outputs: int, inputs: int) -> Any:
        chunks = -(-inputs // 128)
        codes = torch.empty(4, chunks, outputs, 32, dtype=torch.int16)
        scales = torch.empty(4, chunks, 1, outputs, dtype=torch.int32)
        bias = torch.empty(4, outputs).bfloat16()
        return StoredWeight(codes, scales, bias, (outputs, inputs), 32)

    x = torch.empty(1, hidden, dtype=torch.bfloat16)
    ids, shares = torch.zeros(1, 2).long(), torch.empty(1, 2).bfloat16()
    up, down = weight(2 * inner, hidden), weight(hidden, inner)
    experts_by_pair(x, up, down, Gate(True, 7.0, 1.702), ids, shares)
    assert compiled.names == {"up_of_pair_kernel", "down_of_token_kernel"}
