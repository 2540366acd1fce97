"""Pages of routed experts: which an adapter takes, and what lies on them when it is loaded."""

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs.wire.adapters import AdapterError, AdapterKey, AdapterRefusal
from modeling.adapters import expert_loads
from modeling.adapters.bank import PAGE_ROWS, AdapterBank, BankSize
from modeling.adapters.expert_pages import runs
from modeling.adapters.peft.folder import open_adapter
from tests.modeling.adapters.lora_files import write_lora
from tests.modeling.adapters.peft.test_experts import (
    COUNT,
    EXPERTS,
    HIDDEN,
    INNER,
    MAPS,
    NUMBERS,
)
from tests.modeling.adapters.test_bank import assert_equal, fetched, make_bank

SIZE = BankSize(pages=2, slots=2, max_rank=16, host_bytes=2**17, expert_pages=4)
SIDES = {"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER), "down_proj": (INNER, HIDDEN)}
ALL: dict[str, Sequence[int]] = {name: range(COUNT) for name in SIDES}
FEW: dict[str, Sequence[int]] = {"gate_proj": (2,), "down_proj": (0, 2)}
"""Experts of each map."""


def write(folder: Path, experts: Mapping[str, Sequence[int]], rank: int) -> Path:
    """Random factors; the last of a map's experts has none in the first layer."""
    tensors: dict[str, Tensor] = {}
    for (name, own), number in itertools.product(experts.items(), NUMBERS):
        inputs, outputs = SIDES[name]
        for expert in own[: len(own) - (number == NUMBERS[0])]:
            path = f"{EXPERTS.format(number)}.{expert}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, inputs)
            tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, rank)
    return write_lora(folder, tensors, r=rank, lora_alpha=rank)


