"""Products with weights in nvfp4 and mxfp4 become code for Hopper that does not spill."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modeling.quantisation.fp4 import MXFP4, NVFP4, round_fp4
from sharding.linear_weight import Fp4Scales, Operands
from tests.modeling.layers.kernels import test_experts_compile
from tests.modeling.layers.kernels.test_experts_compile import Compiled
from tests.modeling.quantisation.kernels.test_tiled_integers_compile import stack_of

pytestmark = test_experts_compile.pytestmark


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("triton")
    from modeling.quantisation.kernels import fp4_product

    stream = SimpleNamespace(cuda_stream=0)
    memory = torch.empty(1), torch.empty(1, dtype=torch.int32)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    for name, value in (("has_dependent_launch", True), ("product_memory", memory)):
        monkeypatch.setattr(fp4_product, name, lambda *given, own=value: own)
    return fp4_product


@pytest.mark.parametrize("size", [NVFP4, MXFP4])
def test_they_compile(
    kernels: Any, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each cut, for Llama-3-8B's hidden size, whose programs share inputs, and numbers made."""
    from modeling.kernels.launch import Launcher

    compiled = Compiled()
    launch = lambda own, *given: compiled(own, *given)  # noqa: E731
    monkeypatch.setattr(Launcher, "__call__", launch)
    weight = round_fp4(torch.randn(256, 4096), size, rounds=False)
    for rows in (1, 9, 17, 40):
        x = torch.empty(rows, 4096, dtype=torch.bfloat16)
        operands = Operands(x, weight.codes, fp4=Fp4Scales(weight.scales, weight.outer))
        kernels.fp4_product(operands, None, x.new_empty(rows, 256))
    kernels.dequantise_fp4(operands, x.new_empty(256, 4096))
    assert compiled.names == {"_rows", "_tiles", "_dequantise"}
    assert not any(stack_of(code, tmp_path) for code in compiled.codes)
