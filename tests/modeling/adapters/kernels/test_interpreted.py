"""The Triton kernels of adapters against the equation, on a CPU, by Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4.
"""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling.adapters.kernels.forms import Blocks, Form
from modeling.adapters.peft.tokens import NUM_DIGITS, digits_of
from modeling.adapters.product import EndAdapters, OutputSlice, TokenAdapters
from modeling.adapters.projection import ProjectionKind
from modeling.quantisation.activations import by_token, rounded_by_token
from sharding.linear_weight import DenseWeight, Operands
from tests.modeling.adapters.loaded_bank import NUM_LAYERS, Case, fill_bank, rows_of, truth
from tests.modeling.attention.triton.test_interpreted import Interpreted

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)

SHAPES = [(48, 40), (48, 24), (48, 8), (20, 24)]
CASES = [
    Case(48, (OutputSlice(0, 3), OutputSlice(1, 43), OutputSlice(2, 67)), 80),
    Case(20, (OutputSlice(3, 0),), 24),
]
CPU = torch.device("cpu")
RANKS = [8, 16, 1, 24, 5, 3, 16, 32]
FORM = Form(64, 8, 16, 4, Blocks(32, 4), Blocks(16, 4), programs=8)
SUMMED = replace(FORM, splits=1, summed=True, part=32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [[(s, 1) for s in range(-1, 8)] * 3, [(3, 9), (-1, 4), (7, 2)]])
@pytest.mark.parametrize("form", [FORM, SUMMED], ids=["few", "many"])
def test_output_rows_beside_plain_adapters_and_the_base(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: list[tuple[int, int]], form: Form
) -> None:
    pytest.importorskip("triton")
    from modeling.adapters.kernels import buffers
    from modeling.adapters.kernels.plan import TritonPlan

    monkeypatch.setattr(buffers, "Launcher", Interpreted)
    ranks = torch.tensor(RANKS)[:, None, None].repeat(1, len(SHAPES), NUM_LAYERS)
    ranks[0, :, 1] = 0
    bank = fill_bank(SHAPES, ranks, dtype, CPU, max_rank=32)
    slots, lengths = [list(column) for column in zip(*rows, strict=True)]
    of = torch.tensor([slot for slot, length in rows for _ in range(length)])
    plan: Any = TritonPlan(bank, len(of), [form])
    plan.partials.fill_(float("nan"))
    plan.update(slots, lengths)
    data = plan.batch(len(of))
    for case in CASES:
        for layer in range(NUM_LAYERS):
            x = torch.randn(len(of), case.inputs).to(dtype)
            y = torch.randn(len(of), case.outputs).to(dtype)
            expected = truth(bank, y, x, layer, case.targets, of)
            before = y.clone()
            data.add(y, x, layer, case.targets)
            torch.testing.assert_close(y.double(), expected, rtol=2e-3, atol=2e-3)
            assert torch.equal(y[of < 0], before[of < 0])


class Rounded(DenseWeight):
    """A matrix of which a launch reads numbers in fp8, as it does on a GPU."""

    is_fast_alone = True

    def operands(self, x: Tensor) -> Operands:
        codes, scales = by_token(self.matrix)
        own, own_scales = by_token(x)
        return Operands(own, codes, own_scales, scales)

    def plain(self, x: Tensor) -> Tensor:
        return rounded_by_token(x).double() @ rounded_by_token(self.matrix).double().t()


