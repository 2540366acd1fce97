"""Files that others write: what is no regular file is refused at once, a changed one is noticed."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from configs import reading
from configs.reading import FileChanged, NotRegular, OutsideRoot, RegularFile, read_text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "file"
    made.write_bytes(b"0123456789")
    return made


def test_bytes_are_read_by_position(path: Path) -> None:
    with RegularFile(path) as file:
        assert file.size == 10
        assert file.read(3, 4) == b"3456"
        buffer = bytearray(2)
        file.read_into(memoryview(buffer), 8)
        assert buffer == b"89"
        file.check_unchanged()


@pytest.mark.parametrize("most", [1, 3, 100])
def test_bytes_are_read_into_several_buffers(
    path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The system may return less than a call wants, and takes so many buffers at once."""
    whole = os.preadv

    def short(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        data = bytearray(min(most, sum(map(len, buffers))))
        count = whole(descriptor, [data], offset)
        for buffer in buffers:
            part = data[: len(buffer)]
            buffer[: len(part)] = part
            del data[: len(part)]
        return count

    monkeypatch.setattr(os, "preadv", short)
    monkeypatch.setattr(reading, "_MOST_BUFFERS", 2)
    buffers = [bytearray(count) for count in (3, 0, 1, 4)]
    with RegularFile(path) as file:
        file.scatter([memoryview(buffer) for buffer in buffers], 1)
        assert buffers == [b"123", b"", b"4", b"5678"]
        os.truncate(path, 8)
        with pytest.raises(FileChanged, match="ended early"):
            file.scatter([memoryview(buffer) for buffer in buffers], 1)


def test_a_pipe_without_a_writer_blocks_no_reader(tmp_path: Path) -> None:
    """Without O_NONBLOCK this test would never end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(NotRegular, match="no regular file"):
            RegularFile(path)


def test_refused_files_are_closed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(NotRegular):
            RegularFile(tmp_path / "pipe")
    assert os.listdir("/proc/self/fd") == before


def test_a_file_that_is_cut_short_while_it_is_read(path: Path) -> None:
    file = RegularFile(path)
    os.truncate(path, 5)
    assert file.read(0, 5) == b"01234"
    with pytest.raises(FileChanged, match="ended early"):
        file.read(0, 10)
    with pytest.raises(FileChanged, match="was changed"):
        file.check_unchanged()


def test_a_file_that_is_written_over_in_place(path: Path) -> None:
    file = RegularFile(path)
    with path.open("r+b") as other:
        other.write(b"abc")
    os.utime(path, ns=(0, 1))
    with pytest.raises(FileChanged, match="was changed"):
        file.check_unchanged()


def test_a_file_that_is_replaced_stays_as_it_was(path: Path) -> None:
    file = RegularFile(path)
    path.with_name("new").write_bytes(b"new")
    path.with_name("new").rename(path)
    assert file.read(0, 10) == b"0123456789"
    file.check_unchanged()


def test_links_are_judged_by_what_was_opened(tmp_path: Path, path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "own").write_bytes(b"own")
    (root / "inside").symlink_to(root / "own")
    (root / "outside").symlink_to(path)
    assert RegularFile(root / "inside", root).read(0, 3) == b"own"
    with pytest.raises(OutsideRoot, match="outside is a link to a file outside"):
        RegularFile(root / "outside", root)


def test_small_texts_have_a_bound(path: Path) -> None:
    assert read_text(path, 10) == "0123456789"
    with pytest.raises(ValueError, match="10 bytes, more than 9"):
        read_text(path, 9)
