"""The disk cache: bounded, in the order of last use, shared by processes, nothing left behind."""

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sources.cache import CacheFull, DiskCache

ROOT = Path(__file__).resolve().parents[2]


def writer(num_bytes: int) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "weights").write_bytes(b"x" * num_bytes)

    return write


def entries(cache: DiskCache) -> list[str]:
    return sorted(path.name for path in (cache._folder / "entries").iterdir())


def add(cache: DiskCache, name: str, num_bytes: int, used_at: int) -> Path:
    """An entry that is not held, with this time of last use."""
    folder = cache.store(name, num_bytes, writer(num_bytes))
    cache.release(name)
    os.utime(folder, (used_at, used_at))
    return folder


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    first, second, third = (add(cache, name, 30, at) for at, name in enumerate("abc"))
    assert cache.hold("a") == first  # a use makes it young
    cache.release("a")
    cache.store("d", 30, writer(30))
    assert first.exists()
    assert not second.exists()
    assert third.exists()
    assert cache.hold("b") is None
    cache.check()


def test_what_is_in_use_stays_and_the_newcomer_is_refused(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    held = [cache.store(name, 40, writer(40)) for name in "ab"]
    with pytest.raises(CacheFull, match="in use"):
        cache.store("c", 40, writer(40))
    assert all(folder.exists() for folder in held)
    assert not list(tmp_path.glob("partial/*"))
    cache.release("a")
    cache.store("c", 40, writer(40))
    assert [folder.exists() for folder in held] == [False, True]
    cache.check()


def test_an_entry_over_the_limit_evicts_nothing(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 100)
    kept = add(cache, "a", 90, 0)
    with pytest.raises(CacheFull, match="cache_bytes"):
        cache.store("b", 101, writer(101))
    assert kept.exists()
    assert not list(tmp_path.glob("partial/*"))


@contextmanager
def small_files() -> Iterator[None]:
    """A disk that is full for any file over 1 KiB; not a fixture, for pytest writes files too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1 << 20)
    with small_files(), pytest.raises(CacheFull, match="disk is full"):
        cache.store("a", 4096, writer(4096))
    assert not list(tmp_path.glob("*/*"))
    cache.store("b", 100, writer(100))
    cache.release("b")
    cache.check()


def test_a_partial_entry_is_kept_for_the_next_try_until_room_is_needed(
    tmp_path: Path,
) -> None:
    cache = DiskCache(tmp_path, 100)

    def broken(folder: Path) -> None:
        writer(60)(folder)
        raise ConnectionResetError

    def resumed(folder: Path) -> None:
        assert (folder / "weights").stat().st_size == 60

    with pytest.raises(ConnectionResetError):
        cache.store("a", 60, broken)
    cache.store("a", 60, resumed)
    cache.release("a")
    with pytest.raises(ConnectionResetError):
        cache.store("b", 40, broken)
    cache.store("c", 40, writer(40))
    assert not list(tmp_path.glob("partial/*"))
    assert len(entries(cache)) == 2
    cache.check()


def test_partial_entries_that_were_never_resumed_are_deleted(tmp_path: Path) -> None:
    for name in ("partial/old", "trash/rest"):
        (tmp_path / name).mkdir(parents=True)
        os.utime(tmp_path / name, (1, 1))
    cache = DiskCache(tmp_path, 100)
    cache.store("a", 10, writer(10))
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.glob("[pt]*/*")] == []
    cache.release("a")
    cache.check()


def test_many_threads_write_an_entry_once(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 1000)
    filled: list[Path] = []

    def slow(folder: Path) -> None:
        filled.append(folder)
        writer(10)(folder)

    threads = [threading.Thread(target=cache.store, args=("a", 10, slow)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(filled) == 1
    for _ in threads:
        cache.release("a")
    cache.check()
    assert not list(tmp_path.glob("partial/*"))


def test_a_partial_entry_may_become_an_entry_while_its_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache(tmp_path, 1000)
    make, others = os.mkdir, [DiskCache(tmp_path, 1000)]

    def overtaken(path: Path, mode: int = 0o777) -> None:
        if Path(path).parent.name == "partial" and others:
            others.pop().store("a", 10, writer(10))  # It was there, and is an entry now.
            raise FileExistsError(path)
        make(path, mode)

    monkeypatch.setattr(os, "mkdir", overtaken)
    folder = cache.store("a", 10, writer(20))
    assert (folder / "weights").stat().st_size == 10
    assert not list(tmp_path.glob("partial/*"))


def test_another_process_keeps_what_it_uses(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom sources.cache import DiskCache\n"
        f"assert DiskCache(Path({str(tmp_path)!r}), 100).hold('a')\n"
        "print('held', flush=True)\nsys.stdin.read()\n"
    )
    cache = DiskCache(tmp_path, 100)
    kept = add(cache, "a", 60, 0)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(CacheFull, match="in use"):
            cache.store("b", 60, writer(60))
        assert kept.exists()
        other.kill()
    cache.store("b", 60, writer(60))
    assert not kept.exists(), "a process that is gone uses nothing"
