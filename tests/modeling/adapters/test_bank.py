from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.wire.adapters import (
    AdapterDeferred,
    AdapterError,
    AdapterKey,
    AdapterRefusal,
    FetchedAdapter,
)
from modeling.adapters.bank import AdapterBank, BankSize, page_bytes, select_columns
from modeling.adapters.peft.adapter import PeftAdapter
from modeling.adapters.projection import Projection
from modeling.adapters.stacks import LoraStack
from tests.modeling.adapters.lora_files import DOWN, UP, factors, write_lora

CPU = torch.device("cpu")
SIZE = BankSize(pages=12, slots=4, max_rank=32, host_bytes=2**20)


def fetched(folder: Path, key: int) -> FetchedAdapter:
    return FetchedAdapter(AdapterKey(key), folder.name, str(folder), f"digest {key}")


def make_bank(
    projections: tuple[Projection, ...] = (UP, DOWN),
    size: BankSize = SIZE,
    dtype: torch.dtype = torch.float32,
) -> AdapterBank:
    """A bank with NaN in its pools, as memory that another adapter left might hold."""
    bank = AdapterBank(projections, size, dtype, CPU)
    for pool in bank.pools:
        pool.a.fill_(float("nan"))
        pool.bt.fill_(float("nan"))
    return bank


def product(bank: AdapterBank, slot: int, projection: int, layer: int) -> torch.Tensor:
    """B A as the bank has it on the device: [out, in]."""
    factors = bank.loaded(slot).factors(projection, layer)
    return (factors.a @ factors.bt).t()


def expected(tensors: dict[str, torch.Tensor], module: str, scale: float) -> torch.Tensor:
    name = f"base_model.model.{module}.lora_"
    return scale * tensors[f"{name}B.weight"] @ tensors[f"{name}A.weight"]


