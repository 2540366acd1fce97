"""Activations rounded to 4 bits against the reference, by Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4.
"""

import os
from typing import Any

import pytest
import torch

from modeling.quantisation.fp4 import MXFP4, NVFP4, rounded
from tests.modeling.attention.triton.test_interpreted import Interpreted

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("modeling.quantisation.kernels.rounding")
    monkeypatch.setattr(module, "_fp4", Interpreted(module._to_fp4))
    monkeypatch.setattr(module, "has_dependent_launch", lambda device: False)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("size", "whole"), [(NVFP4, 437.0), (NVFP4, 3e4), (MXFP4, None)])
def test_to_fp4(rounding: Any, dtype: torch.dtype, size: int, whole: float | None) -> None:
    """Numbers between two codes, zeros, and more groups than a program has."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(5, 67 * size, generator=generator) * torch.logspace(-2, 3, 5)[:, None]
    x[1, :8] = torch.tensor([0.25, 0.75, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0])
    x[2], x[3, :size] = 0, 0
    x = x.to(dtype)
    number = None if whole is None else torch.tensor([whole])
    assert torch.equal(rounding.to_fp4(x, size, number), rounded(x, size, number))
