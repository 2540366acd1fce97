"""Files of an offline batch: checked before any engine starts, and read again to go on."""

import json
from pathlib import Path

import pytest
import typer

from deployments.commands import batch
from deployments.offline.lines import MAX_FAULTS, check_input, custom_id, done_ids
from tests.deployments.batch_runner.world import line


def test_all_wrong_lines_are_listed(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [line("a"), line("b"), line("a"), {**line("c"), "url": "/v1/adapters"}]
    source.write_text("\n".join(map(json.dumps, lines)) + "\n\nnot json")
    checked = check_input(source, 1000)
    assert checked.total == 5
    assert [(each.line, each.code) for each in checked.faults] == [
        (3, "duplicate_custom_id"), (4, "mismatched_endpoint"), (6, "invalid_json_line")
    ]  # fmt: skip
    source.write_text("x\n" * 100)
    assert len(check_input(source, 1000).faults) == MAX_FAULTS


def test_an_unfinished_line_of_the_output_is_written_again(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    assert done_ids(target) == frozenset()
    target.write_text('{"custom_id":"a"}\n{"custom_id":"b"}\n{"custom_id":"c')
    assert done_ids(target) == {"a", "b"}
    assert target.read_text() == '{"custom_id":"a"}\n{"custom_id":"b"}\n'
    assert custom_id(json.dumps(line("d"))) == "d"


@pytest.mark.parametrize("content", [None, "not json"])
def test_wrong_input_starts_nothing(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    if content is not None:
        source.write_text(content)
    with pytest.raises(typer.Exit) as ended:
        batch.run(source, tmp_path / "out.jsonl", "serve_config.yaml", {}, 1, None)
    assert ended.value.exit_code == 2
    assert "in.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
