"""Loads on their own stream, delayed on purpose: what waits for what."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs.wire.adapters import AdapterKey, FetchedAdapter
from modeling.adapters.bank import AdapterBank, BankSize
from modeling.adapters.device_copies import CopyEvent
from modeling.transfer import no_waits
from tests.modeling.adapters.lora_files import DOWN, UP, factors, write_lora

pytestmark = pytest.mark.gpu

SIZE = BankSize(pages=6, slots=3, max_rank=16, host_bytes=2**20)
A_WHILE = 200_000_000
"""Cycles that a stream sleeps: about 0.1 s, far longer than anything that is copied here."""


def fetched(folder: Path, key: int) -> FetchedAdapter:
    return FetchedAdapter(AdapterKey(key), folder.name, str(folder), str(key))


def make_bank(tmp_path: Path, size: BankSize = SIZE, count: int = 3) -> AdapterBank:
    """A bank with staged adapters 1 .. count, of two pages of one projection each."""
    bank = AdapterBank((UP, DOWN), size, torch.float32, torch.device("cuda"))
    for key in range(1, count + 1):
        folder = write_lora(tmp_path / str(key), factors(UP, [16, 16, 16], seed=key), r=16)
        bank.stage(fetched(folder, key))
    return bank


def content(tmp_path: Path, key: int) -> Tensor:
    """A of layer 0 as it must lie in an adapter's two pages: [2, 8, in]."""
    folder = tmp_path / f"own{key}"
    alone = make_bank(folder, replace(SIZE, pages=2), count=key)
    alone.load(AdapterKey(key), 0, [[0, 1], []]).wait()
    return alone.pools[0].a[:, 0].clone()


def sleep(cycles: int) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def read(bank: AdapterBank, slot: int, pages: list[int], delay: int = 0) -> Tensor:
    """What a step sees of a slot's pages; it may take a while before it looks."""
    with bank.in_use([-1, slot]):
        if delay:
            sleep(delay)
        return torch.stack([bank.pools[0].a[page, 0] for page in pages])


def passed() -> CopyEvent:
    """A mark behind all that the current stream was given."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return CopyEvent(event)


def hold_fills(bank: AdapterBank) -> None:
    """Let the next load's copies wait for a while on the device."""
    stream = bank._device_copies._stream
    assert stream is not None
    with torch.cuda.stream(stream):
        sleep(A_WHILE)


def test_a_load_waits_for_the_step_that_still_reads_its_pages(tmp_path: Path) -> None:
    bank = make_bank(tmp_path)
    first, second = content(tmp_path, 1), content(tmp_path, 2)
    bank.load(AdapterKey(1), 0, [[3, 5], []]).wait()
    old = read(bank, 0, [3, 5], A_WHILE)
    # The same pages under another slot, as when one adapter is evicted for another.
    copied = bank.load(AdapterKey(2), 1, [[5, 3], []])
    new = read(bank, 1, [5, 3])
    copied.wait()
    assert torch.equal(old, first)
    assert torch.equal(new, second)


def test_the_same_slot_may_be_loaded_again_at_once(tmp_path: Path) -> None:
    bank = make_bank(tmp_path)
    expected = [content(tmp_path, key) for key in (1, 2, 3)]
    seen = []
    for index in range(60):
        bank.load(AdapterKey(1 + index % 3), 0, [[index % 5, index % 5 + 1], []])
        seen.append(read(bank, 0, [index % 5, index % 5 + 1], 20_000 * (index % 7)))
        assert bank.page_table[0, 0].tolist() == [index % 5, index % 5 + 1]
    for index, found in enumerate(seen):
        assert torch.equal(found, expected[index % 3]), index


def test_loads_proceed_while_a_step_runs(tmp_path: Path) -> None:
    """A load into pages that no step reads neither waits for the step nor holds it up."""
    bank = make_bank(tmp_path)
    bank.load(AdapterKey(1), 0, [[0, 1], []]).wait()
    read(bank, 0, [0, 1], A_WHILE)
    step = passed()
    copied = bank.load(AdapterKey(2), 1, [[2, 3], []])
    copied.wait()
    assert not step.done, "the load waited for the step, or the thread did"
    step.wait()


def test_a_step_of_other_adapters_does_not_wait_for_a_load(tmp_path: Path) -> None:
    bank = make_bank(tmp_path)
    bank.load(AdapterKey(1), 0, [[0, 1], []]).wait()
    hold_fills(bank)
    copied = bank.load(AdapterKey(2), 1, [[2, 3], []])
    read(bank, 0, [0, 1])
    passed().wait()
    assert not copied.done
    found = read(bank, 1, [2, 3])
    assert torch.equal(found, content(tmp_path, 2)), "a step that uses it does"


def test_a_load_does_not_block_the_thread_that_launches_it(tmp_path: Path) -> None:
    bank = make_bank(tmp_path)
    bank.load(AdapterKey(1), 0, [[0, 1], []]).wait()
    read(bank, 0, [0, 1], A_WHILE)
    step = passed()
    with no_waits():
        bank.load(AdapterKey(2), 1, [[0, 1], []])
        bank.load(AdapterKey(3), 2, [[4, 5], []])
    assert not step.done, "the thread waited for the step"
    torch.cuda.synchronize()


def test_dropped_memory_is_not_rewritten_before_it_was_copied(tmp_path: Path) -> None:
    takes = make_bank(tmp_path / "other", count=1).host_bytes
    bank = make_bank(tmp_path, replace(SIZE, host_bytes=takes), count=1)
    hold_fills(bank)
    copied = bank.load(AdapterKey(1), 0, [[0, 1], []])
    bank.drop(AdapterKey(1))
    assert not copied.done
    folder = write_lora(tmp_path / "2", factors(UP, [16, 16, 16], seed=2), r=16)
    bank.stage(fetched(folder, 2))
    assert copied.done, "there was no other memory"
    assert torch.equal(read(bank, 0, [0, 1]), content(tmp_path, 1))
    bank.check()


def test_the_pool_is_pinned_until_it_is_freed(tmp_path: Path) -> None:
    bank = make_bank(tmp_path)
    staged = bank._host_cache.find(AdapterKey(1))
    run = staged.pages[0][0].a.ranges[0]
    assert run.is_pinned()
    del bank, staged
    assert not run.is_pinned()
