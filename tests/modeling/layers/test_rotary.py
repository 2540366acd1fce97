"""Frequencies and rotation against transformers', every kind of rope at every length."""

from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3 import modeling_phi3

from configs.architectures.rope import POSITIONS_PER_SET, Rope, RopeType, read_rope
from configs.rope_sets import LONG, SHORT
from modeling.layers.rotary import Rotary, inverse_frequencies, rotate

CPU = torch.device("cpu")
LENGTH, BORDER = 4096, 1024
APPLY: Any = modeling_phi3.apply_rotary_pos_emb
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 1024,
    "short_factor": [1.0 + i / 50 for i in range(32)],
    "long_factor": [1.0 + i * i / 20 for i in range(32)],
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "theta": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "llama3 short": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 64},
    "yarn": YARN,
    "yarn whole": {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn factor": {**YARN, "attention_factor": 0.9, "rope_theta": 1e6},
    "yarn one step": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "longrope": LONGROPE,
    "longrope factor": {**LONGROPE, "factor": 16.0},
    "longrope attention": {**LONGROPE, "attention_factor": 1.1},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


class Oracle(NamedTuple):
    """What transformers' rotary has after a forward: frequencies, and that forward's angles."""

    frequencies: torch.Tensor
    attention_scaling: float
    cos: torch.Tensor
    sin: torch.Tensor


def ours(name: str, total: int = LENGTH) -> Rope:
    """Ours; a length that is dynamic is fixed to `total` tokens."""
    config = {"rope_theta": 10000.0, "max_position_embeddings": LENGTH}
    rope = read_rope({**config, "rope_parameters": ROPES[name]})
    if rope.type is not RopeType.DYNAMIC:
        return rope
    return rope.model_copy(update={"fixed_length": total})


def rope_set(name: str, total: int) -> int:
    return LONG if name.startswith("longrope") and total > BORDER else SHORT


def oracle(name: str, positions: torch.Tensor, dtype: torch.dtype = torch.float32) -> Oracle:
    """transformers' rotary for heads of 64 after a forward of one sequence's positions [n]."""
    config = transformers.LlamaConfig(
        head_dim=64,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": 10000.0, **ROPES[name]},
    )
    rotary: Any = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.empty(0, dtype=dtype), positions[None])
    return Oracle(rotary.inv_freq, rotary.attention_scaling, cos, sin)


@pytest.mark.parametrize("total", [512, BORDER, BORDER + 1, LENGTH, 3 * LENGTH])
@pytest.mark.parametrize("name", ROPES)
def test_frequencies(name: str, total: int) -> None:
    expected = oracle(name, torch.arange(total))
    got = inverse_frequencies(ours(name, total), 64)[rope_set(name, total)]
    torch.testing.assert_close(got, expected.frequencies, atol=0, rtol=1e-6)
    assert ours(name).attention_factor == pytest.approx(expected.attention_scaling)


@pytest.mark.parametrize("name", ["default", "linear", "llama3", "yarn", "dynamic"])
@pytest.mark.parametrize("head_dim", [8, 128])
def test_frequencies_of_other_heads(name: str, head_dim: int) -> None:
    config = transformers.LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": 10000.0, **ROPES[name]},
    )
    expected: Any = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(
        inverse_frequencies(ours(name), head_dim)[SHORT], expected, atol=0, rtol=1e-6
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 4e-2)]
)
@pytest.mark.parametrize("name", ROPES)
def test_rotation_at_near_and_far_positions(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    positions = torch.tensor([0, 1, 17, 4095, 100_000])
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    total = int(positions[-1]) + 1
    marked = positions + rope_set(name, total) * POSITIONS_PER_SET
    cos, sin, _ = Rotary(ours(name, total), 64, dtype, CPU).angles(marked)
    assert cos.dtype == sin.dtype == dtype
    expected = oracle(name, positions, dtype)
    want, _ = APPLY(x[None], x[None], expected.cos, expected.sin, unsqueeze_dim=2)
    torch.testing.assert_close(rotate(x, cos, sin), want[0], atol=tolerance, rtol=0)


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_a_part_of_each_head_is_rotated(fraction: float) -> None:
    positions = torch.tensor([0, 3, 900])
    x = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(0))
    rope = Rope(fraction=fraction)
    got = rotate(x, *Rotary(rope, 64, torch.float32, CPU).angles(positions))
    config = transformers.Phi3Config(
        hidden_size=64 * 4,
        num_attention_heads=4,
        pad_token_id=None,
        rope_parameters={"rope_theta": 10000.0, "partial_rotary_factor": fraction},
    )
    cos, sin = modeling_phi3.Phi3RotaryEmbedding(config)(x, positions[None])
    want, _ = APPLY(x[None], x[None], cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(got, want[0], atol=1e-5, rtol=0)
    assert torch.equal(got[..., rope.width(64) :], x[..., rope.width(64) :])


def test_rows_of_one_step_use_their_own_sets() -> None:
    short, long = torch.tensor([0, 5, 900]), torch.tensor([0, 5, 1500])
    marked = torch.cat((short, long + LONG * POSITIONS_PER_SET))
    cos, *_ = Rotary(ours("longrope"), 64, torch.float32, CPU).angles(marked)
    want = torch.cat([oracle("longrope", positions).cos[0] for positions in (short, long)])
    torch.testing.assert_close(cos[:, 0], want, atol=1e-5, rtol=0)
