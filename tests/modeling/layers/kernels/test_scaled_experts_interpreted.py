"""The kernels of experts in codes of 8 bits against the equation, by Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4. The interpreter does not
multiply bfloat16: x is in float32, or float16.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from configs.architectures.base import ArchitectureError
from configs.model import DType, ModelConfig
from configs.quantisation import Activations
from modeling.models.generic.fused_stored import StoredKernels, stored_kernels
from modeling.quantisation.activations import FP8, by_token
from modeling.runner.loading import load_model
from sharding.group import LoneRank
from tests.checkpoints_generic import write_generic
from tests.checkpoints_quantised import scheme_of, write_8_bits
from tests.modeling.attention.triton.test_interpreted import Interpreted
from tests.modeling.parity.comparison import engine_config
from tests.modeling.quantisation.stored_layers import scaled_weights
from tests.modeling.watched_memory import spoil_new_memory, watch_bounds

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


def rounded(
    kernel: Any, x: Tensor, scale: Tensor | None, kind: torch.dtype, experts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Round to int8 by the kernel; to fp8 by hand, as the interpreter cuts numbers there."""
    if kind is torch.int8:
        found: tuple[Tensor, Tensor] = kernel(x, scale, kind, experts)
        return found
    if experts is not None:
        assert scale is not None
        x = x.repeat_interleave(experts.numel() // len(x), 0)
        scale = scale[experts.flatten(), None]
    codes, scales = by_token(x, scale)
    return codes, scales.expand(len(x), 1).contiguous()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    stored = pytest.importorskip("modeling.layers.kernels.stored_experts")
    from modeling.layers.kernels import expert_deltas
    from modeling.quantisation.kernels import rounding

    for module, names in (
        (stored, ("_UP", "_DOWN")),
        (expert_deltas, ("_ENTER", "_ENTER_DELTAS", "_SUM", "_SUM_DELTAS")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Interpreted(getattr(module, name)._kernel))
    monkeypatch.setattr(rounding, "_token", Interpreted(rounding._by_token))
    monkeypatch.setattr(stored, "by_token", partial(rounded, rounding.by_token))
    watch_bounds(monkeypatch)
    spoil_new_memory(monkeypatch)
    return stored


@pytest.mark.parametrize("kind", [FP8, torch.int8])
@pytest.mark.parametrize("activations", [Activations.TOKEN, Activations.STATIC, Activations.NONE])
@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize(("hidden", "inner"), [(160, 96), (256, 128)])
def test_layers(
    kernels: Any, tokens: int, activations: Activations, kind: torch.dtype, hidden: int, inner: int
) -> None:
    """hidden, inner: whole chunks of 128 inputs, and not. For 5 tokens experts round alike."""
    if activations is Activations.NONE and kind is torch.int8:
        pytest.skip("no checkpoint has such")
    torch.manual_seed(tokens)
    count, active, dtype = 5, 3, torch.float16
    how: dict[str, Any] = {"device": "cpu", "dtype": dtype, "alike": tokens == 5}
    up, by_up = scaled_weights(count, (2 * inner, hidden), kind, activations, **how)
    down, by_down = scaled_weights(count, (hidden, inner), kind, activations, **how)
    assert up.rounds_by_expert == (activations is Activations.STATIC and tokens != 5)
    own = StoredKernels(up, down, kernels.Gate(), torch.zeros(count, dtype=torch.int32))
    x = torch.randn(tokens, hidden).to(dtype)
    shares, ids = torch.rand(tokens, count).softmax(-1).topk(active)
    wanted = torch.zeros(tokens, hidden)
    for token, place in ((t, p) for t in range(tokens) for p in range(active)):
        expert = int(ids[token, place])
        gate, other = by_up(x[token : token + 1].float(), expert).chunk(2, -1)
        columns = (F.silu(gate) * other).to(dtype).float()
        wanted[token] += by_down(columns, expert)[0] * shares[token, place]
    found = own(x, ids, shares)
    assert not own.counts.any()
    error = float((found.float() - wanted).norm() / wanted.norm())
    # Sums in another order round a few of the inner columns to other codes.
    assert error < 3e-3


SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
}
STATIC = {"dynamic": False, "strategy": "tensor"}


def experts_of(folder: Path, dtype: DType = DType.FLOAT32) -> Any:
    """The first layer's experts on the second of two ranks."""
    config = engine_config(folder, model=ModelConfig(id=str(folder), dtype=dtype))
    model: Any = load_model(config, LoneRank(1, 2), torch.device("cpu")).model
    (experts,) = (m for n, m in model.causal.named_modules() if n.endswith(".experts"))
    return experts


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def computed(experts: Any, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """The equation, by the reference's numbers and roundings."""
    found = torch.zeros_like(x)
    up, down = experts.gate_up_proj_stored, experts.down_proj_stored
    for token, place in ((t, p) for t in range(len(x)) for p in range(ids.shape[1])):
        expert, weight = ids[token, place : place + 1], shares[token, place]
        (own,) = up.inputs(x[token : token + 1], expert)
        gate, other = F.linear(own, experts.gate_up_proj[expert[0]]).chunk(2, -1)
        (own,) = down.inputs(F.silu(gate) * other, expert)
        found[token] += F.linear(own, experts.down_proj[expert[0]])[0] * weight
    return found


@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "FP8", "W8A8", "W8A8 static"])
@pytest.mark.usefixtures("as_gpu")
def test_checkpoints(kernels: Any, tmp_path: Path, preset: str) -> None:
    name, _, static = preset.partition(" ")
    scheme = scheme_of(name, STATIC if static else {})
    write_8_bits(
        tmp_path / "stored", write_generic(tmp_path / "dense", "qwen3_moe", **SIZES), scheme
    )
    experts = experts_of(tmp_path / "stored")
    own = stored_kernels(experts, torch.device("cpu"))
    assert own.up.rounds_by_expert == (preset in ("FP8", "W8A8 static"))
    x = torch.randn(5, 128)
    shares, ids = torch.rand(5, 4).softmax(-1).topk(2)
    wanted = computed(experts, x, ids, shares)
    assert float((own(x, ids, shares) - wanted).norm() / wanted.norm()) < 3e-3


@pytest.mark.usefixtures("as_gpu")
def test_what_kernels_do_not_take_is_refused(kernels: Any, tmp_path: Path) -> None:
    dense = write_generic(tmp_path / "dense", "qwen3_moe", **SIZES)
    write_8_bits(tmp_path / "alone", dense, scheme_of("FP8_DYNAMIC", None))
    with pytest.raises(ArchitectureError, match=r"half precision with them, not torch\.float32"):
        stored_kernels(experts_of(tmp_path / "alone"), torch.device("cpu"))
    write_8_bits(tmp_path / "apart", dense, scheme_of("FP8"), apart=True)
    with pytest.raises(ArchitectureError, match=r"gate and up have scales of their inputs"):
        stored_kernels(experts_of(tmp_path / "apart"), torch.device("cpu"))
