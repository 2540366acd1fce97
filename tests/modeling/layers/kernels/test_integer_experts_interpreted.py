"""The kernels of experts in integers of 4 bits against the equation, by Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4. The interpreter has no
assembly: what it does is written out here. Nor does it multiply bfloat16.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from configs.architectures.base import ArchitectureError
from configs.model import DType, ModelConfig
from modeling.models.generic.fused_stored import StoredKernels, stored_kernels
from modeling.runner.loading import load_model
from sharding.group import LoneRank
from tests.checkpoints_generic import write_generic
from tests.checkpoints_integers import write_awq, write_gptq
from tests.modeling.attention.triton.test_interpreted import Interpreted
from tests.modeling.parity.comparison import engine_config
from tests.modeling.quantisation.stored_layers import integer_weights

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


def by_hand(words: Any, raised: Any, factors: Any, ASM: Any) -> Any:
    """Two numbers of a register, one by one: the bits that the text names."""
    import triton.language as tl

    text = getattr(ASM, "value", ASM)
    (shift,) = re.findall(r"shr\.u32 t, \$1, (\d+);", text)
    (bits,) = re.findall(r"lop3\.b32 t, t, 0x000f000f, 0x(\w{4})\w{4}, 0xea;", text)
    pair = "bf16x2" if factors.dtype == tl.bfloat16 else "f16x2"
    assert f"sub.{pair} $0, t, $2; mul.{pair} $0, $0, $3;" in text
    code = ((words.to(tl.int32) >> int(shift)) & 15) | int(bits, 16)
    number = code.to(tl.int16).to(factors.dtype, bitcast=True).to(tl.float32)
    return ((number - raised.to(tl.float32)) * factors.to(tl.float32)).to(factors.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_the_reference_s(dtype: torch.dtype) -> None:
    """Of every code and zero point, in the type's own arithmetic, as the registers have it."""
    module = pytest.importorskip("modeling.layers.kernels.integer_experts")
    constants = module.integer_constants(dtype)
    (bits,) = re.findall(r"0x000f000f, 0x(\w{4})\w{4}", constants["ASM0"])
    codes = torch.arange(16).short()
    raised = (codes | int(bits, 16)).view(dtype)
    for zero in range(16):
        for scale in torch.rand(50).to(dtype):
            found = (raised - torch.tensor(constants["RAISED"] + zero, dtype=dtype)) * scale
            assert torch.equal(found, (codes - zero).to(dtype) * scale)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    stored = pytest.importorskip("modeling.layers.kernels.stored_experts")
    from modeling.layers.kernels import expert_deltas, integer_experts

    for module, names in (
        (stored, ("_UP", "_DOWN")),
        (expert_deltas, ("_ENTER", "_ENTER_DELTAS", "_SUM", "_SUM_DELTAS")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, Interpreted(getattr(module, name)._kernel))
    monkeypatch.setattr(integer_experts, "made_of_words", by_hand)
    return stored


FORMS = [
    (128, False, False),
    (128, True, False),
    (64, True, False),
    (32, True, False),
    (32, False, False),
    (256, False, False),
    (1024, True, False),
    (64, True, True),
]
"""Inputs of a group, whether there are zero points, and act-order."""


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_layers(kernels: Any, tokens: int, form: tuple[int, bool, bool]) -> None:
    torch.manual_seed(tokens)
    hidden, inner, count, active = 256, 192, 5, 3
    made = [
        integer_weights(count, shape, *form, dtype=torch.float16, device="cpu")
        for shape in ((2 * inner, hidden), (hidden, inner))
    ]
    (up, up_numbers), (down, down_numbers) = made
    own = StoredKernels(up, down, kernels.Gate(), torch.zeros(count, dtype=torch.int32))
    x = torch.randn(tokens, hidden).half()
    shares, ids = torch.rand(tokens, count).softmax(-1).topk(active)
    wanted = torch.zeros(tokens, hidden)
    for pair in range(tokens * active):
        token, expert = pair // active, int(ids.flatten()[pair])
        gate, other = (up_numbers[expert] @ x[token].float()).chunk(2)
        inner_columns = (F.silu(gate) * other).half().float()
        wanted[token] += down_numbers[expert] @ inner_columns * shares.flatten()[pair]
    found = own(x, ids, shares)
    assert not own.counts.any()
    error = float((found.float() - wanted).norm() / wanted.norm())
    assert error < 1e-3


SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
}


def experts_of(folder: Path, dtype: DType = DType.FLOAT16) -> Any:
    """The first layer's experts on the second of two ranks, which may cut groups through."""
    config = engine_config(folder, model=ModelConfig(id=str(folder), dtype=dtype))
    model: Any = load_model(config, LoneRank(1, 2), torch.device("cpu")).model
    (experts,) = (m for n, m in model.causal.named_modules() if n.endswith(".experts"))
    return experts


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize(
    ("write", "how"),
    [(write_gptq, {"group": 128}), (write_awq, {"group": 32}), (write_gptq, {"group": -1})],
)
@pytest.mark.usefixtures("as_gpu")
def test_checkpoints(kernels: Any, tmp_path: Path, write: Any, how: dict[str, Any]) -> None:
    write(tmp_path / "stored", write_generic(tmp_path / "dense", "qwen3_moe", **SIZES), **how)
    experts = experts_of(tmp_path / "stored")
    own = stored_kernels(experts, torch.device("cpu"))
    x = torch.randn(5, 128).mul(0.1).half()
    shares, ids = torch.rand(5, 4).softmax(-1).topk(2)
    wanted = torch.zeros(5, 128)
    up_numbers, down_numbers = experts.gate_up_proj.float(), experts.down_proj.float()
    for token, place in ((token, place) for token in range(5) for place in range(2)):
        expert = int(ids[token, place])
        gate, other = (up_numbers[expert] @ x[token].float()).chunk(2)
        inner_columns = (F.silu(gate) * other).half().float()
        wanted[token] += down_numbers[expert] @ inner_columns * shares[token, place]
    error = float((own(x, ids, shares).float() - wanted).norm() / wanted.norm())
    assert error < 1e-3


@pytest.mark.usefixtures("as_gpu")
def test_what_kernels_do_not_take_is_refused(kernels: Any, tmp_path: Path) -> None:
    dense = write_generic(tmp_path / "dense", "qwen3_moe", **SIZES)
    write_gptq(tmp_path / "stored", dense, 16)
    with pytest.raises(ArchitectureError, match="whole in parts of 16: take another checkpoint"):
        stored_kernels(experts_of(tmp_path / "stored"), torch.device("cpu"))
    write_gptq(tmp_path / "other", dense, 32)
    with pytest.raises(ArchitectureError, match=r"half precision, not in torch\.float32"):
        stored_kernels(experts_of(tmp_path / "other", DType.FLOAT32), torch.device("cpu"))
