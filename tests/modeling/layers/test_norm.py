"""RMSNorm against transformers', with and without the residual."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from modeling.layers.norm import RMSNorm
from sharding.checkpoint import SafetensorsCheckpoint
from sharding.group import SingleRank
from sharding.loader import Weights


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)]
)
def test_equals_transformers(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    weight = torch.rand(16) + 0.5
    save_file({"n.weight": weight}, tmp_path / "model.safetensors")
    source = SafetensorsCheckpoint(tmp_path)
    norm = RMSNorm("n", 16, 1e-5, Weights(source, SingleRank(), dtype, torch.device("cpu")))
    oracle = LlamaRMSNorm(16, eps=1e-5).to(dtype)
    oracle.weight.data.copy_(weight)
    x, residual = torch.randn(5, 16).to(dtype), torch.randn(5, 16).to(dtype)
    normed, stream = norm(x)
    assert stream is x
    torch.testing.assert_close(normed, oracle(x), atol=tolerance, rtol=0)
    normed, stream = norm(x, residual)
    assert torch.equal(stream, x + residual)
    torch.testing.assert_close(normed, oracle(x + residual), atol=tolerance, rtol=0)
