"""The terminal gets rank 0's progress lines, each once, from logs that grow."""

import logging
from pathlib import Path

from deployments.commands.start_lines import StartLines
from sharding.progress import Progress


def test_lines_come_once_and_whole(tmp_path: Path) -> None:
    lines = StartLines(tmp_path)
    assert list(lines.new()) == []
    log = tmp_path / "worker-1.err"
    text = "2026-11-20 11:27:06,664 INFO rank-0 weights: 2 of 8 (4.0 GB) in 4 s, about 12 s left"
    others = ["INFO rank-1 weights: 2 of 8 in 4 s", "INFO rank-0 no steps are captured: this model"]
    log.write_text("\n".join([*others, text, text[:-9]]))
    assert list(lines.new()) == ["weights: 2 of 8 (4.0 GB) in 4 s, about 12 s left"]
    with log.open("a") as file:
        file.write(
            text[-9:]
            + "\nINFO rank-0 sizes of decode steps recorded: 3 of 9 in 3 s, about 6 s left\n"
        )
    assert list(lines.new()) == [
        "weights: 2 of 8 (4.0 GB) in 4 s, about 12 s left",
        "sizes of decode steps recorded: 3 of 9 in 3 s, about 6 s left",
    ]
    assert list(lines.new()) == []


def test_what_a_rank_logs_is_what_is_looked_for(tmp_path: Path) -> None:
    times = iter([0.0, 3.0])
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("loray.progress")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        Progress("warm-up steps, with what they compile", 4, lambda: next(times)).add()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    (tmp_path / "worker-2.err").write_text(f"x INFO rank-0 {found[0]}\n")
    assert list(StartLines(tmp_path).new()) == found
