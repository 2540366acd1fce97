"""Frequencies and rotation against transformers'."""

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from configs.architectures.llama import Rope, RopeType
from modeling.layers.rotary import Rotary, inverse_frequencies, rotate

CPU = torch.device("cpu")
LLAMA3 = Rope(
    type=RopeType.LLAMA3,
    theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
ROPES = [
    Rope(),
    Rope(theta=5e5),
    Rope(type=RopeType.LINEAR, factor=4.0),
    LLAMA3,
    LLAMA3.model_copy(update={"factor": 32.0, "original_max_position_embeddings": 64}),
]


def oracle(rope: Rope, head_dim: int) -> LlamaRotaryEmbedding:
    parameters = rope.model_dump(exclude={"type", "theta"})
    config = transformers.LlamaConfig(
        head_dim=head_dim,
        rope_parameters={"rope_type": rope.type.value, "rope_theta": rope.theta, **parameters},
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: f"{rope.type}-{rope.factor}")
def test_frequencies(rope: Rope, head_dim: int) -> None:
    got = inverse_frequencies(rope, head_dim)
    torch.testing.assert_close(got, oracle(rope, head_dim).inv_freq, atol=0, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)]
)
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: f"{rope.type}-{rope.factor}")
def test_rotation_at_near_and_far_positions(
    rope: Rope, dtype: torch.dtype, tolerance: float
) -> None:
    positions = torch.tensor([0, 1, 17, 4095, 100_000])
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = Rotary(rope, 64, dtype, CPU).angles(positions)
    assert cos.dtype == sin.dtype == dtype
    want_cos, want_sin = oracle(rope, 64)(x, positions[None])
    want, _ = apply_rotary_pos_emb(x[None], x[None], want_cos, want_sin, unsqueeze_dim=2)
    torch.testing.assert_close(rotate(x, cos, sin), want[0], atol=tolerance, rtol=0)
