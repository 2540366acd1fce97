"""Lines about the progress of a start: what, how much, how long is left."""

import logging
import re

import pytest

from sharding import progress
from sharding.progress import Progress, counted, timed


def test_a_line_every_two_seconds(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 1.0, 4.0, 5.0, 6.5])
    weights = Progress("weights", 8, lambda: next(times))
    with caplog.at_level(logging.INFO, "loray.progress"):
        for done in range(1, 5):
            weights.add(f"{2 * done}.0 GB")
    assert caplog.messages == [
        "weights: 2 of 8 (4.0 GB) in 4 s, about 12 s left",
        "weights: 4 of 8 (8.0 GB) in 6 s, about 6 s left",
    ]


def test_nothing_is_left_of_an_unknown_number(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 3.0])
    with caplog.at_level(logging.INFO, "loray.progress"):
        Progress("weights", None, lambda: next(times)).add()
    assert caplog.messages == ["weights: 1 in 3 s"]


def test_a_short_part_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "loray.progress"):
        assert list(counted("sizes", (3, 2, 1))) == [3, 2, 1]
    assert caplog.messages == []


def test_a_part_of_a_start_is_timed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.DEBUG, "loray.progress"):
        with timed("pools"):
            pass
        monkeypatch.setattr(progress, "SHOWN_S", 0.0)
        with timed("weights"):
            pass
    lines = [(each.levelno, each.getMessage()) for each in caplog.records]
    assert [level for level, _ in lines] == [logging.DEBUG, logging.INFO]
    assert re.fullmatch(r"start: weights: \d+\.\d\d s", lines[1][1])
