"""`loray batch` as users run it: two replicas on Ray Data, interrupted and run again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.clients import MODELS, Answers
from tests.end_to_end.serving import PATIENCE_SECONDS, ROOT, environment
from tests.end_to_end.test_clients import LONGEST, QUESTION, model_name

pytestmark = pytest.mark.ray


@pytest.mark.sweep
def test_a_batch_is_answered_by_two_replicas(tmp_path: Path, answers: Answers) -> None:
    lines = [
        {"custom_id": f"{model} {number}", "url": "/v1/chat/completions", "body": {
            "model": model_name(model), "max_tokens": LONGEST, "temperature": 0,
            "messages": [{"role": "user", "content": QUESTION}]}}
        for model in MODELS for number in range(3)
    ]  # fmt: skip
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    # What an interrupted run leaves: a line, and the beginning of another.
    target.write_text(json.dumps({"custom_id": "base 0"}) + '\n{"custom_id": "ba')
    command = [sys.executable, "-m", "deployments.cli", "batch", str(source), str(target)]
    done = subprocess.run(
        [*command, "--replicas", "2"], cwd=ROOT, env=environment(), capture_output=True,
        text=True, check=False, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{len(lines)}/{len(lines)}" in done.stderr
    first, *results = [json.loads(line) for line in target.read_text().splitlines()]
    assert first == {"custom_id": "base 0"}
    found = {
        each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"]
        for each in results
    }
    assert len(found) == len(results) == len(lines) - 1
    for id, text in found.items():
        assert text == answers[id.split()[0]][QUESTION]["chat"], id
