"""The folder of pushed adapters belongs to one user of the machine."""

import os
import random
import stat
from pathlib import Path

import pytest

from configs.adapters import PushConfig
from configs.wire.adapters import AdapterError
from sources.pushed import PIECE_BYTES, PushedFiles

CONFIG, WEIGHTS = b"{}", b"weights"


def files(folder: Path) -> PushedFiles:
    return PushedFiles(PushConfig(folder=str(folder), max_bytes=1 << 20), 1 << 20)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder of another user."""
    if os.getuid() != 0:
        return Path("/usr")
    folder = tmp_path / "theirs"
    (folder / "entries" / "kept").mkdir(parents=True)
    os.chown(folder, 1, 1)
    return folder


def test_each_user_has_a_folder_of_its_own_that_others_cannot_read(tmp_path: Path) -> None:
    assert "{uid}" in PushConfig().folder
    pushed = files(tmp_path / "loray-{uid}")
    digest = pushed.store_content("policy", CONFIG, WEIGHTS)
    assert pushed.content(digest) == (CONFIG, WEIGHTS)
    own = tmp_path / f"loray-{os.getuid()}"
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    pushed.release(digest, forget=True)
    pushed.clear()
    assert list(tmp_path.iterdir()) == []


def test_weights_that_arrive_in_pieces_are_those_that_arrive_at_once(tmp_path: Path) -> None:
    weights = random.Random(1).randbytes(6 * PIECE_BYTES + 5)
    pushed = PushedFiles(PushConfig(folder=str(tmp_path / "pushed")), 2 * len(weights))
    digest = pushed.store_content("policy", CONFIG, weights)
    with pushed.incoming("policy") as pieces:
        for begin, end in ((0, 1), (1, 6), (6, 7)):
            pieces.write(weights[begin * PIECE_BYTES : end * PIECE_BYTES])
        assert pieces.digest(CONFIG) == digest
    for end in (len(weights) - 1, 6 * PIECE_BYTES, 0):
        with pushed.incoming("policy") as fewer:
            fewer.write(weights[:end])
            assert fewer.digest(CONFIG) != digest
    assert pushed.content(digest) == (CONFIG, weights)


def test_a_folder_of_another_user_is_refused_and_left_alone(theirs: Path) -> None:
    pushed = files(theirs)
    with pytest.raises(AdapterError, match="belongs to another user: give this server a folder"):
        pushed.store_content("policy", CONFIG, WEIGHTS)
    assert pushed.hold("digest") is None
    before = list(theirs.iterdir())
    pushed.clear()
    assert list(theirs.iterdir()) == before


def test_clearing_a_folder_that_was_never_made_does_nothing(tmp_path: Path) -> None:
    files(tmp_path / "none").clear()
