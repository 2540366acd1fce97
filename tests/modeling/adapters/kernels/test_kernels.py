"""The Triton kernels against the equation in float64: every rank, width, mix and type."""

import random
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from modeling.adapters.bank import AdapterBank
from modeling.adapters.kernels.select import select_kernel
from modeling.adapters.product import AdapterData, OutputSlice
from modeling.quantisation.base import QuantisedWeight
from modeling.quantisation.fp4 import MXFP4, NVFP4, round_fp4
from modeling.quantisation.scaled import round_rows
from sharding.linear_weight import DenseWeight, LinearWeight
from tests.modeling.adapters.loaded_bank import NUM_LAYERS, Case, fill_bank, truth
from tests.modeling.quantisation.test_cuda import INTEGERS

if TYPE_CHECKING:
    from modeling.adapters.kernels.plan import TritonPlan


SHAPES = [
    *[(1024, 4096), (1024, 128), (1024, 64)],
    *[(4096, 1024), (14336, 64), (64, 14336), (128, 64), (100, 40), (1024, 128)],
]
CASES = [
    Case(1024, (OutputSlice(0, 16), OutputSlice(1, 4112), OutputSlice(2, 4240)), 4320),
    Case(1024, (OutputSlice(0, 0), OutputSlice(2, 4096)), 4160),
    *[Case(SHAPES[p][0], (OutputSlice(p, 16),), SHAPES[p][1] + 32) for p in range(3, 7)],
    Case(100, (OutputSlice(7, 3),), 47),
]
RANKS = [1, 4, 8, 16, 24, 64, 128]
NUM_SLOTS = len(RANKS) + 2
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-5}
Rows = list[tuple[int, int]]


def mix(kind: str, num_tokens: int, longest: int) -> Rows:
    """(slot, length) of rows of up to `longest` tokens that sum to `num_tokens`."""
    draw = random.Random(num_tokens)
    weights = [1 / (1 + i) for i in range(NUM_SLOTS)]
    rows: Rows = []
    left = num_tokens
    while left:
        slot = {
            "identical": 3,
            "distinct": len(rows) % NUM_SLOTS,
            "uniform": draw.randrange(-1, NUM_SLOTS),
            "zipf": draw.choices(range(NUM_SLOTS), weights)[0],
            "skewed": draw.choice([5] * 8 + [-1, len(rows) % NUM_SLOTS]),
            "base": -1,
        }[kind]
        length = min(left, draw.randint(1, longest))
        rows.append((slot, length))
        left -= length
    return rows


def columns(rows: Rows) -> tuple[list[int], list[int]]:
    return [slot for slot, _ in rows], [length for _, length in rows]


def tokens_of(rows: Rows) -> Tensor:
    return torch.tensor([slot for slot, length in rows for _ in range(length)])


@pytest.fixture(scope="module")
def banks() -> dict[torch.dtype, AdapterBank]:
    return {}


def make_bank(banks: dict[torch.dtype, AdapterBank], dtype: torch.dtype) -> AdapterBank:
    """Slots of one rank each, then two with a rank of its own at each layer, some 0."""
    if dtype not in banks:
        generator = torch.Generator().manual_seed(1)
        shape = (NUM_SLOTS, len(SHAPES), NUM_LAYERS)
        own = torch.tensor([0, *RANKS])[torch.randint(8, shape, generator=generator)]
        one = torch.tensor(RANKS)[:, None, None].expand(-1, *shape[1:])
        ranks = torch.cat([one, own[len(RANKS) :]])
        banks[dtype] = fill_bank(SHAPES, ranks, dtype, torch.device("cuda"))
    return banks[dtype]


def make_plan(bank: AdapterBank, num_tokens: int) -> "TritonPlan":
    """A plan with NaN in its buffers."""
    from modeling.adapters.kernels.plan import TritonPlan

    plan = TritonPlan(bank, num_tokens)
    plan.partials.fill_(float("nan"))
    plan.sums.fill_(float("nan"))
    return plan


