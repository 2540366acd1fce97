"""Adapters that are written to while a rank reads them: refused as a version, and nothing else."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.wire.adapters import AdapterError, AdapterKey, AdapterRefusal, FetchedAdapter
from modeling.adapters import host_cache as copies
from modeling.adapters.host_cache import HostAdapterCache, HostCacheSize
from modeling.adapters.merge import OpenAdapter, open_fetched
from modeling.adapters.peft import adapter as peft_adapter
from sharding import tensor_file
from sources.files import fingerprint
from tests.modeling.adapters.lora_files import DOWN, UP, factors, write_lora

SIZE = HostCacheSize((8, 8), 64, 2**22)
RANKS = [64, 64, 64]


def host_copies() -> HostAdapterCache:
    return HostAdapterCache((UP, DOWN), SIZE, torch.float32, pinned=False)


def fetched(key: int, folder: Path, root: str = "") -> FetchedAdapter:
    files = fingerprint(folder)
    return FetchedAdapter(AdapterKey(key), folder.name, str(folder), "", files, root=root)


def adapter(folder: Path) -> Path:
    return write_lora(folder, factors(UP, RANKS) | factors(DOWN, RANKS), r=64)


@pytest.mark.parametrize("whole_bytes", [2**25, 0], ids=["small file", "large file"])
@pytest.mark.parametrize("size", [0, 4096])
def test_a_file_that_is_cut_short_fails_as_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, whole_bytes: int
) -> None:
    """As `cp` and `rsync --inplace` do; of a mapped file the rank would die (SIGBUS)."""
    monkeypatch.setattr(tensor_file, "WHOLE_BYTES", whole_bytes)
    good, bad = fetched(1, adapter(tmp_path / "good")), fetched(2, adapter(tmp_path / "bad"))

    def opened(wanted: FetchedAdapter, *rest: Any) -> OpenAdapter:
        found = open_fetched(wanted, *rest)
        if wanted is bad:
            os.truncate(tmp_path / "bad" / "adapter_model.safetensors", size)
        return found

    monkeypatch.setattr(copies, "open_fetched", opened)
    tier = host_copies()
    tier.stage(good)
    with pytest.raises(AdapterError, match=r"cannot be read: .*try again") as raised:
        tier.stage(bad)
    assert raised.value.refusal is AdapterRefusal.UNAVAILABLE
    tier.drop(good.key)
    tier.stage(good)
    tier.check()


def test_a_large_file_is_written_stack_by_stack_to_the_same_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, tier = fetched(1, adapter(tmp_path / "adapter")), host_copies()
    tier.stage(wanted)
    expected = staged_numbers(tier)
    tier.drop(wanted.key)
    monkeypatch.setattr(peft_adapter, "PART_BYTES", 1)  # Each module is a part of its own.
    tier.stage(wanted)
    torch.testing.assert_close(staged_numbers(tier), expected, rtol=0, atol=0)
    tier.check()


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_memory_of_one_stack_is_used_again_for_the_next() -> None:
    code = """
import resource, torch
from modeling.adapters.host_cache import HostAdapterCache, HostCacheSize

def stack():
    return [torch.zeros(2**21, dtype=torch.uint8) for _ in range(5)]

def num_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

HostAdapterCache((), HostCacheSize((), 8, 2**20), torch.float32, pinned=False)
stack()
before = num_faults()
for _ in range(20):
    stack()
print(num_faults() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # Else it is 51,200: every page of every tensor.
    assert int(done.stdout) < 5_000


@pytest.mark.parametrize("ranks", [[8, 8, 8], [16, 16, 16], [8, 8], [4, 4, 4], [12, 12, 12]])
def test_what_no_module_writes_is_zero_whatever_was_there(tmp_path: Path, ranks: list[int]) -> None:
    tensors = factors(UP, ranks) | factors(DOWN, ranks[:1])
    wanted = fetched(1, write_lora(tmp_path / "adapter", tensors, r=ranks[0]))
    found = []
    for before in (0x00, 0xFF):  # All bits: NaN.
        tier = host_copies()
        pool = tier.pool
        whole = pool.rows(range(pool.num_chunks), 0, (1, tier.capacity_bytes), torch.uint8)
        whole.fill_(before)
        tier.stage(wanted)
        found.append(staged_numbers(tier))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def staged_numbers(tier: HostAdapterCache) -> list[torch.Tensor]:
    """All numbers of the adapter 1, page by page."""
    return [
        part.clone()
        for pages in tier.find(AdapterKey(1)).pages
        for page in pages
        for matrix in (page.a, page.bt)
        for part in matrix.ranges
    ]


def test_links_that_lead_out_of_the_folder(tmp_path: Path) -> None:
    own, other = adapter(tmp_path / "root" / "own"), adapter(tmp_path / "other")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        wanted = fetched(1, own, root=str(tmp_path / "root"))
        host_copies().stage(wanted)
        (own / name).unlink()
        (own / name).symlink_to(other / name)
        with pytest.raises(AdapterError, match=f"{name} is a link to a file outside"):
            host_copies().stage(wanted)
        (own / name).unlink()
        (own / name).write_bytes((other / name).read_bytes())
