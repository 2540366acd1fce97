from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.wire.adapters import AdapterKey
from modeling.adapters.bank import AdapterBank
from modeling.adapters.kernels.reference import reference_batch
from modeling.adapters.kernels.select import select_kernel
from modeling.adapters.product import OutputSlice
from modeling.adapters.projection import Projection
from tests.modeling.adapters.lora_files import UP, factors, write_lora
from tests.modeling.adapters.test_bank import fetched, make_bank

SIDE = Projection("side", "model.layers.{layer}.side", 6, 4, ((0, 6),), ((0, 4),), 3)
RANKS = [[3, 0, 8], [17, 20, 1], [1, 1, 0], [32, 8, 9]]
TARGETS = (OutputSlice(0, 2), OutputSlice(1, 12))


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> AdapterBank:
    """Four adapters of many ranks on scattered pages; the rest of the pools is NaN."""
    root = tmp_path_factory.mktemp("bank")
    bank_ = make_bank((UP, SIDE))
    pages = iter([5, 2, 9, 0, 10, 11, 1, 3, 4, 6, 7, 8])
    for slot, ranks in enumerate(RANKS):
        tensors = {**factors(UP, ranks, seed=slot), **factors(SIDE, ranks[::-1], seed=9 + slot)}
        pattern = {f"layers.{layer}.up": r for layer, r in enumerate(ranks) if r}
        pattern |= {f"layers.{layer}.side": r for layer, r in enumerate(ranks[::-1]) if r}
        folder = write_lora(root / str(slot), tensors, rank_pattern=pattern)
        shape = bank_.stage(fetched(folder, slot + 1))
        table = [next(pages) for _ in range(max(shape.num_pages))]
        bank_.load(AdapterKey(slot + 1), slot, [table[:n] for n in shape.num_pages])
    return bank_


def plain(
    bank: AdapterBank, y: torch.Tensor, x: torch.Tensor, layer: int, slots: list[int]
) -> torch.Tensor:
    """The equation of adapters/product.py, token by token, row by row, in float64."""
    result = y.double()
    for token, slot in enumerate(slots):
        for target in TARGETS if slot >= 0 else ():
            pool, rank = (
                bank.pools[target.projection],
                int(bank.ranks[slot, target.projection, layer]),
            )
            for r in range(rank):
                page = int(bank.page_table[slot, target.projection, r // 8])
                shrunk = x[token].double() @ pool.a[page, layer, r % 8].double()
                row = pool.bt[page, layer, r % 8].double()
                result[token, target.offset : target.offset + len(row)] += shrunk * row
    return result


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 4)), min_size=1, max_size=7),
    st.integers(0, 2),
)
def test_batches_follow_the_equation(
    bank: AdapterBank, rows: list[tuple[int, int]], layer: int
) -> None:
    slots, lengths = [slot for slot, _ in rows], [length for _, length in rows]
    of_token = [slot for slot, length in rows for _ in range(length)]
    generator = torch.Generator().manual_seed(len(of_token))
    x = torch.randn(len(of_token), 6, generator=generator)
    y = torch.randn(len(of_token), 17, generator=generator)
    expected = plain(bank, y, x, layer, of_token)
    before = y.clone()
    reference_batch(bank, slots, lengths).add(y, x, layer, TARGETS)
    assert torch.allclose(y.double(), expected, atol=1e-4)
    base = [i for i, slot in enumerate(of_token) if slot < 0]
    assert torch.equal(y[base], before[base])
    assert torch.equal(y[:, [0, 1, 16]], before[:, [0, 1, 16]])


def test_a_layer_that_is_not_adapted_is_not_touched(bank: AdapterBank) -> None:
    y = torch.full((2, 17), float("nan"))
    reference_batch(bank, [0], [2]).add(
        y, torch.ones(2, 6), 1, (OutputSlice(0, 0), OutputSlice(1, 10))
    )
    assert bool(y.isnan().all())
    ones = torch.ones(2, 17)
    reference_batch(bank, [0], [2]).add(ones, torch.full((2, 6), float("nan")), 1, TARGETS)
    assert torch.equal(ones, torch.ones(2, 17))


def test_an_adapter_loaded_later_is_seen(bank: AdapterBank, tmp_path: Path) -> None:
    own = make_bank((UP, SIDE))
    x = torch.ones(1, 6)
    results = []
    for key, seed in ((1, 5), (2, 6)):
        own.stage(fetched(write_lora(tmp_path / str(key), factors(UP, [4, 4, 4], seed)), key))
        own.load(AdapterKey(key), 0, [[3], []])
        y = torch.zeros(1, 10)
        reference_batch(own, [0], [1]).add(y, x, 0, (OutputSlice(0, 0),))
        results.append(y)
    assert not torch.allclose(results[0], results[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_computes_in_its_own_type(tmp_path: Path, dtype: torch.dtype) -> None:
    own = make_bank((UP,), dtype=dtype)
    own.stage(fetched(write_lora(tmp_path, factors(UP, [4, 4, 4])), 1))
    own.load(AdapterKey(1), 0, [[3]])
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    y = torch.zeros(5, 10, dtype=dtype)
    reference_batch(own, [0, -1, 0], [2, 1, 2]).add(y, x, 1, (OutputSlice(0, 0),))
    loaded = own.loaded(0).factors(0, 1)
    expected = x.double() @ loaded.a.double() @ loaded.bt.double()
    expected[2] = 0
    assert torch.allclose(y.double(), expected, atol=0.2, rtol=0.02)


def test_selection_says_why() -> None:
    choice = select_kernel(torch.device("cpu"))
    assert choice.name == "reference"
    assert choice.reason