def inputs(case: Case, of: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x with NaN in the base's rows, y with NaN beside the targets' columns."""
    generator = torch.Generator("cuda").manual_seed(len(of))
    x = torch.randn(len(of), case.inputs, generator=generator, device="cuda").to(dtype)
    y = torch.randn(len(of), case.outputs, generator=generator, device="cuda").to(dtype)
    x[(of < 0).cuda()] = float("nan")
    first = case.targets[0].offset
    last = case.targets[-1].offset + SHAPES[case.targets[-1].projection][1]
    y[:, :first], y[:, last:] = float("nan"), float("nan")
    return x, y


def check(bank: AdapterBank, data: AdapterData, case: Case, of: Tensor, layer: int) -> None:
    dtype = bank.pools[0].a.dtype
    x, y = inputs(case, of, dtype)
    expected = truth(bank, y, x, layer, case.targets, of)
    before = y.clone()
    data.add(y, x, layer, case.targets)
    torch.testing.assert_close(
        y.double(), expected, rtol=TOLERANCE[dtype], atol=2e-4, equal_nan=True
    )
    base = (of < 0).cuda()
    assert torch.equal(y[base].nan_to_num(7), before[base].nan_to_num(7))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("kind", ["identical", "distinct", "uniform", "zipf", "skewed", "base"])
@pytest.mark.parametrize("longest", [1, 90], ids=["decode", "prefill"])
def test_deltas_follow_the_equation(
    banks: dict[torch.dtype, AdapterBank], dtype: torch.dtype, kind: str, longest: int
) -> None:
    bank = make_bank(banks, dtype)
    for num_tokens in (1, 3, 64, 200, 512, 777):
        rows = mix(kind, num_tokens, longest)
        plan = make_plan(bank, num_tokens + 5)
        tiles = plan.update(*columns(rows))
        for at, case in enumerate(CASES):
            # Alternately the step's own tiles, and the grid that a captured step has.
            data = plan.batch(num_tokens, tiles if at % 2 else None)
            check(bank, data, case, tokens_of(rows), at % NUM_LAYERS)


GATED = Case(1024, (OutputSlice(1, 0), OutputSlice(8, 128)), 256)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["identical", "distinct", "zipf", "skewed", "base"])
@pytest.mark.parametrize("longest", [1, 90])
def test_deltas_of_gate_and_up_beside_silu(
    banks: dict[torch.dtype, AdapterBank], dtype: torch.dtype, kind: str, longest: int
) -> None:
    bank = make_bank(banks, dtype)
    for num_tokens in (512, 513, 777, 2048):
        rows = mix(kind, num_tokens, longest)
        of = tokens_of(rows)
        plan = make_plan(bank, num_tokens + 5)
        tiles = plan.update(*columns(rows))
        for layer, captured in ((0, False), (1, True), (0, True)):
            data = plan.batch(num_tokens, None if captured else tiles)
            x, y = inputs(GATED, of, dtype)
            found = data.gated(y, x, layer, GATED.targets)
            if num_tokens == 512 or not (tiles or captured):
                assert found is None, "few tokens, or no adapter"
                continue
            assert found is not None
            gate, up = truth(bank, y, x, layer, GATED.targets, of).chunk(2, dim=1)
            expected = torch.nn.functional.silu(gate) * up
            bound = 4 * TOLERANCE[dtype]
            torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound / 4)
            again = data.gated(y, x, layer, GATED.targets)
            assert again is not None
            assert torch.equal(found, again)
            data.add(y, x, layer, GATED.targets)
            gate, up = y.double().chunk(2, dim=1)
            own = torch.nn.functional.silu(gate) * up
            # y is rounded here before silu, whose slope carries that on.
            share = torch.sigmoid(gate)
            slope = share * (1 + gate * (1 - share))
            moved = TOLERANCE[dtype] * (gate * slope * up).abs()
            assert ((found.double() - own).abs() - moved <= bound * own.abs() + 1e-3).all()
        for at, case in enumerate(CASES):
            data = plan.batch(num_tokens, tiles if at % 2 else None)
            check(bank, data, case, of, at % NUM_LAYERS)


FP4 = {"nvfp4": NVFP4, "mxfp4": MXFP4}

PRODUCT_CASES = [
    Case(1024, (OutputSlice(0, 16), OutputSlice(1, 4112), OutputSlice(2, 4240)), 4320),
    Case(4096, (OutputSlice(3, 0),), 1024),
    Case(14336, (OutputSlice(4, 0),), 64),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["identical", "distinct", "zipf", "base"])
@pytest.mark.parametrize("form", ["dense", "fp8", "4 bits", "nvfp4", "mxfp4"])
def test_the_base_product_and_the_deltas_of_one_launch(
    banks: dict[torch.dtype, AdapterBank], dtype: torch.dtype, kind: str, form: str
) -> None:
    """Adapters read x before it is rounded. nvfp4 of more than 32 tokens is multiplied alone."""
    if form in FP4 and dtype is torch.float16:
        pytest.skip("numbers of 4 bits are multiplied in bfloat16")
    bank = make_bank(banks, dtype)
    for num_tokens in (1, 5, 8, 16, 31, 64):
        rows = mix(kind, num_tokens, 1)
        of = tokens_of(rows)
        plan = make_plan(bank, 64)
        plan.update(*columns(rows))
        for at, case in enumerate(PRODUCT_CASES):
            layer = at % NUM_LAYERS
            x = torch.randn(num_tokens, case.inputs, device="cuda").to(dtype)
            matrix = (torch.randn(case.outputs, case.inputs, device="cuda") / 64).to(dtype)
            weight: LinearWeight = DenseWeight(matrix)
            if form == "fp8":
                weight = round_rows(matrix, matrix.abs().amax(1).float(), dtype)
            if form in INTEGERS:
                weight = INTEGERS[form](dtype, case.outputs, case.inputs)
            if form in FP4:
                weight = round_fp4(matrix, FP4[form], rounds=form == "nvfp4")
            inputs = weight.inputs(x) if isinstance(weight, QuantisedWeight) else x
            plain = (inputs.double() @ weight[:].double().T).to(dtype)
            found, joins = [], form != "nvfp4" or num_tokens <= 32
            for _ in range(3):  # counters and sums are left as the next launch needs them
                data = plan.batch(num_tokens)
                assert data.has_product(x, weight, case.targets) == joins
                if not joins:
                    continue
                y = torch.full_like(plain, float("nan"))
                data.product(y, x, weight, layer, case.targets)
                data.add(y, x, layer, case.targets)
                found.append(y)
            if not joins:
                continue
            expected = truth(bank, plain, x, layer, case.targets, of)
            error = (found[0].double() - expected).norm() / expected.norm()
            bound = 2 * TOLERANCE[dtype] if form == "dense" else 1e-2
            assert float(error) < bound, (num_tokens, case, float(error))
            assert torch.equal(found[0], found[1])
            assert torch.equal(found[0], found[2])


@pytest.mark.gpu
def test_steps_of_many_rows_and_float32_leave_the_base_product_to_torch(
    banks: dict[torch.dtype, AdapterBank],
) -> None:
    for dtype, num_tokens in ((torch.bfloat16, 65), (torch.float32, 4)):
        bank, case = make_bank(banks, dtype), PRODUCT_CASES[1]
        x = torch.randn(num_tokens, case.inputs, device="cuda").to(dtype)
        weight = torch.randn(case.outputs, case.inputs, device="cuda").to(dtype)
        plan = make_plan(bank, num_tokens)
        plan.update([3] * num_tokens, [1] * num_tokens)
        data = plan.batch(num_tokens)
        assert not data.has_product(x, DenseWeight(weight), case.targets)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["act-order", "from a table"])
def test_codes_with_more_than_scales_have_launches_of_their_own(
    banks: dict[torch.dtype, AdapterBank], form: str
) -> None:
    bank, case = make_bank(banks, torch.bfloat16), PRODUCT_CASES[1]
    x = torch.randn(4, case.inputs, device="cuda").to(torch.bfloat16)
    plan = make_plan(bank, 4)
    plan.update([3] * 4, [1] * 4)
    weight = INTEGERS[form](torch.bfloat16, case.outputs, case.inputs)
    assert not plan.batch(4).has_product(x, weight, case.targets)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 5, 64])
def test_steps_without_tiles_have_the_base_product_alone(
    banks: dict[torch.dtype, AdapterBank], num_tokens: int
) -> None:
    bank = make_bank(banks, torch.bfloat16)
    for case in PRODUCT_CASES:
        x = torch.randn(num_tokens, case.inputs, device="cuda").to(torch.bfloat16)
        weight = torch.randn(case.outputs, case.inputs, device="cuda").to(torch.bfloat16)
        plan = make_plan(bank, num_tokens)
        plan.update([3] * num_tokens, [1] * num_tokens)
        data = plan.batch(num_tokens, 0)
        if not data.has_product(x, DenseWeight(weight), case.targets):
            continue
        y = torch.empty(num_tokens, case.outputs, dtype=x.dtype, device="cuda")
        data.product(y, x, DenseWeight(weight), 1, case.targets)
        data.add(y, x, 1, case.targets)
        expected = x.double() @ weight.double().T
        assert float((y.double() - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.gpu
def test_one_adapter_may_have_thousands_of_tokens(
    banks: dict[torch.dtype, AdapterBank],
) -> None:
    bank = make_bank(banks, torch.bfloat16)
    rows: Rows = [(6, 1500), (-1, 700), (2, 3), *[(slot, 1) for slot in range(NUM_SLOTS)], (8, 800)]
    data = select_kernel(torch.device("cuda")).batch(bank, *columns(rows))
    for at, case in enumerate(CASES[:4]):
        check(bank, data, case, tokens_of(rows), at % NUM_LAYERS)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 16, 64, 256])
def test_a_captured_step_serves_any_mix(
    banks: dict[torch.dtype, AdapterBank], num_tokens: int
) -> None:
    bank, case = make_bank(banks, torch.bfloat16), CASES[0]
    plan = make_plan(bank, 256)
    data = plan.batch(num_tokens)
    x, start = inputs(case, torch.zeros(num_tokens), torch.bfloat16)
    y = start.clone()
    plan.update([-1] * num_tokens, [1] * num_tokens)
    data.add(y, x, 1, case.targets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.copy_(start)
        for layer in range(NUM_LAYERS):
            data.add(y, x, layer, case.targets)
    for kind in ("distinct", "base", "zipf", "identical", "skewed"):
        rows = columns(mix(kind, num_tokens, 1))
        plan.update(*rows)
        graph.replay()
        eager = start.clone()
        for layer in range(NUM_LAYERS):
            select_kernel(torch.device("cuda")).batch(bank, *rows).add(
                eager, x, layer, case.targets
            )
        assert torch.equal(y.nan_to_num(7), eager.nan_to_num(7)), kind
        if kind in ("distinct", "identical"):
            assert not torch.equal(y.nan_to_num(7), start.nan_to_num(7)), kind


@pytest.mark.gpu
def test_steps_in_flight_keep_their_own_mix(banks: dict[torch.dtype, AdapterBank]) -> None:
    bank, case = make_bank(banks, torch.bfloat16), CASES[0]
    plan = make_plan(bank, 64)
    x, start = inputs(case, torch.zeros(64), torch.bfloat16)
    mixes = [columns(mix("uniform", 64 - i % 7, 1)) for i in range(40)]
    found = []
    for slots, lengths in mixes:
        rows = (slots + [-1] * (64 - len(slots)), lengths + [1] * (64 - len(lengths)))
        plan.update(*rows)
        y = start.clone()
        plan.batch(64).add(y, x, 0, case.targets)
        found.append((rows, y))
    for rows, y in found:
        own = start.clone()
        select_kernel(torch.device("cuda")).batch(bank, *rows).add(own, x, 0, case.targets)
        assert torch.equal(y.nan_to_num(7), own.nan_to_num(7))


def test_without_triton_the_reference_serves_and_says_why() -> None:
    choice = select_kernel(torch.device("cuda"))
    if find_spec("triton") is None:
        assert choice.name == "reference"
        assert "triton" in choice.reason
        assert choice.plan is None
    else:
        assert choice.name == "triton"
        assert choice.plan is not None
