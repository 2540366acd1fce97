"""The kernels of experts in nvfp4 and mxfp4 against the equation, by Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4. The interpreter has no
assembly: what it does is written out. Nor does it multiply bfloat16: x is in float32.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from configs.architectures.base import ArchitectureError
from configs.model import DType, ModelConfig
from modeling.models.generic.fused_stored import StoredKernels, stored_kernels
from modeling.quantisation.fp4 import MXFP4, NVFP4
from modeling.runner.loading import load_model
from sharding.group import LoneRank
from tests.checkpoints_generic import write_generic
from tests.checkpoints_quantised import write_fp4
from tests.modeling.attention.triton.test_interpreted import Interpreted
from tests.modeling.layers.kernels.test_stored_pairs_interpreted import by_hand
from tests.modeling.parity.comparison import engine_config
from tests.modeling.quantisation.stored_layers import fp4_weights, inputs_of

triton, tl = (pytest.importorskip(name) for name in ("triton", "triton.language"))
fp4_tiles = pytest.importorskip("modeling.kernels.fp4_tiles")

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


@triton.jit  # type: ignore[untyped-decorator]
def _factors(scales: Any, out: Any, QUARTER: Any) -> None:
    at = tl.arange(0, 128)
    found = fp4_tiles.factors_of(tl.load(scales + at), QUARTER, True, 8)
    tl.store(out + at, found)


def test_factors_are_the_scales() -> None:
    """All numbers of e4m3 that are not negative, at each quarter."""
    numbers = torch.arange(128, dtype=torch.uint8)
    wanted = numbers.view(torch.float8_e4m3fn).float()[:127] * 2.0**118
    for quarter in range(4):
        words = torch.full((128,), 0x7F7F7F7F, dtype=torch.int32)
        words.view(torch.uint8).view(128, 4)[:, quarter] = numbers
        found = torch.empty(128, dtype=torch.int32)
        _factors[(1,)](words, found, QUARTER=quarter)
        low, high = found.view(torch.bfloat16).view(128, 2).float().unbind(1)
        assert torch.equal(low, high)
        assert torch.equal(low[:127], wanted)


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
    monkeypatch.setattr(rounding, "_fp4", Interpreted(rounding._to_fp4))
    monkeypatch.setattr(fp4_tiles, "made_of_codes", by_hand)
    # mxfp4 of weights alone, pair by pair: test_stored_pairs_interpreted.py.
    monkeypatch.setattr(stored, "FEW_TOKENS", 0)
    return stored


def wanted_of(x: Tensor, ids: Tensor, shares: Tensor, up: Any, down: Any, made: Any) -> Tensor:
    """The equation; made: the numbers of up and down."""
    found = torch.zeros_like(x)
    for token, place in ((t, p) for t in range(len(x)) for p in range(ids.shape[1])):
        expert = int(ids[token, place])
        own = inputs_of(up, x[token : token + 1], expert)
        gate, other = (own @ made[0][expert].T).chunk(2, -1)
        inner = inputs_of(down, F.silu(gate) * other, expert)
        found[token] += (inner @ made[1][expert].T)[0] * shares[token, place]
    return found


@pytest.mark.parametrize("size", [NVFP4, MXFP4])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize(("hidden", "inner"), [(160, 96), (256, 64)])
def test_layers(
    kernels: Any, tokens: int, rounds: bool, size: int, hidden: int, inner: int
) -> None:
    """hidden, inner: whole chunks of 128 inputs, and not. For 5 tokens experts round alike."""
    torch.manual_seed(tokens)
    count, active = 5, 3
    up, up_numbers = fp4_weights(count, (2 * inner, hidden), size, rounds, "cpu", tokens == 5)
    down, down_numbers = fp4_weights(count, (hidden, inner), size, rounds, "cpu", tokens == 5)
    own = StoredKernels(up, down, kernels.Gate(), torch.zeros(count, dtype=torch.int32))
    x = torch.randn(tokens, hidden)
    shares, ids = torch.rand(tokens, count).softmax(-1).topk(active)
    wanted = wanted_of(x, ids, shares, up, down, (up_numbers, down_numbers))
    found = own(x, ids, shares)
    assert not own.counts.any()
    error = float((found - wanted).norm() / wanted.norm())
    # Sums in another order round a few of the inner columns to other codes.
    assert error < (1e-2 if rounds else 1e-6)


SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
}


def experts_of(folder: Path, dtype: DType = DType.BFLOAT16) -> Any:
    """The first layer's experts on the second of two ranks."""
    config = engine_config(folder, model=ModelConfig(id=str(folder), dtype=dtype))
    model: Any = load_model(config, LoneRank(1, 2), torch.device("cpu")).model
    (experts,) = (m for n, m in model.causal.named_modules() if n.endswith(".experts"))
    return experts


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize("preset", ["NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16"])
@pytest.mark.usefixtures("as_gpu")
def test_checkpoints(kernels: Any, tmp_path: Path, preset: str) -> None:
    write_fp4(tmp_path / "stored", write_generic(tmp_path / "dense", "qwen3_moe", **SIZES), preset)
    experts = experts_of(tmp_path / "stored")
    for stored in (experts.gate_up_proj_stored, experts.down_proj_stored):
        if stored.outer is not None:
            # Powers of two, so that the reference need not round its numbers, as kernels do not.
            stored.outer.data = torch.exp2(stored.outer.data.log2().round())
    own = stored_kernels(experts, torch.device("cpu"))
    x = torch.randn(5, 128)
    shares, ids = torch.rand(5, 4).softmax(-1).topk(2)
    made = experts.gate_up_proj.float(), experts.down_proj.float()
    wanted = wanted_of(x, ids, shares, own.up, own.down, made)
    assert own.up.rounds == (not preset.endswith("A16"))
    error = float((own(x, ids, shares) - wanted).norm() / wanted.norm())
    assert error < (1e-2 if own.up.rounds else 1e-6)


@pytest.mark.usefixtures("as_gpu")
def test_what_kernels_do_not_take_is_refused(kernels: Any, tmp_path: Path) -> None:
    dense = write_generic(tmp_path / "dense", "qwen3_moe", **SIZES)
    write_fp4(tmp_path / "stored", dense, "NVFP4A16")
    with pytest.raises(ArchitectureError, match=r"in nvfp4: GPUs multiply them in bfloat16"):
        stored_kernels(experts_of(tmp_path / "stored", DType.FLOAT16), torch.device("cpu"))
    write_fp4(tmp_path / "apart", dense, "NVFP4", apart=True)
    with pytest.raises(ArchitectureError, match=r"gate and up have scales of their inputs"):
        stored_kernels(experts_of(tmp_path / "apart"), torch.device("cpu"))
