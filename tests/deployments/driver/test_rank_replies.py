"""What the ranks' answers to one command amount to."""

import numpy as np
import pytest

from configs.wire.adapters import AdapterKey, AdapterRefusal, AdapterShape, FetchedAdapter
from deployments.driver import rank_replies
from deployments.driver.rank_replies import RowSums, staging_event
from deployments.rank.messages import Staged, StageFailed, StageNeedsSums
from scheduler.events import AdapterFailed

SHAPE = AdapterShape((1,), 64)


def fetched(key: int) -> FetchedAdapter:
    return FetchedAdapter(AdapterKey(key), "it", "", "digest")


def needs(rank: int, key: int, *part: float) -> StageNeedsSums:
    return StageNeedsSums(rank, AdapterKey(key), np.array(part, np.float32).tobytes())


def test_parts_are_added_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_replies, "MAX_SUMS_BYTES", 16)
    sums = RowSums()
    assert sums.given_to(fetched(1)).row_sums == b""
    for key in (1, 2):
        assert sums.add([needs(0, key, 1.0, 2.0), needs(1, key, 0.5, 0.25)])
        found = np.frombuffer(sums.given_to(fetched(key)).row_sums, np.float32)
        assert found.tolist() == [1.5, 2.25]
    assert sums.add([needs(0, 3, 1.0), needs(1, 3, 1.0)])
    assert [bool(sums.given_to(fetched(key)).row_sums) for key in (1, 2, 3)] == [False, True, True]


def test_ranks_of_different_minds_fail_the_staging() -> None:
    staged = Staged(0, AdapterKey(1), SHAPE)
    assert not RowSums().add([staged, needs(1, 1, 1.0)])
    mixed = staging_event([staged, needs(1, 1, 1.0)])
    assert isinstance(mixed, AdapterFailed)
    assert (mixed.refusal, mixed.partly) == (AdapterRefusal.UNAVAILABLE, True)
    refused = StageFailed(1, AdapterKey(1), AdapterRefusal.UNSUPPORTED, "its tensor is wrong")
    failed = staging_event([needs(0, 1, 1.0), refused])
    assert isinstance(failed, AdapterFailed)
    assert failed.message == "its tensor is wrong"