def test_base_products_of_one_launch_with_the_shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from modeling.adapters.kernels import buffers
    from modeling.adapters.kernels.plan import TritonPlan

    monkeypatch.setattr(buffers, "Launcher", Interpreted)
    ranks = torch.tensor(RANKS)[:, None, None].repeat(1, 2, NUM_LAYERS)
    bank = fill_bank([(512, 40), (512, 24)], ranks, torch.float16, CPU, max_rank=32)
    case = Case(512, (OutputSlice(0, 0), OutputSlice(1, 40)), 64)
    slots = [-1, 0, 1, 3, 1]
    plan: Any = TritonPlan(bank, len(slots))
    plan.update(slots, [1] * len(slots))
    data = plan.batch(len(slots))
    x, matrix = torch.randn(len(slots), 512).half(), (torch.randn(64, 512) / 16).half()
    rounded = Rounded(matrix)
    dense = x.double() @ matrix.double().t()
    for weight, plain in ((DenseWeight(matrix), dense), (rounded, rounded.plain(x))):
        assert data.has_product(x, weight, case.targets)
        y = torch.full((len(slots), 64), float("nan")).half()
        data.product(y, x, weight, 0, case.targets)
        data.add(y, x, 0, case.targets)
        expected = truth(bank, plain.half(), x, 0, case.targets, torch.tensor(slots))
        assert float((y.double() - expected).norm() / expected.norm()) < 2e-3
    base = plan.batch(len(slots), 0)
    assert not base.has_product(x, rounded, case.targets), "nothing joins the product"
    assert base.has_product(x, DenseWeight(matrix), case.targets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_trained_tokens_in_a_captured_step(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    pytest.importorskip("triton")
    from modeling.adapters.kernels import buffers
    from modeling.adapters.kernels.plan import TritonPlan

    monkeypatch.setattr(buffers, "Launcher", Interpreted)
    vocab, hidden = 5000, 280
    ranks = torch.tensor([0, *RANKS])[:, None, None].repeat(1, 2, NUM_LAYERS)
    kinds = {0: ProjectionKind.EMBEDDING_TOKENS, 1: ProjectionKind.HEAD_TOKENS}
    bank = fill_bank([(hidden, NUM_DIGITS)] * 2, ranks, dtype, CPU, max_rank=32, kinds=kinds)
    trained = torch.randperm(vocab)[: int(ranks.max())]
    own = {}
    for slot in range(len(ranks)):
        for at, pool in enumerate(bank.pools):
            page, row = rows_of(bank, slot, at, int(ranks[slot, at, 0]))
            pool.bt[page, 0, row] = digits_of(trained[: len(row)]).t().to(dtype)
            own[slot, at] = pool.a[page, 0, row]
    of = torch.arange(30) % 10 - 1
    plan: Any = TritonPlan(bank, len(of), [FORM])
    plan.partials.fill_(float("nan"))
    plan.update(of.tolist(), [1] * len(of))
    data = plan.batch(len(of))
    assert isinstance(data, TokenAdapters)
    assert not isinstance(data, EndAdapters)
    which = torch.randint(len(trained), of.shape)
    y, z = torch.randn(len(of), hidden).to(dtype), torch.randn(len(of), vocab + 3).to(dtype)[:, :-3]
    embedded, logits = y.clone(), z.double()
    for token, slot in enumerate(of.tolist()):
        rows, columns = own.get((slot, 0), y[:0]), own.get((slot, 1), y[:0])
        logits[token, trained[: len(columns)]] = columns.double() @ y[token].double()
        if which[token] < len(rows):
            embedded[token] = rows[which[token]]
    data.set_logits(z, y)
    data.set_embedded(y, trained[which])
    assert torch.equal(y, embedded)
    torch.testing.assert_close(z.double(), logits, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("foreign", [True, False])
def test_embedding_and_head_in_a_captured_step(
    monkeypatch: pytest.MonkeyPatch, foreign: bool
) -> None:
    pytest.importorskip("triton")
    from modeling.adapters.kernels import buffers
    from modeling.adapters.kernels.plan import TritonPlan

    monkeypatch.setattr(buffers, "Launcher", Interpreted)
    vocab, hidden = 50, 24
    ranks = torch.tensor([0, *RANKS])[:, None, None].repeat(1, 2, NUM_LAYERS)
    kinds = {0: ProjectionKind.EMBEDDING, 1: ProjectionKind.HEAD}
    shapes = [(vocab, hidden), (hidden, vocab)]
    bank = fill_bank(shapes, ranks, torch.float32, CPU, max_rank=32, kinds=kinds)
    of = torch.arange(30) % 10 - 1
    plan: Any = TritonPlan(bank, len(of), [FORM])
    plan.partials.fill_(float("nan"))
    plan.update(of.tolist(), [1] * len(of))
    data = plan.batch(len(of))
    assert isinstance(data, EndAdapters)
    ids = torch.randint(vocab, of.shape)
    others = torch.rand(len(of)) < 0.3 if foreign else None
    x = torch.nn.functional.one_hot(ids, vocab).float()
    if others is not None:
        x[others] = 0
    y, z = torch.randn(len(of), hidden), torch.randn(len(of), vocab + 3)
    expected = truth(bank, y, x, 0, (OutputSlice(0, 0),), of)
    logits = truth(bank, z, y, 0, (OutputSlice(1, 0),), of)
    data.logits(z, y.clone())
    torch.testing.assert_close(z.double(), logits, rtol=1e-4, atol=1e-4)
    data.embed(y, ids, others)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    assert not isinstance(plan.batch(len(of), 3), EndAdapters)