def check_loaded(bank: AdapterBank, slot: int, folder: Path) -> None:
    """Compare the factors that the table names, and the stacks of grouped products."""
    adapter = open_adapter(folder, MAPS, SIZE.max_rank)
    wanted = {module.position: module.b @ module.a for module in adapter.read()}
    loaded = bank.loaded(slot)
    for index, projection in enumerate(MAPS[1:], start=1):
        pool = bank.pools[index].a.cpu(), bank.pools[index].bt.cpu()
        table = bank.expert_table[slot, bank.expert_maps[index]].cpu()
        own = adapter.expert_pages[index].own if index in adapter.expert_pages else ()
        assert loaded.adapts(index) == bool(own)
        for layer, expert in itertools.product(range(len(NUMBERS)), range(COUNT)):
            pages = table[expert][table[expert] >= 0].long()
            assert (len(pages) > 0) == (expert in own)
            a, bt = (part[layer, pages].flatten(0, 1) for part in pool)
            of_file = [w for at, w in wanted.items()
                       if (at.projection, at.layer) == (index, layer * COUNT + expert)]  # fmt: skip
            nothing = torch.zeros(projection.out_features, projection.in_features)
            assert_equal((a.t() @ bt).t(), of_file[0] if of_file else nothing)
            if expert in own:
                stacks = [*loaded.experts[index].at(layer)]
                at = own.index(expert)
                assert torch.equal(torch.cat([a[at] for a, _ in stacks]).cpu(), a)
                assert torch.equal(torch.cat([bt[at] for _, bt in stacks]).cpu(), bt)


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("rank", [3, 11])
@pytest.mark.parametrize("experts", [ALL, FEW])
def test_what_lies_on_the_pages(
    tmp_path: Path,
    experts: Mapping[str, Sequence[int]],
    rank: int,
    scattered: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loaded in one piece, and in several."""
    monkeypatch.setattr(expert_loads, "LOAD_BYTES", 1000 if scattered else 2**20)
    folder, bank = write(tmp_path, experts, rank), make_bank(MAPS, SIZE)
    shape = bank.stage(fetched(folder, 1))
    pages = -(-rank // PAGE_ROWS)
    own = [0, *(len(experts.get(name, ())) for name in SIDES)]
    assert shape.num_pages == tuple(pages * count for count in own)
    free = [random.Random(5).sample(range(12), 12) if scattered else range(12) for _ in MAPS]
    named = [list(all_of[:count]) for all_of, count in zip(free, shape.num_pages, strict=True)]
    bank.load(AdapterKey(1), 1, named)
    check_loaded(bank, 1, folder)
    used = [set(part) for part in named]
    for pool, taken in zip(bank.pools[1:], used[1:], strict=True):
        others = [page for page in range(12) if page not in taken]
        assert pool.a[:, others].isnan().all(), "a page of another adapter was written"
    bank.check()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("load_bytes", [1000, 2**20])
def test_loads_on_a_gpu(tmp_path: Path, load_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On neighbouring pages and on scattered ones."""
    monkeypatch.setattr(expert_loads, "LOAD_BYTES", load_bytes)
    bank = AdapterBank(MAPS, SIZE, torch.float32, torch.device("cuda"))
    free = random.Random(5).sample(range(12), 12)
    for key, experts in enumerate((ALL, FEW)):
        folder = write(tmp_path / str(key), experts, 9)
        counts = bank.stage(fetched(folder, key)).num_pages
        for slot, pages in enumerate((range(12), free)):
            loaded = bank.load(AdapterKey(key), slot, [list(pages[:count]) for count in counts])
            loaded.wait()
            check_loaded(bank, slot, folder)


def test_a_slot_s_next_adapter_leaves_nothing_in_the_table(tmp_path: Path) -> None:
    bank, folders = make_bank(MAPS, SIZE), [tmp_path / "all", tmp_path / "few"]
    for key, (folder, experts) in enumerate(zip(folders, (ALL, FEW), strict=True)):
        counts = bank.stage(fetched(write(folder, experts, 9), key)).num_pages
        bank.load(AdapterKey(key), 0, [list(range(count)) for count in counts])
    check_loaded(bank, 0, folders[1])


@pytest.mark.parametrize("rank", [8, 13])
def test_host_memory_in_pieces(tmp_path: Path, rank: int) -> None:
    """Every second one of many small adapters leaves, and a large one takes their places."""
    bank = make_bank(MAPS, SIZE)
    small = write(tmp_path / "small", {"up_proj": (0, 1)}, 3)
    for key in range(40):
        bank.stage(fetched(small, key))
    for key in range(0, 40, 2):
        bank.drop(AdapterKey(key))
    folder = write(tmp_path / "all", ALL, rank)
    counts = bank.stage(fetched(folder, 40)).num_pages
    bank.load(AdapterKey(40), 0, [list(range(count)) for count in counts])
    check_loaded(bank, 0, folder)
    staged = bank._host_cache.find(AdapterKey(40))
    matrices = [matrix for own in staged.pages for page in own for matrix in (page.a, page.bt)]
    assert max(len(matrix.ranges) for matrix in matrices) > 1


def test_memory_follows_the_experts(tmp_path: Path) -> None:
    bank = make_bank(MAPS, BankSize(2, 2, 16, 2**20, expert_pages=4))
    every = bank.stage(fetched(write(tmp_path / "all", ALL, 16), 1))
    one = bank.stage(fetched(write(tmp_path / "one", dict.fromkeys(SIDES, (0, 1)), 16), 2))
    assert sum(one.num_pages) * 3 == sum(every.num_pages) * 2
    assert one.host_bytes < every.host_bytes * 0.7


def test_too_many_pages_name_the_setting_that_suffices(tmp_path: Path) -> None:
    bank = make_bank(MAPS, BankSize(2, 2, 16, 2**20, expert_pages=1))
    assert bank.pool_pages == (2, COUNT, COUNT, COUNT)
    bank.stage(fetched(write(tmp_path / "one", {"up_proj": (1,)}, 16), 1))
    with pytest.raises(AdapterError, match=r"raise adapters\.expert_pages to 2, or") as refused:
        bank.stage(fetched(write(tmp_path / "two", ALL, 16), 2))
    assert refused.value.refusal is AdapterRefusal.TOO_LARGE


def test_runs() -> None:
    assert [*runs([])] == []
    assert [*runs([4, 5, 6, 2, 4])] == [slice(0, 3), slice(3, 4), slice(4, 5)]
