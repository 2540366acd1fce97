"""Products of many tokens with weights of 4 bits against the equation, by Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4. The interpreter has no
assembly: what it does is written out here. Nor does it multiply bfloat16.
"""

import os
import re
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.quantisation.integers import Groups, IntegerWeight, local_groups, round_groups
from tests.modeling.attention.triton.test_interpreted import Interpreted

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


def shift_of(ASM: Any) -> tuple[str, int]:
    text = getattr(ASM, "value", ASM)
    (shift,) = re.findall(r"shr\.u32 t, \$1, (\d+);", text)
    return text, int(shift)


def codes_by_hand(words: Any, middle: Any, factors: Any, ASM: Any) -> Any:
    """Two numbers of a register, one by one."""
    import triton.language as tl

    text, shift = shift_of(ASM)
    (bits,) = re.findall(r"lop3\.b32 t, t, 0x000f000f, 0x(\w{4})\w{4}, 0xea;", text)
    assert "sub.f16x2 $0, t, $2; mul.f16x2 $0, $0, $3;" in text
    code = ((words.to(tl.int32) >> shift) & 15) | int(bits, 16)
    number = code.to(tl.int16).to(factors.dtype, bitcast=True)
    return (number - middle).to(factors.dtype) * factors


def table_by_hand(words: Any, address: Any, factors: Any, x: Any, ASM: Any) -> Any:
    """The same of codes that stand for other numbers."""
    import triton.language as tl

    text, shift = shift_of(ASM)
    assert "mul.f32 a, a, $4; mul.f32 b, b, $5; cvt.rn.f16x2.f32 $0, b, a;" in text
    code = (words.to(tl.int32) >> shift) & 15
    at = address + code.to(tl.int64) * 4
    found = tl.load(at.to(tl.pointer_type(tl.float32), bitcast=True))
    return (found * factors).to(x.dtype.element_ty)


def address_by_hand(table: Any, factors: Any) -> Any:
    import triton.language as tl

    return table.to(tl.int64, bitcast=True) + tl.zeros(factors.shape, tl.int64)


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("modeling.quantisation.kernels.tiled_integers")
    memory = torch.full((module.MAX_SUMS,), float("nan")), torch.zeros(1024, dtype=torch.int32)
    monkeypatch.setattr(module, "_launch_tiled", Interpreted(module._tiled))
    monkeypatch.setattr(module, "made_of_codes", codes_by_hand)
    monkeypatch.setattr(module, "made_of_table", table_by_hand)
    monkeypatch.setattr(module, "address_of", address_by_hand)
    monkeypatch.setattr(module, "product_memory", lambda device, stream: memory)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return module


def symmetric(outputs: int, inputs: int) -> IntegerWeight:
    return round_groups(torch.randn(outputs, inputs).mul(0.05).half(), 4, 128)


def act_order(outputs: int, inputs: int) -> IntegerWeight:
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (outputs, inputs // 64), dtype=torch.uint8)
    scales = torch.rand(outputs, inputs // 64).mul(0.02).half()
    group_of = torch.randperm(inputs) // 64
    return IntegerWeight(codes, local_groups(scales, zeros, group_of, 0), 4, torch.float16)


def one_group(outputs: int, inputs: int) -> IntegerWeight:
    return round_groups(torch.randn(outputs, inputs).mul(0.05).half(), 4, None)


def from_table(outputs: int, inputs: int) -> IntegerWeight:
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    groups = Groups(
        torch.rand(outputs, inputs // 64).mul(0.1), None, torch.arange(inputs) // 64, 64
    )
    return IntegerWeight(codes, groups, 4, torch.float16, torch.randn(16))


FORMS = {
    "4 bits": symmetric,
    "act-order": act_order,
    "one group": one_group,
    "from a table": from_table,
}


def product(
    tiled: Any, weight: IntegerWeight, x: Tensor, bias: Tensor | None, blocks: int
) -> Tensor:
    cut = tiled.TiledCut(2**31, 32, 64, 4, 3, blocks)
    y = torch.full((len(x), weight.shape[0]), float("nan"), dtype=x.dtype)
    tiled.tiled_product(weight.operands(x), bias, y, cut)
    return y


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "outputs"), [(1, 128), (65, 200), (96, 64)])
def test_products(tiled: Any, form: str, rows: int, outputs: int) -> None:
    """Tiles that are full and that are not; outputs that no block divides."""
    torch.manual_seed(rows)
    weight = FORMS[form](outputs, 256)
    x, bias = torch.randn(rows, 256).half(), torch.linspace(-1, 1, outputs).half()
    for added in (None, bias):
        found = product(tiled, weight, x, added, 1)
        wanted = F.linear(x.float(), weight[:].float(), None if added is None else added.float())
        error = float((found.float() - wanted).norm() / wanted.norm())
        assert error < 3e-4, error


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_the_reference_s(tiled: Any, form: str) -> None:
    """To the bit: tokens with one 1 each choose a number for each output."""
    torch.manual_seed(2)
    weight = FORMS[form](96, 256)
    found = product(tiled, weight, torch.eye(256).half(), None, 1)
    assert torch.equal(found, weight[:].t())


def test_a_row_does_not_depend_on_others(tiled: Any) -> None:
    torch.manual_seed(3)
    weight = act_order(96, 256)
    x = torch.randn(70, 256).half()
    found = product(tiled, weight, x, None, 1)
    assert torch.equal(found[:40], product(tiled, weight, x[:40], None, 1))
    x[40:] = float("nan")
    assert torch.equal(found[:40], product(tiled, weight, x, None, 1)[:40])


def test_programs_share_inputs(tiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as steps of that cut need, whatever the number of rows; counters end as zeros."""
    torch.manual_seed(4)
    weight, x, bias = act_order(200, 512), torch.randn(70, 512).half(), torch.randn(200).half()
    cut = tiled.TiledCut(96, 32, 64, 4, 3, blocks=50)
    assert cut.shares(200, 8) == 4
    y = torch.full((70, 200), float("nan")).half()
    tiled.tiled_product(weight.operands(x), bias, y, cut)
    wanted = F.linear(x.float(), weight[:].float(), bias.float())
    assert float((y.float() - wanted).norm() / wanted.norm()) < 3e-4
    _, arrived = tiled.product_memory(None, None)
    assert not arrived.any()


def test_shares_fit_the_memory_of_sums() -> None:
    module = pytest.importorskip("modeling.quantisation.kernels.tiled_integers")
    for cut in (
        *chain(*module.TILED_CUTS.values()),
        module.TiledCut(4096, 64, 64, 4, 3, blocks=2**20),
    ):
        for outputs in (64, 1000, 4096, 28672):
            shares = cut.shares(outputs, 112)
            programs = -(-outputs // cut.outputs) * -(-cut.rows // cut.tile)
            assert 112 % shares == 0
            assert shares == 1 or programs <= module.MAX_BLOCKS
            assert shares == 1 or programs * shares * cut.outputs * cut.tile <= module.MAX_SUMS