def assert_equal(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal up to the order in which a CPU adds."""
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_the_loaded_factors_are_the_adapters(tmp_path: Path) -> None:
    ranks = {"layers.0.up": 3, "layers.1.up": 8, "layers.2.up": 20, "down": 9}
    tensors = {**factors(UP, [3, 8, 20]), **factors(DOWN, [0, 9, 0], seed=1)}
    bank = make_bank()
    shape = bank.stage(fetched(write_lora(tmp_path, tensors, rank_pattern=ranks), 1))
    assert shape.num_pages == (3, 2)
    exact = (3 + 2) * 3 * 8 * (6 + 10) * 4
    assert exact <= shape.host_bytes <= 1.1 * exact, "less than a row a chunk is lost"
    bank.load(AdapterKey(1), 2, [[9, 0, 4], [5, 6]])
    placement = bank.loaded(2)
    for layer, rank in enumerate([3, 8, 20]):
        assert placement.rank(0, layer) == rank
        found = product(bank, 2, 0, layer)
        assert_equal(found, expected(tensors, f"model.layers.{layer}.up", 8 / rank))
    assert [placement.rank(1, layer) for layer in range(3)] == [0, 9, 0]
    assert_equal(product(bank, 2, 1, 1), expected(tensors, "model.layers.1.down", 8 / 9))
    assert bank.page_table[2].tolist() == [[9, 0, 4, 0], [5, 6, 0, 0]]
    assert bank.ranks[2].tolist() == [[3, 8, 20], [0, 9, 0]]
    bank.check()


def test_only_the_named_pages_are_written(tmp_path: Path) -> None:
    bank = make_bank()
    bank.stage(fetched(write_lora(tmp_path, factors(UP, [4, 4, 4])), 1))
    bank.load(AdapterKey(1), 0, [[7], []])
    clean = [page for page in range(12) if not bool(bank.pools[0].a[page].isnan().any())]
    assert clean == [7]
    assert bool(bank.pools[1].a.isnan().all())
    # Rows beyond the true rank are zeros, so that a padded kernel may read them.
    assert not bool(bank.pools[0].a[7, :, 4:].any())
    assert not bool(bank.pools[0].bt[7, :, 4:].any())


def test_each_rank_keeps_its_own_cut(tmp_path: Path) -> None:
    tensors = {**factors(UP, [4, 4, 4]), **factors(DOWN, [4, 4, 4], seed=1)}
    folder = write_lora(tmp_path, tensors)
    # Fused and interleaved cuts: several segments, in the rank's own order.
    cuts = [((0, 2), (6, 9)), ((2, 6), (9, 10))]
    whole_down = expected(tensors, "model.layers.1.down", 2)
    summed = torch.zeros_like(whole_down)
    for cut in cuts:
        bank = make_bank((replace(UP, outputs=cut), replace(DOWN, inputs=cut)))
        bank.stage(fetched(folder, 1))
        bank.load(AdapterKey(1), 0, [[3], [1]])
        rows = [i for start, stop in cut for i in range(start, stop)]
        whole_up = expected(tensors, "model.layers.1.up", 2)
        assert_equal(product(bank, 0, 0, 1), whole_up[rows])
        assert_equal(product(bank, 0, 1, 1), whole_down[:, rows])
        summed[:, rows] += product(bank, 0, 1, 1)
    assert_equal(summed, whole_down)


def test_selected_columns_keep_the_order_of_the_segments() -> None:
    rows = torch.arange(6.0).expand(2, 6)
    assert select_columns(rows, ((4, 6), (0, 1)))[0].tolist() == [4, 5, 0]


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("stored", DTYPES)
def test_the_fold_is_done_in_float32(tmp_path: Path, stored: torch.dtype) -> None:
    tensors = {name: each.to(stored) for name, each in factors(UP, [4]).items()}
    folder = write_lora(tmp_path, tensors, r=4, lora_alpha=1e-3, use_rslora=True)
    b = tensors["base_model.model.model.layers.0.up.lora_B.weight"].float()
    for dtype in DTYPES:
        bank = make_bank(dtype=dtype)
        bank.stage(fetched(folder, 1))
        bank.load(AdapterKey(1), 0, [[0], []])
        assert torch.equal(bank.loaded(0).factors(0, 0).bt, (b * 5e-4).to(dtype).t())


def test_a_slot_and_its_pages_are_used_again(tmp_path: Path) -> None:
    bank = make_bank()
    first, second = factors(UP, [12, 12, 12]), factors(UP, [4, 4, 4], seed=9)
    bank.stage(fetched(write_lora(tmp_path / "a", first, r=12), 1))
    bank.stage(fetched(write_lora(tmp_path / "b", second), 2))
    bank.load(AdapterKey(1), 0, [[5, 6], []])
    product(bank, 0, 0, 1)
    bank.load(AdapterKey(2), 0, [[6], []])
    found = product(bank, 0, 0, 1)
    assert_equal(found, expected(second, "model.layers.1.up", 2))
    assert bank.page_table[0, 0].tolist() == [6, 0, 0, 0]


def test_host_copies_come_and_go(tmp_path: Path) -> None:
    bank = make_bank()
    folder = write_lora(tmp_path, factors(UP, [4, 4, 4]))
    shape = bank.stage(fetched(folder, 1))
    assert bank.stage(fetched(folder, 1)) == shape
    assert bank.host_bytes == shape.host_bytes
    bank.load(AdapterKey(1), 0, [[0], []])
    bank.drop(AdapterKey(1))
    bank.drop(AdapterKey(1))
    bank.drop(AdapterKey(77))
    assert bank.host_bytes == 0
    # A loaded adapter stays until its pages are loaded anew.
    assert not bool(product(bank, 0, 0, 0).isnan().any())
    with pytest.raises(AssertionError, match="never staged"):
        bank.load(AdapterKey(1), 1, [[1], []])
    bank.check()


def test_a_page_list_must_fit_the_shape(tmp_path: Path) -> None:
    bank = make_bank()
    bank.stage(fetched(write_lora(tmp_path, factors(UP, [4, 4, 4])), 1))
    with pytest.raises(AssertionError):
        bank.load(AdapterKey(1), 0, [[0, 1], []])
    with pytest.raises(AssertionError, match="before an adapter was loaded"):
        bank.loaded(0)


def test_what_can_never_fit_is_too_large(tmp_path: Path) -> None:
    folder = write_lora(tmp_path, factors(UP, [17, 17, 17]), r=17)
    pages = make_bank(size=replace(SIZE, pages=2))
    with pytest.raises(AdapterError, match="needs 3 pages of up, this server's pool has 2") as low:
        pages.stage(fetched(folder, 1))
    takes = make_bank().stage(fetched(folder, 1)).host_bytes
    host = make_bank(size=replace(SIZE, host_bytes=takes - 1))
    message = rf"takes {takes} bytes .* adapters\.host_bytes"
    with pytest.raises(AdapterError, match=message) as few:
        host.stage(fetched(folder, 1))
    for caught in (low, few):
        assert caught.value.refusal is AdapterRefusal.TOO_LARGE
    make_bank(size=replace(SIZE, host_bytes=takes)).stage(fetched(folder, 1))


def test_without_room_for_it_now_an_adapter_is_deferred_with_its_shape(tmp_path: Path) -> None:
    small = write_lora(tmp_path / "small", factors(UP, [4, 4, 4]))
    large = write_lora(tmp_path / "large", factors(UP, [17, 17, 17]), r=17)
    shape = make_bank().stage(fetched(large, 2))
    bank = make_bank(size=replace(SIZE, host_bytes=shape.host_bytes))
    bank.stage(fetched(small, 1))
    with pytest.raises(AdapterDeferred) as deferred:
        bank.stage(fetched(large, 2))
    assert deferred.value.shape == shape
    bank.check()
    bank.drop(AdapterKey(1))
    assert bank.stage(fetched(large, 2)) == shape
    bank.check()


def test_a_refused_adapter_leaves_nothing(tmp_path: Path) -> None:
    bank = make_bank()
    with pytest.raises(AdapterError):
        bank.stage(fetched(write_lora(tmp_path, factors(UP, [4]), use_dora=True), 1))
    broken = factors(UP, [4, 4, 4])
    broken["base_model.model.model.layers.2.up.lora_A.weight"][0, 0] = float("nan")
    with pytest.raises(AdapterError, match="not finite"):
        bank.stage(fetched(write_lora(tmp_path / "nan", broken), 2))
    assert bank.host_bytes == 0
    bank.check()


def test_many_threads_may_stage(tmp_path: Path) -> None:
    bank = make_bank()
    all_factors = [factors(UP, [4, 4, 4], seed=i) for i in range(12)]
    folders = [write_lora(tmp_path / str(i), f) for i, f in enumerate(all_factors)]
    jobs = [fetched(folder, 1 + i) for i, folder in enumerate(folders)] * 3
    with ThreadPoolExecutor(8) as threads:
        shapes = list(threads.map(bank.stage, jobs))
    assert len(set(shapes)) == 1
    assert bank.host_bytes == 12 * shapes[0].host_bytes
    bank.check()
    for i, tensors in enumerate(all_factors):
        bank.load(AdapterKey(1 + i), 0, [[i], []])
        assert_equal(product(bank, 0, 0, 2), expected(tensors, "model.layers.2.up", 2))


def test_what_is_dropped_while_it_is_read_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a reader hangs for so long that its adapter was given up."""
    bank = make_bank()
    read = PeftAdapter.stacks

    def drop_and_read(self: PeftAdapter, *rest: Any) -> Iterator[LoraStack]:
        bank.drop(AdapterKey(1))
        yield from read(self, *rest)

    folder = write_lora(tmp_path, factors(UP, [4, 4, 4]))
    with monkeypatch.context() as patch:
        patch.setattr(PeftAdapter, "stacks", drop_and_read)
        with pytest.raises(AdapterError, match="dropped while it was read"):
            bank.stage(fetched(folder, 1))
    assert bank.host_bytes == 0
    bank.stage(fetched(folder, 1))
    bank.check()


def test_pools_are_as_large_as_counted() -> None:
    bank = make_bank(dtype=torch.float16)
    assert bank.pool_bytes == SIZE.pages * page_bytes((UP, DOWN), torch.float16)
