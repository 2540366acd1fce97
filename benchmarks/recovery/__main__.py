"""How fast a server is back: kills and stops, starts, scaling, cold adapters; and a soak.

    python -m benchmarks.recovery empty start kill scale zero cold              on the demo
    python -m benchmarks.recovery start --config serve_config.yaml
    python -m benchmarks.recovery soak --minutes 60

Starts `loray serve` of the config with two ingress replicas, asks each prompt once for the right
answer (greedy; the demo's answers are those of transformers + PEFT), and measures. One JSON line a
case, with what it depends on. `kill`: SIGKILL of a rank, a driver, an ingress and the HTTP front,
and SIGSTOP of a rank, under `--rate` requests a second: `back_s` is from the blow to the first
token of a request sent after it. `empty`: the start of an empty Serve application, before all else.
All other cases have one server, whose end is measured too. `scale`: to a second replica, `zero`:
from none to the first answer. `--tokens` bounds the answers of a model that never ends them. `soak`
kills a random process each 15 to 21 s on two driver replicas, and exits with 1 unless every answer
was right.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.recovery import cases
from benchmarks.recovery.empty import empty_start
from benchmarks.recovery.load import Question, rounded
from benchmarks.recovery.server import RecoveryServer, conditions, with_replicas
from benchmarks.recovery.soak import soak

CASES = ("empty", "start", "kill", "scale", "zero", "cold", "soak")
PROMPTS = ("What is the capital of France?", "Tell me about the moon.", "Tell me about lions.")


def questions_of(
    server: RecoveryServer, adapters: Sequence[str], tokens: int | None
) -> list[Question]:
    """Each prompt over the base model and each adapter, with the server's own answer."""
    found = []
    for adapter in (None, *adapters):
        for prompt in PROMPTS:
            question = Question(prompt, adapter, "", tokens)
            found.append(replace(question, answer=cases.answer(server, question)))
    return found


def wrong_answers(questions: Sequence[Question], truth: Path) -> list[str]:
    """Answers that differ from the file's, of transformers + PEFT."""
    answers = json.loads(truth.read_text())["answers"]
    return [
        f"{q.adapter}: {q.prompt}: {q.answer}"
        for q in questions
        if answers[q.adapter or "base"][q.prompt]["raw"] != q.answer
    ]


def adapters_of(server: RecoveryServer) -> list[str]:
    """The adapters that the server lists."""
    rows = httpx.get(f"{server.url}/v1/adapters", timeout=60).raise_for_status().json()["data"]
    return [row["id"] for row in rows]


def measure(
    server: RecoveryServer, parsed: argparse.Namespace, names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """All cases, on one server."""
    try:
        ready = server.start()
        if "start" in names:
            yield {"case": "start", "seconds": ready.seconds}
        names = [name for name in names if name != "start"]
        adapters = parsed.adapters or adapters_of(server)
        if set(names) <= {"cold"}:
            # Nothing is answered before: the first requests find adapters that were never seen.
            questions = [Question(PROMPTS[0], adapter, "") for adapter in adapters]
        else:
            questions = questions_of(server, adapters, parsed.tokens)
        if (
            parsed.answers is not None
            and not set(names) <= {"cold"}
            and (wrong := wrong_answers(questions, parsed.answers))
        ):
            raise SystemExit("these answers are wrong before any kill:\n" + "\n".join(wrong))
        for name in names:
            if name == "kill":
                yield from cases.kill(server, questions, parsed.rate, parsed.blows)
            elif name == "scale":
                yield from cases.scale(server)
            elif name == "zero":
                yield from cases.zero(server, questions)
            elif name == "cold":
                yield from cases.cold(server, questions)
            else:
                yield asyncio.run(soak(server, questions, parsed.rate, parsed.minutes))
    finally:
        stopped = server.stop()
    yield {"case": "stop", "seconds": rounded(stopped)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the cases that are named, in their order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--config", type=Path, default=Path("serve_config.yaml"))
    parser.add_argument("--answers", type=Path, help="a file of right answers, as the demo's")
    parser.add_argument("--adapters", nargs="*", help="default: those that the server lists")
    parser.add_argument("--tokens", type=int, help="most tokens of an answer; default: no bound")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument(
        "--blows", nargs="+", choices=cases.BLOWS, default=[*cases.BLOWS], help="of the kills"
    )
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--minutes", type=float, default=60.0, help="of the soak")
    parsed = parser.parse_args(arguments)
    config = yaml.safe_load(parsed.config.read_text())
    if parsed.answers is None and parsed.config == Path("serve_config.yaml"):
        parsed.answers = Path("configs/demo/answers.json")
    bad = False
    with tempfile.TemporaryDirectory() as folder:
        drivers = 2 if "soak" in parsed.cases else 1
        changed = with_replicas(config, drivers, ingresses=2)
        server = RecoveryServer(changed, Path(folder), parsed.port)
        if "empty" in parsed.cases:
            row = {"case": "empty", "seconds": empty_start(Path(folder), parsed.port)}
            print(json.dumps(row), flush=True)
            parsed.cases.remove("empty")
        for row in measure(server, parsed, parsed.cases):
            print(json.dumps({**row, **conditions(config)}), flush=True)
            bad |= bool(row.get("wrong") or row.get("lost") or row.get("unexpected"))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
